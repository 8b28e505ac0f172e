// Limits and use: sums of days, months, keys, tenants, models and the names that were asked for; and the limits of keys.

import { address, option } from "./address.js";
import { h } from "./dom.js";
import { compact, percent, seconds } from "./format.js";
import { get, query } from "./http.js";
import { Resource, choices, figured, link, section, table } from "./parts.js";
import { limitTexts } from "./limits.js";

const RANGES = { "1d": ["Today", 0], "7d": ["7 days", 6], "31d": ["31 days", 30] };
const GROUPS = [["tenant", "Tenant"], ["model", "Model"], ["name", "Name"], ["key", "Key"], ["day", "Day"]];
const EVERY_S = 30;
const DAY_S = 86_400;

/** A day of UTC, as usage is summed. */
const utcDay = (days) => new Date(Date.now() - days * DAY_S * 1000).toISOString().slice(0, 10);

function open(page) {
  const range = option(RANGES, page.params.range, "1d");
  const by = GROUPS.some(([name]) => name === page.params.by) ? page.params.by : page.session.admin ? "tenant" : "model";
  const groups = GROUPS.filter(([name]) => name !== "name" || page.session.names?.length || by === "name");
  const resource = new Resource(page, (signal) => get(query("/admin/usage", { by: by === "name" ? "name,model" : by, from: utcDay(RANGES[range][1]), to: utcDay(0) }), { signal }), EVERY_S);
  const keys = page.session.admin ? new Resource(page, "/admin/keys", 60) : null;
  return () => [
    h("h1", null, "Limits and use"),
    h("div", { class: "toolbar" },
      choices("Time", range, Object.entries(RANGES).map(([name, [label]]) => [name, label, address("usage", { range: name, by })])),
      choices("By", by, groups.map(([name, label]) => [name, `By ${label.toLowerCase()}`, address("usage", { range, by: name })]))),
    section("Use", { id: "use", note: "Days are of UTC." }, resource.show((answer) => use(answer.data, by))),
    keys ? section("Limits of keys", { id: "limits", aside: link("Keys", "#/keys") }, keys.show((answer) => limits(answer.data))) : null,
  ];
}

function use(rows, by) {
  const tokens = (row) => (row.prompt_tokens ?? 0) + (row.output_tokens ?? 0);
  const all = rows.reduce((sum, row) => sum + tokens(row), 0) || 1;
  const sorted = by === "day" ? rows.toSorted((a, b) => (a.day < b.day ? 1 : -1)) : rows.toSorted((a, b) => tokens(b) - tokens(a));
  const cost = rows.some((row) => row.cost_micro) ? [{ label: "Cost", cell: (row) => ((row.cost_micro ?? 0) / 1e6).toFixed(2), end: true }] : [];
  return table("Use", [
    { label: GROUPS.find(([name]) => name === by)[1], cell: (row) => row[by], lead: true },
    ...(by === "name" ? [{ label: "Model", name: true, cell: (row) => row.model }] : []),
    { label: "Tokens", cell: (row) => compact(tokens(row)), end: true },
    { label: "Share", cell: (row) => figured(tokens(row) / all, percent(tokens(row) / all)), end: true },
    { label: "Requests", cell: (row) => compact(row.requests), end: true },
    { label: "Prompt", cell: (row) => compact(row.prompt_tokens), end: true },
    { label: "Cached", cell: (row) => (row.prompt_tokens ? percent((row.cached_tokens ?? 0) / row.prompt_tokens) : ""), end: true },
    { label: "Output", cell: (row) => compact(row.output_tokens), end: true },
    { label: "Mean wait", cell: (row) => (row.requests ? seconds(row.wait_ms / 1000 / row.requests) : ""), end: true },
    ...cost,
  ], sorted, { key: (row) => `${row[by]}/${row.model ?? ""}`, none: "Nothing was used in these days." });
}

const limits = (rows) => table("Limits of keys", [
  { label: "Key", cell: (row) => row.name, lead: true },
  { label: "Tenant", name: true, cell: (row) => row.tenant },
  { label: "Highest class", cell: (row) => row.max_class },
  { label: "Limits", cell: (row) => limitTexts(row.limits).join(", ") || "those of auth.key_limits", wide: true },
  { label: "Limits of batches", cell: (row) => limitTexts(row.batch_limits).join(", ") || "none" },
], rows.filter((row) => row.state === "active"), { key: (row) => row.id, none: "No key." });

export const usage = { title: "Limits and use", open };
