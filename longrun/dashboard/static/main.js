// The frame around the pages: which page is shown, the theme, and the clock that makes ages go on.

import { ApiError, get, linkState, Patience } from "./api.js";
import { h, problem, showProblem, tick } from "./dom.js";
import { charts } from "./charts.js";
import { detail } from "./detail.js";
import { list } from "./list.js";
import { workers } from "./workers.js";

const PAGES = { "": ["Executions", list], workers: ["Workers", workers], charts: ["Charts", charts] };
const main = document.getElementById("main");
const patience = new Patience(enter);
let leave = null;
let overview = null;
let turn = null;

function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  return { name, id: decoded(rest[0] ?? ""), params: new URLSearchParams(query) };
}

// What a part of the address says; null if it says nothing.
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return null;
  }
}

function show() {
  const { name } = route();
  leave?.();
  leave = null;
  document.getElementById("nav").replaceChildren(...Object.entries(PAGES).map(([key, [title]]) =>
    h("a", { href: `#/${key}`, "aria-current": key === name || (name === "run" && key === "") ? "page" : null }, title)));
  main.replaceChildren(h("p", { class: "empty", "aria-busy": "true" }, "Loading…"));
  enter();
}

async function enter() {
  const { name, id, params } = route();
  const mine = (turn = {}); // whoever enters later enters alone
  patience.stop();
  try {
    overview ??= await get("api/overview");
  } catch (error) {
    if (mine !== turn) return;
    linkState("bad", "not connected");
    showProblem(main, error, enter);
    patience.after(error);
    return;
  }
  if (mine !== turn) return;
  patience.end();
  const mode = document.getElementById("mode");
  mode.hidden = false;
  mode.textContent = overview.control ? "control" : "read-only";
  mode.title = overview.control ? "This page may change executions" : "Start with --allow-control to change executions";
  document.title = name === "run" && id ? `${id} · longrun` : "longrun";
  if (name === "run" && !id) {
    main.replaceChildren(problem(new ApiError("No execution can have this address.", 404)));
    return;
  }
  const page = name === "run" ? detail : (PAGES[name] || PAGES[""])[1];
  leave = page(main, { id, params, overview });
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
