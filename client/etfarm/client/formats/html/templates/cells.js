// Where the time of several cells goes, side by side: a row for each module, line or type of operator, a column for each cell.

const BESIDE = [["module", "By module"], ["line", "By line"], ["type", "By op type"], ["backend", "By backend"]];

function besideOf(section, all) {
  const cells = all.map((data, place) => [place, data]).filter(([, data]) => data.operators.length);
  const table = section.querySelector("table");
  const more = section.querySelector(".more");
  const tabs = section.querySelector(".tabs");
  const state = { view: "module", all: false };

  table.style.setProperty("--cells", cells.length);
  tabsOf(tabs, BESIDE, (view) => {
    Object.assign(state, { view, all: false });
    show();
  });

  function show() {
    selectTab(tabs, state.view);
    const rows = new Map();
    cells.forEach(([, data], column) =>
      data.views[state.view].forEach((group) => {
        if (!group.own_ns) return;
        if (!rows.has(group.key)) rows.set(group.key, { group, times: [], most: 0 });
        const row = rows.get(group.key);
        row.times[column] = group;
        row.most = Math.max(row.most, group.own_ns);
      }),
    );
    const lines = [...rows.values()].sort((one, other) => other.most - one.most);
    const largest = lines.length ? lines[0].most : 1;
    const head = make("tr", null, make("th", null, ""), ...cells.map(([place, data]) => make("th", { class: "n" }, make("a", { href: `#r${place}` }, data.label))));
    const shown = limited(lines, state, more, show);
    table.replaceChildren(make("thead", null, head), make("tbody", null, ...shown.map((row) => besideRow(row, cells, largest, state.view))));
  }
  show();
}

function besideRow({ group, times }, cells, largest, view) {
  const name = view === "type" ? group.key.split(" + ").map(shortType).join(" + ") : group.key;
  const detail = view === "line" ? group.detail : "";
  return make(
    "tr",
    null,
    make("td", { class: "what" }, ...breakable(name), detail ? make("code", { class: "quiet" }, detail) : null),
    ...cells.map(([, data], column) => {
      const own = times[column];
      const cell = make("td", { class: "n share", "data-head": data.label }, own ? time(own.own_ns) : "–", own && own.own_share !== null ? make("small", null, percent(own.own_share)) : null);
      if (own) fillCell(cell, own.own_ns / largest, "--bar");
      return cell;
    }),
  );
}
