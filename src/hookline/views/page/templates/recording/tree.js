// The calls of modules in firing order, as a tree; flat when they are searched or sorted.

const USUAL_COLUMNS = ["type", "shape", "bars", "std", "zeros", "gradient", "stored"];

// The columns that there are, as of `makeTable`.
function treeColumns(core, view) {
  const { rows, values } = core;
  const forward = (row) => view.table.forward[row];
  const gradients = (row) => view.table.gradients[row];
  const shown = (row) => (forward(row) === undefined ? gradients(row) : [forward(row)]);
  const number = (name) => (row) =>
    forward(row) === undefined ? null : (values[name][forward(row)] ?? null);
  const order = (row) => values.order[shown(row)[0]] ?? null;
  const wholeText = (whole) => whole?.toLocaleString("en") ?? "";
  const ofNumber = (key, title, of, cellText = (at) => numberText(at), width = "66px") => ({
    key,
    title,
    width,
    isNumber: true,
    sortKey: of,
    cell: (row) => cellText(of(row), row),
  });
  const text = (key, title, width, of) => ({ key, title, width, sortKey: of, cell: of });
  const bad = (row) =>
    forward(row) === undefined || values.waiting.has(forward(row))
      ? null
      : (values.bad[forward(row)] ?? 0);
  const isBad = (value) => values.bad[value] > 0;
  const list = [
    text("type", "Type", "minmax(70px, 110px)", (row) => core.types[rows.type[row]]),
    {
      ...text("shape", "Shape", "minmax(86px, 124px)", (row) =>
        shown(row)
          .map((value) => shapeText(core, value))
          .join(", "),
      ),
      sortKey: (row) =>
        shown(row).reduce((sum, value) => (values.numel[value] ?? 0) + (sum ?? 0), null),
      isNumber: true,
      isLeft: true,
    },
    text(
      "dtype",
      "Dtype",
      "70px",
      (row) => core.dtypes[values.dtype[shown(row)[0]]] ?? "",
    ),
    {
      key: "bars",
      title: "Values",
      width: "48px",
      cell: (row) => histogramSparkline(core, forward(row)),
    },
    ofNumber("mean", "Mean", number("mean")),
    ofNumber(
      "std",
      "Std",
      number("std"),
      (std, row) => numberText(std) || (bad(row) ? "NaN" : ""),
    ),
    ofNumber("min", "Min", number("min")),
    ofNumber("max", "Max", number("max")),
    ofNumber("zeros", "Zeros", number("zeros"), zerosCell),
    ofNumber("bad", "NaN, inf", bad, wholeText, "70px"),
    ofNumber(
      "gradient",
      "∇ norm",
      (row) => normOfValues(core, gradients(row)),
      (norm, row) => (gradients(row).some(isBad) ? "NaN" : numberText(norm)),
    ),
    ofNumber("order", "Order", order, wholeText, "58px"),
  ];
  if (core.store) {
    const stored = (row) => values.stored[forward(row)] ?? null;
    list.push(ofNumber("stored", "Size", stored, sizeText, "70px"));
  }
  if (view.own) {
    const mark = (row) =>
      element("i", {
        class: "own-mark",
        style: `--mark: ${view.own.colourOf(row)}`,
        "aria-hidden": "true",
      });
    const own = (row) => view.own.byRow.get(row) ?? null;
    const cell = (given, row) => (given === null ? "" : [mark(row), numberText(given)]);
    list.unshift(ofNumber("own", "Yours", own, cell, "82px"));
  }
  const hasGradients = core.ports.some((port) => port.startsWith("grad"));
  const hasTypes = core.types.some(Boolean); // a store has none
  return list.filter(
    ({ key }) => (key !== "gradient" || hasGradients) && (key !== "type" || hasTypes),
  );
}

// A shape as 2×3; the structure of a tuple or dict as it is.
const shapeText = (core, value) =>
  (core.shapes[core.values.shape[value]] ?? "").replace(/^\[(.*)\]$/, (_, sizes) =>
    sizes.replaceAll(", ", "×"),
  );

function histogramPath(bars, width, height) {
  const step = width / bars.length;
  const steps = bars.map((bar, index) => {
    const top = (height - bar * (height - 1)).toFixed(1);
    return `L${(index * step).toFixed(1)} ${top}H${((index + 1) * step).toFixed(1)}`;
  });
  return `M0 ${height}${steps.join("")}L${width} ${height}Z`;
}

function histogramSparkline(core, value) {
  if (value === undefined || !core.values.std[value]) return "";
  const bars = histogramBars(core.values.hist, value);
  const path = svgElement("path", { d: histogramPath(bars, 48, 16) });
  return svgElement("svg", { class: "spark", viewBox: "0 0 48 16", "aria-hidden": "true" }, path);
}

function zerosCell(share) {
  if (!share) return shareText(share);
  return [shareBar(share), shareText(share)];
}

function makeTree(host, core, view, { onChoose, onEnter, onChange }) {
  const { rows, values } = core;
  const searched = rows.label.map((label, row) => {
    const ports = new Set(values.of[row].map((value) => core.ports[values.port[value]]));
    const names = [...ports].map((port) =>
      port === "output" ? label : `${rows.path[row]}:${port}`,
    );
    const leaves = values.of[row].map((value) => values.leaf[value] ?? "");
    return [label, rows.alias[row] ?? "", ...names, ...leaves].join(" ").toLowerCase();
  });
  const count = (list) => list.reduce((sum, row) => sum + values.of[row].length, 0);
  let columns = treeColumns(core, view);

  const table = makeTable(host, {
    label: "Values in firing order",
    tree: rows,
    labelOf: (row) => rows.label[row],
    searchedOf: (row) => searched[row],
    typeOf: (row) => core.types[rows.type[row]].toLowerCase(),
    isListed: (row) => values.of[row].length > 0,
    columns: () => columns,
    isWanted,
    nameCell,
    cellOf: (column, row) => problemOf(row, column) ?? column.cell(row),
    classOf,
    chosen: () => view.row,
    statusText(shown, query) {
      const all = pluralText(values.row.length, "value");
      return query ? `${count(shown)} of ${all}` : all;
    },
    onChoose,
    onEnter,
    onChange,
    onLayOut: () => rail.layOut(),
    onDraw: (first, last) => rail.draw(first, last),
  });
  const layout = () => ({
    shown: table.shown,
    places: table.places,
    folded: table.folded,
    isFlat: table.isFlat,
  });
  const rail = makeDataflowRail(table.grid, core, view, layout);

  function nameCell(row, isFlat, isFolded) {
    const notes = [];
    if (!isFlat && rows.call[row] >= 0) notes.push(`call ${rows.call[row]}`);
    if (isFolded) notes.push(`${(rows.last[row] - row).toLocaleString("en")} inside`);
    if (rows.alias[row]) notes.push(`also ${rows.alias[row]}`);
    const level = view.levels[row];
    const small = notes.length ? element("small", {}, notes.join(" · ")) : null;
    return [
      level ? levelIcon(level) : null,
      element("b", { class: "name" }, isFlat ? rows.label[row] : rows.name[row]),
      small,
    ].filter(Boolean);
  }

  function isWanted({ key }, width) {
    if (key === "own") return true;
    if (view.columns) return view.columns.includes(key);
    const isLeftOut =
      (width < 520 && ["type", "shape", "bars"].includes(key)) || (width < 640 && key === "type");
    return USUAL_COLUMNS.includes(key) && !isLeftOut;
  }

  // A value without numbers says why, in the place of its first numbers.
  function problemOf(row, column) {
    const problem = values.problem[view.table.forward[row]];
    if (!problem || ["type", "dtype", "gradient", "order", "own"].includes(column.key))
      return undefined;
    if (column.key !== "std" && column.key !== "shape") return "";
    return element(
      "span",
      { class: "problem", title: problem },
      column.key === "std" ? "none" : problem,
    );
  }

  function classOf(row) {
    const classes = [];
    if (values.bad[view.table.forward[row]]) classes.push("is-bad");
    const isBad = (value) => values.bad[value] > 0;
    if (view.table.gradients[row].some(isBad)) classes.push("is-bad-backward");
    const finding = view.findings[view.finding];
    if (finding?.also.includes(row) && isOfPass(finding, view.pass)) classes.push("also");
    return classes.join(" ");
  }

  // Fold the blocks of a long model, but for those that hold an error or a warning.
  function foldAtFirst() {
    if (rows.name.length < 90) return;
    const open = new Set();
    for (const { row, level } of view.findings) {
      for (
        let at = level === "note" || row === null ? -1 : rows.parent[row];
        at >= 0;
        at = rows.parent[at]
      )
        open.add(at);
    }
    for (const row of core.trunk)
      if (rows.children[row].length && !open.has(row)) table.folded.add(row);
  }

  // What is shown, as an SVG.
  function svg() {
    const [, ...others] = table.columnsAt(host.clientWidth);
    const plain = others
      .filter(({ key }) => key !== "bars")
      .map((column) => ({ ...column, cell: (row) => column.cell({ key: row }) }));
    return treeSvg({
      core,
      view,
      shown: table.shown,
      ...rail.drawn(),
      columns: plain,
      isFlat: table.isFlat,
    });
  }

  return Object.assign(table, {
    foldAtFirst,
    svg,
    refresh() {
      columns = treeColumns(core, view);
      table.layOut();
    },
    restoreFolds(labels) {
      table.folded.clear();
      for (const label of labels)
        if (core.rowOfLabel.has(label)) table.folded.add(core.rowOfLabel.get(label));
      table.layOut();
    },
    columns: () => columns,
  });
}

// The line of the data flow at the left of the tree: what flows into what, where it is known.
function makeDataflowRail(grid, core, view, layout) {
  const { rows, values } = core;
  const ROW = 26;
  const LANES = 3;
  const box = element("div", { class: "rail", "aria-hidden": "true" });
  grid.insertBefore(box, grid.lastChild);
  let edges = [];
  let wires = [];
  let knots = new Set();
  let joins = new Set(); // the places at which sources are added up
  let width = 0;

  // An edge ends at the row that stands for its module: a folded module for all inside it.
  function seatOf(row, { places, folded }) {
    let seat = row;
    for (let at = rows.parent[row]; at >= 0; at = rows.parent[at]) if (folded.has(at)) seat = at;
    return places.get(seat);
  }

  function layOut() {
    const now = layout();
    edges = view.edges ?? [];
    const pairs = new Map();
    joins = new Set();
    for (const [from, to, isJoin] of now.isFlat ? [] : edges) {
      const [start, end] = [seatOf(from, now), seatOf(to, now)];
      if (isJoin && start < end && now.shown[end] === to) joins.add(end);
      if (start !== undefined && start < end) pairs.set(`${start} ${end}`, [start, end]);
    }
    knots = new Set([...pairs.values()].flat());
    const sorted = [...knots].sort((a, b) => a - b);
    const next = new Map(sorted.map((place, index) => [place, sorted[index + 1]]));
    const busy = Array.from({ length: LANES }, () => []);
    wires = [...pairs.values()]
      .sort((a, b) => a[1] - a[0] - (b[1] - b[0]))
      .map(([start, end]) => {
        if (next.get(start) === end) return [start, end, 0];
        const isFree = (lane) => lane.every(([a, b]) => b <= start || end <= a);
        const lane = Math.max(0, busy.findIndex(isFree));
        busy[lane].push([start, end]);
        return [start, end, lane + 1];
      });
    const most = wires.reduce((sum, [, , lane]) => Math.max(sum, lane), 0);
    width = wires.length ? 20 + 8 * most : 0;
    grid.style.setProperty("--rail", `${width || 4}px`);
  }

  function draw(first, last) {
    box.replaceChildren();
    if (!width) return;
    const height = grid.clientHeight - ROW;
    const [canvas, pen] = makeCanvas(width, height);
    box.append(canvas);
    pen.translate(0, -grid.scrollTop);
    const x = width - 8;
    const y = (place) => place * ROW + ROW / 2;
    const { shown } = layout();
    pen.lineWidth = 1.5;
    for (const [start, end, lane] of wires) {
      if (end < first - 2 || start > last + 2) continue;
      const isChosen = shown[start] === view.row || shown[end] === view.row;
      pen.strokeStyle = themeColour(isChosen ? "accent" : lane ? "ink-3" : "line-strong");
      pen.beginPath();
      pen.moveTo(x, y(start));
      if (lane) {
        const side = x - 8 * lane;
        pen.quadraticCurveTo(side, y(start), side, y(start) + 10);
        pen.lineTo(side, y(end) - 10);
        pen.quadraticCurveTo(side, y(end), x, y(end));
      } else pen.lineTo(x, y(end));
      pen.stroke();
    }
    for (let place = first; place < last; place += 1)
      if (knots.has(place)) knot(pen, x, y(place), shown[place]);
    for (let place = first; place < last; place += 1)
      if (joins.has(place)) plus(pen, x, y(place) - ROW / 2);
  }

  function knot(pen, x, y, row) {
    const value = view.table.forward[row];
    pen.beginPath();
    if (rows.children[row].length) pen.roundRect(x - 4, y - 4, 8, 8, 2);
    else pen.arc(x, y, 3, 0, 7);
    const isZero = values.zeros[value] === 1;
    const name = values.bad[value]
      ? "error"
      : row === view.row
        ? "accent"
        : isZero
          ? "warning"
          : "ink-3";
    pen.fillStyle = view.own?.colourOf(row) ?? themeColour(name);
    pen.fill();
  }

  // Sources are added up before this row.
  function plus(pen, x, y) {
    pen.beginPath();
    pen.arc(x, y, 4.5, 0, 7);
    pen.fillStyle = themeColour("panel");
    pen.fill();
    pen.strokeStyle = themeColour("ink-2");
    pen.lineWidth = 1.2;
    pen.moveTo(x - 3, y);
    pen.lineTo(x + 3, y);
    pen.moveTo(x, y - 3);
    pen.lineTo(x, y + 3);
    pen.stroke();
  }

  return { layOut, draw, drawn: () => ({ wires, joins }) };
}
