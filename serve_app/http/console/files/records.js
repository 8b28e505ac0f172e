// Records of requests that a list has shown: the page of a request knows from them what its receipt does not have, such as
// the time of day and the router.

const MOST = 500;

/** Keep what a list shows, for this session; true. */
export function remember(page, records) {
  const kept = (page.session.records ??= new Map());
  for (const record of records) kept.set(record.request_id, record);
  for (const id of kept.keys()) {
    if (kept.size <= MOST) break;
    kept.delete(id);
  }
  return true;
}

/** The record of a receipt with what the receipt knows; the receipt alone, if no list has shown it. */
export function completed(page, receipt) {
  const record = page.session.records?.get(receipt.request_id);
  return record ? { ...record, ...receipt } : receipt;
}
