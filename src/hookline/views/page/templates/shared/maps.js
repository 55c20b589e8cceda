// Maps of a value: channels, heads or a table, with the number under the pointer or the arrow keys.

const TITLES = { channels: "Channels", heads: "Heads", table: "Values" };

// Draw maps of one form in an element: of a value and its gradient, or of two values and their
// difference. `sets` are { name, ink, maps }; `choices` say which of the value is drawn, and
// `onTile(channel)` is told of a map that is pressed.
function drawMaps(host, sets, view, redraw, { choices = null, onTile = null } = {}) {
  const [{ maps: base }] = sets;
  const had = host.contains(document.activeElement) ? document.activeElement.id : "";
  for (const part of [...host.children]) if (part !== choices) part.remove();
  if (choices && !choices.isConnected) host.append(choices);
  host.prepend(mapsBar(base, view, redraw, Boolean(choices)));
  for (const set of sets)
    host.append(...mapsPicture(set, Math.max(200, host.clientWidth), view, onTile));
  host.querySelectorAll("canvas").forEach((canvas, k) => (canvas.id = `map-${k}`));
  if (had) byId(had)?.focus({ preventScroll: true });
}

function mapsBar(base, view, redraw, hasChoices) {
  const isTable = base.kind === "table";
  const all = `${base.tiles.length} of ${base.of.toLocaleString("en")}`;
  const size = `${base.rows.toLocaleString("en")} × ${base.columns.toLocaleString("en")}`;
  const about = [
    isTable
      ? `${size}, ${base.down}s down`
      : `${all}${base.kind === "channels" && base.order === "largest" ? ", largest first" : ""}`,
  ];
  if (base.samples > 1 && !hasChoices)
    about.push(`sample ${base.sample} of ${base.samples.toLocaleString("en")}`);
  if (base.slice) about.push(base.slice);
  if (base.h !== base.rows || base.w !== base.columns) about.push(`means, ${base.h} × ${base.w}`);
  const bar = element(
    "div",
    { class: "maps-bar" },
    element("h3", {}, TITLES[base.kind]),
    spanElement(about.join("; ")),
    element("span", { class: "grow" }),
  );
  if (isTable) return bar;
  const choices = [
    ["own scale", false],
    ["one scale", true],
  ].map(([text, isShared]) => {
    const choose = () => {
      view.isShared = isShared;
      redraw();
    };
    return element(
      "button",
      {
        type: "button",
        id: isShared ? "one-scale" : "own-scale",
        "aria-pressed": String(view.isShared === isShared),
        onclick: choose,
      },
      text,
    );
  });
  bar.append(
    element("span", { class: "choice", role: "group", "aria-label": "Scale of colours" }, choices),
  );
  return bar;
}

// The range of colours of maps; signed ones are centred at zero. NaN if no number is finite.
function colourRange(tiles, isSigned) {
  const finite = tiles.filter(({ lo }) => lo !== null);
  if (!finite.length) return [NaN, NaN];
  const low = Math.min(...finite.map(({ lo }) => lo));
  const high = Math.max(...finite.map(({ hi }) => hi));
  const most = Math.max(-low, high);
  return isSigned ? [-most, most] : [low, high];
}

// A range in words.
const rangeText = ([low, high], digits, from = "") =>
  Number.isNaN(low)
    ? "all NaN or infinity"
    : `${from}${numberText(low, digits)} to ${numberText(high, digits)}`;

// The legend of maps with a scale each. Signed colours are about zero, whatever is least.
const ownScaleColourBar = (isSigned) =>
  isSigned ? colourBar("signed", "below 0", "above 0") : colourBar("plain", "least", "greatest");

// The legend of maps; `isOwn` if each has its own scale.
function mapsLegend(tiles, isSigned, isOwn) {
  const range = colourRange(tiles, isSigned);
  if (Number.isNaN(range[0])) return spanElement(rangeText(range));
  if (isOwn) return ownScaleColourBar(isSigned);
  return colourBar(isSigned ? "signed" : "plain", ...range.map((number) => numberText(number)));
}

function mapsPicture({ name, ink: colour, maps }, width, view, onTile) {
  const { kind, tiles, bits } = maps;
  for (const tile of tiles) tile.numbers ??= decodeNumbers(tile, bits);
  const isTable = kind === "table";
  const isSigned = Math.min(...tiles.map(({ lo }) => lo)) < 0;
  const isOwn = !isTable && !view.isShared;
  const range = colourRange(tiles, isSigned);
  const form = tileLayout(maps, width);
  const many = pluralText(tiles.length, isTable ? "map" : kind.slice(0, -1));
  const words = `${name}: ${many} ${rangeText(colourRange(tiles, false), 3, "from ")}`;
  const [canvas, pen] = makeCanvas(width, form.height, {
    role: "img",
    tabindex: 0,
    "aria-label": `${words}. Arrow keys read the numbers.`,
  });
  pen.imageSmoothingEnabled = false;
  tiles.forEach((tile, index) =>
    drawTile(pen, tile, form.at(index), {
      form,
      maps,
      isSigned,
      range: isOwn ? colourRange([tile], isSigned) : range,
      isTable,
    }),
  );
  const readout = element("span", { class: "readout", "aria-live": "polite" });
  readNumbersAtPointer(canvas, {
    name,
    maps,
    form,
    readout,
    onTile: maps.isPlaced ? onTile : null,
  });
  return [
    element(
      "div",
      { class: "maps-key" },
      element("b", { class: colour }, name),
      mapsLegend(tiles, isSigned, isOwn),
      element("span", { class: "grow" }),
      readout,
    ),
    canvas,
  ];
}

// Where the tiles lie.
function tileLayout({ kind, tiles, h, w }, width) {
  const GAP = 4;
  if (kind === "table") {
    const height = h === 1 ? 22 : clamp(h * clamp(Math.floor(width / w), 3, 12), 24, 320);
    return { width, tileWidth: width, tileHeight: height, height, at: () => [0, 0] };
  }
  const most = kind === "heads" ? 4 : tiles.length > 8 ? 8 : Math.max(tiles.length, 4);
  const across = Math.min(width < 300 ? 4 : most, Math.max(tiles.length, 4));
  const tileWidth = Math.floor((width - GAP * (across - 1)) / across);
  const tileHeight = clamp(Math.round((tileWidth * h) / w), 8, 200);
  const line = tileHeight + 16;
  const at = (index) => [(index % across) * (tileWidth + GAP), Math.floor(index / across) * line];
  return { width, tileWidth, tileHeight, height: line * Math.ceil(tiles.length / across), at };
}

function drawTile(pen, tile, [x, y], { form, maps, isSigned, range, isTable }) {
  const { tileWidth, tileHeight } = form;
  const pixels = makeMapCanvas(tile.numbers, maps.h, maps.w, range, isSigned ? "signed" : "plain");
  pen.drawImage(pixels, x, y, tileWidth, tileHeight);
  pen.strokeStyle = themeColour("line");
  pen.lineWidth = 1;
  pen.strokeRect(x + 0.5, y + 0.5, tileWidth - 1, tileHeight - 1);
  if (isTable) return;
  pen.font = monoFontText(10);
  pen.fillStyle = themeColour("ink-3");
  pen.textBaseline = "top";
  pen.fillText(String(tile.c), x, y + tileHeight + 3);
  if (tileWidth < 64) return;
  pen.textAlign = "right";
  const most = `${isSigned ? "±" : "≤"}${numberText(range[1], 2)}`;
  pen.fillText(Number.isNaN(range[1]) ? "NaN, inf" : most, x + tileWidth, y + tileHeight + 3);
  pen.textAlign = "left";
}

// How far a number may be from the value's, half a code, where its four digits do not hold that.
function roundingErrorText(number, { lo, hi }, bits) {
  const error = (hi / 2 - lo / 2) / (2 ** bits - 2);
  const last = number ? 10 ** (Math.floor(Math.log10(Math.abs(number))) - 3) : 0;
  return error > last / 2 ? ` ± ${numberText(error, 1)}` : "";
}

// Read numbers by pointer and by keyboard.
function readNumbersAtPointer(canvas, { name, maps, form, readout, onTile = null }) {
  const { tiles, h, w, bits } = maps;
  let cell = tiles[0].cell ?? [0, 0, 0]; // the tile, the row and the column
  const words = ([index, row, column]) => {
    const tile = tiles[index];
    const number = tile.numbers[row * w + column];
    const error = roundingErrorText(number, tile, bits);
    const down = Math.floor((row * maps.rows) / h);
    const across = Math.floor((column * maps.columns) / w);
    const channel = maps.kind === "channels" ? `channel ${tile.c}, ` : "";
    const place =
      maps.kind === "heads"
        ? `head ${tile.c}, query ${down}, key ${across}`
        : `${channel}${maps.down} ${down}, column ${across}`;
    return [
      Number.isNaN(number) ? "NaN or infinity" : numberText(number, 4),
      error,
      `${name}, ${place}`,
    ];
  };
  const hit = ({ offsetX, offsetY }) => {
    for (let index = 0; index < tiles.length; index += 1) {
      const [x, y] = form.at(index);
      const column = Math.floor(((offsetX - x) / form.tileWidth) * w);
      const row = Math.floor(((offsetY - y) / form.tileHeight) * h);
      if (column >= 0 && column < w && row >= 0 && row < h) return [index, row, column];
    }
    return null;
  };
  canvas.addEventListener("mousemove", (event) => {
    const at = hit(event);
    if (!at) return hideTip();
    const [number, error, place] = words(at);
    const nodes = [boldElement(number), spanElement(error), element("br"), spanElement(place)];
    return showTip(nodes, event);
  });
  canvas.addEventListener("mouseleave", hideTip);
  canvas.addEventListener("click", (event) => {
    const at = onTile && hit(event);
    if (at) onTile(tiles[at[0]].c);
  });
  canvas.addEventListener("keydown", (event) => {
    if (onTile && event.key === "Enter") return onTile(tiles[cell[0]].c);
    const [down, across] =
      { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key] ??
      [];
    if (down === undefined || event.altKey) return;
    event.preventDefault();
    let [index, row, column] = [cell[0], cell[1] + down, cell[2] + across];
    if (column >= w && index < tiles.length - 1) [index, column] = [index + 1, 0];
    if (column < 0 && index > 0) [index, column] = [index - 1, w - 1];
    cell = tiles[0].cell = [index, clamp(row, 0, h - 1), clamp(column, 0, w - 1)];
    readout.textContent = words(cell).join(" ");
  });
}
