// A table of modules or sites: a tree in firing order, and flat when it is searched or sorted.

// What rows that stand depth first hold of each other, by the row that holds each; -1 is the top.
function treeOfParents(parent) {
  const children = parent.map(() => []);
  const level = [];
  const last = []; // the last row under it
  parent.forEach((holder, row) => {
    level.push(holder < 0 ? 1 : level[holder] + 1);
    if (holder >= 0) children[holder].push(row);
  });
  for (let row = parent.length - 1; row >= 0; row -= 1)
    last[row] = children[row].length ? last[children[row].at(-1)] : row;
  return { parent, children, level, last };
}

const shareBar = (share) =>
  element("i", { class: "share", style: `--share: ${share}`, "aria-hidden": "true" });

// Create the table in an element. Of the rows: `tree` as of `treeOfParents`, `labelOf(row)`,
// `searchedOf(row)` and `typeOf(row)` in lower case, `isListed(row)` if flat. Of what is drawn:
// `columns()`, each { key, title, width, isNumber, isLeft, sortKey(row), cell(row) } and without a
// sortKey not sorted; `isWanted(column, width)`, `nameCell(row, isFlat, isFolded)`, `classOf(row)`.
// `chosen()` is the row that is chosen, `statusText(shown, query)` the text of the status.
// `onChange` is told of a search and a sort, `onLayOut` and `onDraw(first, last)` of each drawing.
function makeTable(host, options) {
  const { tree, labelOf, searchedOf, typeOf, isListed = () => true } = options;
  const {
    columns,
    isWanted,
    nameCell,
    cellOf = (column, row) => column.cell(row),
    classOf = () => "",
  } = options;
  const {
    chosen,
    onChoose,
    onEnter,
    statusText,
    onChange = () => {},
    onLayOut = () => {},
    onDraw = () => {},
  } = options;
  const all = tree.parent.map((_, row) => row);
  const holders = all.filter((row) => tree.children[row].length);
  const folded = new Set();
  const search = byId("search");
  const nameColumn = {
    key: "path",
    title: options.nameTitle ?? "Module",
    kind: "path",
    sortKey: labelOf,
  };
  const allColumns = () => [nameColumn, ...columns()];
  const isFlat = () => Boolean(query || sort);
  let query = "";
  let sort = null; // { key, isDown }
  let shown = []; // the rows from top to bottom
  let places = new Map();

  const grid = makeRowGrid(host, {
    label: options.label,
    height: 26,
    folds: true,
    columns: shownColumns,
    rowClass: ({ key: row }) =>
      `${tree.children[row].length && !isFlat() ? "holder " : ""}${classOf(row)}`,
    headOf,
    sortOf: ({ key, sortKey }) =>
      !sortKey ? null : sort?.key !== key ? "none" : sort.isDown ? "descending" : "ascending",
    onChoose: ({ key }, isClick) => onChoose(key, { opens: isClick }),
    onToggle: ({ key }) => fold(key),
    onDraw(first, last) {
      showWholeName();
      onDraw(first, last);
    },
    onKey: treeKey,
  });

  // -- what is shown -----------------------------------------------------------------------------

  // 0 is a match of the whole name, 1 of the path, 2 of the type, 3 none.
  function rankOf(row) {
    if (labelOf(row).toLowerCase() === query) return 0;
    if (searchedOf(row).includes(query)) return 1;
    return typeOf(row).includes(query) ? 2 : 3;
  }

  function order({ sortKey }) {
    const keys = all.map(sortKey);
    const isEmpty = (key) => key === null || key === undefined || key === "";
    return (a, b) => {
      const [x, y] = [keys[a], keys[b]];
      if (isEmpty(x) || isEmpty(y)) return isEmpty(x) - isEmpty(y) || a - b; // last either way
      const by = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
      return (sort.isDown ? -by : by) || a - b;
    };
  }

  function layOut() {
    if (isFlat()) {
      const ranks = query ? all.map(rankOf) : null;
      shown = all.filter((row) => isListed(row) && (!ranks || ranks[row] < 3));
      if (sort) shown.sort(order(allColumns().find(({ key }) => key === sort.key)));
      else shown.sort((a, b) => ranks[a] - ranks[b] || a - b);
    } else {
      shown = [];
      for (let row = 0; row < all.length; row += 1) {
        shown.push(row);
        if (folded.has(row)) row = tree.last[row];
      }
    }
    places = new Map(shown.map((row, place) => [row, place]));
    grid.grid.style.removeProperty("--name");
    onLayOut();
    grid.show(shown.map(itemOf), places.get(chosen()) ?? -1);
    showState();
  }

  function itemOf(row) {
    const isOpen = isFlat() || !tree.children[row].length ? undefined : !folded.has(row);
    return { key: row, level: isFlat() ? 1 : tree.level[row], isOpen };
  }

  function showState() {
    byId("status").textContent = statusText(shown, query);
    byId("unsort").hidden = !sort;
    byId("fold-all").hidden = isFlat() || !holders.length;
    byId("fold-all").textContent = folded.size ? "Expand all" : "Collapse all";
    const empty = byId("nothing") ?? host.appendChild(element("p", { id: "nothing" }));
    empty.hidden = shown.length > 0;
    empty.textContent = query
      ? `No path or type has “${search.value.trim()}” in it.`
      : (options.nothing ?? "Nothing was recorded.");
  }

  // -- columns -----------------------------------------------------------------------------------

  function shownColumns(width) {
    const others = columns()
      .filter((column) => isWanted(column, width) || column.key === sort?.key)
      .map((column) => ({
        ...column,
        kind: `${column.key}${column.isNumber && !column.isLeft ? " number" : ""}`,
        cell: ({ key: row }) => cellOf(column, row),
      }));
    const least = others.reduce(
      (sum, column) => sum + Number(/\d+/.exec(column.width)[0]) + 10,
      20,
    );
    grid.grid.style.setProperty("--least", `calc(${least}px + var(--name, 150px))`);
    const cell = ({ key: row }) => nameCell(row, isFlat(), !isFlat() && folded.has(row));
    return [{ ...nameColumn, width: "minmax(var(--name, 150px), 1fr)", cell }, ...others];
  }

  // The first column grows until the name of the chosen row fits.
  function showWholeName() {
    const name = host.querySelector(".window [aria-selected=true] .name");
    const lacking = name ? name.scrollWidth - name.clientWidth : 0;
    if (lacking > 0) {
      const width = name.closest(".path").offsetWidth + lacking + 1;
      host.firstChild.style.setProperty("--name", `${width}px`);
    }
  }

  function headOf({ key, title, sortKey }) {
    if (!sortKey) return title;
    return element("button", { type: "button", onclick: () => turnSort(key) }, title);
  }

  function turnSort(key) {
    const column = allColumns().find((other) => other.key === key);
    const isNumber = Boolean(column.isNumber);
    if (sort?.key !== key) sort = { key, isDown: isNumber };
    else if (sort.isDown === isNumber) sort = { key, isDown: !isNumber };
    else sort = null;
    layOut();
    onChange();
  }

  // -- folding, choosing and keys ----------------------------------------------------------------

  function fold(row) {
    if (!folded.delete(row)) folded.add(row);
    layOut();
  }

  function treeKey(event) {
    const row = grid.chosen?.key;
    if (event.key === "Enter") onEnter();
    else if (row === undefined) return false;
    else if (event.key === "ArrowLeft" && tree.parent[row] >= 0 && !isFlat())
      choose(tree.parent[row]);
    else if (event.key === "ArrowRight" && tree.children[row].length && !isFlat())
      choose(tree.children[row][0]);
    else return false;
    return true;
  }

  // Show a row, with the folds around it open, and choose it.
  function choose(row, tells = true) {
    let isChanged = false;
    for (let at = tree.parent[row]; at >= 0; at = tree.parent[at])
      isChanged = folded.delete(at) || isChanged;
    if (query && !places.has(row)) {
      query = search.value = "";
      isChanged = true;
    }
    if (isChanged) layOut();
    if (places.has(row)) grid.choose(places.get(row), { tells });
  }

  function searchFor(text) {
    query = text.trim().toLowerCase();
    layOut();
    grid.grid.scrollTop = 0;
  }

  const best = () =>
    query && sort ? [...shown].sort((a, b) => rankOf(a) - rankOf(b))[0] : shown[0];

  // Choose a row as by a click, from the search.
  function take(row, opens) {
    choose(row, false);
    onChoose(row, { opens });
    grid.grid.focus();
  }

  search.addEventListener("input", () => {
    searchFor(search.value);
    onChange();
  });
  search.addEventListener("keydown", (event) => {
    const row = event.key === "Enter" ? best() : shown[0];
    if (event.key === "Escape") {
      search.value = "";
      searchFor("");
      grid.grid.focus();
    } else if (row !== undefined && ["Enter", "ArrowDown"].includes(event.key)) {
      event.preventDefault();
      if (event.key === "Enter") {
        search.value = "";
        searchFor("");
      }
      take(row, event.key === "Enter");
    }
  });
  byId("unsort").addEventListener("click", () => {
    sort = null;
    layOut();
    onChange();
    grid.grid.focus();
  });
  byId("fold-all").addEventListener("click", () => {
    if (folded.size) folded.clear();
    else for (const row of holders) folded.add(row);
    layOut();
  });
  document.addEventListener("keydown", (event) => {
    const isArrow = ["ArrowDown", "ArrowUp"].includes(event.key) && !event.altKey;
    if (
      !isArrow ||
      event.target !== document.body ||
      event.ctrlKey ||
      event.metaKey ||
      event.shiftKey
    )
      return;
    event.preventDefault();
    grid.grid.focus();
    if (shown.length) take(chosen() < 0 ? shown[0] : chosen(), false);
  });

  return {
    grid: grid.grid,
    layOut,
    choose,
    fold,
    folded,
    columnsAt: shownColumns,
    draw: () => grid.draw(),
    relayOut: () => grid.layOut(),
    search: searchFor,
    setSort(next) {
      sort = next && allColumns().some(({ key }) => key === next.key) ? next : null;
      layOut();
    },
    get sort() {
      return sort;
    },
    get isFlat() {
      return isFlat();
    },
    get shown() {
      return shown;
    },
    get places() {
      return places;
    },
    // What is folded, scrolled and focused.
    get position() {
      return {
        folded: [...folded].map(labelOf),
        scrollTop: grid.grid.scrollTop,
        hasFocus: document.activeElement === grid.grid,
      };
    },
  };
}
