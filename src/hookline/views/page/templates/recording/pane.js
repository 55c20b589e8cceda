// The pane of a row: its findings, histograms, numbers, and maps, with the gradient beside them.

const CARD_NAMES = {
  output: "Output",
  input: "Input",
  grad_output: "Gradient of the output",
  grad_input: "Gradient of the input",
  grad: "Gradient",
};

function makePane(host, core, view, { onClose, onStale }) {
  const { rows, values } = core;
  const isServed = state !== undefined;
  let asked = 0; // the last request for maps; older answers are dropped

  function draw() {
    const row = view.row;
    if (row < 0) return;
    const { main, rest, forward, gradient } = view.table;
    const first = forward[row] ?? gradient[row];
    const body = element("div", { class: "pane-body" });
    host.replaceChildren(headOf(row, first), body);
    host.scrollTop = 0;
    for (const finding of view.findings)
      if (finding.row === row) body.append(callout(finding.level, finding.text, [finding.why, finding.advice]));
    if (first === undefined) {
      const isHere = values.of[row].length;
      body.append(
        element(
          "p",
          { class: "quiet" },
          isHere ? `Nothing in pass ${view.pass}. Choose another pass.` : "No value of its own was recorded here.",
        ),
      );
      return;
    }
    const pair = [forward[row], main[row].grad_output ?? gradient[row]].filter((value) => value !== undefined);
    body.append(cardsOf(pair));
    const maps = element("div", { class: "maps" });
    body.append(maps);
    showMaps(maps, pair);
    const others = [...Object.values(main[row]), ...rest[row]].filter((value) => !pair.includes(value));
    if (others.length) body.append(cardsOf(others.slice(0, 8)));
    if (others.length > 8) body.append(element("p", { class: "quiet" }, `and ${others.length - 8} more values`));
    if (isServed)
      body.append(
        element("p", {}, element("a", { href: pageOf(first) }, "All channels and samples, and the other passes")),
      );
    else if (core.view)
      body.append(element("p", { class: "quiet" }, "All channels and samples: ", element("code", {}, core.view)));
    if (pair.some((value) => values.waiting.has(value))) onStale(pair.find((value) => values.waiting.has(value)));
  }

  function headOf(row, first) {
    const parts = [core.types[rows.type[row]] || "a tensor"];
    if (first !== undefined)
      parts.push(core.dtypes[values.dtype[first]], `number ${values.order[first]} in firing order`);
    if (rows.alias[row]) parts.push(`also ${rows.alias[row]}`);
    const copy = element(
      "button",
      { type: "button", class: "small", onclick: () => copyText(rows.label[row], copy) },
      "Copy",
    );
    copy.setAttribute("aria-label", "Copy the selector");
    const close = element(
      "button",
      { type: "button", class: "small square close", "aria-label": "Close", onclick: onClose },
      "✕",
    );
    const title = element(
      "div",
      {},
      element("h2", { id: "pane-heading" }, rows.label[row]),
      element("p", { class: "quiet" }, parts.filter(Boolean).join(" · ")),
    );
    return element("div", { class: "pane-head" }, title, element("span", { class: "grow" }), copy, close);
  }

  async function copyText(text, button) {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select it";
      getSelection().selectAllChildren(byId("pane-heading"));
    }
  }

  const callout = (level, title, texts) =>
    element(
      "div",
      { class: `callout ${level}-ground` },
      glyph(level),
      element("span", {}, strong(title), " ", texts.filter(Boolean).join(" ")),
    );

  function cardsOf(list) {
    return element("div", { class: list.length > 1 ? "cards" : "cards alone" }, list.map(cardOf));
  }

  function cardOf(value) {
    const port = core.ports[values.port[value]];
    const isBackward = port.startsWith("grad");
    const leaf = values.leaf[value];
    const name = port === "grad" && leaf ? `Gradient of ${leaf}` : (CARD_NAMES[port] ?? port);
    const backward = values.backward[value] === undefined ? "" : `, backward ${values.backward[value]}`;
    const code = leaf && port !== "grad" ? element("code", {}, leaf) : null;
    const title = element("h3", {}, name + backward, code);
    return element(
      "section",
      { class: `card ${isBackward ? "bwd" : "fwd"}` },
      title,
      ...contentsOf(value, isBackward),
    );
  }

  function contentsOf(value, isBackward) {
    const problem = values.problem[value];
    if (problem) return [callout("warning", "", [problem])];
    if (values.waiting.has(value)) return [element("p", { class: "quiet waiting" }, "Measuring…"), numbersOf(value)];
    if (values.numel[value] === null)
      return [element("p", { class: "quiet mono" }, core.shapes[values.shape[value]] || "no tensor")];
    return [histogramOf(value, isBackward), numbersOf(value)];
  }

  function histogramOf(value, isBackward) {
    const [low, high] = [values.min[value], values.max[value]];
    if (low === null || low === undefined)
      return callout(values.numel[value] ? "error" : "note", "", [
        values.numel[value] ? "No element is finite: there is nothing to draw." : "It has no elements.",
      ]);
    const finite = values.numel[value] - (values.bad[value] ?? 0);
    if (low === high)
      return callout("note", "", [
        `All ${finite.toLocaleString("en")} ${values.bad[value] ? "finite " : ""}elements are ${numberText(low, 4)}.`,
      ]);
    const zero = low < 0 && high > 0 ? (240 * -low) / (high - low) : null;
    const words = `Histogram of ${values.numel[value].toLocaleString("en")} elements from ${numberText(low, 4)} to ${numberText(high, 4)}, heights logarithmic`;
    const picture = shape(
      "svg",
      {
        class: `histogram ${isBackward ? "bwd" : "fwd"}`,
        viewBox: "0 0 240 64",
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": words,
      },
      shape("path", { d: barsPath(barsOf(core, value), 240, 64) }),
      zero === null ? null : shape("line", { x1: zero, x2: zero, y1: 0, y2: 64 }),
    );
    const axis = element("div", { class: "axis" }, soft(numberText(low, 3)), soft("log"), soft(numberText(high, 3)));
    return element("div", {}, picture, axis);
  }

  function numbersOf(value) {
    const bad = values.bad[value];
    const facts = [
      ["Shape", core.shapes[values.shape[value]]],
      ["Mean", numberText(values.mean[value], 4)],
      ["Std", numberText(values.std[value], 4)],
      ["Min", numberText(values.min[value], 4)],
      ["Max", numberText(values.max[value], 4)],
      ["Zeros", shareText(values.zeros[value])],
      ["Norm", numberText(normOf(core, value), 4)],
      ["NaN, inf", bad ? values.leaves[value] : values.waiting.has(value) ? "" : "0", bad],
      ["Elements", values.numel[value]?.toLocaleString("en") ?? ""],
    ];
    const shown = facts.filter(([, text]) => text);
    return element(
      "dl",
      { class: "numbers" },
      shown.map(([name, text, isBad]) =>
        element(
          "div",
          { class: `${isBad ? "bad" : ""}${name === "Shape" ? " wide" : ""}` },
          element("dt", {}, name),
          element("dd", {}, text),
        ),
      ),
    );
  }

  // -- maps --------------------------------------------------------------------------------------

  async function showMaps(box, pair) {
    const ticket = (asked += 1);
    const found = isServed ? await askMaps(pair[0]) : pair.map(embeddedMaps);
    if (ticket !== asked) return;
    const drawn = pair.map((value, index) => ({
      name: nameOf(value),
      ink: isGradient(value) ? "bwd" : "fwd",
      maps: found?.[index],
    }));
    const sets = drawn.filter(({ maps }) => maps);
    const redraw = () => drawMaps(box, sets, view, redraw);
    if (sets.length) redraw();
    else if (!isServed && core.hasMaps)
      box.replaceChildren(element("p", { class: "quiet" }, "Its picture did not fit into the file."));
  }

  const isGradient = (value) => core.ports[values.port[value]].startsWith("grad");
  const nameOf = (value) =>
    isGradient(value) ? "Gradient" : (CARD_NAMES[core.ports[values.port[value]]] ?? "Value");

  function embeddedMaps(value) {
    const node = byId(`maps-${values.order[value]}`);
    return node ? JSON.parse(node.textContent) : null;
  }

  async function askMaps(value) {
    const answer = await fetchJson(`maps?value=${values.order[value]}&state=${encodeURIComponent(state)}`);
    return answer ? [answer.own?.maps, answer.gradient?.maps] : null;
  }

  // The address of a value's own page; by its place where the name has letters that do not print.
  function pageOf(value) {
    const row = values.row[value];
    const port = core.ports[values.port[value]];
    const leaf = values.leaf[value];
    const path =
      port === "grad" && leaf
        ? `${rows.path[row] === "(root)" ? "" : `${rows.path[row]}.`}${leaf}`
        : rows.path[row] + (port === "output" && !leaf ? "" : `:${port}${leaf ?? ""}`);
    const at = port === "grad" ? `${path}:grad` : path;
    if (!/^[\x20-\x7e]*$/.test(at) || at.includes("\\")) return `site?value=${values.order[value]}`;
    const backward = values.backward[value] === undefined ? "" : `&backward=${values.backward[value]}`;
    return `site?at=${encodeURIComponent(at)}&pass=${values.pass[value]}&call=${values.call[value]}${backward}`;
  }

  return { draw };
}
