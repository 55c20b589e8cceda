// The depth strip: the outputs from left to right in firing order, and what their gradients are.

function makeDepthStrip(host, core, chosen, onChoose) {
  const { rows, values } = core;
  const TOP = 16;
  const BOTTOM = 16;
  const GAP = 8;
  const RIGHT = 8;
  const MANY = 400; // points beyond it are squares: faster, and as good to see
  let plot = null;

  // The rows with an output in firing order, and the place of each; without any output, those with
  // a gradient, which come in the other direction.
  function lineOf(table) {
    const all = rows.name.map((_, row) => row);
    const ofOutputs = all.map((row) => table.main[row].output);
    const isForward = ofOutputs.some((value) => value !== undefined);
    const list = isForward ? ofOutputs : gradientsOf(table).map(([first]) => first);
    const order = (row) => (isForward ? 1 : -1) * values.order[list[row]];
    const line = all.filter((row) => list[row] !== undefined);
    line.sort((a, b) => order(a) - order(b));
    return [line, new Map(line.map((row, place) => [row, place]))];
  }

  // The gradients of the rows: of outputs, or where none was recorded, what else there is.
  function gradientsOf({ main, gradients }) {
    const ofOutputs = main.map(({ grad_output: value }) => (value === undefined ? [] : [value]));
    return ofOutputs.some((list) => list.length) ? ofOutputs : gradients;
  }

  function lanesOf(table) {
    const output = (row) => table.main[row].output;
    const { gradients } = plot;
    const isOfWeight = (value) => core.ports[values.port[value]] === "grad";
    const bad = (value) => value !== undefined && values.bad[value] > 0;
    const lanes = [
      {
        name: "Spread",
        about: "std, forward",
        ink: "fwd",
        height: 48,
        isLog: true,
        number: (row) => values.std[output(row)],
        isBad: (row) => bad(output(row)),
      },
      {
        name: "Zeros",
        about: "",
        ink: "ink-2",
        height: 26,
        isBars: true,
        number: (row) => values.zeros[output(row)],
        isBad: () => false,
      },
      {
        name: "Gradient",
        short: "Grad",
        about: gradients.flat().every(isOfWeight) ? "of parameters" : "norm, backward",
        ink: "bwd",
        height: 48,
        isLog: true,
        number: (row) => normOfValues(core, gradients[row]),
        isBad: (row) => gradients[row].some(bad),
      },
    ];
    const hasOutput = plot.line.some((row) => output(row) !== undefined);
    const hasGradient = plot.line.some((row) => gradients[row].length);
    return lanes.slice(hasOutput || !hasGradient ? 0 : 2, hasGradient ? 3 : 2);
  }

  // The modules that divide the strip: those at the top, and inside one that fills it, its own.
  function segments() {
    const spanOf = (row) => {
      let [first, last] = [Infinity, -1];
      for (let inner = row; inner <= rows.last[row]; inner += 1) {
        const place = plot.places.get(inner);
        if (place !== undefined) [first, last] = [Math.min(first, place), Math.max(last, place)];
      }
      return { row, first, last };
    };
    const partsOf = (list) => list.map(spanOf).filter(({ last }) => last >= 0);
    const inside = (row) => {
      let at = row;
      for (;;) {
        const parts = partsOf(rows.children[at]);
        if (parts.length !== 1 || !rows.children[parts[0].row].length) return parts;
        at = parts[0].row;
      }
    };
    const tops = rows.parent.flatMap((parent, row) => (parent < 0 ? [row] : []));
    let parts = tops.length === 1 ? inside(tops[0]) : partsOf(tops);
    for (let turn = 0; turn < 6; turn += 1) {
      const large = parts.findIndex(
        ({ row, first, last }) => (last - first) / plot.line.length > 0.5 && inside(row).length > 1,
      );
      if (large < 0) break;
      const inner = inside(parts[large].row);
      if (parts.length + inner.length > 120) break;
      parts = [...parts.slice(0, large), ...inner, ...parts.slice(large + 1)];
    }
    return parts;
  }

  function draw(table, findings) {
    const style = getComputedStyle(host);
    const width = host.clientWidth - 2 * parseFloat(style.paddingLeft);
    const isNarrow = width < 500;
    const left = isNarrow ? 56 : 92;
    const [line, places] = lineOf(table);
    const step = (width - left - RIGHT) / Math.max(1, line.length);
    plot = {
      table,
      line,
      places,
      gradients: gradientsOf(table),
      step,
      left,
      width,
      isNarrow,
      x: (place) => left + step * (place + 0.5),
    };
    const lanes = lanesOf(table);
    const height = TOP + lanes.reduce((sum, lane) => sum + lane.height + GAP, 0) + BOTTOM;
    plot.height = height;
    const [canvas, pen] = makeCanvas(width, height, sliderAttributes());
    const [over, overPen] = makeCanvas(width, height);
    over.className = "over";
    over.style.left = style.paddingLeft;
    Object.assign(plot, { canvas, pen, overPen });
    const had = host.contains(document.activeElement);
    host.replaceChildren(canvas, over);
    if (had) canvas.focus();
    const parts = segments();
    drawGrounds(parts);
    let y = TOP;
    for (const lane of lanes) {
      drawLane({ ...lane, y });
      y += lane.height + GAP;
    }
    drawNames(parts);
    drawPins(findings);
    listen();
    mark(findings);
    showLegend();
  }

  const sliderAttributes = () => ({
    role: "slider",
    tabindex: 0,
    "aria-label": "Position in depth",
    "aria-valuemin": 0,
    "aria-valuemax": Math.max(0, plot.line.length - 1),
  });

  function drawGrounds(parts) {
    const { pen, x, step, height } = plot;
    pen.fillStyle = themeColour("sunk");
    parts.forEach(({ first, last }, index) => {
      if (index % 2)
        pen.fillRect(
          x(first) - step / 2,
          TOP - 2,
          step * (last - first + 1),
          height - TOP - BOTTOM + 2,
        );
    });
  }

  // Numbers to heights; null is no number, -Infinity a logarithm of zero: at the bottom.
  function scaled(lane) {
    const heights = plot.line.map((row) => {
      const number = lane.number(row);
      if (number === null || number === undefined || Number.isNaN(number)) return null;
      if (!lane.isLog) return number;
      return number > 0 ? Math.log10(number) : -Infinity;
    });
    const finite = heights.filter((number) => number !== null && number !== -Infinity);
    let [low, high] = lane.isLog ? [Infinity, -Infinity] : [0, 1];
    for (const number of lane.isLog ? finite : [])
      [low, high] = [Math.min(low, number), Math.max(high, number)];
    if (high - low < 1) [low, high] = [(low + high - 1) / 2, (low + high + 1) / 2];
    const bottom = lane.y + lane.height;
    const at = (number) =>
      number === -Infinity
        ? bottom
        : bottom - 2 - ((lane.height - 4) * (number - low)) / (high - low);
    return { heights, at, low, high, isEmpty: !finite.length };
  }

  function drawLane(lane) {
    const { pen, width, left, isNarrow } = plot;
    const scale = scaled(lane);
    const bottom = lane.y + lane.height;
    pen.strokeStyle = themeColour("line");
    pen.lineWidth = 1;
    pen.strokeRect(left, bottom + 0.5, width - RIGHT - left, 0);
    pen.textAlign = "left";
    pen.textBaseline = "top";
    pen.font = fontText(11, 600);
    pen.fillStyle = themeColour("ink");
    pen.fillText(isNarrow ? (lane.short ?? lane.name) : lane.name, 0, lane.y);
    pen.fillStyle = themeColour("ink-3");
    pen.font = fontText(11);
    if (!isNarrow) pen.fillText(lane.about, 0, lane.y + 14);
    if (!scale.isEmpty) drawEnds(lane, scale);
    if (lane.isBars) drawBars(lane, scale);
    else drawPoints(lane, scale);
    drawBroken(lane);
  }

  function drawEnds(lane, { low, high }) {
    const { pen, left, isNarrow } = plot;
    const text = (number) => (lane.isLog ? numberText(10 ** number, 2) : number ? "100 %" : "0");
    pen.font = monoFontText(10);
    pen.textAlign = "right";
    pen.textBaseline = "top";
    if (!isNarrow || !lane.isBars) pen.fillText(text(high), left - 5, lane.y + (isNarrow ? 13 : 0));
    pen.textBaseline = "bottom";
    pen.fillText(text(low), left - 5, lane.y + lane.height + 2);
  }

  function drawBars(lane, { heights, at }) {
    const { pen, x, step } = plot;
    heights.forEach((number, place) => {
      if (!(number > 0)) return;
      pen.fillStyle = themeColour(number === 1 ? "warning" : "line-strong");
      const top = at(number);
      pen.fillRect(
        x(place) - Math.max(0.6, step * 0.36),
        top,
        Math.max(1, step * 0.72),
        lane.y + lane.height - top,
      );
    });
  }

  function drawPoints(lane, { heights, at }) {
    const { pen, x, line } = plot;
    const trunk = new Set(core.trunk);
    const isMany = line.length > MANY;
    pen.fillStyle = themeColour(`${lane.ink}-soft`);
    const dot = (place, radius) => {
      if (isMany) return pen.fillRect(x(place) - 1, at(heights[place]) - 1, 2, 2);
      pen.beginPath();
      pen.arc(x(place), at(heights[place]), radius, 0, 7);
      return pen.fill();
    };
    heights.forEach((number, place) => {
      if (number !== null) dot(place, 1.6);
    });
    pen.strokeStyle = themeColour(lane.ink);
    pen.lineWidth = 1.6;
    pen.lineJoin = "round";
    pen.beginPath();
    let isDown = false;
    const knots = [];
    heights.forEach((number, place) => {
      if (!trunk.has(line[place])) return;
      if (number !== null) {
        pen[isDown ? "lineTo" : "moveTo"](x(place), at(number));
        knots.push(place);
      }
      isDown = number !== null;
    });
    pen.stroke();
    pen.fillStyle = themeColour(lane.ink);
    if (!isMany) for (const place of knots) dot(place, 2.4);
  }

  // NaN and infinity: a hatched band, as wide as they reach.
  function drawBroken(lane) {
    const { line, x, step } = plot;
    let start = -1;
    for (let place = 0; place <= line.length; place += 1) {
      const isBad = place < line.length && lane.isBad(line[place]);
      if (isBad && start < 0) start = place;
      if (isBad || start < 0) continue;
      hatch(x(start) - step / 2, lane.y, Math.max(2, step * (place - start)), lane.height);
      start = -1;
    }
  }

  function hatch(x, y, width, height) {
    const { pen } = plot;
    pen.save();
    pen.beginPath();
    pen.rect(x, y, width, height);
    pen.clip();
    pen.fillStyle = themeColour("error-soft");
    pen.fillRect(x, y, width, height);
    pen.strokeStyle = themeColour("error");
    pen.globalAlpha = 0.55;
    pen.lineWidth = 1;
    pen.beginPath();
    for (let at = x - height; at < x + width + height; at += 5) {
      pen.moveTo(at, y + height);
      pen.lineTo(at + height, y);
    }
    pen.stroke();
    pen.restore();
  }

  function drawNames(parts) {
    const { pen, x, step, height } = plot;
    pen.font = fontText(11);
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    // Of many numbered blocks only every fifth, or tenth, is named.
    const each = plot.width / parts.length;
    const every = parts.length > 24 ? ([1, 2, 5, 10, 20].find((n) => n * each > 26) ?? 50) : 1;
    const stem = (row) => rows.name[row].replace(/\d+$/, "");
    const repeats = new Map();
    for (const { row } of parts) repeats.set(stem(row), (repeats.get(stem(row)) ?? 0) + 1);
    const [tick, ink] = [themeColour("line-strong"), themeColour("ink-3")];
    let end = -Infinity;
    for (const { row, first, last } of parts) {
      const start = x(first) - step / 2;
      const wide = step * (last - first + 1);
      let name = rows.name[row];
      // Of repeated blocks the number says which: layer_0, layer_1, ...
      const isRepeated = name !== stem(row) && repeats.get(stem(row)) > 2;
      if (isRepeated && pen.measureText(name).width >= wide + 6)
        name = name.slice(stem(row).length);
      pen.fillStyle = tick;
      pen.fillRect(start, height - BOTTOM - 3, 1, 5);
      if (every > 1 && !(/^\d+$/.test(name) && Number(name) % every === 0)) continue;
      const room = pen.measureText(name).width;
      const from = start + wide / 2 - room / 2;
      if (every === 1 && room >= wide + 6) continue;
      if (from < end + 4 || from + room > plot.width) continue;
      pen.fillStyle = ink;
      pen.fillText(name, start + wide / 2, height - BOTTOM / 2);
      end = from + room;
    }
  }

  // The place of a row, or of the nearest module around it that has an output.
  function placeOf(row) {
    let at = row;
    while (at >= 0 && !plot.places.has(at)) at = rows.parent[at];
    if (at >= 0) return plot.places.get(at);
    for (let inner = row; inner <= rows.last[row]; inner += 1)
      if (plot.places.has(inner)) return plot.places.get(inner);
    return undefined;
  }

  function drawPins(findings) {
    const { pen, x, height } = plot;
    const shown = findings.filter((finding) => isOfPass(finding, plot.table.pass));
    for (const { row, level } of shown.reverse()) {
      const place = row === null ? undefined : placeOf(row);
      if (place === undefined || level === "note") continue;
      pen.strokeStyle = themeColour(level);
      pen.lineWidth = 1;
      pen.globalAlpha = 0.5;
      pen.strokeRect(x(place), TOP, 0, height - BOTTOM - 4 - TOP);
      pen.globalAlpha = 1;
      drawPin(pen, level, x(place) - 5, 2);
    }
  }

  // Mark the chosen row, the sites that the chosen finding concerns, and the place at the pointer.
  function mark(findings, hovered) {
    if (!plot) return;
    const { overPen: pen, x, step, width, height } = plot;
    pen.clearRect(0, 0, width, height);
    const finding = findings[chosen.finding];
    pen.fillStyle = themeColour("follows");
    for (const row of finding && isOfPass(finding, plot.table.pass) ? finding.also : []) {
      const place = plot.places.get(row);
      if (place !== undefined)
        pen.fillRect(
          x(place) - Math.max(0.5, step / 2 - 0.5),
          height - BOTTOM - 3,
          Math.max(1, step - 1),
          2.5,
        );
    }
    const at = chosen.row < 0 ? undefined : placeOf(chosen.row);
    const lines = [
      [at, "accent", 1.5],
      [hovered, "ink-3", 1],
    ].filter(([place]) => place !== undefined);
    for (const [place, name, thick] of lines) {
      pen.strokeStyle = themeColour(name);
      pen.lineWidth = thick;
      pen.strokeRect(x(place), TOP - 2, 0, height - TOP - BOTTOM + 2);
    }
    plot.canvas.setAttribute("aria-valuenow", at ?? 0);
    plot.canvas.setAttribute("aria-valuetext", chosen.row < 0 ? "nothing" : rows.label[chosen.row]);
    plot.findings = findings;
  }

  function listen() {
    const { canvas, line, left, step } = plot;
    const hit = (event) => clamp(Math.floor((event.offsetX - left) / step), 0, line.length - 1);
    const isBeside = (event) => event.offsetX < left - 4 || !line.length;
    canvas.addEventListener("mousemove", (event) => {
      if (isBeside(event)) return hideTip();
      mark(plot.findings, hit(event));
      return showTip(aboutRow(line[hit(event)]), event);
    });
    canvas.addEventListener("mouseleave", () => {
      hideTip();
      mark(plot.findings);
    });
    canvas.addEventListener("click", (event) => {
      if (!isBeside(event)) onChoose(line[hit(event)]);
    });
    canvas.addEventListener("keydown", (event) => {
      const by = KEY_STEPS[event.key];
      if (!by || event.altKey || !line.length) return;
      event.preventDefault();
      onChoose(line[clamp((placeOf(chosen.row) ?? 0) + by, 0, line.length - 1)]);
    });
  }

  function aboutRow(row) {
    const { output } = plot.table.main[row];
    const gradients = plot.gradients[row];
    const brokenTexts = (value) =>
      values.bad[value]
        ? [
            " · ",
            element(
              "span",
              { class: "error" },
              `${pluralText(values.bad[value], "element")} not finite`,
            ),
          ]
        : [];
    const type = spanElement(` ${core.types[rows.type[row]]}`);
    const lines = [boldElement(rows.label[row]), type, element("br")];
    if (output !== undefined)
      lines.push(
        spanElement("std "),
        numberText(values.std[output]),
        spanElement(" · zeros "),
        shareText(values.zeros[output]),
        ...brokenTexts(output),
        element("br"),
      );
    if (gradients.length)
      lines.push(
        spanElement("gradient norm "),
        numberText(normOfValues(core, gradients)),
        ...gradients.flatMap(brokenTexts),
      );
    return lines;
  }

  function showLegend() {
    const kinds = new Set(core.trunk.map((row) => core.types[rows.type[row]]));
    const [trunk] = kinds.size === 1 ? kinds : [""];
    const key = (name) => element("i", { class: `key-${name}` });
    const hasZero = plot.line.some((row) => values.zeros[plot.table.main[row].output] === 1);
    byId("strip-legend").replaceChildren(
      ...legendParts([
        [key("line"), trunk ? `outputs of ${trunk}` : "outputs"],
        [key("dot"), "of other modules"],
        [key("hatch"), "NaN or infinity"],
        ...(hasZero ? [[key("zeros"), "all zero"]] : []),
        [levelIcon("error"), levelIcon("warning"), "a finding begins"],
        [key("also"), "what follows from the chosen one, also at the edge of rows"],
      ]),
    );
  }

  return { draw, mark };
}
