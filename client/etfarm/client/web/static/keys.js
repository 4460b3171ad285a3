/** Keys: j and k move through the rows, Enter opens one, / searches, g and a letter goes to a page, ? shows all. */
const GO = { d: "Devices", q: "Queue", j: "Jobs", h: "History", s: "Server" };

let prefix = "";

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, [contenteditable], dialog[open]")) return;
  const key = event.key;
  if (prefix === "g" && GO[key]) go(GO[key]);
  else if (key === "/") document.getElementById("search")?.focus();
  else if (key === "?") document.getElementById("keys").showModal();
  else if (key === "j" || key === "k") move(key === "j" ? 1 : -1);
  else if (key === "c") document.querySelector('[data-copy="command"]')?.click();
  else if (key === "Enter" && event.target === document.body) selected()?.querySelector("a")?.click();
  else {
    prefix = key;
    return;
  }
  prefix = "";
  event.preventDefault();
});

function go(label) {
  for (const link of document.querySelectorAll("nav a")) if (link.textContent === label) link.click();
}

const rows = () => [...document.querySelectorAll("[data-rows] [data-key], [data-rows] tbody tr")].filter((row) => row.querySelector("a") && row.checkVisibility());
const selected = () => document.querySelector('[data-rows] [data-selected]');

function move(step) {
  const all = rows();
  if (!all.length) return;
  const former = selected();
  const index = former ? all.indexOf(former) + step : step > 0 ? 0 : all.length - 1;
  const next = all[Math.max(0, Math.min(all.length - 1, index))];
  former?.removeAttribute("data-selected");
  next.toggleAttribute("data-selected", true);
  next.querySelector("a").focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
}
