// How much was started when, what became of it, and how much of it failed: two charts in SVG.

import { get } from "./api.js";
import { duration, h, moment, number, problem, s } from "./dom.js";

const RANGES = [[1, "last hour"], [24, "last 24 hours"], [168, "last 7 days"], [720, "last 30 days"]];
const ENDS = ["completed", "failed", "cancelled"];
const KINDS = [...ENDS, "unfinished"];
const AGAIN = 15000;

export function charts(root, { params, overview }) {
  let timer = null, closed = false;
  const place = h("div", { class: "charts", "aria-busy": "true" });
  const address = () => `#/charts${params.size ? `?${params}` : ""}`;
  const set = (name, value) => {
    if (value) params.set(name, value);
    else params.delete(name);
    history.replaceState(null, "", address());
    load();
  };
  const hours = () => params.get("hours") || "24";
  root.replaceChildren(h("h1", null, "Charts"),
    h("div", { class: "filters" },
      h("select", { "aria-label": "How far back", onchange: (event) => set("hours", event.target.value) }, RANGES.map(([value, title]) => h("option", { value, selected: String(value) === hours() }, title))),
      h("input", { list: "chart-workflow", placeholder: "any workflow", "aria-label": "workflow", value: params.get("workflow") || "", onchange: (event) => set("workflow", event.target.value.trim()) }),
      h("datalist", { id: "chart-workflow" }, overview.workflows.map((value) => h("option", { value })))),
    place);

  async function load() {
    clearTimeout(timer);
    const asked = params.toString();
    try {
      const answer = document.hidden ? null : await get(`api/charts?${asked}`);
      if (closed || asked !== params.toString()) return;
      place.removeAttribute("aria-busy");
      if (answer) place.replaceChildren(...draw(answer));
    } catch (error) {
      if (!closed) place.replaceChildren(problem(error, load));
    }
    if (!closed) timer = setTimeout(load, AGAIN);
  }
  load();
  return () => { closed = true; clearTimeout(timer); };
}

function draw({ buckets, width }) {
  const total = (bucket) => KINDS.reduce((sum, kind) => sum + bucket[kind], 0);
  const ended = (bucket) => ENDS.reduce((sum, kind) => sum + bucket[kind], 0);
  const sum = (of) => buckets.reduce((all, bucket) => all + of(bucket), 0);
  const all = sum(total), over = sum(ended), failed = sum((bucket) => bucket.failed);
  if (!all) return [h("div", { class: "empty" }, h("h2", null, "Nothing was started in this time"), h("p", null, "Choose a longer one, or another workflow."))];
  const most = nice(Math.max(...buckets.map(total)));
  const rate = (bucket) => (ended(bucket) ? bucket.failed / ended(bucket) : 0);
  const worst = nicePart(Math.max(...buckets.map(rate)));
  const per = duration(width).replace(/ 00 (s|min)$/, "");
  return [
    figure(`Started per ${per}, and what became of them`, `${number(all)} in all`, buckets, number(most), (bucket) => KINDS.map((kind) => [kind, bucket[kind] / most]), (bucket) => KINDS.map((kind) => `${number(bucket[kind])} ${kind}`).join(", "),
      h("p", { class: "legend" }, KINDS.map((kind) => h("span", null, h("i", { class: `swatch ${kind}` }), kind)))),
    figure("Failed, of those that have ended", over ? `${number(failed)} of ${number(over)}, ${percent(failed / over)}` : "none has ended", buckets, percent(worst), (bucket) => [["failed", rate(bucket) / worst]], (bucket) => `${percent(rate(bucket))} of ${number(ended(bucket))} failed`),
  ];
}

// Stacked bars; the places are parts of the whole, so that the drawing fits any width.
function figure(title, words, buckets, top, parts, tell, legend) {
  const step = 100 / buckets.length;
  const drawing = s("svg", { class: "chart", role: "img", "aria-label": `${title}: ${words}` }, [0, 50, 100].map((y) => s("line", { class: "grid", x1: "0", x2: "100%", y1: `${y}%`, y2: `${y}%` })));
  buckets.forEach((bucket, n) => {
    let y = 100;
    const group = s("g", { class: "bucket" }, s("title", null, `${moment(bucket.start)}: ${tell(bucket)}`), s("rect", { class: "behind", x: `${n * step}%`, y: "0", width: `${step}%`, height: "100%" }));
    for (const [kind, part] of parts(bucket)) {
      const height = Math.min(100, part * 100);
      y -= height;
      if (height > 0) group.append(s("rect", { class: kind, x: `${n * step + step * 0.12}%`, y: `${y}%`, width: `${step * 0.76}%`, height: `${height}%` }));
    }
    drawing.append(group);
  });
  const last = Date.parse(buckets.at(-1).start) - Date.parse(buckets[0].start);
  const format = new Intl.DateTimeFormat(undefined, last > 86400e3 ? { day: "numeric", month: "short" } : { hour: "2-digit", minute: "2-digit" });
  const edge = (n) => format.format(Date.parse(buckets[n].start));
  return h("figure", null, h("figcaption", null, h("b", null, title), h("span", { class: "soft" }, ` ${words}`)),
    h("div", { class: "plot" }, h("div", { class: "scale soft", "aria-hidden": "true" }, h("span", null, top), h("span", null, "0")), drawing),
    h("div", { class: "edges soft", "aria-hidden": "true" }, h("span", null, edge(0)), h("span", null, edge(Math.floor(buckets.length / 2))), h("span", null, "now")), legend);
}

const percent = (part) => `${(part * 100).toFixed(part > 0 && part < 0.1 ? 1 : 0)}%`;
const nicePart = (part) => [0.05, 0.1, 0.25, 0.5, 1].find((edge) => part <= edge) ?? 1;

function nice(value) {
  const base = 10 ** Math.floor(Math.log10(Math.max(1, value)));
  return [1, 2, 3, 4, 6, 8, 10].map((one) => Math.max(2, one * base)).find((edge) => value <= edge);
}
