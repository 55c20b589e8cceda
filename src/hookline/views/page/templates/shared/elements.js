// Make elements and write numbers: shared by the pages that draw a result from its JSON.

function setAttributesAndChildren(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false)
      node.setAttribute(name, value === true ? "" : value);
  }
  node.append(
    ...children
      .flat(Infinity)
      .filter((child) => child !== null && child !== undefined && child !== ""),
  );
  return node;
}

const element = (tag, attributes = {}, ...children) =>
  setAttributesAndChildren(document.createElement(tag), attributes, children);
const svgElement = (tag, attributes = {}, ...children) =>
  setAttributesAndChildren(
    document.createElementNS("http://www.w3.org/2000/svg", tag),
    attributes,
    children,
  );

const boldElement = (text) => element("b", {}, text);
const spanElement = (text) => element("span", {}, text);
const quietParagraph = (...parts) => element("p", { class: "quiet" }, parts);

// Fill a menu with [value, title] pairs; one that is open stays so if they are the same.
function fillMenu(select, options, chosen) {
  const text = JSON.stringify(options);
  if (select.dataset.options !== text) {
    select.dataset.options = text;
    select.replaceChildren(...options.map(([value, title]) => element("option", { value }, title)));
  }
  const values = options.map(([value]) => String(value));
  select.value = values.includes(String(chosen)) ? chosen : (values[0] ?? "");
}

function makeMenu(options, chosen, onSelect, attributes = {}) {
  const select = element("select", { ...attributes, onchange: () => onSelect(select.value) });
  fillMenu(select, options, chosen);
  return select;
}

// JSON lacks NaN and infinity: they come as words.
const parseNumber = (value) => (typeof value === "string" ? Number(value) : (value ?? NaN));
const clamp = (number, low, high) => Math.max(low, Math.min(high, number));

function numberText(number, digits = 3) {
  if (number === null || number === undefined || Number.isNaN(number)) return "";
  if (!Number.isFinite(number)) return number > 0 ? "infinite" : "−infinite";
  const size = Math.abs(number);
  const isPlain = size === 0 || (size >= 1e-3 && size < 1e5);
  const text = isPlain
    ? String(Number(size.toPrecision(digits)))
    : size
        .toExponential(digits - 1)
        .replace("e+", "e")
        .replace("e-", "e−");
  return (number < 0 ? "−" : "") + text;
}

// A ratio close to 1 has the digits that tell it from 1, as in the terminal.
function ratioText(ratio) {
  const gap = Math.abs(ratio - 1);
  if (!(gap > 1e-7 && gap < 0.01)) return numberText(ratio);
  return String(Number(ratio.toFixed(-Math.floor(Math.log10(gap)))));
}

const pluralText = (number, noun, nouns = `${noun}s`) =>
  `${number.toLocaleString("en")} ${number === 1 ? noun : nouns}`;

// A path may be broken after its dots, so that no name is cut; a decimal point is none.
const DOTS = /(?<=[^\W\d]\.)(?=\w)|(?<=\d\.)(?=[^\W\d])|(?<=[\])]\.)(?=\w)/;
const breakableText = (text) =>
  text.split(DOTS).flatMap((part, place) => (place ? [element("wbr"), part] : [part]));
