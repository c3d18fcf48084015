// Elements and text. Everything that comes from a store goes in as text, never as markup: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);
export const s = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

// Rebuild what is inside an element only when what it shows has changed: focus and scrolling stay where they are.
const shown = new WeakMap();
export function patch(element, value, build) {
  const key = JSON.stringify(value) ?? "";
  if (shown.get(element) === key) return;
  shown.set(element, key);
  element.replaceChildren(...[build(value)].flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

// Change a text only when it is another: what somebody has selected with the mouse stays selected.
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Keep a list of elements in step with a list of things, each by its key.
export function keyed(parent, things, keyOf, make, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const wanted = things.map((thing) => {
    const key = keyOf(thing);
    let element = old.get(key);
    if (!element) {
      element = make(thing);
      element.dataset.key = key;
    }
    update(element, thing);
    return element;
  });
  if (wanted.length !== parent.children.length || wanted.some((element, n) => parent.children[n] !== element)) {
    parent.replaceChildren(...wanted);
  }
}

// States: word, glyph and colour, never colour alone.
export const STATES = {
  initialized: "○", running: "▸", paused: "‖", resuming: "↻", waiting: "◷",
  blocked: "⊘", completed: "✓", failed: "✗", cancelled: "∅",
};
export const FINISHED = new Set(["completed", "failed", "cancelled"]);

export function badge(state, more) {
  return h("span", { class: `badge ${state}` }, h("span", { "aria-hidden": "true" }, STATES[state] || "·"), ` ${state}`, more ? ` ${more}` : null);
}

// What the state alone does not say: that it is held, or that nobody runs what says it runs.
export function aside({ state, hold, owner }) {
  if (hold) return "(held)";
  return (!owner && { running: "(interrupted)", resuming: "(no worker yet)" }[state]) || "";
}

// Numbers and times.
const whole = new Intl.NumberFormat("en");
export const number = (value) => (value === null || value === undefined ? "–" : whole.format(value));

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const value = Math.max(0, seconds);
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 59.5) return `${Math.round(value)} s`;
  const two = (n) => String(Math.floor(n)).padStart(2, "0");
  if (value < 3600) return `${Math.floor(value / 60)} min ${two(value % 60)} s`;
  if (value < 86400) return `${Math.floor(value / 3600)} h ${two((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} d ${Math.floor((value % 86400) / 3600)} h`;
}

export function pace(perSecond) {
  if (perSecond >= 1) return `${perSecond.toFixed(1)} items/s`;
  return perSecond * 60 >= 1 ? `${(perSecond * 60).toFixed(1)} items/min` : `${(perSecond * 3600).toFixed(1)} items/h`;
}

export function bytes(size) {
  if (size < 1000) return `${size} B`;
  return size < 1e6 ? `${(size / 1e3).toFixed(1)} kB` : `${(size / 1e6).toFixed(1)} MB`;
}

export const seconds = (time) => (time ? Date.parse(time) / 1000 : null);

let offset = 0; // the server's clock less ours
export const setNow = (time) => { if (time) offset = Date.parse(time) - Date.now(); };
export const now = () => (Date.now() + offset) / 1000;

const MOMENT = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
export const moment = (time) => (time ? MOMENT.format(Date.parse(time)) : "–");

// A time that goes on by itself: how long ago, how long still, or how long since.
const steady = (length) => (length < 10 ? `${Math.max(0, Math.floor(length))} s` : duration(length));
const WORDS = {
  ago: (at) => (now() - at < 1 ? "just now" : `${steady(now() - at)} ago`),
  since: (at) => steady(now() - at),
  until: (at) => (at > now() ? `in ${steady(at - now())}` : "now"),
};
export function clock(time, kind = "ago") {
  const at = seconds(time);
  if (at === null) return h("span", null, "–");
  return h("time", { datetime: time, title: moment(time), "data-clock": kind, "data-at": at }, WORDS[kind](at));
}
export function tick(root = document) {
  for (const element of root.querySelectorAll("time[data-clock]")) {
    write(element, WORDS[element.dataset.clock](Number(element.dataset.at)));
  }
}

export function toast(text, kind = "info") {
  const note = h("div", { class: `toast ${kind}`, role: kind === "bad" ? "alert" : null }, text);
  document.getElementById("toasts").append(note);
  setTimeout(() => note.remove(), kind === "bad" ? 9000 : 4500);
}

// The same trouble once more leaves what is shown as it is: a press on its button is not lost.
export function showProblem(place, error, again) {
  if (place.firstChild?.dataset?.said === error.message) return;
  const shown = problem(error, again);
  shown.dataset.said = error.message;
  place.replaceChildren(shown);
}

export function problem(error, again) {
  return h("div", { class: "empty bad", role: "alert" },
    h("h2", null, error.status === 404 ? "It is not there" : error.status === 401 ? "The token is missing" : "That did not work"),
    h("p", null, error.message),
    error.status === 401 ? h("p", null, "Open the address that ", h("code", null, "longrun dashboard"), " printed when it started.") : null,
    again ? h("button", { type: "button", onclick: again }, "Try again") : null);
}
