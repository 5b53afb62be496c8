// Selectors, theme, and what is drawn again after a change.
function drawControls() {
  const form = document.getElementById("controls");
  const labels = { text: source.inputName, length: "Length", normalizer: "Normalizer", kind: "Attention" };
  const names = { length: lengthText, kind: (kind) => source.kindNames[kind] || kind };
  const name = (field, value) => (names[field] || String)(value);
  const options = [...metrics.values()].map((metric) => h("option", { value: metric.name }, metric.label));
  const colorBy = h("select", { id: "choose-metric" }, options);
  colorBy.addEventListener("change", () => change({ metric: colorBy.value }, "metric"));
  form.replaceChildren(h("label", { for: "choose-metric" }, "Color by", colorBy));
  for (const field of KEY) {
    const values = choicesOf(field);
    if (values.length < 2) {
      const only = values.map((value) => h("b", null, h("bdi", null, name(field, value))));
      if (only.length) form.append(h("p", { class: "fixed note" }, labels[field], only));
      continue;
    }
    const entries = values.map((value, index) => h("option", { value: index }, name(field, value)));
    const select = h("select", { id: `choose-${field}` }, entries);
    select.addEventListener("change", () => change({ [field]: Number(select.value) }, "choice"));
    form.append(h("label", { for: `choose-${field}` }, labels[field], select));
  }
  form.addEventListener("submit", (event) => event.preventDefault());
}

function showChoice() {
  document.getElementById("choose-metric").value = state.metric;
  for (const field of KEY) {
    const select = document.getElementById(`choose-${field}`);
    if (select) select.value = String(state[field]);
  }
}

function update(now, origin) {
  const everything = ["", "choice", "metric", "address"].includes(origin);
  showChoice();
  if (everything) {
    drawMap();
    drawLegend();
    drawVerdictFilter();
    drawTable();
    if (origin !== "metric") drawCoverage();
  } else if (origin === "filter") {
    dimCells();
    drawVerdictFilter();
    drawTable();
  }
  if (origin !== "filter" && origin !== "metric") drawPanel();
  chooseCell();
  markTableRow();
  speak(origin);
}

function speak(origin) {
  const rows = slice();
  const opened = origin === "map" || origin === "map-key" || origin === "table";
  if (opened) announce(`${headName(state.row)}: ${verdictOf(state.row).label}. Curves shown.`);
  if (origin === "metric") announce(`Map shows ${metrics.get(state.metric).label}.`);
  if (origin === "choice") announce(`Map and table show ${count(rows.length, "head")} of the new choice.`);
  const matching = grouped.format(rows.filter(matches).length);
  if (origin === "filter") announce(`${matching} of ${count(rows.length, "head")} match.`);
  if (origin === "map-key" || origin === "table") document.getElementById("panel-title").focus({ preventScroll: true });
  const below = panel.getBoundingClientRect().top > innerHeight * 0.8;
  if (origin === "table" || (opened && below)) panel.scrollIntoView({ block: "start" });
}

function startTheme() {
  const button = document.getElementById("theme");
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const label = () => {
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${dark() ? "light" : "dark"} colors`);
  };
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    label();
  });
  system.addEventListener("change", label);
  label();
}

for (const element of document.querySelectorAll(".needs-script")) element.hidden = false;
startTheme();
drawControls();
listen(update);
change(readAddress());
addressReady = true;
addEventListener("hashchange", () => {
  if (location.hash.includes("=")) change(readAddress(), "address");
});
