// The data of a recording: unpacked, with rows and values that know each other.

function cumulativeSums(differences) {
  let sum = 0;
  return differences.map((difference) => (sum += difference));
}

const BINS = 24;
const LEVELS = 63;

// Complete the rows and values of the core, in place.
function completeCore(core) {
  const { rows, values } = core;
  const nRows = rows.name.length;
  rows.parent = cumulativeSums(rows.parent);
  values.row = cumulativeSums(values.row);
  values.order = cumulativeSums(values.order);
  Object.assign(rows, treeOfParents(rows.parent));
  rows.path = [];
  rows.label = [];
  for (let row = 0; row < nRows; row += 1) {
    const parent = rows.parent[row];
    const isOperation = rows.name[row].startsWith("@");
    const holder = parent < 0 || rows.path[parent] === "(root)" ? "" : rows.path[parent];
    rows.path[row] = holder + (holder && !isOperation ? "." : "") + rows.name[row];
    rows.label[row] = rows.path[row] + (rows.call[row] < 0 ? "" : `#${rows.call[row]}`);
  }
  values.of = Array.from({ length: nRows }, () => []);
  values.row.forEach((row, value) => values.of[row].push(value));
  values.waiting = new Set(values.waits);
  core.rowOfLabel = new Map(rows.label.map((label, row) => [label, row]));
  return core;
}

// What a page shows of each row in one pass: the value of each port, and what else there is.
function valuesOfRowsInPass(core, pass) {
  const { rows, values, ports } = core;
  const main = rows.name.map(() => ({}));
  const rest = rows.name.map(() => []);
  const isGradient = (value) => ports[values.port[value]].startsWith("grad");
  values.of.forEach((list, row) => {
    for (const value of list) {
      if (values.pass[value] !== pass) continue;
      const port = ports[values.port[value]];
      const isPart = values.leaf[value] !== undefined;
      if (isPart || main[row][port] !== undefined) rest[row].push(value);
      else main[row][port] = value;
    }
  });
  const forward = rows.name.map((_, row) => {
    const part = rest[row].find((value) => !isGradient(value));
    return main[row].output ?? main[row].input ?? part;
  });
  // The gradient of each row: of its module, or else those of its parameters together.
  const gradients = rows.name.map((_, row) => {
    const whole = main[row].grad_output ?? main[row].grad_input;
    if (whole !== undefined) return [whole];
    const parts = rest[row].filter(isGradient);
    const weights = parts.filter((value) => ports[values.port[value]] === "grad");
    const isFirst = (value) => weights.find((v) => values.leaf[v] === values.leaf[value]) === value;
    return weights.length ? weights.filter(isFirst) : parts.slice(0, 1); // of the first backward
  });
  return { pass, main, rest, forward, gradients, gradient: gradients.map(([first]) => first) };
}

// Whether a finding is of a pass; one that is of no single passes is of all.
const isOfPass = ({ passes }, pass) => !passes.length || passes.includes(pass);

// The root of the sum of squares of the finite elements.
function normOfValue({ values }, value) {
  if (value === undefined) return null;
  const { numel, std, mean, bad } = values;
  return normOfStatistics({
    numel: numel[value],
    std: std[value],
    mean: mean[value],
    bad: bad[value] ?? 0,
  });
}
// The norm of several values together; null as long as one has none.
function normOfValues(core, list) {
  const norms = list.map((value) => normOfValue(core, value));
  return norms.length && !norms.includes(null) ? Math.hypot(...norms) : null;
}
const normOfStatistics = ({ numel, std, mean, bad }) =>
  std === null || std === undefined ? null : Math.sqrt(numel - bad) * Math.hypot(std, mean);

// The heights of the bars of a histogram in a text of several, from 0 to 1.
function histogramBars(text, place) {
  const bars = [];
  for (let bin = 0; bin < BINS; bin += 1) {
    const code = text.charCodeAt(place * BINS + bin);
    bars.push(((code === 126 ? 92 : code) - 48) / LEVELS); // "~" stands for a backslash
  }
  return bars;
}

// Take measured columns of some values into the core.
function storeMeasured(core, at, columns) {
  const { values } = core;
  const hist = [
    ...(values.histList ??= values.row.map((_, k) => values.hist.substr(k * BINS, BINS))),
  ];
  at.forEach((value, place) => {
    for (const name of ["mean", "std", "min", "max", "zeros"])
      values[name][value] = columns[name][place];
    hist[value] = columns.hist.substr(place * BINS, BINS);
    values.waiting.delete(value);
  });
  values.histList = hist;
  values.hist = hist.join("");
  for (const name of ["bad", "leaves", "problem", "parts", "range"])
    Object.assign(values[name], columns[name]);
}
