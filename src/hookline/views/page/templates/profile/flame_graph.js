// The calls as nested bars: a module inside the one that called it, as wide as its cost.

const PHASES = ["forward", "backward", "recompute"];
const AROUND = 3; // the place of costs that belong to no module

// Complete the calls: who called each, and the costs by number and phase.
function linkCalls(calls, around) {
  const top = {
    path: "all",
    calls: 0,
    seconds: [0, 0, 0, 0],
    flops: [0, 0, 0],
    kept: 0,
    children: calls,
  };
  const outside = around.map(([path, seconds]) => ({
    ...top,
    path,
    seconds: [0, 0, 0, seconds],
    children: [],
  }));
  top.children = [...calls, ...outside];
  const link = (node, caller) => {
    node.caller = caller;
    for (const inner of node.children) link(inner, node);
  };
  link(top, null);
  return top;
}

// `typeOf(path)` gives a module's type, which has one colour; `onChoose(path)` is told of a choice.
function makeFlameGraph(host, top, { typeOf, textOf, onChoose, onReadout }) {
  const ROW = 21;
  let cost = "seconds";
  let phase = -1; // all
  let zoomed = top;
  let chosen = top;
  let bars = [];

  function own(node) {
    if (cost === "kept") return node.kept;
    const parts = node[cost];
    return phase < 0 ? parts.reduce((sum, part) => sum + part, 0) : (parts[phase] ?? 0);
  }
  function measure(node) {
    node.sum = own(node) + node.children.reduce((sum, inner) => sum + measure(inner), 0);
    return node.sum;
  }

  // One bar for each node that is wide enough, and the callers of the zoomed one above it.
  function layOut(width) {
    bars = [];
    const callers = [];
    for (let node = zoomed.caller; node; node = node.caller) callers.unshift(node);
    callers.forEach((node, depth) => bars.push({ node, x: 0, width, depth }));
    const place = (node, x, size, depth) => {
      if (size < 0.75) return;
      bars.push({ node, x, width: size, depth });
      let at = x;
      for (const inner of node.children) {
        const part = node.sum ? (size * inner.sum) / node.sum : 0;
        place(inner, at, part, depth + 1);
        at += part;
      }
    };
    place(zoomed, 0, width, callers.length);
  }

  function draw() {
    measure(top);
    const width = host.clientWidth;
    layOut(width);
    const height = ROW * (1 + Math.max(...bars.map(({ depth }) => depth)));
    const all = textOf(cost, top.sum);
    const about = `Calls as nested bars, ${all} in all. Arrow keys move from bar to bar.`;
    const [canvas, pen] = makeCanvas(width, height, {
      role: "img",
      tabindex: 0,
      "aria-label": about,
    });
    const had = host.contains(document.activeElement);
    for (const bar of bars) paint(pen, bar);
    host.replaceChildren(canvas);
    if (had) canvas.focus();
    listen(canvas);
    tell();
  }

  function paint(pen, { node, x, width, depth }) {
    const y = depth * ROW;
    pen.fillStyle = typeOf(node.path) ? colourOf(typeOf(node.path)) : themeColour("line");
    pen.fillRect(x, y, Math.max(width - 1, 0.75), ROW - 1);
    if (node === chosen) {
      pen.strokeStyle = themeColour("ink");
      pen.lineWidth = 2;
      pen.strokeRect(x + 1, y + 1, Math.max(width - 3, 1), ROW - 3);
    }
    if (width < 24) return;
    const words = node === top ? "all" : nameOf(node);
    pen.font = monoFontText(11);
    pen.fillStyle = themeColour("ink");
    pen.textBaseline = "middle";
    pen.save();
    pen.beginPath();
    pen.rect(x, y, width - 4, ROW);
    pen.clip();
    pen.fillText(words, x + 5, y + ROW / 2);
    pen.restore();
  }

  // The name within the module that calls; the whole path of a module that lies elsewhere.
  function nameOf({ path, caller }) {
    const holder = !caller || caller === top || caller.path === "(root)" ? "" : `${caller.path}.`;
    return path.startsWith(holder) ? path.slice(holder.length) : path;
  }

  // A hue for each type; light enough for the text on it.
  function colourOf(type) {
    let hash = 0;
    for (const char of type) hash = (hash * 31 + char.charCodeAt(0)) % 997;
    return cssColour(oklch(isDark() ? 0.42 : 0.86, 0.06, (hash * 47) % 360));
  }

  function tell() {
    const share = top.sum ? shareText(chosen.sum / top.sum) : "";
    const facts = [
      textOf(cost, chosen.sum),
      share && `${share} of all`,
      `itself ${textOf(cost, own(chosen))}`,
    ];
    if (chosen.calls) facts.push(pluralText(chosen.calls, "call"));
    const type = typeOf(chosen.path);
    const name = type ? `${chosen.path} (${type})` : chosen.path;
    onReadout(`${name}: ${facts.filter(Boolean).join(", ")}`);
  }

  function choose(node, zooms) {
    chosen = node;
    if (zooms) zoomed = node === zoomed && node.caller ? node.caller : node;
    draw();
    if (typeOf(node.path)) onChoose(node.path);
  }

  function listen(canvas) {
    const hit = ({ offsetX, offsetY }) =>
      bars.find(
        ({ x, width, depth }) =>
          depth === Math.floor(offsetY / ROW) && offsetX >= x && offsetX < x + width,
      );
    canvas.addEventListener("click", (event) => {
      const bar = hit(event);
      if (bar) choose(bar.node, true);
    });
    canvas.addEventListener("mousemove", (event) => {
      const bar = hit(event);
      if (!bar) return hideTip();
      const share = top.sum ? shareText(bar.node.sum / top.sum) : "";
      const words = [textOf(cost, bar.node.sum), share].filter(Boolean).join(", ");
      return showTip(
        [
          boldElement(bar.node.path),
          spanElement(` ${typeOf(bar.node.path)}`),
          element("br"),
          words,
        ],
        event,
      );
    });
    canvas.addEventListener("mouseleave", hideTip);
    canvas.addEventListener("keydown", (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      const next = neighbour(event.key);
      if (next === undefined && event.key !== " ") return;
      event.preventDefault();
      if (event.key === " ") choose(chosen, true);
      else if (next) choose(next, false);
    });
  }

  // The bar that an arrow key leads to: null if there is none, undefined for another key.
  function neighbour(key) {
    const shown = new Set(bars.map(({ node }) => node));
    const among = (chosen.caller?.children ?? [chosen]).filter((node) => shown.has(node));
    const at = among.indexOf(chosen);
    const widest = chosen.children
      .filter((node) => shown.has(node))
      .sort((a, b) => b.sum - a.sum)[0];
    const next = {
      ArrowUp: chosen.caller,
      ArrowDown: widest,
      ArrowLeft: among[at - 1],
      ArrowRight: among[at + 1],
    };
    return key in next ? (next[key] ?? null) : undefined;
  }

  const find = (path, node = top) => {
    if (node.path === path && typeOf(path)) return node;
    for (const inner of node.children) {
      const match = find(path, inner);
      if (match) return match;
    }
    return null;
  };

  return {
    draw,
    show(nextCost, nextPhase) {
      [cost, phase] = [nextCost, nextPhase];
      draw();
    },
    // Mark the first bar of a module, which was chosen elsewhere.
    mark(path) {
      if (chosen.path === path) return;
      chosen = find(path) ?? chosen;
      draw();
    },
  };
}
