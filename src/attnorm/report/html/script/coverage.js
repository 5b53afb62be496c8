// Per layer, three marks from 0 to 1: one head, all heads of the layer, and all heads if they were independent.
let coverageN = null;

function drawCoverage() {
  const box = document.getElementById("coverage-chart");
  const known = source.coverage.filter((row) => row.slice(6).some((value) => value !== null));
  const rows = known.filter((row) => KEY.every((name, i) => row[i] === state[name]));
  const sizes = [...new Set(rows.map((row) => row[5]))].sort((a, b) => a - b);
  if (!sizes.length) {
    box.replaceChildren(h("p", { class: "empty" }, notMeasured("--metrics coverage")));
    return;
  }
  if (!sizes.includes(coverageN)) coverageN = sizes.at(-1);
  const options = sizes.map((N) => h("option", { value: N, selected: N === coverageN }, number(N)));
  const select = h("select", { id: "coverage-n" }, options);
  select.addEventListener("change", () => {
    coverageN = Number(select.value);
    drawCoverage();
    document.getElementById("coverage-n").focus();
  });
  const chosen = rows.filter((row) => row[5] === coverageN).sort((a, b) => a[4] - b[4]);
  const label = h("label", { for: "coverage-n" }, "N, heaviest keys", select);
  box.replaceChildren(h("form", { class: "controls", "aria-label": "Coverage" }, label), dumbbells(chosen));
}

function dumbbells(rows) {
  const width = Math.min(Math.max(document.getElementById("coverage").clientWidth, 300), 640);
  const [left, right, top, step] = [64, 18, 12, 22];
  const height = top + step * rows.length + 50;
  const largest = extent(rows.flatMap((row) => row.slice(6)).filter((value) => value !== null))[1];
  const most = Math.min(1, 1.08 * largest) || 1;
  const x = (value) => left + (value / most) * (width - left - right);
  const shares = rows.map((row) => [row[4], ...row.slice(6).map(share)]);
  const lines = shares.map(([layer, one, all, free]) => `layer ${layer}: one head ${one}, union ${all}, independent ${free}`);
  const description = `Coverage by layer at N = ${coverageN}. ${lines.join("; ")}.`;
  const drawing = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": description });
  for (const tick of linearTicks(0, most, width < 480 ? 3 : 5).filter((value) => value <= most)) {
    drawing.append(s("line", { class: "grid", x1: x(tick), x2: x(tick), y1: top - 8, y2: height - 46 }));
    drawing.append(s("text", { x: x(tick), y: height - 30, "text-anchor": "middle" }, `${short(number(100 * tick))} %`));
  }
  const title = { x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle" };
  drawing.append(s("text", title, "share of the visible keys"));
  rows.forEach((row, i) => {
    const y = top + step * (i + 0.5);
    const [one, union, independent] = row.slice(6).map((value) => (value === null ? NaN : value));
    drawing.append(s("text", { x: left - 12, y: y + 4, "text-anchor": "end" }, `layer ${row[4]}`));
    const ends = finite([one, union, independent]);
    drawing.append(s("line", { class: "base", x1: x(Math.min(...ends)), x2: x(Math.max(...ends)), y1: y, y2: y }));
    if (Number.isFinite(one)) drawing.append(s("circle", { class: "point c-soft", cx: x(one), cy: y, r: 3.5 }));
    if (Number.isFinite(independent)) {
      drawing.append(s("path", { class: "series c-ink", d: `M${x(independent)} ${y - 6}V${y + 6}` }));
    }
    if (Number.isFinite(union)) drawing.append(s("circle", { class: "point c-main", cx: x(union), cy: y, r: 5.5 }));
  });
  const sign = (shape) => s("svg", { viewBox: "0 0 14 14", class: "sign", "aria-hidden": "true" }, shape);
  const key = h("p", { class: "key" },
    h("span", null, sign(s("circle", { class: "point c-soft", cx: 7, cy: 7, r: 3.5 })), "one head, mean"),
    h("span", null, sign(s("circle", { class: "point c-main", cx: 7, cy: 7, r: 5.5 })), "union of the layer"),
    h("span", null, sign(s("path", { class: "series c-ink", d: "M7 1V13" })), "if independent"));
  return h("figure", { class: "chart" }, key, drawing);
}
