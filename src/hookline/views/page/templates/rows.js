// A grid of rows of one height, of which only those in view are in the page: for thousands of rows.

// Create the grid in an element. `columns(width)` gives the columns for a width, each
// { title, width, kind, cell(item) }; a cell is a text or a node. An item is
// { key, level, isOpen }: isOpen is undefined for a row that holds no others.
function makeRows(host, { label, columns, rowClass, onChoose, onToggle }) {
  const HEIGHT = 28;
  const MARGIN = 6; // rows beyond both edges, so that scrolling shows no gap
  let items = [];
  let chosen = 0;
  let shown = [];

  const head = element("div", { role: "row", class: "line head", "aria-rowindex": 1 });
  const body = element("div", { role: "rowgroup", class: "window" });
  const grid = element("div", { class: "rows", role: "treegrid", tabindex: 0, "aria-label": label }, element("div", { role: "rowgroup" }, head), body);
  host.replaceChildren(grid);

  function layOut() {
    shown = columns(host.clientWidth);
    grid.style.setProperty("--columns", shown.map((column) => column.width).join(" "));
    grid.setAttribute("aria-colcount", shown.length);
    grid.setAttribute("aria-rowcount", items.length + 1);
    head.replaceChildren(...shown.map(({ title, kind }) => element("span", { role: "columnheader", class: kind }, title)));
    body.style.height = `${Math.max(items.length, 1) * HEIGHT}px`;
    draw();
  }

  function draw() {
    const first = clamp(Math.floor(grid.scrollTop / HEIGHT) - MARGIN, 0, items.length);
    const last = clamp(Math.ceil((grid.scrollTop + grid.clientHeight) / HEIGHT) + MARGIN, 0, items.length);
    body.replaceChildren(...items.slice(first, last).map((item, at) => rowOf(item, first + at)));
    const active = body.querySelector("[aria-selected=true]");
    if (active) grid.setAttribute("aria-activedescendant", active.id);
    else grid.removeAttribute("aria-activedescendant");
  }

  function rowOf(item, index) {
    const attributes = {
      role: "row", class: `line ${rowClass(item)}`, id: `row-${item.key}`, style: `top: ${index * HEIGHT}px`, "data-index": index,
      "aria-rowindex": index + 2, "aria-level": item.level, "aria-selected": String(index === chosen),
      "aria-expanded": item.isOpen === undefined ? null : String(item.isOpen),
    };
    const cells = shown.map(({ kind, cell }, place) => {
      const fold = item.isOpen === undefined || place ? null : element("span", { class: "mark", "aria-hidden": "true" });
      return element("span", { role: "gridcell", class: kind }, fold, cell(item));
    });
    return element("div", attributes, cells);
  }

  function choose(index, { scrolls = true, tells = true } = {}) {
    chosen = clamp(index, 0, items.length - 1);
    const top = chosen * HEIGHT;
    const room = grid.clientHeight - HEIGHT; // the head stays
    if (scrolls && (top < grid.scrollTop || top + HEIGHT > grid.scrollTop + room)) grid.scrollTop = top - room / 2;
    draw();
    if (tells && items[chosen]) onChoose(items[chosen]);
  }

  grid.addEventListener("scroll", () => requestAnimationFrame(draw), { passive: true });
  body.addEventListener("click", (event) => {
    const row = event.target.closest(".line");
    if (!row) return;
    const item = items[Number(row.dataset.index)];
    choose(Number(row.dataset.index), { scrolls: false });
    if (item.isOpen !== undefined) onToggle(item);
  });
  grid.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15, Home: -Infinity, End: Infinity }[event.key];
    const item = items[chosen];
    const turns = item?.isOpen !== undefined && (event.key === "Enter" || event.key === (item.isOpen ? "ArrowLeft" : "ArrowRight"));
    if (event.altKey || event.ctrlKey || event.metaKey || (!step && !turns)) return;
    event.preventDefault();
    if (turns) onToggle(item);
    else choose(chosen + step);
  });
  new ResizeObserver(layOut).observe(host);

  return {
    // Show items, of which one is chosen; nobody is told.
    show(newItems, index) {
      items = newItems;
      chosen = index;
      layOut();
    },
    choose,
    get chosen() { return items[chosen]; },
  };
}
