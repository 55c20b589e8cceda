// The reader's own numbers: a JSON or CSV file of {site: number}, as a column and as colours.

// Read a file's text: {"site": number}, [{"site": …, "number": …}], or lines of `site,number`.
// Returns the numbers by site, and how many sites have none.
function parseNumbers(text) {
  const pairs = /^\s*[[{]/.test(text) ? parseJsonPairs(JSON.parse(text)) : parseLinePairs(text);
  const numbers = new Map();
  for (const [site, number] of pairs)
    if (Number.isFinite(number)) numbers.set(String(site).trim(), number);
  return { numbers, others: pairs.filter(([, number]) => !Number.isFinite(number)).length };
}

// null and an empty text would be 0.
const numberOrNaN = (part) =>
  typeof part === "number" || (typeof part === "string" && part.trim()) ? Number(part) : NaN;

function parseJsonPairs(data) {
  if (!Array.isArray(data))
    return Object.entries(data).map(([site, number]) => [site, numberOrNaN(number)]);
  return data.map((row) => {
    const parts = Array.isArray(row) ? row : Object.values(row);
    const site = parts.find((part) => typeof part === "string");
    return [site, numberOrNaN(parts.find((part) => typeof part === "number"))];
  });
}

// The last comma or tab divides: a site may have commas. A heading has no number, and is left out.
function parseLinePairs(text) {
  const pairs = text
    .split(/\r?\n/)
    .filter((line) => line.trim())
    .map((line) => {
      const place = Math.max(line.lastIndexOf(","), line.lastIndexOf("\t"), line.lastIndexOf(";"));
      const number = place < 0 ? NaN : numberOrNaN(line.slice(place + 1));
      return [line.slice(0, place).replace(/^"|"$/g, ""), number];
    });
  return pairs.filter(([, number], place) => place || Number.isFinite(number));
}

// The numbers by row, and the scale of their colours; `missing` sites have no row.
function numbersByRow(core, numbers) {
  const byRow = new Map();
  let missing = 0;
  for (const [site, number] of numbers) {
    const row =
      core.rowOfLabel.get(site.replace(/:output$/, "")) ?? core.rowOfLabel.get(`${site}#0`);
    if (row === undefined) missing += 1;
    else byRow.set(row, number);
  }
  const list = [...byRow.values()];
  const low = list.reduce((least, number) => Math.min(least, number), Infinity);
  const high = list.reduce((most, number) => Math.max(most, number), -Infinity);
  const reach = Math.max(-low, high);
  const kind = low < 0 ? "signed" : "plain";
  const range = low < 0 ? [-reach, reach] : [low, high];
  const colourOf = (row) => {
    if (!byRow.has(row)) return undefined;
    const share = clamp((byRow.get(row) - range[0]) / (range[1] - range[0] || 1), 0, 1);
    const place = 3 * Math.round(255 * share);
    return cssColour(colourMap(kind).subarray(place, place + 3));
  };
  return { byRow, missing, kind, range, colourOf };
}
