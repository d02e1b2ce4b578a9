// Keys, and putting answers in order. Every page works without this file, through plain forms.
"use strict";
document.documentElement.classList.add("js");

const ballot = document.getElementById("ballot");
const dialog = document.getElementById("keys");
const shortcuts = document.getElementById("shortcuts");
const opened = performance.now();
const TOO_SOON_MS = 250; // a key pressed twice must not vote on a page that nobody has seen yet
let sent = false;

// -- voting: once for each page
function choose(value) {
  const button = ballot && ballot.querySelector(`button[name=choice][value=${value}]`);
  if (button && performance.now() - opened > TOO_SOON_MS) ballot.requestSubmit(button);
  return Boolean(button);
}
if (ballot) {
  ballot.addEventListener("submit", (event) => {
    // Enter in a field presses the first button, which chooses nothing.
    if (sent || !event.submitter || event.submitter.value === "none") return event.preventDefault();
    sent = true;
    ballot.classList.add("busy");
    event.submitter.classList.add("chosen");
  });
}
window.addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });

// -- how much better
function strength(step) {
  const all = [...document.querySelectorAll("input[name=strength]")];
  if (!all.length) return false;
  const now = all.findIndex((input) => input.checked);
  all[Math.min(all.length - 1, Math.max(0, now + step))].checked = true;
  return true;
}

// -- keys
function press(id) { const found = document.getElementById(id); if (found) found.click(); return Boolean(found); }
function focusOn(id) { const found = document.getElementById(id); if (found) found.focus(); return Boolean(found); }

const actions = {
  "1": () => choose("left"), "2": () => choose("right"), ArrowLeft: () => choose("left"), ArrowRight: () => choose("right"),
  t: () => choose("tie"), b: () => choose("bad"), s: () => choose("skip"), u: () => press("undo"), g: () => press("guidelines"),
  r: () => focusOn("reason"), "+": () => strength(1), "=": () => strength(1), "-": () => strength(-1), "?": () => { dialog.showModal(); return true; },
};

function own(target) { // fields, and whatever scrolls sideways, keep their keys
  return target.closest("input:not([type=checkbox]):not([type=radio]), textarea, select, dialog");
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && event.target.matches("textarea")) return event.target.blur();
  if (event.ctrlKey || event.altKey || event.metaKey || event.isComposing || own(event.target)) return;
  if (shortcuts && !shortcuts.checked) return;
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (key.startsWith("Arrow") && event.target.closest("[type=radio], .wide, .math")) return;
  if (event.repeat && !"+-=".includes(key)) return;
  const action = order && order.keys(key) || actions[key];
  if (action && action()) event.preventDefault();
});

if (dialog) {
  document.getElementById("help").addEventListener("click", () => dialog.showModal());
  try {
    shortcuts.checked = localStorage.getItem("shortcuts") !== "off";
    shortcuts.addEventListener("change", () => localStorage.setItem("shortcuts", shortcuts.checked ? "on" : "off"));
  } catch { /* without storage the choice lasts for this page */ }
}

// -- putting in order: the fields hold the truth, the list shows it
const order = document.getElementById("order") && (() => {
  const list = document.getElementById("order");
  const said = document.getElementById("said");
  const rows = () => [...list.children];
  const field = (row) => row.querySelector("select");
  const picked = []; // numbers in the order of the keys pressed

  function show() { // each answer wears its place
    for (const row of rows()) {
      const badge = document.querySelector(`.answer[data-number="${row.dataset.number}"] .place`);
      badge.textContent = `Place ${field(row).value}`;
      badge.hidden = !field(row).value;
    }
  }
  function tell(row) {
    show();
    const place = field(row).value;
    said.textContent = place ? `Answer ${row.dataset.number}: place ${place}` : `Answer ${row.dataset.number}: no place`;
  }
  function numberAll() { rows().forEach((row, i) => { field(row).value = i + 1; }); picked.length = 0; }
  function arrange() { // by place, those without one last
    const key = (row) => Number(field(row).value || 1000) * 1000 + Number(row.dataset.number);
    rows().sort((a, b) => key(a) - key(b)).forEach((row) => list.append(row));
  }
  function move(row, by) {
    const other = by < 0 ? row.previousElementSibling : row.nextElementSibling;
    if (other) by < 0 ? other.before(row) : other.after(row);
    numberAll();
    tell(row);
  }
  function pick(number, equal) {
    const row = rows().find((r) => r.dataset.number === number);
    if (!row || picked.includes(number)) return;
    if (!picked.length) rows().forEach((r) => { field(r).value = ""; });
    const places = rows().map((r) => Number(field(r).value)).filter(Boolean);
    const last = places.length ? Math.max(...places) : 0;
    field(row).value = equal && last ? last : Math.min(last + 1, rows().length);
    picked.push(number);
    arrange();
    tell(row);
  }
  function back() {
    const row = rows().find((r) => r.dataset.number === picked[picked.length - 1]);
    if (!row) return;
    picked.pop();
    field(row).value = "";
    arrange();
    tell(row);
  }

  list.addEventListener("click", (event) => {
    const button = event.target.closest(".move");
    if (!button) return;
    move(button.closest("li"), Number(button.dataset.by));
    button.focus();
  });
  list.addEventListener("change", () => { picked.length = 0; show(); });
  show();

  // Dragging by pointer events works with a mouse and with a finger alike.
  let dragged = null;
  list.addEventListener("pointerdown", (event) => {
    if (!event.target.closest(".grip") || event.button) return;
    dragged = event.target.closest("li");
    dragged.classList.add("dragged");
    list.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  list.addEventListener("pointermove", (event) => {
    if (!dragged) return;
    for (const row of rows()) {
      const box = row.getBoundingClientRect();
      if (row === dragged || event.clientY < box.top || event.clientY > box.bottom) continue;
      event.clientY < box.top + box.height / 2 ? row.before(dragged) : row.after(dragged);
    }
  });
  for (const end of ["pointerup", "pointercancel"]) {
    list.addEventListener(end, () => {
      if (!dragged) return;
      dragged.classList.remove("dragged");
      numberAll();
      tell(dragged);
      dragged = null;
    });
  }
  let equal = false;
  return {
    keys(key) {
      if (/^[1-9]$/.test(key)) return () => { pick(key, equal); equal = false; return true; };
      if (key === "=") return () => { equal = true; said.textContent = "The next one is as good as the last"; return true; };
      if (key === "Backspace") return () => { back(); return true; };
      if (key === "Enter" && !document.activeElement.closest("button, a, summary, label, input")) return () => choose("ranking");
      if (["ArrowLeft", "ArrowRight", "t", "+", "-"].includes(key)) return () => false;
      return null;
    },
  };
})();

// -- what is wider than its place can be scrolled by keys
for (const box of document.querySelectorAll(".wide, .math")) {
  if (box.scrollWidth > box.clientWidth) {
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", box.matches(".wide") ? "Table" : "Formula");
  }
}

// -- the next answers are being written: look again by itself
const waiting = document.getElementById("waiting");
if (waiting) setTimeout(() => location.replace("/"), Number(waiting.dataset.again));
