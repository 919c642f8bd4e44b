// OpenAI's own package for Node, unchanged, against a running Quire. Run by tests/e2e/test_node.py:
//
// node --test openai_node.mjs      with QUIRE_URL=http://HOST:PORT/v1

import assert from "node:assert/strict";
import { describe, test } from "node:test";

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.env.QUIRE_URL, apiKey: "any", maxRetries: 0, timeout: 60_000 });
const model = "tiny";
const messages = [{ role: "user", content: "Write a function." }];
const chat = { model, messages, max_completion_tokens: 12, seed: 3 };

const WEATHER = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city",
    strict: true,
    parameters: {
      type: "object",
      properties: { city: { type: "string", enum: ["Paris", "Oslo"] }, days: { type: "integer", enum: [1, 2, 3] } },
      required: ["city", "days"],
      additionalProperties: false,
    },
  },
};
const NO_ARGUMENTS = { type: "object", properties: {}, additionalProperties: false };
const CLOCK = { type: "function", function: { name: "get_time", parameters: NO_ARGUMENTS } };
const NAMED = { type: "function", function: { name: "get_weather" } };

function assertWeather(text) {
  const { city, days, ...others } = JSON.parse(text);
  assert.ok(["Paris", "Oslo"].includes(city) && [1, 2, 3].includes(days), text);
  assert.deepEqual(others, {});
}

async function collect(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

const contentOf = (chunks) => chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");

const textOf = ({ output }) => output.flatMap(({ content }) => content.map(({ text }) => text)).join("");

// Far longer than the test takes: a later look at the scheduler finds them gone only if they were ended.
const endless = { model, prompt: "def ", max_tokens: 2000, stream: true, ignore_eos: true };

// All at once, as a server is used.
describe("the openai package", { concurrency: true }, () => {
  test("a chat, whole and streamed, is the same", async () => {
    const whole = await client.chat.completions.create(chat);
    const chunks = await collect(
      await client.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } }),
    );
    assert.equal(whole.object, "chat.completion");
    assert.equal(contentOf(chunks), whole.choices[0].message.content);
    assert.equal(chunks[0].choices[0].delta.role, "assistant");
    assert.equal(chunks.at(-2).choices[0].finish_reason, whole.choices[0].finish_reason);
    assert.deepEqual(chunks.at(-1).usage, whole.usage);
    assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);
  });

  test("the package's own stream helper assembles the answer", async () => {
    const stream = client.chat.completions.stream(chat);
    let text = "";
    stream.on("content", (delta) => (text += delta));
    const final = await stream.finalChatCompletion();
    assert.equal(final.choices[0].message.content, text);
    assert.ok(text.length > 0);
  });

  test("conversations of several turns, with a system turn and content in parts", async () => {
    const parts = [{ type: "text", text: "Write a " }, { type: "text", text: "function." }];
    const turns = (content) => [
      { role: "system", content: "You write Python." },
      { role: "user", content },
      { role: "assistant", content: "def f(): pass" },
      { role: "user", content: "Another." },
    ];
    const [a, b] = await Promise.all(
      ["Write a function.", parts].map((content) => client.chat.completions.create({ ...chat, messages: turns(content) })),
    );
    assert.deepEqual(a.usage.prompt_tokens, b.usage.prompt_tokens);
  });

  test("completions: several prompts, stop, echo, streams", async () => {
    const wish = { model, prompt: "def main():", max_tokens: 10, seed: 5 };
    const whole = await client.completions.create(wish);
    const chunks = await collect(await client.completions.create({ ...wish, stream: true }));
    assert.equal(chunks.map((chunk) => chunk.choices[0]?.text ?? "").join(""), whole.choices[0].text);
    const several = await client.completions.create({ ...wish, prompt: ["def main():", "import "] });
    assert.deepEqual(several.choices.map((choice) => choice.index), [0, 1]);
    const stop = whole.choices[0].text.slice(4, 6);
    const stopped = await client.completions.create({ ...wish, stop: [stop] });
    assert.equal(stopped.choices[0].finish_reason, "stop");
    assert.equal(stopped.choices[0].text, whole.choices[0].text.slice(0, whole.choices[0].text.indexOf(stop)));
    const echoed = await client.completions.create({ ...wish, echo: true });
    assert.equal(echoed.choices[0].text, "def main():" + whole.choices[0].text);
  });

  test("n choices, streamed by index", async () => {
    const wish = { ...chat, n: 3, temperature: 1 };
    const whole = await client.chat.completions.create(wish);
    const texts = ["", "", ""];
    for (const chunk of await collect(await client.chat.completions.create({ ...wish, stream: true }))) {
      for (const { index, delta } of chunk.choices) texts[index] += delta.content ?? "";
    }
    assert.deepEqual(whole.choices.map((choice) => choice.message.content), texts);
    assert.equal(new Set(texts).size, 3);
  });

  test("log probabilities of chats and completions", async () => {
    const { choices } = await client.chat.completions.create({ ...chat, logprobs: true, top_logprobs: 2 });
    const { content } = choices[0].logprobs;
    assert.equal(Buffer.from(content.flatMap((entry) => entry.bytes)).toString(), choices[0].message.content);
    for (const { logprob, top_logprobs } of content) {
      assert.equal(top_logprobs.length, 2);
      assert.ok(logprob <= top_logprobs[0].logprob + 1e-6 && top_logprobs[0].logprob <= 0);
    }
    const completion = await client.completions.create({ model, prompt: "import ", max_tokens: 5, logprobs: 2 });
    const found = completion.choices[0].logprobs;
    assert.equal(found.tokens.join(""), completion.choices[0].text);
    assert.ok(found.token_logprobs.every((logprob) => logprob <= 0));
    assert.equal(found.top_logprobs.length, 5);
  });

  test("tool_choice required: some tool is called, with arguments that match its schema", async () => {
    const tools = { tools: [WEATHER, CLOCK], tool_choice: "required", parallel_tool_calls: false };
    const wish = { ...chat, max_completion_tokens: 200, ...tools };
    const [{ message, finish_reason }] = (await client.chat.completions.create(wish)).choices;
    assert.equal(finish_reason, "tool_calls");
    assert.equal(message.tool_calls.length, 1);
    const [call] = message.tool_calls;
    assert.ok(call.id && call.type === "function");
    if (call.function.name === "get_weather") assertWeather(call.function.arguments);
    else assert.deepEqual([call.function.name, JSON.parse(call.function.arguments)], ["get_time", {}]);
  });

  test("a named tool, streamed: the package assembles the call; its answer goes back", async () => {
    const wish = { ...chat, max_completion_tokens: 200, tools: [WEATHER, CLOCK], tool_choice: NAMED };
    const whole = await client.chat.completions.create(wish);
    const final = await client.chat.completions.stream(wish).finalChatCompletion();
    const { message } = final.choices[0];
    assert.equal(message.tool_calls.length, 1);
    const [call] = message.tool_calls;
    assert.deepEqual(call.function.name, "get_weather");
    assertWeather(call.function.arguments);
    assert.equal(call.function.arguments, whole.choices[0].message.tool_calls[0].function.arguments);
    const turns = [...messages, message, { role: "tool", tool_call_id: call.id, content: '{"degrees": 7}' }];
    const answer = await client.chat.completions.create({ ...chat, messages: turns, tools: [WEATHER, CLOCK] });
    assert.ok(answer.usage.prompt_tokens > whole.usage.prompt_tokens);
  });

  test("tools as the model likes, and none of them", async () => {
    for (const tool_choice of ["auto", "none", undefined]) {
      const wish = { ...chat, max_completion_tokens: 20, tools: [WEATHER], tool_choice };
      const [{ message, finish_reason }] = (await client.chat.completions.create(wish)).choices;
      assert.equal(finish_reason === "tool_calls", Boolean(message.tool_calls?.length));
      if (tool_choice === "none") assert.ok(!message.tool_calls?.length && message.content.length > 0);
    }
  });

  test("runTools calls our function by itself", async () => {
    const asked = [];
    const forecast = {
      ...WEATHER,
      function: { ...WEATHER.function, parse: JSON.parse, function: (wish) => (asked.push(wish), "7 degrees") },
    };
    const wish = { ...chat, max_completion_tokens: 200, tools: [forecast], tool_choice: NAMED };
    await client.chat.completions.runTools(wish).done();
    assert.equal(asked.length, 1);
    assertWeather(JSON.stringify(asked[0]));
  });

  test("JSON schema: zod's schema comes back as zod's type, streamed too", async () => {
    const Review = z.object({ language: z.enum(["Python", "Rust"]), stars: z.literal([1, 2, 3]), done: z.boolean() });
    const wish = { ...chat, max_completion_tokens: 100, response_format: zodResponseFormat(Review, "review") };
    const [{ message, finish_reason }] = (await client.chat.completions.parse(wish)).choices;
    assert.equal(finish_reason, "stop");
    Review.parse(message.parsed);
    const streamed = await client.chat.completions.stream(wish).finalChatCompletion();
    assert.deepEqual(streamed.choices[0].message.parsed, message.parsed);
    const any = await client.chat.completions.create({
      ...chat,
      max_completion_tokens: 40,
      response_format: { type: "json_object" },
    });
    if (any.choices[0].finish_reason === "stop") JSON.parse(any.choices[0].message.content);
  });

  test("responses: whole, streamed, retrieved, continued, deleted", async () => {
    const wish = { model, input: "Write a function.", max_output_tokens: 12, temperature: 0 };
    const whole = await client.responses.create(wish);
    const events = await collect(await client.responses.create({ ...wish, stream: true }));
    assert.equal(textOf(events.at(-1).response), whole.output_text);
    assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
    assert.deepEqual((await client.responses.retrieve(whole.id)).output, whole.output);
    const after = await client.responses.create({ ...wish, previous_response_id: whole.id });
    assert.ok(after.usage.input_tokens > whole.usage.input_tokens);
    assert.equal((await collect(await client.responses.inputItems.list(after.id))).length, 3);
    await client.responses.delete(whole.id);
    await assert.rejects(client.responses.retrieve(whole.id), OpenAI.NotFoundError);
    const begun = await client.responses.create({ ...wish, max_output_tokens: 1500, background: true });
    assert.ok(["cancelled", "completed"].includes((await client.responses.cancel(begun.id)).status));
  });

  test("responses: the package's stream helper, a tool by choice, objects by a schema", async () => {
    const wish = { model, input: "The weather in Oslo?", max_output_tokens: 100, parallel_tool_calls: false };
    const tools = [{ type: "function", ...WEATHER.function }];
    const stream = client.responses.stream({ ...wish, tools, tool_choice: "required" });
    const [call] = (await stream.finalResponse()).output;
    assertWeather(call.arguments);
    const result = { type: "function_call_output", call_id: call.call_id, output: "7 degrees" };
    const input = [{ role: "user", content: wish.input }, call, result];
    assert.ok((await client.responses.create({ ...wish, input, tools, tool_choice: "none" })).output_text.length > 0);
    const review = z.strictObject({ language: z.enum(["Python", "Rust"]), stars: z.literal([1, 2, 3]) });
    const parsed = await client.responses.parse({ ...wish, text: { format: zodTextFormat(review, "review") } });
    review.parse(parsed.output_parsed);
  });

  test("vectors, in both encodings", async () => {
    const made = await client.embeddings.create({ model, input: ["read a file", "open a socket"] });
    const plain = await client.embeddings.create({ model, input: ["read a file"], encoding_format: "float" });
    assert.equal(made.data.length, 2);
    assert.ok(Math.abs(made.data[0].embedding.reduce((sum, x) => sum + x * x, 0) - 1) < 1e-4);
    made.data[0].embedding.forEach((x, i) => assert.ok(Math.abs(x - plain.data[0].embedding[i]) < 1e-5));
  });

  test("models are listed and found", async () => {
    const listed = await collect(await client.models.list());
    assert.ok(listed.some(({ id, object }) => id === model && object === "model"));
    assert.equal((await client.models.retrieve(model)).id, model);
  });

  test("errors are of the package's classes, and name the field", async () => {
    const { BadRequestError, NotFoundError } = OpenAI;
    const refused = async (wish, kind, param) => {
      const error = await client.chat.completions.create({ ...chat, ...wish }).then(assert.fail, (error) => error);
      assert.ok(error instanceof kind, String(error));
      assert.ok(error.message.length > 10 && error.type && error.requestID, JSON.stringify(error));
      if (param !== undefined) assert.equal(error.param, param);
      return error;
    };
    await refused({ top_p: 7 }, BadRequestError, "top_p");
    await refused({ temperature: "warm" }, BadRequestError, "temperature");
    await refused({ messages: [] }, BadRequestError, "messages");
    await refused({ model: "unheard-of" }, NotFoundError);
    await refused({ messages: [{ role: "user", content: "long ".repeat(4000) }] }, BadRequestError);
    const image = { type: "image_url", image_url: { url: "data:image/png;base64,AAAA" } };
    const error = await refused({ messages: [{ role: "user", content: [image] }] }, BadRequestError);
    assert.match(error.message, /image/);
    await assert.rejects(client.models.retrieve("unheard-of"), NotFoundError);
    const nobody = new OpenAI({ baseURL: "http://127.0.0.1:9/v1", apiKey: "any", maxRetries: 0 });
    await assert.rejects(nobody.models.list(), OpenAI.APIConnectionError);
  });

  test("AbortController, leaving the loop and a timeout end the request", async () => {
    const controller = new AbortController();
    const stream = await client.completions.create(endless, { signal: controller.signal });
    let chunks = 0;
    // The package ends an aborted stream as if it were complete.
    for await (const _ of stream) if (++chunks === 5) controller.abort();
    assert.ok(chunks >= 5 && chunks < 100, `${chunks} chunks: those that had come are still read`);
    let more = 0;
    for await (const _ of await client.completions.create(endless)) if (++more === 5) break;
    const slow = client.completions.create({ ...endless, stream: false }, { timeout: 300 });
    await assert.rejects(slow, OpenAI.APIConnectionTimeoutError);
  });
});
