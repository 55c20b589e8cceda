// What a value says of the input images: maps laid over them, and the scores of the classes.

const ABOUT_CAM =
  "The scalar is that on which backward() was called: of a loss, places that lower it speak for " +
  "the class. Each channel is weighted by the mean of its gradient.";

// Draw maps over the image in an element. `over` is { image, size, sets, why }; `sets` are those of
// the value and its gradient, whose channels can be laid over the image, too. Returns a function
// that shows a channel.
function drawImageOverlay(host, over, sets, view) {
  const options = over?.why ? [] : overlayOptions(over?.sets ?? [], over?.image ? sets : []);
  if (!options.length) {
    host.replaceChildren(...(over?.why ? [quietParagraph(over.why)] : []));
    return null;
  }
  const figures = element("div", { class: "over-figures" });
  const readout = element("span", { class: "over-readout", "aria-live": "polite" });
  const about = quietParagraph();
  const scale = element("span");
  const titles = options.map(({ key, text }) => [key, text]);
  const select = makeMenu(titles, view.over, show, { id: "over-map" });
  const title = over.image ? "Over the input" : "At the patches";
  const label = element(
    "label",
    { class: "choices" },
    element("span", { class: "unseen" }, "Map "),
    select,
  );
  host.replaceChildren(
    element("div", { class: "maps-bar" }, element("h3", {}, title), label, scale),
    figures,
    element("div", { class: "maps-key" }, readout),
    about,
  );

  function show(key) {
    const option = options.find((each) => each.key === key) ?? options[0];
    view.over = option.key;
    select.value = option.key;
    const width = clamp(Math.floor((host.clientWidth - 16) / 3), 84, 220);
    const [rows, columns] = over.image ? over.size : [option.maps[0].h, option.maps[0].w];
    const height = Math.round((width * rows) / columns);
    const tiles = option.maps.flatMap((maps) => maps.tiles);
    const isSigned = tiles.some(({ lo }) => lo < 0);
    const place = { image: over.image, width, height, readout, isSigned }; // one legend for all
    const input = element("img", { src: over.image, alt: "The input" });
    input.style.cssText = `width: ${width}px; height: ${height}px`;
    figures.replaceChildren(
      ...(over.image ? [captionedFigure(width, input, "Input", "")] : []),
      ...option.maps.flatMap((maps) =>
        maps.tiles.map((tile) => overlayFigure(option, maps, tile, place)),
      ),
    );
    figures.querySelectorAll("canvas").forEach((canvas, k) => (canvas.id = `over-${k}`));
    scale.replaceChildren(mapsLegend(tiles, isSigned, true));
    about.replaceChildren(...option.about);
    readout.textContent = "";
  }

  show(view.over);
  return (channel) => show(`channel ${channel}`);
}

// What can be laid over the image: { key, text, at, about, maps }.
function overlayOptions(ready, sets) {
  const options = ready.map((maps) => ({
    key: maps.kind,
    text: maps.kind === "cam" ? "Grad-CAM" : "Norm over channels",
    at: maps.at ? ` at ${maps.at}` : "",
    about: maps.kind === "cam" ? aboutCam(maps) : aboutNorm(maps),
    maps: [maps],
  }));
  const placed = sets.filter(({ maps }) => maps.isPlaced && maps.kind === "channels");
  for (const { c } of placed[0]?.maps.tiles ?? []) {
    const maps = placed
      .map(({ name, maps: all }) => ({
        ...all,
        tiles: all.tiles
          .filter((tile) => tile.c === c)
          .map((tile) => ({ ...tile, c: name.toLowerCase() })),
      }))
      .filter(({ tiles }) => tiles.length);
    options.push({ key: `channel ${c}`, text: `Channel ${c}`, at: "", about: [], maps });
  }
  return options;
}

const aboutCam = ({ at }) =>
  at
    ? ["At ", element("code", {}, ...breakableText(at)), ", the last layer with a map. ", ABOUT_CAM]
    : [ABOUT_CAM];

function aboutNorm({ rows, columns, prefix }) {
  const places = `Of the channels at each of ${rows} × ${columns} places.`;
  if (!prefix.length) return [places];
  const norms = prefix.map((norm) => numberText(norm, 4) || "NaN or infinity").join(", ");
  return [`${places} Before the patches: ${pluralText(prefix.length, "token")}, norm ${norms}.`];
}

function overlayFigure({ text, at }, maps, tile, { image, width, height, readout, isSigned }) {
  const { h, w, bits } = maps;
  const numbers = (tile.numbers ??= decodeNumbers(tile, bits));
  const name = `${text}${at}, ${tile.c}`;
  const [canvas, pen] = makeCanvas(width, height, {
    role: "img",
    tabindex: 0,
    "aria-label": `${name}: ${mapText(tile, h, w)}. Arrow keys read the numbers.`,
  });
  pen.imageSmoothingEnabled = false; // each cell is one number
  const kind = isSigned ? "signed" : "plain";
  const pixels = makeMapCanvas(numbers, h, w, colourRange([tile], isSigned), kind);
  pen.drawImage(pixels, 0, 0, width, height);
  const table = { ...maps, kind: "table", down: "row", tiles: [tile] };
  readNumbersAtPointer(canvas, {
    name,
    maps: table,
    form: { tileWidth: width, tileHeight: height, at: () => [0, 0] },
    readout,
  });
  const ground = image ? element("img", { src: image, alt: "" }) : null;
  const range = rangeText(colourRange([tile], false), 2);
  const box = element("div", { class: image ? "over-image" : "" }, ground, canvas);
  return captionedFigure(width, box, `${tile.c[0].toUpperCase()}${tile.c.slice(1)}`, range);
}

function captionedFigure(width, picture, caption, range) {
  const words = element("figcaption", {}, caption, spanElement(range));
  const figure = element("figure", {}, picture, words);
  figure.style.width = `${width}px`;
  return figure;
}

// A map in words: its size, its range, and where it is greatest.
function mapText(tile, h, w) {
  const { numbers } = tile;
  let most = 0;
  numbers.forEach((number, place) => {
    if (number > numbers[most] || Number.isNaN(numbers[most])) most = place;
  });
  const range = colourRange([tile], false);
  const words = `${h} × ${w} numbers ${rangeText(range, 4, "from ")}`;
  const place = `row ${Math.floor(most / w)}, column ${most % w}`;
  return Number.isNaN(range[0]) ? words : `${words}, the greatest at ${place}`;
}

// The highest classes of one sample, with their scores and shares.
function classScoresSection({ classes, samples, sample, top, is_share: isShare }) {
  const of = samples > 1 ? `sample ${sample} of ${samples.toLocaleString("en")}; ` : "";
  const items = top.map(([index, number, share]) =>
    element(
      "li",
      { style: `--share: ${share}` },
      element("span", {}, `Class ${index}`),
      " ",
      element(
        "span",
        { class: "number" },
        isShare ? "" : `${numberText(number, 4)} · `,
        `${(100 * share).toFixed(1)} %`,
      ),
    ),
  );
  const about = isShare
    ? "The output's own numbers, which sum to 1."
    : "The output's number, and its softmax: the model's probability if the output holds logits.";
  return element(
    "section",
    { class: "scores", "aria-labelledby": "scores-heading" },
    element(
      "div",
      { class: "maps-bar" },
      element("h3", { id: "scores-heading" }, "Highest classes"),
      spanElement(`${of}${top.length} of ${pluralText(classes, "class", "classes")}`),
    ),
    top.length
      ? element("ol", { class: "classes", "aria-labelledby": "scores-heading" }, items)
      : null,
    quietParagraph(top.length ? about : "The scores of this sample hold NaN or infinity."),
  );
}
