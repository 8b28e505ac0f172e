// What causes, outcomes and states mean, and how each is marked: by a shape and a word, and by colour as well.

import { h } from "./dom.js";

export const CLASSES = ["critical", "high", "normal", "low"];

/** Causes of a wait, and who is behind it: the model's capacity, the router's side, or limits. */
const WAITS = {
  turn: ["model", "other requests are first"],
  slots: ["model", "no free slot"],
  kv_tokens: ["model", "no free KV tokens"],
  placement: ["model", "its replicas are full"],
  kv_debt: ["model", "KV tokens overdrawn"],
  held_back: ["model", "held back for a larger request"],
  guard_slots: ["model", "slots kept for higher classes"],
  no_replica: ["start", "no replica runs"],
  session: ["client", "another request of its session"],
  quota_actor: ["router", "quota actor does not answer"],
  limit: ["limit", "a limit of its key or tenant"],
};

export const waitText = (reason) => WAITS[reason]?.[1] ?? String(reason ?? "").replaceAll("_", " ");
export const waitSide = (reason) => WAITS[reason]?.[0] ?? "router";

const STATES = {
  ok: ["ok", "running", "healthy", "active", "completed", "RUNNING", "HEALTHY", "met", "ready"],
  busy: ["starting", "STARTING", "in_progress", "validating", "finalizing", "cancelling", "upscaling", "downscaling", "updating", "loading", "draining", "STOPPING", "stopping", "ending", "UPDATING"],
  warn: ["refused", "expired", "warning", "blocked", "blocked: memory", "unhealthy", "ejected", "silent", "bad_request", "unauthorized"],
  bad: ["failed", "engine_failed", "internal_error", "error", "deploy_failed", "critical", "UNHEALTHY", "dead"],
};
const KINDS = new Map(Object.entries(STATES).flatMap(([kind, names]) => names.map((name) => [name, kind])));

export const kindOf = (state) => KINDS.get(state) ?? (/block|unhealth/i.test(state ?? "") ? "warn" : /fail/i.test(state ?? "") ? "bad" : "idle");

/** A state with its mark. `kind`: ok, busy, warn, bad or idle. */
export function mark(state, kind = kindOf(state)) {
  return h("span", { class: `mark ${kind}` }, String(state ?? "unknown").toLowerCase().replaceAll("_", " "));
}

/** The model of a request, and the name that it asked for, where that is another. */
export const modelText = (row) => (row.asked_model ? h("span", null, row.model, h("span", { class: "note" }, ` as ${row.asked_model}`)) : row.model);

/** The largest of `reasons` first, as [reason, number]. */
export const byNumber = (reasons) => Object.entries(reasons ?? {}).filter(([, number]) => number > 0).sort((a, b) => b[1] - a[1]);
