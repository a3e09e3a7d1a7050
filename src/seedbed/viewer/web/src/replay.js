// The page of a replay: time runs, keys and buttons act, scene and charts follow.
import { Chart, format } from "./chart.js";
import { poseAt, targetAt, unpackEpisode, unpackSurface } from "./data.js";
import { colour, complain, element, isKept, leaveFocus, showHelp, showPlaying, SPEEDS } from "./page.js";
import { Stage } from "./scene.js";

let replay = null; // what `html.describe` has packed
const state = { number: 0, episode: null, time: 0, playing: false, speed: 1, stale: true };
let stage = null;
let charts = [];

async function choose(number, time = 0) {
  state.number = number;
  element("episode").value = String(number);
  const episode = await unpackEpisode(replay.episodes[number], replay.scene.bodies.length);
  if (state.number !== number) return; // another was chosen meanwhile
  const sums = new Float64Array(episode.steps);
  episode.reward.reduce((sum, reward, step) => (sums[step] = sum + reward), 0);
  Object.assign(state, { episode, sums });
  element("scrub").max = String(episode.steps);
  element("charts").replaceChildren();
  // The reward of step t is there once frame t + 1 is.
  const chart = (name, values) => new Chart(element("charts"), name, values, 1, seek);
  charts = [chart("Reward", episode.reward), chart("Return so far", sums)];
  charts.push(...episode.extra.map(({ name, values }) => chart(name, values)));
  seek(time);
  stage?.resetView(frame);
}

// The state of the scene now, as the stage takes it.
const frame = {
  pose: (index, position, quaternion) => poseAt(state.episode, index, state.time, position, quaternion),
  target: (out) => targetAt(state.episode, state.time, out),
};

function seek(time) {
  state.time = Math.min(Math.max(time, 0), state.episode.steps);
  state.stale = true;
}

function step(by) {
  play(false);
  seek((by > 0 ? Math.floor(state.time) : Math.ceil(state.time)) + by);
}

function play(playing) {
  if (playing && state.time >= state.episode.steps) seek(0);
  state.playing = playing;
  state.stale = true;
  showPlaying(playing);
}

function setSpeed(index) {
  state.speed = SPEEDS[Math.min(Math.max(index, 0), SPEEDS.length - 1)];
  element("speed").value = String(state.speed);
}

function follow(following) {
  if (!stage || !replay.scene.follows) return;
  stage.following = following;
  if (following) stage.catchUp(frame);
  element("follow").setAttribute("aria-pressed", String(following));
  state.stale = true;
}

function resetView() {
  follow(true);
  stage?.resetView(frame);
  state.stale = true;
}

const KEYS = {
  " ": () => play(!state.playing),
  ArrowLeft: (event) => step(event.shiftKey ? -10 : -1),
  ArrowRight: (event) => step(event.shiftKey ? 10 : 1),
  ArrowUp: () => setSpeed(SPEEDS.indexOf(state.speed) + 1),
  ArrowDown: () => setSpeed(SPEEDS.indexOf(state.speed) - 1),
  Home: () => seek(0),
  End: () => seek(state.episode.steps),
  n: () => choose((state.number + 1) % replay.episodes.length),
  p: () => choose((state.number + replay.episodes.length - 1) % replay.episodes.length),
  f: () => follow(!stage?.following),
  r: resetView,
  "?": showHelp,
};

function listen() {
  document.addEventListener("keydown", (event) => {
    const action = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    if (element("keys").open && event.key !== "?") return;
    if (isKept(event)) return;
    event.preventDefault();
    action(event);
  });
  leaveFocus();
  element("play").addEventListener("click", () => play(!state.playing));
  element("back").addEventListener("click", () => step(-1));
  element("forward").addEventListener("click", () => step(1));
  element("scrub").addEventListener("input", (event) => seek(Number(event.target.value)));
  element("speed").addEventListener("change", (event) => setSpeed(SPEEDS.indexOf(Number(event.target.value))));
  element("episode").addEventListener("change", (event) => choose(Number(event.target.value)));
  element("follow").addEventListener("click", () => follow(!stage.following));
  element("reset").addEventListener("click", resetView);
  element("help").addEventListener("click", showHelp);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", paint);
  new ResizeObserver(resize).observe(element("stage"));
  new ResizeObserver(() => (state.stale = true)).observe(element("charts"));
}

function paint() {
  stage?.paint(colour);
  state.stale = true;
}

function resize() {
  const { clientWidth, clientHeight } = element("stage");
  if (clientWidth && clientHeight) stage?.resize(clientWidth, clientHeight);
  state.stale = true;
}

function fillLists() {
  replay.episodes.forEach((episode, number) => {
    const text = `${number + 1} of ${replay.episodes.length}: return ${format(episode.return)}`;
    element("episode").append(new Option(text, String(number)));
  });
  for (const speed of SPEEDS) element("speed").append(new Option(`${speed}\u00d7`, String(speed)));
  setSpeed(SPEEDS.indexOf(1));
  element("follow").hidden = !replay.scene.follows;
}

function showNumbers() {
  const { episode, sums } = state;
  const now = Math.floor(state.time);
  element("sum").textContent = format(now > 0 ? sums[now - 1] : 0);
  element("reward").textContent = now > 0 ? format(episode.reward[now - 1]) : "\u2013";
  element("step").innerHTML = `${now} <small>of ${episode.steps}</small>`;
  const total = format(episode.steps * episode.dt);
  element("time").innerHTML = `${format(state.time * episode.dt)} <small>of ${total} s</small>`;
  element("scrub").value = String(now);
  for (const chart of charts) chart.draw(state.time, colour);
}

let last = 0;
function tick(now) {
  const passed = Math.min((now - last) / 1000, 0.25);
  last = now;
  if (state.playing) {
    seek(state.time + (passed * state.speed) / state.episode.dt);
    if (state.time >= state.episode.steps) play(false);
  }
  if (state.stale) {
    showNumbers();
    stage?.show(frame);
  }
  stage?.draw(state.stale);
  state.stale = false;
  requestAnimationFrame(tick);
}

// `#episode=2&step=50` opens the page there, at rest.
export async function start(data) {
  replay = data;
  fillLists();
  try {
    stage = new Stage(element("scene"), replay.scene, await Promise.all(replay.scene.surfaces.map(unpackSurface)));
  } catch (error) {
    complain(`This browser cannot draw in three dimensions (${error.message}). The charts still work.`);
  }
  listen();
  resize();
  paint();
  const asked = new URLSearchParams(window.location.hash.slice(1));
  const whole = (name) => Math.trunc(Number(asked.get(name))) || 0; // 0 for what is no number
  const number = Math.min(Math.max(whole("episode"), 1), replay.episodes.length) - 1;
  await choose(number, whole("step"));
  const still = asked.has("step") || window.matchMedia("(prefers-reduced-motion: reduce)").matches;
  play(!still);
  requestAnimationFrame((now) => {
    last = now;
    tick(now);
    document.documentElement.dataset.state = "ready";
  });
}
