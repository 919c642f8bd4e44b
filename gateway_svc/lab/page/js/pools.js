// Pools of blocks as squares: the holder of each, the number of sequences that share it, what is cached, what is free.

import { ofSequence, ownerOf, palette } from "./colours.js";
import { el, plural, say, short, whole } from "./dom.js";

const [LARGEST, SMALLEST] = [72, 6];
const GAP = 2;
const HOST_SHARE = 0.25; // of the height, once blocks were on the host
const HEADING = 44; // of a pool, with the space above it
const MOST_STRIPES = 4;

/** Sequences that hold each block, by the block's name. */
export function holdersOf(tables) {
  const holders = new Map();
  for (const [sequence, blocks] of tables) {
    for (const block of blocks) {
      const own = holders.get(block);
      if (own) own.push(sequence);
      else holders.set(block, [sequence]);
    }
  }
  return holders;
}

/** Owner of the canvases. `hover(block)` when the pointer comes to one (null: it left), `choose(id)` when it is clicked. */
export class Pools {
  constructor(root, hover, choose) {
    this.root = root;
    this.hover = hover;
    this.choose = choose;
    this.views = [];
    this.extent = new Map();
    this.used = new Set();
  }

  /** Draws a frame; `holders`: as `holdersOf`; `selected`: id of the chosen request, the others are dimmed then. */
  show(frame, holders, selected) {
    const pools = frame.snapshot?.pools ?? this.lastPools ?? [];
    this.lastPools = pools;
    if (frame.step?.swap_in.length || frame.step?.swap_out.length) this.used.add("c");
    for (const name of holders.keys()) this.used.add(name[0]);
    this.#fit(pools.map((pool) => this.#grown(pool, holders)));
    const cached = new Map((frame.snapshot?.cached ?? []).map((name, place) => [name, place]));
    const colours = palette();
    for (const view of this.views) view.draw({ holders, cached, selected, colours });
  }

  /** Middle of a block's square below `root`, or null. */
  centre(name) {
    for (const view of this.views) {
      const point = view.centre(name);
      if (point) return point;
    }
    return null;
  }

  describe(name) {
    return this.views.find((view) => view.numberOf(name) !== null)?.describe(name) ?? name;
  }

  /** A pool with room for every block that was ever seen of it: ids may be higher than their number where it shrank. */
  #grown(pool, holders) {
    const key = pool.tier + pool.suffix;
    const known = this.extent.get(key) ?? { first: pool.first, end: pool.first + pool.total };
    known.first = Math.min(known.first, pool.first);
    known.end = Math.max(known.end, pool.first + pool.total);
    for (const name of holders.keys()) {
      const number = numberIn(pool, name);
      if (number === null) continue;
      known.end = Math.max(known.end, number + 1);
      known.first = Math.min(known.first, number);
    }
    this.extent.set(key, known);
    return { ...pool, ...known };
  }

  #fit(pools) {
    const same = pools.length === this.views.length && pools.every((pool, i) => this.views[i].isOf(pool));
    if (!same) {
      this.views = pools.map((pool) => new PoolView(pool, this));
      this.root.replaceChildren(...this.views.map((view) => view.element));
    }
    const rooms = this.#rooms(pools);
    pools.forEach((pool, i) => this.views[i].fit(pool, rooms[i]));
  }

  /** Height for the squares of each pool: all that the tables leave; a host pool without a block ever folds into its heading. */
  #rooms(pools) {
    const stage = this.root.parentElement;
    const tables = this.root.previousElementSibling?.offsetHeight ?? 0;
    const all = Math.max(160, (stage.clientHeight || 500) - tables - HEADING * pools.length - 24);
    const isOpen = (pool) => pool.tier === "g" || this.used.has(pool.tier);
    const host = pools.some((pool) => pool.tier === "c" && isOpen(pool)) ? HOST_SHARE * all : 0;
    const numDevices = pools.filter((pool) => pool.tier === "g").length;
    const numHosts = Math.max(1, pools.length - numDevices);
    return pools.map((pool) => (pool.tier === "g" ? (all - host) / numDevices : host / numHosts));
  }
}

function numberIn(pool, name) {
  if (!name.startsWith(pool.tier) || !name.endsWith(pool.suffix)) return null;
  const digits = name.slice(1, name.length - pool.suffix.length);
  return /^\d+$/.test(digits) ? Number(digits) : null;
}

const TITLES = { g: "Device", c: "Host" };

class PoolView {
  constructor(pool, owner) {
    this.pool = pool;
    this.owner = owner;
    this.canvas = el("canvas", {
      role: "img",
      onpointermove: (event) => this.#point(event),
      onpointerleave: () => owner.hover(null),
      onclick: (event) => this.#click(event),
    });
    this.figures = el("span.note");
    const title = `${TITLES[pool.tier]}${pool.suffix ? ` of rank ${pool.suffix.slice(1)}` : ""}`;
    this.element = el("section.pool", { "data-tier": pool.tier }, el("h3", {}, title, this.figures), this.canvas);
  }

  isOf(pool) {
    return pool.tier === this.pool.tier && pool.suffix === this.pool.suffix;
  }

  numberOf(name) {
    const number = numberIn(this.pool, name);
    return number !== null && number >= this.pool.first && number < this.pool.end ? number : null;
  }

  /** `room`: height for the squares; 0 = none is drawn. */
  fit(pool, room) {
    this.pool = pool;
    this.canvas.hidden = !room;
    const width = this.owner.root.clientWidth || 600;
    const count = pool.end - pool.first;
    this.shown = !room ? 0 : pool.tier === "c" ? Math.min(count, 2_048) : count;
    this.size = LARGEST;
    const fits = () => Math.ceil(this.shown / Math.floor(width / this.size)) * this.size <= room;
    while (this.size > SMALLEST && !fits()) this.size -= 1;
    this.columns = Math.max(1, Math.floor(width / this.size));
    this.#resize(this.columns * this.size, Math.ceil(this.shown / this.columns) * this.size);
  }

  #resize(width, height) {
    const scale = devicePixelRatio;
    if (this.canvas.width === Math.round(width * scale) && this.canvas.height === Math.round(height * scale)) return;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
  }

  draw(drawn) {
    this.drawn = drawn;
    const context = this.canvas.getContext("2d");
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    for (let i = 0; i < this.shown; i += 1) this.#square(context, i);
    this.#tell();
  }

  #square(context, i) {
    const { holders, cached, selected, colours } = this.drawn;
    const name = this.#name(i);
    const [x, y] = [(i % this.columns) * this.size, Math.floor(i / this.columns) * this.size];
    const side = this.size - GAP;
    const own = holders.get(name);
    context.globalAlpha = own && selected && !own.some((sequence) => ownerOf(sequence) === selected) ? 0.22 : 1;
    if (own) stripes(context, own, x, y, side);
    else if (cached.has(name)) filled(context, colours.cached, x, y, side);
    else outlined(context, colours.free, x, y, side);
    if (own?.length > 1 && side >= 12) figure(context, own.length, x + side / 2, y + side / 2, side);
    context.globalAlpha = 1;
  }

  #name(i) {
    return `${this.pool.tier}${this.pool.first + i}${this.pool.suffix}`;
  }

  #tell() {
    const { holders, cached } = this.drawn;
    let [held, shared, kept] = [0, 0, 0];
    for (let i = 0; i < this.pool.end - this.pool.first; i += 1) {
      const own = holders.get(this.#name(i));
      held += own ? 1 : 0;
      shared += own?.length > 1 ? 1 : 0;
      kept += !own && cached.has(this.#name(i)) ? 1 : 0;
    }
    const free = this.pool.total - held - kept;
    const isFree = kept ? `${whole(free + kept)} free (${whole(kept)} of them cached)` : `${whole(Math.max(0, free))} free`;
    const parts = [`${whole(held)} held`, shared ? `${whole(shared)} of them shared` : "", `${isFree} of ${whole(this.pool.total)}`];
    const text = parts.filter(Boolean).join(", ");
    say(this.figures, text);
    const label = `${TITLES[this.pool.tier]} blocks: ${text}`;
    if (this.canvas.getAttribute("aria-label") !== label) this.canvas.setAttribute("aria-label", label);
  }

  #at(event) {
    const [column, row] = [event.offsetX, event.offsetY].map((offset) => Math.floor(offset / this.size));
    const i = row * this.columns + column;
    return column < this.columns && i >= 0 && i < this.shown ? this.#name(i) : null;
  }

  #point(event) {
    const name = this.#at(event);
    this.canvas.title = name ? this.describe(name) : "";
    this.owner.hover(name);
  }

  #click(event) {
    const own = this.drawn.holders.get(this.#at(event) ?? "");
    this.owner.choose(own ? ownerOf(own[0]) : null);
  }

  describe(name) {
    const { holders, cached } = this.drawn;
    const own = holders.get(name);
    if (own) return `${name}: held by ${own.map(shortSequence).join(", ")}; ${plural(own.length, "reference")}`;
    const place = cached.get(name);
    return place === undefined ? `${name}: free` : `${name}: cached prefix, not referenced; number ${place + 1} to be evicted`;
  }

  centre(name) {
    const number = this.numberOf(name);
    if (number === null || number - this.pool.first >= this.shown) return null;
    const i = number - this.pool.first;
    const half = (this.size - GAP) / 2;
    const box = this.canvas.getBoundingClientRect();
    return {
      x: box.left + (i % this.columns) * this.size + half,
      y: box.top + Math.floor(i / this.columns) * this.size + half,
      radius: half,
    };
  }
}

const shortSequence = (sequence) => `${short(ownerOf(sequence))}${sequence.slice(sequence.lastIndexOf("/"))}`;

function stripes(context, own, x, y, side) {
  const shown = own.slice(0, MOST_STRIPES);
  const width = side / shown.length;
  shown.forEach((sequence, i) => filled(context, ofSequence(sequence), x + i * width, y, width, side));
}

function filled(context, colour, x, y, width, height = width) {
  context.fillStyle = colour;
  context.fillRect(x, y, width, height);
}

function outlined(context, colour, x, y, side) {
  context.strokeStyle = colour;
  context.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
}

function figure(context, number, x, y, side) {
  context.font = `600 ${Math.min(12, side * 0.55)}px system-ui, sans-serif`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.lineWidth = 2.5;
  context.strokeStyle = "rgb(0 0 0 / 55%)";
  context.strokeText(number, x, y + 0.5);
  context.lineWidth = 1;
  context.fillStyle = "white";
  context.fillText(number, x, y + 0.5);
}
