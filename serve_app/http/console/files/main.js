// The shell: signing in, the menu, which page is shown, and whether its figures are fresh.

import { address } from "./address.js";
import { announce, h, morph, morphChildren } from "./dom.js";
import { zone } from "./format.js";
import { call, get, remove, whenSignedOut } from "./http.js";
import { Live } from "./live.js";
import { button, field, input, link, warning } from "./parts.js";
import { audit } from "./page_audit.js";
import { batches } from "./page_batches.js";
import { chat } from "./page_chat.js";
import { events } from "./page_events.js";
import { history } from "./page_history.js";
import { keys } from "./page_keys.js";
import { logs } from "./page_logs.js";
import { memory } from "./page_memory.js";
import { overview } from "./page_overview.js";
import { request } from "./page_request.js";
import { requests } from "./page_requests.js";
import { usage } from "./page_usage.js";

// Each page has `title`, `open(page)`, which returns its draw function, and `forOperators` where a tenant's key gets 403.
const MENU = [
  ["Now", { overview, memory, requests }],
  ["Over time", { history, events, usage }],
  ["Manage", { batches, keys, audit, logs }],
  ["Try", { chat }],
];
const PAGES = { ...Object.assign({}, ...MENU.map(([, pages]) => pages)), request };
const app = document.getElementById("app");

/** An open page. `params`: of its address; `signal`: aborted when it is left. */
class Page {
  #leave = new AbortController();
  #timers = [];

  constructor(name, params, session, live) {
    Object.assign(this, { name, params, session, live, resources: [] });
    this.signal = this.#leave.signal;
    this.root = h("div", { class: `page ${name}` });
  }

  every(seconds, act) {
    this.#timers.push(setInterval(act, seconds * 1000));
  }

  go(name, params = {}) {
    location.hash = address(name, params);
  }

  redraw() {
    if (!this.signal.aborted && this.draw) morphChildren(this.root, h("div", null, this.draw()));
  }

  close() {
    this.#leave.abort();
    this.#timers.forEach(clearInterval);
  }
}

function readAddress() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, id] = path.split("/");
  const params = Object.fromEntries(new URLSearchParams(query ?? ""));
  if (name === "requests" && id) return ["request", { ...params, id: decodeURIComponent(id) }];
  return [Object.hasOwn(PAGES, name) && name !== "request" ? name : "overview", params];
}

const titleOf = (name, session) => (!session.admin && PAGES[name].tenantTitle) || PAGES[name].title;

/** What a signed-in key sees. */
class Shell {
  constructor(session) {
    this.session = session;
    this.live = new Live((live, isNew) => this.#onLive(isNew));
    this.frame = h("div", { class: "frame" });
    this.main = h("main", { id: "main", tabindex: "-1" });
    this.onHash = () => this.#show(true);
    this.onTheme = () => this.#drawFrame();
    addEventListener("hashchange", this.onHash);
    document.addEventListener("theme", this.onTheme);
    app.replaceChildren(link("To the content", "#main", { class: "skip", onclick: (event) => { event.preventDefault(); this.main.focus(); } }), this.frame);
    this.#drawFrame();
    this.live.start();
    this.#show(false);
  }

  close() {
    this.live.stop();
    this.page?.close();
    removeEventListener("hashchange", this.onHash);
    document.removeEventListener("theme", this.onTheme);
  }

  #show(hasMoved) {
    this.page?.close();
    const last = this.page?.name;
    const chosen = document.activeElement;
    const [name, params] = readAddress();
    const isHidden = PAGES[name].forOperators && !this.session.admin;
    const page = new Page(isHidden ? "overview" : name, params, this.session, this.live);
    this.page = page;
    page.draw = PAGES[page.name].open(page);
    this.main.replaceChildren(page.root);
    this.#drawFrame();
    page.redraw();
    const title = titleOf(page.name, this.session);
    document.title = `${title} · serve-app`;
    if (!hasMoved) return;
    this.nav.removeAttribute("data-open");
    const same = page.name === last && [...this.main.querySelectorAll("a")].find((found) => found.href === chosen?.href && found.textContent === chosen.textContent);
    if (same) same.focus(); // a choice on the page, not another page
    else {
      scrollTo(0, 0);
      this.main.focus({ preventScroll: true });
    }
    announce(title);
  }

  #onLive(isNew) {
    this.#drawStatus();
    if (isNew) this.page?.redraw();
  }

  #drawFrame() {
    const frame = h("div", { class: "frame" }, this.#header(), this.#menu(), h("main", { "data-keep": true, id: "main", tabindex: "-1" }));
    if (!this.frame.firstChild) {
      this.frame.append(...frame.childNodes);
      this.frame.querySelector("main").replaceWith(this.main);
      this.main.dataset.keep = "";
    } else morphChildren(this.frame, frame);
    this.nav = this.frame.querySelector("nav.menu");
    this.#drawStatus();
  }

  #header() {
    const who = this.session.admin ? "operator" : `tenant ${this.session.tenant}`;
    return h("header", { class: "top", key: "top" },
      button("Menu", () => this.#toggleMenu(), { class: "menu-button quiet", "aria-controls": "menu", "aria-expanded": this.nav?.hasAttribute("data-open") ? "true" : "false" }),
      link("serve-app", "#/overview", { class: "brand" }),
      h("div", { class: "freshness", "data-keep": true }),
      h("div", { class: "account" },
        h("span", { class: "who", title: `Signed in with the key ${this.session.name}` }, `${this.session.name} (${who})`),
        button(`Theme: ${globalThis.consoleTheme.name}`, () => globalThis.consoleTheme.next(), { class: "quiet" }),
        button("Sign out", signOut, { class: "quiet" })));
  }

  #menu() {
    const current = this.page?.name === "request" ? "requests" : this.page?.name;
    const groups = MENU.map(([group, pages]) => {
      const shown = Object.entries(pages).filter(([, page]) => !page.forOperators || this.session.admin);
      return shown.length ? h("li", null, h("span", { class: "group" }, group),
        h("ul", null, shown.map(([name]) => h("li", null, link(titleOf(name, this.session), `#/${name}`, { "aria-current": name === current ? "page" : null }))))) : null;
    });
    const isOpen = this.nav?.hasAttribute("data-open");
    return h("nav", { class: "menu", id: "menu", key: "menu", "aria-label": "Pages", "data-open": isOpen ? "" : null, onkeydown: (event) => this.#onMenuKey(event) },
      h("ul", null, groups), h("p", { class: "zone" }, `Times: ${zone()}`));
  }

  #toggleMenu() {
    this.nav.toggleAttribute("data-open");
    this.#drawFrame();
    if (this.nav.hasAttribute("data-open")) this.nav.querySelector("a")?.focus();
  }

  #onMenuKey(event) {
    if (event.key !== "Escape" || !this.nav.hasAttribute("data-open")) return;
    this.#toggleMenu();
    this.frame.querySelector(".menu-button").focus();
  }

  #drawStatus() {
    const age = Math.round(this.live.ageMs / 1000);
    const [kind, text] = this.#freshness(age);
    const target = this.frame.querySelector(".freshness");
    morph(target.firstChild ?? target.appendChild(h("span")), h("span", { class: `mark ${kind}` }, text));
    this.frame.classList.toggle("stale", this.live.isStale && this.live.object !== null);
    if (this.shown && this.shown !== kind) announce(text); // once for each change, not each second
    this.shown = kind;
  }

  #freshness(age) {
    if (this.live.state === "away") return ["bad", this.live.object ? `Endpoint does not answer · last update ${age} s ago` : "Endpoint does not answer"];
    if (this.live.object === null) return ["idle", "Connecting…"];
    return this.live.isStale ? ["warn", `Last update ${age} s ago`] : ["ok", "Live"];
  }
}

let shell = null;

function leave(message) {
  shell?.close();
  shell = null;
  document.querySelectorAll("dialog").forEach((dialog) => dialog.close());
  showSignIn(message);
}

async function signOut() {
  try {
    await remove("/console/session");
    leave("You are signed out.");
  } catch (error) {
    leave(error.status === 401 ? "You are signed out." : `${error.message} The session may still be open: close the browser.`);
  }
}

function showSignIn(message) {
  document.title = "Sign in · serve-app";
  const problem = h("div", { class: "problem" }, message ? h("p", { class: "note", role: "status" }, message) : null);
  const key = input("key", { type: "password", required: true, autocomplete: "current-password" });
  const enter = h("button", { type: "submit", class: "primary" }, "Sign in");
  const onsubmit = async (event) => {
    event.preventDefault();
    enter.disabled = true;
    problem.replaceChildren();
    try {
      if (!key.value.trim()) throw new Error("Enter a key.");
      await call("POST", "/console/session", { key: key.value.trim() }, { isSignIn: true });
      key.value = "";
      await enterConsole();
    } catch (error) {
      problem.replaceChildren(warning(signInProblem(error)));
      key.focus();
      key.select();
    } finally {
      enter.disabled = false;
    }
  };
  const form = h("form", { class: "sign-in", onsubmit, novalidate: true },
    h("h1", null, "serve-app"), field("Key", key, "An operator's key shows everything, a tenant's key its own part."), problem, enter);
  app.replaceChildren(h("main", { class: "door" }, form));
  key.focus();
}

function signInProblem(error) {
  if (error.status === 401) return "No such key, or it is revoked or expired.";
  if (error.status === 0) return "The endpoint does not answer. Is serve-app running?";
  return error.message;
}

async function enterConsole() {
  const session = await get("/console/session", { isSignIn: true });
  shell = new Shell(session);
}

whenSignedOut(() => shell && leave("Signed out: the session has ended, or its key was revoked. Sign in again."));
enterConsole().catch((error) => showSignIn(error.status === 401 ? "" : signInProblem(error)));
