// A chat box: what a client sees of one request, its place in the queue, its first token, and its receipt.

import { announce, h, hold } from "./dom.js";
import { seconds } from "./format.js";
import { HttpError, errorOf, headers, url } from "./http.js";
import { empty, field, input, link, select, warning } from "./parts.js";
import { CLASSES } from "./words.js";

const MAX_TOKENS = 256;
const REQUEST_ID = "x-serve-app-request-id";

function open(page) {
  const { session } = page;
  const chat = { turns: [], stop: null };
  const models = [...(session.models ?? []), ...(session.names ?? [])];
  if (!models.length) return () => [h("h1", null, "Chat"), empty("This key may use no model.")];
  const text = h("textarea", { id: "message", name: "message", rows: 3, required: true, onkeydown: (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  } });
  const send = h("button", { type: "submit", class: "primary" }, "Send");
  const stop = h("button", { type: "button", disabled: true, onclick: () => chat.stop?.abort() }, "Stop");
  const classes = session.classes?.length ? CLASSES.filter((name) => session.classes.includes(name)) : CLASSES;
  const form = h("form", { class: "chat-form", onsubmit: async (event) => {
    event.preventDefault();
    if (!text.value.trim() || chat.stop) return;
    const asked = { model: form.elements.model.value, priority: form.elements.priority.value, max_tokens: Number(form.elements.max_tokens.value) || MAX_TOKENS };
    chat.turns.push({ role: "user", content: text.value.trim() });
    text.value = "";
    send.disabled = true;
    stop.disabled = false;
    await ask(page, chat, asked);
    send.disabled = false;
    stop.disabled = true;
    text.focus();
  } },
  field("Message", text, "Enter sends, Shift+Enter begins a new line."),
  h("div", { class: "filters" },
    field("Model", select("model", models, models[0])),
    field("Class", select("priority", classes, classes.includes("normal") ? "normal" : classes[0])),
    field("At most tokens", input("max_tokens", { type: "number", min: 1, max: 100_000, value: MAX_TOKENS })),
    h("div", { class: "buttons" }, send, stop)));
  page.signal.addEventListener("abort", () => chat.stop?.abort());
  return () => [
    h("h1", null, "Chat"),
    h("div", { class: "turns", key: "turns", role: "log", "aria-label": "Conversation", tabindex: "0" }, chat.turns.length ? chat.turns.map(turn) : empty("A request from here is one of this key: it waits in the queue, counts towards limits, and leaves a receipt.")),
    hold(form),
  ];
}

function turn(item, index) {
  const facts = item.role === "user" ? null : h("p", { class: "note" }, [item.state, item.first_s === undefined ? null : `first token after ${seconds(item.first_s)}`, item.total_s === undefined ? null : `${seconds(item.total_s)} in all`].filter(Boolean).join(" · "),
    item.id ? [" · ", link("why it took so long", `#/requests/${encodeURIComponent(item.id)}`)] : null);
  return h("article", { class: `turn ${item.role}`, key: String(index), "aria-label": item.role === "user" ? "You" : "Answer" }, h("p", { class: "text" }, item.content), item.problem ? warning(item.problem) : null, facts);
}

async function ask(page, chat, asked) {
  const messages = chat.turns.filter((item) => item.content).map(({ role, content }) => ({ role, content }));
  const answer = { role: "assistant", content: "", state: "sent" };
  const began = performance.now();
  const passed_s = () => (performance.now() - began) / 1000;
  chat.turns.push(answer);
  chat.stop = new AbortController();
  page.redraw();
  try {
    await stream({ ...asked, messages, stream: true }, chat.stop.signal, {
      onId: (id) => { answer.id = id; },
      onPlace: (place) => { answer.state = place; },
      onText: (text) => {
        answer.first_s ??= passed_s();
        answer.state = "answering";
        answer.content += text;
      },
      onChange: () => page.redraw(),
    });
    answer.state = "answered";
  } catch (error) {
    answer.state = chat.stop.signal.aborted ? "stopped" : "failed";
    if (!chat.stop.signal.aborted) answer.problem = error.message;
  }
  answer.total_s = passed_s();
  chat.stop = null;
  page.redraw();
  announce(answer.problem ?? `Answer ${answer.state}.`);
}

/** Read a streamed chat completion. Raises HttpError. */
async function stream(body, signal, on) {
  let response;
  try {
    response = await fetch(url("/v1/chat/completions"), { method: "POST", headers: { ...headers(body), "X-Queue-Status": "1" }, credentials: "same-origin", body: JSON.stringify(body), signal });
  } catch (error) {
    if (signal.aborted) throw error;
    throw new HttpError(0, "The endpoint does not answer.");
  }
  if (response.headers.get(REQUEST_ID)) on.onId(response.headers.get(REQUEST_ID));
  if (!response.ok) throw await errorOf(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) readLine(line.trim(), on);
    on.onChange();
  }
}

function readLine(line, on) {
  const place = line.match(/^: queue position=(\d+)(?: expected_start_s=([\d.]+))?/);
  if (place) on.onPlace(`waits at place ${place[1]}${place[2] ? `, starts in about ${seconds(Number(place[2]))}` : ""}`);
  if (!line.startsWith("data:") || line === "data: [DONE]") return;
  const event = JSON.parse(line.slice(5));
  if (event.error) throw new HttpError(event.error.status ?? 503, event.error.message ?? "The stream broke off.", event.error.code);
  if (event.id) on.onId(event.id);
  const text = event.choices?.[0]?.delta?.content;
  if (text) on.onText(text);
}

export const chat = { title: "Chat", open };
