// A grid of rows of one height, of which only those in view are in the page: for thousands of rows.

// Create the grid in an element. `columns(width)` gives the columns for a width, each
// { title, width, kind, cell(item) }; a cell is a text or a node. An item is
// { key, level, isOpen }: isOpen is undefined for a row that holds no others.
// Optional: `headOf(column)` makes a header cell's content, `sortOf(column)` its aria-sort;
// `onDraw(first, last)` follows each drawing; `onKey(event)` may take a key; with `folds`, the mark
// alone opens and closes a row, and Enter is left to `onKey`.
function makeRowGrid(host, options) {
  const { label, columns, rowClass, onChoose, onToggle, folds = false } = options;
  const { headOf = (column) => column.title, sortOf = () => null } = options;
  const { onDraw = () => {}, onKey = () => false, height: HEIGHT = 28 } = options;
  const MARGIN = 6; // rows beyond both edges, so that scrolling shows no gap
  let items = [];
  let chosen = 0;
  let shown = [];

  const head = element("div", { role: "row", class: "line head", "aria-rowindex": 1 });
  const body = element("div", { role: "rowgroup", class: "window" });
  const grid = element(
    "div",
    { class: "rows", role: "treegrid", tabindex: 0, "aria-label": label },
    element("div", { role: "rowgroup", class: "heads" }, head),
    body,
  );
  host.replaceChildren(grid);

  function layOut() {
    shown = columns(host.clientWidth);
    grid.style.setProperty("--columns", shown.map((column) => column.width).join(" "));
    grid.setAttribute("aria-colcount", shown.length);
    grid.setAttribute("aria-rowcount", items.length + 1);
    const focused = head.contains(document.activeElement) ? document.activeElement : null;
    head.replaceChildren(
      ...shown.map((column) => {
        const attributes = {
          role: "columnheader",
          class: column.kind,
          "aria-sort": sortOf(column),
        };
        return element("span", attributes, headOf(column));
      }),
    );
    for (const button of focused ? head.querySelectorAll("button") : [])
      if (button.textContent === focused.textContent) button.focus();
    body.style.height = `${Math.max(items.length, 1) * HEIGHT}px`;
    draw();
  }

  function draw() {
    const first = clamp(Math.floor(grid.scrollTop / HEIGHT) - MARGIN, 0, items.length);
    const last = clamp(
      Math.ceil((grid.scrollTop + grid.clientHeight) / HEIGHT) + MARGIN,
      0,
      items.length,
    );
    body.replaceChildren(...items.slice(first, last).map((item, at) => rowOf(item, first + at)));
    const active = body.querySelector("[aria-selected=true]");
    if (active) grid.setAttribute("aria-activedescendant", active.id);
    else grid.removeAttribute("aria-activedescendant");
    onDraw(first, last);
  }

  function rowOf(item, index) {
    const attributes = {
      role: "row",
      class: `line ${rowClass(item)}`,
      id: `row-${item.key}`,
      style: `top: ${index * HEIGHT}px; --level: ${item.level - 1}`,
      "data-index": index,
      "aria-rowindex": index + 2,
      "aria-level": item.level,
      "aria-selected": String(index === chosen),
      "aria-expanded": item.isOpen === undefined ? null : String(item.isOpen),
    };
    const cells = shown.map(({ kind, cell }, place) => {
      const mark = place ? null : element("span", { class: "mark", "aria-hidden": "true" });
      return element("span", { role: "gridcell", class: kind }, mark, cell(item));
    });
    return element("div", attributes, cells);
  }

  function choose(index, { scrolls = true, tells = true, isClick = false } = {}) {
    chosen = clamp(index, 0, items.length - 1);
    const top = chosen * HEIGHT;
    const room = grid.clientHeight - HEIGHT; // the head stays
    const isHidden = top < grid.scrollTop || top + HEIGHT > grid.scrollTop + room;
    if (scrolls && isHidden) grid.scrollTop = top - room / 2;
    draw();
    if (tells && items[chosen]) onChoose(items[chosen], isClick);
  }

  grid.addEventListener("scroll", () => requestAnimationFrame(draw), { passive: true });
  body.addEventListener("click", (event) => {
    const row = event.target.closest(".line");
    if (!row) return;
    const index = Number(row.dataset.index);
    const item = items[index];
    const turns = item.isOpen !== undefined && (!folds || event.target.closest(".mark"));
    choose(index, { scrolls: false, isClick: !turns });
    if (turns) onToggle(item);
  });
  grid.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target !== grid) return;
    const step = {
      ArrowDown: 1,
      ArrowUp: -1,
      PageDown: 15,
      PageUp: -15,
      Home: -Infinity,
      End: Infinity,
    }[event.key];
    const item = items[chosen];
    const turning = [item?.isOpen ? "ArrowLeft" : "ArrowRight", ...(folds ? [] : ["Enter"])];
    const turns = item?.isOpen !== undefined && turning.includes(event.key);
    if (!step && !turns && !onKey(event)) return;
    event.preventDefault();
    if (turns) onToggle(item);
    else if (step) choose(chosen + step);
  });
  new ResizeObserver(layOut).observe(host);

  return {
    grid,
    // Show items, of which one is chosen; nobody is told.
    show(newItems, index) {
      items = newItems;
      chosen = index;
      layOut();
    },
    draw,
    layOut,
    choose,
    get chosen() {
      return items[chosen];
    },
  };
}
