// The live view: one object every two seconds by server-sent events, and how old it is.
//
// Invariant: a connection that is silent for `SILENT_MS` counts as lost, whatever the browser thinks of it.

import { get, url } from "./http.js";

const STALE_MS = 6_000; // three objects are missing
const SILENT_MS = 20_000;
const FIRST_RETRY_MS = 1_000;
const MAX_RETRY_MS = 15_000;
const TICK_MS = 1_000;

export class Live {
  /** `changed(live)`: called with each object, and each second with its age. */
  constructor(changed) {
    this.object = null;
    this.state = "connecting"; // connecting, live, away, signed out
    this.changed = changed;
    this.receivedAt = 0;
    this.retryMs = FIRST_RETRY_MS;
  }

  start() {
    this.openedAt = Date.now();
    this.#open();
    this.ticker = setInterval(() => this.#tick(), TICK_MS);
  }

  stop() {
    this.isStopped = true;
    clearInterval(this.ticker);
    clearTimeout(this.retry);
    this.source?.close();
  }

  get ageMs() {
    return this.object ? Date.now() - this.receivedAt : Date.now() - this.openedAt;
  }

  get isStale() {
    return this.state === "away" || this.ageMs > STALE_MS;
  }

  #open() {
    this.source?.close();
    this.openedAt = Date.now();
    const source = new EventSource(url("/console/live"));
    this.source = source;
    source.addEventListener("live", (event) => {
      if (source !== this.source) return;
      this.object = JSON.parse(event.data);
      this.receivedAt = Date.now();
      this.state = "live";
      this.retryMs = FIRST_RETRY_MS;
      this.changed(this, true);
    });
    source.onerror = () => this.#lose(source);
  }

  #lose(source) {
    if (source !== this.source || this.isStopped) return;
    source.close();
    this.source = null;
    this.state = "away";
    this.changed(this, false);
    clearTimeout(this.retry);
    this.retry = setTimeout(() => this.#return(), this.retryMs);
    this.retryMs = Math.min(this.retryMs * 2, MAX_RETRY_MS);
  }

  /** Ask who we are before the next try: an EventSource does not tell a signed-out session from a lost endpoint. */
  async #return() {
    try {
      await get("/console/session");
    } catch (error) {
      if (error.status === 401 || this.isStopped) return; // `whenSignedOut` has it
      this.#again();
      return;
    }
    if (!this.isStopped) this.#open();
  }

  #again() {
    this.retry = setTimeout(() => this.#return(), this.retryMs);
    this.retryMs = Math.min(this.retryMs * 2, MAX_RETRY_MS);
  }

  #tick() {
    const silentMs = Date.now() - Math.max(this.receivedAt, this.openedAt ?? 0);
    if (this.source && silentMs > SILENT_MS) this.#lose(this.source);
    else this.changed(this, false);
  }
}
