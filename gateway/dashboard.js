// The stream: connects, keeps the token, remembers the last minutes, and says when the numbers are old.
// fetch and not EventSource, because only fetch can send the token as a header.

import { draw } from "/dashboard/panels.js";

const OLD_MS = 3500;
const KEEP = 300; // points of a sparkline: five minutes
const TOKEN = "forebay-admin-token";

const page = {
  history: [],
  latest: null,
  paused: false,
  refused: false,
  seenAt: 0,
  wait: 500,
  stop: null,
};
const find = (id) => document.getElementById(id);

function said(text, wrong = false) {
  const at = find("connection");
  if (at.textContent !== text) at.textContent = text;
  at.classList.toggle("wrong", wrong);
  document.body.classList.toggle("stale", wrong);
}

function render() {
  if (page.latest && !page.paused) draw(page.latest, page.history);
}

function received(kind, data) {
  if (kind === "history") {
    const newest = page.history.length ? page.history[page.history.length - 1].unix : 0;
    if (data.length && data[data.length - 1].unix > newest) page.history = data.slice(-KEEP);
    return;
  }
  page.latest = data;
  page.seenAt = performance.now();
  page.wait = 500;
  const last = page.history[page.history.length - 1];
  if (!last || data.unix > last.unix) {
    page.history.push({
      unix: data.unix,
      total: data.total,
      open: data.open,
      held: data.held,
      loop_lag_s: data.loop_lag_s,
      in_flight: Object.fromEntries(data.replicas.map((r) => [r.id, r.in_flight])),
      classes: Object.fromEntries(data.classes.map((c) => [c.name, c.attainment])),
    });
    if (page.history.length > KEEP) page.history.shift();
  }
  if (!page.paused) said("live");
  render();
}

async function read(body) {
  const decoder = new TextDecoder();
  const reader = body.getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
      const lines = rest.slice(0, end).split("\n");
      rest = rest.slice(end + 2);
      const kind = lines.find((line) => line.startsWith("event: "));
      const data = lines.find((line) => line.startsWith("data: "));
      if (kind && data) received(kind.slice(7), JSON.parse(data.slice(6)));
    }
  }
}

function ask(why) {
  page.refused = true;
  said("needs the admin token", true);
  find("ask-why").textContent = why;
  const dialog = find("ask");
  if (!dialog.open) dialog.showModal();
}

async function connect() {
  if (page.stop || page.refused || document.hidden) return;
  const stop = (page.stop = new AbortController());
  const token = sessionStorage.getItem(TOKEN);
  try {
    const answer = await fetch("/admin/live", {
      headers: token ? { authorization: `Bearer ${token}` } : {},
      cache: "no-store",
      signal: stop.signal,
    });
    if (answer.status === 401) {
      sessionStorage.removeItem(TOKEN);
      ask(token ? "That token was not right." : "This gateway answers operators who have its admin token. It is kept in this tab only.");
    } else if (answer.status === 403) {
      page.refused = true;
      said("answers this host only, until an admin token is set for the gateway", true);
    } else if (answer.ok) {
      await read(answer.body);
    }
  } catch (error) {
    if (error.name !== "AbortError" && !(error instanceof TypeError)) throw error;
  } finally {
    page.stop = null;
    if (!page.refused && !document.hidden) {
      setTimeout(connect, page.wait);
      page.wait = Math.min(5000, page.wait * 2);
    }
  }
}

find("ask").addEventListener("submit", () => {
  sessionStorage.setItem(TOKEN, find("token").value);
  find("token").value = "";
  page.refused = false;
  connect();
});

find("pause").addEventListener("click", (event) => {
  page.paused = !page.paused;
  event.currentTarget.setAttribute("aria-pressed", String(page.paused));
  event.currentTarget.textContent = page.paused ? "Resume" : "Pause";
  said(page.paused ? `paused at ${new Date().toLocaleTimeString()}` : "live");
  render();
});

document.addEventListener("visibilitychange", () => {
  if (document.hidden) page.stop?.abort(); // nobody looks: nothing is computed
  else connect();
});

setInterval(() => {
  if (page.refused || page.paused || !page.seenAt || document.hidden) return;
  const age = performance.now() - page.seenAt;
  if (age > OLD_MS) said(`no answer for ${Math.round(age / 1000)} s`, true);
}, 500);

connect();
