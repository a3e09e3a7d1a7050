// A chart of the last seconds of one channel, a line for each robot; the channel is chosen from a list.
import { drawAxes, fit, format, niceRange } from "./chart.js";

export const SHOWS = 10; // s in a chart

// Texts of the robots, each in the colour of its line if there are several.
export function inColours(texts) {
  return texts.map((text, index) => {
    const span = document.createElement("span");
    span.textContent = index ? `  ${text}` : text;
    if (texts.length > 1) span.style.color = `var(--robot-${index % 4})`;
    return span;
  });
}

export class Rolling {
  constructor(parent, names, chosen) {
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    this.list = document.createElement("select");
    this.list.setAttribute("aria-label", "What the chart shows");
    for (const name of names) this.list.append(new Option(name.replaceAll("_", " "), name));
    this.list.value = chosen;
    this.output = document.createElement("output");
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    caption.append(this.list, this.output);
    figure.append(caption, this.canvas);
    parent.append(figure);
  }

  get name() {
    return this.list.value;
  }

  // `histories` are those of the robots.
  draw(histories, colour) {
    const context = fit(this.canvas);
    if (!context) return;
    const lines = histories.map((history) => history.values(this.name));
    const every = lines.flat();
    this.output.replaceChildren(...inColours(lines.map((line) => (line.length ? format(line.at(-1)) : ""))));
    this.canvas.setAttribute("aria-label", `${this.name} over the last ${SHOWS} seconds`);
    const [low, high] = niceRange(every.length ? every : [0, 1]);
    const { x, y } = drawAxes(context, this.canvas, [low, high], [-SHOWS, 0], colour, " s");
    lines.forEach((line, index) => {
      const { dt } = histories[index];
      context.strokeStyle = colour(`--robot-${index % 4}`);
      context.lineWidth = 1.5;
      context.lineJoin = "round";
      context.beginPath();
      line.forEach((value, k) => context.lineTo(x((k + 1 - line.length) * dt), y(value)));
      context.stroke();
    });
  }
}

// The last seconds of all channels of a robot.
export class History {
  constructor(channels, dt, seconds) {
    this.channels = channels;
    this.dt = dt;
    this.most = Math.ceil(seconds / dt);
    this.rows = [];
  }

  push(machine) {
    this.rows.push(Float32Array.from(this.channels, (channel) => machine.read(channel)));
    if (this.rows.length > this.most) this.rows.shift();
  }

  values(name) {
    const index = this.channels.findIndex((channel) => channel.name === name);
    return index < 0 ? [] : this.rows.map((row) => row[index]);
  }
}
