// What can be done to an execution, asked for in a dialog and confirmed.

import { execution, post, RawJson } from "./api.js";
import { h, number, toast } from "./dom.js";

// A dialog with fields; resolves to their values, or to null when it is left.
function ask(title, words, fields, confirm, danger) {
  return new Promise((resolve) => {
    const complaint = h("p", { class: "complaint", role: "alert" });
    const leave = (value) => {
      dialog.close();
      dialog.remove();
      resolve(value);
    };
    const submit = (event) => {
      event.preventDefault();
      try {
        leave(Object.fromEntries(fields.map((field) => [field.name, field.read()])));
      } catch (error) {
        complaint.textContent = error.message;
      }
    };
    const dialog = h("dialog", { "aria-label": title, oncancel: (event) => { event.preventDefault(); leave(null); } },
      h("form", { method: "dialog", onsubmit: submit },
        h("h2", null, title), words ? h("p", { class: "soft" }, words) : null,
        fields.map((field) => h("label", null, field.title, field.element)),
        complaint,
        h("div", { class: "actions" },
          h("button", { type: "button", onclick: () => leave(null) }, "Not now"),
          h("button", { type: "submit", class: danger ? "danger" : "main" }, confirm))));
    document.body.append(dialog);
    dialog.showModal();
  });
}

function textField(name, title, value = "", required = false) {
  const element = h("input", { value, required, autocomplete: "off" });
  return { name, title, element, read: () => element.value.trim() || undefined };
}

function jsonField(name, title, value = "") {
  const element = h("textarea", { rows: 5, spellcheck: "false", value });
  return { name, title, element, read: () => {
    if (!element.value.trim()) return undefined;
    try {
      return new RawJson(element.value);
    } catch (error) {
      throw new Error(`${title} is no JSON: ${error.message}`);
    }
  } };
}

function tickField(name, title) {
  const element = h("input", { type: "checkbox" });
  return { name, title, element, read: () => element.checked };
}

async function send(id, verb, body) {
  try {
    const answer = await post(execution(id, `/${verb}`), body);
    toast(answer.done ? `${verb}: done` : answer.note);
    return answer;
  } catch (error) {
    toast(error.message, "bad");
    return null;
  }
}

export const can = {
  pause: (state) => ["initialized", "running", "resuming", "waiting"].includes(state),
  resume: (state) => ["paused", "blocked", "waiting"].includes(state),
  cancel: (state) => !["completed", "failed", "cancelled"].includes(state),
  retry: (state) => state === "failed",
  signal: (state) => !["completed", "failed", "cancelled"].includes(state),
};

export const verbs = {
  pause: (id) => send(id, "pause", {}),
  resume: (id) => send(id, "resume", {}),
  retry: (id) => send(id, "retry", {}),

  async cancel(id) {
    const given = await ask(`Cancel ${id}?`, "It ends now, for good.", [textField("reason", "Reason (optional)"), tickField("children", "Its children too")], "Cancel it", true);
    return given && send(id, "cancel", given);
  },

  async signal(id, waitsFor) {
    const given = await ask(`Signal ${id}`, "It is kept until a step waits for it.", [textField("name", "Name", waitsFor || "", true), jsonField("payload", "Payload (JSON)")], "Send");
    return given && send(id, "signal", given);
  },

  async fork(id, checkpoint) {
    const words = `A new execution begins where this one stood at checkpoint ${checkpoint}; a worker takes it up. This one stays as it is.`;
    const given = await ask(`Fork ${id}`, words, [textField("new_id", "New id (optional)"), jsonField("state", "Another state (JSON, optional)")], "Fork");
    const made = given && await send(id, "fork", { ...given, checkpoint });
    if (made) location.hash = `#/run/${encodeURIComponent(made.id)}`;
    return made;
  },
};

// The same for many, a page at a time, so that the server is never asked for too much at once.
export async function bulk(verb, target, count) {
  const given = await ask(`${verb[0].toUpperCase()}${verb.slice(1)} ${number(count)} executions?`,
    "Those whose state forbids it are left as they are.", verb === "cancel" ? [textField("reason", "Reason (optional)")] : [], `${verb[0].toUpperCase()}${verb.slice(1)} ${number(count)}`, verb === "cancel");
  if (!given) return false;
  let done = 0, refused = 0, after;
  const pages = target.ids ? chunks(target.ids, 200).map((ids) => ({ ids })) : [target];
  try {
    for (const page of pages) {
      do {
        const answer = await post(`api/bulk/${verb}`, { ...page, ...given, after });
        done += answer.done;
        refused += answer.refused.length;
        after = answer.next ?? undefined;
        if (after) toast(`${verb}: ${number(done)} so far`);
      } while (after);
    }
    toast(`${verb}: ${number(done)} done${refused ? `, ${number(refused)} left as they are` : ""}`);
  } catch (error) {
    toast(error.message, "bad");
  }
  return true;
}

const chunks = (list, size) => Array.from({ length: Math.ceil(list.length / size) }, (_, n) => list.slice(n * size, n * size + size));
