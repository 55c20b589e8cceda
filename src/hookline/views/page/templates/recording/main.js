// The page of a recording: findings and strip are drawn first, one frame later the tree and the
// pane.

(async () => {
  const core = completeCore(await unpackJson(byId("core").textContent));
  const { rows, values } = core;
  const isServed = state !== undefined;
  const address = new URLSearchParams(location.search);
  core.hasMaps = document.querySelector("script[id^='maps-']") !== null;

  // What is shown and chosen; each part of the page reads it.
  const view = {
    row: -1,
    finding: -1,
    findings: [],
    levels: {},
    isShared: false,
    edges: [],
    pass: core.passes.at(-1) ?? 0,
    table: null,
    columns: readStored("hookline-columns"),
    // of the maps in the pane
    choice: { sample: 0, order: "largest", first: 0, part: 0, form: "places" },
  };
  view.table = valuesOfRowsInPass(core, view.pass);

  const strip = makeDepthStrip(byId("strip"), core, view, (row) => choose(row));
  takeFindings(core);
  strip.draw(view.table, view.findings);
  listSilentSites(core.silent);
  if (core.store) showStore(core.store);
  await new Promise((done) => {
    requestAnimationFrame(() => setTimeout(done));
    setTimeout(done, 100);
  });

  const pane = makePane(byId("pane"), core, view, { onClose: closePane, onStale: measureOne });
  const tree = makeTree(byId("view"), core, view, {
    onChoose: chosen,
    onEnter: openAndFocusPane,
    onChange: noteAddress,
  });
  findEdges();
  tree.foldAtFirst();
  const position = keptPosition();
  if (position) tree.restoreFolds(position.folded);
  byId("search").value = address.get("q") ?? "";
  if (address.get("sort"))
    tree.setSort({ key: address.get("sort"), isDown: address.get("up") === null });
  tree.search(byId("search").value);
  offerPasses();
  offerTokens();
  offerColumns();
  fromAddress() || beginAtWorst();
  if (position) {
    tree.grid.scrollTop = position.scrollTop;
    byId("pane").scrollTop = position.paneTop;
    if (position.hasFocus) tree.grid.focus();
    tree.draw();
  }
  document.body.dataset.ready = "1";
  if (isServed) measureAll();

  // -- choosing ----------------------------------------------------------------------------------

  function beginAtWorst() {
    const worst = view.findings.findIndex(({ row }) => row !== null);
    if (byId("search").value) {
      if (tree.shown.length) choose(tree.shown[0], { notes: false });
    } else if (worst >= 0) {
      const { row } = view.findings[worst];
      if (tree.folded.has(row)) tree.fold(row);
      chooseFinding(worst, { opens: false });
    } else if (rows.name.length) choose(core.trunk[0] ?? 0, { opens: false, notes: false });
  }

  // Choose a row from outside the tree.
  function choose(row, { opens = false, notes = true } = {}) {
    tree.choose(row, false);
    chosen(row, { opens, notes });
  }

  function chosen(row, { opens = false, notes = true } = {}) {
    view.row = row;
    strip.mark(view.findings);
    tree.draw();
    pane.draw();
    if (opens) openDrawer();
    if (notes) noteAddress();
  }

  // A finding of another rank is on that rank's page, which the form under the list opens.
  function showRank(number) {
    byId("items").value = number.replace("rank ", "");
    byId("items").form.requestSubmit();
  }

  function chooseFinding(index, { opens = true } = {}) {
    view.finding = view.finding === index ? -1 : index;
    markPressedFinding(view.finding);
    const finding = view.findings[view.finding];
    if (finding?.kind === "rank" && byId("items")) showRank(finding.number);
    if (finding && finding.pass !== null && finding.pass !== view.pass) showPass(finding.pass);
    if (finding && finding.row !== null) choose(finding.row, { opens, notes: opens });
    else {
      strip.mark(view.findings);
      tree.draw();
    }
  }

  function closePane() {
    closeDrawer(tree.grid);
  }

  // -- findings, passes, columns -----------------------------------------------------------------

  function takeFindings(answer) {
    view.findings = answer.findings ?? [];
    takeLevels();
    if (answer.findings) showFindings(answer, (index) => chooseFinding(index));
  }

  // The worst level of each row in the pass that is shown; a note has no mark.
  function takeLevels() {
    view.levels = {};
    for (const finding of [...view.findings].reverse())
      if (finding.level !== "note" && isOfPass(finding, view.pass))
        view.levels[finding.row] = finding.level;
  }

  // What flows into what: [from row, to row, whether it is added to another].
  async function findEdges() {
    const { pass } = view;
    core.flow ??= {};
    view.edges = core.flow[pass] ?? [];
    if (!isServed || core.flow[pass] || values.waiting.size) return;
    core.flow[pass] = (await fetchJson(`flow?pass=${pass}&${stateParameter()}`))?.edges;
    if (view.pass !== pass) return; // another is shown by now
    view.edges = core.flow[pass] ?? [];
    if (view.edges.length) tree.layOut();
  }

  function showPass(pass) {
    view.pass = pass;
    view.table = valuesOfRowsInPass(core, pass);
    byId("pass").value = String(pass);
    takeLevels();
    findEdges();
    strip.draw(view.table, view.findings);
    tree.refresh();
    pane.draw();
    view.offerTokens?.();
    noteAddress();
  }

  // The tree, or the map of tokens × depth where the blocks of a pass hold tokens.
  function offerTokens() {
    const tokens = makeTokenMap(byId("tokens"), {
      ask: async (sample) =>
        isServed
          ? fetchJson(`tokens?pass=${view.pass}&sample=${sample}&${stateParameter()}`)
          : (core.norms ?? {})[view.pass],
      onChoose: (row) => row !== view.row && chosen(row, { notes: false }),
    });
    const has = (pass) => core.tokens.includes(pass) && (isServed || Boolean(core.norms?.[pass]));
    const turn = makeViewSwitch({ onList: () => tree.relayOut(), onTokens: () => tokens.show() });
    view.offerTokens = () => {
      byId("views").hidden = !has(view.pass);
      if (!byId("tokens").hidden) turn(has(view.pass));
    };
    view.offerTokens();
  }

  function offerPasses() {
    byId("pass-choice").hidden = core.passes.length < 2;
    fillMenu(
      byId("pass"),
      core.passes.map((pass) => [pass, String(pass)]),
      view.pass,
    );
    byId("pass").addEventListener("change", () => showPass(Number(byId("pass").value)));
  }

  // A page that shows a new recording in its place is loaded again: folds, scroll and focus stay.
  addEventListener("pagehide", () => {
    const position = { ...tree.position, paneTop: byId("pane").scrollTop };
    writeStored("hookline-position", JSON.stringify(position), "sessionStorage");
  });

  function keptPosition() {
    if (!isServed || performance.getEntriesByType("navigation")[0]?.type !== "reload") return null;
    return readStored("hookline-position", "sessionStorage");
  }

  function offerColumns() {
    const wanted = new Set(view.columns ?? USUAL_COLUMNS);
    byId("column-choice").replaceChildren(
      ...tree.columns().map(({ key, title }) => {
        const box = element("input", {
          type: "checkbox",
          checked: wanted.has(key),
          onchange: () => {
            if (box.checked) wanted.add(key);
            else wanted.delete(key);
            view.columns = [...wanted];
            writeStored("hookline-columns", JSON.stringify(view.columns));
            tree.relayOut();
          },
        });
        return element("label", {}, box, title);
      }),
    );
  }

  async function takeOwn(file) {
    if (!file) return;
    let numbers;
    let others;
    try {
      ({ numbers, others } = parseNumbers(await file.text()));
      view.own = numbersByRow(core, numbers);
    } catch (error) {
      byId("own-about").textContent = `${file.name} cannot be read: ${error.message}`;
      return;
    }
    const { byRow, missing } = view.own;
    const lost = missing ? `; ${pluralText(missing, "name has", "names have")} no row here` : "";
    const odd = others ? `; ${pluralText(others, "name has", "names have")} no number` : "";
    const many = pluralText(byRow.size, "number");
    byId("own-about").textContent = `${many} from ${file.name}${lost}${odd}.`;
    if (!byRow.size) view.own = null;
    tree.refresh();
  }
  byId("own").addEventListener("change", (event) => takeOwn(event.target.files[0]));
  byId("save-svg").addEventListener("click", () =>
    downloadText("tree.svg", tree.svg(), "image/svg+xml"),
  );

  // -- the address: what is searched, sorted and chosen -----------------------------------------

  function noteAddress() {
    const parameters = new URLSearchParams();
    const query = byId("search").value.trim();
    if (query) parameters.set("q", query);
    if (tree.sort) parameters.set("sort", tree.sort.key);
    if (tree.sort && !tree.sort.isDown) parameters.set("up", "");
    const isLast = view.pass === core.passes.at(-1);
    writeToAddress(parameters, rows.label[view.row], isLast ? "" : `&pass=${view.pass}`);
  }

  // Choose what the address names; false if it names nothing.
  function fromAddress() {
    const parameters = new URLSearchParams(location.hash.slice(1));
    if (!parameters.has("at")) return false;
    const whole = parameters.get("at");
    // A name may have a colon of its own, before that of a port.
    const names = [whole, whole.replace(/:[^:#]*(?=#|$)/, ""), whole.replace(/:[^#]*/, "")];
    const rowsOf = (name) => [name, `${name}#${parameters.get("call")}`, `${name}#0`];
    const at = names.at(-1) || "(root)";
    const label =
      [...names, at].flatMap(rowsOf).find((text) => core.rowOfLabel.has(text)) ??
      (at.replace(/[.]?[^.]*$/, "") || "(root)");
    const holder = core.rowOfLabel.get(label);
    if (holder === undefined) return false;
    const pass = Number(parameters.get("pass") ?? core.passes.at(-1));
    if (core.passes.includes(pass) && pass !== view.pass) showPass(pass);
    choose(holder, { opens: true });
    return true;
  }
  addEventListener("hashchange", fromAddress);

  // -- measuring, while the page is open -------------------------------------------------------

  async function takeNumbers(asked) {
    const answer = await fetchJson(`measure?${asked}&${stateParameter()}`);
    if (!answer?.values) return undefined; // another recording: the page is about to reload
    storeMeasured(core, answer.at, answer.values);
    return answer.next;
  }

  async function measureOne(value) {
    if (!isServed || view.isMeasuring) return;
    if ((await takeNumbers(`only=${values.order[value]}`)) === undefined) return;
    showNumbers(); // of what is measured last, here only
    findEdges();
    showProgress();
  }

  async function measureAll() {
    const button = byId("measure");
    button.addEventListener("click", () => {
      view.isStopped = view.isMeasuring;
      view.isMeasuring = false;
      if (view.isStopped) showProgress();
      else measure();
    });
    showProgress();
    if (!core.measure.start) {
      byId("tally").textContent = "Measure the values to look for findings.";
      return;
    }
    await Promise.all([judge(), measure()]);
  }

  async function measure() {
    view.isMeasuring = true;
    let drawn = 0;
    for (let next = 0; next < values.row.length && view.isMeasuring && values.waiting.size;) {
      showProgress();
      next = await takeNumbers(`from=${next}`);
      if (next === undefined) break;
      if (performance.now() - drawn > 400) {
        showNumbers();
        drawn = performance.now();
      }
    }
    view.isMeasuring = false;
    findEdges();
    showNumbers();
    showProgress();
    if (!values.waiting.size && !core.measure.start) await judge();
  }

  // Show new numbers in place: what is chosen, folded, scrolled and focused stays so.
  function showNumbers() {
    strip.draw(view.table, view.findings);
    const { scrollTop } = tree.grid;
    tree.refresh();
    tree.grid.scrollTop = scrollTop;
    if (byId("pane").querySelector(".waiting")) pane.draw();
  }

  function showProgress() {
    const left = values.waiting.size;
    byId("measure").hidden = !left;
    const rest = `${left.toLocaleString("en")} left`;
    let text = `Measure ${pluralText(left, "value")} (${core.measure.size})`;
    if (view.isStopped) text = `Stopped, ${rest}: go on`;
    if (view.isMeasuring) text = `Measuring, ${rest}: stop`;
    byId("measure").textContent = text;
  }

  async function judge() {
    byId("tally").textContent = "Looking for what is wrong …";
    const answer = await fetchJson(`findings?${stateParameter()}`);
    if (!answer?.findings) return;
    const isUntouched = view.finding < 0 && !location.hash.includes("at=");
    takeFindings(answer);
    if (!view.findings.length) return; // nothing new to draw: what is being pressed stays
    strip.draw(view.table, view.findings);
    tree.layOut();
    if (isUntouched) beginAtWorst();
    else pane.draw();
  }

  // -- the keyboard, the window ------------------------------------------------------------------

  document.addEventListener("keydown", (event) =>
    handleFindingKeys(event, {
      findings: view.findings,
      view,
      onFinding: chooseFinding,
      onEscape: closePane,
    }),
  );

  function redraw() {
    strip.draw(view.table, view.findings);
    tree.relayOut();
    pane.redraw();
  }
  onThemeChange(redraw);
  let waiting = 0;
  let width = innerWidth;
  function fit() {
    // A keyboard on the screen makes the window lower, while someone types into the pane.
    if (innerWidth === width) tree.relayOut();
    else redraw();
    width = innerWidth;
  }
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(fit, 80);
  });
})();
