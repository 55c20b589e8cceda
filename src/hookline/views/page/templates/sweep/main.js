// The page of a sweep or an attribution: a heat map of two axes, and the largest effects.

(async () => {
  const MOST = 12; // of the largest effects, as in the terminal
  const TITLES = {
    effect: "effect",
    metric: "metric",
    estimate: "estimated effect",
    measured: "measured effect",
    share: "of clean",
  };
  const data = await unpackJson(byId("core").textContent);
  const { axes, places, baseline, clean } = data;
  const isMeasured = "metric" in data.numbers;
  const main = isMeasured ? "effect" : "estimate";
  const numbers = Object.fromEntries(
    Object.entries(data.numbers).map(([name, column]) => [name, column.map(parseNumber)]),
  );
  const unmoved = data.numbers.unmoved ?? [];
  delete numbers.unmoved;
  const gap = clean === null ? 0 : parseNumber(clean) - parseNumber(baseline);
  if (gap) numbers.share = numbers[main].map((effect) => effect / gap);

  const sizes = axes.map(({ labels }) => labels.length);
  const long = axes.map((_, axis) => axis).filter((axis) => sizes[axis] > 1);
  const rest = axes.map((_, axis) => axis).filter((axis) => sizes[axis] <= 1);
  const order = [...long, ...rest];
  const choice = {
    number: main,
    rows: order[0],
    columns: order[1] ?? -1,
    fixed: axes.map(() => -1),
  };

  const labelsOf = (change) => {
    const indices = [];
    let place = places[change];
    for (let axis = axes.length - 1; axis >= 0; axis--) {
      indices[axis] = place % sizes[axis];
      place = Math.floor(place / sizes[axis]);
    }
    return indices;
  };
  const indicesOf = places.map((_, change) => labelsOf(change));
  const word = (axis, index) => {
    const { name, labels, texts } = axes[axis];
    const given = texts[index] === labels[index] ? "" : ` “${texts[index]}”`;
    return (name === "site" ? "" : `${name} `) + labels[index] + given;
  };
  const nameOf = (change) => indicesOf[change].map((index, axis) => word(axis, index)).join(", ");
  // NaN is a number of a change, but for the measured effects: there it is one that has none.
  function text(name, number) {
    if (name === "share")
      return Number.isFinite(number) ? `${(100 * number).toFixed(0).replace("-", "−")} %` : "";
    if (Number.isNaN(number)) return name === "measured" ? "" : "NaN";
    return name === "metric" ? numberText(number, 4) : signed(number);
  }
  // Some numbers of a change in words.
  const wordsOf = (change, names) =>
    [
      ...names
        .map((name) => [TITLES[name], text(name, numbers[name][change])])
        .filter(([, shown]) => shown)
        .map((pair) => pair.join(" ")),
      unmoved[change] ? "unmoved" : "",
    ]
      .filter(Boolean)
      .join("; ");
  const signed = (number) => (number > 0 ? "+" : "") + numberText(number, 4);

  // -- one table: for each cell, the change with the largest number -------------------------------

  let cells = []; // the change of each cell, or undefined

  function build() {
    const nRows = sizes[choice.rows];
    const nColumns = choice.columns < 0 ? 1 : sizes[choice.columns];
    cells = new Array(nRows * nColumns);
    indicesOf.forEach((indices, change) => {
      if (
        choice.fixed.some(
          (index, axis) =>
            index >= 0 &&
            axis !== choice.rows &&
            axis !== choice.columns &&
            indices[axis] !== index,
        )
      )
        return;
      const cell =
        indices[choice.rows] * nColumns + (choice.columns < 0 ? 0 : indices[choice.columns]);
      const [now, best] = [change, cells[cell]].map((k) =>
        k === undefined ? -1 : Math.abs(numbers[choice.number][k]),
      );
      if (best === -1 || now > best || Number.isNaN(now)) cells[cell] = change;
    });
    // colours are about the baseline
    const shift = choice.number === "metric" ? parseNumber(baseline) : 0;
    return {
      rows: axes[choice.rows].texts,
      columns: choice.columns < 0 ? [""] : axes[choice.columns].texts,
      values: Array.from(cells, (change) =>
        change === undefined ? undefined : numbers[choice.number][change] - shift,
      ),
      marks: Array.from(cells, (change) => change !== undefined && unmoved[change]),
    };
  }

  const changeAt = (row, column) =>
    cells[row * (choice.columns < 0 ? 1 : sizes[choice.columns]) + column];

  function aboutCell(row, column) {
    const change = changeAt(row, column);
    if (change === undefined) return "no such change";
    return [nameOf(change), wordsOf(change, Object.keys(numbers))].filter(Boolean).join("; ");
  }

  // -- what is chosen ----------------------------------------------------------------------------

  function tell(change) {
    const isThere = change !== undefined;
    const about =
      isThere && unmoved[change]
        ? "Unmoved: the change put in the value that was there, so that nothing could move."
        : "";
    const body = element("div", { class: "pane-body" });
    markPressedFinding(isThere ? ranked.indexOf(change) : -1);
    byId("pane").replaceChildren(
      paneHead(isThere ? nameOf(change) : "No such change", [about], { onClose: close }),
      body,
    );
    if (!isThere)
      body.append(quietParagraph("The site’s value is not as large in this axis."));
    else
      body.append(
        numbersList(
          Object.keys(numbers).map((name) => [
            TITLES[name],
            text(name, numbers[name][change]) || (name === "measured" ? "not measured" : ""),
          ]),
        ),
      );
  }

  const close = () => closeDrawer(document.querySelector(".heat-map"));

  function mark(change) {
    const indices = indicesOf[change];
    const column = choice.columns < 0 ? 0 : indices[choice.columns];
    map.choose(indices[choice.rows], column, { tells: false });
    tell(change);
  }

  function goTo(change) {
    choice.fixed.forEach((index, axis) => {
      if (index >= 0) choice.fixed[axis] = indicesOf[change][axis];
    });
    show();
    mark(change);
    openDrawer();
    document.querySelector(".heat-map").focus();
  }

  // -- the largest effects -----------------------------------------------------------------------

  const sizeOf = (change) =>
    Number.isNaN(numbers[main][change]) ? Infinity : Math.abs(numbers[main][change]);
  const ranked = places.map((_, change) => change).sort((a, b) => sizeOf(b) - sizeOf(a) || a - b);

  function showLargest() {
    const most = sizeOf(ranked.find((change) => Number.isFinite(sizeOf(change)))) || 1;
    const others = Object.keys(numbers).filter((name) => name !== main);
    const items = ranked.slice(0, MOST).map((change) => {
      const effect = numbers[main][change];
      const colour = Number.isFinite(effect) ? cssColour(signedColour(effect / most)) : "#d55e00";
      const swatch = { class: "swatch", style: `--mark: ${colour}`, "aria-hidden": "true" };
      return findingButtonOfParts(
        [
          element("i", swatch),
          breakableText(nameOf(change)),
          text(main, effect),
          wordsOf(change, others),
        ],
        () => goTo(change),
      );
    });
    fillList("findings", items);
    const rest = ranked.length > MOST ? `, the largest ${MOST} below` : "";
    const forwards = data.forwards === undefined ? "" : `, ${pluralText(data.forwards, "forward")}`;
    byId("tally").textContent = `${pluralText(places.length, "change")}${forwards}${rest}`;
  }

  // -- what to draw ------------------------------------------------------------------------------

  const menu = (label, options, selected, onSelect) =>
    element(
      "label",
      {},
      `${label} `,
      makeMenu(options, selected, (value) => onSelect(Number(value)), { "aria-label": label }),
    );

  function showChoices() {
    const names = Object.keys(numbers);
    const titles = axes.map(({ name }, axis) => [axis, name]);
    const menus = [
      menu(
        "Number",
        names.map((name, at) => [at, TITLES[name]]),
        names.indexOf(choice.number),
        (at) => {
          choice.number = names[at];
          show();
        },
      ),
    ];
    if (axes.length > 2) {
      menus.push(
        menu("Rows", titles, choice.rows, (axis) => turn("rows", axis)),
        menu("Columns", titles, choice.columns, (axis) => turn("columns", axis)),
      );
      axes.forEach(({ name, texts }, axis) => {
        if (axis === choice.rows || axis === choice.columns || texts.length < 2) return;
        menus.push(
          menu(
            name,
            [[-1, "largest"], ...texts.map((title, index) => [index, title])],
            choice.fixed[axis],
            (index) => {
              choice.fixed[axis] = index;
              show();
            },
          ),
        );
      });
    }
    byId("choices").replaceChildren(...menus);
  }

  // If both are given one axis, they change places.
  function turn(part, axis) {
    const other = part === "rows" ? "columns" : "rows";
    if (choice[other] === axis) choice[other] = choice[part];
    choice[part] = axis;
    show();
    showChoices();
  }

  function show() {
    map.show(build());
    const most = map.largest;
    const base = choice.number === "metric" ? parseNumber(baseline) : 0;
    byId("key-low").textContent = text(choice.number, base - most);
    byId("key-high").textContent = text(choice.number, base + most);
    byId("map-heading").textContent =
      `${TITLES[choice.number].replace(/^./, (letter) => letter.toUpperCase())} by ${[
        choice.rows,
        choice.columns,
      ]
        .filter((axis) => axis >= 0)
        .map((axis) => axes[axis].name)
        .join(" and ")}`;
    byId("key-middle").textContent = choice.number === "metric" ? "baseline" : "0";
    byId("still-key").hidden = !unmoved.some(Boolean);
    const ends = Array.from({ length: 21 }, (_, k) => cssColour(signedColour(k / 10 - 1)));
    byId("key-bar").style.background = `linear-gradient(to right, ${ends.join(", ")})`;
  }

  const map = makeHeatMap(byId("map"), {
    label: `${TITLES[main]} by ${axes.map(({ name }) => name).join(" and ")}`,
    about: aboutCell,
    onChoose: (row, column) => tell(changeAt(row, column)),
  });
  onThemeChange(() => {
    showLargest();
    show();
  });
  document.addEventListener("keydown", (event) =>
    handleFindingKeys(event, { findings: [], view: {}, onEscape: close }),
  );
  const metrics = [
    ["Without a change", baseline],
    ["Clean", clean],
  ].filter(([, number]) => number !== null);
  byId("metrics").replaceWith(
    numbersList(
      metrics.map(([title, number]) => [title, numberText(parseNumber(number), 4)]),
      { id: "metrics" },
    ),
  );
  fillList("notes", data.remarks);
  showChoices();
  showLargest();
  show();
  const [first] = ranked;
  if (first !== undefined) mark(first);
  document.body.dataset.ready = "1";
})();
