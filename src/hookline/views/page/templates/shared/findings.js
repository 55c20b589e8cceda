// The findings: one line a fault, the worst first; and what never fired.

const WORDS = {
  error: ["error", "errors"],
  warning: ["warning", "warnings"],
  note: ["note", "notes"],
};

// Fill the list. `onChoose(index)` is told of a press.
function showFindings({ findings, judged, notes }, onChoose) {
  const counts = Object.keys(WORDS)
    .map((level) => [level, findings.filter((finding) => finding.level === level).length])
    .filter(([, count]) => count)
    .map(([level, count]) => pluralText(count, ...WORDS[level]));
  const isFine = judged && !findings.some((finding) => finding.level !== "note");
  const fine = `${["No error and no warning", ...counts].join("; ")}.`;
  const verdict = isFine ? fine : counts.join(", ") || "Nothing was judged.";
  byId("tally").replaceChildren(
    ...(isFine ? [levelIcon("fine")] : []),
    element("span", {}, verdict),
  );
  byId("tally").classList.toggle("all-fine", isFine);
  fillList(
    "findings",
    findings.map((finding, index) => findingButton(finding, () => onChoose(index))),
  );
  for (const note of notes ?? []) byId("notices").append(element("li", {}, note));
  byId("notices").hidden = !byId("notices").children.length;
}

const fillList = (id, lines) =>
  byId(id).replaceChildren(...lines.map((line) => element("li", {}, line)));

// A button of the list: a mark and a heading, a number, and why.
const findingButtonOfParts = ([mark, heading, number, why], onChoose) =>
  element(
    "button",
    { type: "button", class: "finding", "aria-pressed": "false", onclick: onChoose },
    mark,
    element("strong", {}, heading),
    element("span", { class: "number" }, number),
    element("span", { class: "why" }, why),
  );

function findingButton(finding, onChoose) {
  const { level, text, number, why, advice, follows } = finding;
  const following =
    follows && !/later|follow/.test(why)
      ? `${pluralText(follows, "later site follows", "later sites follow")}.`
      : "";
  const spoken = element("span", { class: "unseen" }, `${WORDS[level][0]}: `);
  const words = breakableText([why, following, advice].filter(Boolean).join(" "));
  const heading = [spoken, breakableText(text)];
  return findingButtonOfParts([levelIcon(level), heading, number, words], onChoose);
}

function markPressedFinding(index) {
  document
    .querySelectorAll(".finding")
    .forEach((button, place) => button.setAttribute("aria-pressed", String(place === index)));
}

// Answer the keys of every page with findings: `/`, Escape, and Alt with an arrow, which goes to
// the next finding. Return whether this key was one of them.
function handleFindingKeys(event, { findings, view, onFinding, onEscape }) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const isNext = event.altKey && step && findings.length;
  if (event.key === "/" && byId("search") && !event.target.matches("input, select"))
    byId("search").focus();
  else if (isNext) {
    const next = (view.finding + step + findings.length) % findings.length;
    view.finding = -1;
    onFinding(next);
  } else if (event.key === "Escape") {
    hideTip();
    if (byId("pane").contains(event.target) || byId("pane").classList.contains("open")) onEscape();
    return true;
  } else return false;
  event.preventDefault();
  return true;
}

// List the sites that never fired when they are asked for, or if they are few.
function listSilentSites(silent) {
  const box = byId("silent");
  if (!box) return;
  const fill = () => {
    if (byId("never-fired").children.length) return;
    byId("never-fired").replaceChildren(
      ...silent.map(([site, type, why]) =>
        element(
          "div",
          {},
          element("dt", {}, element("code", {}, breakableText(site)), " ", spanElement(type)),
          element("dd", {}, why),
        ),
      ),
    );
  };
  box.addEventListener("toggle", fill);
  if (silent.length <= 6) box.open = true;
}
