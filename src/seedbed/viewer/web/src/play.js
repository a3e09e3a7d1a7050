// The page of robots that move by themselves: time runs, a person tells them where to go, pulls and pushes.
import { format } from "./chart.js";
import { Joystick } from "./inputs.js";
import { colour, complain, element, isKept, leaveFocus, showHelp, showPlaying, SPEEDS } from "./page.js";
import { Robot } from "./robot.js";
import { inColours, Rolling } from "./rolling.js";

const CHARTS = 3;
const BUSY = 25; // ms of a frame that may go to physics
const FEWEST = 24; // pictures a second
const ASKS = 2000; // ms between two questions for a newer policy
const GAP = 1000; // ms without a picture that say nothing of the machine
const REDRAWN = 100; // ms between two pictures of numbers and charts

const joystick = new Joystick();
const state = {
  playing: true, speed: 1, arrows: true, auto: true, following: true, stale: true, drawn: 0, eased: 0, seen: 0, frames: [],
};
let robots = [];
let charts = [];

const lead = () => robots[0];
// The first one that a joystick steers.
const steered = () => robots.find((robot) => robot.described.commands.length);

function play(playing) {
  state.playing = playing;
  state.stale = true;
  showPlaying(playing);
}

function step() {
  play(false);
  advance(lead().dt);
}

function setSpeed(index) {
  state.speed = SPEEDS[Math.min(Math.max(index, 0), SPEEDS.length - 1)];
  element("speed").value = String(state.speed);
}

function restart() {
  for (const robot of robots) robot.open();
  state.stale = true;
}

function push() {
  const angle = 2 * Math.PI * Math.random();
  for (const robot of robots) robot.shove(angle);
}

function toggle(id, name) {
  state[name] = !state[name];
  state.stale = true;
  element(id).setAttribute("aria-pressed", String(state[name]));
}

function follow(following) {
  state.following = following;
  for (const { stage, described, frame } of robots) {
    if (!stage || !described.scene.follows) continue;
    stage.following = following;
    if (following) stage.catchUp(frame);
  }
  element("follow").setAttribute("aria-pressed", String(following));
  state.stale = true;
}

function resetView() {
  follow(true);
  for (const robot of robots) robot.stage?.resetView(robot.frame);
  state.stale = true;
}

const REPEATED = [".", "[", "]"]; // by a key that stays down

const KEYS = {
  " ": () => play(!state.playing),
  ".": step,
  r: restart,
  p: push,
  c: () => toggle("arrows", "arrows"),
  m: () => steered() && toggle("auto", "auto"),
  f: () => follow(!state.following),
  v: resetView,
  "[": () => setSpeed(SPEEDS.indexOf(state.speed) - 1),
  "]": () => setSpeed(SPEEDS.indexOf(state.speed) + 1),
  "?": showHelp,
};

function onKey(event, down) {
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  // Whatever has the focus by now, a key that was held is released.
  if (!down) return void joystick.key(key, false);
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (element("keys").open && key !== "?") return;
  if (isKept(event)) return;
  if (steered() && joystick.key(key, true)) event.preventDefault();
  else if (KEYS[key]) {
    event.preventDefault();
    if (!event.repeat || REPEATED.includes(key)) KEYS[key]();
  }
}

function listen() {
  document.addEventListener("keydown", (event) => onKey(event, true));
  document.addEventListener("keyup", (event) => onKey(event, false));
  window.addEventListener("blur", () => joystick.release());
  leaveFocus();
  element("play").addEventListener("click", () => play(!state.playing));
  element("forward").addEventListener("click", step);
  element("again").addEventListener("click", restart);
  element("push").addEventListener("click", push);
  element("auto").addEventListener("click", () => toggle("auto", "auto"));
  element("arrows").addEventListener("click", () => toggle("arrows", "arrows"));
  element("speed").addEventListener("change", (event) => setSpeed(SPEEDS.indexOf(Number(event.target.value))));
  element("follow").addEventListener("click", () => follow(!state.following));
  element("reset").addEventListener("click", resetView);
  element("help").addEventListener("click", showHelp);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  new ResizeObserver(resize).observe(element("stage"));
  if (!steered()) return;
  joystick.pad(element("pad"), ["left", "forward"]);
  joystick.pad(element("turn"), ["turn left", null]);
}

// The robot under the cursor is dragged; elsewhere the camera turns.
function listenToDrags(robot, canvas) {
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button || robot.grab || !robot.take(event)) return;
    event.stopImmediatePropagation();
    canvas.setPointerCapture(event.pointerId);
    robot.grab.pointer = event.pointerId;
  }, { capture: true });
  // The camera, which another finger turns, must not hear of this one.
  canvas.addEventListener("pointermove", (event) => {
    if (robot.grab?.pointer !== event.pointerId) return;
    event.stopPropagation();
    robot.drag(event);
  }, { capture: true });
  for (const kind of ["pointerup", "pointercancel", "lostpointercapture"]) {
    canvas.addEventListener(kind, (event) => {
      if (robot.grab?.pointer !== event.pointerId) return;
      event.stopPropagation();
      robot.grab = null;
      state.stale = true;
    }, { capture: true });
  }
}

function paint() {
  for (const { stage } of robots) stage?.paint(colour);
  state.stale = true;
}

function resize() {
  for (const { stage } of robots) {
    const { clientWidth, clientHeight } = stage?.renderer.domElement.parentElement ?? {};
    if (clientWidth && clientHeight) stage.resize(clientWidth, clientHeight);
  }
  state.stale = true;
}

// Milliseconds that a second of all robots takes.
const cost = () => robots.reduce((sum, { machine, dt }) => sum + machine.cost / dt, 0);

// Moves all robots on by seconds of their own time.
function advance(seconds) {
  // What cannot be computed in time is left out, and of all robots alike: they are slower then.
  seconds = Math.min(seconds, Math.max(BUSY / Math.max(cost(), 1e-9), lead().dt));
  const axes = joystick.read(seconds);
  if (joystick.used && state.auto && steered()) toggle("auto", "auto");
  joystick.used = false;
  for (const robot of robots) {
    robot.left += seconds;
    while (robot.left >= 0.999 * robot.dt) {
      robot.left -= robot.dt;
      robot.step(state.auto ? null : axes);
    }
  }
  state.stale = true;
}

function showNumbers(now) {
  const { steps, dt } = lead();
  const driven = steered();
  element("sum").replaceChildren(...inColours(robots.map((robot) => format(robot.total))));
  element("last").replaceChildren(...inColours(robots.map(({ last }) => (last === null ? "\u2013" : format(last)))));
  element("time").innerHTML = `${format(steps * dt)} <small>s${lead().lies ? ", ended" : ""}</small>`;
  element("rate").innerHTML = `${state.frames.length} <small>a second</small>`;
  element("spare").innerHTML = cost() ? `${Math.round(1000 / cost())}&times; <small>real time</small>` : "&ndash;";
  element("told").textContent = driven?.described.commands.map(({ name, unit }, index) => {
    const value = driven.command[index];
    return `${name} ${value < -0.005 ? "\u2212" : ""}${Math.abs(value).toFixed(2)} ${unit}`;
  }).join("   ") ?? "";
  for (const chart of charts) chart.draw(robots.map((robot) => robot.history), colour);
  state.drawn = now;
}

let last = 0;
function tick(now) {
  requestAnimationFrame(tick); // first: whatever fails in one picture, there is a next one
  const passed = Math.min((now - last) / 1000, 0.25);
  last = now;
  if (state.playing && !document.hidden) advance(passed * state.speed);
  const moved = state.stale;
  for (const robot of robots) {
    robot.draw(state.playing ? Math.min(robot.left / robot.dt, 1) : 1, state.arrows, moved);
  }
  state.stale = false;
  document.documentElement.dataset.steps = lead().steps; // for tests
  if (now - state.seen > GAP) Object.assign(state, { frames: [], eased: now }); // the page was hidden
  state.seen = now;
  // A slow machine draws more coarsely: better than jerks.
  if (state.frames.length < FEWEST && now - state.eased > 1500) {
    for (const { stage } of robots) stage?.ease();
    state.eased = now;
    state.stale = true;
  }
  state.frames.push(now);
  while (state.frames[0] < now - 1000) state.frames.shift();
  if (now - state.drawn > REDRAWN) showNumbers(now);
}

function addSliders() {
  const all = robots.flatMap((robot) => robot.described.controls.map((control, index) => ({ robot, index, ...control })));
  for (const { robot, index, name, low, high, start } of all) {
    const label = document.createElement("label");
    const slider = Object.assign(document.createElement("input"), {
      type: "range", min: low, max: high, step: "any", value: start,
    });
    const [text, output] = [document.createElement("span"), document.createElement("output")];
    text.textContent = name;
    const digits = Math.min(6, Math.max(2, 2 - Math.floor(Math.log10(high - low)))); // a hundredth of the range is seen
    label.style.setProperty("accent-color", `var(--robot-${robots.indexOf(robot) % 4})`);
    const take = () => {
      robot.controls[index] = Number(slider.value);
      output.textContent = Number(slider.value).toFixed(digits);
    };
    slider.addEventListener("input", take);
    label.append(text, slider, output);
    element("sliders").append(label);
    take();
  }
  element("sliders").hidden = !all.length;
}

function addCharts() {
  const names = [...new Set(robots.flatMap(({ described }) => described.layout.channels.map(({ name }) => name)))];
  const told = robots.some(({ machine }) => machine.at.act);
  const rewards = told ? ["reward", ...names.filter((name) => /tracking|forward|dist|near/.test(name))] : [];
  const sensors = names.filter((name) => told || !/^reward|^solver_error/.test(name));
  const liked = [...rewards, ...sensors, ...names];
  const chosen = [...new Set(liked)].slice(0, CHARTS);
  charts = chosen.map((name) => new Rolling(element("charts"), names, name));
}

async function addRobot(described) {
  const view = document.createElement("div");
  const canvas = document.createElement("canvas");
  canvas.tabIndex = -1;
  view.append(canvas);
  element("views").append(view);
  const robot = await Robot.load(described, canvas);
  if (element("views").dataset.many) {
    const name = document.createElement("p");
    name.textContent = described.title;
    view.append(name);
  }
  listenToDrags(robot, canvas);
  return robot;
}

// Takes newer policies from the server that follows a run.
async function follows(step) {
  const [described, { machine }] = [lead().described.parts.act, lead()];
  try {
    // A policy may be large: it is fetched when there is another one.
    const newest = await (await fetch("step")).json();
    if (newest !== step) {
      const policy = await (await fetch("policy")).json();
      await machine.fill("act", { shared: described.shared, data: policy.data });
      step = policy.step;
      const whose = policy.member ? ` of ${policy.member}` : "";
      state.policy = `policy${whose} after ${step.toLocaleString("en-GB")} steps`;
    }
    element("policy").textContent = state.policy;
  } catch {
    element("policy").textContent = "no answer: the server has ended, or is busy";
  }
  element("policy").hidden = false;
  setTimeout(follows, ASKS, step);
}

export async function start({ players, watched }) {
  if (players.length > 1) element("views").dataset.many = players.length;
  try {
    for (const described of players) robots.push(await addRobot(described));
  } catch (error) {
    return complain(`This browser cannot run the robot (${error.message}).`);
  }
  window.addEventListener("error", ({ message }) => {
    // Browsers tell this of a layout that takes more than a picture.
    if (!message.startsWith("ResizeObserver")) complain(`The page has failed (${message}).`);
  });
  const { blind } = lead();
  if (blind) complain(`This browser cannot draw in three dimensions (${blind}). The charts still work.`);
  for (const speed of SPEEDS) element("speed").append(new Option(`${speed}\u00d7`, String(speed)));
  setSpeed(SPEEDS.indexOf(1));
  element("follow").hidden = !robots.some(({ described }) => described.scene.follows);
  for (const each of document.querySelectorAll("#pads, #auto, #told, tr.steered")) each.hidden = !steered();
  for (const each of document.querySelectorAll(".paid")) each.hidden = !robots.some(({ machine }) => machine.at.act);
  addSliders();
  addCharts();
  listen();
  resize();
  paint();
  resetView();
  if (watched) follows(null);
  play(!window.matchMedia("(prefers-reduced-motion: reduce)").matches);
  requestAnimationFrame((now) => {
    last = state.eased = state.seen = now;
    tick(now);
    document.documentElement.dataset.state = "ready";
  });
}
