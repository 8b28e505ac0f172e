// One turn with a tool, whole and streamed, by Anthropic's and OpenAI's SDKs for Node: a line of JSON for each.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(pathToFileURL(`${process.cwd()}/`));
const load = async (name) => import(pathToFileURL(require.resolve(name)));
const version = (name) => JSON.parse(readFileSync(`node_modules/${name}/package.json`)).version;
const assert = (fact, what) => { if (!fact) throw new Error(what ?? "not so"); };
const { ENDPOINT, API_KEY, MODEL, ANSWER } = process.env;
const tool = "read_note", description = "Read a note.", schema = { type: "object", properties: { name: { type: "string" } } };
const question = { role: "user", content: "Read the note." };

const { default: Anthropic } = await load("@anthropic-ai/sdk");
const { default: OpenAI } = await load("openai");
const anthropic = new Anthropic({ baseURL: ENDPOINT, apiKey: API_KEY, maxRetries: 0 });
const openai = new OpenAI({ baseURL: `${ENDPOINT}/v1`, apiKey: API_KEY, maxRetries: 0 });

const messages = async (answered) => {
  const asked = { model: MODEL, max_tokens: 500, tools: [{ name: tool, description, input_schema: schema }] };
  const first = await answered({ ...asked, messages: [question] });
  const call = first.content.find((block) => block.type === "tool_use");
  assert(first.stop_reason === "tool_use" && call.input.name, JSON.stringify(first));
  const result = { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "hello" }] };
  const second = await answered({ ...asked, messages: [question, { role: "assistant", content: first.content }, result] });
  assert(second.content[0].text === ANSWER && second.usage.output_tokens, JSON.stringify(second));
};
const chat = async (answered) => {
  const asked = { model: MODEL, tools: [{ type: "function", function: { name: tool, description, parameters: schema } }] };
  const said = (await answered({ ...asked, messages: [question] })).choices[0].message;
  assert(JSON.parse(said.tool_calls[0].function.arguments).name, JSON.stringify(said));
  const result = { role: "tool", tool_call_id: said.tool_calls[0].id, content: "hello" };
  const second = await answered({ ...asked, messages: [question, said, result] });
  assert(second.choices[0].message.content === ANSWER, JSON.stringify(second));
};
const responses = async (answered) => {
  const asked = { model: MODEL, store: false, tools: [{ type: "function", name: tool, description, parameters: schema, strict: false }] };
  const first = await answered({ ...asked, input: [question] });
  const call = first.output.find((item) => item.type === "function_call");
  assert(JSON.parse(call.arguments).name, JSON.stringify(first));
  const result = { type: "function_call_output", call_id: call.call_id, output: "hello" };
  const second = await answered({ ...asked, input: [question, ...first.output, result] });
  assert(second.output_text === ANSWER, JSON.stringify(second));
};

const checks = {
  "@anthropic-ai/sdk": [
    () => messages((body) => anthropic.messages.create(body)),
    () => messages((body) => anthropic.messages.stream(body).finalMessage()),
  ],
  openai: [
    () => chat((body) => openai.chat.completions.create(body)),
    () => chat((body) => openai.chat.completions.stream(body).finalChatCompletion()),
    () => responses((body) => openai.responses.create(body)),
    () => responses((body) => openai.responses.stream(body).finalResponse()),
  ],
};
for (const [client, runs] of Object.entries(checks)) {
  let error = null;
  try { for (const run of runs) await run(); } catch (failure) { error = `${failure.name}: ${failure.message}`.slice(0, 600); console.error(failure); }
  console.log(JSON.stringify({ client, version: version(client), error }));
}
