/** Parts of a page that htmx loads: a refusal is a fragment that says what to do, and is shown instead of being dropped. */
document.addEventListener("htmx:beforeSwap", (event) => {
  if (event.detail.xhr.status < 400 || !event.detail.xhr.responseText) return;
  event.detail.shouldSwap = false;
  notify(event.detail.xhr.responseText);
});

function notify(html) {
  const notice = document.createElement("div");
  notice.innerHTML = html;
  const close = document.createElement("button");
  close.type = "button";
  close.className = "plain";
  close.textContent = "Close";
  close.addEventListener("click", () => notice.remove());
  notice.append(close);
  document.getElementById("notices").replaceChildren(notice);
}
