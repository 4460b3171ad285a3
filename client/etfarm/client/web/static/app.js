/** What every page does: live values, keys, copying, times, and the token of requests that change something. */
import { connect } from "./live.js";
import { bindKeys } from "./keys.js";

const token = document.querySelector('meta[name="csrf-token"]').content;

document.addEventListener("htmx:configRequest", (event) => (event.detail.headers["X-CSRF-Token"] = token));
// Errors are fragments that say what to do: show them instead of dropping them.
document.addEventListener("htmx:beforeSwap", (event) => {
  if (event.detail.xhr.status >= 400 && event.detail.xhr.responseText) {
    event.detail.shouldSwap = false;
    notify(event.detail.xhr.responseText);
  }
});

/** Shows a rendered fragment of the server as a notice. */
export function notify(html) {
  const notices = document.getElementById("notices");
  const notice = document.createElement("div");
  notice.innerHTML = html;
  const close = document.createElement("button");
  close.type = "button";
  close.className = "plain";
  close.textContent = "Close";
  close.addEventListener("click", () => notice.remove());
  notice.append(close);
  notices.replaceChildren(notice);
}

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

/** Keeps "12 s ago" true; the server has written the same words. */
function age() {
  for (const time of document.querySelectorAll("time[datetime]")) {
    const seconds = (Date.now() - Date.parse(time.dateTime)) / 1000;
    const unit = UNITS.find(([limit]) => seconds < limit);
    const text = seconds < 5 ? "now" : unit ? `${Math.floor(seconds / unit[1])} ${unit[2]} ago` : time.dateTime.slice(0, 10);
    if (time.textContent !== text) time.textContent = text;
  }
}
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

bindKeys();
connect();
