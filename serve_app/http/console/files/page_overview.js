// The first page: what needs attention, who waits and why, what each model does, what failed lately.

import { h } from "./dom.js";
import { NOTHING, ago, bytes, clock, compact, count, percent, plural, rate, seconds, shortId } from "./format.js";
import { get, query } from "./http.js";
import { namesOf, namesTable } from "./names.js";
import { Resource, empty, figured, link, meter, section, table } from "./parts.js";
import { remember } from "./records.js";
import { CLASSES, byNumber, mark, modelText, waitText } from "./words.js";

const LATELY_S = 600;
const EVERY_S = 20;
const NOW_S = 180; // the last whole minutes, of which a percentile is "now"
const FAILED_SHOWN = 5;
const MINUTE_MS = 60_000;

function open(page) {
  const failed = new Resource(page, (signal) => get(query("/admin/requests", { failed: true, since: ago(LATELY_S), limit: 50 }), { signal }), EVERY_S);
  const classes = new Resource(page, (signal) => get(query("/admin/history", { since: ago(LATELY_S), step_s: 60, by: "class" }), { signal }), EVERY_S);
  const tenants = page.session.admin
    ? new Resource(page, (signal) => get(query("/admin/history", { since: ago(LATELY_S), step_s: LATELY_S, by: "tenant" }), { signal }), EVERY_S) : null;
  const names = namesOf(page);
  return () => {
    const live = page.live.object;
    if (!live) return [h("h1", { class: "unseen" }, "Overview"), h("p", { class: "empty", "aria-busy": "true" }, "Waiting for the first figures…")];
    return [
      h("h1", { class: "unseen" }, "Overview"),
      attention(live, failed, page.session),
      vitals(live, failed, classes),
      h("div", { class: "columns" }, queues(live), tenants ? busiest(tenants) : pace(classes)),
      models(live, page.session),
      names ? section("Names, last hour", { id: "names", aside: link("By name", "#/history?by=name") }, names.show(namesTable)) : null,
      tenants ? h("div", { class: "columns" }, failures(failed, page), pace(classes)) : failures(failed, page),
    ];
  };
}

/** Everything that is wrong, in sentences; each leads to where more is known. */
function problems(live, failed, session) {
  const found = (live.missing ?? []).map((name) => ["bad", `No answer from ${name.replaceAll("_", " ")}.`, "#/events?kind=health"]);
  for (const model of live.models) {
    const lacking = model.running < model.wanted ? `runs ${model.running} of ${model.wanted} replicas` : "";
    if (["failed", "deploy_failed", "unhealthy"].includes(model.state)) found.push(["bad", `${model.model} is ${model.state.replaceAll("_", " ")}${lacking && ` and ${lacking}`}: ${model.reason || "no reason given"}`, "#/logs"]);
    else if (lacking) found.push(["warn", `${model.model} ${lacking}: ${model.reason || model.why || "starting"}`, "#/events"]);
    const ejected = (model.replicas ?? []).filter((replica) => replica.ejected).map((replica) => replica.replica);
    if (ejected.length) found.push(["warn", `${model.model}: a router has ejected ${ejected.join(", ")}.`, "#/events?kind=health"]);
    const silent = (model.replicas ?? []).filter((replica) => replica.silent).map((replica) => replica.replica);
    if (silent.length) found.push(["warn", `${model.model}: no reports from ${silent.join(", ")}.`, "#/memory"]);
    if (model.waiting_bound && model.waiting >= 0.8 * model.waiting_bound) found.push(["warn", `The queue of ${model.model} is ${percent(model.waiting / model.waiting_bound)} full.`, "#/requests?waiting=1"]);
  }
  for (const engine of live.memory?.waiting ?? []) found.push(["warn", `${engine.model}: an engine waits for ${bytes(engine.bytes)} of GPU memory${engine.reason ? `: ${engine.reason}` : ""}.`, "#/memory"]);
  for (const router of live.routers ?? []) if (!/running|healthy/i.test(router.state)) found.push(["warn", `Router ${router.name} is ${router.state.toLowerCase()}.`, "#/logs?source=router"]);
  for (const [name, number] of Object.entries(live.left_off ?? {})) found.push(["idle", `${count(number)} more ${name} than this page shows.`, null]);
  const losses = failed.data?.data.length ?? 0;
  if (losses) found.push(["bad", `${plural(losses, "request")} failed in the last 10 minutes.`, "#/requests?failed=1&range=10m"]);
  return found;
}

function attention(live, failed, session) {
  const found = problems(live, failed, session);
  const list = found.map(([kind, text, href]) => h("li", null, h("span", { class: `mark ${kind}` }, href && (session.admin || href.startsWith("#/requests")) ? link(text, href) : text)));
  return h("section", { class: "attention", "aria-label": "What needs attention" },
    found.length ? h("ul", null, list) : h("p", null, h("span", { class: "mark ok" }, "Nothing needs attention.")));
}

/** The worst class's 95th percentile over the last minutes. */
function slowest(classes) {
  const since = Date.now() - NOW_S * 1000;
  const rows = (classes.data?.data ?? []).filter((row) => new Date(row.time).getTime() >= since && row.first_token_p95_s !== null && row.first_token_p95_s !== undefined);
  return rows.sort((a, b) => b.first_token_p95_s - a.first_token_p95_s)[0];
}

function vitals(live, failed, classes) {
  const queued = live.models.flatMap((model) => model.queues ?? []);
  const waiting = live.models.reduce((sum, model) => sum + model.waiting, 0);
  const worst = slowest(classes);
  const total = (live.memory?.devices ?? []).reduce((sum, device) => sum + device.total_bytes, 0);
  const free = (live.memory?.devices ?? []).reduce((sum, device) => sum + device.free_bytes, 0);
  const oldest = Math.max(0, ...queued.map((queue) => queue.oldest_s));
  return h("dl", { class: "vitals" },
    vital("Waiting", count(waiting), queued.length ? `oldest ${seconds(oldest)}` : "nobody waits", "#/requests?waiting=1"),
    vital("First token, p95", worst ? seconds(worst.first_token_p95_s) : NOTHING, worst ? `class ${worst.name}, the slowest` : "no request lately", "#/history"),
    vital("Tokens/s", rate(sum(live.models, "tokens_per_s")), `${rate(sum(live.models, "requests_per_s"))} requests/s`, "#/history"),
    vital("Failed, 10 min", failed.data ? count(failed.data.data.length) : NOTHING, "failed by engine or router", "#/requests?failed=1&range=10m"),
    total ? vital("GPU memory free", bytes(free), `of ${bytes(total)}, ${percent(live.memory.fragmentation)} fragmented`, "#/memory") : null);
}

/** Null: of none it is known. */
function sum(rows, name) {
  const known = rows.map((row) => row[name]).filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((total, value) => total + value, 0) : null;
}

const vital = (name, value, detail, href) => h("div", null, h("dt", null, link(name, href)), h("dd", null, h("strong", null, value), h("span", { class: "note" }, detail)));

function queues(live) {
  const rows = live.models.flatMap((model) => (model.queues ?? []).map((queue) => ({ ...queue, model: model.model }))).filter((row) => row.waiting > 0)
    .sort((a, b) => CLASSES.indexOf(a.class) - CLASSES.indexOf(b.class) || b.oldest_s - a.oldest_s);
  const most = Math.max(1, ...rows.map((row) => row.waiting));
  return section("Who waits, and why", { id: "queues", aside: link("Single requests", "#/requests?waiting=1") },
    table("Waiting requests by class, tenant and model", [
      { label: "Class", cell: (row) => row.class, lead: true },
      { label: "Tenant", name: true, cell: (row) => link(row.tenant, `#/requests?waiting=1&${new URLSearchParams({ tenant: row.tenant })}`) },
      { label: "Model", name: true, cell: (row) => row.model },
      { label: "Waiting", cell: (row) => figured(row.waiting / most, count(row.waiting)), end: true },
      { label: "Oldest", cell: (row) => seconds(row.oldest_s), end: true },
      { label: "Waits for", cell: (row) => reasons(row.reasons), wide: true },
    ], rows, { key: (row) => `${row.class}/${row.tenant}/${row.model}`, none: "Nobody waits." }));
}

/** How many wait for what; one number alone says nothing more than the queue's own. */
function reasons(found) {
  const all = byNumber(found);
  return h("span", null, all.map(([reason, number], index) => [index ? ", " : "", all.length > 1 ? `${count(number)}\u00a0×\u00a0` : "", waitText(reason)]));
}

function busiest(tenants) {
  const draw = (answer) => {
    const byName = new Map();
    for (const row of answer.data) {
      const had = byName.get(row.name) ?? { name: row.name, tokens: 0, arrivals: 0 };
      had.tokens += (row.prompt_tokens ?? 0) + (row.output_tokens ?? 0);
      had.arrivals += row.arrivals ?? 0;
      byName.set(row.name, had);
    }
    const rows = [...byName.values()].sort((a, b) => b.tokens - a.tokens).slice(0, 8);
    const all = rows.reduce((total, row) => total + row.tokens, 0) || 1;
    return table("Use of the last ten minutes by tenant", [
      { label: "Tenant", name: true, cell: (row) => row.name, lead: true },
      { label: "Tokens", cell: (row) => compact(row.tokens), end: true },
      { label: "Share", cell: (row) => figured(row.tokens / all, percent(row.tokens / all)), end: true },
      { label: "Requests", cell: (row) => compact(row.arrivals), end: true },
    ], rows, { key: (row) => row.name, none: "No request in the last ten minutes.", isSmall: true });
  };
  return section("Busiest tenants, 10 min", { id: "tenants", aside: link("Over time", "#/history?by=tenant") }, tenants.show(draw));
}

function models(live, session) {
  const blocks = live.models.map((model) => modelBlock(model, session));
  return section("Models", { id: "models", aside: link("By model", "#/history?by=model") }, blocks.length ? h("div", { class: "models" }, blocks) : empty("No model is deployed."));
}

function modelBlock(model, session) {
  const kind = model.running < model.wanted && model.state === "running" ? "busy" : undefined;
  return h("article", { class: "model", key: model.model },
    h("header", null,
      h("h3", null, model.model), mark(model.state, kind),
      h("span", { class: "scale" }, model.cold ? "cold: starts with the next request" : model.wanted === null ? plural(model.running, "replica") : `${model.running} of ${plural(model.wanted, "replica")}`),
      h("span", { class: "flow" }, `${rate(model.tokens_per_s)} tokens/s · ${rate(model.requests_per_s)} requests/s`),
      h("span", { class: "flow" }, "queue ", meter(`Queue of ${model.model}`, model.waiting, model.waiting_bound, `${count(model.waiting)} / ${count(model.waiting_bound)}`))),
    h("p", { class: "note" }, [model.reason, model.why].filter(Boolean).join(" · ")),
    replicas(model, session));
}

function replicas(model, session) {
  const columns = [
    { label: "Replica", cell: (row) => h("code", null, row.replica), lead: true },
    { label: "State", cell: (row) => mark(row.ejected ? "ejected" : row.silent ? "silent" : row.draining ? "draining" : row.state) },
    session.admin && { label: "Node", name: true, cell: (row) => row.address || row.node },
    session.admin && { label: "Batch", cell: (row) => meter(`Batch of ${row.replica}`, row.slots_used, row.slots_total, `${count(row.slots_used)} / ${count(row.slots_total)}`, "") },
    session.admin && { label: "KV cache", cell: (row) => meter(`KV cache of ${row.replica}`, row.kv_used, row.kv_total, `${percent(row.kv_total ? row.kv_used / row.kv_total : 0)} of ${compact(row.kv_total)}`), wide: true },
  ].filter(Boolean);
  return model.replicas?.length ? table(`Replicas of ${model.model}`, columns, model.replicas, { key: (row) => row.replica }) : null;
}

function failures(failed, page) {
  const draw = (answer) => remember(page, answer.data) && table("Requests that failed in the last ten minutes", [
    { label: "Time", time: true, cell: (row) => clock(row.time), lead: true },
    { label: "Request", cell: (row) => link(shortId(row.request_id), `#/requests/${encodeURIComponent(row.request_id)}`) },
    { label: "Outcome", cell: (row) => mark(row.outcome) },
    { label: "Tenant", name: true, cell: (row) => row.tenant },
    { label: "Model", name: true, cell: modelText },
    { label: "After", cell: (row) => seconds(row.total_s), end: true },
  ], answer.data.slice(0, FAILED_SHOWN), { key: (row) => row.request_id, none: "No request failed in the last ten minutes." });
  return section("Failed lately", { id: "failed", aside: link("All failures", "#/requests?failed=1") }, failed.show(draw));
}

/** The last minute that each class has. */
function pace(classes) {
  const draw = (answer) => {
    const whole = answer.data.filter((row) => Date.parse(row.time) + MINUTE_MS <= Date.now());
    const last = new Map(whole.toSorted((a, b) => (a.time < b.time ? -1 : 1)).map((row) => [row.name, row]));
    const rows = [...last.values()].sort((a, b) => CLASSES.indexOf(a.name) - CLASSES.indexOf(b.name));
    return table("First tokens by class in the last minute", [
      { label: "Class", cell: (row) => row.name, lead: true },
      { label: "p50", cell: (row) => seconds(row.first_token_p50_s), end: true },
      { label: "p95", cell: (row) => seconds(row.first_token_p95_s), end: true },
      { label: "Refused", cell: (row) => count(row.refused), end: true },
    ], rows, { key: (row) => row.name, none: "No request in the last ten minutes.", isSmall: true });
  };
  return section("First token, last minute", { id: "pace", aside: link("Last hour", "#/history") }, classes.show(draw));
}

export const overview = { title: "Overview", open };
