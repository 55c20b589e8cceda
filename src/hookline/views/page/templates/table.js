// The table of all values: sorting, search, folding, measuring, and the values of a single file.

(() => {
  if (!byId("modules")) return;

  const STEP = 150;
  const data = JSON.parse(byId("data").textContent);
  const table = byId("modules");
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const lines = [...body.rows].map((element, number) => {
    const head = element.cells[0];
    const link = head.querySelector("a");
    return {
      element,
      number,
      label: head.title || "(root)",
      path: `${head.title} ${head.querySelector("small")?.textContent ?? ""}`.toLowerCase(),
      type: element.cells[1].textContent.toLowerCase(),
      holdsValue: Boolean(link),
      key: link?.getAttribute("href").replace(/^(#|site[?])/, ""), // which place it is
      ...data.lines[number],
    };
  });
  const holders = lines.filter((line) => foldOf(line)).map((line) => line.number);
  const nValues = lines.filter((line) => line.holdsValue).length;
  const collapsed = new Set();
  const address = new URLSearchParams(state === undefined ? "" : location.search);
  const sortable = data.columns.indexOf(address.get("sort"));
  // { column, descending }, or null for the tree
  let sort = sortable < 0 ? null : { column: sortable, descending: address.get("up") === null && data.numbers[sortable] };
  let query = (address.get("q") ?? "").toLowerCase();
  byId("search").value = address.get("q") ?? "";

  let most = STEP; // the rows that are laid out: thousands at once would take seconds

  function foldOf(line) { return line.element.querySelector(".fold"); }

  new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    most += STEP;
    render();
  }, { root: table.closest(".scroller"), rootMargin: "1500px" }).observe(byId("more"));

  // On a phone, the sorted column stays visible beside the first one.
  const scroller = table.closest(".scroller");
  const showEdge = () => scroller.parentElement.classList.toggle("more", scroller.scrollLeft + scroller.clientWidth < scroller.scrollWidth - 1);
  const sizes = new ResizeObserver(() => {
    table.style.setProperty("--first", `${heads[0].offsetWidth}px`);
    showEdge();
  });
  for (const one of [heads[0], table, scroller]) sizes.observe(one);
  scroller.addEventListener("scroll", showEdge, { passive: true });

  // -- the visible rows and their order ------------------------------------------------------

  function compare(a, b) {
    const [x, y] = [a.keys[sort.column], b.keys[sort.column]];
    if (x === y) return a.number - b.number;
    // Rows with an empty cell come last in both directions.
    if (x === null || x === "") return 1;
    if (y === null || y === "") return -1;
    const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
    return sort.descending ? -order : order;
  }

  // The rank of a row in a search: match of the whole name 0, of the path 1, of the type 2, none 3.
  function rankOf({ label, path, type }) {
    if (label.toLowerCase() === query) return 0;
    return path.includes(query) ? 1 : type.includes(query) ? 2 : 3;
  }
  const byRank = (a, b) => rankOf(a) - rankOf(b);

  function isShown(line, underCollapsed) {
    if (query && rankOf(line) === 3) return false;
    if (sort && !line.holdsValue) return false;
    return Boolean(sort || query) || !underCollapsed.has(line.number);
  }

  function render() {
    const underCollapsed = new Set();
    for (const { number, parent } of lines) {
      // A parent comes before its descendants, so one pass over the rows is enough.
      if (parent !== null && (collapsed.has(parent) || underCollapsed.has(parent))) underCollapsed.add(number);
    }
    const ordered = sort ? [...lines].sort(compare) : query ? [...lines].sort(byRank) : lines;
    if (ordered.some((line, place) => body.rows[place] !== line.element)) {
      const focused = document.activeElement; // moving its row would lose the focus
      body.append(...ordered.map((line) => line.element));
      if (body.contains(focused)) focused.focus({ preventScroll: true });
    }
    let nShown = 0;
    let nLines = 0;
    for (const line of ordered) {
      const shows = isShown(line, underCollapsed);
      nLines += shows;
      nShown += shows && line.holdsValue;
      const hidden = !shows || nLines > most;
      if (line.element.hidden !== hidden) line.element.hidden = hidden;
    }
    byId("more").hidden = nLines <= most;
    table.classList.toggle("flat", Boolean(sort || query));
    heads.forEach((head, column) => {
      const direction = sort && sort.column === column ? (sort.descending ? "descending" : "ascending") : "none";
      head.setAttribute("aria-sort", direction);
    });
    for (const cell of table.querySelectorAll(".sorted")) cell.classList.remove("sorted");
    if (sort?.column) for (const row of table.rows) row.cells[sort.column]?.classList.add("sorted");
    byId("unsort").hidden = !sort;
    byId("fold-all").hidden = Boolean(sort || query) || holders.length === 0;
    byId("fold-all").textContent = collapsed.size ? "Expand all" : "Collapse all";
    note();
    byId("status").textContent = query ? `${nShown} of ${nValues} values` : `${nValues} values`;
    if (lines.length) {
      const isEmpty = lines.every((line) => line.element.hidden);
      byId("nothing").hidden = !isEmpty;
      byId("nothing").textContent = isEmpty ? `No path or type has “${byId("search").value.trim()}” in it.` : "";
    }
  }

  // The address keeps the sorting and the search, so they can be shared and survive a reload.
  function note() {
    if (state === undefined) return;
    const parameters = new URLSearchParams();
    if (query) parameters.set("q", byId("search").value.trim());
    if (sort) parameters.set("sort", data.columns[sort.column]);
    if (sort && !sort.descending) parameters.set("up", "");
    const text = parameters.toString();
    history.replaceState(null, "", text ? `?${text}` : location.pathname);
    keep("hookline-table", location.search);
  }

  // -- sorting: first click, the other way, back to the tree ---------------------------------

  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const first = data.numbers[column]; // numbers are sorted with the largest first
      if (!sort || sort.column !== column) sort = { column, descending: first };
      else if (sort.descending === first) sort = { column, descending: !first };
      else sort = null;
      render();
    });
  });
  byId("unsort").addEventListener("click", () => {
    sort = null;
    render();
    byId("search").focus(); // the button disappears, so the focus must go elsewhere
  });

  // -- searching and folding -----------------------------------------------------------------

  byId("search").addEventListener("input", (event) => {
    query = event.target.value.trim().toLowerCase();
    render();
  });
  byId("notices").addEventListener("click", (event) => {
    const link = event.target.closest("[data-find]");
    if (!link) return;
    byId("search").value = link.dataset.find;
    query = link.dataset.find.toLowerCase();
    render();
    table.closest(".scroller").scrollIntoView({ block: "nearest" });
  });
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

  // -- keyboard: up and down from row to row, left and right to fold --------------------------

  const focusable = (row) => row.querySelector("th a, th button");

  // The row of the value that was open; it may be below the rows that are laid out.
  function focusOn(line) {
    while (line.element.hidden && !byId("more").hidden) {
      most += STEP;
      render();
    }
    focusable(line.element)?.focus();
  }

  // If nothing has the focus, as on a page just opened, arrows begin at the first row.
  document.addEventListener("keydown", (event) => {
    const isArrow = event.key === "ArrowUp" || event.key === "ArrowDown";
    if (!isArrow || event.target !== document.body || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const first = [...body.rows].find((row) => !row.hidden && focusable(row));
    if (!first) return;
    focusable(first).focus();
    event.preventDefault();
  });

  table.addEventListener("keydown", (event) => {
    const row = event.target.closest("tbody tr");
    if (!row) return;
    if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      const shown = [...body.rows].filter((one) => !one.hidden && focusable(one));
      const next = shown[shown.indexOf(row) + (event.key === "ArrowDown" ? 1 : -1)];
      if (next) focusable(next).focus(); // focus() also scrolls it into view
    } else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const line = lines.find((one) => one.element === row);
      if (!foldOf(line) || sort || query) return;
      fold([line.number], event.key === "ArrowLeft");
    } else return;
    event.preventDefault();
  });

  byId("search").addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown" && event.key !== "Enter") return;
    const links = [...body.rows].filter((row) => !row.hidden).map((row) => row.querySelector("th a")).filter(Boolean);
    if (!links.length) return;
    event.preventDefault();
    if (event.key === "ArrowDown") return links[0].focus();
    const best = lines.filter((line) => line.holdsValue && isShown(line, collapsed)).sort(byRank)[0];
    (query ? best.element.querySelector("th a") : links[0]).click();
  });

  // "/" goes to the search box, as on many pages with one.
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || dialog?.open || event.target.matches("input")) return;
    event.preventDefault();
    byId("search").focus();
  });

  // -- statistics that are measured while the page is open ------------------------------------

  const left = () => lines.filter((line) => line.waits).length;
  let measuring = false;

  async function measure() {
    measuring = true;
    for (let at = 0; at < lines.length && measuring; ) {
      showProgress();
      let answer;
      try {
        answer = await (await fetch(`measure?from=${at}&state=${encodeURIComponent(state)}`)).json();
      } catch {
        break; // the code that follows the recording says why
      }
      if (!answer.lines) break; // another recording: the page is about to reload
      at = answer.next;
      for (const found of answer.lines) take(found);
      showNotices(answer.notices);
      if (sort) render();
    }
    measuring = false;
    showProgress();
  }

  function take({ line: number, cells, keys, bad, problem }) {
    const line = lines[number];
    line.keys = keys;
    line.waits = false;
    if (problem) {
      const cell = document.createElement("td");
      cell.className = "problem";
      cell.colSpan = data.columns.length - 2;
      cell.textContent = problem;
      [...line.element.cells].slice(2).forEach((one) => one.remove());
      line.element.append(cell);
      return;
    }
    cells.forEach((text, column) => {
      const cell = line.element.cells[column];
      if (column < 2 || data.columns[column] === "maps") return;
      cell.textContent = text;
      if (data.columns[column] === "non-finite") cell.classList.toggle("bad", bad);
      if (data.columns[column] === "zeros") {
        cell.classList.add("zeros");
        cell.style.setProperty("--share", keys[column] ?? 0);
      }
    });
  }

  function showNotices(notices) {
    byId("notices").hidden = !notices.length;
    byId("notices").replaceChildren(
      ...notices.map(([text, label]) => {
        const item = document.createElement("li");
        item.textContent = text;
        if (label) {
          const link = document.createElement("button");
          link.type = "button";
          link.className = "link";
          link.dataset.find = label;
          const code = document.createElement("code");
          code.textContent = label;
          link.append(code);
          item.append(" ", link);
        }
        return item;
      }),
    );
  }

  function showProgress() {
    byId("measure").hidden = !left();
    byId("measure").textContent = measuring ? `Measuring, ${left()} left: stop` : `Measure ${left()} values (${data.size})`;
  }

  if (state !== undefined) {
    byId("measure").addEventListener("click", () => {
      if (measuring) measuring = false;
      else measure();
    });
    showProgress();
    if (data.start && left()) measure();
  }

  // -- a value's page in a single file, named after "#" in the address ------------------------

  const dialog = byId("site");
  let opened = null;

  const format = (number) => String(Number(number.toPrecision(4)));

  function tilesOf(line) {
    const { width, height, ranges } = line.maps;
    const source = line.element.querySelector("td.maps img").src;
    return ranges.map((range, channel) => {
      const figure = document.createElement("figure");
      const tile = document.createElement("div");
      const caption = document.createElement("figcaption");
      const place = ranges.length > 1 ? (channel / (ranges.length - 1)) * 100 : 0;
      tile.style.aspectRatio = `${width} / ${height}`;
      tile.style.background = `url("${source}") ${place}% 0 / ${ranges.length * 100}% 100% no-repeat`;
      caption.textContent = `${channel}: ${range ? `${format(range[0])} to ${format(range[1])}` : "NaN or infinity only"}`;
      figure.append(tile, caption);
      return figure;
    });
  }

  function openSite() {
    const key = location.hash.slice(1);
    const line = key && lines.find((one) => one.key === key);
    if (!line) {
      if (dialog.open) dialog.close();
      return;
    }
    opened = line;
    const template = [...document.querySelectorAll("template[data-key]")].find((one) => one.dataset.key === key);
    byId("site-heading").textContent = line.label;
    byId("site-body").replaceChildren(template.content.cloneNode(true));
    if (line.maps) byId("site-body").querySelector(".strip-tiles").append(...tilesOf(line));
    if (!dialog.open) dialog.showModal();
  }

  if (dialog) {
    addEventListener("hashchange", openSite);
    dialog.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      const shown = [...body.rows].filter((row) => !row.hidden).map((row) => lines.find((line) => line.element === row));
      const withValues = shown.filter((line) => line.key);
      const next = withValues[withValues.indexOf(opened) + step];
      if (next) location.replace(`#${next.key}`);
    });
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog) dialog.close(); // the backdrop
    });
    dialog.addEventListener("close", () => {
      if (location.hash) history.replaceState(null, "", location.pathname + location.search);
      if (opened) focusOn(opened);
    });
    openSite();
  }
  const leftBehind = lines.find((line) => line.key && state !== undefined && `#${line.key}` === location.hash);
  render();
  if (leftBehind) focusOn(leftBehind);
})();
