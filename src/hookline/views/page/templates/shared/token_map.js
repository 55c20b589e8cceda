// Tokens × depth: the norm of each token in each block, beside the median of its block; of two
// runs, the error of each token.

const TOKEN_NUMBERS = {
  output: ["Output", "norm"],
  gradient: ["Gradient", "norm of the gradient"],
  error: ["Error", "relative error"],
};

// Draw in an element. `ask(sample)` gives the numbers; `onChoose(row)` is told of the chosen block.
function makeTokenMap(host, { ask, onChoose = () => {} }) {
  const box = element("div", { class: "token-map" });
  const bar = element("div", { class: "bar choices" });
  host.replaceChildren(bar, box);
  let data = null;
  let name = "";
  let asked = 0; // the last request; older answers are dropped
  const map = makeHeatMap(box, {
    label: "Tokens × depth",
    about,
    onChoose: (row) => onChoose(data.rows[row]),
  });

  const medianOf = (numbers) => {
    const sorted = numbers.filter((number) => number > 0).sort((a, b) => a - b);
    return sorted[(sorted.length - 1) >> 1] ?? NaN;
  };
  // Errors of all blocks have one median, so that one sees where they grow.
  const baseOf = (row) => medianOf(name === "error" ? data.error.flat() : data[name][row]);
  const tokenText = (column) =>
    data.ids.length ? `token ${column} (${data.ids[column]})` : `token ${column}`;

  function about(row, column) {
    if (!data) return "";
    const number = data[name][row]?.[column];
    const [, words] = TOKEN_NUMBERS[name];
    if (number === undefined) return `${tokenText(column)}: none`;
    if (number === null) return `${tokenText(column)}: NaN or infinity`;
    const times = number / baseOf(row);
    const beside = name === "error" ? "the median" : "the median of its block";
    const share = `${numberText(times, 2)} × ${beside}`;
    return `${tokenText(column)}: ${words} ${numberText(number, 4)}, ${share}`;
  }

  function draw() {
    const count = Math.max(...data[name].map((numbers) => numbers.length));
    const values = data[name].flatMap((numbers, row) => {
      const base = baseOf(row);
      return Array.from({ length: count }, (_, column) => {
        const number = numbers[column];
        if (number === null) return NaN;
        return number > 0 ? Math.log10(number / base) : undefined;
      });
    });
    const columns = Array.from({ length: count }, (_, column) =>
      String(data.ids[column] ?? column),
    );
    map.show({ rows: data.names, columns, values, marks: [] });
    const most = 10 ** map.largest;
    const times = Number.isFinite(most) ? numberText(most, 2) : "1";
    legend.replaceChildren(
      colourBar("signed", `÷ ${times}`, `× ${times}`),
      spanElement(" of the median"),
    );
  }

  const legend = element("span", { class: "legend" });

  const sample = element("input", {
    type: "number",
    min: 0,
    oninput: () => (asked += 1), // an answer on its way would replace what is being typed
    onchange: () => show(clamp(Math.round(Number(sample.value)), 0, data.samples - 1)),
  });

  function fillBar() {
    sample.max = data.samples - 1;
    sample.value = data.sample;
    const names = Object.keys(TOKEN_NUMBERS).filter((key) => data[key]);
    const titles = names.map((key) => [key, TOKEN_NUMBERS[key][0]]);
    const turn = (key) => {
      name = key;
      draw();
    };
    const key = `${names} ${data.samples}`;
    if (bar.dataset.key === key) return;
    bar.dataset.key = key;
    bar.replaceChildren(
      ...(names.length > 1 ? [element("label", {}, "Number ", makeMenu(titles, name, turn))] : []),
      ...(data.samples > 1
        ? [element("label", {}, "Sample ", sample, spanElement(` of ${data.samples}`))]
        : []),
      element("span", { class: "grow" }),
      legend,
    );
  }

  async function show(number = 0) {
    const ticket = (asked += 1);
    const answer = await ask(number);
    if (ticket !== asked || !answer?.output) return;
    data = answer;
    if (!data[name]) name = data.error ? "error" : "output";
    fillBar();
    draw();
  }

  return { show, draw: () => data && draw() };
}

// Offer the list of a page and its tokens × depth as two views. Returns a function that shows one.
function makeViewSwitch({ onList = () => {}, onTokens }) {
  const turn = (isTokens) => {
    byId("view-tokens").setAttribute("aria-pressed", String(isTokens));
    byId("view-list").setAttribute("aria-pressed", String(!isTokens));
    byId("tokens").hidden = !isTokens;
    byId("view").hidden = isTokens;
    if (isTokens) onTokens();
    else onList();
  };
  byId("view-tokens").addEventListener("click", () => turn(true));
  byId("view-list").addEventListener("click", () => turn(false));
  return turn;
}
