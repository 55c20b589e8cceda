// A heat map of signed numbers: a picture, over which arrow keys and the pointer move from cell to
// cell. Screen readers get the cell that is chosen, as a row with its header.

// Create the map in an element. `show(table)` draws
// { rows, columns, values, marks, rowTitle, columnTitle }: `values[row * columns.length + column]`
// is a number, NaN where there is none, or undefined without a change; `marks` are dots.
// `about(row, column)` gives the words of a cell, `onChoose(row, column)` is told of a choice.
function makeHeatMap(host, { label, about, onChoose }) {
  const SMALL = 11;
  let table = { rows: [], columns: [], values: [], marks: [] };
  let at = [0, 0];
  let box = { left: 0, top: 0, width: 1, height: 1 };

  const canvas = element("canvas", { "aria-hidden": "true" });
  const frame = element("span", { class: "chosen-cell", "aria-hidden": "true" });
  const rowHeader = element("span", { role: "rowheader" });
  const cell = element("span", { role: "gridcell", id: "cell" });
  const line = element("div", { role: "row", class: "unseen" }, rowHeader, cell);
  const grid = element(
    "div",
    {
      class: "heat-map",
      role: "grid",
      tabindex: 0,
      hidden: true, // until there are numbers: before, a key or the pointer would find no cell
      "aria-label": label,
      "aria-activedescendant": "cell",
      "aria-readonly": "true",
    },
    line,
    canvas,
    frame,
  );
  host.replaceChildren(grid);

  const size = () => [table.rows.length, table.columns.length];
  const largest = () =>
    table.values.reduce(
      (most, number) =>
        Number.isFinite(number) && Math.abs(number) > most ? Math.abs(number) : most,
      0,
    );

  function draw() {
    const [nRows, nColumns] = size();
    if (!nRows || !nColumns || !host.clientWidth) return;
    const context = canvas.getContext("2d");
    const style = getComputedStyle(grid);
    const font = (pixels) => {
      context.font = `${pixels}px ${style.fontFamily}`;
    };
    font(SMALL);
    const room = host.clientWidth;
    const widest = (texts) =>
      texts.reduce((most, text) => Math.max(most, context.measureText(text).width), 0);
    const left = Math.min(Math.ceil(widest(table.rows)) + 10, Math.floor(room * 0.4));
    const width = clamp((room - left - 2) / nColumns, 1, 46);
    const height = clamp(560 / nRows, 2, 24);
    const isTurned = widest(table.columns) + 6 > width;
    const top =
      table.columns.length > 1 || table.columns[0]
        ? Math.min(isTurned ? Math.ceil(widest(table.columns)) + 8 : 18, 110)
        : 4;
    box = { left, top, width, height };
    const pixels = Math.min(3, devicePixelRatio || 1);
    const total = [left + width * nColumns + 2, top + height * nRows + 2];
    [canvas.width, canvas.height] = total.map((length) => Math.round(length * pixels));
    [canvas.style.width, canvas.style.height] = total.map((length) => `${length}px`);
    context.scale(pixels, pixels);
    paint(context, style, largest() || 1);
    font(SMALL);
    labels(context, style, isTurned);
    place();
  }

  function paint(context, style, most) {
    const { left, top, width, height } = box;
    const gap = width > 7 && height > 7 ? 1 : 0;
    table.values.forEach((number, index) => {
      if (number === undefined) return;
      const x = left + (index % table.columns.length) * width;
      const y = top + Math.floor(index / table.columns.length) * height;
      if (gap) {
        context.fillStyle = style.borderColor; // lines, so that a cell near zero is told from none
        context.fillRect(x - 1, y - 1, width + 1, height + 1);
      }
      context.fillStyle = Number.isFinite(number)
        ? cssColour(signedColour(number / most))
        : "#d55e00";
      context.fillRect(x, y, width - gap, height - gap);
      if (!table.marks[index]) return;
      context.fillStyle = style.color;
      context.beginPath();
      context.arc(
        x + (width - gap) / 2,
        y + (height - gap) / 2,
        clamp(Math.min(width, height) / 8, 0.6, 2),
        0,
        7,
      );
      context.fill();
    });
  }

  // Name rows and columns, as many as there is room for.
  function labels(context, style, isTurned) {
    const { left, top, width, height } = box;
    context.fillStyle = style.color;
    context.textBaseline = "middle";
    context.textAlign = "right";
    const everyRow = Math.ceil((SMALL + 2) / height);
    table.rows.forEach((text, row) => {
      if (row % everyRow) return;
      const shown = shortenToWidth(context, text, left - 8);
      context.fillText(shown, left - 6, top + (row + 0.5) * height);
    });
    const everyColumn = isTurned ? Math.ceil((SMALL + 2) / width) : 1;
    table.columns.forEach((text, column) => {
      if (column % everyColumn) return;
      context.save();
      context.translate(left + (column + 0.5) * width, top - 5);
      if (isTurned) context.rotate(-Math.PI / 2);
      context.textAlign = isTurned ? "left" : "center";
      const shown = isTurned ? shortenToWidth(context, text, top - 8) : text;
      context.fillText(shown, 0, isTurned ? 0 : -5);
      context.restore();
    });
  }

  function place() {
    const [row, column] = at;
    const { left, top, width, height } = box;
    Object.assign(frame.style, {
      left: `${left + column * width - 2}px`,
      top: `${top + row * height - 2}px`,
      width: `${width + 3}px`,
      height: `${height + 3}px`,
    });
  }

  function choose(row, column, { tells = true } = {}) {
    const [nRows, nColumns] = size();
    at = [clamp(row, 0, nRows - 1), clamp(column, 0, nColumns - 1)];
    line.setAttribute("aria-rowindex", at[0] + 1);
    cell.setAttribute("aria-colindex", at[1] + 1);
    rowHeader.textContent = table.rows[at[0]];
    cell.textContent = about(...at);
    place();
    if (tells) onChoose(...at);
  }

  function cellAt(event) {
    const bounds = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - bounds.left - box.left) / box.width);
    const row = Math.floor((event.clientY - bounds.top - box.top) / box.height);
    const [nRows, nColumns] = size();
    return row >= 0 && row < nRows && column >= 0 && column < nColumns ? [row, column] : null;
  }
  canvas.addEventListener("click", (event) => {
    const hit = cellAt(event);
    if (hit) choose(...hit);
  });
  canvas.addEventListener("pointermove", (event) => {
    const hit = cellAt(event);
    canvas.title = hit ? about(...hit) : "";
  });
  grid.addEventListener("keydown", (event) => {
    const step = gridStepOfKey(event);
    if (!step) return;
    event.preventDefault();
    choose(at[0] + step[0], at[1] + step[1]);
  });
  new ResizeObserver(draw).observe(host);
  onThemeChange(draw);

  return {
    show(newTable) {
      table = newTable;
      grid.hidden = !table.rows.length || !table.columns.length;
      if (grid.hidden) return;
      grid.setAttribute("aria-rowcount", table.rows.length);
      grid.setAttribute("aria-colcount", table.columns.length);
      draw();
      choose(...at, { tells: false });
    },
    choose,
    get largest() {
      return largest();
    },
  };
}
