// Where on the timeline the page is: at the newest step, or at a chosen one; and the clock of playback.

/** Owner of the place. `changed()` after each move; `older()` loads what is before the oldest step, where there is some. */
export class Player {
  constructor(history, changed, older = async () => 0) {
    this.history = history;
    this.changed = changed;
    this.older = older;
    this.at = 0;
    this.following = true;
    this.timer = null;
    this.perSecond = 5;
  }

  get playing() {
    return this.timer !== null;
  }

  get last() {
    return Math.max(0, this.history.count - 1);
  }

  /** The history grew, and lost `surplus` of its oldest. */
  grew(surplus) {
    this.at = this.following ? this.last : Math.max(0, this.at - surplus);
    this.changed();
  }

  go(index) {
    this.at = Math.min(Math.max(0, index), this.last);
    this.following = false;
    this.changed();
  }

  newest() {
    this.#stop();
    this.at = this.last;
    this.following = true;
    this.changed();
  }

  async step(count) {
    if (this.at + count < 0 && this.history.hasOlder) this.at += await this.older();
    this.go(this.at + count);
  }

  /** At the newest step playing means following; further back it walks there. */
  toggle() {
    if (this.playing) this.pause();
    else if (this.following && this.history.now) this.pause();
    else if (this.at >= this.last && this.history.now) this.newest();
    else this.#start();
  }

  pause() {
    this.#stop();
    this.following = false;
    this.changed();
  }

  speed(perSecond) {
    this.perSecond = perSecond;
    if (this.playing) this.#start();
  }

  #start() {
    this.#stop();
    if (this.at >= this.last) this.at = 0;
    this.following = false;
    this.timer = setInterval(() => this.#tick(), 1_000 / this.perSecond);
    this.changed();
  }

  #stop() {
    clearInterval(this.timer);
    this.timer = null;
  }

  #tick() {
    if (this.at + 1 < this.last) {
      this.at += 1;
      this.changed();
    } else if (this.history.now) {
      this.newest();
    } else {
      this.at = this.last;
      this.pause();
    }
  }
}
