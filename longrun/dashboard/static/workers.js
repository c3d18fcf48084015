// The processes that may run executions, and how old their leases are.

import { get, Live, Patience } from "./api.js";
import { duration, h, keyed, number, patch, showProblem } from "./dom.js";

const STATUS = { alive: ["✓", "completed"], expired: ["!", "paused"], dead: ["✗", "failed"] };

export function workers(root) {
  let live = null, closed = false;
  const body = h("tbody");
  const empty = h("div");
  const trouble = h("div");
  const table = h("table", { class: "runs workers", hidden: true },
    h("thead", null, h("tr", null, ["Status", "Worker", "Lease", "Executions", "Queues", "Workflows"].map((title) => h("th", { scope: "col" }, title)))), body);
  root.replaceChildren(h("h1", null, "Workers"), trouble, empty, h("div", { class: "scroll" }, table));

  const row = () => h("tr", null, ["state", "name", "lease", "count", "queues", "flows"].map((name) => h("td", { class: name })));
  const fill = (line, one) => {
    const cell = (name) => line.querySelector(`td.${name}`);
    const [glyph, kind] = STATUS[one.status];
    patch(cell("state"), one.status, () => h("span", { class: `badge ${kind}` }, h("span", { "aria-hidden": "true" }, glyph), ` ${one.status}`));
    patch(cell("name"), [one.id, one.host, one.pid], () => [h("span", { class: "id" }, one.id), h("span", { class: "soft" }, [one.host, one.pid ? `process ${one.pid}` : null].filter(Boolean).join(", "))]);
    patch(cell("lease"), Math.round(one.lease_seconds), () => (one.lease_seconds >= 0 ? `${duration(one.lease_seconds)} left` : `ran out ${duration(-one.lease_seconds)} ago`));
    patch(cell("count"), one.executions, () => number(one.executions));
    patch(cell("queues"), one.queues, () => one.queues.join(", ") || "all");
    patch(cell("flows"), one.workflows, () => one.workflows.join(", ") || "–");
  };
  const show = (answer) => {
    trouble.replaceChildren();
    table.hidden = !answer.workers.length;
    keyed(body, answer.workers, (one) => one.id, row, fill);
    patch(empty, Boolean(answer.workers.length), (some) => (some ? [] : h("div", { class: "empty" }, h("h2", null, "No process is registered"), h("p", null, "A worker appears here as soon as it starts:"), h("pre", null, "longrun worker app:registry"))));
  };
  const fail = (error) => closed || showProblem(trouble, error, load);
  const patience = new Patience(load);
  async function load() {
    patience.stop();
    try {
      show(await get("api/workers"));
      if (closed) return;
      patience.end();
      live?.close();
      live = new Live(() => "api/live/workers", show, fail);
    } catch (error) {
      if (closed) return;
      fail(error);
      patience.after(error);
    }
  }
  load();
  return () => { closed = true; patience.stop(); live?.close(); };
}
