"use strict";

// The script of every page: light and dark, following the recording. It also defines the names that
// all parts of the script share.

const byId = (id) => document.getElementById(id);

const state = document.body.dataset.state; // only a served page has one
// Answers of another state are empty.
const stateParameter = () => `state=${encodeURIComponent(state)}`;
const sleep = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));

const system = matchMedia("(prefers-color-scheme: dark)");
const isDark = () =>
  (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";

function showStatusText(text) {
  byId("live").textContent = text;
  byId("live").hidden = !text;
}

// What is drawn anew while the mouse presses it gets no click: answers wait for the release, five
// seconds at most.
let pressed = null;
let letGo = () => {};
addEventListener("pointerdown", () => (pressed = new Promise((done) => (letGo = done))), true);
for (const name of ["pointerup", "pointercancel", "pointermove"])
  addEventListener(name, ({ buttons }) => buttons || setTimeout(letGo), true); // after the click

// Ask the server for JSON, again and again while there is none; if it refuses, say why on the page
// and return undefined.
async function fetchJson(address) {
  let response;
  while (!response) {
    try {
      response = await fetch(address, { cache: "no-store" });
    } catch {
      showStatusText("hookline view has ended. Start it again to go on.");
      await sleep(1);
    }
  }
  try {
    const answer = response.ok ? await response.json() : undefined;
    await Promise.race([pressed, sleep(5)]);
    if (answer) return answer;
  } catch {
    /* it ended on the way, or is no JSON */
  }
  if (response.status === 403 || response.status === 421)
    showStatusText(
      "The server was started again with another address. Open the address that it printed.",
    );
  else
    showStatusText(
      "The server cannot answer now: its terminal says why. The page goes on as soon as it can.",
    );
  return undefined;
}

// What the browser keeps under a name: null without any. A file may have no store.
function readStored(name, store = "localStorage", read = JSON.parse) {
  try {
    return read(window[store].getItem(name));
  } catch {
    return null;
  }
}
function writeStored(name, text, store = "localStorage") {
  try {
    window[store].setItem(name, text);
  } catch {
    /* a file has no store */
  }
}

// Note in the address what is searched and chosen, but for a name that no address can hold.
function writeToAddress(parameters, at, more = "") {
  const text = state !== undefined && parameters.size ? `?${parameters}` : location.pathname;
  let hash = "";
  try {
    if (at !== undefined) hash = `#at=${encodeURIComponent(at)}${more}`;
  } catch {
    /* a lone surrogate */
  }
  history.replaceState(null, "", text + hash);
}

(() => {
  // -- light and dark ------------------------------------------------------------------------

  const showTheme = () => (byId("theme").textContent = isDark() ? "Light" : "Dark");
  const remembered = readStored("hookline-theme", "localStorage", String);
  if (remembered === "dark" || remembered === "light")
    document.documentElement.dataset.theme = remembered;
  byId("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    writeStored("hookline-theme", document.documentElement.dataset.theme);
    showTheme();
  });
  system.addEventListener("change", showTheme);
  showTheme();
  byId("keys")?.addEventListener("click", () => byId("help").showModal());

  // -- a page that is loaded again in its place keeps the focus --------------------------------

  addEventListener("pagehide", () =>
    writeStored("hookline-focus", JSON.stringify(document.activeElement.id), "sessionStorage"),
  );
  if (performance.getEntriesByType("navigation")[0]?.type === "reload")
    byId(readStored("hookline-focus", "sessionStorage"))?.focus();

  // -- following: the recording may be replaced, deleted, or written for the first time ---------

  async function follow() {
    for (;;) {
      await sleep(1);
      if (document.hidden) continue;
      const now = await fetchJson("state");
      if (!now) continue;
      if (now.state && now.state !== state) return location.reload();
      showStatusText(
        now.state || !state
          ? ""
          : `${now.gone} The page shows an earlier state and updates when the recording is back.`,
      );
    }
  }

  if (state !== undefined && !byId("chart")) follow(); // the page of a run follows it itself
})();
