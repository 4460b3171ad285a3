// Charts over time and distributions, by uPlot. Each is drawn again when the width or the colours change.

const HIGH = 250;

function chart(target, options, data) {
  target.replaceChildren();
  const grid = { stroke: colour("--line"), width: 1 };
  const axis = { stroke: colour("--quiet"), grid, ticks: grid, font: "11px system-ui, sans-serif" };
  options.axes = options.axes.map((one) => ({ ...axis, ...one }));
  return new uPlot({ width: Math.max(target.clientWidth, 240), height: HIGH, ...options }, data, target);
}

/** What marks p50 and its interval: a band and a line, upright or level. */
function marks(latency, scale, level) {
  return (plot) => {
    const context = plot.ctx;
    const { left, top, width, height } = plot.bbox;
    const at = (ns) => plot.valToPos(ns / scale, level ? "y" : "x", true);
    context.save();
    context.beginPath();
    context.rect(left, top, width, height);
    context.clip();
    const ends = latency.p50_ci95_ns;
    if (ends && ends.length === 2) {
      const [one, other] = ends.map(at);
      const thick = Math.max(Math.abs(other - one), 2);
      context.fillStyle = colour("--good");
      context.globalAlpha = 0.22;
      level ? context.fillRect(left, Math.min(one, other), width, thick) : context.fillRect(Math.min(one, other), top, thick, height);
      context.globalAlpha = 1;
    }
    let row = 0;
    for (const [name, ns, dash] of [["p50", latency.p50_ns, []], ["p90", latency.p90_ns, [4, 4]], ["p99", latency.p99_ns, [2, 4]]]) {
      if (ns === null || ns === undefined) continue;
      row += 1;
      const place = Math.round(at(ns)) + 0.5;
      context.strokeStyle = context.fillStyle = name === "p50" ? colour("--good") : colour("--quiet");
      context.lineWidth = devicePixelRatio * (name === "p50" ? 1.5 : 1);
      context.setLineDash(dash.map((one) => one * devicePixelRatio));
      context.beginPath();
      level ? context.moveTo(left, place) : context.moveTo(place, top);
      level ? context.lineTo(left + width, place) : context.lineTo(place, top + height);
      context.stroke();
      context.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
      const [right, below] = level ? [left + width - 26 * devicePixelRatio, place - 4 * devicePixelRatio] : [place + 4 * devicePixelRatio, top + (14 * row - 2) * devicePixelRatio];
      if (!(level && name === "p50")) context.fillText(name, right, below);
    }
    context.restore();
  };
}

function overTime(target, data) {
  const { x, y, low, middle, high, stretch } = data.samples;
  const drawn = y || high;
  const [scale, unit] = unitOf(data.latency.p50_ns || drawn[0]);
  const top = edgeOf(data);
  const beyond = drawn.some((ns) => ns > top);
  const dots = stretch === 1 && x.length < 1500;
  const within = (values) => values.map((ns) => Math.min(ns, top) / scale);
  const timeLabel = (values) => (_, one, __, place) => (place === null || place === undefined ? "" : time(values[place]));
  const thin = { stroke: colour("--bar"), width: 0.7, points: { show: false } };
  const series = y
    ? [{ label: "latency", stroke: colour("--accent"), width: dots ? 0 : 0.7, points: { show: dots, size: 3, fill: colour("--accent") }, value: timeLabel(y) }]
    : [
        { ...thin, label: "highest", value: timeLabel(high) },
        { ...thin, label: "lowest", value: timeLabel(low) },
        { label: `median of ${stretch.toLocaleString("en")}`, stroke: colour("--accent"), width: 1.2, points: { show: false }, value: timeLabel(middle) },
      ];
  const lines = y ? [within(y)] : [within(high), within(low), within(middle)];
  chart(
    target,
    {
      scales: { x: { time: false }, y: beyond ? { range: (_, least) => [least - (top / scale - least) * 0.05, (top / scale) * 1.02] } : {} },
      axes: [{ label: "iteration", labelSize: 18 }, { label: unit, labelSize: 18, size: room }],
      series: [{ label: "iteration" }, ...series, { label: "beyond the edge", show: beyond, stroke: colour("--bad"), width: 0, points: { show: true, size: stretch === 1 ? 5 : 3, fill: colour("--bad") }, value: (_, one, __, place) => (one === null || place === null || place === undefined ? "" : time(drawn[place])) }],
      bands: y ? [] : [{ series: [1, 2], fill: colour("--bar") }],
      cursor: { y: false },
      hooks: { draw: [marks({ p50_ns: data.latency.p50_ns, p50_ci95_ns: data.latency.p50_ci95_ns }, scale, true), runEnds(data.run_ends)] },
    },
    [x, ...lines, drawn.map((ns) => (ns > top ? top / scale : null))],
  );
}

/** Upright lines where one run ends and the next begins. */
function runEnds(ends) {
  return (plot) => {
    const { top, height } = plot.bbox;
    plot.ctx.save();
    plot.ctx.strokeStyle = colour("--quiet");
    plot.ctx.lineWidth = devicePixelRatio;
    plot.ctx.beginPath();
    for (const end of ends) {
      const place = Math.round(plot.valToPos(end - 0.5, "x", true)) + 0.5;
      plot.ctx.moveTo(place, top);
      plot.ctx.lineTo(place, top + height);
    }
    plot.ctx.stroke();
    plot.ctx.restore();
  };
}

/** How wide an axis must be for its numbers. */
function room(_, values) {
  return 22 + 7 * Math.max(...(values || [""]).map((one) => String(one ?? "").length));
}

/** What the chart over time ends at: a few slow samples would press all others onto its floor. */
function edgeOf(data) {
  const { low, width, counts, max } = data.histogram;
  const end = low + width * counts.length;
  return max > low + 3 * (end - low) ? end : max;
}

function distribution(target, data) {
  const { low, width, counts } = data.histogram;
  const [scale, unit] = unitOf(data.latency.p50_ns || low || 1);
  let below = 0;
  const sums = counts.map((count) => (below += count) / data.samples.total);
  const middles = counts.map((_, place) => (low + width * (place + 0.5)) / scale);
  const ends = [low / scale, (low + width * counts.length) / scale];
  chart(
    target,
    {
      scales: { x: { time: false, range: () => (counts.length > 1 ? ends : [ends[0] * 0.9, ends[1] * 1.1]) }, y: { range: (_, __, most) => [0, most * 1.1] }, sum: { range: [0, 1.1] } },
      axes: [{ label: `latency, ${unit}`, labelSize: 18 }, { label: "samples", labelSize: 18, size: room }, { scale: "sum", side: 1, values: (_, ticks) => ticks.map((one) => (one > 1 ? "" : `${Math.round(one * 100)} %`)), size: 58, grid: { show: false } }],
      series: [
        { label: `latency, ${unit}`, value: (_, one) => (one === null || one === undefined ? "" : significant(one, 4)) },
        { label: "samples", stroke: colour("--accent"), fill: colour("--bar"), paths: uPlot.paths.bars({ size: [1, Infinity], gap: 1 }), points: { show: false } },
        { label: "at most", scale: "sum", stroke: colour("--quiet"), width: 1, dash: [3, 3], points: { show: false }, value: (_, one) => (one === null || one === undefined ? "" : percent(one)) },
      ],
      cursor: { y: false },
      hooks: { draw: [marks(data.latency, scale, false)] },
    },
    [middles, counts, sums],
  );
}

/** What the charts leave out, in words. */
function noteOf(section, data) {
  const { stretch, x } = data.samples;
  const note = section.querySelector(".note");
  const { counts, low, width, beyond, max } = data.histogram;
  if (stretch > 1) note.append(`Over time, the lowest, the median and the highest of each ${stretch.toLocaleString("en")} are drawn, ${x.length.toLocaleString("en")} points. `);
  if (edgeOf(data) < max) note.append(`${beyond.toLocaleString("en")} took longer than ${time(low + width * counts.length)} and lie beyond the upper edge, up to ${time(max)}.`);
  if (beyond) section.querySelector(".beyond").textContent = `· ${beyond.toLocaleString("en")} slower ones lie beyond, up to ${time(max)}`;
}

function gapChart(target, data) {
  const values = comparedValues(data);
  const references = ["QUANTIZED", "EAGER"].filter((name) => values.some((one) => one[name]));
  const strokes = ["--accent", "--portable", "--good"];
  const x = values.map((_, place) => place);
  const bad = values.findIndex((one) => one.judged.first_bad);
  const plot = chart(
    target,
    {
      scales: { x: { time: false, range: [-0.5, Math.max(x.length - 0.5, 0.5)] }, y: { range: (_, least, most) => [Math.min(0, least ?? 0), Math.max(10, most ?? 0) * 1.05] } },
      axes: [{ label: "operator", labelSize: 18, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500] }, { label: "dB", labelSize: 18, size: 52 }],
      series: [
        { label: "operator", value: (_, place) => (values[place] ? `${values[place].place} ${values[place].judged.ops.map(shortType).join(" + ").slice(0, 60)} ${placeOf(values[place].judged)}` : "") },
        ...references.map((reference, place) => ({ label: `against the ${referenceOf({ reference })}`, stroke: colour(strokes[place % 3]), width: 1.5, spanGaps: true, points: { show: true, size: 6, fill: colour(strokes[place % 3]) }, value: (_, one) => (one === null || one === undefined ? "" : `${one.toFixed(1)} dB`) })),
      ],
      cursor: { y: false },
      hooks: {
        draw: [
          (plotted) => {
            if (bad < 0) return;
            const { top, height } = plotted.bbox;
            const place = plotted.valToPos(bad, "x", true);
            plotted.ctx.save();
            plotted.ctx.strokeStyle = plotted.ctx.fillStyle = colour("--bad");
            plotted.ctx.lineWidth = 1.5 * devicePixelRatio;
            plotted.ctx.beginPath();
            plotted.ctx.moveTo(place, top);
            plotted.ctx.lineTo(place, top + height);
            plotted.ctx.stroke();
            plotted.ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
            plotted.ctx.fillText("first bad", place + 5 * devicePixelRatio, top + 12 * devicePixelRatio);
            plotted.ctx.restore();
          },
        ],
      },
    },
    [x, ...references.map((reference) => values.map((one) => (one[reference] ? one[reference].snr_db : undefined)))],
  );
  return plot;
}

/** Clocks, temperature and load of the device while it was timed; only what it has. */
function seriesChart(target, data) {
  const points = data.series;
  const clusters = Math.max(...points.map((point) => point.frequency_hz.length));
  const curves = [];
  for (let cluster = 0; cluster < clusters; cluster++) curves.push([`cluster ${cluster}, GHz`, "y", points.map((point) => (point.frequency_hz[cluster] ? point.frequency_hz[cluster] / 1e9 : null))]);
  curves.push(["busy cpus", "y", points.map((point) => point.busy_cpus)], ["waiting for a cpu", "share", points.map((point) => point.psi_cpu)], ["hottest, °C", "heat", points.map((point) => point.temperature_c)]);
  const kept = curves.filter(([, , values]) => values.some((value) => value !== null));
  if (!kept.length) {
    target.parentElement.remove();
    return;
  }
  const strokes = ["--accent", "--portable", "--good", "--bad", "--fair"];
  const axes = [{ label: data.run_ends.length ? "ms of the timed passes" : "ms of the timed pass", labelSize: 18 }, { size: 48 }];
  if (kept.some(([, scale]) => scale === "share")) axes.push({ scale: "share", side: 1, size: 52, values: (_, ticks) => ticks.map((one) => `${Math.round(one * 100)} %`), grid: { show: false } });
  if (kept.some(([, scale]) => scale === "heat")) axes.push({ scale: "heat", side: 1, size: 52, values: (_, ticks) => ticks.map((one) => `${one} °C`), grid: { show: false } });
  chart(
    target,
    {
      height: 200,
      scales: { x: { time: false }, y: { range: (_, __, most) => [0, Math.max(1, most) * 1.1] }, share: { range: [0, 1] } },
      axes,
      series: [{ label: "ms", value: (_, one) => (one === null || one === undefined ? "" : one.toFixed(0)) }, ...kept.map(([label, scale], place) => ({ label, scale, stroke: colour(strokes[place % 5]), width: 1.3, points: { show: false }, value: (_, one) => (one === null || one === undefined ? "" : scale === "share" ? percent(one) : number(one)) }))],
      cursor: { y: false },
    },
    [points.map((point) => point.elapsed_ms), ...kept.map(([, , values]) => values)],
  );
}
