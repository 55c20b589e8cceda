// The pane of a site: its findings, the numbers of a step, and the curves of the site and of what
// belongs to it: a weight, its gradient and its update; an output and its gradient.

const RANK_COLOURS = [
  "#0072b2",
  "#d55e00",
  "#009e73",
  "#cc79a7",
  "#e69f00",
  "#56b4e9",
  "#8c6bb1",
  "#7f7f7f",
];

function makeCurves(host, run, view, { onChoose, onClose, askRanks }) {
  const WIDTH = 400;
  const HEIGHT = 92;
  const LEFT = 46;
  let shownSite = -1;
  // The picker stays as the rest is drawn anew: it may be dragged.
  const picker = makePicker();
  const [top, above, below] = [0, 1, 2].map(() => element("div", { class: "parts" }));
  const body = element("div", { class: "pane-body" }, above, picker.label, below);

  function draw() {
    const site = run.sites[view.site];
    if (!site) return;
    if (!body.isConnected) host.replaceChildren(top, body);
    const active = host.contains(document.activeElement) ? document.activeElement : null;
    const scrollTop = shownSite === view.site ? host.scrollTop : 0;
    shownSite = view.site;
    top.replaceChildren(head(site));
    above.replaceChildren(...callouts());
    picker.draw();
    below.replaceChildren(numbers(), curves());
    host.scrollTop = scrollTop;
    if (active && !active.isConnected)
      [...host.querySelectorAll("button")].find((button) => isSameButton(button, active))?.focus();
    askRanks(view.site);
  }

  const isSameButton = (a, b) => a.id === b.id && a.dataset.site === b.dataset.site;

  function head({ label }) {
    const span = run.columns[view.column];
    const loss = loggedNumberText(view.series, span);
    const about = [
      span ? `${stepText(span)} of ${run.status.step?.toLocaleString("en")}` : "no step",
    ];
    if (loss) about.push(`${view.series.name} ${loss}`);
    return paneHead(label, about, { onClose });
  }

  const linkTo = (site, text, column = view.column) =>
    element(
      "button",
      {
        type: "button",
        class: "link",
        "data-site": site,
        onclick: () => onChoose(site, column, true),
      },
      text,
    );

  function callouts() {
    return run.findings
      .filter(({ row }, index) => row === view.site || (index === view.finding && row !== null))
      .map((finding) => {
        const parts = [];
        const column = run.columnOf(finding.step);
        if (finding.kind === "non-finite" && column > 0)
          parts.push(" ", linkTo(finding.row, "The step before", column - 1));
        const next = finding.also.slice(0, 5);
        if (next.length)
          parts.push(
            element(
              "span",
              { class: "next" },
              spanElement(`Then, of ${finding.follows.toLocaleString("en")} that follow:`),
              ...next.map((site) => linkTo(site, run.sites[site].label)),
            ),
          );
        return findingCallout(finding, parts);
      });
  }

  function makePicker() {
    const input = element("input", {
      type: "range",
      id: "step",
      min: 0,
      oninput: () => onChoose(view.site, Number(input.value)),
    });
    const output = element("output");
    return {
      label: element("label", { class: "step-picker" }, "Step", input, output),
      draw() {
        const span = run.columns[view.column];
        input.max = Math.max(0, run.columns.length - 1);
        input.value = Math.max(0, view.column);
        input.setAttribute("aria-valuetext", span ? stepText(span) : "no step");
        output.textContent = span ? span.last.toLocaleString("en") : "";
      },
    };
  }

  function numbers() {
    const span = run.columns[view.column];
    const title = run.titleOf(run.number);
    const facts = [];
    if (span) {
      const { at, low, high, bad } = span;
      const number = at[view.site];
      const median = run.medianOf(view.site);
      const times = number / median;
      facts.push([
        title,
        bad[view.site] && !isNumber(number) ? "NaN" : valueText(number, run.number) || "none",
      ]);
      if (low[view.site] !== high[view.site] && isNumber(low[view.site]))
        facts.push([
          "least, greatest",
          `${valueText(low[view.site])} to ${valueText(high[view.site])}`,
        ]);
      facts.push(["median of all steps", valueText(median, run.number)]);
      // A finding that begins here has its factor: of the norms before, not of the median.
      const isTold = run.findings.some(
        ({ row, step }) => row === view.site && span.first <= step && step <= span.last,
      );
      if (view.isUsual && Number.isFinite(times) && !isTold)
        facts.push(["of the median", `${numberText(times, 2)} ×`]);
      if (bad[view.site]) facts.push(["values", "NaN or infinity", true]);
      view.ranks.forEach((rank, index) =>
        facts.push([`rank ${index}`, valueText(rank[view.column], run.number) || "none"]),
      );
    }
    const last = run.names
      .filter(([name]) => isNumber(run.latest(name, view.site)))
      .map(([name, text]) => [
        text,
        valueText(run.latest(name, view.site), name),
        name === "non_finite" && run.latest(name, view.site) > 0,
      ]);
    return element(
      "div",
      {},
      numbersList(facts),
      element("h3", { class: "quiet last" }, "Its last step"),
      numbersList(last),
    );
  }

  // -- curves ------------------------------------------------------------------------------------

  function curves() {
    const { path } = run.sites[view.site];
    const mates = run.sites.map((_, site) => site).filter((site) => run.sites[site].path === path);
    mates.sort((a, b) => (b === view.site) - (a === view.site) || a - b);
    return element(
      "div",
      { class: "pane-body", style: "padding: 0" },
      mates.slice(0, 6).map(curveOf),
    );
  }

  function axisOf(site) {
    const extent = { ...run.extentOf(site) };
    const ranks = site === view.site ? view.ranks : [];
    for (const number of ranks.flat().filter(isNumber)) {
      extent.low = Math.min(extent.low, number);
      extent.high = Math.max(extent.high, number);
      if (number) extent.tiny = Math.min(extent.tiny, Math.abs(number));
    }
    const { low, high, tiny } = extent;
    if (low > high) return null;
    const bottom = Math.max(low > 0 ? low : tiny, high * 1e-12);
    const isLog = low >= 0 && high / bottom > 30;
    const size = isLog ? (number) => Math.log10(Math.max(number, bottom)) : (number) => number;
    const [from, to] = [size(low), size(high)];
    const y = (number) => HEIGHT - 8 - ((HEIGHT - 16) * (size(number) - from)) / (to - from || 1);
    return { isLog, y, low: isLog ? Math.max(low, bottom) : low, high };
  }

  const x = (column) =>
    LEFT + ((WIDTH - LEFT - 4) * (column + 0.5)) / Math.max(1, run.columns.length);

  function curveOf(site) {
    const { label, port } = run.sites[site];
    const axis = axisOf(site);
    const isChosen = site === view.site;
    const words = axis
      ? `${run.titleOf(run.number)} of ${label}, ${spanText()}: ` +
        `${valueText(axis.low)} to ${valueText(axis.high)}`
      : `${label}: no number`;
    const picture = svgElement("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": words,
    });
    picture.append(
      svgElement("rect", {
        class: "ground",
        x: LEFT,
        y: 4,
        width: WIDTH - LEFT - 4,
        height: HEIGHT - 8,
      }),
    );
    if (axis) picture.append(...drawn(site, axis, isChosen));
    else
      picture.append(
        svgElement("text", { x: WIDTH / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "no numbers"),
      );
    picture.append(
      ...nonFiniteMarks(site),
      svgElement("path", { class: "guide", d: `M${x(view.column)} 4V${HEIGHT - 4}` }),
    );
    picture.addEventListener("click", (event) => {
      const box = picture.getBoundingClientRect();
      const share = (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - 4);
      onChoose(site, clamp(Math.floor(share * run.columns.length), 0, run.columns.length - 1));
    });
    const isBackward = port.startsWith("grad");
    const about = `${run.titleOf(run.number)}${axis?.isLog ? ", log" : ""}`;
    return element(
      "section",
      { class: `curve ${isBackward ? "bwd" : "fwd"}` },
      element("h3", {}, isChosen ? label : linkTo(site, label), spanElement(about)),
      picture,
      isChosen ? ranksKey() : null,
    );
  }

  const spanText = () =>
    run.columns.length ? `step ${run.columns[0].first} to ${run.columns.at(-1).last}` : "no step";

  function drawn(site, axis, isChosen) {
    const text = (number, y) =>
      svgElement("text", { x: LEFT - 5, y, "text-anchor": "end" }, numberText(number, 2));
    const parts = [text(axis.high, 12), text(axis.low, HEIGHT - 5)];
    const median = run.medianOf(site);
    if (run.isWide()) parts.push(svgElement("path", { class: "band", d: bandPath(site, axis) }));
    if (!axis.isLog || median > 0)
      parts.push(
        svgElement("path", { class: "median", d: `M${LEFT} ${axis.y(median)}H${WIDTH - 4}` }),
      );
    parts.push(
      svgElement("path", {
        class: "line",
        d: linePath(
          run.columns.map(({ at }) => at[site]),
          axis,
        ),
      }),
    );
    const ranks = isChosen ? view.ranks : [];
    ranks.forEach((numbers, rank) => {
      const style = `stroke: ${RANK_COLOURS[rank % RANK_COLOURS.length]}`;
      parts.push(svgElement("path", { class: "line rank", style, d: linePath(numbers, axis) }));
    });
    return parts;
  }

  // A gap in the numbers is a gap in the line; a number alone is a dot.
  function linePath(numbers, { y }) {
    let path = "";
    numbers.forEach((number, column) => {
      if (!isNumber(number)) return;
      const isFirst = !isNumber(numbers[column - 1]);
      path += `${isFirst ? "M" : "L"}${x(column).toFixed(1)} ${y(number).toFixed(2)}`;
      if (isFirst && !isNumber(numbers[column + 1])) path += "h.5";
    });
    return path;
  }

  const barPath = (left, foot, head) => `M${left} ${foot}V${head}h1V${foot}Z`;

  function bandPath(site, { y }) {
    const bars = run.columns.map(({ low, high }, column) =>
      isNumber(low[site])
        ? barPath(x(column).toFixed(1), y(low[site]).toFixed(2), (y(high[site]) - 0.3).toFixed(2))
        : "",
    );
    return bars.join("");
  }

  function nonFiniteMarks(site) {
    const width = Math.max(1.5, (WIDTH - LEFT) / Math.max(1, run.columns.length));
    return run.columns.flatMap(({ bad, at }, column) => {
      const name = bad[site] ? "bad-step" : at[site] === 0 && view.isUsual ? "zero-step" : "";
      if (!name) return [];
      const top = bad[site] ? HEIGHT - 11 : 5;
      return [
        svgElement("rect", {
          class: name,
          x: x(column) - width / 2,
          y: top,
          width,
          height: HEIGHT - 5 - top,
        }),
      ];
    });
  }

  function ranksKey() {
    const names = view.ranks.map((_, rank) =>
      element(
        "span",
        {},
        element("i", { style: `--mark: ${RANK_COLOURS[rank % RANK_COLOURS.length]}` }),
        `rank ${rank}`,
      ),
    );
    if (names.length) return element("p", { class: "ranks" }, names);
    if (!(run.status.n_ranks > 1)) return null;
    return element(
      "p",
      { class: "ranks" },
      "The ranks are merged; hookline view of the folder shows each.",
    );
  }

  return { draw };
}
