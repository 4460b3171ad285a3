/** Charts of a device's readings; uPlot loads when a page has some. */
const root = document.getElementById("telemetry");
const TITLES = {
  temperature_c: ["Temperature", (v) => `${v.toFixed(1)} °C`],
  cpu_share: ["Busy", (v) => `${(v * 100).toFixed(0)} %`],
  frequency_hz: ["Clock", (v) => `${(v / 1e9).toFixed(2)} GHz`],
  memory_available_bytes: ["Memory free", (v) => `${(v / 2 ** 30).toFixed(2)} GiB`],
  disk_free_bytes: ["Disk free", (v) => `${(v / 2 ** 30).toFixed(1)} GiB`],
  battery_share: ["Battery", (v) => `${(v * 100).toFixed(0)} %`],
  load_1m: ["Load", (v) => v.toFixed(2)],
};
const SPANS_S = { "2h": 7200, "24h": 86400, "7d": 604800 };
let charts = [];

/** An instant on the axis, in the browser's time zone. */
function timeText(seconds, range) {
  const time = new Date(seconds * 1000);
  if (range === "7d") return time.toLocaleDateString("en-CA").slice(5);
  return time.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
}

/** A range with some room around the values, also where there is a single one. */
const around = (_, low, high) => {
  const room = (high - low || Math.abs(high) * 0.2 || 1) * 0.1;
  return [low - room, high + room];
};

/** A colour of the page's style, read anew at each drawing: paper is always light. */
const colour = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function uplot() {
  if (window.uPlot) return Promise.resolve(window.uPlot);
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = new URL("./vendor/uPlot.iife.min.js", import.meta.url);
    script.onload = () => resolve(window.uPlot);
    script.onerror = reject;
    document.head.append(script);
  });
}

let drawn_ms = 0;
let draws = 0;

async function draw(range) {
  drawn_ms = Date.now();
  const draw_number = ++draws;
  const answer = await fetch(`${root.dataset.source}?range=${range}`);
  if (!answer.ok) return say("The readings cannot be loaded.");
  const { times_s, values } = await answer.json();
  const UPlot = times_s.length ? await uplot() : null;
  if (draw_number !== draws) return; // another range was chosen meanwhile
  const keys = Object.keys(TITLES).filter((key) => values[key]);
  for (const chart of charts) chart.destroy();
  charts = [];
  if (!times_s.length || !keys.length) return say("There are no readings of this time.");
  const until = Date.now() / 1000;
  root.replaceChildren();
  for (const key of keys) {
    const [title, text] = TITLES[key];
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    caption.textContent = title;
    figure.append(caption);
    root.append(figure);
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
    const options = {
      width: Math.max(240, figure.clientWidth), height: 150, legend: { markers: { show: false } },
      series: [{ value: (_, v) => (v == null ? "-" : new Date(v * 1000).toLocaleString("sv-SE")) }, { label: title, stroke: colour("--accent"), width: 1.4, points: { show: times_s.length < 40, size: 4 }, value: (_, v) => (v == null ? "-" : text(v)) }],
      scales: { x: { time: true, range: [until - SPANS_S[range], until] }, y: { range: key.endsWith("_share") ? [0, 1] : around } },
      axes: [{ ...axis, values: (_, ticks) => ticks.map((tick) => timeText(tick, range)) }, { ...axis, size: 76, values: (_, ticks) => ticks.map(text) }],
    };
    charts.push(new UPlot(options, [times_s, values[key]], figure));
  }
}

function say(text) {
  const paragraph = document.createElement("p");
  paragraph.className = "quiet";
  paragraph.textContent = text;
  root.replaceChildren(paragraph);
}

const buttons = [...document.querySelectorAll("[data-range]")];
for (const button of buttons)
  button.addEventListener("click", () => {
    for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
    draw(button.dataset.range);
  });
const current = () => buttons.find((button) => button.getAttribute("aria-pressed") === "true").dataset.range;
let width = 0;
new ResizeObserver(() => {
  if (root.clientWidth === width) return;
  width = root.clientWidth;
  draw(current());
}).observe(root);
// The farm stores a reading a minute.
document.addEventListener("etfarm:live", () => Date.now() - drawn_ms > 60000 && draw(current()));
for (const media of ["(prefers-color-scheme: dark)", "print"]) matchMedia(media).addEventListener("change", () => charts.forEach((chart) => chart.redraw()));
