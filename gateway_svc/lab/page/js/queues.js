// Cards of the requests in each queue, with the reason and the numbers that decided.

import { ofRequest } from "./colours.js";
import { el, say, short, value, whole } from "./dom.js";
import { because, listed, tone } from "./reasons.js";

const QUEUES = [
  ["running", "Running"],
  ["waiting", "Waiting"],
  ["swapped", "Swapped out"],
];
const MOST_CARDS = 80;

/** Owner of the cards; `choose(id)` when one is clicked. */
export class Queues {
  constructor(root, note, choose) {
    this.note = note;
    this.choose = choose;
    this.cards = new Map();
    this.lists = new Map();
    for (const [queue, title] of QUEUES) root.append(this.#section(queue, title));
  }

  #section(queue, title) {
    const count = el("span.count", { textContent: "0" });
    const reasons = el("p.reasons");
    const list = el("ul.cards", { "aria-label": title });
    this.lists.set(queue, { count, reasons, list });
    return el("section.queue", { "aria-label": title }, el("h3", {}, title, count), reasons, list);
  }

  /** Shows a frame; `selected`: id of the chosen request. */
  show(frame, selected) {
    const { step, snapshot } = frame;
    const shares = new Map((step?.shares ?? []).map((share) => [share.id, share]));
    const requests = snapshot?.requests ?? [...shares.values()].map(sharedOnly);
    const left = new Map(step?.preempted ?? []);
    const counts = this.#counts(frame, requests);
    const seen = new Set();
    for (const [queue, parts] of this.lists) {
      const own = requests.filter((request) => request.queue === queue);
      say(parts.count, whole(counts[queue]));
      say(parts.reasons, queue === "running" ? "" : summed(snapshot, queue));
      const cards = own.slice(0, MOST_CARDS).map((request) => {
        seen.add(request.id);
        return this.#card(request, doing(shares.get(request.id), left.get(request.id)), selected);
      });
      const more = counts[queue] - cards.length;
      place(parts.list, more > 0 && own.length > 0 ? [...cards, el("li.more", {}, `and ${whole(more)} more`)] : cards);
    }
    for (const id of this.cards.keys()) if (!seen.has(id)) this.cards.delete(id);
    say(this.note, noteOf(frame));
  }

  #counts({ step, snapshot }, requests) {
    const counts = Object.fromEntries(QUEUES.map(([queue]) => [queue, 0]));
    if (snapshot) for (const item of snapshot.reasons) counts[item.queue] += item.num_requests;
    else if (step) [counts.waiting, counts.running, counts.swapped] = step.queues;
    else for (const request of requests) counts[request.queue] += 1;
    return counts;
  }

  #card(request, work, selected) {
    let card = this.cards.get(request.id);
    if (!card) {
      card = newCard(request, this.choose);
      this.cards.set(request.id, card);
    }
    card.button.setAttribute("aria-pressed", String(request.id === selected));
    card.button.dataset.tone = tone(request.reason);
    say(card.reason, request.reason === "RUNNING" ? work : request.reason.toLowerCase().replaceAll("_", " "));
    say(card.because, request.reason === "RUNNING" ? "" : because(request.reason, request.numbers, value));
    say(card.tokens, tokensOf(request));
    say(card.extras, extrasOf(request));
    card.button.title = listed(request.numbers, value);
    return card.item;
  }
}

function newCard(request, choose) {
  const parts = Object.fromEntries(["reason", "because", "tokens", "extras"].map((name) => [name, el(`span.${name}`)]));
  const dot = el("i.dot", { "--owner": ofRequest(request.id) });
  const head = el("span.head", {}, dot, el("strong", { title: request.id }, short(request.id)), parts.reason);
  const button = el(
    "button.card",
    { type: "button", onclick: () => choose(request.id), "data-request": request.id },
    ...[head, parts.because, parts.tokens, parts.extras],
  );
  return { button, item: el("li", {}, button), ...parts };
}

/** Of a step that was planned while no page looked only what ran is known. */
const sharedOnly = (share) => ({ id: share.id, queue: "running", reason: "RUNNING", numbers: {}, share });

function doing(share, leftBy) {
  if (leftBy) return `preempted (${leftBy})`;
  if (!share) return "not in this step";
  if (!share.prefill) return share.sequences.length > 1 ? `decodes ${share.sequences.length}` : "decodes";
  return `prefill ${whole(share.computed_before)}–${whole(share.computed_before + share.tokens)}`;
}

function tokensOf(request) {
  if (request.prompt_tokens === undefined) return "";
  const cached = request.cached_prompt_tokens ? ` (${whole(request.cached_prompt_tokens)} cached)` : "";
  return `${whole(request.prompt_tokens)} prompt${cached} + ${whole(request.output_tokens)} output`;
}

function extrasOf(request) {
  const extras = [];
  if (request.num_choices > 1) extras.push(`n = ${request.num_choices}`);
  if (request.priority) extras.push(`priority ${request.priority}`);
  if (request.num_preemptions) extras.push(`${request.num_preemptions}× preempted`);
  if (request.tenant) extras.push(request.tenant);
  return extras.join(" · ");
}

function summed(snapshot, queue) {
  const counts = (snapshot?.reasons ?? []).filter((item) => item.queue === queue);
  if (counts.length < 2) return "";
  return counts.map((item) => `${item.reason.toLowerCase().replaceAll("_", " ")} ${whole(item.num_requests)}`).join(" · ");
}

function noteOf({ step, snapshot, isBehind }) {
  if (!snapshot) return step ? "planned while no page looked: only what ran is known" : "";
  return isBehind || !step ? "now" : `after the plan of step ${whole(step.step)}`;
}

/** Puts `items` into `list`, moving as few as it can: focus and hover stay where they are. */
function place(list, items) {
  items.forEach((item, i) => {
    if (list.children[i] !== item) list.insertBefore(item, list.children[i] ?? null);
  });
  while (list.children.length > items.length) list.lastChild.remove();
}
