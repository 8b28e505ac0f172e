// Requests: failed, slow, or waiting now; by id, tenant, name, model, class and outcome.

import { address, option } from "./address.js";
import { h, hold } from "./dom.js";
import { ago, clock, count, seconds, shortId } from "./format.js";
import { get, query } from "./http.js";
import { Resource, button, choices, field, input, link, section, select, table, values } from "./parts.js";
import { remember } from "./records.js";
import { CLASSES, byNumber, mark, modelText, waitText } from "./words.js";

const RANGES = { "10m": ["10 minutes", 600], "1h": ["An hour", 3600], "24h": ["A day", 86_400], "7d": ["A week", 604_800] };
const OUTCOMES = ["ok", "refused", "engine_failed", "internal_error", "cancelled_queued", "cancelled_running", "bad_request"];
const FILTERS = ["tenant", "name", "model", "class", "outcome"];
const MOST = 100;
const WAITING_EVERY_S = 2;
const EVERY_S = 15;

function open(page) {
  const { params } = page;
  const mode = ["failed", "slow", "waiting"].find((name) => params[name]) ?? "all";
  const range = option(RANGES, params.range, "1h");
  const asked = Object.fromEntries(FILTERS.map((name) => [name, params[name]]));
  const path = (signal) => get(query("/admin/requests", { ...asked, [mode]: mode === "all" ? "" : "1", since: mode === "waiting" ? "" : ago(RANGES[range][1]), limit: MOST }), { signal });
  const resource = new Resource(page, path, mode === "waiting" ? WAITING_EVERY_S : EVERY_S);
  const to = (changed) => address("requests", { ...asked, range, ...(mode === "all" ? {} : { [mode]: "1" }), ...changed });
  const modeLink = (name) => to({ failed: "", slow: "", waiting: "", ...(name === "all" ? {} : { [name]: "1" }) });
  const filters = form(page, mode, range);
  return () => [
    h("h1", null, "Requests"),
    h("div", { class: "toolbar" },
      choices("Which", mode, [["all", "All"], ["failed", "Failed"], ["slow", "Slowest"], ["waiting", "Waiting now"]].map(([name, label]) => [name, label, modeLink(name)])),
      mode === "waiting" ? null : choices("Time", range, Object.entries(RANGES).map(([name, [label]]) => [name, label, to({ range: name })]))),
    hold(filters),
    section(titleOf(mode), { id: "list", note: noteOf(resource) }, resource.show((answer) => (mode === "waiting" ? waitingTable(answer.data) : remember(page, answer.data) && endedTable(answer.data)))),
  ];
}

const titleOf = (mode) => ({ all: "The newest", failed: "Failed by an engine or inside", slow: "The slowest", waiting: "Waiting now" })[mode];
const noteOf = (resource) => (resource.data?.data.length >= MOST ? `The first ${MOST}: filter for others.` : null);

function form(page, mode, range) {
  const { params, session } = page;
  const onsubmit = (event) => {
    event.preventDefault();
    const { id, ...asked } = values(event.target);
    if (id) location.hash = `#/requests/${encodeURIComponent(id)}`;
    else page.go("requests", { ...asked, range, ...(mode === "all" ? {} : { [mode]: "1" }) });
  };
  return h("form", { class: "filters", role: "search", "aria-label": "Requests", onsubmit },
    field("Id of a request", input("id", { placeholder: "chatcmpl-…" })),
    session.admin ? field("Tenant", input("tenant", { value: params.tenant ?? "" })) : null,
    session.names?.length ? field("Name", select("name", [["", "any"], ...session.names], params.name)) : null,
    field("Model", select("model", [["", "any"], ...(session.models ?? [])], params.model)),
    field("Class", select("class", [["", "any"], ...CLASSES], params.class)),
    mode === "waiting" ? null : field("Outcome", select("outcome", [["", "any"], ...OUTCOMES.map((name) => [name, name.replaceAll("_", " ")])], params.outcome)),
    h("div", { class: "buttons" }, h("button", { type: "submit" }, "Search"), button("Clear", () => page.go("requests", { range, ...(mode === "all" ? {} : { [mode]: "1" }) }), { class: "quiet" })));
}

const id = (row) => link(shortId(row.request_id), `#/requests/${encodeURIComponent(row.request_id)}`, { title: row.request_id });

export function longestWait(row) {
  if (typeof row.waited_for === "string") return row.waited_for;
  return byNumber(row.waited_for)[0]?.[0];
}

const endedTable = (rows) => table("Requests, one a row", [
  { label: "Time", time: true, cell: (row) => clock(row.time), lead: true },
  { label: "Request", cell: id },
  { label: "Outcome", cell: (row) => [mark(row.outcome), row.refused ? h("span", { class: "note" }, ` ${row.refused}`) : null] },
  { label: "Class", cell: (row) => row.request_class },
  { label: "Tenant", name: true, cell: (row) => row.tenant },
  { label: "Model", name: true, cell: modelText },
  { label: "Waited", cell: (row) => seconds(row.wait_s), end: true },
  { label: "For", cell: (row) => (longestWait(row) && row.wait_s >= 0.005 ? waitText(longestWait(row)) : "") },
  { label: "First token", cell: (row) => seconds(row.first_token_s), end: true },
  { label: "Total", cell: (row) => seconds(row.total_s), end: true },
  { label: "Tokens", cell: (row) => (row.prompt_tokens === null || row.prompt_tokens === undefined ? "" : `${count(row.prompt_tokens)} + ${count(row.output_tokens ?? 0)}`), end: true },
], rows, { key: (row) => row.request_id, none: "No request fits." });

const waitingTable = (rows) => table("Requests that wait now, one a row", [
  { label: "Waits", cell: (row) => seconds(row.wait_s), lead: true },
  { label: "For", cell: (row) => waitText(row.waits_for), wide: true },
  { label: "Class", cell: (row) => row.request_class },
  { label: "Tenant", name: true, cell: (row) => row.tenant },
  { label: "Model", name: true, cell: modelText },
  { label: "Came", time: true, cell: (row) => clock(row.time) },
  { label: "Router", cell: (row) => row.router },
  { label: "Request", cell: (row) => h("code", { title: row.request_id }, shortId(row.request_id)) },
], rows.toSorted((a, b) => b.wait_s - a.wait_s), { key: (row) => row.request_id, none: "No request waits." });

export const requests = { title: "Requests", open };
