// The page of a comparison: what differs first, the error over depth, the sites in firing order.

(() => {
  if (!byId("sites")) return;

  const GLYPHS = {
    differs: "M6 1a5 5 0 1 0 0 10A5 5 0 0 0 6 1Z",
    "not comparable": "M6 1.2 11.2 10.6H.8Z",
    noise: "M6 3.2a2.8 2.8 0 1 0 0 5.6 2.8 2.8 0 0 0 0-5.6Zm0 1.4a1.4 1.4 0 1 1 0 2.8 1.4 1.4 0 0 1 0-2.8Z",
    identical: "M1.6 6.4 4.6 9.4 10.4 3 9.3 2 4.5 7.2 2.6 5.3Z",
  };
  const NUMBERS = [
    ["relative", "Relative error", "the L2 norm of the difference, over that of the reference"],
    ["norm_ratio", "Ratio of norms", "the norm over that of the reference"],
    ["worst_row", "Worst row", "the largest relative error of a vector along the last dimension"],
    ["worst_element", "Worst element", "the largest relative error of an element"],
  ];
  const QUIET = ["identical", "noise"];

  const glyph = (verdict) => shape("svg", { class: `glyph ${verdict.replace(" ", "-")}`, viewBox: "0 0 12 12", "aria-hidden": "true" }, shape("path", { d: GLYPHS[verdict] }));
  const text = (name, number) => (name === "norm_ratio" ? ratioText : numberText)(numberOf(number));

  // -- the comparison: in the page, or from the server once it has compared --------------------

  async function start() {
    let data = JSON.parse(byId("data").textContent);
    while (!data.rows) {
      const answer = await fetchJson("comparison");
      if (answer?.problem) return complain(answer.problem);
      if (answer) data = { ...data, ...answer };
      else await sleep(2);
    }
    byId("status").hidden = true;
    byId("result").hidden = false;
    show(data);
    if (data.tokens?.length) showTokens(data.tokens.at(-1));
  }

  async function showTokens(pass) {
    byId("tokens-section").hidden = false;
    const ask = (sample) => fetchJson(`tokens?pass=${pass}&sample=${sample}`);
    await makeTokens(byId("tokens"), { ask }).show();
  }

  function complain(lines) {
    byId("status").textContent = "These two cannot be compared.";
    byId("status").after(...lines.map((line) => element("p", { class: "remedy" }, line)));
  }

  function show({ rows, findings, suspect, counts, links, first }) {
    const suspectName = suspect === "" ? "(root)" : suspect;
    const isSuspect = (row) => suspect !== null && row.site.split(/[:#]/)[0] === suspectName;
    const stretches = stretchesOf();
    let chosen = 0;
    let query = "";
    const view = { isShared: true }; // both values in one scale of colours
    // hl.shadow has the reference first.
    const hasLocal = rows.some((row) => row.local !== null);
    const [port, reference] = hasLocal ? ["b", "a"] : ["a", "b"];
    const judged = hasLocal ? "local" : "relative";

    // -- what differs, first ---------------------------------------------------------------------

    const siteButton = (site) => {
      const index = rows.findIndex((row) => row.site === site);
      if (index < 0) return element("code", {}, site);
      return element("button", { type: "button", class: "link", onclick: () => choose(index, { focuses: true }) }, element("code", {}, site));
    };

    function showVerdict() {
      const row = rows.find(({ site }) => site === first);
      if (!row) {
        const isEqual = !counts["not comparable"];
        const words = isEqual ? "No value differs beyond noise." : "No value that was compared differs beyond noise.";
        byId("verdict").replaceChildren(glyph(isEqual ? "identical" : "not comparable"), element("p", {}, element("strong", {}, words)));
        return;
      }
      const about = suspect === null ? "No module is the suspect: read the findings." : ["Suspect: ", siteButton(suspectName), "."];
      const error = row.relative === null ? row.why : `relative error ${numberText(numberOf(row.relative))}`;
      byId("verdict").replaceChildren(
        glyph("differs"),
        element("p", {}, element("strong", {}, "The first value beyond noise is ", siteButton(first), `: ${error}.`), " ", element("span", {}, about)),
      );
    }

    function showFindings() {
      const items = findings.map(({ kind, text, site }) => element("li", { class: kind === "site" ? "culprit" : "" },
        element("span", { class: "kind" }, kind !== "site" ? kind : hasLocal ? "at fault" : "where it begins"),
        element("span", {}, text),
        rows.some((row) => row.site === site) ? element("button", { type: "button", class: "link", onclick: () => choose(rows.findIndex((row) => row.site === site), { focuses: true }) }, "Show", element("span", { class: "unseen" }, ` ${site}`)) : null));
      byId("findings").replaceChildren(...items);
      byId("no-findings").hidden = items.length > 0;
      byId("counts").replaceChildren(...Object.entries(counts).filter(([, number]) => number).map(([verdict, number]) => element("li", {}, glyph(verdict), `${number.toLocaleString("en")} ${verdict}`)));
    }

    // -- the sites, equal stretches folded -------------------------------------------------------

    function stretchesOf() {
      const found = [];
      rows.forEach((row, index) => {
        const isQuiet = QUIET.includes(row.verdict);
        const last = found.at(-1);
        if (isQuiet && last?.isQuiet) last.to = index + 1;
        else found.push({ from: index, to: index + 1, isQuiet, isOpen: false });
      });
      return found;
    }
    const isFolded = ({ from, to, isQuiet }) => isQuiet && to - from > 1;

    function items() {
      if (query) return rows.map((row, index) => ({ key: index, index, level: 1 })).filter(({ index }) => rows[index].site.toLowerCase().includes(query));
      return stretches.flatMap((stretch) => {
        const { from, to, isOpen } = stretch;
        const single = (level) => Array.from({ length: to - from }, (_, k) => ({ key: from + k, index: from + k, level }));
        return isFolded(stretch) ? [{ key: `fold-${from}`, stretch, level: 1, isOpen }, ...(isOpen ? single(2) : [])] : single(1);
      });
    }

    function largest(stretch, name) {
      const numbers = rows.slice(stretch.from, stretch.to).map((row) => numberOf(row[name])).filter((number) => !Number.isNaN(number));
      if (!numbers.length) return "";
      const most = Math.max(...numbers);
      return most ? `≤ ${numberText(most)}` : "0";
    }

    function nameCell({ index, stretch }) {
      if (stretch) return counted(stretch.to - stretch.from, "site");
      const row = rows[index];
      return element("span", { class: "name", title: row.site }, row.site, isSuspect(row) ? element("span", { class: "tag" }, "suspect") : null);
    }

    function verdictCell({ index, stretch }) {
      const verdicts = stretch ? [...new Set(rows.slice(stretch.from, stretch.to).map((row) => row.verdict))] : [rows[index].verdict];
      return element("span", { class: "verdict" }, glyph(verdicts.at(-1)), verdicts.join(" or "));
    }

    const numberColumn = (name, title, width) => ({
      title, width, kind: "number",
      cell: ({ index, stretch }) => {
        if (stretch) return name === "relative" || name === "local" ? largest(stretch, name) : "";
        return element("span", { class: name === judged && rows[index].verdict === "differs" ? "bad" : "" }, text(name, rows[index][name]));
      },
    });

    function columns(width) {
      const chosenColumns = [{ title: "Site", width: "minmax(9ch, 1fr)", kind: "path", cell: nameCell }];
      if (width > 420) chosenColumns.push({ title: "Verdict", width: width > 520 ? "15ch" : "12ch", kind: "word", cell: verdictCell });
      if (hasLocal) chosenColumns.push(numberColumn("local", "Local", "9ch"));
      chosenColumns.push(numberColumn("relative", "Relative", "9ch"));
      if (width > 620) chosenColumns.push(numberColumn("norm_ratio", "Norm ratio", "10ch"), numberColumn("worst_row", "Worst row", "9ch"));
      if (width > 720) chosenColumns.push(numberColumn("worst_element", "Worst element", "13ch"));
      if (width > 820) chosenColumns.push(numberColumn("floor_relative", "Floor", "9ch"));
      return chosenColumns;
    }

    // -- one site ------------------------------------------------------------------------------

    function showSite() {
      const row = rows[chosen];
      const other = row.other === row.site ? null : element("p", { class: "quiet" }, "In b: ", element("code", {}, row.other));
      const forms = row.form === row.other_form ? row.form : `${row.form} in ${port}, ${row.other_form} in ${reference}`;
      const where = row.verdict === "identical" ? [] : [row.row === null ? "" : `The worst row is number ${row.row}.`, row.element === null ? "" : `The worst element is [${row.element.join(", ")}].`];
      const numbers = row.relative === null ? null : element("table", { class: "four" },
        element("thead", {}, element("tr", {}, ["Number", "Measured", "Noise floor"].map((title) => element("th", { scope: "col" }, title)))),
        element("tbody", {}, numberRows(row)));
      byId("site-name").textContent = row.site;
      byId("site-body").replaceChildren(...[
        element("p", { class: "state" }, glyph(row.verdict), element("span", {}, element("strong", {}, row.verdict), row.why ? `: ${row.why}` : "")),
        other, numbers, element("p", { class: "quiet" }, [forms && `${forms}.`, ...where].filter(Boolean).join(" ")),
        links[chosen] ? element("div", { class: "values" }) : null,
      ].filter(Boolean));
      if (links[chosen]) showValues(byId("site-body").querySelector(".values"), links[chosen]);
    }

    // The statistics and the maps of both values, and their difference.
    async function showValues(box, link) {
      const answer = await fetchJson(`maps?${link}&state=${encodeURIComponent(state)}`);
      if (!answer || !box.isConnected) return;
      const { own, other, difference, numbers } = answer;
      if (!other) return box.replaceChildren(element("p", { class: "quiet" }, `Only in ${port}.`));
      const names = Object.keys({ ...numbers[0], ...numbers[1] });
      const head = ["Number", "a", "b"].map((title) => element("th", { scope: "col" }, title));
      const lines = names.map((name) => element("tr", {}, element("th", { scope: "row" }, name), numbers.map((side) => element("td", {}, side[name] ?? ""))));
      const maps = element("div", { class: "maps" });
      box.replaceChildren(element("table", { class: "four" }, element("thead", {}, element("tr", {}, head)), element("tbody", {}, lines)), maps);
      const sets = [["a", own, "fwd"], ["b", other, "fwd"], ["a − b", difference, "bwd"]].map(([name, part, ink]) => ({ name, maps: part?.maps, ink })).filter((set) => set.maps);
      const redraw = () => drawMaps(maps, sets, view, redraw);
      if (sets.length) redraw();
      const problem = difference?.problem ?? own.problem;
      if (problem) box.append(element("p", { class: "quiet" }, problem));
    }

    function numberRows(row) {
      const line = (title, about, measured, floor) => element("tr", {}, element("th", { scope: "row", title: about }, title), element("td", {}, measured), element("td", {}, floor));
      const isLocal = row.local !== null;
      const local = isLocal ? [line("Local error", "of the module alone, on its counterpart’s inputs", numberText(numberOf(row.local)), numberText(numberOf(row.floor_relative)))] : [];
      return [...local, ...NUMBERS.map(([name, title, about]) => {
        const floor = numberOf(row[`floor_${name}`]);
        const shown = row.verdict === "identical" || isLocal ? "" : name === "norm_ratio" ? `1 ± ${numberText(floor, 2)}` : numberText(floor);
        return line(title, about, text(name, row[name]), shown);
      })];
    }

    // -- choosing --------------------------------------------------------------------------------

    function choose(index, { focuses = false } = {}) {
      chosen = index;
      if (query && !items().some((item) => item.index === index)) query = byId("search").value = "";
      const stretch = stretches.find(({ from, to }) => from <= index && index < to);
      if (isFolded(stretch)) stretch.isOpen = true;
      const list = items();
      grid.show(list, list.findIndex((item) => item.index === index));
      grid.choose(list.findIndex((item) => item.index === index), { tells: false });
      tell();
      if (focuses) document.querySelector(".rows").focus();
    }

    function tell() {
      curve.mark(chosen);
      showSite();
      history.replaceState(null, "", `#at=${encodeURIComponent(rows[chosen].site)}`);
    }

    const curve = makeDepthCurve(byId("curve"), rows, (index) => choose(index));
    byId("local-key").hidden = !hasLocal;
    byId("error-words").textContent = hasLocal ? "local error: of each module alone" : "relative error";
    const grid = makeRows(byId("sites"), {
      label: "Sites in firing order",
      columns,
      rowClass: ({ index, stretch }) => (stretch ? "quiet-line" : `${rows[index].verdict.replace(" ", "-")}${isSuspect(rows[index]) ? " is-suspect" : ""}`),
      onChoose: ({ index, stretch }) => {
        chosen = index ?? stretch.from;
        tell();
      },
      onToggle: (item) => {
        item.stretch.isOpen = !item.stretch.isOpen;
        const list = items();
        grid.show(list, list.findIndex(({ key }) => key === item.key));
      },
    });

    byId("search").addEventListener("input", (event) => {
      query = event.target.value.trim().toLowerCase();
      const list = items();
      byId("nothing").hidden = list.length > 0;
      grid.show(list, 0);
    });
    byId("search").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && items().length) choose(items()[0].index ?? 0, { focuses: true });
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "/" || event.target.matches("input")) return;
      event.preventDefault();
      byId("search").focus();
    });

    showVerdict();
    showFindings();
    // A value's page leads back by its own address, which has the pass and the call, too.
    const linked = links.indexOf(location.hash.slice(1) || "none");
    const wanted = new URLSearchParams(location.hash.slice(1)).get("at");
    const named = linked < 0 ? rows.findIndex((row) => row.site === wanted) : linked;
    const firstIndex = rows.findIndex((row) => row.site === first);
    const start = named >= 0 ? named : firstIndex;
    if (start >= 0) choose(start);
    else {
      grid.show(items(), 0);
      tell();
    }
  }

  start();
})();
