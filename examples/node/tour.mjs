// What else a client does: a deadline, leaving early, an error that says what is wrong, several choices, tools.
//
// node tour.mjs [HOST:PORT]

import process from "node:process";

import { Quire } from "./quire.mjs";

const quire = new Quire(process.argv[2] ?? "127.0.0.1:50051", { apiKey: process.env.QUIRE_API_KEY });
const user = (content) => [{ role: "user", content }];

async function models() {
  const { models } = await quire.call("ListModels", {});
  for (const model of models) console.log(`model ${model.name}: ${model.max_model_len} tokens, chat: ${model.chat}`);
}

async function severalChoices() {
  const { choices, usage } = await quire.call("Generate", {
    text: "import ",
    sampling: { n: 2, seed: 7, temperature: 0.8 },
    stop: { max_tokens: 12 },
    response: { logprobs: true },
  });
  for (const { index, text, logprobs } of choices) {
    const sum = logprobs.reduce((a, b) => a + b, 0);
    console.log(`choice ${index}: ${JSON.stringify(text)}, log probability ${sum.toFixed(2)}`);
  }
  console.log(`usage: ${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
}

// The deadline goes along with the call: the server ends the request, whatever this side does.
async function deadline() {
  const request = { messages: user("Write a very long module."), stop: { max_tokens: 100, ignore_eos: true } };
  try {
    await quire.call("Chat", request, { deadlineMs: 5 });
    console.log("deadline: was kept");
  } catch (error) {
    console.log(`deadline: ${error.reason}`);
  }
}

// Leaving the loop cancels; so would an AbortSignal, and Cancel with the request's id from anywhere else.
async function leaveEarly() {
  let text = "";
  const request = { text: "def ", stop: { max_tokens: 2000, ignore_eos: true } };
  for await (const event of quire.stream("GenerateStream", request)) {
    text += event.delta?.text ?? "";
    if (text.length > 20) break;
  }
  console.log(`left after ${JSON.stringify(text)}`);
}

async function typedError() {
  try {
    await quire.call("Generate", { text: "x", sampling: { top_p: 7 } });
  } catch (error) {
    const [{ field, description }] = error.violations;
    console.log(`refused: ${error.reason}: ${field} ${description}`);
  }
}

const WEATHER = {
  name: "get_weather",
  description: "The weather in a city",
  parameters_json: JSON.stringify({
    type: "object",
    properties: { city: { enum: ["Paris", "Oslo"] }, days: { type: "integer", minimum: 1, maximum: 7 } },
    required: ["city", "days"],
    additionalProperties: false,
  }),
};

// The model is made to call this tool; its arguments match the schema. The answer goes back with the call's id.
async function tools() {
  const messages = user("What is the weather in Oslo?");
  const asked = { messages, tools: [WEATHER], tool_choice: { name: "get_weather" }, stop: { max_tokens: 100 } };
  const [{ tool_calls, finished }] = (await quire.call("Chat", asked)).choices;
  const [call] = tool_calls;
  console.log(`tool: ${call.name}(${JSON.stringify(JSON.parse(call.arguments))}), ${finished.reason}`);
  messages.push({ role: "assistant", tool_calls });
  messages.push({ role: "tool", tool_call_id: call.id, content: JSON.stringify({ degrees: 7 }) });
  const answer = await quire.call("Chat", { messages, tools: [WEATHER], stop: { max_tokens: 20 } });
  console.log(`answer: ${JSON.stringify(answer.choices[0].text)}`);
}

try {
  for (const part of [models, severalChoices, deadline, leaveEarly, typedError, tools]) await part();
} finally {
  quire.close();
}
