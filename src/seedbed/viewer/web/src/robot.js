// One robot on the page: its module, its stage, what pulls at it, and what was seen of it lately.
import { Quaternion, Vector3 } from "three";
import { Arrow } from "./arrows.js";
import { unpackSurface } from "./data.js";
import { Machine } from "./machine.js";
import { History, SHOWS } from "./rolling.js";
import { Stage } from "./scene.js";

const RESTS = 1; // s that a robot lies before its next episode
const STIFFNESS = 60; // N/m of a pull, for each kg of what is held
const PUSHED = 0.1; // s
const PUSH_SPEED = 1.2; // m/s that a push gives
const SEEN_FORCE = 0.02; // of the weight: smaller forces are not drawn
const ARROW = 0.6; // of the robot's radius, for 1 m/s and for the robot's weight

export class Robot {
  static async load(described, canvas) {
    const machine = await Machine.load(described);
    const surfaces = await Promise.all(described.scene.surfaces.map(unpackSurface));
    return new Robot(described, machine, canvas, surfaces);
  }

  constructor(described, machine, canvas, surfaces) {
    this.described = described;
    this.machine = machine;
    this.dt = described.dt;
    this.history = new History(described.layout.channels, this.dt, SHOWS);
    this.pull = new Float32Array(6 * described.nbody);
    this.controls = described.controls.map(({ start }) => start);
    this.grab = null; // { body, place in it, cursor }
    this.push = null; // { force, steps left }
    this.episode = this.steps = 0;
    this.last = null;
    this.left = 0; // s of its time that are not yet played
    this.before = machine.look(this.pull).slice();
    this.now = this.before.slice();
    this.part = 1; // how far the picture is from `before` to `now`
    this.frame = { pose: this.pose.bind(this), target: this.target.bind(this) };
    this.stage = null;
    try {
      this.stage = new Stage(canvas, described.scene, surfaces);
    } catch (error) {
      this.blind = error.message;
    }
    this.addArrows();
    this.open();
  }

  addArrows() {
    const size = this.described.scene.radius;
    this.told = new Arrow(0x12795a, 0.018 * size);
    this.speed = new Arrow(0x2f6fde, 0.018 * size);
    this.pulled = new Arrow(0xd9822b, 0.012 * size);
    this.forces = Array.from({ length: this.described.nbody }, () => new Arrow(0xc23b4e, 0.01 * size));
    this.stage?.scene.add(this.told, this.speed, this.pulled, ...this.forces);
  }

  // Opens an episode.
  open() {
    this.machine.reset(this.episode++);
    if (this.steps) this.last = this.total; // return of the episode before
    this.steps = 0;
    this.total = 0;
    this.lies = this.left = 0;
    this.grab = this.push = null;
    this.pull.fill(0);
    this.commanded = null;
    this.now.set(this.machine.look(this.pull));
    this.before.set(this.now);
    this.velocity = new Vector3();
  }

  // Moves on by a step of the task. `deflections` of a joystick, or null: then the task tells itself what to do.
  step(deflections) {
    if (this.lies) {
      this.before.set(this.now); // it lies still
      this.lies += this.dt;
      if (this.lies > RESTS) this.open();
      return;
    }
    const { commands } = this.described;
    const kept = this.command; // of what a joystick does not steer
    const command = deflections && commands.length && commands.map(({ name, low, high }, index) => {
      const part = deflections[name];
      const told = part === undefined ? kept[index] : part < 0 ? -part * low : part * high;
      return Math.max(low, Math.min(high, told));
    });
    this.gatherPull();
    this.commanded = command || null;
    this.machine.step(command, this.controls, this.pull);
    this.steps++;
    this.total += this.machine.reward;
    this.before.set(this.now);
    this.now.set(this.machine.look(this.pull));
    this.history.push(this.machine);
    const way = this.vector("target", 0, this.now).sub(this.vector("target", 0, this.before));
    this.velocity.lerp(way.divideScalar(this.dt), Math.min(1, this.dt / 0.2));
    if (this.machine.terminated || this.steps === this.described.limit) this.lies = this.dt;
  }

  // What the task has been told: by a person, or by itself.
  get command() {
    const { command } = this.machine.layout.look;
    return this.commanded ?? Array.from(this.now.subarray(command, command + this.described.commands.length));
  }

  // The body that is followed, or the first.
  get root() {
    return this.described.scene.bodies[Math.max(this.described.followed, 0)];
  }

  // Of that body and all that hangs on it, in kg.
  get mass() {
    return this.described.masses[this.root];
  }

  gatherPull() {
    this.pull.fill(0);
    const { body } = this.grab ?? {};
    if (this.grab) {
      this.follow();
      const at = this.vector("centre", body, this.now);
      const held = this.held(this.now);
      const mass = this.described.masses[body];
      const force = this.grab.cursor.clone().sub(held).multiplyScalar(STIFFNESS * mass);
      force.clampLength(0, 30 * mass);
      const torque = held.sub(at).cross(force);
      this.pull.set([force.x, force.y, force.z, torque.x, torque.y, torque.z], 6 * body);
    }
    if (this.push) {
      [this.push.force.x, this.push.force.y].forEach((value, k) => (this.pull[6 * this.root + k] += value));
      if (--this.push.left === 0) this.push = null;
    }
  }

  // Pushes the robot in a direction of the ground, in rad.
  shove(angle) {
    const steps = Math.max(1, Math.round(PUSHED / this.dt)); // whole ones, which give that speed together
    const size = (this.mass * PUSH_SPEED) / (steps * this.dt);
    this.push = { force: new Vector3(Math.cos(angle), Math.sin(angle), 0).multiplyScalar(size), left: steps };
  }

  // Takes hold of the body under the cursor, if there is one; returns whether there is.
  take(event) {
    const hit = this.stage?.hit(event);
    if (!hit || !this.moves(hit.index)) return false;
    const index = hit.index;
    const [position, quaternion] = [new Vector3(), new Quaternion()];
    this.pose(index, position, quaternion);
    const place = hit.point.clone().sub(position).applyQuaternion(quaternion.invert());
    this.grab = { index, body: this.described.scene.bodies[index], place, cursor: hit.point.clone() };
    this.drag(event);
    return true;
  }

  drag({ clientX, clientY }) {
    if (!this.grab) return;
    this.grab.resting = { clientX, clientY };
    this.follow();
  }

  // Puts the end of a drag under the pointer, for the camera moves while that rests.
  follow() {
    this.stage.along(this.grab.resting, this.grab.cursor);
  }

  // Returns whether forces move a drawn body; others stand, or are put where they are.
  moves(index) {
    return this.described.masses[this.described.scene.bodies[index]] > 0;
  }

  // Returns where the held point is.
  held(look) {
    const [position, quaternion] = [new Vector3(), new Quaternion()];
    this.poseIn(look, this.grab.index, position, quaternion);
    return this.grab.place.clone().applyQuaternion(quaternion).add(position);
  }

  // Returns three numbers of a look.
  vector(name, index, look) {
    return new Vector3().fromArray(look, this.machine.layout.look[name] + 3 * index);
  }

  poseIn(look, index, position, quaternion) {
    position.fromArray(look, this.machine.layout.look.position + 3 * index);
    const at = this.machine.layout.look.quaternion + 4 * index;
    quaternion.set(look[at + 1], look[at + 2], look[at + 3], look[at]);
  }

  pose(index, position, quaternion) {
    const [place, turn] = [new Vector3(), new Quaternion()];
    this.poseIn(this.before, index, position, quaternion);
    this.poseIn(this.now, index, place, turn);
    // What is put somewhere does not come from where it was.
    const part = this.moves(index) ? this.part : 1;
    position.lerp(place, part);
    quaternion.slerp(turn, part);
  }

  target(out) {
    if (this.described.followed < 0) return out.fromArray(this.described.centre);
    out.copy(this.vector("target", 0, this.before));
    return out.lerp(this.vector("target", 0, this.now), this.part);
  }

  // Draws the robot `part` of the way from the step before to the last one.
  draw(part, arrows, moved) {
    if (!this.stage) return;
    this.part = part;
    if (moved) {
      this.stage.show(this.frame);
      this.showArrows(arrows);
    }
    this.stage.draw(moved);
  }

  showArrows(shown) {
    const none = new Vector3();
    const { scene, commands, followed } = this.described;
    const above = this.target(new Vector3());
    above.z += 0.9 * scene.radius;
    const walks = shown && commands.some(({ name }) => name === "forward") && followed >= 0;
    const told = (wanted) => this.command[commands.findIndex(({ name }) => name === wanted)] ?? 0;
    this.told.point(above, walks ? this.ahead(told("forward"), told("left")) : none);
    above.z += 0.08 * scene.radius;
    this.speed.point(above, walks ? this.velocity.clone().setZ(0).multiplyScalar(ARROW * scene.radius) : none);
    const weight = this.mass * 9.81;
    this.forces.forEach((arrow, body) => {
      const force = this.vector("force", body, this.now);
      const seen = shown && this.described.masses[body] > 0 && force.length() > SEEN_FORCE * weight;
      arrow.point(this.ground(body, force), seen ? force.multiplyScalar((ARROW * scene.radius) / weight) : none);
    });
    this.pulled.visible = false;
    if (this.grab) {
      this.follow();
      const from = this.held(this.now);
      this.pulled.point(from, this.grab.cursor.clone().sub(from));
    }
  }

  // Returns a velocity of the robot's own frame in the world, as an arrow.
  ahead(forward, left) {
    const [position, quaternion] = [new Vector3(), new Quaternion()];
    this.pose(this.described.followed, position, quaternion);
    const front = new Vector3(1, 0, 0).applyQuaternion(quaternion).setZ(0).normalize();
    const side = new Vector3(-front.y, front.x, 0);
    return front.multiplyScalar(forward).addScaledVector(side, left).multiplyScalar(ARROW * this.described.scene.radius);
  }

  // Returns where the line of a body's contact force meets the ground; if that is far from the body, or there are
  // things to stand on, where it is next to the body's centre.
  ground(body, force) {
    const point = this.vector("point", body, this.now);
    const centre = this.vector("centre", body, this.now);
    point.addScaledVector(force, centre.clone().sub(point).dot(force) / Math.max(force.lengthSq(), 1e-9));
    const { level } = this.stage;
    const { scene } = this.described;
    const more = scene.bodies.some((each, index) => each > 0 && !this.moves(index));
    if (more || level === undefined || Math.abs(force.z) < 0.2 * force.length()) return point;
    const below = point.clone().addScaledVector(force, (level - point.z) / force.z);
    return below.distanceTo(centre) < 0.5 * scene.radius ? below : point;
  }
}
