// Lanes: which step ran where and when, around the chosen one, with the numbers of the steps above. Long pauses are shortened.

import { duration, plural, svg, whole } from "./dom.js";

const ROW = 28;
const NUMBERS = 14;
const DIGIT = 6.2;
const MARGIN = 52;
const NUM_BEFORE = 22;
const NUM_AFTER = 8;
const SHORTEST = 3;

/** Owner of the drawing; `go(index)` when a step is clicked. */
export class Lanes {
  constructor(root, go) {
    this.root = root;
    this.go = go;
  }

  show(history, at) {
    const first = Math.max(0, at - NUM_BEFORE);
    const end = Math.min(history.count, at + NUM_AFTER + 1);
    const steps = [];
    for (let i = first; i < end; i += 1) steps.push({ ...history.summary(i), i });
    this.root.replaceChildren(...(steps.length ? [this.#drawing(steps, at)] : []));
  }

  #drawing(steps, at) {
    const lanes = [...new Set(steps.map((step) => step.lane))].sort((one, other) => one - other);
    const width = this.root.clientWidth || 900;
    const height = NUMBERS + lanes.length * ROW;
    const scale = scaleOf(steps, width - MARGIN - 8);
    const labels = lanes.map((lane, row) => svg("text", { x: 0, y: NUMBERS + row * ROW + 13, class: "lane-name" }, `lane ${lane}`));
    const spans = steps.map((step) => spanOf(step, lanes.indexOf(step.lane), scale, step.i === at));
    const boxes = steps.map((step) => this.#box(step, lanes.indexOf(step.lane), scale, step.i === at));
    const numbers = numbersOf(steps, scale, at);
    const label = `Lanes: ${plural(lanes.length, "lane")}, steps ${steps[0].step} to ${steps.at(-1).step}`;
    return svg("svg", { width, height, role: "img", "aria-label": label }, ...labels, ...numbers, ...spans, ...boxes);
  }

  #box(step, row, scale, isChosen) {
    const end = MARGIN + scale(step.finished);
    const worker = Math.min(end - SHORTEST, Math.max(MARGIN + scale(step.at), MARGIN + scale(step.finished - step.duration)));
    const [y, height] = [NUMBERS + row * ROW + 2, ROW - 12];
    const total = step.prefill + step.decode;
    const split = total ? Math.max(step.prefill ? 3 : 0, (height * step.prefill) / total) : 0;
    const group = svg("g", { class: `box${isChosen ? " chosen" : ""}${step.error ? " failed" : ""}`, "data-step": step.step });
    group.append(
      svg("title", {}, titleOf(step)),
      svg("rect", { x: worker, y, width: end - worker, height, rx: 3, class: "decode" }),
      svg("rect", { x: worker, y, width: end - worker, height: split, rx: 3, class: "prefill" }),
    );
    group.addEventListener("click", () => this.go(step.i));
    return group;
  }
}

/** Numbers above the ends of the steps, the chosen one first; of the others those that have room beside it. */
function numbersOf(steps, scale, at) {
  const taken = [];
  const inOrder = [...steps.filter((step) => step.i === at), ...steps.filter((step) => step.i !== at)];
  const found = [];
  for (const step of inOrder) {
    const x = MARGIN + scale(step.finished);
    const half = (String(step.step).length * DIGIT) / 2 + 3;
    if (taken.some((other) => Math.abs(other.x - x) < other.half + half)) continue;
    taken.push({ x, half });
    found.push(svg("text", { x, y: NUMBERS - 4, class: `number${step.i === at ? " chosen" : ""}` }, String(step.step)));
  }
  return found;
}

/** From plan to result: steps that were in flight together lie on two lines, as the next one is planned while one runs. */
function spanOf(step, row, scale, isChosen) {
  const [x, end] = [MARGIN + scale(step.at), MARGIN + scale(step.finished)];
  const y = NUMBERS + row * ROW + ROW - 8 + (step.step % 2) * 4;
  return svg("rect", { x, y, width: Math.max(SHORTEST, end - x), height: 3, class: `span${isChosen ? " chosen" : ""}` });
}

function titleOf(step) {
  const work = [step.prefill ? `${whole(step.prefill)} tokens of prompts` : "", step.decode ? `${whole(step.decode)} decoded` : ""];
  const parts = [`step ${step.step} on lane ${step.lane}`, work.filter(Boolean).join(" + ")];
  if (step.duration) parts.push(`${duration(step.duration)} at the worker`);
  parts.push(`${duration(step.finished - step.at)} from plan to result`);
  return [...parts, step.error].filter(Boolean).join("\n");
}

/** Time to pixels; a pause longer than two typical steps counts as two. */
function scaleOf(steps, width) {
  const lengths = steps.map((step) => step.finished - step.at).sort((one, other) => one - other);
  const pause = Math.max(1, 2 * lengths[lengths.length >> 1]);
  const cuts = [];
  let [busyUntil, left] = [steps[0].at, 0];
  for (const step of steps) {
    const surplus = step.at - busyUntil - pause;
    if (surplus > 0) {
      left += surplus;
      cuts.push({ from: step.at, left });
    }
    busyUntil = Math.max(busyUntil, step.finished);
  }
  const place = (at) => at - steps[0].at - (cuts.findLast((cut) => at >= cut.from)?.left ?? 0);
  const perMs = width / Math.max(0.1, place(busyUntil));
  return (at) => Math.max(0, place(at)) * perMs;
}
