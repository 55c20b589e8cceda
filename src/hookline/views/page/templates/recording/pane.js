// The pane of a row: its findings, histograms, numbers, and maps, with the gradient beside them.

const CARD_NAMES = {
  output: "Output",
  input: "Input",
  grad_output: "Gradient of the output",
  grad_input: "Gradient of the input",
  grad: "Gradient",
};

const ORDERS = [
  ["largest", "by largest element"],
  ["index", "by number"],
  ["mean", "by mean"],
  ["std", "by deviation"],
  ["max", "by maximum"],
];

const FORMS = [
  ["places", "at their patches"],
  ["table", "as a table"],
];

function makePane(host, core, view, { onClose, onStale }) {
  const { rows, values } = core;
  const isServed = state !== undefined;
  let asked = 0; // the last request for maps; older answers are dropped
  let focused = ""; // what had the focus before it was drawn anew, and waits for an answer
  let drawn = {}; // the chosen row in its pass: its boxes, and how to draw its maps again

  // Draw what is chosen. Of what is drawn already, the numbers are drawn anew; what is read, typed
  // and scrolled in the rest stays.
  function draw() {
    const { row, pass } = view;
    if (row < 0) return;
    const { main, forward, gradient } = view.table;
    const first = forward[row] ?? gradient[row];
    const pair = [forward[row], main[row].grad_output ?? gradient[row]].filter(
      (value) => value !== undefined,
    );
    const isNew = drawn.row !== row || drawn.pass !== pass;
    if (isNew) begin(row, pass, headOf(row, first));
    drawn.top.replaceChildren(...topOf(row, first, pair));
    if (first === undefined) return;
    drawn.rest.replaceChildren(...restOf(row, pair));
    if (isNew) showMaps(drawn, pair);
    else if (drawn.nParts !== partsOf(pair[0]).length) drawn.draw?.();
    const stale = pair.find((value) => values.waiting.has(value));
    if (stale !== undefined) onStale(stale);
  }

  function noteFocus() {
    const active = document.activeElement;
    if (active !== document.body) focused = host.contains(active) ? active.id : "";
  }

  function begin(row, pass, head) {
    noteFocus();
    asked += 1; // an answer on its way is of another value
    const [top, over, maps, rest] = ["parts", "maps", "maps", "parts"].map((name) =>
      element("div", { class: name }),
    );
    drawn = { row, pass, top, over, maps, rest };
    host.replaceChildren(head, element("div", { class: "pane-body" }, top, over, maps, rest));
    host.scrollTop = 0;
  }

  function topOf(row, first, pair) {
    const callouts = view.findings
      .filter((finding) => finding.row === row && isOfPass(finding, view.pass))
      .map((finding) => findingCallout(finding));
    if (first !== undefined) return [...callouts, cardsOf(recordsOf(pair))];
    const none = values.of[row].length
      ? `Nothing in pass ${view.pass}. Choose another pass.`
      : "No value of its own was recorded here.";
    return [...callouts, quietParagraph(none)];
  }

  function restOf(row, pair) {
    const { main, rest } = view.table;
    const others = [...Object.values(main[row]), ...rest[row]].filter(
      (value) => !pair.includes(value),
    );
    const more = others.length > 8 ? [quietParagraph(`and ${others.length - 8} more values`)] : [];
    const command =
      !isServed && core.view
        ? [quietParagraph("All channels and samples: ", element("code", {}, core.view))]
        : [];
    return [
      ...(others.length ? [cardsOf(recordsOf(others.slice(0, 8)))] : []),
      ...more,
      ...command,
    ];
  }

  function headOf(row, first) {
    const about = [core.types[rows.type[row]] || (core.store ? "" : "a tensor")];
    if (first !== undefined)
      about.push(core.dtypes[values.dtype[first]], `number ${values.order[first]} in firing order`);
    if (rows.alias[row]) about.push(`also ${rows.alias[row]}`);
    return paneHead(rows.label[row], about, { onClose, copies: true });
  }

  const cardsOf = (records) =>
    element("div", { class: records.length > 1 ? "cards" : "cards alone" }, records.map(cardOf));

  // What a card shows of a value.
  function recordOf(value) {
    const port = core.ports[values.port[value]];
    const leaf = values.leaf[value];
    const isWeight = port === "grad" && leaf;
    const backward =
      values.backward[value] === undefined ? "" : `, backward ${values.backward[value]}`;
    return {
      title: (isWeight ? `Gradient of ${leaf}` : (CARD_NAMES[port] ?? port)) + backward,
      leaf: isWeight ? "" : leaf,
      isBackward: port.startsWith("grad"),
      problem: values.problem[value],
      isComplex: core.dtypes[values.dtype[value]]?.startsWith("complex"),
      isWaiting: values.waiting.has(value),
      shape: core.shapes[values.shape[value]],
      numel: values.numel[value],
      bad: values.bad[value] ?? 0,
      badText: values.leaves[value],
      bars: histogramBars(values.hist, value),
      range: values.range[value], // of a store's items, whose numbers are of all items
      stored: values.stored[value],
      ...Object.fromEntries(
        ["mean", "std", "min", "max", "zeros"].map((name) => [name, values[name][value]]),
      ),
    };
  }

  // The tensors of a value that has several, each a record.
  const partsOf = (value) =>
    (values.parts[value] ?? []).map((part) => ({
      ...recordOf(value),
      ...part,
      range: undefined,
      badText: part.bad.toLocaleString("en"),
      bars: histogramBars(part.hist, 0),
    }));

  function recordsOf(list) {
    return list.flatMap((value) => {
      const parts = partsOf(value);
      return parts.length ? parts : [recordOf(value)];
    });
  }

  function cardOf(record) {
    const code = record.leaf ? element("code", {}, record.leaf) : null;
    return element(
      "section",
      { class: `card ${record.isBackward ? "bwd" : "fwd"}` },
      element("h3", {}, record.title, code),
      ...contentsOf(record),
    );
  }

  function contentsOf(record) {
    if (record.problem) return [callout("warning", record.problem)];
    if (record.isWaiting)
      return [element("p", { class: "quiet waiting" }, "Measuring…"), numbersOf(record)];
    if (record.numel === null)
      return [element("p", { class: "quiet mono" }, record.shape || "no tensor")];
    const isPart = record.bad && record.bad < record.numel;
    const leftOut = "These numbers leave out NaN and infinity.";
    const notes = [isPart ? leftOut : "", record.isComplex ? "Of the magnitudes." : ""];
    const note = element("p", { class: "quiet left-out" }, notes.filter(Boolean).join(" "));
    return [histogramOf(record), note.textContent ? note : null, numbersOf(record)];
  }

  function histogramOf({ min, max, numel: all, range, bad, bars, isBackward }) {
    const [low, high, numel] = range ?? [min, max, all];
    if (low === null || low === undefined)
      return numel
        ? callout("error", "No element is finite: there is nothing to draw.")
        : callout("note", "It has no elements.");
    const isSame = !(bars[0] && bars.at(-1)); // else the ends are rounded to one
    if (low === high && isSame)
      return callout(
        "note",
        numel - bad === 1
          ? `The only ${bad ? "finite " : ""}element is ${numberText(low, 4)}.`
          : `All ${(numel - bad).toLocaleString("en")} ${bad ? "finite " : ""}elements are ` +
              `${numberText(low, 4)}.`,
      );
    const zero = low < 0 && high > 0 ? 240 / (1 - high / low) : null;
    const ends = `from ${numberText(low, 4)} to ${numberText(high, 4)}`;
    const many = numel.toLocaleString("en");
    const words = `Histogram of ${many} elements ${ends}, heights logarithmic`;
    const picture = svgElement(
      "svg",
      {
        class: `histogram ${isBackward ? "bwd" : "fwd"}`,
        viewBox: "0 0 240 64",
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": words,
      },
      svgElement("path", { d: histogramPath(bars, 240, 64) }),
      zero === null ? null : svgElement("line", { x1: zero, x2: zero, y1: 0, y2: 64 }),
    );
    const about = range ? "of the items shown; log counts" : "log counts";
    const axis = element(
      "div",
      { class: "axis" },
      spanElement(numberText(low, 3)),
      spanElement(about),
      spanElement(numberText(high, 3)),
    );
    return element("div", {}, picture, axis);
  }

  function numbersOf(record) {
    const { bad, numel } = record;
    return numbersList([
      ["Shape", record.shape, false, true],
      ["Mean", numberText(record.mean, 4)],
      ["Std", numberText(record.std, 4)],
      ["Min", numberText(record.min, 4)],
      ["Max", numberText(record.max, 4)],
      ["Zeros", shareText(record.zeros)],
      ["Norm", numberText(normOfStatistics(record), 4)],
      ["NaN, inf", bad ? record.badText : record.isWaiting ? "" : "0", bad],
      ["Elements", numel?.toLocaleString("en") ?? ""],
      ["Stored", sizeText(record.stored)],
    ]);
  }

  // -- maps --------------------------------------------------------------------------------------

  async function showMaps(boxes, pair) {
    const ticket = (asked += 1);
    const answer = isServed ? await askMaps(pair[0]) : embeddedAnswer(pair);
    if (ticket !== asked || !answer?.own) return; // of another recording: the page reloads
    if (answer.own?.problem && isServed && view.choice.sample) {
      view.choice.sample = 0; // this value may have fewer samples than the one before
      await showMaps(boxes, pair);
      return;
    }
    boxes.draw = () => drawAnswer(boxes, pair, answer);
    boxes.draw();
  }

  function drawAnswer(boxes, pair, answer) {
    noteFocus();
    const nParts = partsOf(pair[0]).length;
    const isSame = boxes.answer === answer && boxes.nParts === nParts;
    Object.assign(boxes, { answer, nParts });
    const sets = pair
      .map((value, index) => ({
        name: nameOf(value),
        ink: isGradient(value) ? "bwd" : "fwd",
        maps: [answer.own, answer.gradient][index]?.maps,
      }))
      .filter((set) => set.maps);
    const ask = () => showMaps(boxes, pair);
    const hasChoices = isServed && sets.length;
    const makeChoices = () => choicesOf(sets[0].maps, pair[0], answer.scores, ask);
    if (!isSame) boxes.choices = hasChoices ? makeChoices() : null; // else one is being typed in
    const { choices } = boxes;
    const over = element("div", { class: "maps" });
    boxes.over.replaceChildren(...(answer.scores ? [classScoresSection(answer.scores)] : []), over);
    const showChannel = drawImageOverlay(over, answer.over, sets, view);
    if (!over.children.length) over.remove();
    const redraw = () => {
      drawMaps(boxes.maps, sets, view, redraw, { choices, onTile: showChannel });
      const lack = answer.gradient?.problem;
      if (lack) boxes.maps.append(quietParagraph(`Gradient: ${lack}`));
    };
    if (sets.length) redraw();
    else if (answer.own?.problem) boxes.maps.replaceChildren(quietParagraph(answer.own.problem));
    else if (!isServed && core.hasMaps && !values.problem[pair[0]])
      boxes.maps.replaceChildren(quietParagraph("Its picture did not fit into the file."));
    if (focused && document.activeElement === document.body)
      byId(focused)?.focus({ preventScroll: true });
    focused = "";
  }

  const isGradient = (value) => core.ports[values.port[value]].startsWith("grad");
  const nameOf = (value) =>
    isGradient(value) ? "Gradient" : (CARD_NAMES[core.ports[values.port[value]]] ?? "Value");

  // A file has what is drawn of 64 values in firing order in one script, parsed when needed.
  const scripts = new Map();
  function embedded(order, name = "") {
    const number = order >> 6;
    if (!scripts.has(number))
      scripts.set(number, JSON.parse(byId(`maps-${number}`)?.textContent ?? "{}"));
    return scripts.get(number)[`${order}${name}`];
  }

  // What a server would answer.
  function embeddedAnswer([value, gradient]) {
    const order = values.order[value];
    const place = core.images?.[values.pass[value]];
    return {
      own: { maps: embedded(order) },
      gradient: gradient === undefined ? null : { maps: embedded(values.order[gradient]) },
      over: {
        ...(place === undefined ? { image: "" } : embedded(place, " image")),
        sets: embedded(order, " over"),
      },
      scores: embedded(order, " scores"),
    };
  }

  function askMaps(value) {
    if (view.drawn !== value) view.choice = { ...view.choice, first: 0, part: 0 };
    view.drawn = value;
    const parameters = new URLSearchParams({ value: values.order[value], state, ...view.choice });
    return fetchJson(`maps?${parameters}`);
  }

  // What is drawn of a value: which of its tensors, which sample, which channels in which order.
  function choicesOf(maps, value, scores, ask) {
    const { choice } = view;
    const choose = (changes) => {
      Object.assign(choice, changes);
      ask();
    };
    const box = element("div", { class: "choices" });
    const menu = (name, title, options, chooseIt = choose) =>
      box.append(
        element(
          "label",
          {},
          `${title} `,
          makeMenu(options, choice[name], (chosen) => chooseIt({ [name]: chosen }), {
            id: `maps-${name}`,
          }),
        ),
      );
    const chooseAnew = (change) => choose({ ...change, first: 0 });
    const leaves = partsOf(value).map(({ leaf }, k) => [k, leaf]);
    if (leaves.length) menu("part", "Tensor", leaves);
    const samples = Math.max(maps.samples, scores?.samples ?? 1);
    if (samples > 1) {
      const input = element("input", {
        id: "maps-sample",
        type: "number",
        min: 0,
        max: samples - 1,
        value: maps.sample,
        oninput: () => {
          choice.sample = clamp(Math.round(Number(input.value)), 0, samples - 1);
          asked += 1; // an answer on its way would draw over what is being typed
        },
        onchange: ask,
      });
      box.append(
        element("label", {}, "Sample ", input, spanElement(` of ${samples.toLocaleString("en")}`)),
      );
    }
    if (maps.form) menu("form", "Tokens", FORMS, chooseAnew);
    if (maps.kind === "channels" && maps.of > 1) {
      menu("order", "Channels", ORDERS, chooseAnew);
      const { length } = maps.tiles;
      if (length < maps.of) {
        const turn = (text, name, first) =>
          element(
            "button",
            {
              type: "button",
              id: `maps-${name}`,
              class: "small square",
              "aria-label": `${name} channels`,
              disabled: first < 0 || first >= maps.of,
              onclick: () => choose({ first }),
            },
            text,
          );
        const last = maps.first + length;
        box.append(
          turn("←", "previous", maps.first - 16),
          spanElement(`${maps.first + 1} to ${last}`),
          turn("→", "next", last),
        );
      }
    }
    return box.children.length ? box : null;
  }

  return { draw, redraw: () => drawn.draw?.() };
}
