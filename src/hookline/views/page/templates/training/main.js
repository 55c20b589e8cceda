// The page of a training: what broke, when, and what moved first; the loss and the map of time ×
// depth; the curves of the chosen site. It takes new steps in place.

(async () => {
  const core = await unpackJson(byId("core").textContent);
  const isServed = state !== undefined;
  const address = new URLSearchParams(isServed ? location.search : "");
  const run = makeRun();
  const choice = {
    number: address.get("number") ?? "",
    kind: address.get("kind") ?? "",
    scale: ["row", "all"].includes(address.get("scale")) ? address.get("scale") : "usual",
    order: address.get("order") === "last" ? "last" : "model",
    logged: address.get("logged") ?? "",
  };
  const view = {
    site: -1,
    column: -1,
    finding: -1,
    shown: [],
    bands: [],
    ranks: [],
    nothing: "",
    series: null,
  };
  let isAtEnd = true; // the last step is chosen, and stays so as new ones come
  let ranksOf = "";
  let asking = null; // the request in progress: one at a time
  const search = byId("search");
  search.value = address.get("q") ?? "";

  const chart = makeChart(byId("chart"), run, view, choose);
  const curves = makeCurves(byId("pane"), run, view, {
    onChoose: choose,
    onClose: closePane,
    askRanks,
  });
  for (const id of ["scale", "order"]) byId(id).value = choice[id];
  if (isServed) follow();
  else {
    takeOfFile(core.number);
    takeNew();
    document.body.dataset.ready = "1";
  }

  // -- numbers that come -------------------------------------------------------------------------

  function takeOfFile(number) {
    run.take({ ...core, number, values: core.numbers[number] ?? [""] });
    choice.number = run.number;
  }

  // Show what has come: what is chosen, scrolled and focused stays.
  function takeNew() {
    fillMenu(byId("number"), run.names, choice.number);
    const kinds = Object.entries(core.kinds).filter(([port]) =>
      run.sites.some((site) => site.port === port),
    );
    fillMenu(byId("kind"), [["", "all kinds"], ...kinds], choice.kind);
    const names = run.logged.map(({ name }) => [name, name]);
    fillMenu(byId("logged"), names, choice.logged);
    byId("logged-label").hidden = names.length < 2;
    view.series = run.logged.find(({ name }) => name === byId("logged").value) ?? null;
    showNewFindings();
    if (isAtEnd) view.column = run.columns.length - 1;
    view.column = Math.min(view.column, run.columns.length - 1);
    if (view.site < 0 && run.sites.length) begin();
    render();
    showPulse();
  }

  function showNewFindings() {
    const list = byId("findings");
    const text = JSON.stringify([run.findings, run.notes]);
    if (list.dataset.findings === text) return; // a reader may be at one of the buttons
    const chosen = list.querySelector("[aria-pressed=true]")?.textContent;
    const index = [...list.querySelectorAll(".finding")].indexOf(document.activeElement);
    list.dataset.findings = text;
    byId("notices").replaceChildren();
    showFindings(
      { findings: run.findings, notes: run.notes, judged: run.status.n_steps > 0 },
      chooseFinding,
    );
    const buttons = [...list.querySelectorAll(".finding")];
    view.finding = chosen ? buttons.findIndex((button) => button.textContent === chosen) : -1;
    markPressedFinding(view.finding);
    buttons[index]?.focus();
  }

  // Begin where the address says, or at the worst finding, or at the first site.
  function begin() {
    if (fromAddress()) return;
    const worst = run.findings[0];
    if (worst && worst.level !== "note" && worst.row !== null) chooseFinding(0);
    else {
      view.site = 0;
      view.column = run.columns.length - 1;
    }
  }

  // -- what is shown -----------------------------------------------------------------------------

  function render() {
    const query = search.value.trim().toLowerCase();
    const hasNumber = (site) =>
      run.extentOf(site).low <= run.extentOf(site).high ||
      (run.number !== "ratio" && run.columns.some(({ bad }) => bad[site]));
    const isShown = ({ port, label }, site) =>
      (!choice.kind || port === choice.kind) &&
      label.toLowerCase().includes(query) &&
      hasNumber(site);
    view.shown = run.sites.flatMap((site, index) => (isShown(site, index) ? [index] : []));
    arrange();
    const extents = view.shown.map(run.extentOf);
    const isMagnitude = extents.every(({ low }) => low >= 0);
    view.isUsual = choice.scale === "usual" && isMagnitude;
    view.isSigned = !isMagnitude;
    view.shared = choice.scale === "all" ? makeScale(jointExtent(extents), view.isSigned) : null;
    view.nothing = "No site of this kind has this number.";
    if (run.status.n_steps <= 0) view.nothing = "No step was reported yet.";
    else if (query)
      view.nothing = `No site with this number has “${search.value.trim()}” in its name.`;
    if (!view.shown.includes(view.site) && view.shown.length) view.site = view.bands[0].sites[0];
    const all = run.sites.length.toLocaleString("en");
    const isPart = view.shown.length < run.sites.length;
    byId("status").textContent = isPart
      ? `${view.shown.length.toLocaleString("en")} of ${all} sites`
      : "";
    showLegend(extents);
    chart.draw();
    curves.draw();
    noteAddress();
  }

  // By kind in the order of the model, or all with the largest last number first.
  function arrange() {
    if (choice.order === "last") {
      const size = (site) => Math.abs(run.latest(run.number, site)) || -1;
      view.shown.sort((a, b) => size(b) - size(a) || a - b);
      view.bands = [{ name: "", sites: view.shown }];
      return;
    }
    view.shown.sort((a, b) => run.sites[a].depth - run.sites[b].depth || a - b);
    view.bands = Object.entries(core.kinds)
      .map(([port, name]) => ({
        name: name[0].toUpperCase() + name.slice(1),
        sites: view.shown.filter((site) => run.sites[site].port === port),
      }))
      .filter(({ sites }) => sites.length);
    view.shown = view.bands.flatMap(({ sites }) => sites);
  }

  function showLegend(extents) {
    const scale = view.shared ?? makeScale(jointExtent(extents));
    const parts = [];
    if (view.isUsual) {
      parts.push([colourBar("signed", "÷ 1000", "× 1000"), "of its median"]);
      parts.push([element("i", { class: "key-zero" }), "zero"]);
    } else if (scale) {
      const ends = view.shared
        ? [valueText(scale.low), valueText(scale.high)]
        : scale.isSigned
          ? ["below 0", "above 0"]
          : ["least", "greatest"];
      const of = view.shared ? "of all rows" : "of each row";
      parts.push([
        colourBar(scale.isSigned ? "signed" : "plain", ...ends),
        scale.isLog ? `${of}, logarithmic` : of,
      ]);
    }
    parts.push([element("i", { class: "key-hatch" }), "NaN or infinity"]);
    if (run.isWide()) parts.push([`a column is ${run.stride} steps, by its most unusual number`]);
    byId("legend").replaceChildren(...legendParts(parts));
  }

  // -- choosing ----------------------------------------------------------------------------------

  function choose(site, column, opens = false) {
    if (site !== view.site) view.ranks = [];
    const isLeft = !view.shown.includes(site);
    view.site = site;
    view.column = column;
    isAtEnd = column === run.columns.length - 1;
    if (opens) openDrawer();
    if (isLeft) {
      // A choice from outside the list: show it, whatever was searched.
      search.value = "";
      choice.kind = byId("kind").value = "";
      render();
    } else {
      chart.mark();
      curves.draw();
      noteAddress();
    }
  }

  function chooseFinding(index) {
    view.finding = view.finding === index ? -1 : index;
    markPressedFinding(view.finding);
    const finding = run.findings[view.finding];
    if (!finding || finding.row === null) {
      if (run.columns.length) chart.mark();
      return;
    }
    const isStep = finding.step !== null && finding.step !== undefined;
    choose(
      finding.row,
      isStep ? run.columnOf(finding.step) : run.columns.length - 1,
      view.shown.length > 0,
    );
    isAtEnd = !isStep;
    chart.reveal();
  }

  function closePane() {
    closeDrawer(chart.grid);
  }

  async function askRanks(site) {
    const key = `${site} ${run.number} ${run.status.n_steps}`;
    if (!(run.status.n_ranks > 1) || !isServed || ranksOf === key) return;
    ranksOf = key;
    const answer = await fetchJson(`ranks?site=${site}&number=${encodeURIComponent(run.number)}`);
    if (ranksOf !== key || !answer) return;
    view.ranks = answer;
    curves.draw();
  }

  // -- the address -------------------------------------------------------------------------------

  function noteAddress() {
    const parameters = new URLSearchParams();
    const usual = {
      number: "",
      kind: "",
      scale: "usual",
      order: "model",
      logged: run.logged[0]?.name ?? "",
    };
    for (const [name, value] of Object.entries(usual))
      if (choice[name] && choice[name] !== value) parameters.set(name, choice[name]);
    if (search.value.trim()) parameters.set("q", search.value.trim());
    const step = run.columns[view.column]?.last;
    writeToAddress(parameters, run.sites[view.site]?.label, isAtEnd ? "" : `&step=${step}`);
  }

  // Choose what the address names; false if it names nothing.
  function fromAddress() {
    const parameters = new URLSearchParams(location.hash.slice(1));
    const site = run.sites.findIndex(({ label }) => label === parameters.get("at"));
    if (site < 0) return false;
    view.site = site;
    isAtEnd = !parameters.has("step");
    view.column = isAtEnd ? run.columns.length - 1 : run.columnOf(Number(parameters.get("step")));
    return true;
  }
  addEventListener("hashchange", () => fromAddress() && render());

  // -- menus and keys ----------------------------------------------------------------------------

  byId("number").addEventListener("change", (event) => {
    choice.number = event.target.value;
    view.ranks = [];
    if (isServed) ask(true);
    else {
      takeOfFile(choice.number);
      render();
    }
  });
  for (const id of ["kind", "scale", "order"])
    byId(id).addEventListener("change", (event) => {
      choice[id] = event.target.value;
      render();
    });
  byId("logged").addEventListener("change", (event) => {
    choice.logged = event.target.value;
    takeNew();
  });
  search.addEventListener("input", render);
  search.addEventListener("keydown", (event) => {
    if (event.key === "Escape") search.value = "";
    if (event.key === "Escape") render();
    if (["Escape", "Enter", "ArrowDown"].includes(event.key)) chart.grid.focus();
    if (event.key === "ArrowDown") event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    const keys = { findings: run.findings, view, onFinding: chooseFinding, onEscape: closePane };
    if (handleFindingKeys(event, keys)) return;
    if (event.key === "Enter" && event.target === chart.grid) {
      openAndFocusPane();
    } else if (["ArrowDown", "ArrowUp"].includes(event.key) && event.target === document.body) {
      event.preventDefault();
      chart.grid.focus();
    }
  });
  onThemeChange(render);

  // -- following ---------------------------------------------------------------------------------

  function ago(seconds) {
    if (seconds < 90) return `${Math.floor(seconds)} s ago`;
    if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
    return seconds < 129600
      ? `${Math.round(seconds / 3600)} h ago`
      : `${Math.round(seconds / 86400)} days ago`;
  }

  // How far the run is, and whether it goes on.
  function showPulse() {
    const { n_steps, step, ended, age, pace, when } = run.status;
    if (n_steps < 0) return;
    const seconds = age + (Date.now() - run.arrived) / 1000;
    const isLate = seconds > Math.max(60, 20 * pace);
    const date = () =>
      new Date(1000 * when).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
    const last = step?.toLocaleString("en");
    const time = isServed ? ago(seconds) + (isLate ? ": stopped or killed?" : "") : date();
    let text = `last step ${last}, ${time}`;
    if (!n_steps) text = ended ? "ended without a step" : "no step yet";
    else if (ended) text = `ended after step ${last}, ${date()}`;
    byId("pulse-text").textContent = text;
    byId("pulse").title = text; // where it is cut
    const isOn = isServed && !ended && n_steps > 0;
    byId("pulse").classList.toggle("live", isOn && !isLate);
    byId("pulse").classList.toggle("late", isOn && isLate);
  }

  // Ask for the steps that are missing, or for all of them after another number was chosen.
  async function ask(isWhole = false) {
    while (asking) await asking;
    asking = request(isWhole).finally(() => {
      asking = null;
    });
    return asking;
  }

  async function request(wantsWhole) {
    const { number } = choice;
    const isWhole = wantsWhole || number !== run.number; // also if an earlier answer was lost
    const parameters = new URLSearchParams(
      Object.entries({
        state,
        steps: isWhole ? -1 : run.status.n_steps,
        logged: run.status.n_logged ?? -1,
        from: isWhole ? 0 : Math.max(run.columns.length - 1, 0),
        stride: run.stride,
        known: isWhole ? -1 : run.now.length,
        number,
      }).filter(([, value]) => value !== -1),
    );
    const answer = await fetchJson(`new?${parameters}`);
    if (!answer) return;
    if (answer.state && answer.state !== state) return location.reload();
    if (!answer.state)
      return showStatusText(
        `${answer.gone} The page shows an earlier state and updates when the run is back.`,
      );
    showStatusText("");
    const isNew = run.take(answer);
    // the usual one, if it is not here
    if (isNew && choice.number === number) choice.number = run.number;
    if (isNew || answer.logged || !run.sites.length) takeNew();
    showPulse();
  }

  async function follow() {
    await ask();
    document.body.dataset.ready = "1";
    for (;;) {
      await sleep(1);
      if (document.hidden) continue;
      showPulse();
      await ask();
    }
  }
})();
