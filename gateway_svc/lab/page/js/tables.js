// Block tables of the chosen request, and arrows: from logical to physical blocks, and of what the step moves.

import { ofSequence, ownerOf } from "./colours.js";
import { el, plural, svg, whole } from "./dom.js";

const MOST_SEQUENCES = 8;
const MOST_BLOCKS = 64;
const MOST_ARROWS = 96;
const KINDS = { swap_out: ["g", "c"], swap_in: ["c", "g"], copy: ["g", "g"] };
const WORDS = { swap_out: "to the host", swap_in: "back from the host", copy: "copied" };

/** Owner of the tables' cells. `hover(block)` as in Pools. */
export class Tables {
  constructor(root, hover) {
    this.root = root;
    this.hover = hover;
    this.cells = [];
  }

  /** Shows the tables of the chosen request. */
  show(frame, holders, selected) {
    const own = [...frame.tables].filter(([sequence]) => ownerOf(sequence) === selected);
    const text = JSON.stringify([selected, own, own.map(([, blocks]) => blocks.map((block) => holders.get(block)?.length))]);
    if (text === this.shown) return;
    this.shown = text;
    this.cells = [];
    this.root.hidden = selected === null;
    this.root.replaceChildren(...this.#rows(own, holders, selected));
  }

  #rows(own, holders, selected) {
    if (selected === null) return [];
    if (!own.length) return [el("p.note", {}, "It holds no blocks at this step.")];
    const rows = own.slice(0, MOST_SEQUENCES).map(([sequence, blocks]) => this.#row(sequence, blocks, holders));
    const left = own.length - rows.length;
    return left > 0 ? [...rows, el("p.note", {}, `and ${plural(left, "sequence")} more`)] : rows;
  }

  #row(sequence, blocks, holders) {
    const cells = blocks.slice(0, MOST_BLOCKS).map((block, i) => this.#cell(sequence, block, i, holders));
    const left = blocks.length - cells.length;
    const name = sequence.slice(sequence.lastIndexOf("/"));
    const label = `Block table of sequence ${name}: ${blocks.join(" ")}`;
    return el(
      "div.table-row",
      { role: "group", "aria-label": label },
      el("span.sequence", { title: sequence }, name),
      el("span.cells", {}, ...cells, left > 0 ? el("span.note", {}, `+ ${whole(left)}`) : ""),
    );
  }

  #cell(sequence, block, place, holders) {
    const count = holders.get(block)?.length ?? 1;
    const cell = el(
      "span.cell",
      {
        "--owner": ofSequence(sequence),
        title: `logical block ${place} of ${sequence} is ${block}; ${plural(count, "reference")}`,
        "data-shared": String(count > 1),
        onpointerenter: () => this.hover(block),
        onpointerleave: () => this.hover(null),
      },
      el("b", {}, String(place)),
      block,
    );
    this.cells.push({ cell, block, sequence });
    return cell;
  }
}

/** Owner of the arrows over tables and pools. */
export class Arrows {
  constructor(layer, stage, tables, pools) {
    this.layer = layer;
    this.stage = stage;
    this.tables = tables;
    this.pools = pools;
  }

  /** Draws for a step (null: none) and the block that the pointer is at. */
  show(step, hovered) {
    const box = this.stage.getBoundingClientRect();
    this.offset = { x: box.left - this.stage.scrollLeft, y: box.top - this.stage.scrollTop };
    this.layer.replaceChildren(heads(), ...this.#logical(hovered), ...(step ? this.#moved(step) : []));
    this.layer.style.height = `${this.stage.scrollHeight}px`;
  }

  #logical(hovered) {
    const near = this.tables.cells.filter(({ block }) => hovered === null || block === hovered);
    const cells = near.length ? near : this.tables.cells;
    if (cells.length > MOST_ARROWS && hovered === null) return [];
    return cells.map(({ cell, block, sequence }) => this.#arrow(cell, block, sequence, hovered)).filter(Boolean);
  }

  #arrow(cell, block, sequence, hovered) {
    const to = this.pools.centre(block);
    if (!to) return null;
    const box = cell.getBoundingClientRect();
    const from = { x: box.left + box.width / 2, y: box.bottom };
    const path = this.#curve(from, { x: to.x, y: to.y - to.radius });
    const kind = block === hovered ? "logical hovered" : "logical";
    return svg("path", { d: path, class: kind, stroke: ofSequence(sequence), "marker-end": "url(#head)" });
  }

  #moved(step) {
    const paths = [];
    for (const [kind, [from, to]] of Object.entries(KINDS)) {
      for (const [source, destination] of step[kind].slice(0, MOST_ARROWS)) {
        const ends = [this.pools.centre(this.#named(from, source, step)), this.pools.centre(this.#named(to, destination, step))];
        if (ends.every(Boolean)) paths.push(svg("path", { d: this.#curve(...ends), class: `move ${kind}`, "marker-end": "url(#head)" }));
      }
    }
    return paths;
  }

  #named(tier, number, step) {
    const plain = `${tier}${number}`;
    return this.pools.centre(plain) ? plain : `${plain}@${step.lane}`;
  }

  #curve(from, to) {
    const [x1, y1, x2, y2] = [from.x - this.offset.x, from.y - this.offset.y, to.x - this.offset.x, to.y - this.offset.y];
    const bend = Math.max(14, Math.abs(y2 - y1) * 0.45);
    const point = (number) => number.toFixed(1);
    return `M${point(x1)} ${point(y1)}C${point(x1)} ${point(y1 + bend)} ${point(x2)} ${point(y2 - bend)} ${point(x2)} ${point(y2)}`;
  }
}

function heads() {
  const shape = svg("path", { d: "M0 0L6 3L0 6z", fill: "context-stroke" });
  const size = { markerWidth: 6, markerHeight: 6, refX: 5, refY: 3, orient: "auto", markerUnits: "userSpaceOnUse" };
  return svg("defs", {}, svg("marker", { id: "head", ...size }, shape));
}

/** "4 blocks to the host: g3 → c0, …" of a step; empty where nothing moves. */
export function movesText(step) {
  const parts = [];
  for (const [kind, [from, to]] of Object.entries(KINDS)) {
    const pairs = step?.[kind] ?? [];
    if (!pairs.length) continue;
    const named = pairs.slice(0, 4).map(([source, destination]) => `${from}${source} → ${to}${destination}`);
    parts.push(`${plural(pairs.length, "block")} ${WORDS[kind]}: ${named.join(", ")}${pairs.length > 4 ? ", …" : ""}`);
  }
  return parts.join(" · ");
}
