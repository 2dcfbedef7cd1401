"use strict";

const KEPT_EVENTS = 500;
const PAUSE_MS = 2000;

// j, k: the next and the previous row; g: the first one. Enter follows the link that has the focus.
// n, p: the next and the previous page of this kind; /: search; 1, 2, ...: the pages of the bar.
function linkOf(key) {
  if (key === "n") return document.querySelector("[rel=next]");
  if (key === "p") return document.querySelector("[rel=prev]");
  if (key === "/") return document.querySelector("nav a[href$='/search']");
  return /^[1-9]$/.test(key) ? document.querySelectorAll("nav a")[key - 1] : null;
}
document.addEventListener("keydown", (key) => {
  if (key.ctrlKey || key.metaKey || key.altKey) return;
  if (key.target.matches("input, textarea, select")) return;
  const rows = [...document.querySelectorAll("[data-row]")];
  const links = rows.map((row) => row.querySelector("a")).filter(Boolean);
  const own = document.activeElement.closest("[data-row]");
  const at = links.findIndex((link) => link.closest("[data-row]") === own);
  const to = { j: Math.min(at + 1, links.length - 1), k: Math.max(at - 1, 0), g: 0 }[key.key];
  if (to !== undefined && links[to]) links[to].focus();
  const link = to === undefined ? linkOf(key.key) : null;
  if (link) {
    key.preventDefault();
    link.click();
  }
});

function follow(url, told) {
  const stream = new EventSource(url);
  stream.onmessage = (message) => told(JSON.parse(message.data));
  stream.addEventListener("end", () => stream.close());
}

// A page that follows its run asks for itself again, at most every two seconds.
let waits = false;
async function renew() {
  waits = false;
  if (document.activeElement.closest("main form")) return; // somebody writes there
  const answer = await fetch(location.href);
  if (!answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  document.querySelector("main").replaceWith(page.querySelector("main"));
}
const live = document.body.dataset.live;
if (live) {
  follow(live, () => {
    if (!waits) setTimeout(renew, PAUSE_MS);
    waits = true;
  });
}

// The newest event comes first; whatever an event says is put in as text.
function row(event, here) {
  const made = document.createElement("tr");
  made.dataset.row = "";
  const link = document.createElement("a");
  link.href = `${here}/events?after=${event.position - 1}`;
  link.textContent = event.position;
  const then = document.createElement("a");
  then.href = `${here}/@${event.position}/`;
  then.textContent = "as it was";
  const place = document.createElement("span");
  place.append(link, " ", then);
  const time = new Date(event.recorded_at * 1000).toISOString().slice(0, 19).replace("T", " ");
  for (const part of [place, time, event.kind, event.actor, event.summary.slice(0, KEPT_EVENTS)]) {
    const cell = made.insertCell();
    const held = document.createElement("bdi");
    held.append(part);
    cell.append(held);
  }
  return made;
}
const events = document.querySelector("#events[data-follow]");
if (events) {
  follow(events.dataset.follow, (event) => {
    events.prepend(row(event, events.dataset.here));
    while (events.rows.length > KEPT_EVENTS) events.deleteRow(-1);
  });
}
