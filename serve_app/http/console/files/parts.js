// The parts that pages are made of: sections, tables, meters, fields, and what is fetched again and again.

import { h } from "./dom.js";
import { NOTHING, clock, percent } from "./format.js";
import { get } from "./http.js";

export function section(title, { id, aside, note } = {}, ...children) {
  const heading = h("h2", { id: id ? `${id}-title` : null }, title);
  return h("section", { key: id, class: `part ${id ?? ""}`, "aria-labelledby": id ? `${id}-title` : null },
    h("header", { class: "part-head" }, heading, note ? h("p", { class: "note" }, note) : null, aside ? h("div", { class: "aside" }, aside) : null),
    ...children);
}

export const empty = (text) => h("p", { class: "empty" }, text);

export const warning = (text) => h("p", { class: "warning", role: "alert" }, text);

/**
 * A table; on a narrow screen each row becomes a block of its own, so roles are named.
 * `columns`: {label, cell(row), end: a figure, lead: the row's name, wide: takes what is left, time: is not broken, name: is cut when long, unseen: the label}.
 * `isSmall`: it stays a table on a narrow screen.
 */
export function table(caption, columns, rows, { key = null, none = "Nothing.", isSmall = false } = {}) {
  if (!rows.length) return empty(none);
  const head = columns.map((column) => h("th", { role: "columnheader", scope: "col", class: classes(column) },
    column.unseen ? h("span", { class: "unseen" }, column.label) : column.label));
  const body = rows.map((row) => h("tr", { role: "row", key: key ? key(row) : null }, columns.map((column) => cell(column, row))));
  return h("table", { role: "table", class: isSmall ? "small" : "stacked" },
    h("caption", { class: "unseen" }, caption),
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, head)),
    h("tbody", { role: "rowgroup" }, body));
}

function cell(column, row) {
  const content = column.cell(row);
  const isEmpty = content === null || content === undefined || content === "";
  const props = { class: classes(column), "data-label": column.unseen ? "" : column.label };
  if (column.lead) return h("th", { ...props, role: "rowheader", scope: "row" }, content);
  if (column.name) props.title = content instanceof Node ? content.textContent : content;
  return h("td", { ...props, role: "cell" }, isEmpty ? NOTHING : content);
}

const classes = (column) => [column.end && "end", column.lead && "lead", column.wide && "wide", column.time && "time", column.name && "name"].filter(Boolean).join(" ") || null;

/** A bar with its figure beside it. `kind`: warn or bad from 90% and 98% on, unless given. */
export function meter(label, used, total, text, kind = null) {
  const part = total > 0 ? Math.min(1, used / total) : 0;
  const level = kind ?? (part >= 0.98 ? "bad" : part >= 0.9 ? "warn" : "");
  const value = text ?? percent(part);
  const fill = h("span", { class: "fill", style: { width: `${(part * 100).toFixed(1)}%` } });
  return h("span", { class: `meter ${level}` },
    h("span", { class: "bar", role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100,
      "aria-valuenow": Math.round(part * 100), "aria-valuetext": value }, fill),
    h("span", { class: "value" }, value));
}

/** A figure behind a bar without a scale of its own, which says how much it is of the largest one. */
export const figured = (part, text) => h("span", { class: "bar-figure" },
  h("span", { class: "bar share", "aria-hidden": "true" }, h("span", { class: "fill", style: { width: `${(Math.min(1, part || 0) * 100).toFixed(1)}%` } })),
  h("span", { class: "figure" }, text));

export const button = (label, onclick, props = {}) => h("button", { type: "button", onclick, ...props }, label);
export const link = (label, href, props = {}) => h("a", { href, ...props }, label);

/** A labelled control. */
export function field(label, control, hint) {
  const hintId = hint ? `${control.id}-hint` : null;
  if (hintId) control.setAttribute("aria-describedby", hintId);
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control,
    hint ? h("p", { class: "hint", id: hintId }, hint) : null);
}

export const input = (id, props = {}) => h("input", { id, name: id, autocomplete: "off", spellcheck: "false", ...props });

/** `options`: values, or [value, label]. */
export function select(id, options, value, props = {}) {
  const pairs = options.map((option) => (Array.isArray(option) ? option : [option, option]));
  return h("select", { id, name: id, value: value ?? "", ...props }, pairs.map(([name, label]) => h("option", { value: name }, label)));
}

/** Links of which one is chosen: [name, label, href]. */
export function choices(label, chosen, options) {
  return h("nav", { class: "choices", "aria-label": label },
    options.map(([name, text, href]) => link(text, href, { "aria-current": name === chosen ? "true" : null })));
}

/** The fields of a form by name, without the empty ones. */
export function values(form) {
  const found = {};
  for (const element of form.elements) {
    if (!element.name || (element.type === "checkbox" && !element.checked)) continue;
    if (element.value.trim() !== "") found[element.name] = element.type === "checkbox" ? "1" : element.value.trim();
  }
  return found;
}

/** What is fetched when the page opens and every `everyS` seconds (0: once). Redraws the page with each answer. */
export class Resource {
  constructor(page, path, everyS = 0) {
    Object.assign(this, { page, path, data: null, error: null, at: null, isLoading: false });
    page.resources.push(this);
    if (everyS) page.every(everyS, () => this.refresh());
    this.refresh();
  }

  async refresh() {
    if (this.isLoading) return;
    this.isLoading = true;
    try {
      this.data = await (typeof this.path === "function" ? this.path(this.page.signal) : get(this.path, { signal: this.page.signal }));
      this.error = null;
      this.at = Date.now() / 1000;
    } catch (error) {
      if (this.page.signal.aborted) return;
      this.error = error;
    } finally {
      this.isLoading = false;
    }
    this.page.redraw();
  }

  /** Its rows, or what stands in their place. */
  show(draw) {
    if (this.error && !this.data) return warning(this.error.message);
    if (!this.data) return h("p", { class: "empty", "aria-busy": "true" }, "Loading…");
    return [this.error ? warning(`${this.error.message} These are the figures of ${clock(this.at)}.`) : null, incomplete(this.data), draw(this.data)];
  }
}

/** What is not in an answer: nodes, routers, records that a disk did not take. */
export function incomplete(answer) {
  if (!answer.missing?.length && answer.complete !== false) return null;
  return h("p", { class: "warning" }, `Incomplete. Missing: ${answer.missing?.length ? answer.missing.join(", ") : "some nodes"}.`);
}
