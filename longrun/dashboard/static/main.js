// The frame around the pages: which page is shown, the theme, and the clock that makes ages go on.

import { get, linkState } from "./api.js";
import { h, problem, tick } from "./dom.js";
import { charts } from "./charts.js";
import { detail } from "./detail.js";
import { list } from "./list.js";
import { workers } from "./workers.js";

const PAGES = { "": ["Executions", list], workers: ["Workers", workers], charts: ["Charts", charts] };
const main = document.getElementById("main");
let leave = null;
let overview = null;

function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  return { name, rest: rest.map(decodeURIComponent), params: new URLSearchParams(query) };
}

async function show() {
  const { name, rest, params } = route();
  leave?.();
  leave = null;
  document.getElementById("nav").replaceChildren(...Object.entries(PAGES).map(([key, [title]]) =>
    h("a", { href: `#/${key}`, "aria-current": key === name || (name === "run" && key === "") ? "page" : null }, title)));
  main.replaceChildren(h("p", { class: "empty", "aria-busy": "true" }, "Loading…"));
  try {
    overview ??= await get("api/overview");
  } catch (error) {
    linkState("bad", "not connected");
    main.replaceChildren(problem(error, show));
    return;
  }
  const mode = document.getElementById("mode");
  mode.hidden = false;
  mode.textContent = overview.control ? "control" : "read-only";
  mode.title = overview.control ? "This page may change executions" : "Start with --allow-control to change executions";
  document.title = name === "run" ? `${rest[0]} · longrun` : "longrun";
  const page = name === "run" ? detail : (PAGES[name] || PAGES[""])[1];
  leave = page(main, { id: rest[0], params, overview });
}

const THEMES = ["", "light", "dark"];
function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  document.getElementById("theme").textContent = { "": "◐", light: "○", dark: "●" }[theme];
}
function storedTheme() {
  try {
    return localStorage.getItem("longrun-theme") || "";
  } catch {
    return "";
  }
}
document.getElementById("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(storedTheme()) + 1) % THEMES.length];
  try {
    localStorage.setItem("longrun-theme", next);
  } catch { /* a browser that keeps nothing shows it until it is closed */ }
  setTheme(next);
});

setTheme(storedTheme());
setInterval(() => document.hidden || tick(), 1000);
window.addEventListener("hashchange", show);
show();
