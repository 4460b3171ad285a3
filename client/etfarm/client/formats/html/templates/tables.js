// Tables of operators, of their groups, and of the numeric gap.

const FIRST_ROWS = 15; // so many before "show all"
const VIEWS = [["operators", "Operators"], ["op", "By operator"], ["type", "By op type"], ["module", "By module"], ["line", "By line"], ["backend", "By backend"]];

/** The first rows of a table, or all of them, with a button that changes that. */
function limited(lines, state, more, show) {
  more.replaceChildren();
  if (lines.length > FIRST_ROWS) {
    const button = make("button", { type: "button", class: "plain", "aria-expanded": String(state.all) }, state.all ? `Show the first ${FIRST_ROWS} rows` : `Show all ${lines.length.toLocaleString("en")} rows`);
    button.addEventListener("click", () => {
      state.all = !state.all;
      show();
      more.querySelector("button").focus();
    });
    more.append(button);
  }
  return state.all ? lines : lines.slice(0, FIRST_ROWS);
}

/** Tabs that arrow keys move between. */
function tabsOf(tabs, views, choose) {
  for (const [key, title] of views) {
    const tab = make("button", { type: "button", role: "tab", "data-view": key }, title);
    tab.addEventListener("click", () => choose(key));
    tabs.append(tab);
  }
  tabs.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const all = [...tabs.children];
    const next = all[(all.indexOf(event.target) + step + all.length) % all.length];
    event.preventDefault();
    next.click();
    next.focus();
  });
}

function selectTab(tabs, view) {
  for (const tab of tabs.children) {
    const selected = tab.dataset.view === view;
    tab.setAttribute("aria-selected", String(selected));
    tab.tabIndex = selected ? 0 : -1;
  }
}

/** The operators' section: views, search, filter, sort. */
function operatorsOf(section, data) {
  const state = { view: "operators", sort: "share", up: false, search: "", backend: "", all: false };
  const table = section.querySelector("table");
  const more = section.querySelector(".more");
  const search = section.querySelector("input");
  const backend = section.querySelector("select");
  const tabs = section.querySelector(".tabs");

  const names = [...new Set(data.operators.filter((row) => row.kind !== "REST").map(backendOf))];
  backend.append(make("option", { value: "" }, "all backends"));
  if (names.length > 1 || data.operators.some((row) => row.delegated)) {
    backend.append(make("option", { value: "+" }, "delegated"), make("option", { value: "-" }, "not delegated"));
  }
  names.forEach((name) => backend.append(make("option", { value: `=${name}` }, name)));

  tabsOf(tabs, VIEWS, (view) => {
    Object.assign(state, { view, sort: view === "module" ? "order" : "share", up: false, all: false });
    show();
  });
  search.addEventListener("input", () => {
    state.search = search.value.toLowerCase();
    show();
  });
  backend.addEventListener("change", () => {
    state.backend = backend.value;
    show();
  });

  function show() {
    hideTip();
    selectTab(tabs, state.view);
    const grouped = state.view !== "operators";
    backend.hidden = grouped;
    const lines = grouped ? groupLines(data.views[state.view], state) : operatorLines(data.operators, state);
    const shown = limited(lines, state, more, show);
    const heads = grouped ? groupHeads(state.view) : OPERATOR_HEADS;
    table.classList.toggle("ops", !grouped);
    const head = make("tr", null, ...heads.map(([key, title, css]) => headCell(key, title, css)));
    table.replaceChildren(make("thead", null, head), make("tbody", null, ...shown.map((line) => line())));
    if (!lines.length) more.append("Nothing matches.");
  }

  function headCell(key, title, css) {
    const cell = make("th", { class: css });
    if (!key) return cell.append(title), cell;
    const button = make("button", { type: "button", "data-sort": key }, title);
    if (state.sort === key) button.setAttribute("aria-sort", state.up ? "ascending" : "descending");
    button.addEventListener("click", () => {
      const natural = ["order", "name", "module", "place", "backend"].includes(key);
      state.up = state.sort === key ? !state.up : natural;
      state.sort = key;
      show();
      table.querySelector(`[data-sort="${key}"]`).focus();
    });
    cell.append(button);
    return cell;
  }
  show();
}

const OPERATOR_HEADS = [["order", "#", "n"], ["share", "share", "n"], ["time", "time", "n"], ["name", "operator", ""], ["backend", "backend", "where"], ["module", "module", "module"], ["place", "where it comes from", ""]];
const SORTED_BY = {
  order: (row) => row.index,
  share: (row) => row.share,
  time: timeNs,
  name: (row) => row.name.toLowerCase(),
  backend: (row) => backendOf(row).toLowerCase(),
  module: (row) => row.module,
  place: (row) => (row.source ? `${row.source.file}:${String(row.source.line).padStart(7, "0")}` : row.module || "\uffff"),
};

/** A row's time, which is its share of the whole: the mean over the typical executions, or of an old report the median. */
function timeNs(row) {
  return row.mean_ns === null ? row.p50_ns : row.mean_ns;
}

/** Half of a time's interval as a part of it, "±1.2 %"; empty without an interval. */
function precisionOf(mean, ends) {
  if (!mean || !ends) return "";
  const part = (100 * Math.max(mean - ends[0], ends[1] - mean)) / mean;
  return part < 0.05 ? "±<0.1 %" : `±${part.toFixed(part < 9.95 ? 1 : 0)} %`;
}

/** Compares by a key; null comes last in either direction. */
function ordering(key, up) {
  return (one, other) => {
    const [a, b] = [key(one), key(other)];
    if (a === b) return 0;
    if (a === null || a === undefined) return 1;
    if (b === null || b === undefined) return -1;
    return (a < b ? -1 : 1) * (up ? 1 : -1);
  };
}

/** Rows to show, a function each that makes the row: kernels right below their delegate, both sorted. */
function operatorLines(rows, state) {
  const matches = (row) => {
    if (state.backend === "+" && !row.delegated) return false;
    if (state.backend === "-" && (row.delegated || row.kind === "REST")) return false;
    if (state.backend.startsWith("=") && (row.kind === "REST" || backendOf(row) !== state.backend.slice(1))) return false;
    if (!state.search) return true;
    return [row.name, row.module, row.op_types.join(" "), placeOf(row), codeOf(row)].some((text) => text && text.toLowerCase().includes(state.search));
  };
  const order = ordering(SORTED_BY[state.sort] || SORTED_BY.share, state.up);
  const children = new Map();
  for (const row of rows) {
    if (row.parent === null) continue;
    if (!children.has(row.parent)) children.set(row.parent, []);
    children.get(row.parent).push(row);
  }
  const largest = Math.max(...rows.filter((row) => !children.has(row.index)).map((row) => row.share || 0), 1e-9);
  const lines = [];
  for (const row of rows.filter((one) => one.parent === null).sort(order)) {
    const below = (children.get(row.index) || []).filter(matches).sort(order);
    if (!below.length && !matches(row)) continue;
    lines.push(() => operatorRow(row, largest, children.has(row.index)));
    below.forEach((kernel) => lines.push(() => operatorRow(kernel, largest, false)));
  }
  return lines;
}

/** Fills a part of a cell's background with a bar. */
function fillCell(cell, part, name) {
  cell.style.backgroundImage = `linear-gradient(var(${name}), var(${name}))`;
  cell.style.backgroundSize = `${Math.min(100, 100 * part)}% 19px`;
}

function shareCell(share, largest, kind, strong) {
  const cell = make("td", { class: "share" }, percent(share));
  const names = { portable: "--bar-portable", rest: "--bar-rest" };
  if (share !== null && share !== undefined) fillCell(cell, strong ? 0 : share / largest, names[kind] || "--bar");
  return cell;
}

/** A row's time, half of its interval, and what both are. */
function timeOf(row) {
  const value = timeNs(row);
  const clock = value !== null ? time(value) : row.resolution_ns ? `< ${time(row.resolution_ns)}` : "";
  return [clock, precisionOf(row.mean_ns, row.mean_ci95_ns), "mean over the typical executions; half of its 95 % interval"];
}

function operatorRow(row, largest, parent) {
  const rest = row.kind === "REST";
  const kind = rest ? "rest" : row.delegated ? "delegated" : "portable";
  const css = [row.kind.toLowerCase(), row.parent !== null ? "kernel" : ""].join(" ");
  const name = rest ? (row.parent === null ? "not explained by operators" : "not explained by its kernels") : row.name;
  const types = parent || rest ? "" : row.op_types.map(shortType).join(" + ");
  const [clock, spread, title] = timeOf(row);
  return make(
    "tr",
    { class: css, "data-index": row.index },
    make("td", { class: "n quiet" }, rest ? "" : String(row.index)),
    shareCell(timeNs(row) === null && row.resolution_ns ? null : row.share, largest, kind, parent), // unknown, too
    make("td", { class: "n time", title: spread ? title : null }, clock, spread ? make("small", null, spread) : null),
    make("td", { class: "name" }, name, types && types !== name ? make("span", { class: "types" }, types) : null),
    make("td", { class: "where" }, rest ? "" : backendOf(row)),
    make("td", { class: "module" }, ...breakable(row.module || "")),
    placeCell(row, parent),
  );
}

/** The other lines of a row of several operators: `line 29, 30 and net.py:7`. */
function moreLines(row) {
  const others = row.sources.filter((one) => one.file !== row.source.file || one.line !== row.source.line);
  const same = others.filter((one) => one.file === row.source.file).map((one) => one.line);
  const elsewhere = others.filter((one) => one.file !== row.source.file).map((one) => `${one.file}:${one.line}`);
  const shown = [...(same.length ? [`${same.length > 1 ? "lines" : "line"} ${same.slice(0, 6).join(", ")}`] : []), ...elsewhere.slice(0, 3)];
  const left = Math.max(0, same.length - 6) + Math.max(0, elsewhere.length - 3);
  return shown.join(", ") + (left ? ` and ${left} more` : "");
}

/** A file and its line, the folder apart: where there is little room, the file's name comes first. */
function pathOf(text) {
  const [, folder, file] = /^(.*\/)?(.*)$/s.exec(text);
  return make("span", { class: "path" }, folder ? make("span", { class: "folder" }, ...breakable(folder)) : null, make("span", { class: "file" }, file));
}

/** Text that may be broken after its dots and slashes. */
function breakable(text) {
  return text.split(/(?<=[./])/).flatMap((part, place) => (place ? [make("wbr"), part] : [part]));
}

function placeCell(row, parent) {
  const cell = make("td", { class: "place" });
  if (row.source) {
    cell.append(make("b", null, pathOf(placeOf(row))));
    if (codeOf(row)) cell.append(make("code", null, codeOf(row)));
    if (row.sources.length > 1) cell.append(make("span", { class: "quiet" }, `and ${moreLines(row)}`));
  }
  if (row.source_reason) cell.append(make("span", { class: "quiet" }, row.source_reason));
  if (row.undelegated_reason) cell.append(make("span", { class: "quiet" }, `Not delegated: ${row.undelegated_reason}`));
  if (parent && row.unaligned_reason) cell.append(make("span", { class: "quiet" }, `Its kernels have no lines: ${row.unaligned_reason}`));
  return cell;
}

function groupHeads(view) {
  const title = { op: "operator", type: "op type", module: "module", line: "line", backend: "backend" }[view];
  const heads = [["share", "own share", "n"], ["time", "own time", "n"]];
  if (view === "module") heads.push(["", "with what is below", "n"]);
  return [...heads, ["", "rows", "n"], [view === "module" ? "order" : "name", title, ""]];
}

function groupLines(groups, state) {
  const matches = groups.filter((one) => !state.search || `${one.key} ${one.detail}`.toLowerCase().includes(state.search));
  const keys = { share: (one) => one.own_share, time: (one) => one.own_ns, name: (one) => one.key.toLowerCase() };
  if (keys[state.sort]) matches.sort(ordering(keys[state.sort], state.up));
  const tree = state.view === "module" && state.sort === "order";
  const largest = Math.max(...groups.map((one) => one.own_share || 0), 1e-9);
  return matches.map((one) => () => {
    const kind = one.key === "not explained" ? "rest" : "";
    const name = make("td", { class: "place" }, state.view === "line" ? pathOf(one.key) : make("span", null, ...breakable(one.key)), one.detail ? make("code", null, one.detail) : null);
    if (tree) name.style.paddingLeft = `${one.depth * 18}px`;
    return make(
      "tr",
      null,
      shareCell(one.own_share, largest, kind, false),
      make("td", { class: "n time" }, time(one.own_ns), one.own_ci95_ns ? make("small", null, precisionOf(one.own_ns, one.own_ci95_ns)) : null),
      state.view === "module" ? make("td", { class: "n", "data-head": "with what is below" }, `${percent(one.total_share)}  ${time(one.total_ns)}`) : null,
      make("td", { class: "n quiet", "data-head": "rows" }, String(one.rows)),
      name,
    );
  });
}

/** Values that were compared, in order, with their rows by reference. */
function comparedValues(data) {
  const row = (place) => (place === null ? undefined : data.gap[place]);
  return data.values.map((one) => ({ place: one.place, judged: row(one.place), QUANTIZED: row(one.QUANTIZED), EAGER: row(one.EAGER) }));
}

function decibels(row) {
  return !row ? "" : row.snr_db === null ? "none" : row.snr_db >= 300 ? "exact" : `${row.snr_db.toFixed(1)} dB`;
}

/** The numeric gap: the first bad operator in a sentence, and a table of all. */
function gapTable(section, data) {
  const values = comparedValues(data);
  const bad = data.gap.find((row) => row.first_bad);
  const quantized = values.some((one) => one.QUANTIZED);
  if (bad) {
    const sentence = `The first bad operator is ${bad.ops.map(shortType).join(" + ")}: ${bad.snr_db === null ? "no SNR" : `${bad.snr_db.toFixed(1)} dB`} against the ${referenceOf(bad)}.`;
    const lines = bad.sources.length ? bad.sources : bad.source ? [bad.source] : [];
    section.querySelector(".first-bad").append(make("div", { class: "callout bad" }, make("b", null, sentence), ...lines.map((one) => make("div", null, `${one.file}:${one.line}  `, make("code", null, (one.code || "").trim())))));
  } else if (data.fused) {
    section.querySelector(".first-bad").append(make("div", { class: "callout bad" }, make("b", null, `Wrong only when fused: ${data.fused}.`)));
  } else {
    const judged = quantized ? "quantized program" : "program before quantization";
    const rest = data.judged < values.length ? ` ${data.judged} of ${values.length} values judged.` : "";
    const sentence = data.judged ? `No bad operator among ${data.judged}, against the ${judged}.${rest}` : `None of ${values.length} values could be judged: the warnings say why.`;
    section.querySelector(".first-bad").append(make("p", { class: data.judged ? "callout good" : "callout" }, sentence));
  }
  const heads = [["#", "n"], ["operators", ""], ...(quantized ? [["against quantized", "n"]] : []), [quantized ? "against eager" : "SNR", "n"], ["MSE", "n"], ["max abs error", "n"], ["host", "n"], ["device", "n"], ["values", ""], ["where it comes from", ""]];
  const rows = values.map(({ place, judged, QUANTIZED, EAGER }) =>
    make(
      "tr",
      { class: judged.first_bad ? "first" : null },
      make("td", { class: "n quiet" }, String(place)),
      make("td", { class: "ops" }, judged.ops.map(shortType).join(" + "), judged.module ? make("span", { class: "types" }, judged.module) : null),
      quantized ? make("td", { class: "n", "data-head": "against quantized" }, decibels(QUANTIZED)) : null,
      make("td", { class: "n", "data-head": quantized ? "against eager" : "SNR" }, decibels(EAGER)),
      make("td", { class: "n", "data-head": "MSE" }, number(judged.mse)),
      make("td", { class: "n", "data-head": "max abs error" }, number(judged.max_abs_error)),
      make("td", { class: "n", "data-head": "host" }, rangeOf(judged.expected)),
      make("td", { class: "n", "data-head": "device" }, rangeOf(judged.actual)),
      make("td", null, judged.histogram ? bothHistograms(judged.histogram) : ""),
      placeCell(judged, false),
    ),
  );
  section.querySelector(".gap-table").append(make("thead", null, make("tr", null, ...heads.map(([title, css]) => make("th", { class: css }, title)))), make("tbody", null, ...rows));
}

function referenceOf(row) {
  return { EAGER: "program before quantization", QUANTIZED: "quantized program" }[row.reference] || row.reference || "";
}

function rangeOf(values) {
  if (!values) return "";
  const odd = values.nan_count ? `, ${values.nan_count} NaN` : "";
  return values.min === null ? odd.slice(2) : `[${number(values.min)}, ${number(values.max)}]${odd}`;
}

/** Expected values as bars, those of the device as a line over them. */
function bothHistograms(histogram) {
  const [wide, high] = [120, 26];
  const top = Math.max(...histogram.expected, ...histogram.actual, 1);
  const bins = Math.max(histogram.expected.length, 1);
  const svg = draw("svg", { width: wide, height: high, viewBox: `0 0 ${wide} ${high}` });
  histogram.expected.forEach((count, place) => svg.append(draw("rect", { class: "expected", x: (wide * place) / bins, y: high - (high * count) / top, width: wide / bins, height: (high * count) / top })));
  const points = histogram.actual.map((count, place) => `${(wide * (place + 0.5)) / bins},${high - (high * count) / top}`);
  svg.append(draw("polyline", { class: "actual", points: points.join(" ") }));
  svg.append(draw("title", null, `${number(histogram.low)} to ${number(histogram.high)}: bars are expected, the line is the device`));
  return svg;
}
