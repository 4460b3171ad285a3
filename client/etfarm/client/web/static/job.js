/** A job's page: loads the matrix again when a cell has ended, and keeps the end of the log in view. */
const matrix = document.getElementById("matrix");
const countEnded = () => document.querySelectorAll('tr[data-ended="1"]').length;
let ended = Number(matrix.dataset.ended);

document.addEventListener("etfarm:live", ({ detail }) => {
  if (detail.topic.startsWith("log:")) followLog();
  if (detail.topic.startsWith("job:")) refreshMatrix();
});

function refreshMatrix() {
  if (countEnded() <= ended) return;
  ended = countEnded();
  matrix.dispatchEvent(new Event("ended"));
}
// A cell may have ended while the server made the page, or before this script was there. Now htmx listens.
document.addEventListener("DOMContentLoaded", refreshMatrix);

const log = document.querySelector(".log");
let isAtEnd = true;
log.addEventListener("scroll", () => (isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40));

function followLog() {
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}
followLog();
