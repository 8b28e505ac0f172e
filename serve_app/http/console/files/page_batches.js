// Batches with their progress; a batch is cancelled with a key of its tenant.

import { h } from "./dom.js";
import { clock, count, percent } from "./format.js";
import { get, post } from "./http.js";
import { openDialog } from "./dialogs.js";
import { Resource, button, meter, section, table } from "./parts.js";
import { mark } from "./words.js";

const ENDED = ["completed", "failed", "expired", "cancelled"];
const EVERY_S = 15;

function open(page) {
  const own = new Resource(page, "/v1/batches?limit=100", EVERY_S);
  return () => {
    const rows = merged(own.data?.data ?? [], page.live.object?.batches ?? [], page.session.tenant);
    const running = rows.filter((row) => !ENDED.includes(row.status));
    return [
      h("h1", null, "Batches"),
      section("Running", { id: "running" }, own.show(() => list(running, page, own, "No batch runs."))),
      section("Ended", { id: "ended", note: page.session.admin ? `Of the tenant ${page.session.tenant}, and of others what ended lately.` : null }, own.show(() => list(rows.filter((row) => ENDED.includes(row.status)), page, own, "No batch has ended."))),
    ];
  };
}

/** A row for each batch: of the own tenant's from the API, with the live figures where there are some. */
function merged(own, live, tenant) {
  const rows = new Map(own.map((batch) => [batch.id, { id: batch.id, tenant, status: batch.status, ...batch.request_counts, created_at: batch.created_at, expires_at: batch.expires_at, endpoint: batch.endpoint, errors: batch.errors?.data }]));
  for (const batch of live) rows.set(batch.id, { ...rows.get(batch.id), ...batch });
  return [...rows.values()].sort((a, b) => seconds(b.created_at) - seconds(a.created_at));
}

const seconds = (time) => (typeof time === "number" ? time : Date.parse(time) / 1000 || 0);

function list(rows, page, own, none) {
  return table("Batches", [
    { label: "Batch", cell: (row) => h("code", null, row.id), lead: true },
    { label: "Tenant", name: true, cell: (row) => row.tenant },
    { label: "Status", cell: (row) => [mark(row.status), row.errors?.length ? h("span", { class: "note" }, ` ${row.errors[0].message}`) : null] },
    { label: "Progress", cell: (row) => progress(row), wide: true },
    { label: "Failed", cell: (row) => count(row.failed ?? 0), end: true },
    { label: "Made", time: true, cell: (row) => clock(row.created_at) },
    { label: "Window ends", time: true, cell: (row) => clock(row.expires_at) },
    { label: "Action", unseen: true, end: true, cell: (row) => action(row, page, own) },
  ], rows, { key: (row) => row.id, none });
}

function progress(row) {
  if (!row.total) return h("span", { class: "note" }, "rows not counted yet");
  const done = (row.completed ?? 0) + (row.failed ?? 0);
  return meter(`Rows of ${row.id}`, done, row.total, `${count(done)} / ${count(row.total)} rows${row.total ? `, ${percent(done / row.total)}` : ""}`, "");
}

function action(row, page, own) {
  if (ENDED.includes(row.status) || row.status === "cancelling") return " ";
  if (row.tenant !== page.session.tenant) return h("span", { class: "note" }, `a key of ${row.tenant} cancels it`);
  return button("Cancel…", () => askCancel(row, own), { "aria-label": `Cancel ${row.id}…` });
}

async function askCancel(row, own) {
  const cancelled = await openDialog({
    title: "Cancel this batch?", confirm: "Cancel the batch", cancel: "Let it run", danger: true,
    body: [h("p", null, h("code", null, row.id)), h("p", null, `${count(row.completed ?? 0)} of ${count(row.total)} rows have an answer and keep it. No more rows start; rows that run have ten minutes.`)],
    act: () => post(`/v1/batches/${encodeURIComponent(row.id)}/cancel`),
  });
  if (cancelled) await own.refresh();
}

export const batches = { title: "Batches", open };
