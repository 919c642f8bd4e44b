// Where the time of the chosen request went: episodes as a coloured bar, and each with its reason and the numbers that decided.

import { get } from "./api.js";
import { ofRequest } from "./colours.js";
import { duration, el, short, value, whole } from "./dom.js";
import { because, listed, tone } from "./reasons.js";

const AGAIN_MS = 1_200;
const OVER = "over";

/** Owner of the panel. `go(step)` when an episode is clicked; `canSearch`: counterfactuals are available. */
export class Why {
  constructor(root, go, canSearch) {
    this.root = root;
    this.go = go;
    this.canSearch = canSearch;
    this.id = null;
    this.askedMs = 0;
    this.root.replaceChildren(hint());
  }

  /** Shows this request, of which `request` says more where it lives; asks again from time to time while `isLive`. `nowMs`: what
   * holds still is drawn until then. */
  async show(id, request, isLive, nowMs) {
    const hasEnded = isLive && id === this.id && !request && this.request && this.request.queue !== OVER;
    this.request = request ?? (id === this.id ? this.request : null);
    if (hasEnded) this.request = { ...this.request, queue: OVER };
    this.nowMs = nowMs;
    const isDue = hasEnded || (isLive && request && performance.now() - this.askedMs > AGAIN_MS);
    if (id === this.id && !isDue) return;
    if (id !== this.id) this.answer = null;
    this.id = id;
    if (id === null) this.root.replaceChildren(hint());
    else await this.#ask(false);
  }

  /** Marks what held at that step. */
  mark(step) {
    this.step = step;
    for (const item of this.root.querySelectorAll("[data-from]")) {
      const holds = step !== null && Number(item.dataset.from) <= step && step < Number(item.dataset.to || Infinity);
      if (holds) item.setAttribute("aria-current", "step");
      else item.removeAttribute("aria-current");
    }
  }

  async #ask(needs) {
    const id = this.id;
    this.askedMs = performance.now();
    try {
      const answer = await get(`/lab/why?id=${encodeURIComponent(id)}${needs ? "&needs=1" : ""}`);
      if (id !== this.id) return;
      if (!needs && this.answer?.hasNeeds && answer.episodes.length === this.answer.episodes.length) return;
      this.answer = { ...answer, hasNeeds: needs };
      this.root.replaceChildren(...this.#parts());
      this.mark(this.step ?? null);
    } catch (error) {
      if (id === this.id && !this.answer) this.root.replaceChildren(this.#head(), el("p.trouble", { role: "alert" }, error.message));
    }
  }

  #parts() {
    const { episodes, hasNeeds, num_waits_not_searched: numLeft } = this.answer;
    const samples = [...new Set(episodes.map((episode) => episode.sample))];
    const of = (sample) => episodes.filter((episode) => episode.sample === sample);
    const bars = samples.length === 1 ? this.#bar(of(samples[0])) : samples.map((sample) => this.#choice(sample, of(sample)));
    const waits = episodes.some((episode) => episode.queue !== "running");
    const button = el("button.quiet", { type: "button", onclick: (event) => this.#search(event.target) });
    button.textContent = hasNeeds && numLeft ? `go on with ${numLeft} more waits` : "what would have let it in?";
    const more = this.canSearch && waits && (!hasNeeds || numLeft) ? button : "";
    return [this.#head(), summary(episodes), ...bars, more];
  }

  #search(button) {
    button.disabled = true;
    button.textContent = "planning those steps again …";
    this.#ask(true);
  }

  #head() {
    const request = this.request;
    const rows = request?.prompt_tokens === undefined ? [] : rowsOf(request);
    return el(
      "div.request",
      {},
      el("h3", { title: this.id }, el("i.dot", { "--owner": ofRequest(this.id) }), short(this.id)),
      el("code.id", {}, this.id),
      el("dl.rows", {}, ...rows.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)])),
    );
  }

  /** Of several choices the first is open, and those that were opened. */
  #choice(sample, episodes) {
    const [bar, list] = this.#bar(episodes);
    const open = this.root.querySelector(`[data-choice="${sample}"]`)?.open ?? sample === 0;
    return el("details", { open, "data-choice": String(sample) }, el("summary", {}, `choice ${sample}`, bar), list);
  }

  #bar(episodes) {
    const end = Math.max(this.nowMs ?? 0, ...episodes.map((episode) => episode.to_ms ?? episode.from_ms));
    const parts = episodes.map((episode) => {
      const ms = lengthOf(episode, end);
      const title = `${episode.reason}, ${duration(ms)}\n${listed(episode.numbers, value)}`;
      return el("span", { title, "data-tone": tone(episode.reason), "--share": Math.max(0.004 * total(episodes, end), ms) });
    });
    const label = episodes.map((episode) => `${episode.reason} ${duration(lengthOf(episode, end))}`).join(", ");
    return [
      el("div.episodes", { role: "img", "aria-label": label }, ...parts),
      el("ol.episodes-list", {}, ...episodes.map((episode) => this.#episode(episode, end))),
    ];
  }

  #episode(episode, end) {
    const needs = listed(episode.needs, value);
    const steps = episode.to_step === null ? `${whole(episode.from_step)} …` : `${whole(episode.from_step)}–${whole(episode.to_step)}`;
    return el(
      "li",
      { "data-tone": tone(episode.reason), "data-from": String(episode.from_step), "data-to": String(episode.to_step ?? "") },
      el("span.reason", {}, episode.reason.replaceAll("_", " ").toLowerCase()),
      el("button.link", { type: "button", title: "show this step", onclick: () => this.go(episode.from_step) }, `steps ${steps}`),
      el("span.time", {}, episode.to_ms === null ? "still" : duration(lengthOf(episode, end))),
      el("span.because", { title: listed(episode.numbers, value) }, because(episode.reason, episode.numbers, value)),
      needs ? el("span.needs", {}, `${needs} would have let it in`) : "",
    );
  }
}

const lengthOf = (episode, end) => Math.max(0, (episode.to_ms ?? end) - episode.from_ms);

const total = (episodes, end) => Math.max(1, end - episodes[0].from_ms);

function hint() {
  return el("p.hint", {}, "Choose a request: a card, or a coloured square. Here you see why it waited, step by step.");
}

function rowsOf(request) {
  const cached = request.cached_prompt_tokens ? `, ${whole(request.cached_prompt_tokens)} of them cached` : "";
  return [
    ["is", request.queue],
    ["prompt", `${whole(request.prompt_tokens)} tokens${cached}`],
    ["output", `${whole(request.output_tokens)} tokens${request.num_choices > 1 ? ` of ${request.num_choices} choices` : ""}`],
    ...(request.priority ? [["priority", String(request.priority)]] : []),
    ...(request.tenant ? [["tenant", request.tenant]] : []),
    ...(request.num_preemptions ? [["preempted", `${request.num_preemptions}×`]] : []),
  ];
}

/** "waited 210 ms in all, 180 ms of it need blocks". */
function summary(episodes) {
  const waits = new Map();
  for (const { queue, reason, from_ms, to_ms } of episodes) {
    if (queue !== "running" && to_ms !== null) waits.set(reason, (waits.get(reason) ?? 0) + to_ms - from_ms);
  }
  if (!waits.size) return el("p.note", {}, "it has not waited");
  const all = [...waits.values()].reduce((sum, ms) => sum + ms, 0);
  const [most, ms] = [...waits].sort((one, other) => other[1] - one[1])[0];
  return el("p.note", {}, `waited ${duration(all)} in all, ${duration(ms)} of it ${most.toLowerCase().replaceAll("_", " ")}`);
}
