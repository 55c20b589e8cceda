// Drawing: canvases as sharp as the screen, maps of numbers in colours, and the text at the
// pointer.

// The page's colours for a canvas, which does not know light-dark(): a probe resolves them.
const inks = {};
function themeColour(name) {
  if (inks[name] === undefined) {
    const probe = byId("tip");
    probe.style.color = `var(--${name})`;
    inks[name] = getComputedStyle(probe).color;
    probe.style.color = "";
  }
  return inks[name];
}
// Draw again when the theme changes, which canvases do not notice.
function onThemeChange(redraw) {
  const again = () => {
    for (const name of Object.keys(inks)) delete inks[name];
    redraw();
  };
  byId("theme").addEventListener("click", again);
  system.addEventListener("change", again);
}
const families = {};
const fontFamily = (name) =>
  (families[name] ??= getComputedStyle(document.body).getPropertyValue(`--${name}`).trim());

function makeCanvas(width, height, attributes = { "aria-hidden": "true" }) {
  const canvas = element("canvas", attributes);
  const pixels = Math.min(3, devicePixelRatio || 1);
  canvas.width = Math.round(width * pixels);
  canvas.height = Math.round(height * pixels);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(pixels, pixels);
  return [canvas, pen];
}

const fontText = (size, weight = 400) => `${weight} ${size}px ${fontFamily("font")}`;
const monoFontText = (size) => `400 ${size}px ${fontFamily("mono")}`;

// 256 colours of a map; "signed" has zero in the middle, "plain" goes from dark to light.
const colourMaps = new Map();
function colourMap(kind) {
  const key = `${kind} ${isDark()}`;
  if (!colourMaps.has(key)) {
    const colours = new Uint8ClampedArray(256 * 3);
    for (let index = 0; index < 256; index += 1) {
      const share = index / 255;
      colours.set(kind === "signed" ? signedColour(2 * share - 1) : plainColour(share), 3 * index);
    }
    colourMaps.set(key, colours);
  }
  return colourMaps.get(key);
}

const ZERO = -Infinity; // drawn grey: exactly zero where a map is logarithmic
const NONE = Infinity; // left out
function makeMapCanvas(numbers, height, width, [low, high], kind) {
  // Each cell that is not finite is a checkerboard of its own: half of one could be a number.
  const fine = numbers.some(Number.isNaN) ? 2 : 1;
  const across = fine * width;
  const image = new ImageData(across, fine * height);
  const colours = colourMap(kind);
  const dark = isDark();
  const brokenColours = dark
    ? [
        [92, 34, 18],
        [255, 122, 74],
      ]
    : [
        [255, 214, 198],
        [226, 72, 28],
      ];
  const zero = dark ? [92, 96, 104] : [168, 172, 180];
  for (let pixel = 0; pixel < fine * across * height; pixel += 1) {
    const [row, column] = [Math.floor(pixel / across), pixel % across];
    const number = numbers[Math.floor(row / fine) * width + Math.floor(column / fine)];
    if (number === NONE) continue;
    let colour;
    if (number === ZERO) colour = zero;
    else if (Number.isNaN(number)) colour = brokenColours[(row + column) & 1];
    else {
      // Halved, because high - low could overflow.
      const share = (number / 2 - low / 2) / (high / 2 - low / 2 || 1);
      const place = 3 * Math.round(255 * clamp(share, 0, 1));
      colour = colours.subarray(place, place + 3);
    }
    image.data.set(colour, 4 * pixel);
    image.data[4 * pixel + 3] = 255;
  }
  const canvas = document.createElement("canvas");
  canvas.width = image.width;
  canvas.height = image.height;
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// The key to a map's colours: a bar between the numbers of its ends.
function colourBar(kind, low, high) {
  const [bar, pen] = makeCanvas(96, 8);
  const colours = colourMap(kind);
  for (let x = 0; x < 96; x += 1) {
    const place = 3 * Math.round((x / 95) * 255);
    pen.fillStyle = cssColour(colours.subarray(place, place + 3));
    pen.fillRect(x, 0, 1, 8);
  }
  return element("span", { class: "colour-key" }, low, bar, high);
}

// The parts of a legend: each is a mark and its words.
const legendParts = (groups) => groups.map((parts) => element("span", {}, ...parts));

// Codes to numbers: the highest code is NaN or infinity.
function decodeNumbers({ q, lo, hi }, bits) {
  const bytes = decodeBase64(q);
  const codes = bits === 16 ? new Uint16Array(bytes.buffer) : bytes;
  const top = 2 ** bits - 1;
  const numbers = new Float64Array(codes.length);
  for (let index = 0; index < numbers.length; index += 1) {
    const share = codes[index] / (top - 1);
    numbers[index] = codes[index] === top ? NaN : lo * (1 - share) + hi * share;
  }
  return numbers;
}

const GLYPHS = {
  error: "M6 1a5 5 0 1 0 0 10A5 5 0 0 0 6 1Z",
  warning: "M6 1.2 11.2 10.6H.8Z",
  note:
    "M6 2.2a3.8 3.8 0 1 0 0 7.6 3.8 3.8 0 0 0 0-7.6Z" +
    "m0 1.4a2.4 2.4 0 1 1 0 4.8 2.4 2.4 0 0 1 0-4.8Z",
  fine: "M1.6 6.4 4.6 9.4 10.4 3 9.3 2 4.5 7.2 2.6 5.3Z",
};
const levelIcon = (level) =>
  svgElement(
    "svg",
    { class: `glyph ${level}`, viewBox: "0 0 12 12", "aria-hidden": "true" },
    svgElement("path", { d: GLYPHS[level] }),
  );

// Draw the glyph of a finding as a pin, from its top left corner.
function drawPin(pen, level, x, y) {
  pen.save();
  pen.translate(x, y);
  pen.scale(10 / 12, 10 / 12);
  pen.fillStyle = themeColour(level);
  pen.fill(new Path2D(GLYPHS[level]));
  pen.restore();
}

// A text whose beginning is left out where there is no room for it.
function shortenToWidth(pen, text, room) {
  let shown = text;
  while (shown.length > 2 && pen.measureText(shown).width > room) shown = `…${shown.slice(2)}`;
  return shown;
}

// What stands beside the pointer.
function showTip(nodes, { clientX, clientY }) {
  const tip = byId("tip");
  tip.replaceChildren(...nodes);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${clamp(clientX + 14, 6, innerWidth - width - 6)}px`;
  tip.style.top = `${clientY + 18 + height > innerHeight ? clientY - height - 10 : clientY + 16}px`;
}
const hideTip = () => {
  byId("tip").hidden = true;
};

function shareText(share) {
  if (share === null || share === undefined) return "";
  if (share === 0) return "0";
  if (share === 1) return "100 %";
  if (share > 0.999) return ">99.9 %";
  if (share < 0.001) return "<0.1 %";
  return `${(100 * share).toFixed(share < 0.1 || share > 0.99 ? 1 : 0)} %`;
}

// How far a key moves along an axis.
const KEY_STEPS = {
  ArrowRight: 1,
  ArrowDown: 1,
  ArrowLeft: -1,
  ArrowUp: -1,
  PageDown: 10,
  PageUp: -10,
  Home: -Infinity,
  End: Infinity,
};
// How far a key moves over a grid: [down, right]; undefined for other keys.
function gridStepOfKey({ key, altKey, ctrlKey, metaKey }) {
  if (altKey || metaKey) return undefined;
  const all = ctrlKey ? Infinity : 0;
  return {
    ArrowDown: [1, 0],
    ArrowUp: [-1, 0],
    ArrowRight: [0, 1],
    ArrowLeft: [0, -1],
    PageDown: [10, 0],
    PageUp: [-10, 0],
    Home: [-all, -Infinity],
    End: [all, Infinity],
  }[key];
}
