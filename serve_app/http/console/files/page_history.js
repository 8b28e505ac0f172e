// Charts of ten minutes, an hour or a day, by class, model, name or tenant.

import { address, option } from "./address.js";
import { h, hold } from "./dom.js";
import { Chart } from "./chart.js";
import { ago, compact, rate, seconds } from "./format.js";
import { get, query } from "./http.js";
import { Resource, choices } from "./parts.js";
import { CLASSES, waitText } from "./words.js";

const RANGES = { "10m": ["10 minutes", 600, 60], "1h": ["An hour", 3600, 60], "24h": ["A day", 86_400, 600] };
const EVERY_S = 30;
const WAITS_SHOWN = 6;

// What is charted: [title, note, format, value of a row and its minutes, whether nothing means zero].
const FIGURES = [
  ["First token, p95", "until 95 of 100 requests had it, logarithmic", seconds, (row) => row.first_token_p95_s, false],
  ["First token, p50", "the median, logarithmic", seconds, (row) => row.first_token_p50_s, false],
  ["Waiting", "at most so many at once in each step", compact, (row) => row.waiting_max, true],
  ["Output tokens/s", "mean of each step", rate, (row, step_s) => (row.output_tokens ?? 0) / step_s, true],
  ["Refusals a minute", "answered with 429 or 503", rate, (row, step_s) => ((row.refused ?? 0) * 60) / step_s, true],
];

function open(page) {
  const range = option(RANGES, page.params.range, "1h");
  const { admin, names } = page.session;
  const groups = ["class", "model", names?.length && "name", admin && "tenant", "total"].filter(Boolean);
  const by = groups.includes(page.params.by) ? page.params.by : "class";
  const [, span_s, step_s] = RANGES[range];
  const made = (title, note, format, isLog) => new Chart({ title, note, format, isLog, group: "history", signal: page.signal });
  const charts = FIGURES.map(([title, note, format]) => made(title, note, format, format === seconds));
  const waits = made("Waits by reason", "requests that waited for it, on average", rate, false);
  const resource = new Resource(page, (signal) => get(query("/admin/history", { since: ago(span_s + step_s), step_s, by }), { signal }), EVERY_S);
  const link = (changed) => address("history", { range, by, ...changed });
  let drawn = null;
  return () => {
    if (resource.data && drawn !== resource.data) {
      drawn = resource.data;
      setTimeout(() => !page.signal.aborted && update(charts, waits, drawn.data, span_s, drawn.step_s ?? step_s));
    }
    return [
      h("h1", null, "History"),
      h("div", { class: "toolbar" },
        choices("Time", range, Object.entries(RANGES).map(([name, [label]]) => [name, label, link({ range: name })])),
        choices("By", by, groups.map((name) => [name, name === "total" ? "Total" : `By ${name}`, link({ by: name })]))),
      resource.show(() => null),
      h("div", { class: "charts", key: "charts" }, [...charts, waits].map((chart) => hold(chart.root))),
    ];
  };
}

function update(charts, waits, rows, span_s, step_s) {
  const end = Math.floor(Date.now() / 1000 / step_s) * step_s;
  const steps = Math.floor(span_s / step_s); // whole ones: the present one is not at its end
  const times = Array.from({ length: steps }, (_, index) => end - (steps - index) * step_s);
  const place = new Map(times.map((time, index) => [time, index]));
  const at = (row) => place.get(Math.floor(new Date(row.time).getTime() / 1000 / step_s) * step_s);
  const names = [...new Set(rows.map((row) => row.name))].sort((a, b) => CLASSES.indexOf(a) - CLASSES.indexOf(b) || (a < b ? -1 : 1));
  FIGURES.forEach(([, , , value, isZero], index) => {
    const series = new Map(names.map((name) => [name, times.map(() => (isZero ? 0 : null))]));
    for (const row of rows) if (at(row) !== undefined) series.get(row.name)[at(row)] = value(row, step_s) ?? (isZero ? 0 : null);
    charts[index].update(times, [...series].map(([name, values], place) => ({ name, values, index: place })));
  });
  const reasons = new Map();
  for (const row of rows) {
    for (const [reason, waited] of Object.entries(row.waits ?? {})) {
      if (at(row) === undefined) continue;
      if (!reasons.has(reason)) reasons.set(reason, times.map(() => 0));
      reasons.get(reason)[at(row)] += waited / step_s;
    }
  }
  waits.update(times, [...reasons].map(([reason, values], place) => ({ name: waitText(reason), values, index: place })), WAITS_SHOWN);
}

export const history = { title: "History", open };
