"use strict";
// Figures come as JSON and become text and lines: no text of a run folder is ever read as HTML.

const EVERY = 2000;
const SVG = "http://www.w3.org/2000/svg";
const WORDS = { waiting: "waiting", running: "running", stopped: "stopped", finished: "finished", damaged: "damaged" };
const at = (id) => document.getElementById(id);

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function drawn(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function duration(seconds) {
  if (seconds === null) return "–";
  if (seconds < 90) return `${Math.max(seconds, 1).toFixed(0)} s`;
  return seconds < 5400 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function size(count) {
  const unit = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([divisor]) => count >= divisor);
  return unit ? `${(count / unit[0]).toPrecision(3)} ${unit[1]}` : `${count} B`;
}

const percent = (value) => (value === null || value === undefined ? "–" : value.toFixed(1));
const total = (kinds) => Object.values(kinds).reduce((sum, count) => sum + count, 0);

// The next of 1, 2, 4, 5, 10, 20, … above a value: a quarter of it can be read.
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 4, 5, 10].find((factor) => factor * power >= value * 0.999999);
}

// A chart of lines in a holder: [{name, points: [[x, y], …]}], x from `left` to `right`, y from 0 to `top`.
function chart(holder, lines, left, right, top, ticks, legend, label) {
  const width = Math.min(640, Math.max(260, holder.clientWidth - 20));  // letters keep their size on a phone
  const margin = 40, foot = 42, spots = [];
  let place = margin, row = 0;
  for (const line of legend ? lines : []) {
    const wide = 34 + 7 * line.name.length;
    if (place > margin && place + wide - 16 > width) [place, row] = [margin, row + 1];
    spots.push([place, 18 * row]);
    place += wide;
  }
  const head = legend ? 24 + 18 * row : 8, height = 246 + 18 * row;
  const x = (value) => margin + ((value - left) / Math.max(right - left, 1e-9)) * (width - margin - 12);
  const y = (value) => height - foot - (Math.min(value, top) / top) * (height - foot - head);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (let step = 0; step <= 4; step += 1) {
    const value = (top * step) / 4;
    svg.append(drawn("line", { class: "grid", x1: margin, x2: width - 12, y1: y(value), y2: y(value) }));
    const text = String(Number(value.toPrecision(3)));
    svg.append(drawn("text", { x: margin - 6, y: y(value) + 4, "text-anchor": "end" }, text));
  }
  for (const tick of ticks) {
    svg.append(drawn("text", { x: x(tick), y: height - foot + 18, "text-anchor": "middle" }, String(tick)));
  }
  svg.append(drawn("text", { x: (margin + width - 12) / 2, y: height - 7, "text-anchor": "middle" }, "tasks"));
  for (const [number, line] of lines.entries()) {
    const known = line.points.filter(([, value]) => value !== null && value !== undefined);
    svg.append(drawn("polyline", { class: line.name, points: known.map(([a, b]) => `${x(a)},${y(b)}`).join(" ") }));
    if (legend && known.length <= 40) {
      for (const [a, b] of known) svg.append(drawn("circle", { class: line.name, cx: x(a), cy: y(b), r: 3 }));
    }
    if (legend) {
      const [across, down] = spots[number];
      svg.append(drawn("rect", { class: line.name, x: across, y: down + 4, width: 10, height: 10 }));
      svg.append(drawn("text", { x: across + 15, y: down + 13 }, line.name));
    }
  }
  holder.replaceChildren(svg);
}

function ticksOf(first, last) {
  const step = Math.max(1, Math.ceil((last - first + 1) / 12));
  const found = [];
  for (let tick = first; tick <= last; tick += step) found.push(tick);
  return found;
}

function table(holder, columns, rows) {
  const head = element("tr");
  for (const column of columns) {
    const cell = element("th", column);
    cell.scope = "col";
    head.append(cell);
  }
  const lines = rows.map((row) => {
    const line = element("tr");
    row.forEach((text, place) => {
      const cell = element(place ? "td" : "th", text);
      if (!place) cell.scope = "row";
      line.append(cell);
    });
    return line;
  });
  holder.querySelector("thead").replaceChildren(...(columns.length ? [head] : []));
  holder.querySelector("tbody").replaceChildren(...lines);
}

function showAccuracy(state) {
  const modes = Object.keys(state.accuracy);
  at("accuracy").hidden = !modes.length;
  if (!modes.length) return;
  const lines = modes.map((name) => ({ name, points: state.accuracy[name].map((v, i) => [state.first + i, v]) }));
  const last = Math.max(state.tasks, state.first + 1);
  const said = modes.map((mode) => `${mode} ${percent(state.accuracy[mode].at(-1))} %`).join(", ");
  const holder = at("accuracy").querySelector(".plot");
  chart(holder, lines, state.first, last, 100, ticksOf(state.first, last), true, `Line chart: now ${said}`);
  const shown = Object.keys(state.by_task);
  const count = shown.length ? state.by_task[shown[0]].length : 0;
  const rows = Array.from({ length: count }, (_, task) => [
    `task ${state.first + task}`, ...shown.map((mode) => percent(state.by_task[mode][task])),
  ]);
  rows.push(["mean", ...shown.map((mode) => percent(state.accuracy[mode].at(-1)))]);
  at("accuracy").querySelector(".scroll").hidden = !count;
  table(at("accuracy"), ["", ...shown], rows);
}

function showLoss(state) {
  at("loss").hidden = !state.loss.length;
  if (!state.loss.length) return;
  const top = round(Math.max(...state.loss.map(([, value]) => value), 1e-6));
  const tasks = Math.max(state.tasks, 1);
  const label = `Line chart of the loss over tasks: now ${state.loss.at(-1)[1].toPrecision(3)}`;
  const holder = at("loss").querySelector(".plot");
  chart(holder, [{ name: "loss", points: state.loss }], 0, tasks, top, ticksOf(0, tasks), false, label);
}

function showBytes(state) {
  const kinds = [...new Set([...Object.keys(state.bytes.up), ...Object.keys(state.bytes.down)])];
  at("bytes").hidden = !kinds.length;
  const rows = kinds.map((kind) => [kind, size(state.bytes.up[kind] || 0), size(state.bytes.down[kind] || 0)]);
  rows.push(["total", size(total(state.bytes.up)), size(total(state.bytes.down))]);
  table(at("bytes"), ["kind", "up", "down"], rows);
}

function showFigures(state) {
  const figures = [];
  if (state.tasks) figures.push(["tasks learned", `${state.learned} of ${state.tasks}`]);
  if (state.rounds && state.status !== "finished") figures.push(["round", `${state.round} of ${state.rounds}`]);
  if (state.loss.length) figures.push(["loss", state.loss.at(-1)[1].toPrecision(3)]);
  const sent = total(state.bytes.up) + total(state.bytes.down);
  if (sent) figures.push(["bytes", size(sent)]);
  if (state.tasks) figures.push(["worked for", duration(state.seconds)]);
  if (state.status === "running") figures.push(["time left", state.left === null ? "not known yet" : `about ${duration(state.left)}`]);
  if (state.silent !== null && state.silent > 10) figures.push(["last entry", `${duration(state.silent)} ago`]);
  if (state.failures) figures.push(["clients left out", String(state.failures)]);
  if (state.rejected) figures.push(["messages rejected", String(state.rejected)]);
  at("figures").replaceChildren(...figures.map(([name, value]) => {
    const one = element("div");
    one.append(element("dt", name), element("dd", value));
    return one;
  }));
}

function setText(id, text) {
  if (at(id).textContent !== text) at(id).textContent = text;  // so that a screen reader says only what is new
}

function show(state) {
  document.title = state.title ? `${Math.floor(100 * state.done)} % · ${state.title}` : "fedprotip watch";
  setText("title", state.title || "fedprotip watch");
  setText("facts", state.facts.join(" · "));
  setText("status", WORDS[state.status] || "");
  at("status").className = `chip ${state.status}`;
  setText("sentence", state.sentence);
  at("bar").value = state.done;
  showFigures(state);
  showAccuracy(state);
  showLoss(state);
  showBytes(state);
  at("told").hidden = !state.told.length;
  at("told").querySelector("ul").replaceChildren(...state.told.map((text) => element("li", text)));
  at("clock").textContent = `Read at ${new Date().toLocaleTimeString()}.`;
}

async function look() {
  try {
    const answer = await fetch("state.json", { cache: "no-store" });
    if (!answer.ok) throw new Error(String(answer.status));
    show(await answer.json());
  } catch {
    setText("status", "not connected");
    at("status").className = "chip lost";
    setText("sentence", "fedprotip watch has ended, or does not answer; the figures are the last ones it sent.");
  }
  setTimeout(look, EVERY);
}

look();
