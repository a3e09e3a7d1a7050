// A line chart of one value over the steps of an episode, with the current step marked.
const PAD = { left: 46, right: 8, top: 6, bottom: 18 };

export class Chart {
  // `seek(time)` is called where the chart is clicked or dragged.
  constructor(parent, name, values, start, seek) {
    this.values = values; // values[i] belongs to time start + i
    this.start = start;
    this.end = start + values.length - 1;
    [this.low, this.high] = niceRange(values);
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    const label = document.createElement("span");
    label.textContent = name;
    this.output = document.createElement("output");
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `${name} over steps`);
    caption.append(label, this.output);
    figure.append(caption, this.canvas);
    parent.append(figure);
    const goTo = (event) => {
      const inside = (event.offsetX - PAD.left) / (this.canvas.clientWidth - PAD.left - PAD.right);
      seek(Math.round(Math.min(1, Math.max(0, inside)) * this.end));
    };
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      goTo(event);
    });
    this.canvas.addEventListener("pointermove", (event) => event.buttons === 1 && goTo(event));
  }

  draw(time, colour) {
    const context = fit(this.canvas);
    if (!context) return;
    const { x, y } = drawAxes(context, this.canvas, [this.low, this.high], [0, Math.max(1, this.end)], colour);
    const now = Math.floor(time);
    const index = now - this.start;
    this.drawLine(context, x, y, 0, this.values.length - 1, colour("--accent"), 0.32);
    this.drawLine(context, x, y, 0, Math.min(index, this.values.length - 1), colour("--accent"), 1);
    context.strokeStyle = colour("--text");
    context.globalAlpha = 0.55;
    context.lineWidth = 1;
    line(context, x(time), PAD.top, x(time), this.canvas.clientHeight - PAD.bottom);
    context.globalAlpha = 1;
    if (index >= 0) {
      context.fillStyle = colour("--accent");
      context.beginPath();
      context.arc(x(now), y(this.values[index]), 3.5, 0, 2 * Math.PI);
      context.fill();
    }
    this.output.textContent = index >= 0 ? format(this.values[index]) : "";
  }

  drawLine(context, x, y, from, to, colour, alpha) {
    if (to < from) return;
    context.strokeStyle = colour;
    context.globalAlpha = alpha;
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.beginPath();
    for (let index = from; index <= to; index++) context.lineTo(x(this.start + index), y(this.values[index]));
    context.stroke();
    context.globalAlpha = 1;
  }
}

// Returns the context of a canvas as large as it is shown, cleared; null if it is not shown.
export function fit(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  if (!width || !height) return null;
  const ratio = window.devicePixelRatio;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// Draws the ticks of both ranges; returns what turns a number of each into a place.
export function drawAxes(context, canvas, [low, high], [from, to], colour, unit = "") {
  const { clientWidth: width, clientHeight: height } = canvas;
  const x = (at) => PAD.left + ((at - from) / (to - from)) * (width - PAD.left - PAD.right);
  const y = (value) => height - PAD.bottom - ((value - low) / (high - low)) * (height - PAD.top - PAD.bottom);
  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  context.fillStyle = colour("--quiet");
  context.strokeStyle = colour("--line");
  context.lineWidth = 1;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const tick of ticks(low, high, height > 150 ? 5 : 3)) {
    const at = Math.round(y(tick)) + 0.5;
    line(context, PAD.left, at, width - PAD.right, at);
    context.fillText(short(tick), PAD.left - 6, at);
  }
  context.textBaseline = "alphabetic";
  for (const tick of ticks(from, to, width > 300 ? 5 : 3)) {
    const [left, right] = [tick === from, x(tick) > width - 24];
    context.textAlign = left ? "left" : right ? "right" : "center";
    context.fillText(short(tick) + (left ? unit : ""), right ? width - PAD.right : x(tick), height - 4);
  }
  return { x, y };
}

function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

export function niceRange(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low - margin, high + margin];
}

// Round numbers inside a range, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const found = [];
  for (let index = Math.ceil(low / step); index * step <= high; index++) found.push(index * step || 0);
  return found;
}

const trimmed = new Intl.NumberFormat("en-GB", { maximumSignificantDigits: 4, notation: "compact" });
const isTiny = (value) => value !== 0 && Math.abs(value) < 0.005;
const short = (value) => (isTiny(value) ? value.toExponential(0) : trimmed.format(value));
const fixed = new Intl.NumberFormat("en-GB", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
export const format = (value) => (isTiny(value) ? value.toExponential(1) : fixed.format(value));
