// GPU memory: a map of each device with every lease, what waits for memory, defragmentation and drains.

import { h } from "./dom.js";
import { bytes, compact, count, percent, seconds, shortId } from "./format.js";
import { get, post } from "./http.js";
import { openDialog } from "./dialogs.js";
import { button, empty, field, input, section, table, warning } from "./parts.js";
import { mark } from "./words.js";

const FOLLOW_S = 1;

/** The drains that this session has begun, by target: they go on when the page is left. */
const followed = (page) => (page.session.drains ??= new Map());

const KINDS = [["engine", "engine"], ["session", "agent session"], ["reservation", "reservation for a start"], ["reserved", "not to be leased"], ["free", "free"]];

function open(page) {
  const state = { plan: null, problem: "" };
  if (page.session.admin) {
    loadPlan(page, state);
    page.every(20, () => loadPlan(page, state));
    page.every(FOLLOW_S, () => followDrains(page));
  }
  return () => {
    const live = page.live.object;
    if (!live) return [h("h1", null, "GPU memory"), h("p", { class: "empty", "aria-busy": "true" }, "Waiting for the first figures…")];
    const memory = live.memory ?? {};
    if (!page.session.admin) return [h("h1", null, "Agent sessions"), sessions(memory)];
    return [
      h("h1", null, "GPU memory"),
      head(memory),
      waiting(memory, state, page),
      drains(page),
      h("ul", { class: "kinds", "aria-label": "What the map shows" }, KINDS.map(([kind, text]) => h("li", null, h("span", { class: `swatch segment ${kind}`, "aria-hidden": "true" }), text))),
      h("div", { class: "nodes" }, byNode(memory.devices ?? []).map((node) => nodePart(node, page, live))),
      sessions(memory),
    ];
  };
}

function head(memory) {
  const devices = memory.devices ?? [];
  const total = devices.reduce((sum, device) => sum + device.total_bytes, 0);
  const free = devices.reduce((sum, device) => sum + device.free_bytes, 0);
  return h("dl", { class: "vitals" },
    vital("Devices", count(devices.length), bytes(total)),
    vital("Free", bytes(free), percent(total ? free / total : 0)),
    vital("Fragmentation", percent(memory.fragmentation), "of what is free fits no model"),
    vital("Engines waiting", count((memory.waiting ?? []).length), (memory.waiting ?? []).length ? "for memory" : "none"));
}

const vital = (name, value, detail) => h("div", null, h("dt", null, name), h("dd", null, h("strong", null, value), h("span", { class: "note" }, detail)));

function byNode(devices) {
  const nodes = new Map();
  for (const device of devices) {
    if (!nodes.has(device.node)) nodes.set(device.node, { node: device.node, address: device.address || shortId(device.node), devices: [] });
    nodes.get(device.node).devices.push(device);
  }
  return [...nodes.values()];
}

function nodePart(node, page, live) {
  return h("section", { class: "part node", key: node.node, "aria-label": `Node ${node.address}` },
    h("header", { class: "part-head" }, h("h2", null, `Node ${node.address}`),
      h("div", { class: "aside" }, button("Drain node…", () => askDrain(page, node.devices[0].address || node.node, true, restartsOf(node.devices)), { "aria-label": `Drain node ${node.address}…` }))),
    node.devices.map((device) => devicePart(device, page, live)));
}

/** A device is known by its number on its node, in some answers behind the node's id. */
const nameOf = (device) => String(device.device).replace(/^(?:.*\/)?(\d+)$/, "GPU $1");

const restartsOf = (devices) => [...new Set(devices.flatMap((device) => device.leases).filter((lease) => lease.kind === "engine").map((lease) => `${lease.owner} (${lease.model})`))];

function devicePart(device, page, live) {
  const used = device.total_bytes - device.free_bytes;
  const name = nameOf(device);
  return h("div", { class: "device", key: name },
    h("h3", null, name, h("span", { class: "note" }, `${bytes(device.free_bytes)} free of ${bytes(device.total_bytes)}`)),
    h("div", { class: "map", role: "img", "aria-label": `${name}: ${percent(used / device.total_bytes)} used. ${device.leases.map((lease) => `${lease.model ?? lease.owner} ${bytes(lease.bytes)}`).join(", ")}` },
      device.leases.map((lease) => segment(lease, device)), rest(device)),
    leases(device, page, live));
}

function segment(lease, device) {
  const part = lease.bytes / device.total_bytes;
  return h("span", { class: `segment ${lease.kind} ${/run|granted|active|loaded/i.test(lease.state) ? "" : "changing"}`, style: { "flex-grow": String(lease.bytes) }, title: `${lease.owner}: ${lease.model ?? ""} ${bytes(lease.bytes)} (${lease.kind}, ${lease.state})` },
    part > 0.08 ? h("b", null, lease.model ?? lease.owner) : null, part > 0.14 ? h("span", null, bytes(lease.bytes)) : null);
}

/** What is neither leased nor free was there before: other programs, and the reserve. */
function rest(device) {
  const leased = device.leases.reduce((sum, lease) => sum + lease.bytes, 0);
  const other = Math.max(0, device.total_bytes - device.free_bytes - leased);
  const part = (kind, amount, label) => amount > 0 ? h("span", { class: `segment ${kind}`, style: { "flex-grow": String(amount) }, title: `${label}: ${bytes(amount)}` },
    amount / device.total_bytes > 0.1 ? h("b", null, label) : null, amount / device.total_bytes > 0.2 ? h("span", null, bytes(amount)) : null) : null;
  return [part("reserved", other, "reserved"), part("free", device.free_bytes, "free")];
}

function leases(device, page, live) {
  const replicas = new Set(live.models.flatMap((model) => (model.replicas ?? []).map((replica) => replica.replica)));
  return table(`Leases of ${nameOf(device)}`, [
    { label: "Owner", cell: (row) => h("code", null, row.owner), lead: true },
    { label: "Model", name: true, cell: (row) => row.model },
    { label: "Kind", cell: (row) => h("span", { class: `kind ${row.kind}` }, row.kind) },
    { label: "State", cell: (row) => mark(row.state) },
    { label: "Memory", cell: (row) => bytes(row.bytes), end: true },
    { label: "Action", unseen: true, end: true, cell: (row) => replicas.has(row.owner) || row.kind === "engine" ? button("Drain…", () => askDrain(page, row.owner, false, [`${row.owner} (${row.model})`]), { "aria-label": `Drain ${row.owner}…` }) : " " },
  ], device.leases, { key: (row) => `${row.owner}/${row.kind}`, none: "Nothing is leased here." });
}

function sessions(memory) {
  return section("Agent sessions", { id: "sessions", note: "KV tokens that an agent has reserved." },
    table("Agent sessions", [
      { label: "Session", cell: (row) => h("code", null, row.session_id), lead: true },
      { label: "Tenant", name: true, cell: (row) => row.tenant },
      { label: "Model", name: true, cell: (row) => row.model },
      { label: "Replica", cell: (row) => row.replica ? h("code", null, row.replica) : "" },
      { label: "KV tokens", cell: (row) => compact(row.kv_tokens), end: true },
      { label: "Used", cell: (row) => compact(row.used), end: true },
    ], memory.sessions ?? [], { key: (row) => `${row.tenant}/${row.session_id}`, none: "No agent session is open." }));
}

async function loadPlan(page, state) {
  try {
    state.plan = await get("/admin/defrag", { signal: page.signal });
    state.problem = "";
  } catch (error) {
    if (page.signal.aborted) return;
    state.problem = error.message;
  }
  page.redraw();
}

function waiting(memory, state, page) {
  const rows = memory.waiting ?? [];
  if (!rows.length && !state.problem) return null;
  return section("Engines that wait for memory", { id: "blocked" },
    table("Engines that wait for memory", [
      { label: "Engine", cell: (row) => h("code", null, row.owner), lead: true },
      { label: "Model", name: true, cell: (row) => row.model },
      { label: "Needs", cell: (row) => bytes(row.bytes), end: true },
      { label: "Why", cell: (row) => row.reason, wide: true },
    ], rows, { key: (row) => row.owner, none: "No engine waits." }),
    state.problem ? warning(`The plan of a defragmentation is not known: ${state.problem}`) : planPart(state, page));
}

function planPart(state, page) {
  const plan = state.plan?.plan;
  if (!state.plan) return null;
  if (!plan) return empty("No move of other engines would make room. Add GPUs, or lower kv_cache_gb or max_replicas.");
  return h("div", { class: "plan" },
    h("h3", null, `Plan: ${plan.steps.length === 1 ? "one move makes" : `${plan.steps.length} moves make`} room for ${plan.waits.model}`),
    steps(plan, state.plan.addresses),
    h("p", { class: "buttons" }, button("Defragment…", () => askDefrag(page, state), { class: "danger" })));
}

const place = (keys, addresses) => keys.map((key) => Object.entries(addresses ?? {}).reduce((text, [node, address]) => text.replace(node, address), key)).join(", ");

const steps = (plan, addresses) => h("ol", null, plan.steps.map((step) => h("li", null,
  h("code", null, step.owner), ` of ${step.model} restarts: ${place(step.source, addresses)} → ${place(step.target, addresses)}, ${bytes(step.bytes_to_move)} to load`)));

async function askDefrag(page, state) {
  const { plan, addresses } = state.plan;
  const begun = await openDialog({
    title: "Defragment GPU memory?", confirm: "Defragment", danger: true,
    body: [h("p", null, `${plan.waits.owner} of ${plan.waits.model} has waited ${seconds(plan.waits.waits_s)} for ${bytes(plan.waits.least_bytes)}. These engines drain and restart, one at a time; their requests finish or continue elsewhere:`), steps(plan, addresses), h("p", { class: "note" }, "A move that has finished is not undone.")],
    act: () => post("/admin/defrag"),
  });
  if (!begun) return;
  state.plan = begun;
  for (const step of begun.plan?.steps ?? []) followed(page).set(step.owner, { id: step.owner, name: `${step.owner} (${step.model})`, rows: null, note: "Its turn comes when the steps before it have ended.", unrecorded: begun.unrecorded });
  await loadPlan(page, state);
}

async function askDrain(page, name, isNode, restarts) {
  const within = input("within_s", { type: "number", min: 0, max: 86400, step: 1, inputmode: "numeric" });
  const begun = await openDialog({
    title: `Drain ${isNode ? "node" : "replica"} ${name}?`, confirm: "Drain", danger: true,
    body: [
      h("p", null, isNode ? "The node gets no new requests, and all its replicas end:" : "It gets no new requests. Serve starts another one in its place:"),
      h("ul", null, restarts.length ? restarts.map((text) => h("li", null, text)) : h("li", null, "no engine")),
      h("p", null, "Running requests finish, or continue elsewhere. A drain cannot be taken back."),
      field("Move what still runs after (seconds)", within, "Empty: the model's drain_s."),
    ],
    act: (form) => {
      const text = form.elements.within_s.value.trim();
      if (text && !(Number(text) >= 0 && Number(text) <= 86_400)) throw Object.assign(new Error("Enter 0 to 86400 seconds."), { param: "within_s" });
      return post("/admin/drains", text ? { name, within_s: Number(text) } : { name });
    },
  });
  if (!begun) return;
  followed(page).set(begun.id, { id: begun.id, name, rows: null, unrecorded: begun.unrecorded });
  await followDrains(page);
}

async function followDrains(page) {
  for (const drain of followed(page).values()) {
    if (drain.ended || drain.isAsked) continue;
    drain.isAsked = true;
    try {
      const look = await get(`/admin/drains/${encodeURIComponent(drain.id)}`, { signal: page.signal });
      drain.problem = look.rows === null ? "The quota actor does not answer." : "";
      drain.rows = look.rows ?? drain.rows;
      const mine = (drain.rows ?? []).filter((row) => look.is_node || row.replica === drain.id);
      drain.ended = mine.length > 0 && mine.every((row) => row.ended) && !(look.left?.length > 0);
      drain.shown = mine;
    } catch (error) {
      if (!page.signal.aborted) drain.problem = error.message;
    } finally {
      drain.isAsked = false;
    }
  }
  if (followed(page).size) page.redraw();
}

function drains(page) {
  if (!followed(page).size) return null;
  return section("Drains", { id: "drains" }, h("ul", { class: "drains" }, [...followed(page).values()].map((drain) => {
    const rows = drain.shown ?? [];
    const figures = rows.map((row) => `${row.replica}: ${row.ended ? "ended" : `${seconds(row.left_s)} left`}, ${count(row.running)} running, ${count(row.finished)} finished, ${count(row.moved)} moved`);
    return h("li", { key: drain.id }, mark(drain.ended ? "drained" : "draining", drain.ended ? "ok" : "busy"), " ", h("b", null, drain.name), " ", h("span", { class: "note" }, figures.join(" · ") || drain.note || "asked"),
      drain.problem ? warning(drain.problem) : null, drain.unrecorded ? warning(`The audit record lacks it: ${drain.unrecorded}`) : null);
  })));
}

export const memory = { title: "GPU memory", tenantTitle: "Agent sessions", open };
