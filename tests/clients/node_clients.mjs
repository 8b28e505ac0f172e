// Checks of clients for Node, as python_clients.py has them for Python.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(pathToFileURL(`${process.cwd()}/`));
const load = async (name) => import(pathToFileURL(require.resolve(name)));
const version = (name) => JSON.parse(readFileSync(`node_modules/${name}/package.json`)).version;
const assert = (fact, what) => { if (!fact) throw new Error(what ?? "not so"); };
const model = "tiny", messages = [{ role: "user", content: "Hello!" }], tokens = 700;
const baseURL = process.env.OPENAI_BASE_URL, apiKey = process.env.OPENAI_API_KEY;

const { default: OpenAI } = await load("openai");
const { generateText, generateObject, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createOpenAI } = await load("@ai-sdk/openai");
const { z } = await load("zod");
const weather = z.object({ unit: z.enum(["c", "f"]) });
const compatible = createOpenAICompatible({ name: "here", baseURL, apiKey, supportsStructuredOutputs: true })(model);
const responses = createOpenAI({ baseURL, apiKey }).responses(model);

const checks = [
  ["openai", "chat, stream", async () => {
    const client = new OpenAI();
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 5 });
    assert(answer.choices[0].message.content);
    let last;
    for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 5, stream: true })) last = chunk;
    assert(last.choices[0].finish_reason);
  }],
  ["openai", "responses", async () => {
    let last;
    const asked = { model, input: "Hello!", max_output_tokens: 5, stream: true };
    for await (const event of await new OpenAI().responses.create(asked)) last = event;
    assert(["response.completed", "response.incomplete"].includes(last.type), last.type);
  }],
  ["ai", "chat, stream", async () => {
    assert((await generateText({ model: compatible, prompt: "Hello!", maxOutputTokens: 5 })).text);
    let text = "";
    for await (const piece of streamText({ model: compatible, prompt: "Hello!", maxOutputTokens: 5 }).textStream) text += piece;
    assert(text);
  }],
  ["ai", "required tool", async () => {
    const tools = { weather: tool({ description: "Weather.", inputSchema: weather }) };
    const answer = await generateText({ model: compatible, tools, toolChoice: "required", prompt: "Weather?", maxOutputTokens: tokens });
    assert(answer.toolCalls.length && !answer.toolCalls[0].invalid, JSON.stringify(answer.toolCalls));
  }],
  ["ai", "structured output", async () => {
    const answer = await generateObject({ model: compatible, schema: weather, prompt: "Weather?", maxOutputTokens: tokens });
    weather.parse(answer.object);
  }],
  ["ai", "responses", async () => {
    assert((await generateText({ model: responses, prompt: "Hello!", maxOutputTokens: 5 })).text);
    let text = "";
    for await (const piece of streamText({ model: responses, prompt: "Hello!", maxOutputTokens: 5 }).textStream) text += piece;
    assert(text);
  }],
];
for (const [client, check, run] of checks) {
  let error = null;
  try { await run(); } catch (failure) { error = `${failure.name}: ${failure.message}`.slice(0, 600); }
  console.log(JSON.stringify({ client: `${client} (Node)`, version: version(client), check, error }));
}
