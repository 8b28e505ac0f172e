// Figures and times as texts. Null and undefined are unknown, and shown as a dash.

export const NOTHING = "–";
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const TENTHS = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const UNITS = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];

const isUnknown = (value) => value === null || value === undefined || Number.isNaN(value);

export function seconds(value) {
  if (isUnknown(value)) return NOTHING;
  if (value < 0.9995) return `${WHOLE.format(value * 1000)} ms`;
  if (value < 99.95) return `${TENTHS.format(value)} s`;
  if (value < 600) return `${WHOLE.format(value)} s`;
  if (value < 7200) return `${WHOLE.format(value / 60)} min`;
  return value < 172_800 ? `${WHOLE.format(value / 3600)} h` : `${WHOLE.format(value / 86_400)} d`;
}

export function bytes(value) {
  if (isUnknown(value)) return NOTHING;
  const [unit, size] = UNITS.find(([, least]) => value >= least) ?? ["B", 1];
  return `${size === 1 || value >= 99.95 * size ? WHOLE.format(value / size) : TENTHS.format(value / size)} ${unit}`;
}

export const count = (value) => (isUnknown(value) ? NOTHING : WHOLE.format(value));
export const compact = (value) => (isUnknown(value) ? NOTHING : value < 10_000 ? WHOLE.format(value) : SHORT.format(value));
export const rate = (value) => (isUnknown(value) ? NOTHING : value < 10 ? TENTHS.format(value) : compact(value));
export const percent = (value) => (isUnknown(value) ? NOTHING : `${WHOLE.format(value * 100)}%`);
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

const two = (number) => String(number).padStart(2, "0");
const moment = (time) => (typeof time === "number" ? new Date(time * 1000) : new Date(time));

/** The time of this browser's zone, with the day where it is not today. `time`: ISO, or seconds since 1970. */
export function clock(time, now = new Date()) {
  if (isUnknown(time) || time === "") return NOTHING;
  const at = moment(time);
  if (Number.isNaN(at.getTime())) return NOTHING;
  const hour = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  if (at.toDateString() === now.toDateString()) return hour;
  return `${DAY.format(at)}${at.getFullYear() === now.getFullYear() ? "" : ` ${at.getFullYear()}`} ${hour}`;
}

/** The ISO time so many seconds ago. */
export const ago = (span_s) => new Date(Date.now() - span_s * 1000).toISOString();
export const zone = () => Intl.DateTimeFormat().resolvedOptions().timeZone || "this browser's zone";
export const shortId = (id) => (id && id.length > 14 ? `${id.slice(0, 10)}…` : (id ?? NOTHING));
