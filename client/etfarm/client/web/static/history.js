/** Charts of a model's history: medians with their intervals, over time or from commit to commit. */
const UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];

function duration(ns) {
  const [scale, unit] = UNITS.find(([limit]) => ns >= limit) || UNITS[3];
  return `${Number((ns / scale).toPrecision(4))} ${unit}`;
}

/** Instants in the browser's time zone, as fine as the time between them. */
function times(ticks) {
  const step_s = ticks.length > 1 ? ticks[1] - ticks[0] : 60;
  const time = (tick) => new Date(tick * 1000).toLocaleString("sv-SE"); // 2026-11-24 18:44:05
  return ticks.map((tick) => (step_s >= 86400 ? time(tick).slice(0, 10) : step_s >= 60 ? time(tick).slice(5, 16) : time(tick).slice(11)));
}

function draw(figure) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const plot = figure.querySelector(".plot");
  const isByTime = figure.dataset.by === "time";
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
  const indexes = data.medians_ns.map((_, index) => index);
  const name = (index) => data.names[index] ?? "";
  const options = {
    width: Math.max(280, plot.clientWidth), height: 240,
    scales: { x: { time: isByTime, range: isByTime ? undefined : (_, low, high) => [low - 0.5, high + 0.5] }, y: { range: (_, low, high) => around(data, low, high) } },
    series: [
      isByTime ? { value: (_, at) => (at == null ? "-" : new Date(at * 1000).toLocaleString("sv-SE")) } : { label: "Commit", value: (_, index) => name(index) || "-" },
      { label: "Median", stroke: colour("--accent"), width: 1.2, spanGaps: true, points: { show: false }, value: (_, ns) => (ns == null ? "-" : duration(ns)) },
    ],
    axes: [isByTime ? { ...axis, space: 90, values: (_, ticks) => times(ticks) } : { ...axis, splits: () => spaced(indexes, plot.clientWidth), values: (_, ticks) => ticks.map(name) }, { ...axis, size: 84, values: (_, ticks) => ticks.map(duration) }],
    hooks: { draw: [(chart) => marks(chart, data, isByTime ? data.times_s : indexes, colour)] },
  };
  plot.replaceChildren();
  const chart = new window.uPlot(options, [isByTime ? data.times_s : indexes, data.medians_ns], plot);
  chart.over.addEventListener("click", () => {
    const { idx } = chart.cursor;
    if (idx != null) location.assign(figure.dataset.job.replace("JOB", encodeURIComponent(data.jobs[idx])));
  });
}

/** The indexes whose names have room beside each other. */
function spaced(indexes, width) {
  const step = Math.max(1, Math.ceil((indexes.length * 90) / Math.max(1, width)));
  return indexes.filter((index) => index % step === 0);
}

/** The range of the intervals, with room for marks. */
function around(data, low, high) {
  const values = [low, high, ...data.low_ns, ...data.high_ns].filter((value) => value != null);
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const room = (most - least) * 0.12 || most * 0.05;
  return [Math.max(0, least - room), most + room];
}

function marks(chart, data, xs, colour) {
  const { ctx } = chart;
  ctx.save();
  ctx.lineWidth = 1.5 * devicePixelRatio;
  data.medians_ns.forEach((median, index) => {
    const x = chart.valToPos(xs[index], "x", true);
    const y = (value) => chart.valToPos(value, "y", true);
    ctx.strokeStyle = ctx.fillStyle = colour(data.valid[index] ? "--accent" : "--quiet");
    if (data.low_ns[index] != null) line(ctx, x, y(data.low_ns[index]), y(data.high_ns[index]));
    ctx.beginPath();
    ctx.arc(x, y(median), 3.5 * devicePixelRatio, 0, 2 * Math.PI);
    if (data.valid[index]) ctx.fill();
    else ctx.stroke();
    if (data.changes[index]) triangle(ctx, x, y(data.high_ns[index] ?? median) - 12 * devicePixelRatio, data.changes[index] === "bad", colour);
  });
  ctx.restore();
}

function line(ctx, x, top, bottom) {
  ctx.beginPath();
  ctx.moveTo(x, top);
  ctx.lineTo(x, bottom);
  ctx.stroke();
}

function triangle(ctx, x, y, isSlower, colour) {
  const size = 5 * devicePixelRatio;
  const tip = isSlower ? -size : size;
  ctx.fillStyle = colour(isSlower ? "--bad" : "--good");
  ctx.beginPath();
  ctx.moveTo(x, y + tip);
  ctx.lineTo(x - size, y - tip);
  ctx.lineTo(x + size, y - tip);
  ctx.fill();
}

const figures = [...document.querySelectorAll("figure.trend")];
const drawAll = () => figures.forEach(draw);
let width = 0;
new ResizeObserver(() => {
  if (document.body.clientWidth === width) return;
  width = document.body.clientWidth;
  drawAll();
}).observe(document.body);
for (const media of ["(prefers-color-scheme: dark)", "print"]) matchMedia(media).addEventListener("change", drawAll); // paper is always light
