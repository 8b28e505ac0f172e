// Charts of the history: lines of several series over time, drawn by uPlot, with a legend that is a table of figures.

import { h } from "./dom.js";
import { NOTHING } from "./format.js";

const HEIGHT = 190;
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [5, 2], [1, 2]]; // with the colour, so that it is never colour alone
const COLOURS = 6;
const SVG = "http://www.w3.org/2000/svg";

/** A piece of a series' line. */
function sample(colour, dash) {
  const picture = document.createElementNS(SVG, "svg");
  const line = document.createElementNS(SVG, "line");
  for (const [name, value] of Object.entries({ class: "key", width: 28, height: 8, "aria-hidden": "true" })) picture.setAttribute(name, value);
  for (const [name, value] of Object.entries({ x1: 0, y1: 4, x2: 28, y2: 4, stroke: colour, "stroke-width": 2, "stroke-dasharray": dash.join(" ") })) line.setAttribute(name, value);
  picture.append(line);
  return picture;
}

const isPowerOfTen = (number) => Math.abs(Math.log10(number) - Math.round(Math.log10(number))) < 1e-6;

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/**
 * A chart with its legend. It is drawn anew by `update` and follows its width and the theme until `signal` is aborted.
 * `format`: of a value; `group`: charts of one group share their cursor; `isLog`: the scale is logarithmic.
 */
export class Chart {
  constructor({ title, note, format, group, signal, isLog = false }) {
    Object.assign(this, { title, format, group, isLog });
    this.canvas = h("div", { class: "canvas", role: "img", "aria-label": title });
    this.legend = h("table", { class: "legend" });
    this.none = h("p", { class: "empty" }, "Nothing in this time.");
    this.root = h("figure", { class: "chart" },
      h("figcaption", null, h("h2", null, title), note ? h("span", { class: "note" }, note) : null), this.canvas, this.none, this.legend);
    this.resizing = new ResizeObserver(() => this.#resize());
    this.resizing.observe(this.canvas);
    const redraw = () => this.#draw();
    document.addEventListener("theme", redraw);
    signal.addEventListener("abort", () => {
      document.removeEventListener("theme", redraw);
      this.resizing.disconnect();
      this.plot?.destroy();
    });
  }

  /** `times`: seconds since 1970; `series`: {name, values, index}, as many values as times; `index` gives its line. */
  update(times, series, limit = 8) {
    const total = (values) => values.reduce((sum, value) => sum + (value ?? 0), 0);
    this.times = times;
    this.series = series.filter(({ values }) => values.some((value) => value)).slice(0, 64);
    if (this.series.length > limit) this.series = this.series.toSorted((a, b) => total(b.values) - total(a.values)).slice(0, limit);
    this.#draw();
  }

  #colour = (index) => css(`--series-${(index % COLOURS) + 1}`);

  #draw() {
    if (!this.times) return;
    const isEmpty = this.series.length === 0;
    this.none.hidden = !isEmpty;
    this.canvas.hidden = isEmpty;
    this.legend.hidden = isEmpty;
    this.plot?.destroy();
    this.plot = null;
    if (isEmpty) return;
    this.#drawLegend();
    this.canvas.setAttribute("aria-label", `${this.title}: ${this.series.map(({ name }) => name).join(", ")}. The table below has the figures.`);
    const options = {
      width: Math.max(220, this.canvas.clientWidth), height: HEIGHT, legend: { show: false },
      padding: [8, 4, 0, 0], cursor: { sync: { key: this.group }, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: true }, y: this.isLog ? { distr: 3, log: 10 } : { range: (_, __, most) => [0, most > 0 ? most * 1.1 : 1] } },
      axes: [this.#axis({ space: 70, size: 28, values: this.#hours }), this.#axis({ size: 58, space: 28, values: this.#ticks })],
      series: [{}, ...this.series.map(({ name, index }) => ({ label: name, stroke: this.#colour(index), width: 1.75, dash: DASHES[index % DASHES.length], spanGaps: false, points: { size: 4, fill: this.#colour(index), show: this.times.length < 20 } }))],
      hooks: { setCursor: [(plot) => this.#showAt(plot.cursor.idx)] },
    };
    this.plot = new globalThis.uPlot(options, [this.times, ...this.series.map(({ values }) => (this.isLog ? values.map((value) => (value > 0 ? value : null)) : values))], this.canvas);
  }

  /** Of a logarithmic scale the powers of ten alone have a label. */
  #ticks = (_, ticks) => ticks.map((tick) => {
    if (tick === null || (this.isLog && !isPowerOfTen(tick))) return "";
    return tick === 0 ? "0" : this.format(tick);
  });

  #hours = (_, ticks) => ticks.map((tick) => new Date(tick * 1000).toTimeString().slice(0, 5));

  #axis(own) {
    const line = css("--line");
    const filter = (_, splits) => splits.map((split) => (this.isLog && own.values === this.#ticks && !isPowerOfTen(split) ? null : split));
    return { stroke: css("--muted"), font: `12px ${css("--font")}`, grid: { stroke: line, width: 1, filter }, ticks: { stroke: line, width: 1, size: 4, filter }, ...own };
  }

  #drawLegend() {
    this.figures = this.series.map(({ name, values, index }) => ({ name, values, index, now: h("td", { class: "end" }), most: Math.max(...values.map((value) => value ?? 0)) }));
    this.when = h("th", { scope: "col", class: "end" }, "Last");
    const rows = this.figures.map(({ name, now, most, index }) => h("tr", null,
      h("th", { scope: "row" }, sample(this.#colour(index), DASHES[index % DASHES.length]), name), now, h("td", { class: "end" }, this.format(most))));
    this.legend.replaceChildren(h("caption", { class: "unseen" }, this.title),
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "Series"), this.when, h("th", { scope: "col", class: "end" }, "Most"))), h("tbody", null, rows));
    this.#showAt(null);
  }

  /** The figures at a moment; null: the last ones. */
  #showAt(index) {
    if (!this.figures) return;
    const isLast = index === null || index === undefined;
    this.when.textContent = isLast ? "Last" : new Date(this.times[index] * 1000).toTimeString().slice(0, 5);
    for (const { now, values } of this.figures) {
      const value = isLast ? values.findLast((known) => known !== null && known !== undefined) : values[index];
      now.textContent = value === null || value === undefined ? NOTHING : this.format(value);
    }
  }

  #resize() {
    const width = this.canvas.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }
}
