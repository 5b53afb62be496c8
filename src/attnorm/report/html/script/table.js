// The table of heads: sorted by any column, filtered by words and verdicts, linked with the map.
const headsTable = document.getElementById("heads-table");
const search = document.getElementById("search");
let sorting = { by: "head", descending: false };
let tableRows = new Map();

function tableColumns() {
  const extra = state.metric !== "verdict" && !source.tableMetrics.includes(state.metric) ? [state.metric] : [];
  return [...extra, ...source.tableMetrics];
}

function sortValue(row, by) {
  if (by === "head") return heads.layer[row] * 1e6 + heads.head[row];
  if (by === "verdict") return heads.verdict[row] === null ? Infinity : heads.verdict[row];
  return headValue(row, by);
}

// Missing values come last in either direction.
function inOrder(rows) {
  const sign = sorting.descending ? -1 : 1;
  return [...rows].sort((a, b) => {
    const [x, y] = [sortValue(a, sorting.by), sortValue(b, sorting.by)];
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
    return sign * (x - y) || sortValue(a, "head") - sortValue(b, "head");
  });
}

function drawTable() {
  const columns = tableColumns();
  if (!["head", "verdict", ...columns].includes(sorting.by)) sorting = { by: "head", descending: false };
  const heading = (by, label, title) => {
    const direction = sorting.by === by ? (sorting.descending ? "descending" : "ascending") : "none";
    const button = h("button", { type: "button", onclick: () => sortBy(by) }, label);
    return h("th", { scope: "col", "aria-sort": direction, title, "data-by": by }, button);
  };
  const measured = columns.map((name) => heading(name, metrics.get(name).label, metrics.get(name).meaning));
  const first = [heading("head", "Head"), heading("verdict", "Verdict")];
  const head = h("tr", null, first, measured, h("th", { scope: "col" }, "Evidence"));
  const rows = inOrder(slice().filter(matches));
  tableRows = new Map(rows.map((row) => [row, line(row, columns)]));
  headsTable.tHead.replaceChildren(head);
  headsTable.tBodies[0].replaceChildren(...tableRows.values());
  const all = count(slice().length, "head");
  const some = rows.length === slice().length ? all : `${grouped.format(rows.length)} of ${all}`;
  document.getElementById("table-count").textContent = some;
  describeChoice();
  markTableRow();
}

function line(row, columns) {
  const word = verdictOf(row);
  const label = `L${heads.layer[row]} H${heads.head[row]}`;
  return h(
    "tr",
    { "data-row": row },
    h("th", { scope: "row" }, h("button", { type: "button", "aria-label": `Open ${headName(row)}` }, label)),
    h("td", null, mark(word), ` ${word.label}`),
    columns.map((metric) => h("td", null, metricText(metric, headValue(row, metric)))),
    h("td", { title: evidenceOf(row) }, h("span", { class: "evidence-cell" }, evidenceOf(row))),
  );
}

function describeChoice() {
  const kind = choicesOf("kind")[state.kind];
  const words = [choicesOf("text")[state.text], lengthText(choicesOf("length")[state.length]), source.kindNames[kind] || kind];
  document.getElementById("table-note").replaceChildren(
    h("bdi", null, words.join(", ")),
    "; ",
    h("bdi", null, choicesOf("normalizer")[state.normalizer]),
    ". Numbers are medians over the longest rows, and verdicts are based on them. If a sink has much weight, dispersion is judged among the other keys. Select a row to see all of its evidence.",
  );
}

function sortBy(by) {
  sorting = { by, descending: sorting.by === by ? !sorting.descending : !["head", "verdict"].includes(by) };
  drawTable();
  headsTable.querySelector(`th[data-by="${by}"] button`).focus();
  const label = by === "head" ? "head" : metrics.get(by).label;
  announce(`Sorted by ${label}, ${sorting.descending ? "descending" : "ascending"}.`);
}

function markTableRow() {
  for (const [row, element] of tableRows) {
    element.classList.toggle("here", row === state.row);
    if (row === state.row) element.setAttribute("aria-current", "true");
    else element.removeAttribute("aria-current");
  }
}

function drawVerdictFilter() {
  const present = source.verdicts.filter((word) => slice().some((row) => verdictOf(row) === word));
  const chips = present.map((word) => {
    const pressed = String(state.verdicts.has(word.name));
    const attributes = { type: "button", class: "chip", "aria-pressed": pressed, "data-verdict": word.name };
    return h("button", { ...attributes, onclick: () => toggleVerdict(word.name) }, mark(word), word.label);
  });
  document.getElementById("verdict-filter").replaceChildren(...chips);
}

function toggleVerdict(name) {
  const verdicts = new Set(state.verdicts);
  if (!verdicts.delete(name)) verdicts.add(name);
  change({ verdicts }, "filter");
  const chips = [...document.querySelectorAll("#verdict-filter button")];
  chips.find((button) => button.dataset.verdict === name)?.focus();
}

function rowOfLine(event) {
  const element = event.target.closest("tr[data-row]");
  return element ? Number(element.dataset.row) : -1;
}

headsTable.tBodies[0].addEventListener("click", (event) => {
  const row = rowOfLine(event);
  if (row >= 0) change({ row }, "table");
});
headsTable.tBodies[0].addEventListener("pointerover", (event) => pointAt(rowOfLine(event)));
headsTable.tBodies[0].addEventListener("pointerleave", () => pointAt(-1));
search.addEventListener("input", () => change({ search: search.value }, "filter"));
