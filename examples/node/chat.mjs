// Streams the answer to one question.
//
// node chat.mjs [HOST:PORT[,HOST:PORT...]] [QUESTION] [MAX_TOKENS] [SEED]

import process from "node:process";

import { Quire } from "./quire.mjs";

const [addresses = "127.0.0.1:50051", question = "Write a class.", maxTokens = "60", seed] = process.argv.slice(2);

const quire = new Quire(addresses.split(","), { apiKey: process.env.QUIRE_API_KEY });
const request = {
  messages: [{ role: "user", content: question }],
  sampling: { seed },
  stop: { max_tokens: Number(maxTokens) },
};
try {
  for await (const event of quire.resumableChat(request, { deadlineMs: 120_000 })) {
    if (event.reasoning_delta) process.stderr.write(event.reasoning_delta.text);
    if (event.delta) process.stdout.write(event.delta.text);
    if (event.finished) console.log(`\n[${event.finished.reason}]`);
    if (event.usage) console.log(`[${event.usage.prompt_tokens} + ${event.usage.completion_tokens} tokens]`);
  }
} catch (error) {
  console.error(`${error.reason}: ${error.message}`);
  process.exitCode = 1;
} finally {
  quire.close();
}
