// All steps that are known as bars: tokens of prompts and of decodes, marks where requests were preempted or blocks moved; step numbers below.

import { palette } from "./colours.js";
import { say, short, whole } from "./dom.js";

const WIDEST = 12;
const MARKS = 9;
const AXIS = 13;
const LABEL = 64; // pixels between two step numbers at least

/** Owner of the bars and of the slider below them; `go(index)` when a step is pointed at. */
export class Timeline {
  constructor(canvas, slider, go) {
    this.canvas = canvas;
    this.slider = slider;
    slider.addEventListener("input", () => go(Number(slider.value)));
    const point = (event) => go(this.#indexAt(event.offsetX));
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      point(event);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (event.buttons & 1) point(event);
    });
  }

  show(history, at) {
    this.count = history.count;
    this.slider.max = Math.max(0, this.count - 1);
    this.slider.value = at;
    this.slider.disabled = this.count < 2;
    if (this.count) this.slider.setAttribute("aria-valuetext", `step ${history.summary(at).step}`);
    this.#fit();
    this.#draw(history, at);
  }

  #fit() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const scale = devicePixelRatio;
    if (this.canvas.width !== Math.round(width * scale)) this.canvas.width = Math.round(width * scale);
    if (this.canvas.height !== Math.round(height * scale)) this.canvas.height = Math.round(height * scale);
    [this.width, this.height] = [width, height - AXIS];
    this.bar = this.count ? Math.min(WIDEST, width / this.count) : WIDEST;
    this.slider.style.width = `${Math.max(60, Math.min(width, this.bar * this.count))}px`;
  }

  #indexAt(x) {
    return Math.min(this.count - 1, Math.max(0, Math.floor(x / this.bar)));
  }

  #draw(history, at) {
    const context = this.canvas.getContext("2d");
    const colours = palette();
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.clearRect(0, 0, this.width, this.height + AXIS);
    const columns = this.#columns(history);
    const most = Math.max(4, ...columns.map((column) => column.prefill + column.decode));
    for (const column of columns) this.#column(context, colours, column, most);
    this.#axis(context, colours, history);
    if (this.count) this.#cursor(context, colours, at);
    const ends = this.count ? `, steps ${whole(history.summary(0).step)} to ${whole(history.summary(this.count - 1).step)}` : "";
    const label = `Tokens of ${whole(this.count)} steps${ends}`;
    if (this.canvas.getAttribute("aria-label") !== label) this.canvas.setAttribute("aria-label", label);
  }

  /** One column for each bar of at least a pixel: the busiest of its steps. */
  #columns(history) {
    const each = Math.max(1, Math.ceil(1 / this.bar));
    const columns = [];
    for (let i = 0; i < this.count; i += each) {
      const column = { x: i * this.bar, width: Math.max(1, this.bar * each), prefill: 0, decode: 0, moved: 0, preempted: 0, error: "" };
      for (let j = i; j < Math.min(this.count, i + each); j += 1) {
        const step = history.summary(j);
        if (step.prefill + step.decode > column.prefill + column.decode) [column.prefill, column.decode] = [step.prefill, step.decode];
        column.moved += step.moved;
        column.preempted += step.preempted;
        column.error ||= step.error;
      }
      columns.push(column);
    }
    return columns;
  }

  #column(context, colours, column, most) {
    const room = this.height - MARKS - 1;
    const tall = room * Math.sqrt((column.prefill + column.decode) / most);
    const prefill = (tall * column.prefill) / Math.max(1, column.prefill + column.decode);
    const width = Math.max(1, column.width - (column.width > 3 ? 1 : 0));
    context.fillStyle = column.error ? colours.out : colours.decode;
    context.fillRect(column.x, this.height - tall, width, tall);
    context.fillStyle = colours.prefill;
    context.fillRect(column.x, this.height - prefill, width, prefill);
    if (column.preempted) mark(context, colours.out, column.x + width / 2, 4);
    else if (column.moved) mark(context, colours.moved, column.x + width / 2, 3);
  }

  /** Numbers of steps below their bars, the same ones however far the timeline has grown. */
  #axis(context, colours, history) {
    const least = Math.max(1, LABEL / this.bar);
    const every = [1, 2, 5].map((digit) => digit * 10 ** Math.floor(Math.log10(least))).find((step) => step >= least);
    const round = every ?? 10 ** Math.ceil(Math.log10(least));
    context.font = "10px system-ui, sans-serif";
    context.textAlign = "center";
    context.fillStyle = colours.soft;
    for (let i = 0; i < this.count; i += 1) {
      const { step } = history.summary(i);
      if (step % round !== 0) continue;
      const x = Math.min(this.width - 14, Math.max(14, (i + 0.5) * this.bar));
      context.fillText(String(step), x, this.height + AXIS - 2);
    }
  }

  #cursor(context, colours, at) {
    const x = at * this.bar;
    context.strokeStyle = colours.text;
    context.lineWidth = 1.5;
    context.strokeRect(Math.round(x) - 0.5, MARKS - 1.5, Math.max(3, this.bar), this.height - MARKS + 1);
  }
}

function mark(context, colour, x, radius) {
  context.fillStyle = colour;
  context.beginPath();
  context.arc(x, 5, radius, 0, 2 * Math.PI);
  context.fill();
}

/** What a step did, in a line. */
export function sayStep(element, frame) {
  const { step } = frame;
  if (!step) {
    say(element, "no step yet: send a request");
    return;
  }
  const num = (prefill) => step.shares.filter((share) => share.prefill === prefill).length;
  const sampled = Object.values(step.sampled).reduce((sum, count) => sum + count, 0);
  const parts = [
    `step ${whole(step.step)}`,
    num(true) ? `${num(true)} prefill` : "",
    num(false) ? `${num(false)} decode` : "",
    `${whole(step.shares.reduce((sum, share) => sum + share.tokens, 0))} tokens`,
    `${whole(sampled)} sampled`,
    step.preempted.length ? `preempted ${step.preempted.map(([id, mode]) => `${short(id)} (${mode})`).join(", ")}` : "",
    step.is_repeat ? "repeated by grant" : "",
    step.granted_steps ? `grants ${whole(step.granted_steps)} more` : "",
    step.revoked ? `rest of a grant revoked: ${step.revoked.toLowerCase().replaceAll("_", " ")}` : "",
    step.error ? `failed: ${step.error}` : "",
  ];
  say(element, parts.filter(Boolean).join(" · "));
}
