// The rows of an execution as a Gantt chart in SVG: steps, attempts, waits and what is in flight. Long ones are folded.

import { execution, get } from "./api.js";
import { duration, h, moment, now, number, patch, s, seconds, toast } from "./dom.js";

const MOST_ROWS = 600; // drawn one by one; more are fetched anew, folded
const WAITS = new Set(["sleep", "wait", "pause"]);
const MARKS = new Set(["start", "resume", "retry", "state", "block"]);
const WORDS = { sleep: "slept", wait: "waited for a signal", pause: "paused" };

export class Timeline {
  constructor(id, onSelect) {
    this.id = id;
    this.onSelect = onSelect;
    this.items = [];
    this.pending = [];
    this.axis = h("div", { class: "axis", "aria-hidden": "true" });
    this.rows = h("ol", { class: "gantt" });
    this.after = h("p", { class: "soft" });
    this.element = h("div", { class: "timeline" }, this.axis, this.rows, this.after);
    this.rows.addEventListener("pointerdown", () => this.hold());
  }

  // Between pressing and releasing, what is pressed must not be replaced: the click would be lost.
  hold() {
    this.held = true;
    const release = () => {
      this.held = false;
      setTimeout(() => this.owed && this.draw());
    };
    for (const kind of ["pointerup", "pointercancel"]) window.addEventListener(kind, release, { once: true });
  }

  async load() {
    const answer = await get(execution(this.id, "/timeline"));
    this.items = answer.rows;
    this.lastSeq = answer.last_seq;
    this.setPending(answer);
    this.draw();
    if (this.inFlight && !this.scrolled) this.rows.scrollTop = this.rows.scrollHeight; // what happens now is at the end
    this.scrolled = true;
  }

  setPending(answer) {
    this.pending = answer.pending.map((name, n) => ({ name, step: answer.pending_from + n }));
    this.total = answer.total;
  }

  // What the live stream brings: new rows, and what is in flight.
  async update(inFlight, rows, refold) {
    this.inFlight = inFlight;
    if (refold || this.items.length + rows.length > MOST_ROWS) return this.load();
    const fresh = rows.filter((row) => row.seq > (this.lastSeq || 0));
    if (fresh.length) {
      this.items.push(...fresh);
      this.lastSeq = fresh.at(-1).seq;
    }
    const from = inFlight ? inFlight.step + (inFlight.started ? 1 : 0) : Infinity;
    this.pending = this.pending.filter((one) => one.step >= from);
    if (this.pending.length < 4 && inFlight && this.total - from > this.pending.length && fresh.length) {
      this.setPending(await get(execution(this.id, `/timeline?after=${this.lastSeq}`)));
    }
    return this.draw();
  }

  flat() {
    return this.items.flatMap((item) => (item.fold && item.open ? [item, ...item.open] : [item]));
  }

  span() {
    const starts = this.items.map((item) => seconds(item.started ?? item.ended)).filter((at) => at !== null);
    const first = starts.length ? Math.min(...starts) : now();
    const ended = this.items.length ? seconds(this.items.at(-1).ended) : now();
    const last = this.inFlight ? now() : ended;
    return [first, Math.max(last, first + 0.001)];
  }

  draw() {
    this.owed = this.held;
    if (this.held) return;
    const [first, last] = this.span();
    const place = (at) => ((Math.min(Math.max(at, first), last) - first) / (last - first)) * 100;
    this.place = place;
    patch(this.axis, [Math.round(first), duration(last - first)], () => axis(first, last));
    const flat = this.flat();
    const lines = flat.map((item, n) => this.line(item, flat[n + 1]));
    if (this.inFlight) lines.push(this.flightLine());
    for (const one of this.pending) if (one.step !== this.inFlight?.step) lines.push(pendingLine(one));
    const focused = this.rows.contains(document.activeElement) ? document.activeElement.parentElement.dataset.row : null;
    this.rows.replaceChildren(...lines);
    if (focused) this.rows.querySelector(`li[data-row="${focused}"] button`)?.focus({ preventScroll: true });
    const behind = this.pending.length ? this.total - this.pending.at(-1).step - 1 : 0;
    this.after.textContent = behind > 0 ? `and ${number(behind)} more steps to come` : "";
    this.mark();
  }

  // Between two updates time goes on for what is in flight.
  grow() {
    if (this.inFlight) this.draw();
  }

  select(key) {
    this.chosen = key;
    this.mark();
  }

  mark() {
    for (const line of this.rows.children) line.classList.toggle("chosen", line.dataset.row === String(this.chosen));
  }

  line(item, next) {
    if (item.fold) return this.foldLine(item);
    const track = s("svg", { class: "track", "aria-hidden": "true" });
    const from = seconds(item.started ?? item.ended), to = seconds(item.ended);
    if (MARKS.has(item.kind)) track.append(mark(this.place(to), item.kind));
    else track.append(...bars(this.place(from), this.place(to), item));
    if (WAITS.has(item.kind)) track.append(this.wait(item, next));
    const times = item.attempts > 1 ? ` ×${item.attempts}` : "";
    const words = [item.kind, item.seconds !== null && !MARKS.has(item.kind) ? duration(item.seconds) : null, item.attempts > 1 ? `${item.attempts} attempts` : null, item.error ? "with an error" : null].filter(Boolean).join(", ");
    return h("li", { class: `${item.kind} ${item.error ? "error" : ""}`, "data-row": item.seq },
      h("button", { type: "button", class: "label", title: `${words}\n${moment(item.started)} – ${moment(item.ended)}`, onclick: () => this.choose(item.seq) },
        h("span", { class: "soft" }, item.kind === "start" ? "" : `${number(item.step + 1)} `), h("span", { class: "what" }, item.kind === "start" ? "start" : item.name ?? item.kind),
        times ? h("b", { class: "times" }, times) : null,
        h("span", { class: "soft kind" }, ` ${item.kind === "step" || item.kind === "start" ? "" : item.kind}`),
        h("span", { class: "soft took" }, MARKS.has(item.kind) ? "" : duration(item.seconds))), track);
  }

  // A wait lasts from the row that began it to whatever came next.
  wait(item, next) {
    const from = this.place(seconds(item.ended));
    const end = next ? seconds(item.kind === "pause" ? next.ended : next.started ?? next.ended) : this.inFlight?.started && item.kind !== "pause" ? seconds(this.inFlight.started) : now();
    return s("rect", { class: "wait", x: `${from}%`, y: "38%", width: `${Math.max(0.2, this.place(end) - from)}%`, height: "24%" },
      s("title", null, `${WORDS[item.kind]} ${duration(end - seconds(item.ended))}`));
  }

  foldLine(item) {
    const from = this.place(seconds(item.started)), to = this.place(seconds(item.ended));
    const notes = [item.retried ? `${number(item.retried)} retried` : null, item.errors ? `${number(item.errors)} with errors` : null, item.waits ? `${number(item.waits)} ${item.waits === 1 ? "wait" : "waits"}` : null].filter(Boolean);
    const track = s("svg", { class: "track", "aria-hidden": "true" }, s("rect", { class: "folded", x: `${from}%`, y: "20%", width: `${Math.max(0.4, to - from)}%`, height: "60%" }));
    return h("li", { class: `fold ${item.errors ? "error" : ""}`, "data-row": `fold${item.first}` },
      h("button", { type: "button", class: "label", "aria-expanded": String(Boolean(item.open)), onclick: () => this.unfold(item) },
        h("span", { class: "what" }, `${item.open ? "▾" : "▸"} rows ${number(item.first)}–${number(item.last)}`), h("span", { class: "soft" }, notes.length ? ` ${notes.join(", ")}` : "")), track);
  }

  async unfold(item) {
    if (item.open) item.open = null;
    else {
      try {
        item.open = (await get(execution(this.id, `/timeline?after=${item.first - 1}&before=${item.last + 1}`))).rows;
      } catch (error) {
        toast(error.message, "bad");
      }
    }
    this.draw();
  }

  flightLine() {
    const flight = this.inFlight;
    const started = flight.started ?? this.items.at(-1)?.ended;
    const from = this.place(seconds(started) ?? now());
    const [word, runs] = flightWord(flight);
    const told = !flight.started && WAITS.has(this.items.at(-1)?.kind); // the row before shows this wait already
    const shape = runs ? { class: "flight", y: "20%", height: "60%" } : { class: "wait", y: "38%", height: "24%" };
    const track = s("svg", { class: "track", "aria-hidden": "true" }, told ? null : s("rect", { ...shape, x: `${from}%`, width: `${Math.max(0.4, 100 - from)}%` }));
    return h("li", { class: "now", "data-row": "now" }, h("button", { type: "button", class: "label", onclick: () => this.choose("now") },
      h("span", { class: "soft" }, `${number(flight.step + 1)} `), h("span", { class: "what" }, flight.name ?? "–"), flight.failed_attempts ? h("b", { class: "times" }, ` ×${flight.failed_attempts + 1}`) : null,
      h("span", { class: "soft kind" }, ` ${word}`)), track);
  }

  choose(key) {
    this.select(key);
    this.onSelect(key);
  }
}

// What goes on in the step in flight, and whether it is running.
function flightWord(flight) {
  if (flight.waiting_for) return [`waits for ${flight.waiting_for}`, false];
  if (flight.due && seconds(flight.due) > now()) return [flight.failed_attempts ? "backs off" : "sleeps", false];
  if (flight.state === "paused" || flight.state === "blocked") return [flight.state, false];
  if (!flight.started) return ["next", false];
  return flight.owned ? ["in flight", true] : ["interrupted", false];
}

// One bar; a step that took several attempts shows as many parts (when each began is not stored, how many is).
function bars(from, to, item) {
  const width = Math.max(0.4, to - from);
  const parts = Math.min(Math.max(1, item.attempts), 12);
  const one = width / parts;
  const title = () => s("title", null, `${item.name ?? item.kind}: ${duration(item.seconds)}${item.attempts > 1 ? `, ${item.attempts} attempts` : ""}`);
  return Array.from({ length: parts }, (_, n) => {
    const lost = n < parts - 1 || item.kind === "fail";
    return s("rect", { class: lost ? "lost" : item.kind === "cancel" ? "cancelled" : "done", x: `${from + n * one}%`, y: "20%", width: `${parts > 1 ? one * 0.94 : one}%`, height: "60%", rx: 2 }, title());
  });
}

const mark = (at, kind) => s("circle", { class: `mark ${kind}`, cx: `${Math.min(99.4, Math.max(0.6, at))}%`, cy: "50%", r: 4 }, s("title", null, kind));

function pendingLine(one) {
  return h("li", { class: "pending" }, h("span", { class: "label" }, h("span", { class: "soft" }, `${number(one.step + 1)} `), h("span", { class: "what" }, one.name)), s("svg", { class: "track", "aria-hidden": "true" }));
}

function axis(first, last) {
  const length = last - first;
  const labels = [0, 0.25, 0.5, 0.75, 1].map((part) => h("span", null, part === 0 ? "0" : `+${duration(length * part)}`));
  return [h("span", { class: "soft" }, `from ${moment(new Date(first * 1000).toISOString())}`), h("span", { class: "ticks" }, labels)];
}
