// The page of a run: a heat map of sites by steps, each site's curve, alerts, and one site large.

(() => {
  if (!byId("curves")) return;

  const data = JSON.parse(byId("data").textContent);
  const body = byId("curves").tBodies[0];
  const head = byId("curves").tHead.rows[0];
  const served = state !== undefined;

  // What the server has sent. A column has its steps and, for each site, the last number of these
  // steps, the least and the greatest.
  let sites = [];
  let names = [];
  let columns = [];
  let stride = 0;
  let now = new Float32Array();
  let status = { n_steps: -1 };
  let arrived = Date.now(); // when the status came
  let flags = new Map(); // the alerts of a site, by its index

  const address = new URLSearchParams(served ? location.search : "");
  const choice = {
    number: address.get("number") ?? "",
    kind: address.get("kind") ?? "",
    scale: address.get("scale") === "all" ? "all" : "row",
    order: address.get("order") === "last" ? "last" : "model",
    query: address.get("q") ?? "",
  };
  let drawnNumber = ""; // the number that the columns hold; another may have been chosen since
  let version = 0; // of the drawing: rows out of view are drawn when they come into view
  let rows = [];
  const inView = new Set();

  // -- numbers -------------------------------------------------------------------------------

  function bytes(text) {
    const chars = atob(text);
    const found = new Uint8Array(chars.length);
    for (let k = 0; k < chars.length; k++) found[k] = chars.charCodeAt(k);
    return found;
  }
  const floats = (text) => new Float32Array(bytes(text).buffer);
  const isNumber = (number) => number !== undefined && !Number.isNaN(number);
  const LARGEST = 3.4028e38; // greater numbers than float32 holds came as its greatest
  const format = (number) => {
    if (!isNumber(number)) return "–";
    const size = Math.abs(number);
    if (size > LARGEST) return number < 0 ? "< -3.4e38" : "> 3.4e38";
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return number.toExponential(2).replace("e+", "e");
    return Number.isInteger(number) ? number.toLocaleString("en") : String(Number(number.toPrecision(4)));
  };
  const tickText = (number) => number !== 0 && (Math.abs(number) < 1e-3 || Math.abs(number) >= 1e6) ? number.toExponential().replace("e+", "e") : format(number);
  const steps = (column) => column.first === column.last ? `step ${column.first.toLocaleString("en")}` : `steps ${column.first.toLocaleString("en")} to ${column.last.toLocaleString("en")}`;
  const extreme = (column, k) => Math.abs(column.low[k]) > Math.abs(column.high[k]) ? column.low[k] : column.high[k];
  const latest = (name, k) => now[names.findIndex(([one]) => one === name) * sites.length + k];

  function take(answer) {
    status = answer;
    arrived = Date.now();
    if (answer.logged) showLogged(answer.logged);
    if (answer.firsts === undefined) return false;
    if (answer.sites) {
      sites = answer.sites.map(([path, tail, port]) => ({ path, tail, port, text: `${path}${tail ? `:${tail}` : ""}`.toLowerCase() }));
      names = answer.names;
    }
    drawnNumber = answer.number;
    stride = answer.stride;
    columns.length = answer.from;
    const [last, low, high] = answer.values.map(floats);
    const bad = bytes(answer.bad);
    answer.firsts.forEach((first, k) => {
      const part = (array) => array.subarray(k * sites.length, (k + 1) * sites.length);
      columns.push({ first, last: answer.lasts[k], at: part(last), low: part(low ?? last), high: part(high ?? last), bad: part(bad) });
    });
    now = floats(answer.now);
    measure();
    showAlerts(answer.alerts);
    return true;
  }

  function takeOfFile(number) {
    take({ ...data, number, values: data.numbers[number] ?? [""] });
    choice.number = drawnNumber;
  }

  // -- scales and colours --------------------------------------------------------------------

  const VIRIDIS = [[68, 1, 84], [72, 36, 117], [65, 68, 135], [53, 95, 141], [42, 120, 142], [33, 145, 140], [34, 168, 132], [68, 191, 112], [122, 209, 81], [189, 223, 38], [253, 231, 37]];
  const BLUE_RED = [[5, 48, 97], [33, 102, 172], [67, 147, 195], [146, 197, 222], [209, 229, 240], [247, 247, 247], [253, 219, 199], [244, 165, 130], [214, 96, 77], [178, 24, 43], [103, 0, 31]];

  function colours(anchors) {
    const found = new Uint8ClampedArray(256 * 3);
    for (let k = 0; k < 256; k++) {
      const place = (k / 255) * (anchors.length - 1);
      const left = Math.min(Math.floor(place), anchors.length - 2);
      for (let c = 0; c < 3; c++) found[3 * k + c] = anchors[left][c] + (anchors[left + 1][c] - anchors[left][c]) * (place - left);
    }
    return found;
  }
  const viridis = colours(VIRIDIS);
  const blueRed = colours(BLUE_RED);

  // The extent of each row: the least and greatest number, and the least magnitude that is not 0.
  let extents = [];
  function measure() {
    extents = sites.map(() => ({ low: Infinity, high: -Infinity, tiny: Infinity }));
    for (const column of columns) {
      for (let k = 0; k < column.at.length; k++) {
        const extent = extents[k];
        const a = column.low[k], b = column.high[k];
        if (a < extent.low) extent.low = a;
        if (b > extent.high) extent.high = b;
        const least = Math.abs(a) < Math.abs(b) ? Math.abs(a) : Math.abs(b);
        if (least > 0 && least < extent.tiny) extent.tiny = least;
      }
    }
  }
  function extentOf(indices) {
    const all = indices.map((k) => extents[k]);
    const of = (name, choose, start) => all.reduce((found, one) => choose(found, one[name]), start);
    return { low: of("low", Math.min, Infinity), high: of("high", Math.max, -Infinity), tiny: of("tiny", Math.min, Infinity) };
  }

  // A scale takes a number to a place from 0 to 1. Magnitudes over two decades are logarithmic.
  function scaleOf({ low, high, tiny }) {
    if (low > high) return null;
    if (low < 0) {
      const top = Math.max(-low, high);
      const bottom = Math.max(tiny, top * 1e-6);
      const isLog = top / bottom > 100;
      const part = isLog ? (size) => size <= bottom ? 0 : Math.log(size / bottom) / Math.log(top / bottom) : (size) => size / top;
      return { isSigned: true, isLog, low: -top, high: top, place: (x) => 0.5 + 0.5 * Math.sign(x) * part(Math.abs(x)) };
    }
    const bottom = Math.max(low > 0 ? low : tiny, high * 1e-12);
    if (high > 0 && high / bottom > 100) {
      const span = Math.log(high / bottom);
      return { isLog: true, low: bottom, high, place: (x) => x <= bottom ? 0 : Math.log(x / bottom) / span };
    }
    const span = high - low;
    return { isLog: false, low, high, place: (x) => span > 0 ? (x - low) / span : 0.5 };
  }

  // -- the table -----------------------------------------------------------------------------

  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const row = rows[target.dataset.at];
      if (isIntersecting) {
        inView.add(row);
        draw(row);
      } else inView.delete(row);
    }
  }, { root: byId("scroller"), rootMargin: "300px" });

  const make = (tag, name, text) => {
    const found = document.createElement(tag);
    if (name) found.className = name;
    if (text !== undefined) found.textContent = text;
    return found;
  };
  const drawing = (tag, attributes = {}, text) => {
    const found = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
    if (text !== undefined) found.textContent = text;
    return found;
  };

  function makeRows() {
    observer.disconnect();
    inView.clear();
    const focused = document.activeElement.closest?.("#curves tbody tr")?.dataset.at;
    head.replaceChildren(...[...head.cells].slice(0, 3), ...names.map(([name, title]) => {
      const cell = make("th", "number", SHORT[name] ?? name);
      cell.scope = "col";
      cell.title = title;
      return cell;
    }));
    rows = sites.map((site, at) => {
      const element = make("tr");
      element.dataset.at = at;
      const name = make("th");
      name.scope = "row";
      const button = make("button");
      button.type = "button";
      button.title = site.path + (site.tail ? `:${site.tail}` : "");
      const flag = make("span", "flag");
      flag.hidden = true;
      button.append(make("span", "path", site.path), ...(site.tail ? [make("span", "port", site.tail)] : []), flag);
      name.append(button);
      const heat = make("td", "heat");
      const canvas = make("canvas");
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", button.title);
      heat.append(canvas);
      const curve = make("td", "curve");
      const svg = drawing("svg", { viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": "true" });
      const band = drawing("path", { class: "band" });
      const line = drawing("path", { class: "line" });
      svg.append(band, line);
      curve.append(svg);
      const cells = names.map(() => make("td", "number"));
      element.append(name, heat, curve, ...cells);
      return { at, element, button, flag, canvas, band, line, cells, drawn: -1 };
    });
    body.replaceChildren(...rows.map((row) => row.element));
    unused = new Set();
    const longest = Math.max(...sites.map(({ path, tail }) => path.length + 0.9 * tail.length), 8);
    byId("curves").style.setProperty("--site", `${Math.min(longest, 46) + 9}ch`);
    for (const row of rows) observer.observe(row.element);
    if (focused !== undefined) rows[focused]?.button.focus({ preventScroll: true });
    fill(byId("number"), names, choice.number);
    fill(byId("site-number"), names, choice.number);
    const kinds = Object.entries(data.kinds).filter(([port]) => sites.some((site) => site.port === port));
    fill(byId("kind"), [["", "all kinds"], ...kinds], choice.kind);
  }

  const SHORT = { zero_share: "zeros", non_finite: "non-finite", ratio: "ratio" };

  function fill(select, options, chosen) {
    select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
    select.value = options.some(([value]) => value === chosen) ? chosen : options[0]?.[0] ?? "";
  }

  const hasNumber = (k) => extents[k].low <= extents[k].high || (drawnNumber !== "ratio" && columns.some((column) => column.bad[k]));

  let shared = null; // the scale of all rows, if they are alike
  let unused = new Set(); // the numbers that no row has
  let shown = []; // the indices of the rows that are shown, in order

  // Choose and order the rows, and draw those in view. Called after each answer and each choice.
  function render() {
    const query = choice.query.trim().toLowerCase();
    shown = sites.map((_, k) => k).filter((k) => (!choice.kind || sites[k].port === choice.kind) && sites[k].text.includes(query) && hasNumber(k));
    if (choice.order === "last") {
      const key = (k) => { const x = latest(drawnNumber, k); return isNumber(x) ? Math.abs(x) : -1; };
      shown.sort((a, b) => key(b) - key(a) || a - b);
    }
    const visible = new Set(shown);
    const ordered = [...shown, ...sites.map((_, k) => k).filter((k) => !visible.has(k))];
    if (ordered.some((k, place) => body.rows[place] !== rows[k].element)) {
      const focused = document.activeElement;
      body.append(...ordered.map((k) => rows[k].element));
      if (body.contains(focused)) focused.focus({ preventScroll: true });
    }
    for (const row of rows) if (row.element.hidden === visible.has(row.at)) row.element.hidden = !visible.has(row.at);
    byId("curves").classList.toggle("many", shown.length > 40);
    shared = choice.scale === "all" ? scaleOf(extentOf(shown)) : null;
    const before = [...unused].join();
    unused = new Set(names.map(([name]) => name).filter((name) => name !== drawnNumber && !shown.some((k) => isNumber(latest(name, k)))));
    if ([...unused].join() !== before) for (const row of rows) row.cells.forEach((cell, number) => { cell.hidden = unused.has(names[number][0]); });
    version += 1;
    for (const k of shown) label(rows[k]);
    for (const row of inView) draw(row);
    showHead();
    showKey();
    showSite();
    byId("status").textContent = sites.length ? `${shown.length.toLocaleString("en")} of ${sites.length.toLocaleString("en")} sites` : "";
    byId("nothing").hidden = shown.length > 0;
    byId("nothing").textContent = status.n_steps <= 0 ? "No step was reported yet." : query ? `No site with this number has “${choice.query.trim()}” in its name.` : "No site of this kind has this number.";
    byId("curves").hidden = !shown.length;
    note();
  }

  // Say what a heat map shows. Rows out of view are not drawn yet, but a screen reader gets to them.
  function label(row) {
    const { low, high } = extents[row.at];
    const [first, last] = [columns[0], columns[columns.length - 1]];
    const n_bad = columns.filter((column) => column.bad[row.at]).length;
    const range = low > high ? "no numbers" : `${format(low)} to ${format(high)}`;
    const bad = n_bad ? `, NaN or infinity in ${n_bad} of ${columns.length} columns` : "";
    const text = first ? `${titleOf(drawnNumber)}, step ${first.first} to ${last.last}: ${range}${bad}` : "no steps";
    row.canvas.setAttribute("aria-label", `${row.button.title}: ${text}`);
  }

  function draw(row) {
    if (row.drawn === version || row.element.hidden) return;
    row.drawn = version;
    const k = row.at;
    const own = scaleOf(extentOf([k]));
    const scale = shared ?? own;
    paint(row.canvas, k, scale);
    const [band, line] = pathsOf(k, own, 100, 20, 1);
    row.band.setAttribute("d", stride > 1 ? band : "");
    row.line.setAttribute("d", line);
    names.forEach(([name], number) => {
      const value = now[number * sites.length + k];
      const cell = row.cells[number];
      const isBad = latest("non_finite", k) > 0;
      cell.textContent = isNumber(value) ? name === "zero_share" ? share(value) : format(value) : isBad && name !== "ratio" ? "NaN" : "";
      cell.className = `number${name === drawnNumber ? " chosen" : ""}${isBad && name !== "ratio" && (name === "non_finite" || !isNumber(value)) ? " bad" : ""}`;
    });
    row.flag.hidden = !flags.has(k);
    row.flag.textContent = flags.get(k) ?? "";
  }

  const share = (part) => part === 0 || part === 1 ? `${100 * part} %` : `${Number((100 * part).toPrecision(3))} %`;
  const titleOf = (number) => names.find(([name]) => name === number)?.[1] ?? number;

  function paint(canvas, k, scale) {
    const width = Math.max(columns.length, 1);
    if (canvas.width !== width) canvas.width = width;
    if (canvas.height !== 1) canvas.height = 1;
    const image = new ImageData(width, 1);
    const map = scale?.isSigned ? blueRed : viridis;
    columns.forEach((column, at) => {
      const x = extreme(column, k);
      const bad = column.bad[k];
      if (!bad && !isNumber(x)) return; // transparent
      if (bad) image.data.set(scale?.isSigned ? [255, 213, 0, 255] : [213, 94, 0, 255], 4 * at);
      else {
        const place = 3 * Math.round(255 * Math.min(Math.max(scale.place(x), 0), 1));
        image.data.set([map[place], map[place + 1], map[place + 2], 255], 4 * at);
      }
    });
    canvas.getContext("2d").putImageData(image, 0, 0);
  }

  // The paths of a site's band and line in a box; a gap in the numbers is a gap in the paths.
  function pathsOf(k, scale, width, height, pad, values = columns.map((column) => column.at[k])) {
    if (!scale) return ["", ""];
    const x = (at) => (columns.length > 1 ? (at / (columns.length - 1)) * width : width / 2).toFixed(1);
    const y = (number) => (height - pad - Math.min(Math.max(scale.place(number), 0), 1) * (height - 2 * pad)).toFixed(2);
    let line = "", band = "", up = [], back = [];
    const close = () => {
      if (up.length > 1) band += `M${up.join("L")}L${back.reverse().join("L")}Z`;
      [up, back] = [[], []];
    };
    values.forEach((number, at) => {
      if (number === null || !isNumber(number)) return close();
      const isFirst = !up.length;
      line += `${isFirst ? "M" : "L"}${x(at)} ${y(number)}`;
      const next = values[at + 1];
      if (isFirst && (next === undefined || next === null || Number.isNaN(next))) line += "h.01"; // a step alone is a dot
      up.push(`${x(at)} ${y(columns[at].high[k])}`);
      back.push(`${x(at)} ${y(columns[at].low[k])}`);
    });
    close();
    return [band, line];
  }

  function showHead() {
    const ends = columns.length ? [columns[0].first, columns[Math.floor((columns.length - 1) / 2)].last, columns[columns.length - 1].last] : ["", "", ""];
    ["axis-first", "axis-middle", "axis-last"].forEach((id, at) => {
      const text = at === 1 && columns.length < 3 ? "" : ends[at].toLocaleString("en");
      byId(id).textContent = at === 0 && text ? `step ${text}` : columns.length > 1 ? text : "";
    });
    [...head.cells].slice(3).forEach((cell, number) => {
      cell.classList.toggle("chosen", names[number][0] === drawnNumber);
      cell.hidden = unused.has(names[number][0]);
    });
    byId("about-columns").textContent = stride > 1 ? `A column stands for ${stride} reported steps. Its colour is that of the number with the largest magnitude among them; the curve goes through the last, its band from the least to the greatest.` : "";
    byId("about-columns").hidden = stride <= 1;
  }

  function showKey() {
    const whole = shared ?? scaleOf(extentOf(shown));
    byId("key").hidden = !columns.length;
    for (const id of ["key-low", "key-bar", "key-high", "key-about"]) byId(id).hidden = !whole;
    if (!whole) return;
    const map = whole.isSigned ? blueRed : viridis;
    const image = new ImageData(120, 1);
    for (let at = 0; at < 120; at++) {
      const place = 3 * Math.round((at / 119) * 255);
      image.data.set([map[place], map[place + 1], map[place + 2], 255], 4 * at);
    }
    byId("key-bar").getContext("2d").putImageData(image, 0, 0);
    byId("key-low").textContent = shared ? format(shared.low) : whole.isSigned ? "below 0" : "least";
    byId("key-high").textContent = shared ? format(shared.high) : whole.isSigned ? "above 0" : "greatest";
    const isLog = shared ? shared.isLog : shown.some((k) => scaleOf(extentOf([k]))?.isLog);
    byId("key-about").textContent = shared ? (isLog ? "of all rows, logarithmic" : "of all rows") : `of each row${isLog ? ", logarithmic where it spans two decades or more" : ""}`;
    byId("key-bad").classList.toggle("signed", Boolean(whole.isSigned));
  }

  // The address keeps the choices, so they can be shared and survive a reload.
  function note() {
    if (!served) return;
    const parameters = new URLSearchParams();
    if (choice.number) parameters.set("number", choice.number);
    if (choice.kind) parameters.set("kind", choice.kind);
    if (choice.scale !== "row") parameters.set("scale", choice.scale);
    if (choice.order !== "model") parameters.set("order", choice.order);
    if (choice.query.trim()) parameters.set("q", choice.query.trim());
    if (loggedName && loggedName !== logged[0]?.name) parameters.set("logged", loggedName);
    const text = parameters.toString();
    if (location.search !== (text && `?${text}`)) history.replaceState(null, "", `${location.pathname}${text && `?${text}`}${location.hash}`);
  }

  // -- alerts --------------------------------------------------------------------------------

  const MARKS = { "NaN or infinity": "NaN", "Update ratio": "ratio" };
  let alertsShown = "";

  function showAlerts(alerts) {
    flags = new Map();
    for (const { title, sites: found } of alerts) for (const [k] of found) if (!flags.has(k)) flags.set(k, MARKS[title] ?? title.toLowerCase());
    const text = JSON.stringify(alerts);
    if (text === alertsShown) return; // a reader may be at one of the buttons
    alertsShown = text;
    const focused = document.activeElement.dataset?.site;
    byId("alerts").hidden = !alerts.length;
    byId("alert-list").replaceChildren(...alerts.map(({ title, text, rule, sites: found }) => {
      const item = make("li");
      const line = make("p");
      line.append(make("strong", "", title), ` ${text}`);
      const list = make("ul");
      for (const [k, noted] of found.slice(0, 3)) {
        const one = make("li");
        const link = make("button", "link");
        link.type = "button";
        link.dataset.site = k;
        link.append(make("code", "", sites[k].path + (sites[k].tail ? `:${sites[k].tail}` : "")));
        one.append(link, " ", make("span", "note", noted));
        list.append(one);
      }
      if (found.length > 3) list.append(make("li", "note", `and ${found.length - 3} more`));
      item.append(line, list, make("p", "rule", rule));
      return item;
    }));
    if (focused !== undefined) byId("alert-list").querySelector(`[data-site="${Number(focused)}"]`)?.focus();
  }
  byId("alert-list").addEventListener("click", (event) => {
    const link = event.target.closest("[data-site]");
    if (link) open(Number(link.dataset.site));
  });

  // -- the user's own numbers --------------------------------------------------------------------

  let logged = []; // each with its steps and, at each, the last number, the least and the greatest
  let loggedName = address.get("logged") ?? "";

  function showLogged(found) {
    logged = found;
    if (!logged.some(({ name }) => name === loggedName)) loggedName = logged[0]?.name ?? "";
    byId("logged").hidden = !logged.length;
    byId("logged-label").hidden = logged.length < 2;
    fill(byId("logged-name"), logged.map(({ name }) => [name, name]), loggedName);
    plotLogged();
  }

  function plotLogged() {
    const series = logged.find(({ name }) => name === loggedName);
    if (!series) return;
    const { name, steps: at, last, low, high, bad, each } = series;
    const numbers = [...low, ...high].filter((x) => x !== null);
    const [least, most] = [Math.min(...numbers), Math.max(...numbers)];
    const width = Math.max(byId("logged-plot").clientWidth, 240);
    const box = { left: 58, right: width - 10, top: 8, bottom: 160 };
    byId("logged-plot").setAttribute("viewBox", `0 0 ${width} 190`);
    const isLog = least > 0 && most / least > 100;
    const size = isLog ? Math.log10 : (x) => x;
    const room = (size(most) - size(least)) * 0.06 || Math.abs(size(most)) * 0.1 || 1;
    const [from, to] = [size(least) - room, size(most) + room];
    const x = (k) => at.length > 1 ? box.left + ((at[k] - at[0]) / (at[at.length - 1] - at[0])) * (box.right - box.left) : (box.left + box.right) / 2;
    const y = (number) => box.bottom - ((size(number) - from) / (to - from)) * (box.bottom - box.top);
    const parts = [];
    for (const tick of numbers.length ? isLog ? logTicks(from, to) : linearTicks(from, to, 4) : []) {
      parts.push(drawing("line", { class: "grid", x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }));
      parts.push(drawing("text", { x: box.left - 8, y: y(tick) + 4, "text-anchor": "end" }, tickText(tick)));
    }
    const ends = at.length > 1 ? [[0, "start"], [at.length - 1, "end"]] : [[0, "middle"]];
    for (const [k, anchor] of ends) parts.push(drawing("text", { x: x(k), y: box.bottom + 20, "text-anchor": anchor }, `step ${at[k].toLocaleString("en")}`));
    let line = "", runs = [], isOpen = false;
    last.forEach((number, k) => {
      if (number === null) { isOpen = false; return; }
      line += `${isOpen ? "L" : "M"}${x(k).toFixed(1)} ${y(number).toFixed(1)}`;
      if (!isOpen && (last[k + 1] ?? null) === null) line += "h.01"; // a step alone is a dot
      if (!isOpen) runs.push([]);
      runs[runs.length - 1].push(k);
      isOpen = true;
    });
    const point = (numbers) => (k) => `${x(k).toFixed(1)} ${y(numbers[k]).toFixed(1)}`;
    const band = runs.map((ks) => `M${ks.map(point(high)).join("L")}L${[...ks].reverse().map(point(low)).join("L")}Z`).join("");
    parts.push(drawing("path", { class: "band", d: each > 1 ? band : "" }), drawing("path", { class: "line", d: line }));
    bad.forEach((is, k) => { if (is) parts.push(drawing("path", { class: "badstep", d: `M${x(k).toFixed(1)} ${box.bottom}l-4 -8h8Z` })); });
    byId("logged-plot").replaceChildren(...parts);
    const n_bad = bad.filter(Boolean).length;
    const range = numbers.length ? `${format(least)} to ${format(most)}` : "no finite number";
    const said = n_bad ? `, NaN or infinity at ${n_bad} of ${at.length} ${each > 1 ? "points" : "steps"}` : "";
    byId("logged-plot").setAttribute("aria-label", `${name}, step ${at[0]} to ${at[at.length - 1]}: ${range}${said}`);
    byId("logged-heading").textContent = name;
    const newest = last[last.length - 1];
    const about = [`${newest === null ? "NaN or infinity" : format(newest)} at step ${at[at.length - 1].toLocaleString("en")}; ${range}.`];
    if (each > 1) about.push(`A point is the last of ${each} logged steps; the band goes from the least to the greatest.`);
    if (n_bad) about.push("Vermilion marks NaN or infinity.");
    if (isLog) about.push("The axis is logarithmic.");
    byId("logged-about").textContent = about.join(" ");
  }
  byId("logged-name").addEventListener("change", (event) => {
    loggedName = event.target.value;
    plotLogged();
    note();
  });
  new ResizeObserver(plotLogged).observe(byId("logged-plot")); // alerts beside it take some width

  // -- the pulse: how far the run is, and whether it goes on -----------------------------------

  function ago(seconds) {
    if (seconds < 90) return `${Math.floor(seconds)} s ago`;
    if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
    return seconds < 129600 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
  }

  function showPulse() {
    if (status.n_steps < 0) return;
    const { n_steps, step, ended, age, pace, when } = status;
    const seconds = age + (Date.now() - arrived) / 1000;
    const isLate = seconds > Math.max(60, 20 * pace);
    let text = `last step ${step?.toLocaleString("en")}, `;
    if (!n_steps) text = ended ? "ended without a step" : "no step yet";
    else if (ended) text = `ended after step ${step.toLocaleString("en")}, ${new Date(1000 * when).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" })}`;
    else if (!served) text += new Date(1000 * when).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
    else text += ago(seconds) + (isLate ? ": stopped or killed?" : "");
    byId("pulse-text").textContent = text;
    byId("pulse").classList.toggle("live", served && !ended && n_steps > 0 && !isLate);
    byId("pulse").classList.toggle("late", served && !ended && n_steps > 0 && isLate);
  }

  // -- one site, large -------------------------------------------------------------------------

  const dialog = byId("site");
  let opened = null; // the index of the site
  let ranks = []; // the numbers of each rank at each column, if there are several
  let ranksOf = "";
  let picked = null; // the column that is pointed at; null is the last one

  // The plot is as wide as the dialog, so that its texts keep their size in a narrow window.
  const BOX = { left: 64, right: 848, top: 14, bottom: 306 };
  const isNarrow = () => BOX.right < 500;
  function fit() {
    const width = Math.max(byId("plot").clientWidth, 200);
    BOX.right = width - 12;
    BOX.bottom = isNarrow() ? 206 : 306;
    byId("plot").setAttribute("viewBox", `0 0 ${width} ${BOX.bottom + 34}`);
  }
  addEventListener("resize", () => { if (opened !== null && sites[opened]) plot(); });
  const RANK_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f"];

  function open(k) {
    opened = k;
    picked = null;
    ranks = [];
    ranksOf = "";
    if (!dialog.open) dialog.showModal();
    showSite();
  }

  function showSite() {
    if (opened === null || !sites[opened]) return;
    const { path, tail } = sites[opened];
    byId("site-heading").textContent = path + (tail ? `:${tail}` : "");
    byId("site-number").value = choice.number;
    byId("step").max = Math.max(columns.length - 1, 0);
    plot();
    byId("site-numbers").replaceChildren(...names.filter(([name]) => isNumber(latest(name, opened))).map(([name, title]) => {
      const part = make("div", name === "non_finite" && latest(name, opened) > 0 ? "bad" : "");
      part.append(make("dt", "", title), make("dd", "", name === "zero_share" ? share(latest(name, opened)) : format(latest(name, opened))));
      return part;
    }));
    askRanks();
  }

  async function askRanks() {
    const key = `${opened} ${drawnNumber} ${status.n_steps}`;
    if (!(status.n_ranks > 1) || !served || ranksOf === key) return;
    ranksOf = key;
    try {
      const answer = await (await fetch(`ranks?site=${opened}&number=${encodeURIComponent(drawnNumber)}`)).json();
      if (ranksOf !== key) return;
      ranks = answer;
      plot();
    } catch { /* the code that follows the run says why */ }
  }

  function axisOf(k) {
    const extent = extentOf([k]);
    for (const one of ranks) for (const x of one) if (x !== null) {
      extent.low = Math.min(extent.low, x);
      extent.high = Math.max(extent.high, x);
      if (x !== 0) extent.tiny = Math.min(extent.tiny, Math.abs(x));
    }
    const { low, high, tiny } = extent;
    if (low > high) return null;
    const bottom = Math.max(low > 0 ? low : tiny, high * 1e-12);
    const canLog = low >= 0 && high > 0;
    byId("axis-label").hidden = !canLog;
    const wanted = byId("site-axis").value;
    if (canLog && (wanted === "log" || (wanted === "auto" && high / bottom > 100))) {
      const [from, to] = [Math.log10(bottom), Math.log10(high)];
      const room = Math.max((to - from) * 0.04, 0.05);
      return { isLog: true, place: (x) => (Math.log10(Math.max(x, bottom)) - from + room) / (to - from + 2 * room), ticks: logTicks(from - room, to + room) };
    }
    const room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
    const [from, to] = [low - room, high + room];
    return { isLog: false, place: (x) => (x - from) / (to - from), ticks: linearTicks(from, to) };
  }

  function linearTicks(from, to, count = 5) {
    const rough = (to - from) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((k) => k * power).find((one) => one >= rough);
    const found = [];
    const start = Math.ceil(from / step);
    for (let k = 0; k < 12 && (start + k) * step <= to; k++) found.push(Number(((start + k) * step).toPrecision(12)));
    return found;
  }

  function logTicks(from, to) {
    const every = Math.max(1, Math.ceil((to - from) / 7));
    const found = [];
    for (let power = Math.ceil(from); power <= to; power += every) found.push(10 ** power);
    if (found.length > 1) return found;
    return [...Array(Math.ceil(to - from) + 2).keys()].flatMap((k) => [1, 2, 5].map((one) => one * 10 ** (Math.floor(from) + k))).filter((x) => Math.log10(x) >= from && Math.log10(x) <= to);
  }

  function plot() {
    const svg = byId("plot");
    const k = opened;
    fit();
    const scale = axisOf(k);
    const { left, right, top, bottom } = BOX;
    const parts = [drawing("rect", { class: "ground", x: left, y: top, width: right - left, height: bottom - top })];
    const y = (x) => bottom - scale.place(x) * (bottom - top);
    if (!scale) {
      parts.push(drawing("text", { x: (left + right) / 2, y: (top + bottom) / 2, "text-anchor": "middle" }, "no numbers"));
    } else {
      for (const tick of scale.ticks) {
        parts.push(drawing("line", { class: "grid", x1: left, x2: right, y1: y(tick), y2: y(tick) }));
        parts.push(drawing("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, tickText(tick)));
      }
      const inner = drawing("g", { transform: `translate(${left} ${top})` });
      const [band, line] = pathsOf(k, scale, right - left, bottom - top, 0);
      if (stride > 1) inner.append(drawing("path", { class: "band", d: band }));
      inner.append(drawing("path", { class: "line", d: line }));
      ranks.forEach((one, rank) => inner.append(drawing("path", { class: "line rank", style: `stroke: ${RANK_COLOURS[rank % RANK_COLOURS.length]}`, d: pathsOf(k, scale, right - left, bottom - top, 0, one)[1] })));
      parts.push(inner);
    }
    columns.forEach((column, at) => {
      if (column.bad[k]) parts.push(drawing("rect", { class: "badstep", x: placeOf(at) - 1.5, y: bottom - 5, width: 3, height: 5 }));
    });
    stepTicks().forEach(([at, step]) => parts.push(drawing("text", { x: placeOf(at), y: bottom + 20, "text-anchor": "middle" }, step.toLocaleString("en"))));
    svg.replaceChildren(...parts, drawing("g", { id: "pointed" }));
    const [first, last] = [columns[0], columns[columns.length - 1]];
    const extent = extentOf([k]);
    svg.setAttribute("aria-label", first ? `${titleOf(drawnNumber)} of ${byId("site-heading").textContent}, step ${first.first} to ${last.last}: from ${format(extent.low)} to ${format(extent.high)}, last ${format(latest(drawnNumber, k))}` : "no steps yet");
    byId("plot-about").replaceChildren(...aboutPlot(scale, k));
    point(picked);
  }

  const placeOf = (at) => columns.length > 1 ? BOX.left + (at / (columns.length - 1)) * (BOX.right - BOX.left) : (BOX.left + BOX.right) / 2;

  // Round steps, each with the column that holds it. Steps that go back have the steps of some columns.
  function stepTicks() {
    const end = columns.length - 1;
    if (end < 1) return columns.map((column, at) => [at, column.last]);
    if (columns.some((column, at) => at && column.last < columns[at - 1].last)) {
      const count = Math.min(end, isNarrow() ? 2 : 5);
      return [...Array(count + 1).keys()].map((k) => Math.round((k * end) / count)).map((at) => [at, columns[at].last]);
    }
    const ticks = linearTicks(columns[0].first, columns[columns.length - 1].last, isNarrow() ? 2 : 5).filter(Number.isInteger);
    return ticks.map((step) => [columns.findIndex((column) => column.last >= step), step]);
  }

  function aboutPlot(scale, k) {
    const found = [];
    if (scale?.isLog) found.push("The axis is logarithmic. ");
    if (stride > 1) found.push(`Each point is the last of ${stride} reported steps; the band goes from the least to the greatest. `);
    if (columns.some((column) => column.bad[k])) found.push("Vermilion marks steps with NaN or infinity among the values. ");
    ranks.forEach((_, rank) => {
      const mark = make("span", "swatch", `rank ${rank}`);
      mark.style.setProperty("--swatch", RANK_COLOURS[rank % RANK_COLOURS.length]);
      found.push(mark);
    });
    if (status.n_ranks > 1 && !served) found.push("The ranks are merged; hookline view of the folder shows each rank.");
    return found;
  }

  function point(at) {
    picked = at;
    const column = columns[at ?? columns.length - 1];
    const group = byId("pointed");
    if (!column || !group) return;
    const x = placeOf(at ?? columns.length - 1);
    group.replaceChildren(...(at === null ? [] : [drawing("line", { class: "guide", x1: x, x2: x, y1: BOX.top, y2: BOX.bottom })]));
    const range = column.low[opened] !== column.high[opened] && isNumber(column.low[opened]) ? ` (${format(column.low[opened])} to ${format(column.high[opened])})` : "";
    const each = ranks.length ? ` · ${ranks.map((one, rank) => `rank ${rank}: ${format(one[at ?? columns.length - 1] ?? undefined)}`).join(", ")}` : "";
    byId("readout").textContent = `${steps(column)}: ${format(column.at[opened])}${range}${column.bad[opened] ? ", NaN or infinity" : ""}${each}`;
    byId("step").value = at ?? columns.length - 1;
    byId("step").setAttribute("aria-valuetext", byId("readout").textContent);
  }

  byId("plot").addEventListener("pointermove", (event) => {
    const box = byId("plot").getBoundingClientRect();
    const x = event.clientX - box.left;
    const at = Math.round(((x - BOX.left) / (BOX.right - BOX.left)) * (columns.length - 1));
    point(Math.min(Math.max(at, 0), columns.length - 1));
  });
  byId("plot").addEventListener("pointerleave", () => point(null));
  byId("step").addEventListener("input", (event) => point(Number(event.target.value)));
  byId("site-axis").addEventListener("change", plot);
  dialog.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || event.target.matches("input, select")) return;
    const next = shown[shown.indexOf(opened) + step];
    if (next !== undefined) open(next);
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close(); // the backdrop
  });
  dialog.addEventListener("close", () => {
    if (dialog.open) return; // it was opened again before this event came
    const row = rows[opened];
    opened = null;
    if (row && !row.element.hidden) row.button.focus();
  });

  // -- choices, pointing, keyboard ---------------------------------------------------------------

  function chooseNumber(name) {
    choice.number = name;
    if (served) return ask(true);
    takeOfFile(name);
    render();
  }
  for (const id of ["number", "site-number"]) byId(id).addEventListener("change", (event) => {
    const name = event.target.value;
    byId("number").value = byId("site-number").value = name;
    ranks = [];
    chooseNumber(name);
  });
  for (const id of ["kind", "scale", "order"]) byId(id).addEventListener("change", (event) => {
    choice[id] = event.target.value;
    render();
  });
  byId("scale").value = choice.scale;
  byId("order").value = choice.order;
  byId("search").value = choice.query;
  byId("search").addEventListener("input", (event) => {
    choice.query = event.target.value;
    render();
  });

  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (row) open(Number(row.dataset.at));
  });
  body.addEventListener("pointermove", (event) => {
    const canvas = event.target.closest("td.heat")?.querySelector("canvas");
    byId("tip").hidden = !canvas || !columns.length;
    if (!canvas || !columns.length) return;
    const k = Number(canvas.closest("tr").dataset.at);
    const box = canvas.getBoundingClientRect();
    const at = Math.min(Math.max(Math.floor(((event.clientX - box.left) / box.width) * columns.length), 0), columns.length - 1);
    byId("tip").textContent = `${steps(columns[at])}: ${titleOf(drawnNumber)} ${format(extreme(columns[at], k))}${columns[at].bad[k] ? ", NaN or infinity" : ""}`;
    const tip = byId("tip").getBoundingClientRect();
    byId("tip").style.left = `${Math.min(event.clientX + 14, innerWidth - tip.width - 8)}px`;
    byId("tip").style.top = `${event.clientY + 18 + tip.height > innerHeight ? event.clientY - tip.height - 10 : event.clientY + 18}px`;
  });
  body.addEventListener("pointerleave", () => { byId("tip").hidden = true; });

  document.addEventListener("keydown", (event) => {
    if (dialog.open || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "/" && !event.target.matches("input")) {
      event.preventDefault();
      return byId("search").focus();
    }
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const row = event.target.closest?.("#curves tbody tr");
    if (!step || !(row || event.target === document.body || event.target.id === "search")) return;
    const at = row ? shown.indexOf(Number(row.dataset.at)) + step : 0;
    if (shown[at] === undefined) return;
    event.preventDefault();
    rows[shown[at]].button.focus();
  });

  // -- following the run ---------------------------------------------------------------------------

  let asking = null; // the request in progress: one at a time

  // Ask for the steps that are missing, or for all of them after another number was chosen.
  async function ask(isWhole = false) {
    while (asking) await asking;
    asking = request(isWhole).finally(() => { asking = null; });
    return asking;
  }

  async function request(isWhole) {
    const { number } = choice;
    if (number !== drawnNumber) isWhole = true; // also if an earlier answer was lost
    const from = isWhole ? 0 : Math.max(columns.length - 1, 0);
    const asked = { state, steps: isWhole ? -1 : status.n_steps, logged: status.n_logged ?? -1, from, stride, known: isWhole ? -1 : now.length, number };
    const parameters = new URLSearchParams(Object.entries(asked).filter(([, value]) => value !== -1));
    const answer = await fetchJson(`new?${parameters}`);
    if (!answer) return;
    if (answer.state && answer.state !== state) return location.reload();
    if (!answer.state) return say(`${answer.gone} The page shows an earlier state and updates when the run is back.`);
    say("");
    const knew = `${sites.length} ${names.length}`;
    if (take(answer)) {
      if (choice.number === number) choice.number = drawnNumber; // the usual one, if it is not here
      if (`${sites.length} ${names.length}` !== knew) makeRows();
      render();
    } else if (!sites.length) render();
    showPulse();
  }

  async function follow() {
    await ask();
    for (;;) {
      await sleep(1);
      if (document.hidden) continue;
      showPulse();
      await ask();
    }
  }

  if (served) follow();
  else {
    takeOfFile(data.number);
    makeRows();
    render();
    showPulse();
  }
})();
