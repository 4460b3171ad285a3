/**
 * Live values: one stream of server-sent events for all topics that the page shows.
 *
 * An element with data-live="TOPIC" has one child for each value, with data-key. Messages are applied in frames, a few rows at a time.
 */
const STALE_MS = 40000;
const AGAIN_MS = 2000;
const FRAME_MS = 8;
const ROWS = 8;
const CHANGED_MS = 1200;
const LATER_ROWS = 30;

const regions = () => [...document.querySelectorAll("[data-live]")];
const positions = new Map();
const waiting = [];
let source = null;
let watchdog = 0;
let lost = "";

function address() {
  const query = new URLSearchParams();
  for (const topic of positions.keys()) query.append("topic", topic);
  query.set("after", [...positions.values()].join(" "));
  return `${document.body.dataset.stream}?${query}`;
}

function open() {
  if (source || document.querySelector(".later")) return;
  source = new EventSource(address());
  source.addEventListener("open", () => markAlive());
  source.addEventListener("beat", () => markAlive());
  for (const topic of positions.keys())
    source.addEventListener(topic, (event) => {
      markAlive();
      if (event.lastEventId) for (const position of event.lastEventId.split(" ")) positions.set(position.replace(/@[^@]*$/, ""), position);
      enqueue(topic, JSON.parse(event.data));
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

/** Lets a message wait for a frame, as a part of one that waits already: a page that is slower than the farm skips looks of a row. */
function enqueue(topic, message) {
  message.rows = new Map(message.rows);
  message.removed = new Set(message.removed);
  const last = waiting.findLast((each) => each[0] === topic)?.[1];
  if (!last || last.isBegun || message.is_reset) {
    waiting.push([topic, message]);
    if (waiting.length === 1) requestAnimationFrame(apply);
    return;
  }
  for (const key of message.removed) {
    last.rows.delete(key);
    last.removed.add(key);
  }
  for (const [key, html] of message.rows) last.rows.set(key, html);
  last.error = message.error;
  last.summary = message.summary ?? last.summary;
}

/** Applies what waits, for a part of each frame only: a snapshot of all rows at once would block the page. */
function apply() {
  const until = performance.now() + FRAME_MS;
  while (waiting.length && performance.now() < until) {
    const [topic, message] = waiting[0];
    const shown = regions().filter((region) => region.dataset.live === topic);
    if (!message.isBegun) begin(shown, message);
    let room = ROWS;
    for (const [key, html] of message.rows) {
      message.rows.delete(key);
      for (const region of shown) put(region, key, html);
      if (--room === 0) break;
    }
    if (message.rows.size) continue;
    waiting.shift();
    finish(topic, message);
  }
  if (waiting.length) requestAnimationFrame(apply);
}

/** Removes what is gone. A filtered list (data-partial) also has rows that the topic does not keep. */
function begin(shown, message) {
  message.isBegun = true;
  const kept = message.is_reset ? new Set(message.rows.keys()) : null;
  for (const region of shown.filter((each) => !("partial" in each.dataset))) {
    const known = rowsOf(region);
    for (const key of kept ? [...known.keys()].filter((each) => !kept.has(each)) : message.removed) {
      known.get(key)?.remove();
      known.delete(key);
    }
  }
}

function finish(topic, message) {
  lost = message.error || "";
  if (message.summary !== undefined)
    for (const summary of document.querySelectorAll("[data-live-summary]"))
      if (summary.dataset.liveSummary === topic) summary.innerHTML = message.summary;
  document.dispatchEvent(new CustomEvent("etfarm:live", { detail: { topic } }));
  if (source?.readyState === EventSource.OPEN) show(lost ? "away" : "live");
}

const known = new WeakMap();

/** The rows of a region by key. */
function rowsOf(region) {
  if (!known.has(region)) known.set(region, new Map([...region.children].map((child) => [child.dataset.key, child])));
  return known.get(region);
}

function put(region, key, html) {
  const template = document.createElement("template");
  template.innerHTML = html.trim();
  const fresh = template.content.firstElementChild;
  const former = rowsOf(region).get(key);
  const insert = region.dataset.insert;
  if (former && (insert !== "rank" || former.dataset.order === fresh.dataset.order)) replace(former, fresh);
  else {
    former?.remove();
    rowsOf(region).delete(key);
    if (insert === "append") region.append(fresh);
    else if (insert === "newest" || insert === "rank") place(region, fresh, insert);
  }
  if (fresh.isConnected) rowsOf(region).set(key, fresh);
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
  former.replaceWith(fresh);
  // Another ground for a moment. An animation would have each frame drawn anew, for as long as something changes each second.
  fresh.classList.add("changed");
  setTimeout(() => fresh.classList.remove("changed"), CHANGED_MS);
  if (focused >= 0) fresh.querySelectorAll("a, button, input")[focused]?.focus({ preventScroll: true });
}

/** Moves the rows that the first picture did without into their list, some in each frame, and connects. */
function takeLater() {
  const later = document.querySelector(".later");
  if (!later) return void (document.hidden || open());
  later.previousElementSibling.append(...[...later.children].slice(0, LATER_ROWS));
  if (!later.children.length) later.remove();
  requestAnimationFrame(takeLater);
}

// A page connects while it is visible: a browser has six connections to a host for all of its tabs.
for (const region of regions()) positions.set(region.dataset.live, region.dataset.position);
if (positions.size) {
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  addEventListener("pagehide", close);
  addEventListener("pageshow", takeLater);
  if (!document.hidden) open();
}
