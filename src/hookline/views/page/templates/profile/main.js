// The page of a profile: where the time goes, the calls as nested bars, the modules as a table.

(async () => {
  const MOST = 8; // of the modules that cost most
  const COSTS = { seconds: "time", flops: "FLOPs", kept: "memory kept for backward" };
  const core = await unpackJson(byId("core").textContent);
  const top = linkCalls(core.calls, core.around);
  const paths = core.tables[0].rows.path.map((path) => path || "(root)");
  const rowOf = new Map(paths.map((path, row) => [path, row]));
  const { type: types, depth: depths, parameters, aliases } = core.tables[0].rows;
  const view = { row: -1, finding: -1, table: core.tables.at(-1) };
  const tree = treeOfParents(holdersOf(depths));
  const sum = (cost, row) =>
    PHASES.reduce((all, phase) => all + view.table.rows[`${cost}_${phase}`][row], 0);
  const part = (cost, phase, row) => view.table.rows[`${cost}_${phase}`][row];
  const textOf = (cost, number) =>
    ({ seconds: durationText, flops: countText, kept: sizeText })[cost](number);
  const columns = columnsOf();

  // Rows stand depth first: the row that holds one is the last before it with a lesser depth.
  function holdersOf(levels) {
    const open = [];
    return levels.map((level, row) => {
      const holder = level ? open[level - 1] : -1;
      open[level] = row;
      return holder;
    });
  }

  function columnsOf() {
    const time = (row, seconds) =>
      seconds && `${view.table.rows.is_exact[row] ? "" : "~"}${durationText(seconds)}`;
    const column = (key, title, from, of, cell, width = "78px") => ({
      key,
      title,
      from,
      width,
      isNumber: true,
      sortKey: (row) => of(row) || null,
      cell: (row) => cell(row, of(row)) || "",
    });
    const text = (words) => (_, number) => words(number);
    const all = [
      {
        key: "type",
        title: "Type",
        from: 840,
        width: "minmax(70px, 120px)",
        sortKey: (r) => types[r],
        cell: (r) => types[r],
      },
      column(
        "calls",
        "Calls",
        530,
        (row) => view.table.rows.calls[row],
        text((n) => String(Number(n.toPrecision(4)))),
      ),
      column("self", "Itself", 0, (row) => sum("self_time", row), selfCell, "104px"),
      column("time", "Time", 0, (row) => sum("time", row), time),
      column("flops", "FLOPs", 440, (row) => sum("flops", row), text(countText)),
      column("forward", "Forward", 620, (row) => part("time", "forward", row), time),
      column("backward", "Backward", 700, (row) => part("time", "backward", row), time),
      column("recompute", "Recompute", 1010, (row) => part("time", "recompute", row), time),
      column("kept", "Kept", 930, (row) => view.table.rows.activation_bytes[row], text(sizeText)),
      column("peak", "Peak", 1100, (row) => view.table.rows.peak_bytes[row], text(sizeText)),
      column(
        "parameters",
        "Parameters",
        1190,
        (row) => parameters[row],
        text((n) => n.toLocaleString("en")),
      ),
    ];
    return all.filter(({ sortKey }) => paths.some((_, row) => sortKey(row)));
  }

  function selfCell(row, seconds) {
    const all = sum("time", 0);
    return seconds ? [shareBar(all ? seconds / all : 0), durationText(seconds)] : "";
  }

  const table = makeTable(byId("view"), {
    label: "Modules in the order of the model",
    tree,
    labelOf: (row) => paths[row],
    searchedOf: (row) => [paths[row], ...aliases[row]].join(" ").toLowerCase(),
    typeOf: (row) => types[row].toLowerCase(),
    columns: () => columns,
    isWanted: ({ from }, width) => width >= from,
    nameCell: (row, isFlat, isFolded) => [
      element("b", { class: "name" }, isFlat ? paths[row] : nameOf(row)),
      isFolded
        ? element("small", {}, `${(tree.last[row] - row).toLocaleString("en")} inside`)
        : null,
    ],
    chosen: () => view.row,
    statusText: (shown) =>
      (shown.length < paths.length ? `${shown.length} of ` : "") +
      pluralText(paths.length, "module"),
    onChoose: chosen,
    onEnter: openAndFocusPane,
  });

  function nameOf(row) {
    const holder = tree.parent[row] > 0 ? `${paths[tree.parent[row]]}.` : "";
    return paths[row].slice(holder.length);
  }

  const flame = makeFlameGraph(byId("flame"), top, {
    typeOf: (path) => types[rowOf.get(path)] ?? "",
    textOf: (cost, number) => textOf(cost, number) || "none",
    onReadout: (text) => (byId("readout").textContent = text),
    onChoose(path) {
      table.choose(rowOf.get(path), false);
      chosen(rowOf.get(path), {}, false);
    },
  });

  // -- what is chosen ----------------------------------------------------------------------------

  function chosen(row, { opens = false } = {}, marks = true) {
    view.row = row;
    view.finding = costly().indexOf(row);
    markPressedFinding(view.finding);
    table.draw();
    drawPane();
    if (marks) flame.mark(paths[row]);
    if (opens) openDrawer();
    writeToAddress(new URLSearchParams(), paths[row]);
  }

  const fromAddress = () => rowOf.get(new URLSearchParams(location.hash.slice(1)).get("at"));
  addEventListener("hashchange", () => {
    const row = fromAddress();
    if (row === undefined) return;
    table.choose(row, false);
    chosen(row);
  });

  function drawPane() {
    const { row } = view;
    const { rows } = view.table;
    const about = [
      types[row],
      rows.calls[row] ? pluralText(Number(rows.calls[row].toPrecision(4)), "call") : "never called",
    ];
    const line = (name, text, ...numbers) => [name, ...numbers.map((number) => text(number))];
    const phases = PHASES.filter((phase) => part("time", phase, row) || part("flops", phase, row));
    const lines = [
      ...phases.map((phase) =>
        line(
          `Time, ${phase}`,
          durationText,
          part("time", phase, row),
          part("self_time", phase, row),
        ),
      ),
      ...phases.map((phase) =>
        line(
          `FLOPs, ${phase}`,
          countText,
          part("flops", phase, row),
          part("self_flops", phase, row),
        ),
      ),
      line(
        "Kept for backward",
        sizeText,
        rows.activation_bytes[row],
        rows.self_activation_bytes[row],
      ),
      line("Peak", sizeText, rows.peak_bytes[row], 0),
      line("Parameters", (n) => (n ? n.toLocaleString("en") : ""), parameters[row], 0),
    ].filter(([, ...texts]) => texts.some(Boolean));
    const all = sum("time", 0);
    const share = all
      ? `${shareText(sum("time", row) / all)} of the model’s time, ` +
        `${shareText(sum("self_time", row) / all)} by itself.`
      : "";
    const spread = rows.spread[row]
      ? ` Half of the passes lie within ${durationText(rows.spread[row])}.`
      : "";
    const rough = rows.is_exact[row]
      ? ""
      : "Its calls are so short that hooks may add a tenth or more to its time (~).";
    const head = paneHead(paths[row], about, { onClose: close, copies: true });
    const body = element(
      "div",
      { class: "pane-body" },
      rough ? callout("note", rough) : null,
      quietParagraph(share + spread),
      smallTable(["Cost", "With those inside", "Itself"], lines),
      aliases[row].length ? quietParagraph(`also ${aliases[row].join(", ")}`) : null,
    );
    byId("pane").replaceChildren(head, body);
  }

  function close() {
    closeDrawer(table.grid);
  }

  // -- where the time goes -----------------------------------------------------------------------

  const costly = () =>
    paths
      .map((_, row) => row)
      .filter((row) => sum("self_time", row))
      .sort((a, b) => sum("self_time", b) - sum("self_time", a))
      .slice(0, MOST);

  function showCosts() {
    const all = sum("time", 0);
    const items = costly().map((row) => {
      const seconds = sum("self_time", row);
      const phases = PHASES.filter((phase) => part("self_time", phase, row)).map(
        (phase) => `${phase} ${durationText(part("self_time", phase, row))}`,
      );
      const type = element("small", { class: "quiet" }, types[row]);
      const heading = [breakableText(paths[row]), " ", type];
      const share = shareText(all ? seconds / all : 0);
      return findingButtonOfParts([element("span"), heading, share, phases.join(", ")], () => {
        table.choose(row, false);
        chosen(row, { opens: true });
      });
    });
    fillList("findings", items);
    byId("tally").textContent =
      "the modules that cost most by themselves, of the time in the model";
    byId("totals").replaceChildren(
      numbersList(view.table.totals.map(([name, text]) => [name, text, false, text.length > 18])),
    );
    fillList("notices", view.table.notes);
    byId("notices").hidden = !view.table.notes.length;
    markPressedFinding(costly().indexOf(view.row));
  }

  // -- menus, keys, and the beginning ------------------------------------------------------------

  function fill(id, options, selected, onSelect) {
    fillMenu(byId(id), options, selected);
    byId(id).addEventListener("change", onSelect);
  }

  const hasCost = (node, of) => of(node) || node.children.some((inner) => hasCost(inner, of));
  const costs = Object.entries(COSTS).filter(
    ([cost]) => cost === "seconds" || hasCost(top, (node) => [node[cost]].flat().some(Boolean)),
  );
  const phases = PHASES.map((phase, place) => [place, phase]).filter(([place]) =>
    hasCost(top, (node) => node.seconds[place]),
  );
  const redrawFlame = () => flame.show(byId("cost").value, Number(byId("phase").value));
  fill("cost", costs, "seconds", redrawFlame);
  fill("phase", [[-1, "all"], ...phases], "-1", redrawFlame);
  fill(
    "numbers",
    core.tables.map(({ name }, place) => [place, name]),
    String(core.tables.length - 1),
    (event) => {
      view.table = core.tables[Number(event.target.value)];
      showCosts();
      table.layOut();
      drawPane();
    },
  );
  byId("numbers-label").hidden = core.tables.length < 2;
  document.addEventListener("keydown", (event) =>
    handleFindingKeys(event, {
      findings: costly(),
      view,
      onFinding: (index) => chosen(costly()[index]),
      onEscape: close,
    }),
  );
  onThemeChange(flame.draw);
  new ResizeObserver(flame.draw).observe(byId("flame").parentElement);

  showCosts();
  table.layOut();
  const start = fromAddress() ?? costly()[0] ?? 0;
  table.choose(start, false);
  chosen(start);
  document.body.dataset.ready = "1";
})();
