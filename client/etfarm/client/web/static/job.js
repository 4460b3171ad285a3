/** A job's page: reads the matrix again when a cell has ended, and keeps the end of the log in view. */
const target = document.getElementById("matrix");
const rows = () => document.querySelectorAll('tr[data-ended="1"]').length;
let ended = rows();
let waiting = 0;

document.addEventListener("etfarm:live", ({ detail }) => {
  if (detail.topic.startsWith("log:")) followLog();
  if (!detail.topic.startsWith("job:") || rows() === ended || waiting) return;
  waiting = setTimeout(refresh, 400);
});

async function refresh() {
  waiting = 0;
  const before = rows();
  const answer = await fetch(target.dataset.source + location.search);
  if (!answer.ok) return;
  target.innerHTML = await answer.text();
  ended = before;
}

const log = document.querySelector(".log");
let isAtEnd = true;
log.addEventListener("scroll", () => (isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40));

function followLog() {
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}
followLog();

// The form is replaced together with the matrix.
target.addEventListener("change", (event) => event.target.form?.requestSubmit());
