// The calls of modules in firing order, as a tree; flat when they are searched or sorted.

const USUAL_COLUMNS = ["type", "shape", "bars", "std", "zeros", "gradient"];

// The columns that there are: { key, title, width, isNumber, sortKey(row), cell(row) }.
function columnsOf(core, view) {
  const { rows, values } = core;
  const forward = (row) => view.table.forward[row];
  const gradient = (row) => view.table.gradient[row];
  const number = (name) => (row) => (forward(row) === undefined ? null : (values[name][forward(row)] ?? null));
  const ofNumber = (key, title, width = "66px") => ({
    key,
    title,
    width,
    isNumber: true,
    sortKey: number(key),
    cell: (row) => numberText(number(key)(row)),
  });
  const text = (key, title, width, of) => ({ key, title, width, sortKey: of, cell: of });
  const bad = (row) =>
    forward(row) === undefined || values.waiting.has(forward(row)) ? null : (values.bad[forward(row)] ?? 0);
  const list = [
    text("type", "Type", "minmax(70px, 110px)", (row) => core.types[rows.type[row]]),
    {
      ...text("shape", "Shape", "minmax(86px, 124px)", (row) => shapeText(core, forward(row) ?? gradient(row))),
      sortKey: (row) => values.numel[forward(row) ?? gradient(row)] ?? null,
      isNumber: true,
    },
    text("dtype", "Dtype", "70px", (row) => core.dtypes[values.dtype[forward(row) ?? gradient(row)]] ?? ""),
    { key: "bars", title: "Values", width: "48px", cell: (row) => spark(core, forward(row)) },
    ofNumber("mean", "Mean"),
    { ...ofNumber("std", "Std"), cell: (row) => numberText(number("std")(row)) || (bad(row) ? "NaN" : "") },
    ofNumber("min", "Min"),
    ofNumber("max", "Max"),
    { ...ofNumber("zeros", "Zeros"), cell: (row) => zerosCell(number("zeros")(row)) },
    {
      key: "bad",
      title: "NaN, inf",
      width: "70px",
      isNumber: true,
      sortKey: bad,
      cell: (row) => bad(row)?.toLocaleString("en") ?? "",
    },
    {
      key: "gradient",
      title: "∇ norm",
      width: "66px",
      isNumber: true,
      sortKey: (row) => normOf(core, gradient(row)),
      cell: (row) => (values.bad[gradient(row)] ? "NaN" : numberText(normOf(core, gradient(row)))),
    },
    {
      key: "order",
      title: "Order",
      width: "58px",
      isNumber: true,
      sortKey: (row) => values.order[forward(row) ?? gradient(row)] ?? null,
      cell: (row) => values.order[forward(row) ?? gradient(row)]?.toLocaleString("en") ?? "",
    },
  ];
  if (view.own) {
    const mark = (row) =>
      element("i", { class: "own-mark", style: `--mark: ${view.own.colourOf(row)}`, "aria-hidden": "true" });
    list.unshift({
      key: "own",
      title: "Yours",
      width: "82px",
      isNumber: true,
      sortKey: (row) => view.own.byRow.get(row) ?? null,
      cell: (row) => (view.own.byRow.has(row) ? [mark(row), numberText(view.own.byRow.get(row))] : ""),
    });
  }
  const hasGradients = core.ports.some((port) => port.startsWith("grad"));
  return list.filter(({ key }) => key !== "gradient" || hasGradients);
}

const shapeText = (core, value) =>
  value === undefined ? "" : core.shapes[core.values.shape[value]].replaceAll(", ", "×").replace(/^\[(.*)\]$/, "$1");

function barsPath(bars, width, height) {
  const step = width / bars.length;
  const steps = bars.map((bar, index) => {
    const top = (height - bar * (height - 1)).toFixed(1);
    return `L${(index * step).toFixed(1)} ${top}H${((index + 1) * step).toFixed(1)}`;
  });
  return `M0 ${height}${steps.join("")}L${width} ${height}Z`;
}

function spark(core, value) {
  if (value === undefined || !core.values.std[value]) return "";
  const path = shape("path", { d: barsPath(barsOf(core.values.hist, value), 48, 16) });
  return shape("svg", { class: "spark", viewBox: "0 0 48 16", "aria-hidden": "true" }, path);
}

function zerosCell(share) {
  if (!share) return shareText(share);
  return [element("i", { class: "share", style: `--share: ${share}`, "aria-hidden": "true" }), shareText(share)];
}

function makeTree(host, core, view, { onChoose, onEnter }) {
  const { rows, values } = core;
  const HEIGHT = 26;
  const folded = new Set();
  const holders = rows.name.map((_, row) => row).filter((row) => rows.children[row].length);
  const searched = rows.label.map((label, row) => {
    const ports = new Set(values.of[row].map((value) => core.ports[values.port[value]]));
    const names = [...ports].map((port) => (port === "output" ? label : `${rows.path[row]}:${port}`));
    const leaves = values.of[row].map((value) => values.leaf[value] ?? "");
    return [label, rows.alias[row] ?? "", ...names, ...leaves].join(" ").toLowerCase();
  });
  let columns = columnsOf(core, view);
  let query = "";
  let sort = null; // { key, isDown }
  let shown = []; // the rows from top to bottom
  let places = new Map();

  const grid = makeRows(host, {
    label: "Values in firing order",
    height: HEIGHT,
    folds: true,
    columns: chosenColumns,
    rowClass: classOf,
    headOf: headOf,
    sortOf: ({ key }) =>
      key === "bars" ? null : sort?.key !== key ? "none" : sort.isDown ? "descending" : "ascending",
    onChoose: ({ key }, isClick) => onChoose(key, { opens: isClick }),
    onToggle: ({ key }) => fold(key),
    onDraw: (first, last) => rail?.draw(first, last),
    onKey: treeKey,
  });
  const rail = makeRail(grid.grid, core, view, () => ({ shown, places, folded, isFlat: isFlat() }));

  const isFlat = () => Boolean(query || sort);
  const holdsValue = (row) => values.of[row].length > 0;

  // 0 is a match of the whole name, 1 of the path, 2 of the type, 3 none.
  function rankOf(row) {
    if (rows.label[row].toLowerCase() === query) return 0;
    if (searched[row].includes(query)) return 1;
    return core.types[rows.type[row]].toLowerCase().includes(query) ? 2 : 3;
  }

  function order(column) {
    const keys = rows.name.map((_, row) => (column.key === "path" ? rows.label[row] : column.sortKey(row)));
    const isEmpty = (key) => key === null || key === undefined || key === "";
    return (a, b) => {
      const [x, y] = [keys[a], keys[b]];
      if (isEmpty(x) || isEmpty(y)) return isEmpty(x) - isEmpty(y) || a - b; // last either way
      const by = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
      return (sort.isDown ? -by : by) || a - b;
    };
  }

  function layOut() {
    const all = rows.name.map((_, row) => row);
    if (isFlat()) {
      const ranks = query ? all.map(rankOf) : null;
      shown = all.filter((row) => holdsValue(row) && (!ranks || ranks[row] < 3));
      if (sort) shown.sort(order(allColumns().find(({ key }) => key === sort.key)));
      else shown.sort((a, b) => ranks[a] - ranks[b] || a - b);
    } else {
      shown = [];
      for (let row = 0; row < all.length; row += 1) {
        shown.push(row);
        if (folded.has(row)) row = rows.last[row];
      }
    }
    places = new Map(shown.map((row, place) => [row, place]));
    rail.layOut();
    grid.show(shown.map(itemOf), places.get(view.row) ?? -1);
    showState();
  }

  function itemOf(row) {
    const isOpen = isFlat() || !rows.children[row].length ? undefined : !folded.has(row);
    return { key: row, level: isFlat() ? 1 : rows.level[row], isOpen };
  }

  function showState() {
    const all = values.row.length;
    const some = shown.reduce((sum, row) => sum + values.of[row].length, 0);
    byId("status").textContent = query ? `${some} of ${counted(all, "value")}` : counted(all, "value");
    byId("unsort").hidden = !sort;
    byId("fold-all").hidden = isFlat() || !holders.length;
    byId("fold-all").textContent = folded.size ? "Expand all" : "Collapse all";
    const empty = byId("nothing") ?? host.appendChild(element("p", { id: "nothing" }));
    empty.hidden = shown.length > 0;
    empty.textContent = query
      ? `No path or type has “${byId("search").value.trim()}” in it.`
      : "Nothing was recorded.";
  }

  // -- columns -----------------------------------------------------------------------------------

  function nameCell({ key: row }) {
    const notes = [];
    if (!isFlat() && rows.call[row] >= 0) notes.push(`call ${rows.call[row]}`);
    if (folded.has(row) && !isFlat()) notes.push(`${(rows.last[row] - row).toLocaleString("en")} inside`);
    if (rows.alias[row]) notes.push(`also ${rows.alias[row]}`);
    const level = view.levels[row];
    const small = notes.length ? element("small", {}, notes.join(" · ")) : null;
    return [
      level ? glyph(level) : null,
      element("b", { class: "name" }, isFlat() ? rows.label[row] : rows.name[row]),
      small,
    ].filter(Boolean);
  }

  const nameColumn = { key: "path", title: "Module", kind: "path" };
  const allColumns = () => [nameColumn, ...columns];

  function chosenColumns(width) {
    const isNarrow = width < 520;
    const wanted = new Set([...(view.columns ?? USUAL_COLUMNS), ...(view.own ? ["own"] : [])]);
    if (isNarrow && !view.columns) for (const key of ["type", "shape", "bars"]) wanted.delete(key);
    if (width < 640 && !view.columns) wanted.delete("type");
    if (sort) wanted.add(sort.key);
    const others = columns
      .filter(({ key }) => wanted.has(key))
      .map((column) => ({
        ...column,
        kind: `${column.key}${column.isNumber && column.key !== "shape" ? " number" : ""}`,
        cell: ({ key: row }) => problemOf(row, column) ?? column.cell(row),
      }));
    const least = others.reduce((sum, column) => sum + Number(/\d+/.exec(column.width)[0]) + 10, 170);
    grid?.grid.style.setProperty("--least", `${least}px`);
    return [{ ...nameColumn, width: "minmax(150px, 1fr)", cell: nameCell }, ...others];
  }

  // A value without numbers says why, in the place of its first numbers.
  function problemOf(row, column) {
    const problem = values.problem[view.table.forward[row]];
    if (!problem || ["type", "dtype", "gradient", "order", "own"].includes(column.key)) return undefined;
    if (column.key !== "std" && column.key !== "shape") return "";
    return column.key === "std"
      ? element("span", { class: "problem", title: problem }, "none")
      : element("span", { class: "problem", title: problem }, problem);
  }

  function headOf({ key, title }) {
    if (key === "bars") return title;
    return element("button", { type: "button", onclick: () => turnSort(key) }, title);
  }

  function turnSort(key) {
    const isNumber = Boolean(columns.find((column) => column.key === key)?.isNumber);
    if (sort?.key !== key) sort = { key, isDown: isNumber };
    else if (sort.isDown === isNumber) sort = { key, isDown: !isNumber };
    else sort = null;
    layOut();
    host.querySelectorAll(".head button").forEach((button) => {
      if (button.textContent === allColumns().find((c) => c.key === key).title) button.focus();
    });
    view.note();
  }

  function classOf({ key: row }) {
    const classes = [rows.children[row].length && !isFlat() ? "holder" : ""];
    const value = view.table.forward[row];
    if (values.bad[value]) classes.push("is-bad");
    if (values.bad[view.table.gradient[row]]) classes.push("is-bad-backward");
    const finding = view.findings[view.finding];
    if (finding?.also.includes(row)) classes.push(finding.level === "note" ? "also quietly" : "also");
    return classes.filter(Boolean).join(" ");
  }

  // -- folding and keys --------------------------------------------------------------------------

  function fold(row) {
    if (!folded.delete(row)) folded.add(row);
    layOut();
  }

  function foldAll() {
    if (folded.size) folded.clear();
    else for (const row of holders) folded.add(row);
    layOut();
  }

  // Fold the blocks of a long model, but for those that hold an error or a warning.
  function foldAtFirst() {
    if (rows.name.length < 90) return;
    const open = new Set();
    for (const { row, level } of view.findings) {
      for (let at = level === "note" || row === null ? -1 : rows.parent[row]; at >= 0; at = rows.parent[at])
        open.add(at);
    }
    for (const row of core.trunk) if (rows.children[row].length && !open.has(row)) folded.add(row);
  }

  function treeKey(event) {
    const row = grid.chosen?.key;
    if (event.key === "Enter") onEnter();
    else if (row === undefined) return false;
    else if (event.key === "ArrowLeft" && rows.parent[row] >= 0 && !isFlat()) choose(rows.parent[row]);
    else if (event.key === "ArrowRight" && rows.children[row].length && !isFlat()) choose(rows.children[row][0]);
    else return false;
    return true;
  }

  // Show a row, with the folds around it open, and choose it.
  function choose(row, tells = true) {
    let isChanged = false;
    for (let at = rows.parent[row]; at >= 0; at = rows.parent[at]) isChanged = folded.delete(at) || isChanged;
    if (query && !places.has(row)) {
      query = "";
      byId("search").value = "";
      isChanged = true;
    }
    if (isChanged) layOut();
    if (places.has(row)) grid.choose(places.get(row), { tells });
  }

  return {
    grid: grid.grid,
    layOut,
    choose,
    foldAll,
    foldAtFirst,
    draw: () => grid.draw(),
    relayOut: () => grid.layOut(),
    refresh() {
      columns = columnsOf(core, view);
      layOut();
    },
    search(text) {
      query = text.trim().toLowerCase();
      layOut();
      grid.grid.scrollTop = 0;
    },
    setSort(next) {
      sort = next && allColumns().some(({ key }) => key === next.key) ? next : null;
      layOut();
    },
    get sort() {
      return sort;
    },
    get first() {
      return shown[0];
    },
    // What is folded, scrolled and focused; `restore` brings it back.
    get position() {
      return {
        folded: [...folded].map((row) => rows.label[row]),
        scrollTop: grid.grid.scrollTop,
        hasFocus: document.activeElement === grid.grid,
      };
    },
    restoreFolds(labels) {
      folded.clear();
      for (const label of labels) if (core.rowOfLabel.has(label)) folded.add(core.rowOfLabel.get(label));
      layOut();
    },
    // What is shown, as an SVG.
    svg() {
      const wanted = chosenColumns(host.clientWidth)
        .slice(1)
        .filter(({ key }) => key !== "bars");
      const plain = wanted.map((column) => ({ ...column, cell: (row) => column.cell({ key: row }) }));
      return treeSvg({ core, view, shown, ...rail.drawn(), columns: plain, isFlat: isFlat() });
    },
    get best() {
      return query && sort ? [...shown].sort((a, b) => rankOf(a) - rankOf(b))[0] : shown[0];
    },
    get columns() {
      return columns;
    },
  };
}

// The line of the data flow at the left of the tree: what flows into what, where it is known.
function makeRail(grid, core, view, layout) {
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
    const [canvas, pen] = canvasOf(width, height);
    box.append(canvas);
    pen.translate(0, -grid.scrollTop);
    const x = width - 8;
    const y = (place) => place * ROW + ROW / 2;
    const { shown } = layout();
    pen.lineWidth = 1.5;
    for (const [start, end, lane] of wires) {
      if (end < first - 2 || start > last + 2) continue;
      const isChosen = shown[start] === view.row || shown[end] === view.row;
      pen.strokeStyle = ink(isChosen ? "accent" : lane ? "ink-3" : "line-strong");
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
    for (let place = first; place < last; place += 1) if (knots.has(place)) knot(pen, x, y(place), shown[place]);
    for (let place = first; place < last; place += 1) if (joins.has(place)) plus(pen, x, y(place) - ROW / 2);
  }

  function knot(pen, x, y, row) {
    const value = view.table.forward[row];
    pen.beginPath();
    if (rows.children[row].length) pen.roundRect(x - 4, y - 4, 8, 8, 2);
    else pen.arc(x, y, 3, 0, 7);
    const isZero = values.zeros[value] === 1;
    const name = values.bad[value] ? "error" : row === view.row ? "accent" : isZero ? "warning" : "ink-3";
    pen.fillStyle = view.own?.colourOf(row) ?? ink(name);
    pen.fill();
  }

  // Sources are added up before this row.
  function plus(pen, x, y) {
    pen.beginPath();
    pen.arc(x, y, 4.5, 0, 7);
    pen.fillStyle = ink("panel");
    pen.fill();
    pen.strokeStyle = ink("ink-2");
    pen.lineWidth = 1.2;
    pen.moveTo(x - 3, y);
    pen.lineTo(x + 3, y);
    pen.moveTo(x, y - 3);
    pen.lineTo(x, y + 3);
    pen.stroke();
  }

  return { layOut, draw, drawn: () => ({ wires, joins }) };
}
