// Steps that the page holds, with the block tables right after each. Tables are shared between steps as far as they are equal.
//
// A frame is one moment: blocks, queues and reasons right after the step's plan. Both kinds have `count`, `summary(i)` (what timeline and lanes draw), `indexOf(step)`, `ready(i)` (the frame, or null while it is not
// here) and `load(i)`. A frame is {step, tables: Map(sequence -> names of blocks), snapshot}; without a snapshot only what ran is known.

const MAX_STEPS = 4_000;
const MAX_SNAPSHOTS = 1_500;
const OLDER = 200;

export function summaryOf(step) {
  const tokens = (prefill) => step.shares.reduce((sum, share) => sum + (share.prefill === prefill ? share.tokens : 0), 0);
  return {
    step: step.step,
    lane: step.lane,
    at: step.times.planned_ms,
    finished: step.times.finished_ms,
    duration: step.times.duration_ms,
    prefill: tokens(true),
    decode: tokens(false),
    moved: step.swap_in.length + step.swap_out.length + step.copy.length,
    preempted: step.preempted.length,
    error: step.error,
  };
}

function applied(tables, change) {
  const next = change.whole ? new Map() : new Map(tables);
  for (const name of change.gone) next.delete(name);
  for (const [name, blocks] of Object.entries(change.changed)) next.set(name, blocks);
  return next;
}

function framesOf(steps, tables = new Map()) {
  return steps.map((step) => {
    tables = applied(tables, step.tables);
    return { step, tables, summary: summaryOf(step), snapshot: step.snapshot };
  });
}

/** Index of the first of `items` with a `key` of at least `wanted`. */
function placeOf(items, wanted, key) {
  let [low, high] = [0, items.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (key(items[middle]) < wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** What came from a running scheduler, bounded. `now`: the newest frame, or what there is while no request runs (`isBehind` its step). */
export class LiveHistory {
  constructor() {
    this.clear();
  }

  clear() {
    this.frames = [];
    this.now = null;
    this.hasOlder = true;
  }

  get count() {
    return this.frames.length;
  }

  get newest() {
    return this.frames.at(-1)?.step.step ?? 0;
  }

  /** Takes the next step; returns how many of the oldest were let go for it. */
  addStep(step) {
    const last = this.frames.at(-1);
    const [frame] = framesOf([step], last?.tables);
    this.frames.push(frame);
    this.now = { ...frame, isBehind: false };
    const old = this.frames.at(-MAX_SNAPSHOTS - 1);
    if (old) old.snapshot = null;
    const surplus = Math.max(0, this.frames.length - MAX_STEPS);
    this.frames.splice(0, surplus);
    return surplus;
  }

  /** Takes what there is while no request runs. */
  addSnapshot(snapshot) {
    const step = this.now?.step ?? null;
    const isBehind = step !== null && snapshot.step > step.step;
    this.now = { step, tables: new Map(Object.entries(snapshot.tables)), snapshot, isBehind };
  }

  /** Steps before the oldest one; returns how many there were. */
  addOlder(steps) {
    const oldest = this.frames[0]?.step.step ?? Infinity;
    const frames = framesOf(steps).filter((frame) => frame.step.step < oldest);
    this.frames.unshift(...frames);
    this.hasOlder = frames.length > 0 && frames[0].step.step > 1;
    return frames.length;
  }

  get olderQuery() {
    const oldest = this.frames[0]?.step.step ?? 1;
    return `since=${Math.max(1, oldest - OLDER)}&limit=${OLDER}`;
  }

  summary(i) {
    return this.frames[i].summary;
  }

  indexOf(step) {
    return Math.min(placeOf(this.frames, step, (frame) => frame.step.step), this.count - 1);
  }

  ready(i) {
    return this.frames[i] ?? null;
  }

  async load(i) {
    return this.ready(i);
  }
}

const CHUNK = 40;
const MAX_CHUNKS = 12;

/** A recording: the overview is there from the beginning, frames are fetched in chunks when they are shown. */
export class RecordedHistory {
  constructor(overview, fetchSteps) {
    this.overview = overview;
    this.count = overview.step.length;
    this.chunks = new Map();
    this.fetchSteps = fetchSteps;
    this.hasOlder = false;
    this.now = null;
  }

  summary(i) {
    const o = this.overview;
    return {
      step: o.step[i],
      lane: o.lane[i],
      at: o.at_ms[i],
      finished: o.finished_ms[i],
      duration: o.duration_ms[i],
      prefill: o.prefill_tokens[i],
      decode: o.decode_tokens[i],
      moved: o.num_moved[i],
      preempted: o.num_preempted[i],
      error: "",
    };
  }

  indexOf(step) {
    return Math.min(placeOf(this.overview.step, step, (number) => number), this.count - 1);
  }

  ready(i) {
    this.#fetch(Math.floor(i / CHUNK) + 1);
    return this.chunks.get(Math.floor(i / CHUNK))?.frames?.[i % CHUNK] ?? null;
  }

  async load(i) {
    await this.#fetch(Math.floor(i / CHUNK));
    return this.ready(i);
  }

  #fetch(number) {
    const start = number * CHUNK;
    if (start >= this.count) return Promise.resolve();
    const known = this.chunks.get(number);
    if (known) return known.done;
    const chunk = { frames: null };
    this.chunks.set(number, chunk);
    chunk.done = this.fetchSteps(`since=${this.overview.step[start]}&limit=${CHUNK}`).then(
      (steps) => {
        chunk.frames = framesOf(steps);
      },
      (error) => {
        this.chunks.delete(number);
        throw error;
      },
    );
    chunk.done.catch(() => undefined);
    for (const old of [...this.chunks.keys()].slice(0, -MAX_CHUNKS)) this.chunks.delete(old);
    return chunk.done;
  }
}
