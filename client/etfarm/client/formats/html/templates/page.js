// The page itself: data, small helpers, and what is drawn where. Text goes in by textContent alone, never as HTML.
const SVG = document.createElement("template");
SVG.innerHTML = "<svg></svg>";
const SVG_SPACE = SVG.content.firstChild.namespaceURI;

/** An element with attributes and children; strings become text. */
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) if (value !== null && value !== undefined) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** The same for SVG. */
function draw(tag, attributes, ...children) {
  const element = document.createElementNS(SVG_SPACE, tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function significant(value, digits = 3) {
  if (value === 0) return "0";
  const before = Math.abs(value) >= 1 ? String(Math.trunc(Math.abs(value))).length : 0;
  return before ? value.toFixed(Math.max(0, digits - before)) : String(Number(value.toPrecision(digits)));
}

/** Nanoseconds as people read them: 1.84 ms. */
function time(ns) {
  if (ns === null || ns === undefined) return "";
  const [scale, unit] = unitOf(ns);
  return `${significant(ns / scale)} ${unit}`;
}

function unitOf(ns) {
  return [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]].find(([scale]) => ns >= scale) || [1, "ns"];
}

function percent(share) {
  return share === null || share === undefined ? "" : `${(share * 100).toFixed(1)} %`;
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "";
  return value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(digits - 1) : String(Number(value.toPrecision(digits)));
}

const BACKENDS = { XnnpackBackend: "XNNPACK", CoreMLBackend: "Core ML", QnnBackend: "QNN", EthosUBackend: "Ethos-U" };

function backendOf(row) {
  const name = row.backend || "portable";
  return BACKENDS[name] || name.replace(/Backend$/, "");
}

/** `aten.relu.default` is relu to people; overloads that say something stay. */
function shortType(type) {
  return type.replace(/^(aten|quantized_decomposed)\./, "").replace(/\.default$/, "").replace(/^_(native_batch_norm)_legit_no_training$/, "$1");
}

function placeOf(row) {
  if (row.source) return `${row.source.file}:${row.source.line}`;
  return row.module ? `module ${row.module}` : "";
}

function codeOf(row) {
  return row.source && row.source.code ? row.source.code.trim() : "";
}

const NARROW = "screen and (max-width: 700px)"; // as in page.css
const AT_SIDE = "screen and (min-width: 1200px)"; // as in page.css

const tip = document.getElementById("tip");

/** Shows lines at the pointer, or at a box that has the focus: the first is bold. */
function showTip(event, lines) {
  tip.replaceChildren(...lines.filter(Boolean).map((line, place) => make(place ? "div" : "b", null, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 10 : event.clientX + 14;
  const top = event.clientY + 16 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function hideTip() {
  tip.hidden = true;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const reports = JSON.parse(document.getElementById("data").textContent);
const drawn = []; // what depends on the width and on the colours

document.querySelectorAll("article[data-report]").forEach((article) => {
  const data = reports[Number(article.dataset.report)];
  if (data.operators.length) {
    operatorsOf(article.querySelector(".operators"), data);
    drawn.push(flameOf(article.querySelector(".icicle"), data));
  }
  if (data.samples) {
    noteOf(article.querySelector(".latency"), data);
    drawn.push(() => overTime(article.querySelector(".over-time"), data));
    drawn.push(() => distribution(article.querySelector(".distribution"), data));
  }
  if (data.gap.length) {
    gapTable(article.querySelector(".numerics"), data);
    // On a narrow screen a row a value is many screens: the chart and the first bad one are there.
    if (matchMedia(NARROW).matches) article.querySelector(".numerics details").open = false;
    drawn.push(() => gapChart(article.querySelector(".gap-chart"), data));
  }
  const series = article.querySelector(".series");
  if (series) drawn.push(() => seriesChart(series, data));
});

const beside = document.querySelector(".beside");
if (beside) besideOf(beside, reports);

/** Contents: open at the side, closed above a narrow page; the part that is being read is marked, and its report's parts are shown. */
const contents = document.querySelector(".contents");
const atSide = matchMedia(AT_SIDE);
const placeContents = () => (contents.querySelector("details").open = atSide.matches);
placeContents();
atSide.addEventListener("change", placeContents);
const entries = [...contents.querySelectorAll("a")].map((link) => [link, document.getElementById(link.hash.slice(1))]).filter(([, part]) => part);

function markContents() {
  let current = null;
  for (const [link, part] of entries) {
    link.removeAttribute("aria-current");
    link.closest(".contents > details > ol > li").classList.remove("current");
    if (part.getBoundingClientRect().top < innerHeight / 3) current = link;
  }
  if (!current) return;
  current.setAttribute("aria-current", "location");
  current.closest(".contents > details > ol > li").classList.add("current");
}
contents.classList.toggle("several", reports.length > 1);
markContents();

/** What a link goes to may be in a closed part of the page. */
function reveal() {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  const closed = target && target.closest("details:not([open])");
  if (!closed) return;
  closed.open = true;
  target.scrollIntoView();
}
addEventListener("hashchange", reveal);

function drawAll() {
  hideTip();
  drawn.forEach((one) => one());
}

let width = 0;
new ResizeObserver(() => {
  if (document.body.clientWidth !== width) {
    width = document.body.clientWidth;
    requestAnimationFrame(drawAll);
  }
}).observe(document.body);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
matchMedia("print").addEventListener("change", drawAll);
addEventListener("scroll", () => (hideTip(), requestAnimationFrame(markContents)), { passive: true });
