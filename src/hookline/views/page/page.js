
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const table = byId("modules");
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const lines = [...body.rows].map((element, number) => ({ element, number, ...data.lines[number] }));
  const holders = lines.filter((line) => foldOf(line)).map((line) => line.number);
  const nValues = lines.filter((line) => line.holdsValue).length;
  const collapsed = new Set();
  let sort = null; // { column, descending }, or null for the tree
  let query = "";

  function foldOf(line) {
    return line.element.querySelector(".fold");
  }

  // -- which lines show, and in which order --------------------------------------------------

  function compare(a, b) {
    const [x, y] = [a.keys[sort.column], b.keys[sort.column]];
    if (x === y) return a.number - b.number;
    // Lines that have nothing here come last, whichever way the column is sorted.
    if (x === null || x === "") return 1;
    if (y === null || y === "") return -1;
    const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
    return sort.descending ? -order : order;
  }

  function isShown(line, underCollapsed) {
    if (query && !line.text.includes(query)) return false;
    if (sort && !line.holdsValue) return false;
    return Boolean(sort || query) || !underCollapsed.has(line.number);
  }

  function render() {
    const underCollapsed = new Set();
    for (const { number, parent } of lines) {
      // A parent comes before what it holds, so one pass over the lines is enough.
      if (parent !== null && (collapsed.has(parent) || underCollapsed.has(parent))) underCollapsed.add(number);
    }
    const ordered = sort ? [...lines].sort(compare) : lines;
    body.append(...ordered.map((line) => line.element));
    let nShown = 0;
    for (const line of lines) {
      line.element.hidden = !isShown(line, underCollapsed);
      if (!line.element.hidden && line.holdsValue) nShown += 1;
    }
    table.classList.toggle("flat", Boolean(sort || query));
    heads.forEach((head, column) => {
      const direction = sort && sort.column === column ? (sort.descending ? "descending" : "ascending") : "none";
      head.setAttribute("aria-sort", direction);
    });
    byId("unsort").hidden = !sort;
    byId("fold-all").hidden = Boolean(sort || query) || holders.length === 0;
    byId("fold-all").textContent = collapsed.size ? "Expand all" : "Collapse all";
    byId("status").textContent = query ? `${nShown} of ${nValues} values` : `${nValues} values`;
    if (lines.length) {
      const isEmpty = lines.every((line) => line.element.hidden);
      byId("nothing").hidden = !isEmpty;
      byId("nothing").textContent = isEmpty ? `No path or type has “${byId("search").value.trim()}” in it.` : "";
    }
  }

  // -- sorting: first click, the other way, back to the tree ---------------------------------

  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const first = data.numbers[column]; // of numbers, the largest are looked for first
      if (!sort || sort.column !== column) sort = { column, descending: first };
      else if (sort.descending === first) sort = { column, descending: !first };
      else sort = null;
      render();
    });
  });
  byId("unsort").addEventListener("click", () => {
    sort = null;
    render();
    byId("search").focus(); // the button is gone: keep the keyboard's place
  });

  // -- searching and folding -----------------------------------------------------------------

  byId("search").addEventListener("input", (event) => {
    query = event.target.value.trim().toLowerCase();
    render();
  });
  for (const link of document.querySelectorAll("[data-find]")) {
    link.addEventListener("click", () => {
      byId("search").value = link.dataset.find;
      query = link.dataset.find.toLowerCase();
      render();
      table.closest(".scroller").scrollIntoView({ block: "nearest" });
    });
  }
  for (const number of holders) {
    foldOf(lines[number]).addEventListener("click", () => {
      fold([number], !collapsed.has(number));
    });
  }
  byId("fold-all").addEventListener("click", () => fold(holders, collapsed.size === 0));

  function fold(numbers, close) {
    for (const number of numbers) {
      if (close) collapsed.add(number);
      else collapsed.delete(number);
      foldOf(lines[number]).setAttribute("aria-expanded", String(!close));
    }
    render();
  }

  // -- feature maps, large -------------------------------------------------------------------

  const dialog = byId("maps");
  let opened = null;

  function format(number) {
    return String(Number(number.toPrecision(4)));
  }

  function openMaps(line) {
    const { width, height, ranges, channels } = line.maps;
    const source = line.element.querySelector("td.maps img").src;
    opened = line;
    byId("maps-heading").textContent = line.label;
    byId("maps-about").textContent = `First sample, ${ranges.length} of ${channels} channel${channels === 1 ? "" : "s"}, each from its least value (dark) to its greatest (light).`;
    byId("tiles").replaceChildren(
      ...ranges.map((range, channel) => {
        const figure = document.createElement("figure");
        const tile = document.createElement("div");
        const caption = document.createElement("figcaption");
        const place = ranges.length > 1 ? (channel / (ranges.length - 1)) * 100 : 0;
        tile.style.aspectRatio = `${width} / ${height}`;
        tile.style.background = `url("${source}") ${place}% 0 / ${ranges.length * 100}% 100% no-repeat`;
        const about = range ? `${format(range[0])} to ${format(range[1])}` : "NaN or infinity only";
        caption.textContent = `${channel}: ${about}`;
        figure.append(tile, caption);
        return figure;
      }),
    );
    if (!dialog.open) dialog.showModal();
  }

  for (const line of lines) {
    const button = line.element.querySelector("td.maps button");
    if (button) button.addEventListener("click", () => openMaps(line));
  }
  dialog.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    const withMaps = [...body.rows].filter((row) => !row.hidden).map((row) => lines.find((line) => line.element === row));
    const shown = withMaps.filter((line) => line.maps);
    const next = shown[shown.indexOf(opened) + step];
    if (next) openMaps(next);
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close(); // the backdrop
  });
  dialog.addEventListener("close", () => opened && opened.element.querySelector("td.maps button").focus());

  // -- light and dark ------------------------------------------------------------------------

  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const showTheme = () => byId("theme").setAttribute("aria-pressed", String(isDark()));
  byId("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    showTheme();
  });
  system.addEventListener("change", showTheme);
  showTheme();

  // "/" goes to the search box, as on many pages with one.
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || dialog.open || event.target.matches("input")) return;
    event.preventDefault();
    byId("search").focus();
  });
  render();
})();
