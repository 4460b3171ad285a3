/**
 * Live values: one stream of server-sent events for all topics that the page shows.
 *
 * An element with data-live="TOPIC" has one child for each value, with data-key. Messages are gathered and applied once per frame.
 */
const STALE_MS = 40000;
const AGAIN_MS = 2000;

const regions = () => [...document.querySelectorAll("[data-live]")];
const positions = new Map();
const waiting = [];
let source = null;
let watchdog = 0;
let lost = "";

/** Connects while the page is visible: a browser has six connections to a host for all of its tabs. */
export function connect() {
  for (const region of regions()) positions.set(region.dataset.live, region.dataset.position);
  if (!positions.size) return;
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  addEventListener("pagehide", close);
  addEventListener("pageshow", () => document.hidden || open());
  if (!document.hidden) open();
}

function address() {
  const query = new URLSearchParams();
  for (const topic of positions.keys()) query.append("topic", topic);
  query.set("after", [...positions.values()].join(" "));
  return `${document.body.dataset.stream}?${query}`;
}

function open() {
  if (source) return;
  source = new EventSource(address());
  source.addEventListener("open", () => markAlive());
  source.addEventListener("beat", () => markAlive());
  for (const topic of positions.keys())
    source.addEventListener(topic, (event) => {
      markAlive();
      if (event.lastEventId) for (const position of event.lastEventId.split(" ")) positions.set(position.replace(/@[^@]*$/, ""), position);
      waiting.push([topic, JSON.parse(event.data)]);
      if (waiting.length === 1) requestAnimationFrame(apply);
    });
  source.addEventListener("error", () => {
    show("lost");
    if (source && source.readyState === EventSource.CLOSED) again();
  });
}

function close() {
  clearTimeout(watchdog);
  if (source) source.close();
  source = null;
}

function again() {
  close();
  setTimeout(reopen, AGAIN_MS);
}

/** Connects again, or leads to the sign-in if the session has ended: a stream does not tell why it was refused. */
async function reopen() {
  if (document.hidden || source) return;
  const answer = await fetch(document.body.dataset.stream, { method: "HEAD" }).catch(() => null);
  if (answer && answer.status === 401) location.reload();
  else if (answer) open();
  else setTimeout(reopen, AGAIN_MS);
}

function markAlive() {
  clearTimeout(watchdog);
  watchdog = setTimeout(() => (show("lost"), again()), STALE_MS);
  show(lost ? "away" : "live");
}

function show(state) {
  const status = document.getElementById("connection");
  if (!status || status.dataset.state === state) return;
  status.dataset.state = state;
  status.textContent = { live: "live", lost: "connection lost", away: "farm away" }[state];
  status.title = state === "away" ? lost : "";
}

function apply() {
  for (const [topic, message] of waiting.splice(0)) {
    lost = message.error || "";
    for (const region of regions()) if (region.dataset.live === topic) update(region, message);
    if (message.summary !== undefined)
      for (const summary of document.querySelectorAll("[data-live-summary]"))
        if (summary.dataset.liveSummary === topic) summary.innerHTML = message.summary;
    document.dispatchEvent(new CustomEvent("etfarm:live", { detail: { topic, message } }));
  }
  markAlive();
}

function update(region, { rows, removed, is_reset }) {
  const known = new Map([...region.children].map((child) => [child.dataset.key, child]));
  const insert = region.dataset.insert;
  const isPartial = "partial" in region.dataset; // a filtered list also has rows that the topic does not keep
  if (is_reset && !isPartial) {
    const present = new Set(rows.map(([key]) => key));
    for (const [key, child] of known) if (!present.has(key)) child.remove();
  }
  if (!isPartial) for (const key of removed) known.get(key)?.remove();
  for (const [key, html] of rows) {
    const template = document.createElement("template");
    template.innerHTML = html.trim();
    const fresh = template.content.firstElementChild;
    const former = known.get(key);
    if (former && insert === "rank" && former.dataset.order !== fresh.dataset.order) {
      former.remove();
      place(region, fresh, insert);
    } else if (former) replace(former, fresh);
    else if (insert === "append") region.append(fresh);
    else if (insert === "prepend") region.prepend(fresh);
    else if (insert === "newest" || insert === "rank") place(region, fresh, insert);
    if (fresh.isConnected) known.set(key, fresh);
  }
}

/** Inserts a row by data-order: by "rank" the smallest number first; by "newest" the latest time first, without those older than all. */
function place(region, fresh, insert) {
  const order = (row) => (insert === "rank" ? Number(row.dataset.order) : row.dataset.order);
  const next = [...region.children].find((row) => (insert === "rank" ? order(row) > order(fresh) : order(row) < order(fresh)));
  if (next) next.before(fresh);
  else if (insert === "rank" || !region.children.length) region.append(fresh);
}

/** Replaces a row, which keeps the selection and the focus. */
function replace(former, fresh) {
  if (former.isEqualNode(fresh)) return;
  const focused = former.contains(document.activeElement) ? [...former.querySelectorAll("a, button, input")].indexOf(document.activeElement) : -1;
  fresh.toggleAttribute("data-selected", former.hasAttribute("data-selected"));
  fresh.classList.add("changed");
  former.replaceWith(fresh);
  if (focused >= 0) fresh.querySelectorAll("a, button, input")[focused]?.focus({ preventScroll: true });
}
