// One execution: how far it is, what it would resume with, its timeline, its states, and what can be done with it.

import { execution, get, Live, Patience } from "./api.js";
import { can, verbs } from "./controls.js";
import { aside, badge, bytes, clock, duration, FINISHED, h, moment, number, pace, patch, problem, seconds, showProblem } from "./dom.js";
import { bar, nameCell, progressCell, stepText } from "./list.js";
import { Timeline } from "./timeline.js";

const BASIS = { rate: "from the rate of the items", history: "from earlier runs", own: "from the steps so far" };

export function detail(root, { id, overview }) {
  const view = new Detail(root, id, overview);
  return () => view.close();
}

class Detail {
  constructor(root, id, overview) {
    this.root = root;
    this.id = id;
    this.control = overview.control;
    this.timeline = new Timeline(id, (row) => this.openRow(row));
    this.patience = new Patience(() => this.load());
    this.load();
  }

  close() {
    this.closed = true;
    this.patience.stop();
    this.leave();
  }

  leave() {
    clearInterval(this.growing);
    this.live?.close();
  }

  async load() {
    this.patience.stop();
    try {
      const first = await get(execution(this.id));
      if (this.closed) return;
      this.build();
      this.show(first);
      this.timeline.inFlight = first.in_flight;
      await this.timeline.load();
      if (this.closed) return;
      this.patience.end();
      this.watch();
    } catch (error) {
      if (this.closed) return;
      showProblem(this.root, error, () => this.load());
      this.patience.after(error);
    }
  }

  watch() {
    this.leave();
    const address = () => `api/live/executions/${encodeURIComponent(this.id)}?after=${this.timeline.lastSeq || 0}`;
    this.live = new Live(address, (answer) => {
      this.trouble.replaceChildren();
      this.show(answer.detail);
      this.timeline.update(answer.detail.in_flight, answer.rows, answer.refold).catch((error) => this.fail(error));
    }, (error) => this.fail(error));
    this.growing = setInterval(() => document.hidden || this.timeline.grow(), 1000);
  }

  fail(error) {
    this.trouble.replaceChildren(problem(error));
  }

  build() {
    const part = (name, tag = "section") => (this[name] = h(tag, { class: name }));
    this.trouble = h("div");
    this.root.replaceChildren(
      this.trouble, part("top", "div"), part("state"), part("error"), part("facts"),
      h("section", null, h("h2", null, "Timeline"), this.timeline.element, part("row", "div")),
      part("states"), part("mail"), part("family"));
  }

  show(data) {
    this.data = data;
    const one = data.execution;
    const over = FINISHED.has(one.state);
    patch(this.top, [one.id, one.state, aside(one), one.workflow, one.version, one.waiting_for], () => this.header(one));
    patch(this.state, [one.progress, one.state, one.step, one.step_progress, one.attempt, data.resume, data.hint, one.due, one.waiting_for], () => progress(data, over));
    patch(this.error, [data.error, data.reason, data.damage, data.plan.notes], () => errors(data));
    patch(this.facts, [one.queue, one.priority, one.owner, one.started, one.ended, one.checkpoints, one.parent_id, one.metadata, data.crashes, data.plan.owner_alive], () => facts(data));
    patch(this.states, [data.checkpoints, this.from, this.to], () => this.checkpoints(data.checkpoints));
    patch(this.mail, [data.messages, data.message_count], () => mail(data));
    patch(this.family, data.children, () => children(data));
  }

  header(one) {
    const button = (verb, ...more) => h("button", { type: "button", class: verb === "cancel" ? "danger" : null, onclick: async () => { await verbs[verb](one.id, ...more); this.refresh(); } }, verb[0].toUpperCase() + verb.slice(1));
    const chosen = this.control ? ["pause", "resume", "retry", "signal", "cancel"].filter((verb) => can[verb](one.state)) : [];
    return [
      h("p", { class: "soft crumbs" }, h("a", { href: "#/" }, "Executions"), " / ", one.workflow, one.version === "1" ? "" : ` v${one.version}`),
      h("div", { class: "title" }, h("h1", null, one.id), badge(one.state, aside(one))),
      chosen.length ? h("div", { class: "actions" }, chosen.map((verb) => button(verb, verb === "signal" ? one.waiting_for : undefined))) : null,
    ];
  }

  async refresh() {
    try {
      const data = await get(execution(this.id));
      this.show(data);
    } catch (error) {
      this.fail(error);
    }
  }

  // Input, output and error of one row; for what is in flight, what it received.
  async openRow(key) {
    const seq = key === "now" ? this.data.last_seq : key;
    this.row.replaceChildren(h("p", { class: "soft", "aria-busy": "true" }, "Loading…"));
    try {
      const answer = await get(execution(this.id, `/checkpoints/${seq}`));
      this.row.replaceChildren(rowPanel(answer, key === "now", () => { this.row.replaceChildren(); this.timeline.select(null); }));
    } catch (error) {
      this.row.replaceChildren(problem(error));
    }
  }

  checkpoints(kept) {
    if (!kept.length) return [];
    this.from ??= kept.at(-2)?.seq ?? kept[0].seq;
    this.to ??= kept.at(-1).seq;
    const radio = (name, seq) => h("input", { type: "radio", name, value: seq, checked: this[name] === seq, "aria-label": `${name} checkpoint ${seq}`, onchange: () => { this[name] = seq; } });
    const row = (one) => h("tr", null, h("td", null, radio("from", one.seq)), h("td", null, radio("to", one.seq)), h("td", null, `#${one.seq}`),
      h("td", null, one.name ? `${one.kind} of ${one.name}` : one.kind), h("td", { class: "wide" }, `next: step ${number(one.step + 1)}`), h("td", { class: "right wide" }, bytes(one.size)), h("td", null, clock(one.time)),
      this.control ? h("td", null, h("button", { type: "button", onclick: () => verbs.fork(this.id, one.seq) }, "Fork…")) : null);
    this.diffs ??= h("div");
    return [h("h2", null, "Checkpoints"), h("div", { class: "scroll" }, h("table", { class: "small" },
      h("thead", null, h("tr", null, ["from", "to", "", "after", "", "size", "when"].map((title, n) => h("th", { scope: "col", class: n === 4 ? "wide" : n === 5 ? "right wide" : null }, title)), this.control ? h("th") : null)),
      h("tbody", null, kept.toReversed().map(row)))),
    h("div", { class: "actions" }, h("button", { type: "button", onclick: () => this.compare() }, "Show what changed")), this.diffs];
  }

  async compare() {
    const [first, second] = [Math.min(this.from, this.to), Math.max(this.from, this.to)];
    try {
      const answer = await get(execution(this.id, `/diff?from=${first}&to=${second}`));
      this.diffs.replaceChildren(...diffTable(answer));
    } catch (error) {
      this.diffs.replaceChildren(problem(error));
    }
  }
}

function progress(data, over) {
  const one = data.execution;
  const left = one.progress.remaining_seconds;
  const words = [h("b", null, `${Math.floor(one.progress.fraction * 100 + 1e-9)}%`), ` · ${stepText(one)}`];
  if (!over && left !== null) words.push(` · about ${duration(left)} left`, h("span", { class: "soft" }, ` (${BASIS[one.progress.basis] || one.progress.basis})`));
  if (!over && one.progress.items_per_second) words.push(` · ${pace(one.progress.items_per_second)}`);
  if (one.waiting_for) words.push(` · waits for signal “${one.waiting_for}”`);
  if (!over && one.due) words.push(" · due ", clock(one.due, "until"));
  if (!over && one.attempt) words.push(` · attempt ${one.attempt + 1}`);
  return [bar(one.progress.fraction, one.state), h("p", { class: "big" }, words),
    one.step_progress?.message && !over ? h("p", { class: "soft" }, one.step_progress.message) : null,
    over ? null : resumeLine(data), data.hint ? h("p", { class: "hint" }, data.hint) : null];
}

// "last checkpoint 12 s ago, would resume at step 4 of 9, item 312"
function resumeLine(data) {
  const { saved, step, total, name, inside } = data.resume;
  const where = !total ? "not begun" : step >= total ? "all steps are done" : `would resume at step ${number(step + 1)} of ${number(total)}${name ? ` (${name})` : ""}`;
  return h("p", { class: "resume" }, "Last checkpoint ", clock(saved), `, ${[where, ...inside].join(", ")}.`);
}

function errors(data) {
  const parts = [];
  if (data.reason) parts.push(h("p", { class: "hint" }, data.reason));
  if (data.error) parts.push(h("h2", null, "Error"), h("pre", { class: "bad" }, data.error));
  for (const note of data.plan.notes) parts.push(h("p", { class: "hint" }, note));
  return parts;
}

function facts(data) {
  const one = data.execution;
  const owner = one.owner ? `${one.owner}${data.plan.owner_alive ? "" : " (not alive)"}` : "nobody";
  const took = one.ended ? duration(seconds(one.ended) - seconds(one.started)) : clock(one.started, "since");
  const pairs = [["Started", moment(one.started)], [one.ended ? "Took" : "So far", took], ["Queue", one.queue + (one.priority ? `, priority ${one.priority}` : "")], ["Owner", owner], ["Checkpoints", number(one.checkpoints)]];
  if (one.parent_id) pairs.push(["Parent", h("a", { href: `#/run/${encodeURIComponent(one.parent_id)}` }, one.parent_id)]);
  if (data.crashes) pairs.push(["Crashes", number(data.crashes)]);
  for (const [key, value] of Object.entries(one.metadata)) pairs.push([key, typeof value === "string" ? value : JSON.stringify(value)]);
  return h("dl", null, pairs.map(([key, value]) => h("div", null, h("dt", null, key), h("dd", null, value))));
}

function rowPanel({ step, input, output }, isNow, leave) {
  const title = isNow ? "In flight" : `#${step.seq} ${step.kind}${step.name ? ` of ${step.name}` : ""}`;
  const words = isNow ? "" : `${step.seconds !== null ? `${duration(step.seconds)}, ` : ""}${step.attempts > 1 ? `${step.attempts} attempts, ` : ""}ended ${moment(step.ended)}`;
  return h("div", { class: "panel" },
    h("div", { class: "title" }, h("h3", null, title), h("button", { type: "button", class: "quiet", "aria-label": "Close", onclick: leave }, "✕")),
    h("p", { class: "soft" }, words), step.error && !isNow ? [h("h4", null, "Error"), h("pre", { class: "bad" }, step.error)] : null,
    h("div", { class: "two" }, isNow ? value("Input", output) : [value("Input", input), value("Output", output)]));
}

function value(title, state) {
  return h("div", null, h("h4", null, title), state ? [h("pre", null, state.text), state.truncated ? h("p", { class: "soft" }, `cut off: ${bytes(state.size)} in all`) : null]
    : h("p", { class: "soft" }, "Not kept: only the states of the newest checkpoints are (RetentionPolicy.history)."));
}

function diffTable(answer) {
  const title = h("h3", null, `From #${answer.from} to #${answer.to}`);
  if (!answer.changes.length) return [title, h("p", { class: "soft" }, "Nothing changed.")];
  const line = (one) => h("tr", { class: one.kind }, h("td", null, h("code", null, one.path)), h("td", null, one.kind), h("td", null, one.before === null ? "" : h("del", null, one.before)), h("td", null, one.after === null ? "" : h("ins", null, one.after)));
  return [title, h("div", { class: "scroll" }, h("table", { class: "small diff" }, h("thead", null, h("tr", null, ["place", "", "before", "after"].map((one) => h("th", { scope: "col" }, one)))), h("tbody", null, answer.changes.map(line)))),
    answer.more ? h("p", { class: "soft" }, "There are more changes.") : null].filter(Boolean);
}

function mail(data) {
  if (!data.messages.length) return [];
  return [h("h2", null, `Messages that wait (${number(data.message_count)})`), h("ul", null, data.messages.map((one) => h("li", null, `${one.kind}${one.name ? ` “${one.name}”` : ""} `, clock(one.sent))))];
}

function children(data) {
  if (!data.children.length) return [];
  const row = (one) => h("tr", null, h("td", { class: "state" }, badge(one.state, aside(one))), h("td", { class: "name" }, nameCell(one)), h("td", { class: "progress" }, progressCell(one)));
  return [h("h2", null, "Children"), h("table", { class: "runs" }, h("tbody", null, data.children.map(row))), data.more_children ? h("p", { class: "soft" }, "and more") : null];
}
