// Buttons, keys and tabs.

import { byId } from "./dom.js";

/** The buttons of the timeline. */
export function bindTransport(player) {
  const bind = (id, work) => byId(id).addEventListener("click", work);
  bind("first", () => player.go(0));
  bind("back", () => player.step(-1));
  bind("run", () => player.toggle());
  bind("forward", () => player.step(1));
  bind("last", () => (player.history.now ? player.newest() : player.go(player.last)));
  byId("speed").addEventListener("change", (event) => player.speed(Number(event.target.value)));
}

/** Shows whether it plays, and what can be pressed. */
export function showTransport(player) {
  const moves = player.playing || (player.following && player.history.now !== null);
  const run = byId("run");
  run.dataset.state = moves ? "playing" : "paused";
  run.setAttribute("aria-label", moves ? "Pause" : "Play");
  const nothing = player.history.count === 0;
  byId("first").disabled = byId("back").disabled = nothing || (player.at === 0 && !player.history.hasOlder);
  byId("forward").disabled = nothing || player.at >= player.last;
  byId("last").disabled = nothing || player.following;
}

/** Keys, wherever the focus is but in a field. `clear()`: nothing is chosen any more. */
export function bindKeys(player, clear) {
  const keys = {
    " ": () => player.toggle(),
    ArrowLeft: (event) => player.step(event.shiftKey ? -10 : -1),
    ArrowRight: (event) => player.step(event.shiftKey ? 10 : 1),
    Home: () => player.go(0),
    End: () => (player.history.now ? player.newest() : player.go(player.last)),
    Escape: clear,
  };
  document.addEventListener("keydown", (event) => {
    const work = keys[event.key];
    if (!work || event.ctrlKey || event.metaKey || event.altKey || isMeantFor(event)) return;
    event.preventDefault();
    work(event);
  });
}

function isMeantFor({ target, key }) {
  if (target.closest("dialog")) return true;
  if (target.matches("input[type=range]")) return key === "Home" || key === "End" ? false : key === " ";
  if (target.matches("input, textarea, select")) return true;
  return target.matches("button, a, [role=tab]") && key === " ";
}

/** The tabs at the side; returns what shows one of them. */
export function bindTabs() {
  const names = ["why", "play"];
  const show = (name) => {
    for (const other of names) {
      byId(`tab-${other}`).setAttribute("aria-selected", String(other === name));
      byId(other).hidden = other !== name;
    }
  };
  for (const name of names) byId(`tab-${name}`).addEventListener("click", () => show(name));
  return show;
}
