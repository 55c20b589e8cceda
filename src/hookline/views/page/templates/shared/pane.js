// The parts of every pane: its head, callouts, numbers by name, and tables of a few lines.

// The head of a pane: the path with a line about it, and buttons to copy it and to close the
// drawer.
function paneHead(title, about, { onClose, copies = false }) {
  const copy = element(
    "button",
    { type: "button", class: "small", "aria-label": "Copy the selector" },
    "Copy",
  );
  copy.addEventListener("click", () => copyText(title, copy));
  const close = element(
    "button",
    {
      type: "button",
      class: "small square close",
      id: "close",
      "aria-label": "Close",
      onclick: onClose,
    },
    "✕",
  );
  return element(
    "div",
    { class: "pane-head" },
    element(
      "div",
      {},
      element("h2", { id: "pane-heading" }, breakableText(title)),
      element("p", { class: "quiet" }, about.filter(Boolean).join(" · ")),
    ),
    element("span", { class: "grow" }),
    copies ? copy : null,
    close,
  );
}

async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select it";
    getSelection().selectAllChildren(byId("pane-heading"));
  }
}

const callout = (level, ...parts) =>
  element(
    "div",
    { class: `callout ${level}-ground` },
    levelIcon(level),
    element("span", {}, parts),
  );

const findingCallout = ({ level, text, why, advice }, ...more) =>
  callout(
    level,
    element("b", {}, breakableText(text)),
    " ",
    breakableText([why, advice].filter(Boolean).join(" ")),
    ...more,
  );

// Facts as [name, text, is bad, is wide]; those without a text are left out.
const numbersList = (facts, attributes = {}) =>
  element(
    "dl",
    { class: "numbers", ...attributes },
    facts
      .filter(([, text]) => text)
      .map(([name, text, isBad, isWide]) =>
        element(
          "div",
          { class: `${isBad ? "bad" : ""}${isWide ? " wide" : ""}` },
          element("dt", {}, name),
          element("dd", {}, text),
        ),
      ),
  );

// A table of a few lines; the first cell of each is its header.
const smallTable = (titles, lines) =>
  element(
    "table",
    { class: "few" },
    element(
      "thead",
      {},
      element(
        "tr",
        {},
        titles.map((title) => element("th", { scope: "col" }, title)),
      ),
    ),
    element(
      "tbody",
      {},
      lines.map(([name, ...cells]) =>
        element(
          "tr",
          {},
          element("th", { scope: "row" }, name),
          cells.map((cell) => element("td", {}, cell)),
        ),
      ),
    ),
  );

// Open and close the pane where it is a drawer.
const openDrawer = () => byId("pane").classList.add("open");
function openAndFocusPane() {
  openDrawer();
  byId("pane").focus();
}
function closeDrawer(then) {
  byId("pane").classList.remove("open");
  then.focus();
}
