// A robot's WebAssembly module: the state of its environment, and the functions that move it.
import { unpack } from "./data.js";

const WORD = 4; // bytes
const PAGE = 65536;

export class Machine {
  static async load(described) {
    const { instance } = await WebAssembly.instantiate(await unpack(described.module), {});
    const machine = new Machine(described, instance.exports);
    for (const [name, part] of Object.entries(described.parts)) await machine.fill(name, part);
    machine.reset(0);
    return machine;
  }

  constructor({ parts, layout, memory, dt, nbody }, exports) {
    this.exports = exports;
    this.layout = layout;
    this.dt = dt;
    this.first = Uint32Array.from(memory);
    this.size = parts.reset.writes; // words of a state
    this.cost = 0; // ms of a step, smoothed
    this.count = 0; // steps so far
    let place = exports.heap.value;
    const take = (bytes) => {
      const begin = (place + 15) & ~15;
      place = begin + bytes;
      return begin;
    };
    this.at = {};
    for (const [name, { reads, writes, shared }] of Object.entries(parts)) {
      this.at[name] = {
        reads: take(WORD * reads), writes: take(WORD * writes), table: take(WORD * shared.length),
        shared: shared.map((bytes) => take(bytes)),
      };
    }
    const missing = place - exports.memory.buffer.byteLength;
    if (missing > 0) exports.memory.grow(Math.ceil(missing / PAGE));
    // The memory does not grow any more, so views of it stay valid.
    const view = (begin, count) => new Uint32Array(exports.memory.buffer, begin, count);
    this.block = {};
    for (const [name, { reads, writes }] of Object.entries(parts)) {
      const at = this.at[name];
      view(at.table, at.shared.length).set(at.shared);
      this.block[name] = { reads: view(at.reads, reads), writes: view(at.writes, writes) };
    }
    this.state = new Uint32Array(this.size);
    this.numbers = new Float32Array(this.state.buffer);
    this.before = new Uint32Array(this.size); // the state in which the last action was taken
    this.action = new Uint32Array(parts.step.reads - this.size - 6 * nbody);
    this.memory = this.first.slice();
    this.seen = new Float32Array(exports.memory.buffer, this.at.look.writes, parts.look.writes);
  }

  // Puts the arrays of a part, such as a policy's weights, where it reads them.
  async fill(name, { shared, data }) {
    const bytes = new Uint8Array(await unpack(data));
    let begin = 0;
    shared.forEach((size, index) => {
      const target = new Uint8Array(this.exports.memory.buffer, this.at[name].shared[index], size);
      target.set(bytes.subarray(begin, begin + size));
      begin += Math.ceil(size / WORD) * WORD;
    });
  }

  // Runs a function on words; returns the block of its results, which the next run overwrites.
  run(name, ...words) {
    const { reads, writes } = this.block[name];
    let begin = 0;
    for (const part of words) {
      reads.set(part, begin);
      begin += part.length;
    }
    this.exports[name](this.at[name].reads, this.at[name].writes, this.at[name].table);
    return writes;
  }

  // Opens an episode. The key is that of jax.random.key(seed).
  reset(seed) {
    this.state.set(this.run("reset", [0, seed >>> 0]));
    this.before.set(this.state);
    this.memory.set(this.first);
    this.action.fill(0);
  }

  // Moves on by a step: `command` (numbers) or null, `controls` (numbers) in place of a policy, `pull` on bodies.
  step(command, controls, pull) {
    const before = performance.now();
    if (command) this.state.set(this.run("command", this.state, bits(command)));
    if (this.at.act) {
      const chosen = this.run("act", this.memory, this.state);
      this.action.set(chosen.subarray(0, this.action.length));
      this.memory.set(chosen.subarray(this.action.length));
    } else {
      this.action.set(bits(controls));
    }
    this.before.set(this.state);
    this.state.set(this.run("step", this.state, this.action, bits(pull)));
    const spent = performance.now() - before;
    // The first steps are slow: the browser still compiles.
    if (++this.count > 20) this.cost += (spent - this.cost) * (this.cost ? 0.02 : 1);
  }

  // Returns the numbers of `programs.Look` for the present state, while `pull` acts on the bodies.
  look(pull) {
    this.run("look", this.state, this.before, this.action, bits(pull));
    return this.seen;
  }

  get terminated() {
    return this.state[this.layout.terminated] !== 0;
  }

  get reward() {
    return this.numbers[this.layout.reward];
  }

  // Returns the number of a channel; call `look` first.
  read({ block, at }) {
    return block === "state" ? this.numbers[at] : this.seen[at];
  }
}

const bits = (numbers) => new Uint32Array(Float32Array.from(numbers).buffer);
