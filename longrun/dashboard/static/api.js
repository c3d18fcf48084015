// Asking the server, and watching it.

import { setNow } from "./dom.js";

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", cache: "no-store", ...options });
  } catch {
    throw new ApiError("The dashboard does not answer. Is it still running?", 0);
  }
  let answer = {};
  try {
    answer = await response.json();
  } catch {
    throw new ApiError(`The dashboard answered ${response.status} without an explanation.`, response.status);
  }
  if (!response.ok) throw new ApiError(answer.error || `status ${response.status}`, response.status);
  setNow(answer.now);
  return answer;
}

// Text that is JSON already: it is sent letter by letter, since a number may have more digits than JavaScript keeps.
export class RawJson {
  constructor(text) {
    JSON.parse(text);
    this.text = text;
  }
}

function toJson(body) {
  const given = Object.entries(body).filter(([, value]) => value !== undefined);
  return `{${given.map(([name, value]) => `${JSON.stringify(name)}:${value instanceof RawJson ? value.text : JSON.stringify(value)}`).join(",")}}`;
}

export const get = (path, signal) => ask(path, { signal });
export const post = (path, body) => ask(path, {
  method: "POST",
  headers: { "Content-Type": "application/json", "X-Longrun": "1" },
  body: toJson(body || {}),
});
export const execution = (id, rest = "") => `api/executions/${encodeURIComponent(id)}${rest}`;

// What the little word in the header says of the connection.
export function linkState(kind, text) {
  const link = document.getElementById("link");
  link.className = `link ${kind}`;
  link.textContent = text;
}

const FIRST_DELAY = 1000;
const LAST_DELAY = 8000;

// Asks again by itself, ever more rarely, while the trouble is one that passes. Nothing is asked while nobody looks.
export class Patience {
  constructor(again) {
    this.again = again;
    this.delay = FIRST_DELAY;
  }

  after(error) {
    this.stop();
    if (error.status !== 0 && !(error.status >= 500)) return;
    linkState("bad", "not connected");
    this.timer = setTimeout(() => (document.hidden ? this.after(error) : this.again()), this.delay);
    this.delay = Math.min(LAST_DELAY, this.delay * 1.6);
  }

  stop() {
    clearTimeout(this.timer);
  }

  // It was answered: the next trouble is a new one.
  end() {
    this.stop();
    this.delay = FIRST_DELAY;
  }
}

// A stream of events that closes while nobody looks and opens again by itself, also after the server was restarted.
export class Live {
  constructor(address, onData, onProblem) {
    this.address = address; // a function: where to go on may have moved
    this.onData = onData;
    this.onProblem = onProblem;
    this.delay = FIRST_DELAY;
    this.seen = () => (document.hidden ? this.rest() : this.open());
    document.addEventListener("visibilitychange", this.seen);
    this.seen();
  }

  open() {
    if (this.source || this.ended) return;
    clearTimeout(this.timer);
    const source = new EventSource(this.address());
    this.source = source;
    source.addEventListener("open", () => {
      this.delay = FIRST_DELAY;
      linkState("good", "live");
    });
    source.addEventListener("data", (event) => {
      linkState("good", "live");
      const answer = JSON.parse(event.data);
      setNow(answer.now);
      this.onData(answer);
    });
    source.addEventListener("problem", (event) => {
      const answer = JSON.parse(event.data);
      linkState("bad", "the store does not answer");
      this.onProblem?.(new ApiError(answer.error, 503));
    });
    source.addEventListener("gone", (event) => {
      this.close();
      this.onProblem?.(new ApiError(JSON.parse(event.data).error, 404));
    });
    source.addEventListener("error", () => this.lost());
  }

  lost() {
    this.source?.close();
    this.source = null;
    if (this.ended) return;
    linkState("bad", "reconnecting…");
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.again(), this.delay);
    this.delay = Math.min(LAST_DELAY, this.delay * 1.6);
  }

  // A stream cannot say why it was refused; an ordinary request can.
  async again() {
    if (this.ended || document.hidden) return;
    try {
      await get("api/overview");
      this.open();
    } catch (error) {
      if (error.status === 401) {
        linkState("bad", "the token has changed");
        this.onProblem?.(error);
        return;
      }
      this.lost();
    }
  }

  rest() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
    linkState("rest", "paused");
  }

  close() {
    this.ended = true;
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
    document.removeEventListener("visibilitychange", this.seen);
  }
}
