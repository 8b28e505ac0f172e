// Decisions of scaling with their reasons, and events of health.

import { address, option } from "./address.js";
import { h, hold } from "./dom.js";
import { ago, clock } from "./format.js";
import { get, query } from "./http.js";
import { Resource, choices, field, input, section, table } from "./parts.js";
import { mark } from "./words.js";

const KINDS = [["", "All"], ["scaling", "Scaling"], ["health", "Health"]];
const RANGES = { "1h": ["An hour", 3600], "24h": ["A day", 86_400], "7d": ["A week", 604_800] };
const MOST = 500;
const EVERY_S = 10;
const LEVELS = { info: "ok", warning: "warn", error: "bad" };

function open(page) {
  const kind = page.params.kind ?? "";
  const range = option(RANGES, page.params.range, "24h");
  const resource = new Resource(page, (signal) => load(kind, ago(RANGES[range][1]), signal), EVERY_S);
  const state = { text: page.params.text ?? "" };
  const filter = input("text", { type: "search", value: state.text, oninput: (event) => { state.text = event.target.value; page.redraw(); } });
  const search = field("Subject or text", filter);
  return () => [
    h("h1", null, "Scaling and events"),
    h("div", { class: "toolbar" },
      choices("Kind", kind, KINDS.map(([name, label]) => [name, label, address("events", { range, kind: name })])),
      choices("Time", range, Object.entries(RANGES).map(([name, [label]]) => [name, label, address("events", { range: name, kind })])), hold(search)),
    section("Events", { id: "list" }, resource.show((answer) => list(answer.data.filter((event) => fits(event, state.text.toLowerCase()))))),
  ];
}

/** Of each kind the newest, so that many of one do not hide the other. */
async function load(kind, since, signal) {
  const kinds = kind ? [kind] : KINDS.map(([name]) => name).filter(Boolean);
  const answers = await Promise.all(kinds.map((name) => get(query("/admin/events", { since, kind: name, limit: MOST }), { signal })));
  return {
    data: answers.flatMap((answer) => answer.data).sort((a, b) => (a.time < b.time ? 1 : -1)),
    complete: answers.every((answer) => answer.complete),
    missing: [...new Set(answers.flatMap((answer) => answer.missing))],
  };
}

const fits = (event, text) => `${event.subject} ${event.message}`.toLowerCase().includes(text);

const list = (rows) => table("Scaling decisions and health events, the newest first", [
  { label: "Time", time: true, cell: (row) => clock(row.time), lead: true },
  { label: "Level", cell: (row) => mark(row.level, LEVELS[row.level]) },
  { label: "Kind", cell: (row) => row.kind },
  { label: "Subject", name: true, cell: (row) => row.subject },
  { label: "What happened, and why", cell: (row) => [h("span", null, row.message), details(row.details)], wide: true },
], rows, { key: (row) => `${row.time}/${row.subject}/${row.message}`, none: "No event fits." });

function details(found) {
  const pairs = Object.entries(found ?? {});
  if (!pairs.length) return null;
  return h("details", null, h("summary", null, "Details"), h("dl", { class: "pairs" }, pairs.map(([name, value]) => [h("dt", null, name.replaceAll("_", " ")), h("dd", null, typeof value === "object" ? JSON.stringify(value) : String(value))])));
}

export const events = { title: "Scaling and events", forOperators: true, open };
