"use strict";

// The script of every page: light and dark, following the recording. It also defines the names that
// all parts of the script share.

const byId = (id) => document.getElementById(id);

const state = document.body.dataset.state; // only a served page has one
const ofState = () => `state=${encodeURIComponent(state)}`; // answers of another one are empty
const sleep = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));

const system = matchMedia("(prefers-color-scheme: dark)");
const isDark = () =>
  (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";

function say(text) {
  byId("live").textContent = text;
  byId("live").hidden = !text;
}

// Ask the server for JSON; if that fails, say why on the page and return undefined.
async function fetchJson(address) {
  let response;
  try {
    response = await fetch(address, { cache: "no-store" });
  } catch {
    say("hookline view has ended. Start it again to go on.");
    return undefined;
  }
  try {
    if (response.ok) return await response.json();
  } catch {
    /* it ended on the way, or is no JSON */
  }
  if (response.status === 403 || response.status === 421)
    say("The server was started again with another address. Open the address that it printed.");
  else
    say("The server cannot answer now: its terminal says why. The page goes on as soon as it can.");
  return undefined;
}

(() => {
  // -- light and dark ------------------------------------------------------------------------

  const remembered = () => {
    try {
      return localStorage.getItem("hookline-theme");
    } catch {
      return null;
    }
  };
  const remember = (theme) => {
    try {
      localStorage.setItem("hookline-theme", theme);
    } catch {
      /* a file has no store */
    }
  };
  const showTheme = () => (byId("theme").textContent = isDark() ? "Light" : "Dark");
  if (remembered() === "dark" || remembered() === "light")
    document.documentElement.dataset.theme = remembered();
  byId("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    remember(document.documentElement.dataset.theme);
    showTheme();
  });
  system.addEventListener("change", showTheme);
  showTheme();
  byId("keys")?.addEventListener("click", () => byId("help").showModal());

  // -- following: the recording may be replaced, deleted, or written for the first time ---------

  async function follow() {
    for (;;) {
      await sleep(1);
      if (document.hidden) continue;
      const now = await fetchJson("state");
      if (!now) continue;
      if (now.state && now.state !== state) return location.reload();
      say(
        now.state || !state
          ? ""
          : `${now.gone} The page shows an earlier state and updates when the recording is back.`,
      );
    }
  }

  if (state !== undefined && !byId("chart")) follow(); // the page of a run follows it itself
})();
