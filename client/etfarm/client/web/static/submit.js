/** Sends a model as soon as it is dropped or chosen, as it is; the form then refers to it. */
import { showCommand } from "./command.js";

const form = document.getElementById("submission");
const drop = document.getElementById("drop");
const state = document.getElementById("file-state");
const progress = document.getElementById("file-progress");
const button = document.getElementById("submit");
let sending = null;

function say(text, isBad = false) {
  state.textContent = text;
  state.className = isBad ? "callout bad" : "";
}

const megabytes = (bytes) => (bytes < 1e6 ? `${Math.ceil(bytes / 1e3)} kB` : `${(bytes / 1e6).toFixed(1)} MB`);

function send(file) {
  sending?.abort();
  form.elements.upload.value = "";
  button.disabled = progress.hidden = true;
  if (!/\.(pt2|pte)$/i.test(file.name)) return say(`${file.name} is neither a .pt2 nor a .pte.`, true);
  // fetch() does not tell how much of a body is sent.
  const request = (sending = new XMLHttpRequest());
  request.upload.addEventListener("progress", (event) => {
    progress.value = event.loaded / (event.total || 1);
    say(`${file.name}: ${megabytes(event.loaded)} of ${megabytes(file.size)}`);
  });
  request.addEventListener("load", () => finish(request, file));
  request.addEventListener("error", () => fail(`${file.name} could not be sent: the connection was lost. Choose it again.`));
  request.open("POST", `${drop.dataset.upload}?name=${encodeURIComponent(file.name)}`);
  request.setRequestHeader("Content-Type", "application/octet-stream");
  request.setRequestHeader("X-CSRF-Token", document.querySelector('meta[name="csrf-token"]').content);
  progress.value = 0;
  progress.hidden = false;
  say(file.name);
  request.send(file);
}

function finish(request, file) {
  let answer = null;
  try {
    answer = JSON.parse(request.responseText);
  } catch {
    return fail(request.responseText || `${file.name} could not be sent.`);
  }
  if (request.status !== 200) return fail(`${answer.message} ${answer.remedy}`.replaceAll("`", ""));
  sending = null;
  progress.hidden = true;
  button.disabled = false;
  form.elements.upload.value = answer.id;
  say(`${answer.name}, ${megabytes(answer.size_bytes)}`);
  nameInCommand(answer.name);
}

function fail(text) {
  sending = null;
  progress.hidden = true;
  say(text, true);
}

function nameInCommand(name) {
  form.dataset.command = `etfarm bench ${/^[\w@%+=:,./-]+$/.test(name) ? name : `'${name.replaceAll("'", `'"'"'`)}'`}`;
  showCommand();
}

if (form) {
  form.dataset.last = " --detach";
  document.getElementById("file").addEventListener("change", (event) => event.target.files.length && send(event.target.files[0]));
  // A file that misses the zone would replace the page.
  for (const kind of ["dragover", "drop"]) addEventListener(kind, (event) => event.preventDefault());
  for (const kind of ["dragenter", "dragover"]) drop.addEventListener(kind, () => drop.classList.add("over"));
  for (const kind of ["dragleave", "drop"]) drop.addEventListener(kind, () => drop.classList.remove("over"));
  drop.addEventListener("drop", ({ dataTransfer: { files } }) => {
    if (!files.length) return;
    if (files.length === 1) document.getElementById("file").files = files; // which else says that none is chosen
    send(files[0]);
  });
  form.addEventListener("submit", (event) => {
    if (form.elements.upload.value) {
      button.disabled = true;
      button.textContent = "Submitting";
    } else {
      event.preventDefault();
      say("Choose a model first.", true);
      document.getElementById("file").focus();
    }
  });
  addEventListener("pageshow", () => {
    button.disabled = false;
    button.textContent = "Submit";
  });
  const shown = state.textContent.split(",")[0].trim();
  nameInCommand(shown && form.elements.upload.value ? shown : "MODEL.pt2");
  const [early] = document.getElementById("file").files; // chosen before this script had arrived
  if (early) send(early);
}
