// The error over depth: a curve through all sites in firing order, on a logarithmic axis.

// Draw the curve in an element. `rows` are those of the comparison. Returns `mark(index)`, which
// shows the chosen row. Arrow keys, clicks and the pointer move over the rows.
function makeDepthCurve(host, rows, onChoose) {
  const HEIGHT = 150;
  const TOP = 8;
  const BOTTOM = 104;
  const RIGHT = 10;
  const hasLocal = rows.some((row) => row.local !== null);
  const sizes = (name) => rows.map((row) => parseNumber(row[name]));
  const curves = {
    relative: sizes("relative"),
    local: sizes("local"),
    floor: sizes("floor_relative"),
  };
  const positive = Object.values(curves)
    .flat()
    .filter((number) => number > 0 && number < Infinity);
  const low = positive.length ? Math.floor(Math.log10(Math.min(...ends(positive)))) : -8;
  const high = positive.length
    ? Math.max(Math.ceil(Math.log10(Math.max(...ends(positive)))), low + 1)
    : 0;
  let chosen = 0;
  let x = () => 0;

  const cursor = svgElement("line", { class: "cursor", y1: TOP - 6, y2: BOTTOM + 16 });
  const picture = svgElement("svg", { height: HEIGHT, "aria-hidden": "true" });
  const slider = element(
    "div",
    {
      class: "depth",
      role: "slider",
      tabindex: 0,
      "aria-label": "Site in firing order",
      "aria-valuemin": 1,
      "aria-valuemax": rows.length,
    },
    picture,
  );
  host.replaceChildren(slider);

  // The least and the greatest: `Math.min` of many thousands of arguments fails.
  function ends(numbers) {
    return [numbers.reduce((a, b) => (b < a ? b : a)), numbers.reduce((a, b) => (b > a ? b : a))];
  }
  const y = (number) =>
    number === Infinity
      ? TOP - 4
      : number > 0
        ? BOTTOM - ((Math.log10(number) - low) / (high - low)) * (BOTTOM - TOP)
        : BOTTOM + 14;
  const point = (number, index) => `${x(index).toFixed(1)} ${y(number).toFixed(1)}`;

  // Join neighbours; where there is no number, or a zero, the curve is interrupted.
  function line(numbers) {
    let path = "";
    let isOn = false;
    numbers.forEach((number, index) => {
      if (number > 0) path += `${isOn ? "L" : "M"}${point(number, index)}`;
      isOn = number > 0;
    });
    return path;
  }
  // Local errors have nothing to do with their neighbours', so nothing joins them.
  const stems = (numbers) =>
    numbers
      .map((number, index) => (number > 0 ? `M${point(number, index)}V${BOTTOM + 14}` : ""))
      .join("");
  const dots = (numbers, isMeant) =>
    numbers
      .map((number, index) =>
        Number.isNaN(number) || !isMeant(index) ? "" : `M${point(number, index)}h0`,
      )
      .join("");

  function draw() {
    const width = host.clientWidth;
    const left = 46;
    const step = (width - left - RIGHT) / Math.max(rows.length, 1);
    x = (index) => left + step * (index + 0.5);
    const stride = Math.max(1, Math.ceil((high - low) / 4));
    const ticks = Array.from({ length: high - low + 1 }, (_, k) => low + k).filter(
      (power) => (high - power) % stride === 0,
    );
    const verdictIs = (verdict) => (index) => rows[index].verdict === verdict;
    const main = hasLocal ? curves.local : curves.relative;
    picture.setAttribute("width", width);
    picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    picture.replaceChildren(
      ...ticks.map((power) =>
        svgElement("line", {
          class: "grid",
          x1: left,
          x2: width - RIGHT,
          y1: y(10 ** power),
          y2: y(10 ** power),
        }),
      ),
      ...ticks.map((power) =>
        svgElement(
          "text",
          { x: left - 7, y: y(10 ** power) + 4, "text-anchor": "end" },
          numberText(10 ** power, 1),
        ),
      ),
      svgElement("text", { x: left - 7, y: BOTTOM + 20, "text-anchor": "end" }, "0"),
      ...blocks(step, left),
      svgElement("path", { class: "floor", d: line(curves.floor) }),
      ...(hasLocal ? [svgElement("path", { class: "before", d: line(curves.relative) })] : []),
      svgElement("path", { class: "error", d: hasLocal ? stems(main) : line(main) }),
      svgElement("path", { class: "dot", d: dots(main, (index) => !verdictIs("differs")(index)) }),
      svgElement("path", { class: "dot differs", d: dots(main, verdictIs("differs")) }),
      svgElement("path", {
        class: "missing",
        d: rows
          .map((row, index) =>
            row.verdict === "not comparable" ? `M${x(index).toFixed(1)} ${BOTTOM + 10}v8` : "",
          )
          .join(""),
      }),
      cursor,
    );
    place();
  }

  // Name the stretches of rows that share the beginning of their path, where there is room.
  function blocks(step, left) {
    const parts = [];
    const stretches = stretchesOf(0, rows.length, 0);
    let end = 0;
    for (const { name, from, to } of stretches) {
      const start = left + step * from;
      parts.push(
        svgElement("line", {
          class: "tick",
          x1: start,
          x2: start,
          y1: BOTTOM + 20,
          y2: BOTTOM + 25,
        }),
      );
      const room = step * (to - from);
      const middle = start + room / 2;
      if (name.length * 6.6 > room || middle - name.length * 3.3 < end) continue;
      parts.push(svgElement("text", { x: middle, y: HEIGHT - 9, "text-anchor": "middle" }, name));
      end = middle + name.length * 3.3 + 4;
    }
    return parts;
  }

  function stretchesOf(from, to, depth) {
    const stretches = [];
    for (let index = from; index < to; index++) {
      const names = rows[index].site.split(/[:#]/)[0].split(".");
      const name = names.slice(0, depth + 1).join(".");
      const last = stretches.at(-1);
      if (last?.name === name) last.to = index + 1;
      else stretches.push({ name, from: index, to: index + 1, isLeaf: names.length <= depth + 1 });
    }
    return stretches.flatMap((stretch) => {
      const isLong = stretch.to - stretch.from > rows.length / 2 && !stretch.isLeaf && depth < 6;
      return isLong ? stretchesOf(stretch.from, stretch.to, depth + 1) : [stretch];
    });
  }

  function place() {
    cursor.setAttribute("x1", x(chosen));
    cursor.setAttribute("x2", x(chosen));
  }

  function mark(index) {
    chosen = index;
    const { site, verdict, relative, local } = rows[index];
    const errors = [
      local === null ? "" : `local error ${numberText(parseNumber(local))}`,
      relative === null ? "" : `relative error ${numberText(parseNumber(relative))}`,
    ];
    slider.setAttribute("aria-valuenow", index + 1);
    slider.setAttribute(
      "aria-valuetext",
      [`${index + 1} of ${rows.length}: ${site}`, verdict, ...errors].filter(Boolean).join(", "),
    );
    place();
  }

  const nearest = (event) => {
    const box = picture.getBoundingClientRect();
    return clamp(
      Math.floor(((event.clientX - box.left - 46) / (box.width - 46 - RIGHT)) * rows.length),
      0,
      rows.length - 1,
    );
  };
  slider.addEventListener("click", (event) => onChoose(nearest(event)));
  slider.addEventListener("pointermove", (event) => {
    slider.title = rows[nearest(event)].site;
  });
  slider.addEventListener("keydown", (event) => {
    const step = KEY_STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    onChoose(clamp(chosen + step, 0, rows.length - 1));
  });
  new ResizeObserver(draw).observe(host);
  draw();
  return { mark };
}
