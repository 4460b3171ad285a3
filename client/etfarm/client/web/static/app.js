/** What every page does: copying, times, and what the policy leaves to a script. */

document.addEventListener("click", async (event) => {
  const opener = event.target.closest("[data-open]");
  if (opener) document.getElementById(opener.dataset.open).showModal();
  const copier = event.target.closest("[data-copy]");
  if (copier) await copyFrom(copier);
});

async function copyFrom(button) {
  const text = document.getElementById(button.dataset.copy).textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(document.getElementById(button.dataset.copy)); // no clipboard on plain http
    button.textContent = "Selected";
  }
  setTimeout(() => (button.textContent = "Copy"), 2000);
}

const UNITS = [[120, 1, "s"], [7200, 60, "min"], [172800, 3600, "h"], [604800, 86400, "d"]];

/** Keeps "12 s ago" true; the server has written the same words when it last rendered the row. */
function age() {
  for (const time of document.querySelectorAll("time[datetime]")) {
    const seconds = (Date.now() - Date.parse(time.dateTime)) / 1000;
    const unit = UNITS.find(([limit]) => seconds < limit);
    const text = seconds < 5 ? "now" : unit ? `${Math.floor(seconds / unit[1])} ${unit[2]} ago` : time.dateTime.slice(0, 10);
    if (time.textContent !== text) time.textContent = text;
  }
}
age();
setInterval(age, 5000);

/** Positions bars: the policy forbids style attributes, but not styles that a script sets. */
function applyStyles(root) {
  for (const element of root.querySelectorAll("[data-style]")) element.style.cssText = element.dataset.style;
}
applyStyles(document);

/** Lets the keyboard scroll what is wider than its room. */
const scrolled = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});
for (const region of document.querySelectorAll(".scroll")) scrolled.observe(region);
