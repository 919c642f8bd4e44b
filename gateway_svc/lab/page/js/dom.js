// Elements, and figures as text.

const SVG = "http://www.w3.org/2000/svg";

/** An element of `tag` ("p.note") with properties and children. `on*`: listeners; `aria-*`, `data-*`, `role`: attributes. */
export function el(tag, properties = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  if (classes.length) element.classList.add(...classes);
  for (const [key, value] of Object.entries(properties)) give(element, key, value);
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

function give(element, key, value) {
  if (value === null || value === undefined) return;
  if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
  else if (key.startsWith("--")) element.style.setProperty(key, value);
  else if (key.includes("-") || key === "role" || key === "for") element.setAttribute(key, value);
  else element[key] = value;
}

/** An SVG element with attributes. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Sets text only where it changed: screen readers and layout are left alone otherwise. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const whole = (number) => Math.round(number).toLocaleString("en-US");

export const plural = (count, one, many = `${one}s`) => `${whole(count)} ${count === 1 ? one : many}`;

/** Milliseconds as people read them. */
export function duration(ms) {
  if (ms < 1) return `${(ms * 1000).toFixed(0)} µs`;
  if (ms < 100) return `${ms.toFixed(1)} ms`;
  if (ms < 10_000) return `${whole(ms)} ms`;
  return `${(ms / 1000).toFixed(1)} s`;
}

/** The end of a long id, which is where made-up ones differ; the tenant in front of it stays. */
export function short(id) {
  const [tenant, name] = id.includes(":") ? id.split(/:(.*)/s) : ["", id];
  const clipped = name.length > 14 ? `…${name.slice(-6)}` : name;
  return tenant ? `${tenant}:${clipped}` : clipped;
}

/** A number as it is shown beside its name. */
export function value(number) {
  if (typeof number !== "number") return short(String(number));
  return Number.isInteger(number) ? whole(number) : number.toFixed(3);
}

/** Calls `work` once in the next frame, however often it is asked for. */
export function oncePerFrame(work) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      work();
    });
  };
}
