/** Keeps the shown command true while somebody fills in a form: each field is an option of the command. */
const form = document.querySelector("form[data-command]");
const shown = document.getElementById("command");

/** Quotes an argument as a POSIX shell reads it. */
const quote = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`);

function valuesOf(field) {
  if (field.type === "checkbox") return field.checked ? [field.value] : [];
  const text = field.value.trim();
  if (field.dataset.argument === "lines") return text.split("\n").map((line) => line.trim()).filter(Boolean);
  const isNeeded = text !== field.dataset.default || (field.hasAttribute("data-required") && !field.dataset.flag);
  return isNeeded ? [text + field.dataset.unit] : [];
}

export function showCommand() {
  if (!form || !shown) return;
  const parts = [form.dataset.command];
  for (const field of form.querySelectorAll("[data-argument]"))
    for (const value of valuesOf(field)) {
      if (field.dataset.flag) parts.push(field.dataset.flag);
      if (!field.hasAttribute("data-bare")) parts.push(quote(value));
    }
  shown.textContent = parts.join(" ") + (form.dataset.last ?? "");
}

form?.addEventListener("input", showCommand);
showCommand(); // somebody may have typed before this script had arrived
