// The audit record: who made, changed, deployed or drained what.

import { address, option } from "./address.js";
import { h } from "./dom.js";
import { ago, clock, shortId } from "./format.js";
import { get, query } from "./http.js";
import { Resource, choices, section, table } from "./parts.js";

const RANGES = { "24h": ["A day", 86_400], "7d": ["A week", 604_800], "90d": ["90 days", 7_776_000] };
const PAGE = 1000;
const PAGES = 5; // entries come the oldest first: these many pages reach the newest

/** All entries of the time, the newest first. */
async function load(span_s, signal) {
  const found = { data: [], complete: true, missing: [] };
  let cursor = "";
  for (let count = 0; count < PAGES; count += 1) {
    const page = await get(query("/admin/audit", { since: ago(span_s), limit: PAGE, cursor }), { signal });
    found.data.push(...page.data);
    if (!page.has_more) return { ...found, data: found.data.reverse() };
    cursor = page.next_cursor;
  }
  return { ...found, missing: ["newer entries: choose a shorter time"], data: found.data.reverse() };
}

function open(page) {
  const range = option(RANGES, page.params.range, "7d");
  const resource = new Resource(page, (signal) => load(RANGES[range][1], signal));
  return () => [
    h("h1", null, "Audit"),
    h("div", { class: "toolbar" }, choices("Time", range, Object.entries(RANGES).map(([name, [label]]) => [name, label, address("audit", { range: name })]))),
    section("Who changed what", { id: "list" }, resource.show((answer) => table("Audit record, the newest first", [
      { label: "Time", time: true, cell: (row) => clock(row.time), lead: true },
      { label: "Action", cell: (row) => row.action },
      { label: "Target", cell: (row) => h("code", { title: row.target }, shortId(row.target)) },
      { label: "By", cell: (row) => h("code", { title: row.author }, shortId(row.author)) },
      { label: "Tenant", name: true, cell: (row) => row.tenant },
      { label: "Details", cell: details, wide: true },
    ], answer.data, { key: (row) => row.id, none: "Nothing was changed in this time." }))),
  ];
}

function details(row) {
  const digests = row.digest_after ? [`configuration ${(row.digest_before ?? "none").slice(0, 8)} → ${row.digest_after.slice(0, 8)}`] : [];
  const own = Object.entries(row.details ?? {}).filter(([, value]) => value !== null && value !== "").map(([name, value]) => `${name.replaceAll("_", " ")}: ${typeof value === "object" ? JSON.stringify(value) : value}`);
  return [...digests, ...own].join(" · ");
}

export const audit = { title: "Audit", forOperators: true, open };
