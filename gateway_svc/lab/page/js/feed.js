// The live stream: opened while the page is visible, reopened when it breaks, closed while the page is hidden.

import { ApiError, follow } from "./api.js";

const AGAIN_MS = 1_000;

/** Feeds `history`. `told(surplus)` after each event, `states({connected, error})` when the connection changes. */
export class LiveFeed {
  constructor(history, told, states) {
    this.history = history;
    this.told = told;
    this.states = states;
    this.stream = null;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#close() : this.open()));
  }

  /** Follows until the page is hidden or left; safe to call again. */
  async open() {
    if (this.stream !== null || document.hidden) return;
    const stream = new AbortController();
    this.stream = stream;
    while (this.stream === stream) {
      const error = await this.#followOnce(stream.signal);
      if (this.stream !== stream) return;
      this.states({ connected: false, error });
      if (error.status === 401 || error.status === 403) break;
      await new Promise((go) => setTimeout(go, (error.retryAfterS ?? 0) * 1_000 || AGAIN_MS));
    }
    if (this.stream === stream) this.stream = null;
  }

  #close() {
    const stream = this.stream;
    this.stream = null;
    stream?.abort();
  }

  async #followOnce(signal) {
    const since = this.history.newest ? this.history.newest + 1 : 0;
    let failed = new ApiError(0, "the stream ended");
    try {
      await follow(`/lab/stream?since=${since}`, (kind, value) => {
        if (kind === "error") failed = new ApiError(503, value.message);
        else this.#take(kind, value);
      }, signal);
    } catch (error) {
      failed = error instanceof ApiError ? error : new ApiError(0, "the connection broke");
    }
    return failed;
  }

  #take(kind, value) {
    this.states({ connected: true, error: null });
    if (value.step < this.history.newest) {
      // Another scheduler counts from the beginning: what the page holds is of the one before.
      this.history.clear();
      this.#close();
      setTimeout(() => this.open(), 0);
    }
    if (kind === "step") {
      this.told(this.history.addStep(value));
      return;
    }
    this.history.addSnapshot(value);
    this.told(0);
  }
}
