// One request: why it waited, where its time went, and whether the model or the router took it.

import { h } from "./dom.js";
import { NOTHING, clock, count, percent, plural, seconds } from "./format.js";
import { get } from "./http.js";
import { Resource, section, table } from "./parts.js";
import { completed } from "./records.js";
import { byNumber, mark, waitSide, waitText } from "./words.js";

const SHORT_S = 0.0005;

function open(page) {
  const { id } = page.params;
  const resource = new Resource(page, `/admin/requests/${encodeURIComponent(id)}`);
  return () => [
    h("p", { class: "crumb" }, h("a", { href: "#/requests" }, "Requests")),
    h("h1", { class: "id" }, id),
    resource.show((receipt) => [...contents(completed(page, receipt))]),
  ];
}

function* contents(receipt) {
  const parts = partsOf(receipt);
  const total = Math.max(receipt.total_s ?? 0, SHORT_S);
  yield h("p", { class: "verdict" }, mark(receipt.outcome), " ", h("strong", null, verdict(parts, receipt, total)));
  yield section("Where the time went", { id: "spent" }, timeline(parts, total), table("Parts of the request's time", [
    { label: "Part", cell: (part) => [h("span", { class: `key ${part.side}`, "aria-hidden": "true" }), part.label], lead: true, wide: true },
    { label: "Whose", cell: (part) => SIDES[part.side] },
    { label: "From", cell: (part) => seconds(part.from_s), end: true },
    { label: "Took", cell: (part) => seconds(part.took_s), end: true },
    { label: "Part", cell: (part) => percent(part.took_s / total), end: true },
  ], parts, { none: "It ended at once." }));
  const story = Array.isArray(receipt.story) ? receipt.story : [];
  if (story.length) yield section("Why did this wait", { id: "story" }, h("ul", { class: "story" }, story.map((sentence) => h("li", null, sentence))));
  yield section("Facts", { id: "facts" }, h("dl", { class: "pairs" }, facts(receipt).filter(([, value]) => value !== NOTHING).map(([name, value]) => [h("dt", null, name), h("dd", null, value)])));
}

const SIDES = { limit: "a limit", model: "model", start: "model: no replica", client: "client's session", router: "router", prefill: "model", decode: "model" };

/** The parts of the request's time, in order: waits by reason, the engine's first token, its other tokens. */
function partsOf(receipt) {
  const parts = [];
  let from_s = 0;
  const add = (label, side, took_s, why = "") => {
    if (!(took_s > SHORT_S)) return;
    parts.push({ label, side, from_s, took_s, why });
    from_s += took_s;
  };
  const wait_s = receipt.wait_s ?? 0;
  const limit_s = Math.min(receipt.limit_wait_s ?? 0, wait_s);
  add("Waited for a limit of its key or tenant", "limit", limit_s);
  const reasons = byNumber(receipt.waits).filter(([reason]) => reason !== "limit");
  let left_s = wait_s - limit_s;
  for (const [reason, waited_s] of reasons) {
    const took_s = Math.min(waited_s, left_s);
    add(`Waited: ${waitText(reason)}`, waitSide(reason), took_s, waitText(reason));
    left_s -= took_s;
  }
  add("Router: reading, placing, earlier attempts", "router", left_s);
  const total_s = receipt.total_s ?? 0;
  if (receipt.first_token_s !== null && receipt.first_token_s !== undefined) {
    add("Engine: until the first token", "prefill", receipt.first_token_s - from_s);
    add("Engine: the other tokens", "decode", total_s - from_s);
  } else if (receipt.granted ?? receipt.replica_id) add("On a replica, without a token", "prefill", total_s - from_s);
  else add("Router: until the end", "router", total_s - from_s);
  return parts;
}

function timeline(parts, total) {
  const text = parts.map((part) => `${part.label} ${seconds(part.took_s)}`).join(", ");
  return h("div", { class: "map timeline", role: "img", "aria-label": text || "No time" },
    parts.map((part) => h("span", { class: `segment ${part.side}`, style: { "flex-grow": String(part.took_s) }, title: `${part.label}: ${seconds(part.took_s)}` }, part.took_s / total > 0.12 ? h("b", null, seconds(part.took_s)) : null)));
}

/** Model or router? In one sentence. */
function verdict(parts, receipt, total) {
  const largest = parts.toSorted((a, b) => b.took_s - a.took_s)[0];
  if (!largest) return "It ended at once.";
  const amount = `${seconds(largest.took_s)} of ${seconds(total)}`;
  const cause = {
    limit: `Neither model nor router: it waited for a limit of its key or tenant, ${amount}`,
    model: `Model: it waited ${amount}, ${largest.why}`,
    start: `Model: no replica of it ran, for ${amount}`,
    client: `Neither model nor router: it waited ${amount}, ${largest.why}`,
    router: `Router: ${largest.why ? `it waited ${amount}, ${largest.why}` : `it spent ${amount} there`}`,
    prefill: `Model: the engine took ${amount} until the first token`,
    decode: `Model: the engine generated tokens for ${amount}`,
  }[largest.side];
  const losses = receipt.losses ? `; ${plural(receipt.losses, "replica")} ${receipt.losses === 1 ? "was" : "were"} lost under it` : "";
  return `${cause}${losses}.`;
}

const shown = (value, format = String) => (value === null || value === undefined || value === "" ? NOTHING : format(value));

function facts(receipt) {
  const listed = (items) => (items?.length ? items.map(([name, gap_s]) => `${name} after ${seconds(gap_s)}`).join(", ") : NOTHING);
  return [
    ["Arrived", clock(receipt.time)],
    ["Tenant", shown(receipt.tenant)],
    ["Key", shown(receipt.key_id)],
    ["Class", shown(receipt.request_class)],
    ["Model", shown(receipt.model)],
    ["Asked for", shown(receipt.asked_model)],
    ["Left", receipt.hops?.length ? receipt.hops.map(([model, reason]) => `${model}: ${reason.replaceAll("_", " ")}`).join(", ") : NOTHING],
    ["Client's id", shown(receipt.client_id)],
    ["Replica", `${shown(receipt.replica_id)}${receipt.route ? ` (${String(receipt.route).replaceAll("_", " ")})` : ""}`],
    ["Router", shown(receipt.router)],
    ["Refused", receipt.refused ? `${receipt.refused}, retry after ${seconds(receipt.retry_after_s)}` : NOTHING],
    ["Ahead when it came", byNumber(receipt.ahead).map(([name, number]) => `${count(number)} ${name}`).join(", ") || NOTHING],
    ["Tokens", `${shown(receipt.prompt_tokens, count)} prompt, ${shown(receipt.output_tokens, count)} output`],
    ["Estimated", `${shown(receipt.estimated_prompt, count)} prompt, ${shown(receipt.estimated_output, count)} output`],
    ["Between tokens", receipt.itl_s ? `${seconds(receipt.itl_s)}, longest pause ${seconds(receipt.longest_gap_s)}` : NOTHING],
    ["Replicas lost", shown(receipt.losses, count)],
    ["Continued on", listed(receipt.continued)],
    ["Stopped for others", shown(receipt.preempted, count)],
    ["Service level", shown(receipt.slo)],
    ["Trace", shown(receipt.trace_id)],
  ];
}

export const request = { title: "Request", open };
