// One head: verdict with evidence, numbers compared with all heads, curves, and other normalizers on its logits.
const panel = document.getElementById("panel");
const LOGITS = ["logit_spread", "forced_share", "entropy_ratio_without_sink"];
const MORE = [...LOGITS, "mean_cosine", "effective_rank", "smallest_distance"];
const CHARTS = [entropyChart, gapChart, weightChart, massChart, separabilityChart, distanceChart, sensitivityChart];
const COMPARED = ["entropy_ratio", "effective_keys", "max_weight", "sink_mass", "gap_slope", "jacobian_norm"];

function drawPanel() {
  const row = state.row;
  if (row < 0) {
    const title = h("h3", { id: "panel-title", tabindex: -1 }, "No head");
    panel.replaceChildren(title, h("p", null, "Nothing was measured for this choice."));
    return;
  }
  const word = verdictOf(row);
  const judgment = h("span", { class: "label" }, mark(word), ` ${word.label}`);
  const also = alsoTrue(row, word);
  panel.replaceChildren(
    h("h3", { id: "panel-title", tabindex: -1 }, headName(row), " ", judgment),
    h("p", { class: "evidence" }, evidenceOf(row) || word.meaning),
    also ? h("p", { class: "also" }, `Also: ${also}.`) : "",
    heads.beside[row] ? h("p", { class: "also" }, heads.beside[row]) : "",
    h("p", { class: "also" }, rowsText(row)),
    tiles(row, source.panelMetrics),
    readsOf(row),
    h(
      "div",
      { class: "charts" },
      CHARTS.map((draw) => draw(row)),
      logitsAndVectors(row),
      whatIf(row),
    ),
  );
}

// Other verdicts whose conditions hold too.
function alsoTrue(row, word) {
  const flags = heads.flags[row] || [];
  const words = flags.map((flag) => (typeof flag === "number" ? source.verdicts[flag] : { name: flag, label: flag }));
  return words.filter((flag) => flag.name !== word.name).map((flag) => flag.label).join(", ");
}

function rowsText(row) {
  const broken = heads.broken[row] ? ` ${count(heads.broken[row], "row")} with values that are not finite are left out.` : "";
  if (!heads.rows[row]) return `No row could be used.${broken}`;
  const high = heads.nHigh[row];
  const low = curve(row, "byLength", "n").at(-1) === high ? high : heads.nLow[row]; // a mean of the largest n: all have it
  const range = low === high ? number(high) : `${number(low)} to ${number(high)}`;
  return `Medians over ${count(heads.rows[row], "row")} with ${range} visible keys.${broken}`;
}

// Numbers, each with a strip on which every head is a tick and this head is the tall one.
function tiles(row, names) {
  return h("dl", { class: "tiles" }, names.filter((name) => metrics.has(name)).map((name) => tile(row, name)));
}

function tile(row, name) {
  const { label, unit, meaning, reading } = metrics.get(name);
  const value = headValue(row, name);
  const strip = s("svg", { viewBox: "0 0 100 12", preserveAspectRatio: "none", "aria-hidden": "true" });
  strip.append(hairs(name, slice().map((other) => headValue(other, name)), "all"), hairs(name, [value], "here"));
  const [low, high] = ["05", "95"].map((q) => headValue(row, `${name}_q${q}`));
  const known = Number.isFinite(low) && Number.isFinite(high);
  const range = known ? ` 90 % of the rows lie between ${metricText(name, low)} and ${metricText(name, high)}.` : "";
  const unitText = unit && Number.isFinite(value) ? h("small", null, ` ${unit}`) : "";
  const shown = h("dd", null, metricText(name, value), unitText, strip);
  return h("div", { title: `${meaning} ${reading}${range}` }, h("dt", null, label), shown);
}

function logitsAndVectors(row) {
  if (!MORE.some((name) => Number.isFinite(headValue(row, name)))) return "";
  const caption = h("figcaption", null, "Its logits and vectors", h("small", null, "a tick per head; the tall one is this head"));
  return h("figure", { class: "chart" }, caption, tiles(row, MORE));
}

function hairs(name, values, look) {
  const positions = finite(values.map((value) => 100 * Math.min(Math.max(partOf(name, value), 0), 1)));
  const reach = look === "here" ? "0V12" : "3V9";
  return s("path", { class: look, d: positions.map((at) => `M${at.toFixed(2)} ${reach}`).join("") });
}

function whatIf(row) {
  const others = relatives(row);
  const title = h("h4", { id: "whatif-title" }, "This head under other normalizers");
  const box = h("section", { class: "whatif", "aria-labelledby": "whatif-title" }, title);
  if (others.length < 2) {
    const advice = "Only one normalizer was measured. Name others with --normalizers to compare them on the same logits.";
    box.append(h("p", { class: "empty" }, advice));
    return box;
  }
  box.append(
    h("p", { class: "note" }, "Each normalizer is applied to the same logits, without training."),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-labelledby": "whatif-title" }, comparison(row, others)),
    h("div", { class: "charts" }, keysUnderEach(row), weightUnderEach(row)),
  );
  return box;
}

function comparison(row, others) {
  const columns = COMPARED.filter((name) => metrics.has(name));
  const titles = columns.map((name) => h("th", { scope: "col" }, metrics.get(name).label));
  const first = [h("th", { scope: "col" }, "Normalizer"), h("th", { scope: "col", class: "words" }, "Verdict")];
  const rows = others.map((one) => {
    const word = verdictOf(one.row);
    return h(
      "tr",
      { class: one.row === row ? "here" : null },
      h("th", { scope: "row" }, h("bdi", null, one.name)),
      h("td", { class: "words" }, mark(word), ` ${word.label}`),
      columns.map((name) => h("td", null, metricText(name, headValue(one.row, name)))),
    );
  });
  const head = h("thead", null, h("tr", null, first, titles));
  return h("table", { class: "numbers", "aria-labelledby": "whatif-title" }, head, h("tbody", null, rows));
}

panel.addEventListener("keydown", (event) => {
  if (event.key === "Escape") focusCell(state.row);
});
