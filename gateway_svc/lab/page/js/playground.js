// The playground: a completion or a chat through this gateway's own door, as it streams.

import { get, post } from "./api.js";
import { el, plural } from "./dom.js";

const DOOR = "/lab/api/v1";
const FIRST_PROMPT = "def fibonacci(n):";

/** Owner of the form. `started(id)` with the request's public id. */
export class Playground {
  constructor(root, started) {
    this.started = started;
    this.running = null;
    this.outputs = el("div.outputs", { "aria-live": "polite" });
    this.status = el("p.note", { role: "status" });
    this.fields = fields();
    this.button = el("button", { type: "submit" }, "Run");
    const form = el("form.playground", { onsubmit: (event) => this.#submit(event) }, ...this.#rows(), this.button);
    root.replaceChildren(form, this.status, this.outputs);
  }

  #rows() {
    const f = this.fields;
    return [
      el("div.row", {}, labelled("model", f.model), labelled("as", f.kind)),
      labelled("prompt", f.prompt),
      el("div.row", {}, labelled("max tokens", f.max_tokens), labelled("choices", f.n), labelled("temperature", f.temperature)),
    ];
  }

  /** Fills the list of models. */
  async load() {
    const { data } = await get(`${DOOR}/models`);
    const chosen = this.fields.model.value;
    this.fields.model.replaceChildren(...data.map((model) => el("option", { value: model.id }, model.id)));
    if (chosen) this.fields.model.value = chosen;
  }

  #submit(event) {
    event.preventDefault();
    if (this.running) this.running.abort();
    else this.#run();
  }

  async #run() {
    this.running = new AbortController();
    this.button.textContent = "Stop";
    this.texts = [];
    this.outputs.replaceChildren();
    this.numChunks = 0;
    const begun = performance.now();
    try {
      const [path, body] = this.#request();
      const chunks = post(`${DOOR}${path}`, body, this.running.signal, (answer) => this.started(answer.headers.get("x-request-id")));
      for await (const data of chunks) if (data !== "[DONE]") this.#take(JSON.parse(data), begun);
    } catch (error) {
      this.status.textContent = error.name === "AbortError" ? "stopped" : error.message;
    } finally {
      this.running = null;
      this.button.textContent = "Run";
    }
  }

  #request() {
    const f = this.fields;
    const common = {
      model: f.model.value,
      max_tokens: Number(f.max_tokens.value),
      n: Number(f.n.value),
      temperature: Number(f.temperature.value),
      stream: true,
      stream_options: { include_usage: true },
    };
    if (f.kind.value === "chat") return ["/chat/completions", { ...common, messages: [{ role: "user", content: f.prompt.value }] }];
    return ["/completions", { ...common, prompt: f.prompt.value }];
  }

  #take(chunk, begun) {
    if (chunk.error) throw new Error(chunk.error.message);
    for (const choice of chunk.choices ?? []) {
      const text = choice.text ?? choice.delta?.content ?? choice.delta?.reasoning_content ?? "";
      this.#output(choice.index).append(text);
    }
    const seconds = (performance.now() - begun) / 1_000;
    if (!chunk.usage) return;
    const { prompt_tokens: prompt, completion_tokens: tokens } = chunk.usage;
    const speed = `${(tokens / Math.max(0.001, seconds)).toFixed(0)} tokens/s`;
    this.status.textContent = `${plural(prompt, "prompt token")}, ${plural(tokens, "token")} in ${seconds.toFixed(2)} s: ${speed}`;
  }

  #output(index) {
    while (this.texts.length <= index) {
      const output = el("pre.output", { "aria-label": `choice ${this.texts.length}` });
      this.texts.push(output);
      this.outputs.append(output);
    }
    return this.texts[index];
  }
}

function fields() {
  const option = (name) => el("option", { value: name }, name);
  return {
    model: el("select", { name: "model" }),
    kind: el("select", { name: "kind" }, option("completion"), option("chat")),
    prompt: el("textarea", { name: "prompt", rows: 5, value: FIRST_PROMPT, spellcheck: false }),
    max_tokens: number("max_tokens", 120, { min: 1 }),
    n: number("n", 1, { min: 1, max: 16 }),
    temperature: number("temperature", 0.8, { min: 0, max: 2, step: 0.1 }),
  };
}

const number = (name, value, limits) => el("input", { type: "number", name, ...limits, value });

const labelled = (text, field) => el("label", {}, el("span", {}, text), field);
