// The page of a comparison: what differs first, the error over depth, the sites in firing order.

(async () => {
  const LEVELS = {
    differs: "error",
    "not comparable": "warning",
    noise: "note",
    identical: "fine",
  };
  const NUMBERS = [
    ["relative", "Relative error", "the L2 norm of the difference, over that of the reference"],
    ["norm_ratio", "Ratio of norms", "the norm over that of the reference"],
    ["worst_row", "Worst row", "the largest relative error of a vector along the last dimension"],
    ["worst_element", "Worst element", "the largest relative error of an element"],
  ];
  const QUIET = ["identical", "noise"];
  const text = (name, number) =>
    (name === "norm_ratio" ? ratioText : numberText)(parseNumber(number));
  const data = await received();
  if (data) show(data);
  document.body.dataset.ready = "1";

  // The comparison: in the page, or from the server once it has compared.
  async function received() {
    let core = await unpackJson(byId("core").textContent);
    byId("tally").textContent = `Comparing ${core.of ?? ""} …`;
    while (!core.rows) {
      const answer = await fetchJson("comparison");
      if (answer?.problem) return complain(answer.problem);
      if (answer) core = { ...core, ...answer };
      else await sleep(2);
    }
    return core;
  }

  function complain(lines) {
    byId("tally").textContent = "These two cannot be compared.";
    byId("view").replaceChildren(...lines.map((line) => element("p", { class: "none" }, line)));
    return null;
  }

  function show({ rows, findings, suspect, counts, links, first, tokens }) {
    const suspectName = suspect === "" ? "(root)" : suspect;
    const isSuspect = (row) => suspect !== null && row.site.split(/[:#]/)[0] === suspectName;
    const indexOf = (site) => rows.findIndex((row) => row.site === site);
    const stretches = stretchesOf();
    let query = "";
    // Both are in one scale of colours.
    const view = { row: 0, finding: -1, isShared: true, redraw: () => {} };
    // hl.shadow has the reference first.
    const hasLocal = rows.some((row) => row.local !== null);
    const [port, reference] = hasLocal ? ["b", "a"] : ["a", "b"];
    const judged = hasLocal ? "local" : "relative";
    // The verdict tells where it begins; the list would repeat it.
    const told = findings.find(
      ({ site, text }) => site === first && text.startsWith("first beyond noise"),
    );
    const others = findings.filter((finding) => finding !== told);
    const shownFindings = others.map((finding) => {
      const isCause = finding.kind === "site";
      const number = !isCause ? finding.kind : hasLocal ? "at fault" : "where it begins";
      const row = indexOf(finding.site);
      return {
        ...finding,
        level: isCause ? "error" : "note",
        number,
        row: row < 0 ? null : row,
        follows: 0,
      };
    });

    // -- what differs, first ---------------------------------------------------------------------

    function siteButton(site) {
      const index = indexOf(site);
      if (index < 0) return element("code", {}, site);
      const open = () => choose(index, { opens: true });
      return element(
        "button",
        { type: "button", class: "link", onclick: open },
        element("code", {}, breakableText(site)),
      );
    }

    function verdict() {
      const row = rows[indexOf(first)];
      if (!row) {
        const isEqual = !counts["not comparable"];
        return isEqual
          ? callout("fine", boldElement("No value differs beyond noise."))
          : callout("warning", boldElement("No value that was compared differs beyond noise."));
      }
      const about =
        suspect === null
          ? "No module is the suspect: read the findings"
          : ["Suspect: ", siteButton(suspectName)];
      const [, ...hints] = told?.text.split("; ") ?? [];
      const error =
        row.relative === null ? row.why : `relative error ${numberText(parseNumber(row.relative))}`;
      const begin = element(
        "b",
        {},
        "The first value beyond noise is ",
        siteButton(first),
        `: ${error}.`,
      );
      const end = breakableText(`${["", ...hints].join("; ")}.`);
      return callout("error", begin, " ", about, end);
    }

    function showWhatDiffers() {
      const hasSame = !shownFindings.length && rows.every((row) => QUIET.includes(row.verdict));
      const notes = hasSame
        ? ["The inputs, the models and the versions are the same, as far as they were recorded."]
        : [];
      showFindings({ findings: shownFindings, judged: false, notes }, chooseFinding);
      byId("verdict").hidden = false;
      byId("verdict").replaceChildren(verdict());
      const parts = Object.entries(counts).filter(([, number]) => number);
      byId("tally").textContent = `${pluralText(rows.length, "site")}: ${parts
        .map(([name, number]) => `${number.toLocaleString("en")} ${name}`)
        .join(", ")}`;
    }

    // -- the sites, equal stretches folded -------------------------------------------------------

    function stretchesOf() {
      const list = [];
      rows.forEach((row, index) => {
        const isQuiet = QUIET.includes(row.verdict);
        const last = list.at(-1);
        if (isQuiet && last?.isQuiet) last.to = index + 1;
        else list.push({ from: index, to: index + 1, isQuiet, isOpen: false });
      });
      return list;
    }
    const isFolded = ({ from, to, isQuiet }) => isQuiet && to - from > 1;

    function items() {
      const single = (index, level) => ({ key: index, index, level });
      if (query)
        return rows.map((_, index) => single(index, 1)).filter(({ index }) => matches(rows[index]));
      return stretches.flatMap((stretch) => {
        const { from, to, isOpen } = stretch;
        const inside = (level) =>
          Array.from({ length: to - from }, (_, k) => single(from + k, level));
        if (!isFolded(stretch)) return inside(1);
        return [{ key: `fold-${from}`, stretch, level: 1, isOpen }, ...(isOpen ? inside(2) : [])];
      });
    }
    const matches = (row) => row.site.toLowerCase().includes(query);

    function largest(stretch, name) {
      const numbers = rows.slice(stretch.from, stretch.to).map((row) => parseNumber(row[name]));
      const most = numbers.reduce((a, b) => (b > a || Number.isNaN(a) ? b : a), NaN);
      if (Number.isNaN(most)) return "";
      return most ? `≤ ${numberText(most)}` : "0";
    }

    function nameCell({ index, stretch }) {
      if (stretch) return pluralText(stretch.to - stretch.from, "site");
      const tag = isSuspect(rows[index]) ? element("span", { class: "tag" }, "suspect") : null;
      return element("b", { class: "name", title: rows[index].site }, rows[index].site, tag);
    }

    function verdictCell({ index, stretch }) {
      const { from, to } = stretch ?? { from: index, to: index + 1 };
      const verdicts = [...new Set(rows.slice(from, to).map((row) => row.verdict))];
      return element(
        "span",
        { class: "verdict" },
        levelIcon(LEVELS[verdicts.at(-1)]),
        verdicts.join(" or "),
      );
    }

    const numberColumn = (name, title, width) => ({
      title,
      width,
      kind: "number",
      cell: ({ index, stretch }) => {
        if (stretch) return name === "relative" || name === "local" ? largest(stretch, name) : "";
        const isBad = name === judged && rows[index].verdict === "differs";
        return element("span", { class: isBad ? "error" : "" }, text(name, rows[index][name]));
      },
    });

    function columns(width) {
      const list = [{ title: "Site", width: "minmax(110px, 1fr)", kind: "path", cell: nameCell }];
      if (width > 420)
        list.push({ title: "Verdict", width: "132px", kind: "word", cell: verdictCell });
      if (hasLocal) list.push(numberColumn("local", "Local", "66px"));
      list.push(numberColumn("relative", "Relative", "66px"));
      if (width > 620) list.push(numberColumn("norm_ratio", "Norm ratio", "76px"));
      if (width > 700) list.push(numberColumn("worst_row", "Worst row", "70px"));
      if (width > 800) list.push(numberColumn("worst_element", "Worst element", "92px"));
      if (width > 900) list.push(numberColumn("floor_relative", "Floor", "66px"));
      return list;
    }

    // -- one site --------------------------------------------------------------------------------

    function showSite() {
      const row = rows[view.row];
      const other = row.other === row.site ? "" : `in b ${row.other}`;
      const forms =
        row.form === row.other_form
          ? row.form
          : `${row.form} in ${port}, ${row.other_form} in ${reference}`;
      const isSame = row.verdict === "identical";
      const worst = [
        row.row === null || isSame ? "" : `The worst row is number ${row.row}.`,
        row.element === null || isSame ? "" : `The worst element is [${row.element.join(", ")}].`,
      ].filter(Boolean);
      const values = element("div", { class: "values pane-body", style: "padding: 0" });
      const body = element(
        "div",
        { class: "pane-body" },
        callout(LEVELS[row.verdict], boldElement(row.verdict), row.why ? `: ${row.why}` : ""),
        row.relative === null
          ? null
          : smallTable(["Number", "Measured", "Noise floor"], numbersOf(row)),
        worst.length ? quietParagraph(worst.join(" ")) : null,
        links[view.row] ? values : null,
      );
      byId("pane").replaceChildren(
        paneHead(row.site, [other, forms], { onClose: close, copies: true }),
        body,
      );
      if (links[view.row]) showValues(values, links[view.row]);
    }

    function numbersOf(row) {
      const isLocal = row.local !== null;
      const line = (title, about, ...cells) => [element("span", { title: about }, title), ...cells];
      const numbers = [row.local, row.floor_relative].map(parseNumber);
      const local = numbers.map((number) => numberText(number));
      const lines = NUMBERS.map(([name, title, about]) => {
        const floor = parseNumber(row[`floor_${name}`]);
        const around = name === "norm_ratio" ? `1 ± ${numberText(floor, 2)}` : numberText(floor);
        return line(
          title,
          about,
          text(name, row[name]),
          row.verdict === "identical" || isLocal ? "" : around,
        );
      });
      const about = "of the module alone, on its counterpart’s inputs";
      return isLocal ? [line("Local error", about, ...local), ...lines] : lines;
    }

    // The statistics and the maps of both values, and their difference.
    async function showValues(box, link) {
      view.redraw = () => {};
      const answer = await fetchJson(`maps?${link}&${stateParameter()}`);
      if (!answer?.own || !box.isConnected) return;
      const { own, other, difference, numbers } = answer;
      if (!other) return box.replaceChildren(quietParagraph(`Only in ${port}.`));
      const names = Object.keys({ ...numbers[0], ...numbers[1] });
      const maps = element("div", { class: "maps" });
      const lines = names.map((name) => [name, ...numbers.map((side) => side[name] ?? "")]);
      box.replaceChildren(smallTable(["Number", "a", "b"], lines), maps);
      const pairs = [
        ["a", own, "fwd"],
        ["b", other, "fwd"],
        ["a − b", difference, "bwd"],
      ];
      const sets = pairs
        .map(([name, part, colour]) => ({ name, maps: part?.maps, ink: colour }))
        .filter((set) => set.maps);
      view.redraw = () => drawMaps(maps, sets, view, view.redraw);
      if (sets.length) view.redraw();
      const problem = difference?.problem ?? own.problem;
      if (problem) box.append(quietParagraph(problem));
    }

    // -- choosing --------------------------------------------------------------------------------

    function choose(index, { opens = false } = {}) {
      view.row = index;
      if (query && !matches(rows[index])) query = byId("search").value = "";
      const stretch = stretches.find(({ from, to }) => from <= index && index < to);
      if (isFolded(stretch)) stretch.isOpen = true;
      const list = items();
      const place = list.findIndex((item) => item.index === index);
      grid.show(list, place);
      grid.choose(place, { tells: false });
      tell();
      if (opens) {
        openDrawer();
        grid.grid.focus();
      }
    }

    function chooseFinding(index) {
      view.finding = view.finding === index ? -1 : index;
      markPressedFinding(view.finding);
      const row = shownFindings[view.finding]?.row ?? null;
      if (row !== null) choose(row, { opens: true });
    }

    function tell() {
      curve.mark(view.row);
      showSite();
      history.replaceState(null, "", `#at=${encodeURIComponent(rows[view.row].site)}`);
    }

    // The index of the row that the address names. A link may have the pass and the call, too.
    function fromAddress() {
      const linked = links.indexOf(location.hash.slice(1) || "none");
      const wanted = new URLSearchParams(location.hash.slice(1)).get("at");
      return linked < 0 ? indexOf(wanted) : linked;
    }
    addEventListener("hashchange", () => fromAddress() >= 0 && choose(fromAddress()));

    const close = () => closeDrawer(grid.grid);
    const curve = makeDepthCurve(byId("curve"), rows, (index) => choose(index));
    byId("local-key").hidden = !hasLocal;
    byId("error-words").textContent = hasLocal
      ? "local error: of each module alone"
      : "relative error";
    const grid = makeRowGrid(byId("view"), {
      label: "Sites in firing order",
      height: 26,
      columns,
      rowClass: ({ index, stretch }) =>
        stretch ? "quiet-line" : isSuspect(rows[index]) ? "is-suspect" : "",
      onChoose: ({ index, stretch }, isClick) => {
        view.row = index ?? stretch.from;
        tell();
        if (isClick) openDrawer();
      },
      onToggle: (item) => {
        item.stretch.isOpen = !item.stretch.isOpen;
        const list = items();
        grid.show(
          list,
          list.findIndex(({ key }) => key === item.key),
        );
      },
      onKey: (event) => {
        if (event.key !== "Enter") return false;
        openAndFocusPane();
        return true;
      },
    });

    byId("search").addEventListener("input", (event) => {
      query = event.target.value.trim().toLowerCase();
      const list = items();
      byId("nothing").hidden = list.length > 0;
      grid.show(list, 0);
    });
    byId("search").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && items().length) choose(items()[0].index ?? 0, { opens: true });
    });
    document.addEventListener("keydown", (event) =>
      handleFindingKeys(event, {
        findings: shownFindings,
        view,
        onFinding: chooseFinding,
        onEscape: close,
      }),
    );
    onThemeChange(() => view.redraw());

    function offerTokens(pass) {
      const ask = (sample) => fetchJson(`tokens?pass=${pass}&sample=${sample}&${stateParameter()}`);
      const map = makeTokenMap(byId("tokens"), { ask });
      byId("views").hidden = false;
      makeViewSwitch({ onTokens: () => map.show() });
    }

    showWhatDiffers();
    if (tokens?.length) offerTokens(tokens.at(-1));
    const named = fromAddress();
    const start = named >= 0 ? named : indexOf(first);
    if (start >= 0) choose(start);
    else {
      grid.show(items(), 0);
      tell();
    }
  }
})();
