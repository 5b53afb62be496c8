(() => {
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg", WIDTH = 900, HEIGHT = 400, COLORS = 8;
const INSIDE = { left: 70, right: 210, top: 14, bottom: 44 };
const select = name => document.getElementById(name);
const shown = value => typeof value === "number" ? +value.toPrecision(4) : value;

function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function distinct(values) {
  const found = [...new Set(values)];
  return found.every(value => typeof value === "number") ? found.sort((a, b) => a - b) : found;
}

/* About four multiples of 1, 2 or 5 times a power of ten. */
function roundNumbers(low, high) {
  const raw = (high - low) / 4, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(times => times * power).find(size => size >= raw);
  const found = [];
  for (let count = Math.ceil(low / step); count * step <= high; count++) found.push(+(count * step).toPrecision(12));
  return found;
}

/* Values in equal steps: a grid has few of them, and their ratios are often powers. Many positive numbers, as a search
   samples them, lie on a logarithmic axis without lines. */
function draw() {
  const number = select("number").value, axis = select("axis").value, line = select("line").value;
  const rows = data.rows.filter(row => typeof row[number] === "number");
  const places = distinct(rows.map(row => row[axis] ?? ""));
  const lines = distinct(rows.map(row => row[line] ?? ""));
  const values = rows.map(row => row[number]);
  let low = Math.min(...values), high = Math.max(...values);
  if (low === high) { low -= 0.5; high += 0.5; }
  const pad = (high - low) * 0.06;
  low -= pad; high += pad;
  const sampled = places.length > 12 && places.every(value => typeof value === "number" && value > 0);
  const first = Math.log(places[0]), last = Math.log(places[places.length - 1]);
  const share = value => sampled ? 0.03 + 0.94 * (Math.log(value) - first) / (last - first)
    : (places.indexOf(value) + 0.5) / places.length;
  const x = value => INSIDE.left + share(value) * (WIDTH - INSIDE.left - INSIDE.right);
  const y = value => INSIDE.top + (high - value) / (high - low) * (HEIGHT - INSIDE.top - INSIDE.bottom);
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${number} against ${axis}` });
  for (const value of roundNumbers(low, high)) {
    svg.append(element("line", { class: "grid", x1: INSIDE.left, x2: WIDTH - INSIDE.right, y1: y(value), y2: y(value) }));
    svg.append(element("text", { x: INSIDE.left - 8, y: y(value) + 4, "text-anchor": "end" }, value));
  }
  const every = Math.ceil(places.length / 12);
  const ticks = sampled ? [0, 1, 2, 3, 4].map(step => Math.exp(first + (last - first) * step / 4))
    : places.filter((_, index) => index % every === 0);
  ticks.forEach(place => {
    const label = String(shown(place));
    svg.append(element("text", { x: x(place), y: HEIGHT - 22, "text-anchor": "middle" },
      label.length > 18 ? label.slice(0, 17) + "…" : label));
  });
  svg.append(element("text", { x: (INSIDE.left + WIDTH - INSIDE.right) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, axis));
  lines.forEach((each, index) => {
    const group = element("g", { class: `k${index % COLORS}` });
    const own = rows.filter(row => (row[line] ?? "") === each);
    const means = places.map(place => {
      const here = own.filter(row => (row[axis] ?? "") === place).map(row => row[number]);
      return here.length ? [x(place), y(here.reduce((a, b) => a + b) / here.length)] : null;
    }).filter(Boolean);
    if (axis !== line && !sampled) group.append(element("path", { d: means.map((at, i) => (i ? "L" : "M") + at.join(" ")).join("") }));
    for (const row of own) {
      const dot = element("circle", { cx: x(row[axis] ?? ""), cy: y(row[number]), r: 4 });
      dot.append(element("title", {}, data.dimensions.map(name => `${name} ${row[name] ?? ""}`).join("\n") + `\n${number} ${row[number]}`));
      group.append(dot);
    }
    if (index < 20) {
      const top = INSIDE.top + 12 + index * 18, label = String(each);
      group.append(element("circle", { cx: WIDTH - INSIDE.right + 16, cy: top - 4, r: 5 }));
      group.append(element("text", { class: "name", x: WIDTH - INSIDE.right + 28, y: top }, label.length > 24 ? label.slice(0, 23) + "…" : label));
    }
    svg.append(group);
  });
  document.querySelector(".plot").replaceChildren(svg);
}

function fill(name, options, chosen) {
  for (const option of options) select(name).append(new Option(option, option, false, option === chosen));
  select(name).addEventListener("change", draw);
}

if (data.rows.length && data.numbers.length && data.dimensions.length) {
  const varying = data.dimensions.filter(name => distinct(data.rows.map(row => row[name] ?? "")).length > 1);
  const axis = varying[0] ?? data.dimensions[0];
  fill("number", data.numbers, data.numbers[0]);
  fill("axis", data.dimensions, axis);
  const others = [...varying, ...data.dimensions].filter(name => ![axis, "seed", "trial"].includes(name));
  fill("line", data.dimensions, others[0] ?? axis);
  document.getElementById("chart").hidden = false;
  draw();
}

const table = document.getElementById("rows");
if (table) table.querySelectorAll("th").forEach((head, column) => {
  const button = document.createElement("button");
  button.textContent = head.textContent;
  head.replaceChildren(button);
  button.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    table.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down === 1 ? "ascending" : "descending");
    const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const body = table.tBodies[0];
    body.append(...[...body.rows].sort((a, b) => {
      const left = value(a), right = value(b);
      if (left === "" || right === "") return (left === "") - (right === "");
      const numbers = Number(left) - Number(right);
      return down * (Number.isNaN(numbers) ? left.localeCompare(right) : numbers);
    }));
  });
});
})();
