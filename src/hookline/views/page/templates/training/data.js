// The numbers of a training: sites by columns, where a column stands for one measured step or for
// several in a row, with the last number, the least and the greatest of these steps.

const LARGEST = 3.4028e38; // greater numbers than float32 holds came as its greatest
const isNumber = (number) => number !== null && number !== undefined && !Number.isNaN(number);
const decodeFloats = (text) => new Float32Array(decodeBase64(text).buffer);

function valueText(number, name = "") {
  if (!isNumber(number)) return "";
  if (Math.abs(number) > LARGEST) return number < 0 ? "< −3.4e38" : "> 3.4e38";
  return name === "zero_share" ? shareText(number) : numberText(number, 4);
}

function makeRun() {
  const run = {
    sites: [], // { path, tail, port, label, depth }
    names: [], // [key, title] of the numbers
    columns: [], // { first, last, at, low, high, bad }
    number: "", // the number that the columns hold
    stride: 0,
    now: new Float32Array(), // the numbers of each site's last step
    status: { n_steps: -1 },
    arrived: Date.now(), // when the status came
    findings: [],
    notes: [],
    logged: [],
    take,
    titleOf: (number) => run.names.find(([name]) => name === number)?.[1] ?? number,
    latest: (name, site) =>
      run.now[run.names.findIndex(([key]) => key === name) * run.sites.length + site],
    isWide: () => run.stride > 1,
    extentOf,
    medianOf,
    columnOf,
    extremeOf: ({ low, high }, site) =>
      Math.abs(low[site]) > Math.abs(high[site]) ? low[site] : high[site],
  };
  let extents = [];
  let medians = [];

  // Take an answer of the server; tell whether numbers came with it.
  function take(answer) {
    run.status = answer;
    run.arrived = Date.now();
    if (answer.logged) run.logged = answer.logged;
    if (answer.firsts === undefined) return false;
    if (answer.sites) {
      run.sites = answer.sites.map(([path, tail, port], site) => {
        const label = path + (tail ? `:${tail}` : "");
        return { path, tail, port, label, depth: answer.depth[site] };
      });
      run.names = answer.names;
    }
    run.number = answer.number;
    run.stride = answer.stride;
    takeColumns(answer);
    run.now = decodeFloats(answer.now);
    run.findings = answer.findings;
    run.notes = answer.notes;
    extents = [];
    medians = [];
    return true;
  }

  function takeColumns(answer) {
    const count = run.sites.length;
    const [last, low, high] = answer.values.map(decodeFloats);
    const bad = decodeBase64(answer.bad);
    run.columns.length = answer.from;
    answer.firsts.forEach((first, index) => {
      const part = (numbers) => numbers.subarray(index * count, (index + 1) * count);
      run.columns.push({
        first,
        last: answer.lasts[index],
        at: part(last),
        low: part(low ?? last),
        high: part(high ?? last),
        bad: part(bad),
      });
    });
  }

  // The least and greatest number of a site, and the least magnitude that is not 0.
  function extentOf(site) {
    if (!extents[site]) {
      const extent = { low: Infinity, high: -Infinity, tiny: Infinity };
      for (const { low, high } of run.columns) {
        const [least, most] = [low[site], high[site]];
        if (least < extent.low) extent.low = least;
        if (most > extent.high) extent.high = most;
        const size = Math.min(Math.abs(least), Math.abs(most));
        if (size > 0 && size < extent.tiny) extent.tiny = size;
      }
      extents[site] = extent;
    }
    return extents[site];
  }

  // The median of a site over the columns; NaN without a number.
  function medianOf(site) {
    if (medians[site] === undefined) {
      const numbers = run.columns
        .map(({ at }) => at[site])
        .filter((number) => !Number.isNaN(number));
      numbers.sort((a, b) => a - b);
      medians[site] = numbers.length ? numbers[(numbers.length - 1) >> 1] : NaN;
    }
    return medians[site];
  }

  // The column of a step; between columns the later one. Steps may go back: the last one counts.
  function columnOf(step) {
    const exact = run.columns.findLastIndex(({ first, last }) => first <= step && step <= last);
    if (exact >= 0) return exact;
    const later = run.columns.findIndex(({ first }) => first > step);
    return later < 0 ? run.columns.length - 1 : later;
  }
  return run;
}

const jointExtent = (extents) => ({
  low: extents.reduce((least, { low }) => Math.min(least, low), Infinity),
  high: extents.reduce((most, { high }) => Math.max(most, high), -Infinity),
  tiny: extents.reduce((least, { tiny }) => Math.min(least, tiny), Infinity),
});

// A scale takes a number to a place from 0 to 1. Magnitudes over two decades are logarithmic.
function makeScale({ low, high, tiny }, isSigned = low < 0) {
  if (low > high) return null;
  if (isSigned) {
    const top = Math.max(-low, high);
    const bottom = Math.max(tiny, top * 1e-6);
    const isLog = top / bottom > 100;
    const share = (size) => (size <= bottom ? 0 : Math.log(size / bottom) / Math.log(top / bottom));
    const part = isLog ? share : (size) => size / top;
    return {
      isSigned: true,
      isLog,
      low: -top,
      high: top,
      place: (x) => 0.5 + 0.5 * Math.sign(x) * part(Math.abs(x)),
    };
  }
  const bottom = Math.max(low > 0 ? low : tiny, high * 1e-12);
  if (high > 0 && high / bottom > 100) {
    const span = Math.log(high / bottom);
    return {
      isLog: true,
      low: bottom,
      high,
      place: (x) => (x <= bottom ? 0 : Math.log(x / bottom) / span),
    };
  }
  const span = high - low;
  return { isLog: false, low, high, place: (x) => (span > 0 ? (x - low) / span : 0.5) };
}

const stepText = ({ first, last }) =>
  first === last
    ? `step ${first.toLocaleString("en")}`
    : `steps ${first.toLocaleString("en")} to ${last.toLocaleString("en")}`;

// Round numbers of which `count` or so lie between two.
function roundTicks(from, to, count = 5) {
  const rough = (to - from) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const start = Math.ceil(from / step);
  const ticks = [];
  for (let k = 0; k < 12 && (start + k) * step <= to; k += 1)
    ticks.push(Number(((start + k) * step).toPrecision(12)));
  return ticks;
}

// Round steps with their columns. Where steps go back, the steps of some columns.
function stepTicks({ columns }, count) {
  const end = columns.length - 1;
  if (end < 1) return columns.map(({ last }, index) => [index, last]);
  if (columns.some(({ last }, index) => index && last < columns[index - 1].last)) {
    const most = Math.min(end, count);
    const places = Array.from({ length: most + 1 }, (_, k) => Math.round((k * end) / most));
    return places.map((index) => [index, columns[index].last]);
  }
  const whole = roundTicks(columns[0].first, columns[end].last, count).filter(Number.isInteger);
  return whole.map((step) => [columns.findIndex(({ last }) => last >= step), step]);
}
