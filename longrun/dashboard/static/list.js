// Many executions: filters, counts, order, pages, and what can be done with several at once.

import { get, Live, Patience } from "./api.js";
import { bulk } from "./controls.js";
import { aside, badge, clock, duration, FINISHED, h, keyed, number, patch, seconds, showProblem, STATES, write } from "./dom.js";

const TIMES = [["", "any time"], ["3600", "last hour"], ["86400", "last 24 hours"], ["604800", "last 7 days"], ["custom", "between…"]];
const COLUMNS = [
  ["state", "State", "state"], ["", "Execution", "name"], ["progress", "Progress", "progress"], ["", "Left", "left"],
  ["created", "Started", "started"], ["duration", "Took", "took"], ["updated", "Last write", "updated"],
];
const BULK = ["pause", "resume", "cancel"];
const SHAPE = ["sort", "limit", "after", "counts"]; // how executions are shown, and not which

export function list(root, { params, overview }) {
  const view = new List(root, params, overview);
  return () => view.close();
}

class List {
  constructor(root, params, overview) {
    this.root = root;
    this.params = params;
    this.overview = overview;
    this.control = overview.control;
    this.selected = new Set();
    this.trail = []; // where the pages before this one began
    this.patience = new Patience(() => this.load());
    this.build();
    this.load();
  }

  close() {
    this.closed = true;
    clearTimeout(this.typing);
    this.patience.stop();
    this.live?.close();
  }

  filtered() {
    return [...this.params].some(([name, value]) => value && !SHAPE.includes(name));
  }

  query() {
    const query = new URLSearchParams(this.params);
    query.delete("time");
    return query;
  }

  // Every choice stands in the address, so that it can be sent to somebody and survives a reload.
  set(changes) {
    for (const [name, value] of Object.entries(changes)) {
      this.params.delete(name);
      for (const one of [value].flat()) if (one) this.params.append(name, one);
    }
    if (!("after" in changes)) {
      this.params.delete("after");
      this.trail = [];
    }
    history.replaceState(null, "", `#/${this.params.size ? `?${this.params}` : ""}`);
    this.selected.clear();
    this.showChosen();
    this.load();
  }

  async load() {
    this.live?.close();
    this.patience.stop();
    this.table.setAttribute("aria-busy", "true");
    const asked = this.query().toString();
    const turn = (this.turn = {}); // whoever asks later is answered alone
    try {
      // Counting what holds a text takes a while in a large store: the page does not wait for it.
      const answer = await get(`api/executions?${asked}${this.params.has("text") ? "&counts=0" : ""}`);
      if (this.closed || turn !== this.turn) return;
      this.patience.end();
      this.show(answer);
      this.live = new Live(() => `api/live/executions?${asked}`, (data) => this.show(data), (error) => this.fail(error));
    } catch (error) {
      if (this.closed || turn !== this.turn) return;
      this.fail(error);
      this.patience.after(error);
    }
  }

  fail(error) {
    this.table.removeAttribute("aria-busy");
    showProblem(this.trouble, error, () => this.load());
  }

  // What can be pressed is made once and changed in place: a press on something that is replaced before the button of
  // the mouse comes up is lost, and a busy store changes its counts four times a second.
  build() {
    const text = h("input", { type: "search", placeholder: "id or metadata", "aria-label": "Text in id or metadata", value: this.params.get("text") || "",
      oninput: (event) => {
        clearTimeout(this.typing);
        this.typing = setTimeout(() => this.set({ text: event.target.value.trim() }), 250);
      } });
    this.chips = new Map([this.chip(""), ...Object.keys(STATES).map((state) => this.chip(state))]);
    this.between = h("span", { class: "between" });
    this.trouble = h("div");
    this.what = h("span", { class: "soft" });
    this.verbs = (this.control ? BULK : []).map((verb) => h("button", { type: "button", class: verb === "cancel" ? "danger" : null, onclick: () => this.bulk(verb) }, `${verb[0].toUpperCase()}${verb.slice(1)}…`));
    this.actions = h("div", { class: "actions", hidden: true }, this.what, this.verbs);
    this.body = h("tbody");
    this.head = h("tr");
    this.table = h("table", { class: "runs", "aria-busy": "true" }, h("thead", null, this.head), this.body);
    this.back = h("button", { type: "button", onclick: () => this.set({ after: this.trail.pop() || "" }) });
    this.range = h("span", { class: "soft" });
    this.on = h("button", { type: "button", onclick: () => {
      this.trail.push(this.params.get("after") || "");
      this.set({ after: this.answer.next });
    } });
    this.among = h("span", { class: "soft" });
    this.foot = h("nav", { class: "pages", "aria-label": "Pages of executions", hidden: true }, this.back, this.range, this.on, this.among);
    this.root.replaceChildren(
      h("h1", { class: "hidden" }, "Executions"),
      h("div", { class: "chips", role: "group", "aria-label": "Filter by state" }, [...this.chips.values()]),
      h("div", { class: "filters" }, text, this.choice("workflow", this.overview.workflows), this.choice("queue", this.overview.queues), this.time(), this.between),
      this.trouble, this.actions, h("div", { class: "scroll" }, this.table), this.foot);
    this.showBetween();
    this.showChosen();
  }

  choice(name, values) {
    const id = `list-${name}`;
    return [
      h("input", { list: id, placeholder: `any ${name}`, "aria-label": name, value: this.params.get(name) || "", onchange: (event) => this.set({ [name]: event.target.value.trim() }) }),
      h("datalist", { id }, values.map((value) => h("option", { value }))),
    ];
  }

  time() {
    const custom = this.params.has("from") || this.params.has("to");
    const chosen = custom ? "custom" : this.params.get("since") || "";
    return h("select", { "aria-label": "When it was created", onchange: (event) => {
      this.params.set("time", event.target.value);
      this.set({ since: event.target.value === "custom" ? "" : event.target.value, from: "", to: "" });
      this.showBetween();
    } }, TIMES.map(([value, title]) => h("option", { value, selected: value === chosen }, title)));
  }

  showBetween() {
    const custom = this.params.get("time") === "custom" || this.params.has("from") || this.params.has("to");
    this.params.delete("time");
    const local = (time) => (time ? new Date(Date.parse(time) - new Date(time).getTimezoneOffset() * 60000).toISOString().slice(0, 16) : "");
    const field = (name, title) => h("input", { type: "datetime-local", "aria-label": title, value: local(this.params.get(name)),
      onchange: (event) => this.set({ [name]: event.target.value ? new Date(event.target.value).toISOString() : "" }) });
    this.between.replaceChildren(...(custom ? [field("from", "created after"), field("to", "created before")] : []));
  }

  show(answer) {
    this.answer = answer;
    this.table.removeAttribute("aria-busy");
    this.trouble.replaceChildren();
    this.showCounts(answer.counts);
    patch(this.head, [this.params.get("sort"), this.control], () => this.headers());
    keyed(this.body, answer.executions, (one) => one.id, () => this.row(), (row, one) => this.fill(row, one));
    if (!answer.executions.length) this.trouble.replaceChildren(this.empty(this.filtered()));
    this.table.hidden = !answer.executions.length;
    this.showActions();
    this.showPages(answer);
  }

  empty(filtered) {
    if (filtered) {
      return h("div", { class: "empty" }, h("h2", null, "No execution matches"), h("button", { type: "button", onclick: () => { location.hash = "#/"; this.params = new URLSearchParams(); this.build(); this.load(); } }, "Clear the filters"));
    }
    return h("div", { class: "empty" }, h("h2", null, "Nothing here yet"),
      h("p", null, "Start something, and it appears by itself:"),
      h("pre", null, "longrun run app:registry WORKFLOW --state '{}'"));
  }

  chip(state) {
    const press = () => {
      const chosen = this.params.getAll("state");
      this.set({ state: !state ? [] : chosen.includes(state) ? chosen.filter((one) => one !== state) : [...chosen, state] });
    };
    return [state, h("button", { type: "button", class: `chip ${state}`, onclick: press },
      state ? [h("span", { "aria-hidden": "true" }, STATES[state]), ` ${state} `] : "all ", h("b"))];
  }

  showChosen() {
    const chosen = this.params.getAll("state");
    for (const [state, chip] of this.chips) chip.setAttribute("aria-pressed", String(state ? chosen.includes(state) : !chosen.length));
  }

  showCounts(counts) {
    const all = counts && Object.values(counts).reduce((sum, one) => sum + one, 0);
    for (const [state, chip] of this.chips) {
      const count = counts && (state ? counts[state] : all);
      chip.classList.toggle("none", Boolean(state) && count === 0);
      write(chip.lastChild, number(count));
    }
  }

  headers() {
    const sort = this.params.get("sort") || "-created";
    const head = (key, title, name) => {
      if (!key) return h("th", { scope: "col", class: name }, title);
      const direction = sort === key ? "ascending" : sort === `-${key}` ? "descending" : null;
      const next = direction === "descending" ? key : `-${key}`;
      return h("th", { scope: "col", class: name, "aria-sort": direction }, h("button", { type: "button", onclick: () => this.set({ sort: next === "-created" ? "" : next }) },
        title, h("span", { "aria-hidden": "true" }, direction === "ascending" ? " ↑" : direction === "descending" ? " ↓" : "")));
    };
    const all = this.control ? h("th", { class: "tick" }, h("input", { type: "checkbox", "aria-label": "Choose all on this page", onchange: (event) => this.selectAll(event.target.checked) })) : null;
    return [all, ...COLUMNS.map((column) => head(...column))];
  }

  row() {
    const cells = COLUMNS.map(([, , name]) => h("td", { class: name }));
    return h("tr", null, this.control ? h("td", { class: "tick" }) : null, cells);
  }

  fill(row, one) {
    const cell = (name) => row.querySelector(`td.${name}`);
    const over = FINISHED.has(one.state);
    if (this.control) {
      patch(cell("tick"), [one.id, this.selected.has(one.id)], () => h("input", { type: "checkbox", "aria-label": `Choose ${one.id}`, checked: this.selected.has(one.id), onchange: (event) => this.select(one.id, event.target.checked) }));
    }
    patch(cell("state"), [one.state, aside(one)], () => badge(one.state, aside(one)));
    patch(cell("name"), [one.id, one.workflow, one.metadata, one.queue], () => nameCell(one));
    patch(cell("progress"), [one.progress.fraction, one.state, one.step, one.total_steps, one.step_progress, one.attempt], () => progressCell(one));
    patch(cell("left"), [one.state, one.waiting_for, one.due, leftText(one)], () => leftCell(one, over));
    patch(cell("started"), [one.started], () => clock(one.started));
    patch(cell("took"), [one.started, one.ended], () => (over ? duration(seconds(one.ended) - seconds(one.started)) : clock(one.started, "since")));
    patch(cell("updated"), [one.updated], () => clock(one.updated));
  }

  select(id, on) {
    if (on) this.selected.add(id);
    else this.selected.delete(id);
    this.showActions();
  }

  selectAll(on) {
    for (const one of this.answer.executions) this.select(one.id, on);
    this.show(this.answer);
  }

  // Several at once: those that are ticked, or everything the filters match. It keeps its place while they are counted.
  showActions() {
    const { total } = this.answer;
    const chosen = this.selected.size;
    this.actions.hidden = !this.control || total === 0 || (total === null && !this.answer.executions.length);
    write(this.what, chosen ? `${number(chosen)} chosen` : `all ${total === null ? "…" : number(total)} that match`);
    for (const button of this.verbs) button.disabled = !chosen && total === null;
  }

  async bulk(verb) {
    const ids = [...this.selected];
    const target = ids.length ? { ids } : this.filtered() ? { filter: this.query().toString() } : { all: true };
    if (await bulk(verb, target, ids.length || this.answer.total)) this.selected.clear();
    this.load();
  }

  showPages(answer) {
    const limit = Number(this.params.get("limit") || 50);
    const first = this.trail.length * limit + 1;
    const last = first + answer.executions.length - 1;
    const sorted = this.params.get("sort");
    this.foot.hidden = false;
    write(this.back, sorted ? "← Previous" : "← Newer");
    this.back.disabled = !this.trail.length;
    write(this.range, answer.executions.length ? `${number(first)}–${number(last)} of ${answer.total === null ? "…" : number(answer.total)}` : "0");
    write(this.on, sorted ? "Next →" : "Older →");
    this.on.disabled = !answer.next;
    write(this.among, answer.sorted_among ? `sorted among the newest ${number(answer.sorted_among)}` : "");
  }
}

export function bar(fraction, state) {
  const fill = h("span", { class: `fill ${state}` });
  fill.style.width = `${Math.min(100, Math.max(0, fraction * 100))}%`;
  return h("span", { class: "progress", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.floor(fraction * 100) }, fill);
}

export function stepText(one) {
  if (!one.total_steps) return "not begun";
  const items = one.step_progress;
  const inside = items && (items.done || items.total) && !FINISHED.has(one.state) ? ` · ${number(items.done)}${items.total ? `/${number(items.total)}` : ""}` : "";
  return `step ${number(Math.min(one.step + 1, one.total_steps))}/${number(one.total_steps)}${inside}`;
}

export function nameCell(one) {
  const notes = Object.entries(one.metadata).slice(0, 3).map(([key, value]) => `${key}: ${typeof value === "string" ? value : JSON.stringify(value)}`);
  if (one.queue !== "default") notes.unshift(`queue ${one.queue}`);
  return [h("a", { class: "id", href: `#/run/${encodeURIComponent(one.id)}` }, one.id), h("span", { class: "sub" }, h("span", null, one.workflow), notes.length ? h("span", { class: "soft", title: notes.join("\n") }, `  ${notes.join(" · ")}`) : null)];
}

export function progressCell(one) {
  const failed = one.attempt && !FINISHED.has(one.state) ? ` · attempt ${one.attempt + 1}` : "";
  return [bar(one.progress.fraction, one.state), h("span", { class: "soft" }, `${Math.floor(one.progress.fraction * 100 + 1e-9)}% · ${stepText(one)}${failed}`)];
}

const leftText = (one) => (one.progress.remaining_seconds === null ? "–" : duration(one.progress.remaining_seconds));

function leftCell(one, over) {
  if (over) return "";
  if (one.waiting_for) return h("span", { class: "soft", title: `waits for signal ${one.waiting_for}` }, `⚑ ${one.waiting_for}`);
  if (one.state === "waiting" && one.due) return clock(one.due, "until");
  return leftText(one);
}
