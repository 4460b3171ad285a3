// The icicle of modules: boxes as wide as their share, operators at the bottom; a click makes a box the whole.

const ROW_PX = 22;
const LEAST_PX = 1.5; // narrower boxes are left out

/** Draws now and again whenever the answer is called. */
function flameOf(svg, data) {
  const boxes = data.flame;
  const rows = new Map(data.operators.map((row) => [row.index, row]));
  for (const box of boxes) {
    const row = rows.get(box.row);
    if (row && row.op_types.length) box.name = row.op_types.map(shortType).join(" + ");
  }
  const deepest = Math.max(...boxes.map((box) => box.d));
  let whole = boxes[0];
  const inside = (box, other) => box.x >= other.x - 1e-9 && box.x + box.w <= other.x + other.w + 1e-9;

  function render() {
    const wide = svg.clientWidth || 1000;
    svg.setAttribute("height", String((deepest + 1) * ROW_PX));
    svg.setAttribute("viewBox", `0 0 ${wide} ${(deepest + 1) * ROW_PX}`);
    const drawn = [];
    for (const box of boxes) {
      const above = box.d < whole.d && inside(whole, box);
      if (!above && !(box.d >= whole.d && inside(box, whole))) continue;
      const left = above ? 0 : ((box.x - whole.x) / whole.w) * wide;
      const length = above ? wide : (box.w / whole.w) * wide;
      if (length >= LEAST_PX) drawn.push(drawBox(box, left, length));
    }
    svg.replaceChildren(...drawn);
  }

  function drawBox(box, left, length) {
    const row = box.row === undefined ? null : rows.get(box.row);
    const kind = box.rest || (row && row.kind === "REST") ? "rest" : row ? (row.delegated ? "delegated" : "portable") : "module";
    const group = draw("g", { class: kind, tabindex: "0", "data-box": box.name, "data-place": boxes.indexOf(box), role: "button", "aria-label": `${box.name}, ${percent(box.w)}` });
    group.append(draw("rect", { x: left, y: box.d * ROW_PX, width: Math.max(length - 0.5, 0.5), height: ROW_PX - 1, rx: 2 }));
    const room = Math.floor((length - 10) / 6.4);
    if (room >= 3) {
      const text = `${box.name}  ${percent(box.w)}`;
      // The end of a path says more than its beginning.
      const cut = row ? `${box.name.slice(0, room - 1)}…` : `…${box.name.slice(1 - room)}`;
      group.append(draw("text", { x: left + 5, y: box.d * ROW_PX + 15 }, text.length <= room ? text : box.name.length <= room ? box.name : cut));
    }
    const zoom = () => {
      whole = box === whole ? boxes[0] : box;
      hideTip();
      render();
    };
    group.addEventListener("click", zoom);
    group.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        zoom();
        // The box is drawn anew.
        const again = [...svg.children].find((other) => other.dataset.place === group.dataset.place);
        if (again) again.focus();
      }
    });
    group.addEventListener("pointermove", (event) => showTip(event, describe(box, row)));
    group.addEventListener("pointerleave", hideTip);
    group.addEventListener("focus", () => {
      if (!group.matches(":focus-visible")) return;
      const { left: clientX, bottom: clientY } = group.getBoundingClientRect();
      showTip({ clientX, clientY }, describe(box, row));
    });
    group.addEventListener("blur", hideTip);
    return group;
  }

  function describe(box, row) {
    if (!row) {
      const own = box.own === null ? "" : `own operators ${percent(box.own)}`;
      const took = data.latency && wholeNs() ? `, about ${time(box.total * wholeNs())}` : "";
      return [box.path || box.name, `${percent(box.total)} of the time${took}`, own];
    }
    const clock = row.mean_ns !== null ? time(row.mean_ns) : row.resolution_ns ? `below ${time(row.resolution_ns)}` : "";
    return [row.name, `${percent(row.share)}  ${clock}  ${row.kind === "REST" ? "" : backendOf(row)}`, row.op_types.map(shortType).join(" + "), box.path, placeOf(row), codeOf(row)];
  }

  /** The traced execution's time, from the shares of rows that have both. */
  function wholeNs() {
    const known = data.operators.find((row) => row.share && row.mean_ns);
    return known ? known.mean_ns / known.share : 0;
  }
  return render;
}
