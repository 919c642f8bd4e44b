// Colours of owners: a hue for each request in the order in which they were seen, a lightness for each of its sequences.

const GOLDEN_ANGLE = 137.508;
const FIRST_HUE = 250;
const MAX_KNOWN = 4_000;
const SHADES = [0, 0.1, -0.1, 0.18, -0.16];

const dark = matchMedia("(prefers-color-scheme: dark)");
const numbers = new Map();

/** The request that a sequence "ID/0" is of. */
export const ownerOf = (sequence) => sequence.slice(0, sequence.lastIndexOf("/"));

const choiceOf = (sequence) => Number(sequence.slice(sequence.lastIndexOf("/") + 1));

function numberOf(id) {
  let number = numbers.get(id);
  if (number === undefined) {
    if (numbers.size >= MAX_KNOWN) numbers.clear();
    number = numbers.size;
    numbers.set(id, number);
  }
  return number;
}

function colour(id, shade) {
  const hue = (FIRST_HUE + numberOf(id) * GOLDEN_ANGLE) % 360;
  const base = dark.matches ? 0.68 : 0.62;
  return `oklch(${(base + shade).toFixed(3)} 0.135 ${hue.toFixed(1)})`;
}

export const ofRequest = (id) => colour(id, 0);

export const ofSequence = (sequence) => colour(ownerOf(sequence), SHADES[choiceOf(sequence) % SHADES.length]);

/** The page's own colours as CSS has them now, for canvases. */
export function palette() {
  const style = getComputedStyle(document.documentElement);
  return new Proxy({}, { get: (_, name) => style.getPropertyValue(`--${String(name)}`).trim() });
}

/** Calls `work` when light turns dark or back. */
export const onScheme = (work) => dark.addEventListener("change", work);
