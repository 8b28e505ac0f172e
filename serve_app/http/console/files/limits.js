// The limits of a key: their names here, and the fields to set them.

import { count } from "./format.js";
import { field, input } from "./parts.js";

export const LIMITS = [
  ["requests_per_minute", "Requests a minute"],
  ["tokens_per_minute", "Tokens a minute"],
  ["max_concurrent", "Requests at once"],
  ["requests_per_day", "Requests a day"],
  ["tokens_per_day", "Tokens a day"],
  ["budget_per_month", "Budget a month"],
];

const NAMES = new Map([...LIMITS, ["burst_requests", "Burst of requests"], ["burst_tokens", "Burst of tokens"]]);

export const limitTexts = (limits) => Object.entries(limits ?? {}).map(([name, value]) => `${count(value)} ${(NAMES.get(name) ?? name).toLowerCase()}`);

export const limitFields = (limits) => LIMITS.map(([name, label]) => field(label, input(name, { type: "number", min: 1, step: "any", inputmode: "numeric", value: limits?.[name] ?? "", placeholder: "no limit" })));

/** The limits in a form; null: none is set there. Raises Error with the field's name in `param`. */
export function readLimits(form) {
  const found = {};
  for (const [name, label] of LIMITS) {
    const text = form.elements[name].value.trim();
    if (!text && !form.elements[name].validity.badInput) found[name] = null;
    else if (!(Number(text) > 0)) throw Object.assign(new Error(`${label}: enter a number above 0, or nothing.`), { param: name });
    else found[name] = Number(text);
  }
  return found;
}
