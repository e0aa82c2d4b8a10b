// Files are sent one by one, a few at a time: the server answers those that come together in one go.
// Texts from files, labels and the server become text nodes only; nothing is read as HTML.
"use strict";

const AT_ONCE = 4, CARDS = 12, ROWS = 50, UNUSUAL = 0.95, TINY = 64, MANY = 10, LONG = 48;
const place = (id) => document.getElementById(id);
let key = "", waiting = 0;

function make(tag, name, text) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  return node;
}

const percent = (value) => value === null ? "–" : `${(100 * value).toFixed(value > 0.9995 || value < 0.0005 ? 0 : 1)} %`;

const short = (text) => text.length > LONG ? `${text.slice(0, LONG - 1)}…` : text;

function bar(value, kind, about) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  svg.setAttribute("viewBox", "0 0 100 10");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", about);
  if (kind) svg.setAttribute("class", kind);
  rect.setAttribute("width", String(100 * Math.max(0, Math.min(1, value ?? 0))));
  rect.setAttribute("height", "10");
  svg.append(rect);
  return svg;
}

// A title and a bar for each entry, from `least` to 1; where there are many, they are folded away.
function bars(title, entries, kind, least = 0) {
  const folded = entries.length > MANY, grid = make("div", "bars");
  const found = make(folded ? "details" : "section");
  for (const { name, value, chosen } of entries) {
    const shown = kind ? (value === null ? "–" : value.toFixed(3)) : percent(value);
    const label = make("span", chosen ? "name chosen" : "name", name);
    label.title = name;
    grid.append(label, bar((value - least) / (1 - least || 1), kind, `${name}: ${shown}`), make("span", "number", shown));
  }
  found.append(make(folded ? "summary" : "h3", "", title), grid);
  return found;
}

function card(file) {
  const node = make("article", "card"), head = make("div", "head"), image = make("img"), words = make("div");
  const address = URL.createObjectURL(file);
  image.alt = "";
  image.addEventListener("load", () => {
    image.classList.toggle("tiny", image.naturalWidth <= TINY && image.naturalHeight <= TINY);
    URL.revokeObjectURL(address);
  });
  image.addEventListener("error", () => { image.remove(); URL.revokeObjectURL(address); });
  image.src = address;
  words.append(make("div", "label", "…"), make("div", "file", file.name));
  head.append(image, words);
  node.append(head);
  place("answers").prepend(node);
  while (place("answers").children.length > CARDS) place("answers").lastElementChild.remove();
  return node;
}

function fill(node, file, answer) {
  const words = node.querySelector(".head > div");
  const task = `task ${answer.task + 1}` + (answer.task_name ? `: ${short(answer.task_name)}` : "");
  const said = make("div", "said", `${percent(answer.probability)} sure · ${task} (${percent(answer.task_probability)} sure)`);
  words.replaceChildren(make("div", "label", answer.label), said, make("div", "file", file.name));
  if (answer.unusual !== null && answer.unusual > UNUSUAL) words.append(make("div", "flag", "unlike anything learned"));
  const classes = answer.classes.map((one, i) => ({ name: one.label, value: one.probability, chosen: i === 0 }));
  const tasks = (part) => answer.tasks.map((one, i) => (
    { name: one.name || `task ${i + 1}`, value: one[part], chosen: i === answer.task }));
  node.append(bars("Class", classes), bars("Task", tasks("probability")));
  const near = tasks("similarity");
  if (near.every((one) => one.value !== null)) {
    const least = Math.min(...near.map((one) => one.value));
    node.append(bars("Like each task, by the subspaces (cosine; bars from the least like to 1)", near, "near", least));
  }
}

function note(file, name, sure, task) {
  const row = make("tr");
  for (const text of [new Date().toLocaleTimeString(), file.name, name, sure, task]) {
    const cell = make("td", "", short(text));
    cell.title = text;
    row.append(cell);
  }
  place("rows").prepend(row);
  while (place("rows").children.length > ROWS) place("rows").lastElementChild.remove();
  place("recent").hidden = false;
}

function refuse(node, file, sentence) {
  node.classList.add("bad");
  const words = node.querySelector(".head > div");
  words.replaceChildren(make("div", "label", sentence), make("div", "file", file.name));
  note(file, "no answer", "–", "–");
}

const headers = () => key ? { Authorization: `Bearer ${key}` } : {};

async function ask(file) {
  const node = card(file), form = new FormData();
  form.append("images", file, file.name);
  try {
    const reply = await fetch("/predict", { method: "POST", body: form, headers: headers() });
    const told = await reply.json().catch(() => ({}));
    if (!reply.ok) {
      if (reply.status === 401) lock();
      refuse(node, file, told.error || `The server answered ${reply.status}.`);
      return;
    }
    const answer = told.answers[0];
    fill(node, file, answer);
    note(file, answer.label, percent(answer.probability), answer.task_name || String(answer.task + 1));
  } catch (error) {
    refuse(node, file, "The server cannot be reached.");
  }
}

async function askAll(files) {
  const queue = [...files];
  waiting += queue.length;
  const say = () => { place("status").textContent = waiting ? `${waiting} to answer…` : "Done."; };
  say();
  const work = async () => {
    for (let file = queue.shift(); file; file = queue.shift()) {
      await ask(file);
      waiting -= 1;
      say();
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
}

function lock() {
  place("key-form").hidden = false;
  place("key").focus();
}

async function introduce() {
  const reply = await fetch("/model", { headers: headers() }).catch(() => null);
  if (reply && reply.status === 401) {
    place("model").textContent = key ? "That is not the key." : "";
    lock();
  } else if (reply && reply.ok) {
    const model = await reply.json();
    const count = (list, word) => `${list.length} ${word}${list.length === 1 ? "" : list.length && word === "class" ? "es" : "s"}`;
    place("model").textContent = `${model.run}: ${count(model.classes, "class")}, ${count(model.tasks, "task")}`;
    place("key-form").hidden = true;
  } else {
    place("model").textContent = "The server cannot be reached.";
  }
}

place("files").addEventListener("change", (event) => {
  askAll([...event.target.files]);
  event.target.value = "";
});
place("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = place("key").value;
  place("key").value = "";
  introduce();
});
for (const [name, over] of [["dragenter", true], ["dragover", true], ["dragleave", false], ["drop", false]]) {
  place("drop").addEventListener(name, (event) => {
    event.preventDefault();
    place("drop").classList.toggle("over", over);
    if (name === "drop") askAll([...event.dataTransfer.files]);
  });
}
window.addEventListener("dragover", (event) => event.preventDefault());
window.addEventListener("drop", (event) => event.preventDefault());
document.addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) askAll([...event.clipboardData.files]);
});
introduce();
