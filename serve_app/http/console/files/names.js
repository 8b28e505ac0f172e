// The names that clients ask for instead of a model's: what stands behind each, and which of it ran in the last hour.

import { figured, Resource, table } from "./parts.js";
import { NOTHING, ago, count, percent } from "./format.js";
import { get, query } from "./http.js";

const SPAN_S = 3600;
const EVERY_S = 60;
const MOST = 20; // names, of which each asks for a history of its own

/** The names of this key with their histories; null: it has none. */
export function namesOf(page) {
  if (!page.session.names?.length) return null;
  return new Resource(page, async (signal) => {
    const named = (await get("/v1/models", { signal })).data.filter((card) => card.route);
    const cards = named.slice(0, MOST);
    const since = ago(SPAN_S);
    const found = await Promise.all(cards.map((card) => get(query("/admin/history", { name: card.id, by: "model", step_s: "all", since }), { signal })));
    const missing = [...new Set(found.flatMap((answer) => answer.missing ?? []))];
    if (named.length > MOST) missing.push(`the other ${named.length - MOST} names, which are in the history`);
    return { data: cards.flatMap((card, index) => rowsOf(card, found[index].data.filter((row) => row.name))), missing, complete: !missing.length };
  }, EVERY_S);
}

/** A row for each model behind a name, and for each other one that has run in this time. Of a shadow no run is counted. */
function rowsOf(card, history) {
  const parts = partsOf(card.route);
  const byModel = new Map(history.map((row) => [row.name, row]));
  const all = history.reduce((sum, row) => sum + row.arrivals, 0) || 1;
  return [...new Set([...parts.keys(), ...byModel.keys()])].map((model) => {
    const part = (parts.get(model) ?? ["not now"]).join(", ");
    if (model === card.route.shadow?.model && parts.get(model).length === 1 && !byModel.has(model)) return { name: card.id, model, part };
    const { arrivals = 0, failed = 0, left = 0 } = byModel.get(model) ?? {};
    return { name: card.id, model, part, ran: arrivals, share: arrivals / all, failed, left };
  });
}

/** What each model is to the name: its share by the weights, a fallback, the shadow. */
function partsOf({ targets, fallbacks, shadow }) {
  const parts = new Map();
  const add = (model, text) => parts.set(model, [...(parts.get(model) ?? []), text]);
  const whole = targets.reduce((sum, target) => sum + target.weight, 0);
  for (const { model, weight } of targets) add(model, percent(weight / whole));
  for (const model of fallbacks) add(model, "fallback");
  if (shadow) add(shadow.model, `shadow of ${percent(shadow.share)}`);
  return parts;
}

export const namesTable = (answer) => table("Names, and the models behind them, in the last hour", [
  { label: "Name", name: true, cell: (row) => row.name, lead: true },
  { label: "Model", name: true, cell: (row) => row.model },
  { label: "Set to", cell: (row) => row.part },
  { label: "Ran", cell: (row) => (row.share === undefined ? NOTHING : figured(row.share, percent(row.share))), end: true },
  { label: "Requests", cell: (row) => count(row.ran), end: true },
  { label: "Failed", cell: (row) => count(row.failed), end: true },
  { label: "Left for a fallback", cell: (row) => count(row.left), end: true },
], answer.data, { key: (row) => `${row.name}/${row.model}`, none: "No name." });
