// Calls of the endpoint. The cookie says who calls; the header says that it is this page.

const ANSWER_MS = 40_000;
const JSON_TYPE = "application/json";

export class HttpError extends Error {
  constructor(status, message, code = "", param = "") {
    super(message);
    Object.assign(this, { status, code, param });
  }
}

/** Where the endpoint is: a proxy may have put it below a path. */
export const url = (path) => new URL(`..${path}`, document.baseURI).href;

let onSignedOut = () => {};

/** What to do when an answer says that the session has ended. */
export function whenSignedOut(act) {
  onSignedOut = act;
}

export const headers = (body) => ({
  "X-Serve-App-Console": "1",
  ...(body === undefined ? {} : { "Content-Type": JSON_TYPE }),
});

/** The JSON of an answer; null of an empty one. Raises HttpError; `status` 0: there was no answer. */
export async function call(method, path, body, { isSignIn = false, signal } = {}) {
  const bound = AbortSignal.timeout(ANSWER_MS);
  let answer;
  try {
    answer = await fetch(url(path), {
      method,
      headers: headers(body),
      credentials: "same-origin",
      cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: signal ? AbortSignal.any([signal, bound]) : bound,
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new HttpError(0, "The endpoint does not answer.");
  }
  if (answer.ok) return readJson(answer);
  const error = await errorOf(answer);
  if (error.status === 401 && !isSignIn) onSignedOut();
  throw error;
}

async function readJson(answer) {
  try {
    const text = await answer.text();
    return text ? JSON.parse(text) : null;
  } catch {
    throw new HttpError(0, "The answer broke off.");
  }
}

/** The error of an answer in OpenAI's form, or by its status. */
export async function errorOf(answer) {
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    error = {}; // a proxy's own page
  }
  const message = error.message || `The endpoint answered with status ${answer.status}.`;
  return new HttpError(answer.status, message, error.code ?? "", error.param ?? "");
}

export const get = (path, options) => call("GET", path, undefined, options);
export const post = (path, body = {}, options) => call("POST", path, body, options);
export const remove = (path, options) => call("DELETE", path, undefined, options);

/** A query; empty and missing values are left out. */
export function query(path, values) {
  const pairs = Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined && value !== false);
  const text = new URLSearchParams(pairs.map(([name, value]) => [name, value === true ? "1" : String(value)])).toString();
  return text ? `${path}?${text}` : path;
}
