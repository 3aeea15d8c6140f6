// Ten calls of openai-node. node with_node.mjs http://127.0.0.1:8000 pocket-tools, beside a node_modules with openai and zod.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import path from "node:path";
import { pathToFileURL } from "node:url";

const require = createRequire(path.join(process.env.INGOT_NODE, "package.json"));
const load = (name) => import(pathToFileURL(require.resolve(name)));
const OpenAI = (await load("openai")).default;
const { zodResponseFormat, zodTextFormat } = await load("openai/helpers/zod");
const { z } = await load("zod");

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const chats = client.chat.completions;
const messages = [{ role: "user", content: "How much is 27 + 58?" }];
const number = { type: "integer", minimum: 0, maximum: 99 };
const parameters = { type: "object", properties: { a: number, b: number }, required: ["a", "b"], additionalProperties: false };
const add = { type: "function", function: { name: "add", parameters, strict: true } };
const Person = z.object({ name: z.enum(["Ann", "Bob"]), age: z.number().int().min(0).max(120) });

const calls = {
  async chat() {
    const answer = await chats.create({ model, messages });
    assert.match(answer.choices[0].message.content, /27 \+ 58 = 85/);
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  },
  async stream() {
    let text = "", usage;
    for await (const chunk of await chats.create({ model, messages, stream: true, stream_options: { include_usage: true } })) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.match(text, /27 \+ 58 = 85/);
    assert.ok(usage.completion_tokens > 0);
  },
  async tools() {
    const { choices } = await chats.create({ model, messages, tools: [add], tool_choice: "required" });
    assert.equal(choices[0].finish_reason, "tool_calls");
    assert.deepEqual(Object.keys(JSON.parse(choices[0].message.tool_calls[0].function.arguments)).sort(), ["a", "b"]);
  },
  async toolsStreamed() {
    const events = chats.stream({ model, messages, tools: [add], tool_choice: "required" });
    const { choices } = await events.finalChatCompletion();
    assert.deepEqual(Object.keys(choices[0].message.tool_calls[0].function.parsed_arguments).sort(), ["a", "b"]);
  },
  async toolResults() {
    let called = 0;
    const run = (values) => { called += 1; return String(values.a + values.b); };
    const tool = { type: "function", function: { ...add.function, function: run, parse: JSON.parse } };
    const tool_choice = { type: "function", function: { name: "add" } };
    const one = chats.runTools({ model, messages, tools: [tool], tool_choice });
    const last = await one.finalMessage();
    assert.equal(called, 1);
    const talk = [{ role: "developer", content: "Be brief." }, ...one.messages];
    assert.ok(last && (await chats.create({ model, messages: talk, tools: [add], max_tokens: 32 })).choices[0].message.content);
  },
  async structured() {
    const answer = await chats.parse({ model, messages, response_format: zodResponseFormat(Person, "person") });
    assert.ok(Person.parse(answer.choices[0].message.parsed));
  },
  async logprobs() {
    const { choices } = await chats.create({ model, messages, logprobs: true, top_logprobs: 3, n: 2, temperature: 1 });
    assert.equal(choices.length, 2);
    for (const { logprobs, message } of choices) {
      assert.equal(logprobs.content[0].top_logprobs.length, 3);
      assert.equal(Buffer.concat(logprobs.content.map((one) => Buffer.from(one.bytes))).toString(), message.content);
    }
  },
  async embeddings() {
    const { data } = await client.embeddings.create({ model, input: ["one", "two", "one"] });
    assert.deepEqual(data[0].embedding, data[2].embedding);
    assert.notDeepEqual(data[0].embedding, data[1].embedding);
  },
  async responses() {
    const first = await client.responses.create({ model, input: messages, instructions: "Be brief.", max_output_tokens: 48 });
    assert.ok(first.output_text);
    const events = client.responses.stream({ model, input: messages, text: { format: zodTextFormat(Person, "person") } });
    assert.ok(Person.parse((await events.finalResponse()).output_parsed));
    const tool = { type: "function", name: "add", parameters, strict: true };
    const asked = await client.responses.create({ model, input: messages, tools: [tool], tool_choice: "required" });
    const results = asked.output.filter((item) => item.type === "function_call")
      .map((item) => ({ type: "function_call_output", call_id: item.call_id, output: "85" }));
    assert.ok(results.length);
    const input = [...messages, ...asked.output, ...results];
    assert.ok((await client.responses.create({ model, input, tools: [tool], max_output_tokens: 32 })).output.length);
  },
  async errors() {
    await assert.rejects(chats.create({ model: "none", messages }), OpenAI.NotFoundError);
    const long = [{ role: "user", content: "a b ".repeat(3000) }];
    await assert.rejects(chats.create({ model, messages: long }), { status: 400, code: "context_length_exceeded" });
    await assert.rejects(chats.create({ model, messages, n: 1000 }), OpenAI.BadRequestError);
  },
};

const found = {};
for (const [name, call] of Object.entries(calls)) {
  try {
    await call();
    found[name] = "ok";
  } catch (error) {
    console.error(error);
    found[name] = `${error.name}: ${error.message}`.slice(0, 300);
  }
}
console.log(JSON.stringify(found));
