// Vercel's AI SDK, unchanged, on its default API, Responses, against a running Quire. Run by tests/e2e/test_node.py:
//
// node --test ai_sdk.mjs      with QUIRE_URL=http://HOST:PORT/v1

import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const bodies = [];
const spy = (url, init) => {
  bodies.push(JSON.parse(init.body));
  return fetch(url, init);
};
const model = createOpenAI({ baseURL: process.env.QUIRE_URL, apiKey: "any", fetch: spy })("tiny");
const wish = { model, prompt: "Write a function.", maxOutputTokens: 20, temperature: 0, maxRetries: 0 };
const asked = [];
const tools = {
  get_weather: tool({
    description: "The weather in a city",
    inputSchema: z.strictObject({ city: z.enum(["Paris", "Oslo"]) }),
    execute: async ({ city }) => asked.push(city) && "7 degrees",
  }),
};

describe("the AI SDK", () => {
  test("text, whole and streamed, is the same", async () => {
    const whole = await generateText(wish);
    const stream = streamText(wish);
    let text = "";
    for await (const delta of stream.textStream) text += delta;
    assert.equal(text, whole.text);
    assert.ok(text.length > 0);
    assert.equal(await stream.finishReason, whole.finishReason);
    assert.equal(whole.usage.outputTokens, (await stream.usage).outputTokens);
    assert.ok(whole.response.id.startsWith("resp_"));
  });

  test("a tool is called and its result sent back", async () => {
    const done = await generateText({
      ...wish,
      maxOutputTokens: 100,
      tools,
      providerOptions: { openai: { parallelToolCalls: false } },
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
      stopWhen: stepCountIs(2),
    });
    assert.deepEqual(done.steps.map((step) => step.toolCalls.length), [1, 0]);
    assert.equal(asked.length, 1);
    assert.deepEqual(bodies.at(-1).input.map(({ type }) => type), [undefined, "function_call", "function_call_output"]);
  });

  test("a conversation goes on by its messages, of which stored ones are references", async () => {
    const first = await generateText(wish);
    const asked = { role: "user", content: "Write a function." };
    const messages = [asked, ...first.response.messages, asked];
    const after = await generateText({ ...wish, prompt: undefined, messages });
    assert.equal(bodies.at(-1).input[1].type, "item_reference");
    assert.ok(after.usage.inputTokens > first.usage.inputTokens + 20);
  });

  test("a conversation goes on by the id of its last response", async () => {
    const first = await generateText(wish);
    const previousResponseId = first.providerMetadata.openai.responseId;
    const after = await generateText({ ...wish, providerOptions: { openai: { previousResponseId } } });
    assert.ok(after.usage.inputTokens > first.usage.inputTokens + 20);
  });

  test("objects by a schema", async () => {
    const schema = z.strictObject({ language: z.enum(["Python", "Rust"]), stars: z.literal([1, 2, 3]) });
    const made = await generateText({ ...wish, maxOutputTokens: 60, output: Output.object({ schema }) });
    schema.parse(made.output);
  });

  test("an image is refused by its place", async () => {
    const content = [{ type: "image", image: new Uint8Array([137, 80, 78, 71]) }];
    const refused = generateText({ ...wish, prompt: undefined, messages: [{ role: "user", content }] });
    await assert.rejects(refused, (error) => error.statusCode === 400 && /input\[0\]\.content\[0\]/.test(error.message));
  });
});
