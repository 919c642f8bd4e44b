// Anthropic's own package for Node, unchanged, against a running Quire. Run by tests/e2e/test_node.py:
//
// node --test anthropic_node.mjs      with QUIRE_URL=http://HOST:PORT

import assert from "node:assert/strict";
import { describe, test } from "node:test";

import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";

const client = new Anthropic({ baseURL: process.env.QUIRE_URL, apiKey: "any", maxRetries: 0, timeout: 60_000 });
const model = "tiny";
const messages = [{ role: "user", content: "What is the weather in Oslo?" }];
const wish = { model, messages, max_tokens: 16, seed: 3 };

const WEATHER = {
  name: "get_weather",
  description: "The weather in a city",
  input_schema: {
    type: "object",
    properties: { city: { type: "string", enum: ["Paris", "Oslo"] } },
    required: ["city"],
    additionalProperties: false,
  },
};
const TIME = { ...WEATHER, name: "get_time", description: "The time in a city" };
const withTools = { ...wish, max_tokens: 100, tools: [WEATHER, TIME] };
const NAMED = { type: "tool", name: "get_weather" };

// Far longer than the test takes: a later look at the scheduler finds it gone only if it was ended.
const endless = { model, messages, max_tokens: 1900, seed: 1 };

// All at once, as a server is used.
describe("the anthropic package", { concurrency: true }, () => {
  test("a message, whole and streamed, is the same", async () => {
    const whole = await client.messages.create(wish);
    assert.deepEqual([whole.type, whole.role, whole.stop_reason], ["message", "assistant", "max_tokens"]);
    assert.equal(whole.usage.output_tokens, 16);
    const kinds = [];
    let text = "";
    for await (const event of await client.messages.create({ ...wish, stream: true })) {
      kinds.push(event.type);
      if (event.type === "content_block_delta") text += event.delta.text;
    }
    assert.equal(text, whole.content[0].text);
    assert.equal(kinds[0], "message_start");
    assert.equal(kinds.at(-1), "message_stop");
  });

  test("the package's stream helper assembles the message", async () => {
    const stream = client.messages.stream(wish);
    let text = "";
    stream.on("text", (delta) => (text += delta));
    const message = await stream.finalMessage();
    assert.equal(text, message.content[0].text);
    assert.equal(message.stop_reason, "max_tokens");
    assert.ok(stream.request_id);
  });

  test("a stop sequence", async () => {
    const greedy = { ...wish, temperature: 0 };
    const text = (await client.messages.create(greedy)).content[0].text;
    const stop = text.slice(4, 7);
    const stopped = await client.messages.create({ ...greedy, stop_sequences: [stop] });
    assert.deepEqual([stopped.stop_reason, stopped.stop_sequence], ["stop_sequence", stop]);
  });

  test("a forced tool, streamed alike, and its result", async () => {
    const called = await client.messages.create({ ...withTools, tool_choice: NAMED });
    const [call] = called.content;
    assert.deepEqual([called.stop_reason, call.type, call.name], ["tool_use", "tool_use", "get_weather"]);
    assert.match(call.id, /^toolu_/);
    assert.ok(["Paris", "Oslo"].includes(call.input.city));
    const streamed = await client.messages.stream({ ...withTools, tool_choice: NAMED }).finalMessage();
    assert.deepEqual(streamed.content[0].input, call.input);
    const result = { type: "tool_result", tool_use_id: call.id, content: "no such city", is_error: true };
    const turns = [...messages, { role: "assistant", content: called.content }, { role: "user", content: [result] }];
    const answered = await client.messages.create({ ...withTools, messages: turns, tool_choice: { type: "none" } });
    assert.ok(["end_turn", "max_tokens"].includes(answered.stop_reason));
  });

  test("any tool, one alone", async () => {
    const any = { type: "any", disable_parallel_tool_use: true };
    const { content } = await client.messages.create({ ...withTools, tool_choice: any });
    assert.equal(content.length, 1);
    assert.ok(["get_weather", "get_time"].includes(content[0].name));
  });

  test("the package's own loop runs a tool", async () => {
    const asked = [];
    const tool = betaZodTool({
      name: "get_weather",
      description: "The weather in a city",
      inputSchema: z.strictObject({ city: z.enum(["Paris", "Oslo"]) }),
      run: ({ city }) => (asked.push(city), "7 degrees"),
    });
    const runner = client.beta.messages.toolRunner({
      ...{ model, messages, max_tokens: 100, tools: [tool], tool_choice: NAMED, max_iterations: 2, seed: 3 },
    });
    for await (const message of runner) assert.equal(message.stop_reason, "tool_use");
    assert.ok(asked.length >= 1 && asked.every((city) => ["Paris", "Oslo"].includes(city)));
  });

  test("an answer by schema", async () => {
    const Review = z.strictObject({ language: z.enum(["Python", "Rust"]), stars: z.literal([1, 2, 3]) });
    const format = zodOutputFormat(Review);
    const parsed = await client.messages.parse({ ...wish, max_tokens: 100, output_config: { format } });
    Review.parse(parsed.parsed_output);
  });

  test("prompts are counted", async () => {
    const plain = await client.messages.countTokens({ model, messages });
    const tooled = await client.messages.countTokens({ model, messages, tools: [WEATHER], system: "Be short." });
    assert.ok(tooled.input_tokens > plain.input_tokens && plain.input_tokens > 0);
    const { usage } = await client.messages.create({ ...wish, max_tokens: 1 });
    assert.equal(usage.input_tokens + usage.cache_read_input_tokens, plain.input_tokens);
  });

  test("the models", async () => {
    const names = [];
    for await (const card of client.models.list()) names.push(card.id);
    assert.deepEqual(names, [model]);
    assert.equal((await client.models.retrieve(model)).display_name, model);
  });

  for (const [cls, type, change] of [
    [Anthropic.NotFoundError, "not_found_error", { model: "other" }],
    [Anthropic.BadRequestError, "invalid_request_error", { temperature: 99 }],
    [Anthropic.BadRequestError, "invalid_request_error", { tools: [{ type: "web_search_20250305", name: "web_search" }] }],
  ]) {
    test(`${cls.name} for ${Object.keys(change)}`, async () => {
      const failed = await client.messages.create({ ...wish, ...change }).catch((error) => error);
      assert.ok(failed instanceof cls, failed);
      assert.equal(failed.error.error.type, type);
      assert.ok(failed.requestID);
    });
  }

  test("an aborted stream ends", async () => {
    const stream = client.messages.stream(endless);
    const ended = stream.done().catch((error) => error);
    await new Promise((resolve) => stream.once("text", resolve));
    stream.abort();
    assert.ok((await ended) instanceof Anthropic.APIUserAbortError);
  });
});
