// The loss above the map of time × depth: one line a site, one place a column; cells by arrow keys.

const DECADES = 3; // of the colours against the median

// Draw in an element. `view` has what is chosen: { site, column, finding, shown, bands, scale }.
function makeChart(host, run, view, onChoose) {
  const LOSS = 62;
  const TOP = 14; // room for the pins
  const GAP = 20; // between two kinds of values, with the name of the later
  let lines = []; // { site, y } or { name, y } from top to bottom
  let total = 0;
  let plot = null;

  const above = element("div", { class: "above" });
  const rowHeader = element("span", { role: "rowheader" });
  const cell = element("span", { role: "gridcell", id: "time-cell" });
  const spoken = element("div", { role: "row", class: "unseen" }, rowHeader, cell);
  const stuck = element("div", { class: "stuck", role: "presentation" });
  const room = element("div", { class: "room", role: "presentation" });
  const map = element(
    "div",
    {
      class: "time-map",
      role: "grid",
      tabindex: 0,
      "aria-label": "Time × depth",
      "aria-activedescendant": "time-cell",
      "aria-readonly": "true",
    },
    spoken,
    stuck,
    room,
  );
  const below = element("div", { class: "below" });
  const none = element("p", { class: "none", hidden: true });
  host.replaceChildren(above, map, below, none);

  // -- places ------------------------------------------------------------------------------------

  function layOut() {
    const isEmpty = !view.shown.length;
    for (const part of [above, map, below]) part.hidden = isEmpty;
    none.hidden = !isEmpty;
    none.textContent = view.nothing;
    if (isEmpty) return;
    const width = map.clientWidth - parseFloat(getComputedStyle(map).paddingLeft) - 12;
    const left = width < 420 ? 74 : 138;
    const nBands = view.bands.length;
    map.style.maxHeight = "";
    const free = map.clientHeight - GAP * nBands - 4;
    const height = clamp(free / view.shown.length, view.shown.length > 2000 ? 2 : 3, 14);
    lines = [];
    let y = 0;
    for (const { name, sites } of view.bands) {
      if (name) lines.push({ name, y: y + GAP / 2 });
      y += name ? GAP : 4;
      for (const site of sites) {
        lines.push({ site, y });
        y += height;
      }
    }
    total = y + 4;
    map.style.maxHeight = `${total}px`; // the steps are named right below the last row
    const step = (width - left) / Math.max(1, run.columns.length);
    plot = { width, left, height, step, x: (column) => left + step * (column + 0.5) };
    const rows = lines.filter(({ site }) => site !== undefined);
    plot.placeOf = new Map(rows.map(({ site, y: top }) => [site, top]));
    plot.order = rows.map(({ site }) => site);
    map.setAttribute("aria-rowcount", plot.order.length);
    map.setAttribute("aria-colcount", run.columns.length);
  }

  function draw() {
    layOut();
    if (!view.shown.length) return;
    drawLoss();
    drawMap();
    drawSteps();
    mark();
  }

  // -- the map -----------------------------------------------------------------------------------

  // A cell as a number for `makeMapCanvas`.
  function numberOfCell(column, site, scale) {
    if (column.bad[site]) return NaN;
    const number = run.extremeOf(column, site);
    if (Number.isNaN(number)) return NONE;
    if (!scale) return 0.5;
    if (scale.isUsual && number === 0) return ZERO;
    return scale.place(number);
  }

  // Against its own median: a tenth to ten times of it and further, up to `DECADES`.
  function usualScale(site) {
    const median = run.medianOf(site);
    const base = median > 0 ? median : run.extentOf(site).tiny;
    const place = (number) => 0.5 + Math.log10(number / base) / (2 * DECADES);
    return { isUsual: true, isSigned: true, place };
  }
  const scaleOfSite = (site) =>
    view.shared ?? (view.isUsual ? usualScale(site) : makeScale(run.extentOf(site), view.isSigned));

  // Columns that share a pixel give its most unusual number: no peak is lost.
  function fillRow(site, numbers) {
    const scale = scaleOfSite(site);
    const { columns } = run;
    const count = numbers.length;
    for (let index = 0; index < count; index += 1) {
      const first = Math.floor((index * columns.length) / count);
      const last = Math.max(first + 1, Math.floor(((index + 1) * columns.length) / count));
      let chosen = numberOfCell(columns[first], site, scale);
      for (let column = first + 1; column < last; column += 1)
        chosen = moreUnusual(chosen, numberOfCell(columns[column], site, scale));
      numbers[index] = chosen;
    }
  }

  function moreUnusual(one, other) {
    if (Number.isNaN(one) || other === NONE) return one;
    if (Number.isNaN(other) || one === NONE) return other;
    return Math.abs(other - 0.5) > Math.abs(one - 0.5) ? other : one;
  }

  function drawMap() {
    const { width, left, height } = plot;
    const seen = map.clientHeight;
    stuck.style.cssText = `position: sticky; top: 0; height: ${seen}px`;
    room.style.height = `${Math.max(0, total - seen)}px`;
    const [canvas, pen] = makeCanvas(width, seen);
    const [over, overPen] = makeCanvas(width, seen);
    over.style.cssText += "; position: absolute; left: 0; top: 0; pointer-events: none";
    stuck.replaceChildren(canvas, over);
    Object.assign(plot, { canvas, overPen });
    pen.translate(0, -map.scrollTop);
    pen.imageSmoothingEnabled = false;
    const isSeen = ({ y }) => y + height + GAP >= map.scrollTop && y - GAP <= map.scrollTop + seen;
    const inView = lines.filter(isSeen);
    const count = Math.max(
      1,
      Math.min(run.columns.length, Math.floor((width - left) * (devicePixelRatio || 1))),
    );
    for (const rows of bandsOf(inView)) drawRows(pen, rows, count);
    nameRows(pen, inView);
    listen(canvas);
  }

  // The rows in view, those of each kind together.
  function bandsOf(inView) {
    const bands = [[]];
    for (const line of inView) {
      if (line.site === undefined) bands.push([]);
      else bands.at(-1).push(line);
    }
    return bands.filter((rows) => rows.length);
  }

  function drawRows(pen, rows, count) {
    const { width, left, height } = plot;
    const numbers = new Float32Array(count * rows.length);
    rows.forEach(({ site }, index) =>
      fillRow(site, numbers.subarray(index * count, (index + 1) * count)),
    );
    const kind = view.isUsual || view.isSigned ? "signed" : "plain";
    const [top, tall] = [rows[0].y, height * rows.length];
    pen.fillStyle = themeColour("sunk");
    pen.fillRect(left, top, width - left, tall);
    pen.drawImage(
      makeMapCanvas(numbers, rows.length, count, [0, 1], kind),
      left,
      top,
      width - left,
      tall,
    );
    pen.fillStyle = themeColour("panel");
    if (height > 6) for (const { y } of rows) pen.fillRect(left, y + height - 1, width - left, 1);
  }

  // Rows are named where there is room; else where the part of the model changes.
  function nameRows(pen, inView) {
    const { left, height } = plot;
    pen.textBaseline = "middle";
    let end = -Infinity;
    let before = "";
    for (const { name, site, y } of inView) {
      pen.textAlign = name === undefined ? "right" : "left";
      pen.font = name === undefined ? monoFontText(10) : fontText(11, 600);
      pen.fillStyle = themeColour(name === undefined ? "ink-3" : "ink");
      if (name !== undefined) {
        pen.fillText(name, 0, y);
        before = "";
        continue;
      }
      const { path } = run.sites[site];
      const part = height >= 11 ? run.sites[site].path : path.split(".").slice(0, 2).join(".");
      const middle = y + height / 2;
      if (part === before || middle < end + 11) continue;
      pen.fillText(shortenToWidth(pen, part, left - 8), left - 6, middle);
      before = part;
      end = middle;
    }
  }

  // -- the loss and the steps --------------------------------------------------------------------

  // The place of a logged step among the columns.
  function placeOfStep(step) {
    const { columns } = run;
    const exact = columns.findLastIndex(({ first, last }) => first <= step && step <= last);
    if (exact >= 0) {
      const { first, last } = columns[exact];
      return (
        plot.left + plot.step * (exact + (last > first ? (step - first) / (last - first) : 0.5))
      );
    }
    const later = columns.findIndex(({ first }) => first > step);
    if (later < 0) return plot.x(columns.length - 1);
    if (!later) return plot.x(0);
    const before = columns[later - 1].last;
    return plot.x(later - 1) + (plot.step * (step - before)) / (columns[later].first - before);
  }

  function drawLoss() {
    const series = view.series;
    const height = TOP + (series ? LOSS : 0);
    const words = series ? aboutLoss(series) : "Findings by step";
    const [canvas, pen] = makeCanvas(plot.width, height, { role: "img", "aria-label": words });
    const [over, overPen] = makeCanvas(plot.width, height);
    over.className = "over";
    above.replaceChildren(canvas, over);
    plot.lossPen = overPen;
    plot.lossHeight = height;
    if (series) drawSeries(pen, series);
    for (const { level, step } of [...run.findings].reverse()) {
      if (step === null || step === undefined || level === "note") continue;
      drawPin(pen, level, plot.x(run.columnOf(step)) - 5, 1);
    }
    listen(canvas, false);
  }

  function aboutLoss({ name, steps, bad, low, high, each }) {
    const numbers = [...low, ...high].filter(isNumber);
    const range = numbers.length
      ? `${valueText(Math.min(...numbers))} to ${valueText(Math.max(...numbers))}`
      : "no finite number";
    const count = bad.filter(Boolean).length;
    const broken = count
      ? `, NaN or infinity at ${count} of ${steps.length} ${each > 1 ? "points" : "steps"}`
      : "";
    return `${name}, step ${steps[0]} to ${steps.at(-1)}: ${range}${broken}`;
  }

  function drawSeries(pen, { name, steps, last, low, high, bad, each }) {
    const { left, width } = plot;
    const numbers = [...low, ...high].filter(isNumber);
    const [least, most] = [Math.min(...numbers), Math.max(...numbers)];
    const isLog = least > 0 && most / least > 30;
    const size = isLog ? Math.log10 : (number) => number;
    const [from, to] = [size(least), size(most)];
    const bottom = TOP + LOSS - 8;
    const y = (number) => bottom - 2 - ((LOSS - 16) * (size(number) - from)) / (to - from || 1);
    pen.textBaseline = "top";
    pen.font = fontText(11, 600);
    pen.fillStyle = themeColour("ink");
    pen.fillText(shortenToWidth(pen, name, left - 44), 0, TOP);
    pen.font = fontText(11);
    pen.fillStyle = themeColour("ink-3");
    if (isLog) pen.fillText("log", 0, TOP + 14);
    pen.textAlign = "right";
    pen.font = monoFontText(10);
    if (numbers.length) {
      pen.fillText(numberText(most, 2), left - 6, TOP);
      pen.fillText(numberText(least, 2), left - 6, bottom - 11);
    }
    pen.strokeStyle = themeColour("line");
    pen.strokeRect(left, bottom + 0.5, width - left, 0);
    const places = steps.map(placeOfStep);
    if (each > 1) {
      pen.strokeStyle = themeColour("line-strong");
      pen.beginPath();
      places.forEach((x, index) => {
        if (!isNumber(low[index])) return;
        pen.moveTo(x, y(low[index]));
        pen.lineTo(x, y(high[index]));
      });
      pen.stroke();
    }
    pen.strokeStyle = themeColour("ink-2");
    pen.lineWidth = 1.3;
    pen.beginPath();
    let isDown = false;
    last.forEach((number, index) => {
      if (isNumber(number)) pen[isDown ? "lineTo" : "moveTo"](places[index], y(number));
      if (isNumber(number) && !isDown) pen.lineTo(places[index] + 0.1, y(number));
      isDown = isNumber(number);
    });
    pen.stroke();
    pen.fillStyle = themeColour("error");
    bad.forEach((isBad, index) => {
      if (isBad) pen.fillRect(places[index] - 1, bottom - 6, 2, 6);
    });
  }

  function drawSteps() {
    const [canvas, pen] = makeCanvas(plot.width, 20);
    below.replaceChildren(canvas);
    pen.font = monoFontText(10);
    pen.fillStyle = themeColour("ink-3");
    pen.textBaseline = "top";
    const ticks = stepTicks(run, plot.width < 420 ? 3 : 6);
    let end = -Infinity;
    ticks.forEach(([column, step], index) => {
      const text = `${index ? "" : "step "}${step.toLocaleString("en")}`;
      const half = pen.measureText(text).width / 2;
      const x = Math.min(plot.x(column), plot.width - half);
      if (x - half < end + 4) return;
      pen.textAlign = "center";
      pen.fillText(text, x, 4);
      end = x + half;
    });
  }

  // -- choosing ----------------------------------------------------------------------------------

  // Mark the chosen cell, the rows that the chosen finding concerns, and the step at the pointer.
  function mark(hovered) {
    if (!plot?.overPen || !view.shown.length) return;
    const { overPen: pen, lossPen, width, left, height, x } = plot;
    const seen = map.clientHeight;
    lossPen.clearRect(0, 0, width, plot.lossHeight);
    pen.clearRect(0, 0, width, seen);
    const finding = run.findings[view.finding];
    for (const site of finding ? [finding.row, ...finding.also] : []) {
      const top = plot.placeOf.get(site);
      const isOrigin = site === finding.row && finding.level !== "note";
      pen.fillStyle = themeColour(isOrigin ? finding.level : "follows");
      if (top !== undefined)
        pen.fillRect(left - 4, top - map.scrollTop, 3, Math.max(1, height - 0.5));
    }
    const verticals = [
      [hovered, "ink-3", 1],
      [view.column, "accent", 1.5],
    ].filter(([column]) => column !== undefined && column >= 0);
    for (const [column, name, thick] of verticals) {
      for (const [brush, end] of [
        [pen, Math.min(seen, total - map.scrollTop)],
        [lossPen, plot.lossHeight],
      ]) {
        brush.strokeStyle = themeColour(name);
        brush.lineWidth = thick;
        brush.strokeRect(x(column), brush === pen ? 0 : TOP - 2, 0, end);
      }
    }
    const top = plot.placeOf.get(view.site);
    if (top === undefined) return;
    pen.strokeStyle = themeColour("accent");
    pen.strokeRect(left - 1, top - map.scrollTop - 1, width - left + 1, height + 1);
    speak();
  }

  function speak() {
    map
      .querySelector("[role=row]")
      .setAttribute("aria-rowindex", plot.order.indexOf(view.site) + 1);
    cell.setAttribute("aria-colindex", view.column + 1);
    rowHeader.textContent = run.sites[view.site].label;
    cell.textContent = cellText(view.site, view.column);
  }

  function cellText(site, column) {
    const span = run.columns[column];
    if (!span) return "no step";
    const number = valueText(run.extremeOf(span, site), run.number);
    const parts = [`${stepText(span)}: ${run.titleOf(run.number)} ${number || "none"}`];
    if (span.bad[site]) parts.push("NaN or infinity");
    return parts.join(", ");
  }

  // Bring the chosen row into view.
  function reveal() {
    const top = plot?.placeOf.get(view.site);
    if (top === undefined) return;
    const isHidden = top < map.scrollTop || top + plot.height > map.scrollTop + map.clientHeight;
    if (isHidden) map.scrollTop = top - map.clientHeight / 2;
  }

  function listen(canvas, hasRows = true) {
    const hit = ({ offsetX, offsetY }) => {
      const column = clamp(
        Math.floor((offsetX - plot.left) / plot.step),
        0,
        run.columns.length - 1,
      );
      const y = offsetY + map.scrollTop;
      const line = hasRows
        ? lines.findLast((item) => item.site !== undefined && item.y <= y)
        : undefined;
      const site = line && y < line.y + plot.height ? line.site : undefined;
      return [site, column];
    };
    canvas.addEventListener("mousemove", (event) => {
      if (event.offsetX < plot.left - 4 && !hasRows) return hideTip();
      const [site, column] = hit(event);
      mark(column);
      return showTip(aboutCell(site, column), event);
    });
    canvas.addEventListener("mouseleave", () => {
      hideTip();
      mark();
    });
    canvas.addEventListener("click", (event) => {
      const [site, column] = hit(event);
      onChoose(site ?? view.site, column, true);
    });
  }

  function aboutCell(site, column) {
    const span = run.columns[column];
    const loss = loggedNumberText(view.series, span);
    const logged = loss ? [spanElement(` · ${view.series.name} `), loss] : [];
    if (site === undefined) return [boldElement(stepText(span)), ...logged];
    const number = run.extremeOf(span, site);
    const lines = [
      boldElement(run.sites[site].label),
      spanElement(` ${stepText(span)}`),
      ...logged,
      element("br"),
    ];
    lines.push(spanElement(`${run.titleOf(run.number)} `), valueText(number, run.number) || "none");
    const times = number / run.medianOf(site);
    if (view.isUsual && Number.isFinite(times))
      lines.push(spanElement(" · "), `${numberText(times, 2)} × median`);
    if (span.bad[site]) lines.push(" · ", element("span", { class: "error" }, "NaN or infinity"));
    return lines;
  }

  map.addEventListener(
    "scroll",
    () => requestAnimationFrame(() => view.shown.length && (drawMap(), mark())),
    {
      passive: true,
    },
  );
  map.addEventListener("keydown", (event) => {
    const row = plot?.order.indexOf(view.site) ?? -1;
    const step = gridStepOfKey(event);
    if (!step || row < 0) return;
    const [down, right] = step;
    event.preventDefault();
    const site = plot.order[clamp(row + down, 0, plot.order.length - 1)];
    onChoose(site, clamp(view.column + right, 0, run.columns.length - 1));
    reveal();
  });
  new ResizeObserver(draw).observe(host);

  return { draw, mark, reveal, grid: map };
}

// The logged number nearest before or in a column, as text.
function loggedNumberText(series, span) {
  if (!series || !span) return "";
  const index = series.steps.findLastIndex((step) => step <= span.last);
  if (index < 0) return "";
  return isNumber(series.last[index]) ? valueText(series.last[index]) : "NaN or infinity";
}
