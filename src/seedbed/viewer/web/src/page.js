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

export function showHelp() {
  if (element("keys").open) element("keys").close();
  else element("keys").showModal();
}
