// The page put together: a source of steps, the place on the timeline, and the panels that show it.

import { get, hasKey, useKey } from "./api.js";
import { onScheme, ownerOf } from "./colours.js";
import { byId, el, oncePerFrame, plural, say, whole } from "./dom.js";
import { LiveFeed } from "./feed.js";
import { LiveHistory, RecordedHistory } from "./history.js";
import { Lanes } from "./lanes.js";
import { Playground } from "./playground.js";
import { Player } from "./player.js";
import { holdersOf, Pools } from "./pools.js";
import { Queues } from "./queues.js";
import { bindKeys, bindTabs, bindTransport, showTransport } from "./controls.js";
import { Arrows, movesText, Tables } from "./tables.js";
import { sayStep, Timeline } from "./timeline.js";
import { Why } from "./why.js";

class Lab {
  constructor(about, history) {
    this.about = about;
    this.history = history;
    this.selected = null;
    this.hovered = null;
    this.pendingId = null;
    this.moving = null;
    this.draw = oncePerFrame(() => this.#show());
    this.player = new Player(history, this.draw, () => this.#loadOlder());
    const choose = (id) => this.choose(id);
    const hover = (block) => this.#hover(block);
    this.queues = new Queues(byId("queue-lists"), byId("queues-note"), choose);
    this.pools = new Pools(byId("pools"), hover, choose);
    this.tables = new Tables(byId("tables"), hover);
    this.arrows = new Arrows(byId("arrows"), byId("memory-stage"), this.tables, this.pools);
    this.lanes = new Lanes(byId("lanes"), (index) => this.player.go(index));
    this.timeline = new Timeline(byId("bars"), byId("slider"), (index) => this.player.go(index));
    this.why = new Why(byId("why"), (step) => this.goToStep(step), about.mode === "live");
    this.showTab = bindTabs();
    bindTransport(this.player);
    bindKeys(this.player, () => this.choose(null));
    new ResizeObserver(this.draw).observe(byId("memory-stage"));
    onScheme(this.draw);
  }

  choose(id) {
    this.selected = id === this.selected ? null : id;
    this.pendingId = null;
    if (this.selected !== null) this.showTab("why");
    this.draw();
  }

  /** Chooses a request of the playground as soon as it is seen. */
  await(publicId) {
    this.pendingId = publicId;
  }

  async goToStep(step) {
    while (this.history.hasOlder && this.history.count && step < this.history.summary(0).step) {
      if ((await this.#loadOlder()) === 0) break;
    }
    this.player.go(this.history.indexOf(step));
  }

  async #loadOlder() {
    const count = this.history.addOlder(await get(`/lab/steps?${this.history.olderQuery}`));
    this.player.at += count;
    return count;
  }

  #hover(block) {
    if (block === this.hovered) return;
    this.hovered = block;
    say(byId("memory-note"), block === null ? "" : this.pools.describe(block));
    this.arrows.show(this.moving, block);
  }

  #frame() {
    const { player, history } = this;
    if (player.following && history.now) return { ...history.now, isNow: true };
    const frame = history.ready(player.at);
    if (!frame && history.count) {
      history.load(player.at).then(this.draw, (error) => say(byId("mode"), error.message));
    }
    return frame ?? this.frame;
  }

  #show() {
    const frame = this.#frame();
    showTransport(this.player);
    this.timeline.show(this.history, this.player.at);
    this.lanes.show(this.history, this.player.at);
    if (!frame) return;
    this.frame = frame;
    this.#choosePending(frame);
    const holders = holdersOf(frame.tables);
    this.queues.show(frame, this.selected);
    const holds = [...frame.tables.keys()].some((sequence) => ownerOf(sequence) === this.selected);
    this.pools.show(frame, holders, holds ? this.selected : null);
    this.tables.show(frame, holders, this.selected);
    this.moving = frame.isBehind ? null : frame.step;
    this.arrows.show(this.moving, this.hovered);
    say(byId("moves"), movesText(this.moving));
    sayStep(byId("step-text"), frame);
    showFigures(frame, this.#speed());
    const request = frame.snapshot?.requests.find((one) => one.id === this.selected);
    const nowMs = this.history.count ? this.history.summary(this.player.last).finished : 0;
    this.why.show(this.selected, request, frame.isNow === true, nowMs);
    this.why.mark(frame.isNow ? null : (frame.step?.step ?? null));
  }

  #choosePending(frame) {
    if (this.pendingId === null) return;
    const found = frame.snapshot?.requests.find((request) => request.request_id === this.pendingId);
    const share = frame.step?.shares.find(({ id }) => id === this.pendingId || id.endsWith(`:${this.pendingId}`));
    if (!found && !share) return;
    this.selected = (found ?? share).id;
    this.pendingId = null;
  }

  /** Steps per second over the last second of what is known. */
  #speed() {
    const { history, player } = this;
    if (!history.count) return 0;
    const { at } = history.summary(player.at);
    let i = player.at;
    while (i > 0 && at - history.summary(i - 1).at < 1_000) i -= 1;
    const span = at - history.summary(i).at;
    return span > 0 ? ((player.at - i) / span) * 1_000 : 0;
  }
}

function showFigures({ step, snapshot }, perSecond) {
  // A step tells its queues as the scheduler counts them, where each choice of a request may be one of its own.
  const queues = snapshot ? countsOf(snapshot) : (step?.queues ?? [0, 0, 0]);
  const rows = [
    ["running", whole(queues[1])],
    ["waiting", whole(queues[0])],
    ["swapped", whole(queues[2])],
    ["step", step ? whole(step.step) : "–"],
    ["steps/s", perSecond ? perSecond.toFixed(perSecond < 10 ? 1 : 0) : "–"],
    ["policy", step?.policy ?? "–"],
  ];
  const root = byId("figures");
  const text = JSON.stringify(rows);
  if (root.dataset.shown === text) return;
  root.dataset.shown = text;
  root.replaceChildren(...rows.map(([name, figure]) => el("div", { "data-figure": name }, el("dt", {}, name), el("dd", {}, figure))));
}

function countsOf(snapshot) {
  const count = (queue) => snapshot.reasons.reduce((sum, item) => sum + (item.queue === queue ? item.num_requests : 0), 0);
  return [count("waiting"), count("running"), count("swapped")];
}

// --- beginning ------------------------------------------------------------------------------------------------------------

async function start() {
  const about = await allowed(() => get("/lab/about"));
  if (!about) return;
  document.title = `Quire lab: ${about.title}`;
  const lab = about.mode === "live" ? live(about) : recorded(about);
  lab.draw();
}

function recorded(about) {
  const history = new RecordedHistory(about.overview, (query) => get(`/lab/steps?${query}`));
  byId("mode").dataset.state = "recording";
  say(byId("mode"), `recording ${about.title}, ${plural(history.count, "step")}`);
  const lab = new Lab(about, history);
  lab.player.go(Math.max(0, about.overview.num_preempted.findIndex((count) => count > 0)));
  return lab;
}

function live(about) {
  const history = new LiveHistory();
  const lab = new Lab(about, history);
  const mode = byId("mode");
  const feed = new LiveFeed(history, (surplus) => lab.player.grew(surplus), ({ connected, error }) => {
    mode.dataset.state = connected ? "live" : "away";
    say(mode, connected ? `live: ${about.title}` : `away: ${error.message}`);
    if (error?.status === 401 || error?.status === 403) allowed(() => Promise.reject(error)).then(() => feed.open());
  });
  feed.open();
  if (about.can_generate) {
    byId("tab-play").hidden = false;
    const playground = new Playground(byId("play"), (id) => lab.await(id));
    playground.load().catch(() => undefined);
    byId("tab-play").addEventListener("click", () => playground.load().catch(() => undefined));
  }
  return lab;
}

/** The result of `ask`; where the gateway wants a key, or another, it is asked for first. */
async function allowed(ask) {
  for (;;) {
    try {
      return await ask();
    } catch (error) {
      const mode = byId("mode");
      mode.dataset.state = "away";
      say(mode, error.message);
      if (error.status !== 401 && error.status !== 403) {
        await new Promise((go) => setTimeout(go, 1_000));
        continue;
      }
      if (!(await askForKey(error))) return null;
      ask = () => get("/lab/about");
    }
  }
}

function askForKey(error) {
  const dialog = byId("key-dialog");
  if (hasKey()) say(byId("key-text"), error.message);
  byId("key-button").hidden = false;
  byId("key-button").onclick = () => dialog.showModal();
  if (!dialog.open) dialog.showModal();
  return new Promise((told) => {
    dialog.onclose = () => {
      const key = byId("key").value.trim();
      if (dialog.returnValue === "ok" && key) useKey(key);
      told(dialog.returnValue === "ok" && key !== "");
    };
  });
}

byId("help-button").addEventListener("click", () => byId("help").showModal());
start();
