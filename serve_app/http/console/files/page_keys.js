// Keys: list, make, change limits, rotate, revoke. A key itself is shown once, when it is made.

import { h, hold } from "./dom.js";
import { clock } from "./format.js";
import { get, post, remove } from "./http.js";
import { openDialog, showSecret } from "./dialogs.js";
import { limitFields, limitTexts, readLimits } from "./limits.js";
import { Resource, button, field, input, section, select, table } from "./parts.js";
import { CLASSES, mark } from "./words.js";

const STORE_IT = "It is shown this once. Give it to its program, and close this.";
const HOUR_S = 3600;

function open(page) {
  const keys = new Resource(page, "/admin/keys");
  const state = { text: "" };
  const filter = input("text", { type: "search", oninput: (event) => { state.text = event.target.value.toLowerCase(); page.redraw(); } });
  const search = field("Name or tenant", filter);
  const fits = (row) => `${row.name} ${row.tenant} ${row.id}`.toLowerCase().includes(state.text);
  return () => [
    h("h1", null, "Keys"),
    h("div", { class: "toolbar" }, hold(search), button("Make a key…", () => makeKey(keys, page.session), { class: "primary" })),
    section("Keys", { id: "list" }, keys.show((answer) => list(answer.data.filter(fits), keys))),
  ];
}

const list = (rows, keys) => table("Keys", [
  { label: "Name", cell: (row) => row.name, lead: true },
  { label: "Tenant", name: true, cell: (row) => row.tenant },
  { label: "State", cell: (row) => [mark(row.state), row.previous_until && Date.parse(row.previous_until) > Date.now() ? h("span", { class: "note" }, ` old one until ${clock(row.previous_until)}`) : null] },
  { label: "Rights", cell: (row) => [row.admin && "operator", row.metrics && "metrics", row.deploy && "deploy", `class ${row.max_class}`].filter(Boolean).join(", ") },
  { label: "Models", cell: (row) => row.models?.join(", ") || (row.models ? "none" : "all") },
  { label: "Limits", cell: (row) => limits(row), wide: true },
  { label: "Expires", time: true, cell: (row) => (row.expires_at ? h("span", { title: clock(row.expires_at) }, row.expires_at.slice(0, 10)) : "never") },
  { label: "Actions", unseen: true, end: true, cell: (row) => actions(row, keys) },
], rows.toSorted((a, b) => (a.state === "active" ? 0 : 1) - (b.state === "active" ? 0 : 1)), { key: (row) => row.id, none: "No key fits." });

const limits = (row) => (row.limits ? limitTexts(row.limits).map((text) => h("span", { class: "limit" }, text)) : "default");

function actions(row, keys) {
  if (row.source === "configuration") return h("span", { class: "note" }, "of the configuration");
  if (row.state === "revoked") return " ";
  return h("span", { class: "actions" },
    button("Limits…", () => changeLimits(row, keys), { "aria-label": `Limits of ${row.name}…` }),
    button("Rotate…", () => rotate(row, keys), { "aria-label": `Rotate ${row.name}…` }),
    button("Revoke…", () => revoke(row, keys), { "aria-label": `Revoke ${row.name}…` }));
}

async function makeKey(keys, session) {
  const made = await openDialog({
    title: "Make a key", confirm: "Make the key",
    body: [
      h("div", { class: "fields" },
        field("Name", input("name", { maxlength: 64, required: true }), "In reports and in the audit record."),
        field("Tenant", input("tenant", { maxlength: 64, value: session.tenant ?? "default" }), "It never changes."),
        field("Highest class", select("max_class", CLASSES, "high")),
        field("Models", input("models", { placeholder: "all" }), "Names, with commas between them."),
        field("Expires", input("expires_at", { type: "date" }), "At the beginning of that day, UTC.")),
      h("fieldset", null, h("legend", null, "Rights"), check("admin", "Operator: sees and changes everything"), check("metrics", "Reads /metrics")),
      h("fieldset", null, h("legend", null, "Limits"), h("div", { class: "fields" }, limitFields())),
    ],
    act: (form) => post("/admin/keys", keyOf(form)),
  });
  if (!made) return;
  await keys.refresh();
  await showSecret(`The key of ${made.name}`, made.key, STORE_IT);
}

const check = (name, label) => h("p", { class: "check" }, input(name, { type: "checkbox", id: name }), h("label", { for: name }, label));

function keyOf(form) {
  const text = (name) => form.elements[name].value.trim();
  if (!text("name")) throw Object.assign(new Error("Name: enter one."), { param: "name" });
  const body = { name: text("name"), tenant: text("tenant") || "default", max_class: text("max_class"), admin: form.elements.admin.checked, metrics: form.elements.metrics.checked };
  const models = text("models").split(",").map((name) => name.trim()).filter(Boolean);
  const limits = Object.fromEntries(Object.entries(readLimits(form)).filter(([, value]) => value !== null));
  if (models.length) body.models = models;
  if (text("expires_at")) body.expires_at = `${text("expires_at")}T00:00:00Z`;
  if (Object.keys(limits).length) body.limits = limits;
  return body;
}

async function changeLimits(row, keys) {
  const key = await get(`/admin/keys/${encodeURIComponent(row.id)}`).catch(() => row);
  const ofTenant = limitTexts(key.effective_limits?.tenant);
  const changed = await openDialog({
    title: `Limits of ${row.name}`, confirm: "Set the limits",
    body: [h("p", { class: "note" }, ofTenant.length ? `All keys of ${row.tenant} together: ${ofTenant.join(", ")}.` : `The tenant ${row.tenant} has no limits of its own.`), h("div", { class: "fields" }, limitFields(key.limits))],
    act: (form) => post(`/admin/keys/${encodeURIComponent(row.id)}`, { limits: readLimits(form) }),
  });
  if (changed) await keys.refresh();
}

async function rotate(row, keys) {
  const grace = input("grace_s", { type: "number", min: 0, max: 2160, value: 24, inputmode: "numeric" });
  const made = await openDialog({
    title: `Rotate ${row.name}?`, confirm: "Rotate", danger: true,
    body: [h("p", null, "It gets a new key. Programs with the old one are refused after the grace."), field("Grace (hours)", grace, "0: the old key ends at once.")],
    act: (form) => {
      const hours = Number(form.elements.grace_s.value || 0);
      if (!(hours >= 0 && hours <= 2160)) throw Object.assign(new Error("Enter 0 to 2160 hours."), { param: "grace_s" });
      return post(`/admin/keys/${encodeURIComponent(row.id)}/rotate`, { grace_s: hours * HOUR_S });
    },
  });
  if (!made) return;
  await keys.refresh();
  await showSecret(`The new key of ${made.name}`, made.key, STORE_IT);
}

async function revoke(row, keys) {
  const done = await openDialog({
    title: `Revoke ${row.name}?`, confirm: "Revoke", danger: true,
    body: [h("p", null, `Programs of ${row.tenant} with this key are refused from now on. Requests that run are finished. This cannot be undone.`)],
    act: () => remove(`/admin/keys/${encodeURIComponent(row.id)}`),
  });
  if (done) await keys.refresh();
}

export const keys = { title: "Keys", forOperators: true, open };
