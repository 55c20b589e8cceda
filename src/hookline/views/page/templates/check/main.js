// The page of a finding of hl.check: what was made, the line of code, and how it came about.

(async () => {
  const core = await unpackJson(byId("core").textContent);
  const { chain, line, notes, keep } = core;

  showFindings({ findings: [core], judged: false, notes }, () => {});
  markPressedFinding(0);
  byId("facts").replaceChildren(numbersList(core.facts));
  byId("where").replaceChildren(whereOf());
  byId("status").textContent = pluralText(chain.length, "step");

  function whereOf() {
    const parts = [];
    if (line) {
      const within = line.function ? `, in ${line.function}` : "";
      parts.push(
        element("p", {}, element("code", {}, breakableText(`${line.file}:${line.number}`)), within),
      );
      if (line.text)
        parts.push(
          element(
            "pre",
            { tabindex: 0, role: "region", "aria-label": "The line of code" },
            line.text,
          ),
        );
    } else parts.push(quietParagraph("The line of code is not known."));
    if (keep)
      parts.push(
        quietParagraph(
          "Its inputs are kept: ",
          element("code", {}, `hookline replay ${keep} MODEL`),
        ),
      );
    return element("div", { class: "where" }, parts);
  }

  const number = (name, title, width) => ({
    title,
    width,
    kind: "number",
    cell: ({ key }) => numberText(chain[key].numbers?.[name], 4),
  });
  const shapeOf = ({ shape, dtype }) => (shape ? `${dtype} [${shape.join(", ")}]` : "");

  function columns(width) {
    const list = [
      { title: "Step", width: "minmax(120px, 1fr)", kind: "path", cell: nameCell },
      { title: "Role", width: "96px", kind: "role", cell: ({ key }) => chain[key].role },
    ];
    if (width > 460)
      list.push({
        title: "Shape",
        width: "minmax(90px, 1fr)",
        kind: "words",
        cell: ({ key }) => chain[key].text || shapeOf(chain[key]),
      });
    if (width > 640) list.push(number("min", "Min", "76px"), number("max", "Max", "76px"));
    if (width > 860) list.push(number("mean", "Mean", "76px"), number("std", "Std", "76px"));
    list.push({
      title: "NaN, inf",
      width: "66px",
      kind: "number bad",
      cell: ({ key }) => chain[key].numbers?.bad.toLocaleString("en") ?? "",
    });
    return list;
  }

  function nameCell({ key }) {
    const { name, isSuspect } = chain[key];
    const tag = isSuspect ? element("span", { class: "tag" }, "suspect") : null;
    return element("b", { class: "name", title: name }, name, tag);
  }

  const grid = makeRowGrid(byId("view"), {
    label: "How it came about",
    height: 26,
    columns,
    rowClass: ({ key }) => (chain[key].isBroken ? "broken" : ""),
    onChoose: () => {},
    onToggle: () => {},
  });
  const first = chain.findIndex(({ role }) => role === "made it" || role === "held it");
  grid.show(
    chain.map((_, key) => ({ key, level: 1 })),
    Math.max(first, 0),
  );
  document.body.dataset.ready = "1";
})();
