// The checks of clients for Node, as the modules beside this one have them for Python.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(pathToFileURL(`${process.cwd()}/`));
const load = async (name) => import(pathToFileURL(require.resolve(name)));
const version = (name) => JSON.parse(readFileSync(`node_modules/${name}/package.json`)).version;
const assert = (fact, what) => { if (!fact) throw new Error(what ?? "not so"); };
const pause = (ms) => new Promise((done) => setTimeout(done, ms));
const model = "tiny", slow = "slow", busyModel = "busy", embed = "tiny-embed", tokens = 700, manyTokens = 8000;
const messages = [{ role: "user", content: "Hello!" }], prompt = "Hello!";
const baseURL = process.env.OPENAI_BASE_URL, apiKey = process.env.OPENAI_API_KEY, lowKey = process.env.CLIENTS_LOW_KEY;
const limitedKey = process.env.CLIENTS_LIMITED_KEY, limitedCalls = 5;
const past = { "X-Deadline-Ms": "100" };

const { default: OpenAI } = await load("openai");
const { zodFunction, zodResponseFormat, zodTextFormat } = await load("openai/helpers/zod");
const { APICallError, RetryError, embedMany, generateText, generateObject, stepCountIs, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createOpenAI } = await load("@ai-sdk/openai");
const { z } = await load("zod");
const weather = z.object({ unit: z.enum(["c", "f"]) });
const weatherTool = { type: "function", function: { name: "weather", parameters: z.toJSONSchema(weather) } };

// As `metric`, `leaves`, `refused`, `raised` and `limited` of common.py.
const metric = async (name, labels) => {
  const text = await (await fetch(`${baseURL.replace(/\/v1$/, "")}/metrics`, { headers: { Authorization: `Bearer ${apiKey}` } })).text();
  const wanted = Object.entries(labels).map(([label, value]) => `${label}="${value}"`);
  let sum = 0;
  for (const [, found, value] of text.matchAll(new RegExp(`^${name}\\{(.*)\\} (\\S+)$`, "gm")))
    if (wanted.every((one) => found.split(",").includes(one))) sum += Number(value);
  return sum;
};
const leaves = async (call) => {
  const ended = () => metric("serve_app_requests_total", { model: slow, outcome: "cancelled_running" });
  const before = await ended();
  await call();
  let seen;
  for (const until = Date.now() + 10_000; Date.now() < until; await pause(50)) {
    seen = [await ended() - before, await metric("serve_app_engine_running_sequences", { model: slow })];
    if (seen[0] === 1 && seen[1] === 0) return;
  }
  throw new Error(`requests cancelled, sequences running: ${seen}, not 1,0`);
};
const retryAfterS = async () => {
  const headers = { Authorization: `Bearer ${lowKey}`, "Content-Type": "application/json" };
  const body = JSON.stringify({ model: busyModel, prompt: "a", max_tokens: 1 });
  return Number((await fetch(`${baseURL}/completions`, { method: "POST", headers, body })).headers.get("retry-after"));
};
const refused = async (reason, times, call) => {
  const count = () => metric("serve_app_refusals_total", { model: busyModel, reason });
  const toldS = reason === "queue_full" ? await retryAfterS() : 0;
  const before = await count(), began = Date.now();
  await call();
  const waitedS = (Date.now() - began) / 1000, seen = await count() - before;
  assert(seen === times, `${seen} requests were refused with ${reason}, not ${times}`);
  assert(waitedS >= 0.9 * toldS, `repeated after ${waitedS} s, told to wait ${toldS} s`);
};
const raised = async (kind, call) => {
  let got;
  try { got = await call(); } catch (error) {
    assert(kind.isInstance ? kind.isInstance(error) : error.constructor === kind, `${error.name}: ${error.message}`);
    return error;
  }
  throw new Error(`${kind.name} expected, not ${JSON.stringify(got)}`);
};
const limited = async (calls, kind, last) => {
  const count = () => metric("serve_app_limited_total", { reason: "rate_limit" });
  const before = await count();
  await Promise.all(Array.from({ length: limitedCalls }, () => calls()));
  assert(await count() > before, "no call was refused: this shows nothing");
  for (let number = 0; number < limitedCalls; number++)
    try { await last(); } catch (error) {
      assert(kind.isInstance ? kind.isInstance(error) : error.constructor === kind, `${error.name}: ${error.message}`);
      return error;
    }
  throw new Error(`${limitedCalls} calls without retries were answered`);
};

const compatible = (name = model, options = {}) =>
  createOpenAICompatible({ name: "here", baseURL, apiKey, supportsStructuredOutputs: true, includeUsage: true, ...options })(name);
const responses = createOpenAI({ baseURL, apiKey }).responses(model);
const brief = "Answer briefly.", parts = [{ type: "text", text: "The weather " }, { type: "text", text: "here?" }], warm = "warm";
// Of an answer that ends by itself: `parse` and `stream` raise where it is cut; and of one that calls a tool.
const ending = { tool_choice: "none", structured_outputs: { choice: ["Warm.", "Cold."] } };
const calling = { tool_choice: "required", structured_outputs: null };
const stored = (history) => JSON.parse(JSON.stringify(history)); // as an application reads it back that keeps its chats
const read = async (stream) => { let text = ""; for await (const piece of stream) text += piece; return text; };

const checks = {
  openai: {
    "chat, stream": async () => {
      const client = new OpenAI();
      const answer = await client.chat.completions.create({ model, messages, max_tokens: 5 });
      assert(answer.choices[0].message.content);
      let last;
      for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 5, stream: true })) last = chunk;
      assert(last.choices[0].finish_reason);
    },
    "usage of a stream": async () => {
      let last;
      const asked = { model, messages, max_tokens: 5, stream: true, stream_options: { include_usage: true } };
      for await (const chunk of await new OpenAI().chat.completions.create(asked)) last = chunk;
      assert(last.choices.length === 0 && last.usage.completion_tokens > 0 && last.usage.completion_tokens <= 5);
    },
    "errors": async () => {
      const client = new OpenAI({ maxRetries: 0 });
      const missing = await raised(OpenAI.NotFoundError, () => client.chat.completions.create({ model: "no-such-model", messages }));
      assert(missing.code === "model_not_found" && missing.param === "model");
      const stranger = new OpenAI({ apiKey: "sk-nobody" });
      await raised(OpenAI.AuthenticationError, () => stranger.chat.completions.create({ model, messages }));
      const wrong = await raised(OpenAI.BadRequestError, () => client.chat.completions.create({ model, messages, top_p: 7, stream: true }));
      assert(wrong.param === "top_p");
    },
    "429": async () => {
      const low = new OpenAI({ apiKey: lowKey, maxRetries: 1 }), late = new OpenAI({ maxRetries: 1, defaultHeaders: past });
      await refused("queue_full", 2, () => raised(OpenAI.RateLimitError, () => low.chat.completions.create({ model: busyModel, messages })));
      await refused("deadline", 1, () => raised(OpenAI.RateLimitError, () => late.chat.completions.create({ model: busyModel, messages })));
    },
    "limited key": async () => {
      const call = (options) => () => new OpenAI({ apiKey: limitedKey, ...options }).chat.completions.create({ model, messages, max_tokens: 5 });
      const refusal = await limited(call(), OpenAI.RateLimitError, call({ maxRetries: 0 }));
      assert(refusal.code === "rate_limit", refusal.code);
    },
    "leaving a stream": () => leaves(async () => {
      const stream = await new OpenAI().chat.completions.create({ model: slow, messages, max_tokens: manyTokens, stream: true });
      for await (const chunk of stream) if (chunk.choices[0].delta.content) stream.controller.abort();
    }),
    "tools, streamed": async () => {
      let pieces = "";
      const asked = { model, messages, max_tokens: tokens, stream: true, tools: [weatherTool], tool_choice: "required" };
      for await (const chunk of await new OpenAI().chat.completions.create(asked))
        for (const call of chunk.choices[0]?.delta.tool_calls ?? []) if (call.index === 0) pieces += call.function.arguments ?? "";
      weather.parse(JSON.parse(pieces));
    },
    "structured output": async () => {
      const asked = { model, messages, max_tokens: tokens, response_format: zodResponseFormat(weather, "weather") };
      weather.parse((await new OpenAI().chat.completions.parse(asked)).choices[0].message.parsed);
      weather.parse((await new OpenAI().chat.completions.stream(asked).finalChatCompletion()).choices[0].message.parsed);
    },
    "two turns": async () => {
      const client = new OpenAI(), tools = [zodFunction({ name: "weather", parameters: weather })];
      const asked = { model, max_tokens: tokens, tools, ...ending };
      const complete = client.chat.completions;
      for (const answered of [
        async (body) => (await complete.create(body)).choices[0].message,
        async (body) => (await complete.parse(body)).choices[0].message,
        (body) => complete.stream(body).finalMessage(),
      ]) {
        const history = [{ role: "developer", content: brief }, { role: "user", content: parts }];
        const first = await answered({ ...asked, messages: history, ...calling });
        history.push(first, ...first.tool_calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content: warm })));
        history.push(await answered({ ...asked, messages: history }), ...messages);
        for (const given of [history, stored(history)]) assert((await answered({ ...asked, messages: given })).content);
      }
      const short = { model, max_output_tokens: tokens, ...ending, tools: [{ type: "function", ...tools[0].function }] };
      for (const answered of [
        async (body) => (await client.responses.create(body)).output,
        async (body) => (await client.responses.parse(body)).output,
        async (body) => (await client.responses.stream(body).finalResponse()).output,
      ]) {
        const content = parts.map(({ text }) => ({ type: "input_text", text }));
        const history = [{ role: "developer", content: brief }, { role: "user", content }];
        const first = await answered({ ...short, input: history, ...calling });
        const calls = first.filter(({ type }) => type === "function_call");
        history.push(...first, ...calls.map(({ call_id }) => ({ type: "function_call_output", call_id, output: warm })));
        history.push(...await answered({ ...short, input: history }), ...messages);
        for (const given of [history, stored(history)]) assert((await answered({ ...short, input: given })).length);
      }
    },
    "responses": async () => {
      let last;
      const asked = { model, input: prompt, max_output_tokens: 5, stream: true };
      for await (const event of await new OpenAI().responses.create(asked)) last = event;
      assert(["response.completed", "response.incomplete"].includes(last.type), last.type);
      const text = { format: zodTextFormat(weather, "weather") };
      const final = await new OpenAI().responses.stream({ model, input: prompt, max_output_tokens: tokens, text }).finalResponse();
      weather.parse(final.output_parsed);
    },
    "embeddings": async () => {
      const found = await new OpenAI().embeddings.create({ model: embed, input: ["a", "b"] });
      assert(found.data.length === 2 && found.data[1].embedding.length === found.data[0].embedding.length);
    },
  },
  ai: {
    "chat, stream": async () => {
      assert((await generateText({ model: compatible(), prompt, maxOutputTokens: 5 })).text);
      assert(await read(streamText({ model: compatible(), prompt, maxOutputTokens: 5 }).textStream));
    },
    "usage of a stream": async () => {
      const answer = streamText({ model: compatible(), prompt, maxOutputTokens: 5 });
      await read(answer.textStream);
      const usage = await answer.usage;
      assert(usage.outputTokens > 0 && usage.outputTokens <= 5, JSON.stringify(usage));
    },
    "errors": async () => {
      const asked = { prompt, maxRetries: 0, maxOutputTokens: 5 };
      const missing = await raised(APICallError, () => generateText({ ...asked, model: compatible("no-such-model") }));
      assert(missing.statusCode === 404 && missing.data.error.code === "model_not_found" && !missing.isRetryable);
      const stranger = await raised(APICallError, () => generateText({ ...asked, model: compatible(model, { apiKey: "sk-nobody" }) }));
      assert(stranger.statusCode === 401 && !stranger.isRetryable);
      const wrong = await raised(APICallError, () => generateText({ ...asked, model: compatible(), topP: 7 }));
      assert(wrong.statusCode === 400 && wrong.data.error.param === "top_p" && !wrong.isRetryable);
    },
    "429": async () => {
      const asked = { prompt, maxRetries: 1, maxOutputTokens: 5 };
      await refused("queue_full", 2, () => raised(RetryError, () => generateText({ ...asked, model: compatible(busyModel, { apiKey: lowKey }) })));
      await refused("deadline", 2, () => raised(RetryError, () => generateText({ ...asked, model: compatible(busyModel, { headers: past }) })));
      return "`ai` does not read `x-should-retry`: it repeats every 429.";
    },
    "limited key": async () => {
      const call = (options) => () => generateText({ model: compatible(model, { apiKey: limitedKey }), prompt, maxOutputTokens: 5, ...options });
      const refusal = await limited(call(), APICallError, call({ maxRetries: 0 }));
      assert(refusal.statusCode === 429 && refusal.data.error.code === "rate_limit", refusal.message);
    },
    "leaving a stream": () => leaves(async () => {
      const leaving = new AbortController();
      const answer = streamText({ model: compatible(slow), prompt, maxOutputTokens: manyTokens, abortSignal: leaving.signal });
      for await (const piece of answer.textStream) if (piece) leaving.abort();
    }),
    "tools, streamed": async () => {
      const tools = { weather: tool({ description: "Weather.", inputSchema: weather }) };
      const asked = { model: compatible(), tools, toolChoice: "required", prompt, maxOutputTokens: tokens };
      for (const calls of [(await generateText(asked)).toolCalls, await streamText(asked).toolCalls])
        assert(calls.length && !calls[0].invalid && weather.parse(calls[0].input), JSON.stringify(calls));
      const looping = { weather: tool({ description: "Weather.", inputSchema: weather, execute: async () => "warm" }) };
      const toolChoice = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
      const answer = await generateText({ ...asked, tools: looping, prepareStep: toolChoice, stopWhen: stepCountIs(2) });
      assert(answer.steps.length === 2 && answer.text, JSON.stringify(answer.steps.map((step) => step.finishReason)));
    },
    "structured output": async () => {
      const answer = await generateObject({ model: compatible(), schema: weather, prompt, maxOutputTokens: tokens });
      weather.parse(answer.object);
    },
    "two turns": async () => {
      const tools = { weather: tool({ description: "Weather.", inputSchema: weather, execute: async () => warm }) };
      const whole = (asked) => generateText(asked);
      const streamed = async (asked) => {
        const answer = streamText({ ...asked, onError: () => {} });
        return { text: await answer.text, response: await answer.response };
      };
      const statelessly = { openai: { store: false } };
      for (const [chosen, providerOptions] of [[compatible(), {}], [responses, statelessly]])
        for (const answered of [whole, streamed]) {
          const asked = { model: chosen, tools, toolChoice: "none", system: brief, maxOutputTokens: 5, maxRetries: 0, providerOptions };
          const history = [{ role: "user", content: parts }];
          const called = await answered({ ...asked, messages: history, toolChoice: "required", maxOutputTokens: tokens });
          history.push(...called.response.messages);
          history.push(...(await answered({ ...asked, messages: history })).response.messages, ...messages);
          for (const given of [history, stored(history)]) assert((await answered({ ...asked, messages: given })).text);
        }
      const plainly = [...messages, { role: "assistant", content: "Hello." }, ...messages];
      assert((await generateText({ model: responses, messages: plainly, maxOutputTokens: 5 })).text);
      const first = await generateText({ model: responses, messages, maxOutputTokens: 5 });
      const referring = [...messages, ...first.response.messages, ...messages];
      const refusal = await raised(APICallError, () => generateText({ model: responses, messages: referring, maxRetries: 0 }));
      assert(refusal.statusCode === 400 && refusal.message.includes("store: false"), refusal.message);
      return "With the Responses API its later turns need `providerOptions: { openai: { store: false } }`: else it refers to stored responses.";
    },
    "responses": async () => {
      assert((await generateText({ model: responses, prompt, maxOutputTokens: 5 })).text);
      assert(await read(streamText({ model: responses, prompt, maxOutputTokens: 5 }).textStream));
      weather.parse((await generateObject({ model: responses, schema: weather, prompt, maxOutputTokens: tokens })).object);
    },
    "embeddings": async () => {
      const provider = createOpenAICompatible({ name: "here", baseURL, apiKey });
      const found = await embedMany({ model: provider.embeddingModel(embed), values: ["a", "b"] });
      assert(found.embeddings.length === 2);
    },
  },
};
const chosen = process.env.CLIENTS_CHECKS?.split(";");
for (const [client, all] of Object.entries(checks))
  for (const [check, run] of Object.entries(all)) {
    if (chosen && !chosen.includes(check)) continue;
    let error = null, note = null;
    try { note = (await run()) ?? null; } catch (failure) { error = `${failure.name}: ${failure.message}`.slice(0, 600); console.error(failure); }
    console.log(JSON.stringify({ client: `${client} (Node)`, version: version(client), check, note, error }));
  }
