// What the pages of replays and of robots that move share: elements, colours, and the buttons for time.
export const SPEEDS = [0.1, 0.25, 0.5, 1, 2, 4];
const PLAY = "M6 3.5v13l10-6.5z";
const PAUSE = "M5 4h3v12H5zM12 4h3v12h-3z";

export const element = (id) => document.getElementById(id);
const colours = getComputedStyle(document.documentElement);
export const colour = (name) => colours.getPropertyValue(name).trim();

// Shows on the button whether time runs.
export function showPlaying(playing) {
  element("play").querySelector("path").setAttribute("d", playing ? PAUSE : PLAY);
  element("play").setAttribute("aria-label", playing ? "Pause" : "Play");
  element("play").title = `${playing ? "Pause" : "Play"} (Space)`;
}

// After a click the space bar plays and pauses, and does not press the button again; after a choice with the
// pointer, keys are the page's again. Who moves by keys alone keeps the focus.
export function leaveFocus() {
  let pointed = false;
  document.addEventListener("pointerdown", () => (pointed = true), { capture: true });
  document.addEventListener("keydown", () => (pointed = false), { capture: true });
  document.addEventListener("click", (event) => event.detail && event.target.closest?.("button")?.blur());
  document.addEventListener("change", (event) => pointed && event.target.blur());
}

// Whether a key belongs to the element that has the focus: to a list all, to a slider those that move it.
export function isKept(event) {
  if (event.target.matches("select")) return true;
  if (event.target.matches("input")) return /^(Arrow|Page|Home$|End$)/.test(event.key);
  return event.key === " " && event.target.matches("button");
}

export function complain(text) {
  element("notice").hidden = false;
  element("notice").textContent = text;
}

export function showHelp() {
  if (element("keys").open) element("keys").close();
  else element("keys").showModal();
}
