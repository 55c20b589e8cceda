// The shown tree as an SVG: names, types, the data flow, and the chosen columns as text.

function treeSvg({ core, view, shown, wires, joins, columns, isFlat }) {
  const { rows } = core;
  const LINE = 20;
  const most = wires.reduce((sum, [, , lane]) => Math.max(sum, lane), 0);
  const left = 20 + 8 * most;
  const textOf = (cell) =>
    typeof cell === "string"
      ? cell
      : [cell]
          .flat()
          .map((part) => part?.textContent ?? part ?? "")
          .join("");
  const table = shown.map((row) => columns.map(({ cell }) => textOf(cell(row))));
  const widths = columns.map(
    ({ title }, k) => 7 * Math.max(title.length, ...table.map((cells) => cells[k].length)) + 16,
  );
  const names = shown.map((row) => (isFlat ? rows.label[row] : rows.name[row]));
  const indent = (row) => (isFlat ? 0 : 12 * (rows.level[row] - 1));
  const nameWidth =
    Math.max(...shown.map((row, k) => indent(row) + 7.2 * names[k].length), 60) + 20;
  const starts = widths.map(
    (_, k) => left + nameWidth + widths.slice(0, k).reduce((a, b) => a + b, 0),
  );
  const width = left + nameWidth + widths.reduce((a, b) => a + b, 0);
  const x = left - 8;
  const y = (place) => LINE * (place + 1.5);
  const svg = svgElement("svg", {
    xmlns: "http://www.w3.org/2000/svg",
    width,
    height: LINE * (shown.length + 1) + 8,
    "font-family": "ui-monospace, Menlo, Consolas, monospace",
    "font-size": 12,
    fill: themeColour("ink"),
  });
  svg.append(svgElement("rect", { width: "100%", height: "100%", fill: themeColour("panel") }));
  columns.forEach(({ title }, k) =>
    svg.append(
      svgElement("text", { x: starts[k], y: LINE * 0.8, fill: themeColour("ink-2") }, title),
    ),
  );
  for (const [start, end, lane] of wires) {
    const side = x - 8 * lane;
    const [top, foot] = [y(start), y(end)];
    const path = lane
      ? `M${x} ${top}Q${side} ${top} ${side} ${top + 10}V${foot - 10}Q${side} ${foot} ${x} ${foot}`
      : `M${x} ${top}V${foot}`;
    svg.append(
      svgElement("path", {
        d: path,
        fill: "none",
        stroke: themeColour(lane ? "ink-3" : "line-strong"),
        "stroke-width": 1.5,
      }),
    );
  }
  shown.forEach((row, place) => {
    const fill = view.own?.colourOf(row) ?? themeColour(view.levels[row] ?? "ink-3");
    svg.append(
      svgElement("circle", { cx: x, cy: y(place), r: 3.5, fill }),
      svgElement("text", { x: left + indent(row), y: y(place) + 4 }, names[place]),
      ...table[place].map((text, k) =>
        svgElement("text", { x: starts[k], y: y(place) + 4, fill: themeColour("ink-2") }, text),
      ),
    );
  });
  for (const place of joins) {
    const at = y(place) - LINE / 2;
    svg.append(
      svgElement("circle", {
        cx: x,
        cy: at,
        r: 4.5,
        fill: themeColour("panel"),
        stroke: themeColour("ink-2"),
      }),
      svgElement("path", { d: `M${x - 3} ${at}h6M${x} ${at - 3}v6`, stroke: themeColour("ink-2") }),
    );
  }
  return svg.outerHTML;
}

function downloadText(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = element("a", { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
