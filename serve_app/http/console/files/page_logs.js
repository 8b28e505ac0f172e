// The last lines of the logs of all nodes, in order of time.

import { h, hold } from "./dom.js";
import { ago, clock } from "./format.js";
import { get, query } from "./http.js";
import { Resource, button, empty, field, input, section, select, values } from "./parts.js";

const SOURCES = ["router", "batch", "controller", "proxy", "quota"];
const LEVELS = ["debug", "info", "warning", "error"];
const SINCE = [["", "any time"], ["600", "10 minutes"], ["3600", "an hour"], ["86400", "a day"]];
const LINES = ["100", "300", "1000"];

function open(page) {
  const { params, session } = page;
  const path = (signal) => get(query("/admin/logs", { source: params.source, level: params.level, replica: params.replica, request: params.request, since: params.since ? ago(Number(params.since)) : "", lines: params.lines ?? LINES[0] }), { signal });
  const resource = new Resource(page, path);
  const onsubmit = (event) => {
    event.preventDefault();
    const before = location.hash;
    page.go("logs", values(event.target));
    if (location.hash === before) resource.refresh();
  };
  const form = h("form", { class: "filters", role: "search", "aria-label": "Logs", onsubmit },
    field("Source", select("source", [["", "all"], ...(session.models ?? []), ...SOURCES], params.source)),
    field("Least level", select("level", [["", "any"], ...LEVELS], params.level)),
    field("Since", select("since", SINCE, params.since)),
    field("Lines", select("lines", LINES, params.lines ?? LINES[0])),
    field("Replica", input("replica", { value: params.replica ?? "" })),
    field("Request", input("request", { value: params.request ?? "" })),
    h("div", { class: "buttons" }, h("button", { type: "submit" }, "Show")));
  return () => [
    h("h1", null, "Logs"), hold(form),
    section("The last lines", { id: "lines", aside: button(resource.isLoading ? "Reading…" : "Read again", () => { resource.refresh(); page.redraw(); }) }, resource.show((answer) => lines(answer.data))),
  ];
}

function lines(rows) {
  if (!rows.length) return empty("No line fits.");
  return h("div", { class: "lines", role: "region", "aria-label": "Log lines", tabindex: "0" }, rows.map((row, index) => h("p", { key: `${row.path}/${row.time}/${index}`, class: levelOf(row.line) },
    h("span", { class: "note" }, `${clock(row.time)} ${row.source}${row.replica ? ` ${row.replica}` : ""}`), h("code", null, row.line))));
}

const levelOf = (line) => (/\b(ERROR|CRITICAL)\b|"level": ?"(error|critical)"/i.test(line.slice(0, 160)) ? "bad" : /\bWARN(ING)?\b/i.test(line.slice(0, 160)) ? "warn" : null);

export const logs = { title: "Logs", forOperators: true, open };
