// The map of all heads: a grid for mouse, keyboard and screen reader.
const map = document.getElementById("map");
let cells = new Map(); // row of the data -> its cell
let table = []; // layers x heads of rows, -1 where there is none

function drawMap() {
  const rows = slice();
  const layers = [...new Set(rows.map((row) => heads.layer[row]))].sort((a, b) => a - b);
  const columns = [...new Set(rows.map((row) => heads.head[row]))].sort((a, b) => a - b);
  table = layers.map((layer) => columns.map((head) => rowOf(state, layer, head)));
  cells = new Map();
  const grid = h("div", {
    class: columns.length > 24 ? "map small" : columns.length > 8 ? "map many" : "map",
    role: "grid",
    "aria-labelledby": "heads-title",
    "aria-rowcount": layers.length + 1,
    "aria-colcount": columns.length + 1,
  });
  grid.style.setProperty("--columns", columns.length);
  grid.style.setProperty("--rows", layers.length);
  grid.style.setProperty("--least", columns.length > 24 ? "0.8rem" : "1.3rem");
  const titles = columns.map((head) => h("div", { role: "columnheader", "aria-label": `Head ${head}` }, String(head)));
  grid.append(h("div", { role: "row" }, h("div", { role: "columnheader", class: "corner" }), titles));
  table.forEach((line, i) => {
    const header = h("div", { role: "rowheader", "aria-label": `Layer ${layers[i]}` }, String(layers[i]));
    grid.append(h("div", { role: "row" }, header, line.map((row) => cell(row))));
  });
  map.replaceChildren(grid, h("p", { class: "axis-note" }, "Down: layers. Across: heads."));
}

function cell(row) {
  if (row < 0) return h("div", { role: "gridcell", class: "cell absent" });
  const word = verdictOf(row);
  const value = state.metric === "verdict" ? NaN : headValue(row, state.metric);
  const chosen = row === state.row;
  const element = h("div", { role: "gridcell", tabindex: chosen ? 0 : -1, "aria-selected": String(chosen), "data-row": row });
  if (state.metric === "verdict") {
    element.className = `cell marked ${verdictClass(word)}`;
    element.textContent = word.mark;
  } else if (Number.isFinite(value)) {
    const part = partOf(state.metric, value);
    element.className = "cell";
    element.style.backgroundColor = scaleColor(part);
    element.style.color = inkOn(part);
    element.textContent = brief(state.metric, value);
  } else {
    element.className = "cell missing";
    element.textContent = MISSING;
  }
  const valueText = Number.isFinite(value) ? withUnit(state.metric, value) : "missing";
  const shown = state.metric === "verdict" ? "" : `; ${metrics.get(state.metric).label} ${valueText}`;
  element.setAttribute("aria-label", `${headName(row)}: ${word.label}${shown}`);
  element.title = element.getAttribute("aria-label");
  element.classList.toggle("dim", filtering() && !matches(row));
  cells.set(row, element);
  return element;
}

function pointAt(row) {
  for (const [other, element] of cells) element.classList.toggle("pointed", other === row);
}

function chooseCell() {
  for (const [row, element] of cells) {
    const chosen = row === state.row;
    element.setAttribute("aria-selected", String(chosen));
    element.setAttribute("tabindex", chosen ? "0" : "-1");
  }
}

function dimCells() {
  for (const [row, element] of cells) element.classList.toggle("dim", filtering() && !matches(row));
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function placeOf(row) {
  for (let i = 0; i < table.length; i += 1) {
    const j = table[i].indexOf(row);
    if (j >= 0) return [i, j];
  }
  return [0, 0];
}

function target(event, row) {
  const [i, j] = placeOf(row);
  const last = table[i].length - 1;
  if (event.key === "Home") return event.ctrlKey ? [0, 0] : [i, 0];
  if (event.key === "End") return event.ctrlKey ? [table.length - 1, last] : [i, last];
  if (event.key === "PageUp") return [0, j];
  if (event.key === "PageDown") return [table.length - 1, j];
  const step = STEPS[event.key];
  if (!step) return null;
  return [Math.min(Math.max(i + step[0], 0), table.length - 1), Math.min(Math.max(j + step[1], 0), last)];
}

function focusCell(row) {
  const element = cells.get(row);
  if (!element) return;
  for (const other of cells.values()) other.setAttribute("tabindex", "-1");
  element.setAttribute("tabindex", "0");
  element.focus();
}

function rowUnder(event) {
  const element = event.target.closest(".cell[data-row]");
  return element ? Number(element.dataset.row) : -1;
}

map.addEventListener("click", (event) => {
  const row = rowUnder(event);
  if (row >= 0) change({ row }, "map");
});
map.addEventListener("keydown", (event) => {
  const row = rowUnder(event);
  if (row < 0) return;
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    change({ row }, "map-key");
    return;
  }
  const position = target(event, row);
  if (!position) return;
  event.preventDefault();
  const next = table[position[0]][position[1]];
  if (next >= 0) focusCell(next);
});

// The color scale with a histogram of the heads.
function drawLegend() {
  const box = document.getElementById("legend");
  if (state.metric === "verdict") {
    const counts = new Map();
    for (const row of slice()) counts.set(verdictOf(row), (counts.get(verdictOf(row)) || 0) + 1);
    const words = [...new Set([...source.verdicts, ...counts.keys()])].filter((word) => counts.has(word));
    const entry = (word) => h("li", { title: word.meaning }, mark(word), ` ${word.label} `, h("b", null, counts.get(word)));
    box.replaceChildren(h("ul", { class: "legend-list" }, words.map(entry)));
    return;
  }
  const metric = metrics.get(state.metric);
  const values = finite(slice().map((row) => headValue(row, state.metric)));
  box.replaceChildren(
    values.length ? scaleDrawing(metric, values) : h("p", { class: "empty" }, "Not measured here."),
    h("p", { class: "meaning" }, h("b", null, `${metric.label}. `), metric.meaning, " ", h("em", null, metric.reading)),
  );
}

function scaleDrawing(metric, values) {
  const { low, high, logarithmic } = domainOf(metric.name);
  const bins = 40;
  const counts = new Array(bins).fill(0);
  const binOf = (value) => Math.min(Math.max(Math.floor(partOf(metric.name, value) * bins), 0), bins - 1);
  for (const value of values) counts[binOf(value)] += 1;
  const most = Math.max(...counts);
  const width = 540;
  const step = width / bins;
  const [first, last, middle] = [low, high, median(values)].map((value) => withUnit(metric.name, value));
  const many = count(values.length, "head");
  const description = `Scale of ${metric.label} from ${first}, dark, to ${last}, light; ${many}, median ${middle}.`;
  const drawing = s("svg", { viewBox: `0 0 ${width} 50`, role: "img", "aria-label": description });
  counts.forEach((many, i) => {
    const tall = many ? Math.max(2, (34 * many) / most) : 0;
    const bar = { x: i * step, y: 36 - tall, width: step - 1, height: tall, fill: "currentColor", opacity: 0.45 };
    const ground = { x: i * step, y: 38, width: step + 0.5, height: 10, fill: scaleColor((i + 0.5) / bins) };
    drawing.append(s("rect", bar), s("rect", ground));
  });
  const ticks = logarithmic ? [low, Math.sqrt(low * high), high] : [low, (low + high) / 2, high];
  const labels = ticks.map((tick) => h("span", null, metricText(metric.name, tick)));
  const unit = [metric.unit, logarithmic ? "logarithmic" : ""].filter(Boolean).join(", ");
  const caption = `${metric.label}${unit ? ` (${unit})` : ""}; bars: number of heads; median ${middle}`;
  return h("div", { class: "scale" }, drawing, h("p", { "aria-hidden": "true" }, labels), h("p", { "aria-hidden": "true" }, caption));
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return (sorted[Math.floor((sorted.length - 1) / 2)] + sorted[Math.ceil((sorted.length - 1) / 2)]) / 2;
}
