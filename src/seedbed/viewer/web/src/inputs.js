// What a person does with keys, a gamepad, and the pads on the page, as a joystick with three axes.
const DEAD = 0.12; // of a gamepad's stick
const RAMP = 4; // full deflections a second, of keys

const HELD = {
  w: ["forward", 1], ArrowUp: ["forward", 1], s: ["forward", -1], ArrowDown: ["forward", -1],
  q: ["left", 1], e: ["left", -1],
  a: ["turn left", 1], ArrowLeft: ["turn left", 1], d: ["turn left", -1], ArrowRight: ["turn left", -1],
};

// Where a site forbids gamepads, asking for them throws.
function pads() {
  try {
    return navigator.getGamepads?.() ?? [];
  } catch {
    return [];
  }
}

export class Joystick {
  constructor() {
    this.axes = { forward: 0, left: 0, "turn left": 0 };
    this.ramped = { ...this.axes };
    this.pads = {}; // axis -> deflection, while a pad is held
    this.held = new Set();
    this.used = false; // whether anybody has touched it yet
  }

  // Takes a key; returns whether it belongs to the joystick.
  key(key, down) {
    if (!HELD[key]) return false;
    if (down) this.held.add(key);
    else this.held.delete(key);
    this.used ||= down;
    return true;
  }

  release() {
    this.held.clear();
    this.pads = {};
  }

  // Makes an element a pad; `axes` are those that its x (to the left) and y (upwards) are.
  pad(element, [x, y]) {
    const knob = element.querySelector(".knob");
    const move = (event) => {
      const box = element.getBoundingClientRect();
      const within = (value) => Math.max(-1, Math.min(1, value));
      const across = within(((event.clientX - box.left) / box.width) * 2 - 1);
      const up = y ? within(1 - ((event.clientY - box.top) / box.height) * 2) : 0;
      this.pads[x] = -across;
      if (y) this.pads[y] = up;
      knob.style.transform = `translate(${across * 0.5 * (box.width - knob.offsetWidth)}px, ${-up * 0.5 * (box.height - knob.offsetHeight)}px)`;
      this.used = true;
      event.preventDefault();
      event.stopPropagation(); // the camera, which another finger turns, must not hear of this one
    };
    const end = () => {
      for (const axis of [x, y]) delete this.pads[axis];
      knob.style.transform = "";
    };
    element.addEventListener("pointerdown", (event) => {
      element.setPointerCapture(event.pointerId);
      move(event);
    });
    element.addEventListener("pointermove", (event) => element.hasPointerCapture(event.pointerId) && move(event));
    element.addEventListener("pointerup", (event) => event.stopPropagation());
    element.addEventListener("lostpointercapture", end);
  }

  // Returns the deflections, from -1 to 1, after `seconds` more.
  read(seconds) {
    const stick = this.gamepad();
    for (const axis of Object.keys(this.axes)) {
      let wanted = 0;
      for (const key of this.held) if (HELD[key][0] === axis) wanted += HELD[key][1];
      const step = RAMP * seconds;
      const off = Math.max(-1, Math.min(1, wanted)) - this.ramped[axis];
      this.ramped[axis] += Math.max(-step, Math.min(step, off));
      const others = (this.pads[axis] ?? 0) + (stick[axis] ?? 0);
      this.axes[axis] = Math.max(-1, Math.min(1, this.ramped[axis] + others));
    }
    return this.axes;
  }

  gamepad() {
    const pad = pads().find((each) => each?.connected && each.mapping === "standard");
    if (!pad) return {};
    const beyond = (value = 0) => (Math.abs(value) < DEAD ? 0 : (value - Math.sign(value) * DEAD) / (1 - DEAD));
    const [x, y, turn] = [0, 1, 2].map((axis) => beyond(pad.axes[axis]));
    this.used ||= Boolean(x || y || turn);
    return { forward: -y, left: -x, "turn left": -turn };
  }
}
