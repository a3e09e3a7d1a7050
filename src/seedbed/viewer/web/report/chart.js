// A chart of one metric over steps or over time: lines, medians with their bands, and a box at the pointer.
import uPlot from "uplot";
import { short, timeUnit } from "./format.js";

const DASHES = [[], [9, 4], [3, 3], [12, 4, 3, 4], [6, 2], [2, 4]];
const HEIGHT = 250;
const FROM_ZERO = ["steps/s", "MB", "updates"]; // the units whose axis begins at 0
const FEW = 40; // curves of fewer points show each of them

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colourOf = (series) => css(`--series-${series % DASHES.length}`);
// More series than colours differ by their dashes.
export const dashOf = (series) => DASHES[(series + Math.floor(series / DASHES.length)) % DASHES.length];

export class Chart {
  // `chart` is {x, unit, traces, points}; `series` are the entries of the group's legend.
  constructor(figure, chart, series, group) {
    this.series = series;
    this.holder = figure.querySelector(".plot");
    const largest = Math.max(0, ...chart.traces.flatMap((trace) => trace.x.slice(-1)));
    this.time = chart.x === "wall_s" ? timeUnit(largest) : null;
    this.unit = chart.unit;
    this.lines = []; // of uPlot: {trace, what} for each series but x
    this.bands = [];
    const tables = chart.traces.map((trace) => this.addTrace(trace, chart.points));
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    const data = uPlot.join(tables);
    this.whole = [data[0][0], data[0].at(-1)];
    this.plot = new uPlot(this.options(group, chart.x), data, this.holder);
    this.plot.over.append(this.tip);
    new ResizeObserver(() => this.resize()).observe(this.holder);
  }

  // Adds a trace's lines; returns its table for uPlot's join.
  addTrace(trace, points) {
    const x = trace.x.map((value) => (this.time ? value / this.time.size : value));
    const solid = trace.kind !== "seed";
    this.lines.push({
      trace, what: trace.kind,
      options: {
        stroke: () => colourOf(trace.series),
        width: solid ? 2 : 1, alpha: solid ? 1 : 0.55, dash: solid ? dashOf(trace.series) : [],
        spanGaps: true,
        points: {
          show: solid ? points || trace.x.length < FEW : trace.x.length === 1,
          size: solid && points ? 7 : 5,
        },
      },
    });
    if (!trace.low) return [x, trace.y];
    const edge = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
    const at = this.lines.length;
    for (const what of ["high", "low"]) this.lines.push({ trace, what, options: edge });
    this.bands.push({ series: [at + 1, at + 2], fill: () => faint(colourOf(trace.series)) });
    return [x, trace.y, trace.high, trace.low];
  }

  options(group, x) {
    const text = () => css("--quiet");
    const line = { stroke: () => css("--line"), width: 1 };
    const font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const axis = { stroke: text, grid: line, ticks: { ...line, size: 5 }, font, labelFont: font, labelSize: 18 };
    const label = this.time ? `${this.time.name} of training` : "environment steps";
    const values = (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick)));
    return {
      width: this.holder.clientWidth || 320,
      height: HEIGHT,
      padding: [10, 14, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false, range: (_, low, high) => this.rangeX(low, high) },
        ...(FROM_ZERO.includes(this.unit) && { y: { range: (_, low, high) => [0, (high * 1.08) || 1] } }),
      },
      axes: [
        { ...axis, label, values, space: 56, size: 34 },
        { ...axis, label: this.unit, values, size: (plot, ticks) => width(plot, ticks) },
      ],
      cursor: {
        sync: { key: `${group}.${x}` },
        drag: { x: true, y: false },
        dataIdx: (plot, line, at) => nearest(plot.data, line, at),
        points: {
          size: (plot, at) => (this.isNamed(at) ? 9 : 0),
          width: (plot, at) => (this.isNamed(at) ? 2 : 0),
          stroke: (plot, at) => colourOf(this.lines[at - 1].trace.series),
          fill: () => css("--panel"),
        },
      },
      series: [{}, ...this.lines.map((each) => each.options)],
      bands: this.bands,
      hooks: { setCursor: [(plot) => this.point(plot)] },
    };
  }

  // What is shown of x: all, from 0 on, unless it is zoomed.
  rangeX(low, high) {
    if (low == null) return [0, 1];
    const [first, last] = this.whole;
    // uPlot widens the range of a single point by itself.
    const whole = (low === first && high === last) || first === last;
    return whole ? [Math.min(0, first), last * (first === last ? 1.1 : 1) || 1] : [low, high];
  }

  // Whether the box at the pointer tells of a line: of those of single seeds it does not.
  isNamed(at) {
    return at > 0 && ["line", "median"].includes(this.lines[at - 1].what);
  }

  // Fills the box at the pointer and puts it there.
  point(plot) {
    const { left, top, idxs } = plot.cursor;
    const rows = [];
    let x = null;
    this.lines.forEach((each, number) => {
      const at = idxs?.[number + 1];
      if (!this.isNamed(number + 1) || !plot.series[number + 1].show || at == null) return;
      const value = plot.data[number + 1][at];
      if (value == null) return;
      x ??= plot.data[0][at];
      const spread = each.what === "median" ? ` (${short(plot.data[number + 3][at])} to ${short(plot.data[number + 2][at])})` : "";
      rows.push([each.trace.series, `${short(value)}${spread}`]);
    });
    // Charts that only follow another's pointer show their cross, but no box.
    const here = plot.over.matches(":hover") || plot.cursor.event?.pointerType === "touch";
    this.tip.hidden = left < 0 || !rows.length || !here;
    if (this.tip.hidden) return;
    this.tip.replaceChildren(heading(this.time ? `${short(x)} ${this.time.short}` : `${short(x)} steps`));
    for (const [series, text] of rows) this.tip.append(this.row(series, text));
    const right = left > plot.over.clientWidth / 2;
    this.tip.style.left = right ? "" : `${left + 14}px`;
    this.tip.style.right = right ? `${plot.over.clientWidth - left + 14}px` : "";
    this.tip.style.top = `${Math.min(Math.max(0, top - 20), plot.over.clientHeight - this.tip.clientHeight)}px`;
  }

  row(series, text) {
    const row = document.createElement("div");
    const mark = document.createElement("i");
    mark.style.background = colourOf(series);
    const name = document.createElement("span");
    name.textContent = this.series.length > 1 ? this.series[series] : "";
    const value = document.createElement("b");
    value.textContent = text;
    row.append(mark, name, value);
    return row;
  }

  show(series, shown) {
    this.plot.batch(() => {
      this.lines.forEach((each, number) => {
        if (each.trace.series === series) this.plot.setSeries(number + 1, { show: shown });
      });
    });
  }

  resize() {
    const { clientWidth } = this.holder;
    if (clientWidth && clientWidth !== this.plot.width) this.plot.setSize({ width: clientWidth, height: HEIGHT });
  }

  // Takes the colours of the page's theme.
  paint() {
    this.plot.redraw(false, true);
  }
}

function heading(text) {
  const head = document.createElement("div");
  head.className = "head";
  head.textContent = text;
  return head;
}

function faint(colour) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return `rgb(${r} ${g} ${b} / .18)`;
}

function width(plot, ticks) {
  const longest = (ticks ?? []).reduce((most, text) => Math.max(most, text.length), 0);
  return 18 + 7 * longest;
}

// The place of the value of a line that is nearest to a place of x: other curves have points between its own.
function nearest(data, line, at) {
  const values = data[line];
  if (line === 0 || values[at] != null) return at;
  let [before, after] = [at, at];
  while (before >= 0 && values[before] == null) before--;
  while (after < values.length && values[after] == null) after++;
  if (before < 0) return after < values.length ? after : at;
  if (after >= values.length) return before;
  return data[0][at] - data[0][before] <= data[0][after] - data[0][at] ? before : after;
}
