// Line charts as SVG. Labels stand at the ends of lines, and every chart has a table of its numbers.
const BOX = { width: 356, height: 228, left: 44, right: 88, top: 20, bottom: 37 };

function linearTicks(low, high, wanted = 4) {
  const raw = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((size) => size >= raw * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) {
    ticks.push(Number((i * step).toPrecision(12)));
  }
  return ticks;
}

function between(low, high) {
  const room = 1e-9 * Math.max(Math.abs(low), Math.abs(high));
  return (value) => value >= low - room && value <= high + room;
}

function logTicks(low, high, base = 10, most = 5) {
  if (base === 10 && high < 60 * low) {
    const decades = Array.from({ length: 25 }, (_, i) => 10 ** (i - 12));
    const ticks = decades.flatMap((decade) => [decade, 2 * decade, 5 * decade]).filter(between(low, high));
    return ticks.length > 1 ? ticks : [low, high];
  }
  const first = Math.ceil(Math.log(low) / Math.log(base) - 1e-9);
  const last = Math.floor(Math.log(high) / Math.log(base) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first + 1) / most));
  const ticks = [];
  for (let power = last; power >= first; power -= every) ticks.unshift(base ** power);
  return ticks;
}

function axis(values, { logarithmic = false, domain = null, ticks = null, base = 10, zero = false } = {}) {
  const usable = finite(values).filter((value) => !logarithmic || value > 0);
  let [low, high] = domain || extent(usable);
  if (!domain && zero) low = Math.min(0, low);
  if (!(high > low)) [low, high] = logarithmic ? [low / 2, low * 2] : [low - 0.5, low + 0.5];
  if (!domain && !logarithmic) {
    const room = 0.06 * (high - low);
    high += room;
    if (!(zero && low === 0)) low -= room;
  }
  const part = logarithmic
    ? (value) => Math.log(value / low) / Math.log(high / low)
    : (value) => (value - low) / (high - low);
  const chosen = ticks || (logarithmic ? logTicks(low, high, base) : linearTicks(low, high));
  return { low, high, part, ticks: chosen.filter(between(low, high)) };
}

// Numbers on an axis have no trailing zeros: 0.25, not 0.250.
function short(text) {
  return /^[−\d]*\.\d+( %)?$/.test(text) ? text.replace(/\.?0+( %)?$/, "$1") : text;
}

// Move labels apart as little as needed to read them, inside the plot.
function apart(labels, gap, low, high) {
  labels.sort((a, b) => a.y - b.y);
  labels.forEach((label, i) => {
    label.at = i ? Math.max(label.y, labels[i - 1].at + gap) : Math.max(label.y, low);
  });
  let limit = high;
  for (const label of [...labels].reverse()) {
    label.at = Math.min(label.at, limit);
    limit = label.at - gap;
  }
  return labels;
}

function path(xs, ys, x, y) {
  let text = "";
  let pen = "M";
  xs.forEach((value, i) => {
    const inside = Number.isFinite(ys[i]) && Number.isFinite(x(value)) && Number.isFinite(y(ys[i]));
    if (inside) text += `${pen}${x(value).toFixed(1)} ${y(ys[i]).toFixed(1)}`;
    pen = inside ? "L" : "M";
  });
  return text;
}

function area(band, x, y) {
  const places = band.xs.map((_, i) => i).filter((i) => Number.isFinite(band.low[i]) && Number.isFinite(band.high[i]));
  if (places.length < 2) return "";
  const edge = (i, values) => `${x(band.xs[i]).toFixed(1)} ${y(values[i]).toFixed(1)}`;
  return `M${places.map((i) => edge(i, band.high)).join("L")}L${places.reverse().map((i) => edge(i, band.low)).join("L")}Z`;
}

/* chart({title, unit, how, absent, x: {label, name, ...axis options}, y: {...axis options}, series, bands, horizon, format})
   series: [{name, label, xs, ys, look: "c-main thick", points, mute}]; the first is what the chart is about. */
function chart(spec) {
  const caption = h("figcaption", null, spec.title, spec.unit ? h("small", null, ` ${spec.unit}`) : null);
  if (!finite(spec.series[0].ys).length) {
    const text = spec.absent || "Not measured, or not finite.";
    return h("figure", { class: "chart" }, caption, h("p", { class: "empty" }, text));
  }
  const series = spec.series.filter((one) => finite(one.ys).length);
  const format = spec.format || number;
  const { drawing, x } = drawn(spec, series, format);
  const readout = h("p", { class: "readout" });
  follow(drawing, readout, spec, series, x, format);
  const how = spec.how ? h("p", { class: "how" }, spec.how) : null;
  return h("figure", { class: "chart" }, caption, drawing, readout, how, asTable(spec, series, format));
}

function drawn(spec, series, format) {
  const { width, height, left, right, top, bottom } = BOX;
  const bands = (spec.bands || []).filter((band) => finite(band.low).length > 1);
  const xAxis = axis(series.flatMap((one) => one.xs), { logarithmic: true, base: 2, ...spec.x });
  const yAxis = axis([...series.flatMap((one) => one.ys), ...bands.flatMap((band) => [...band.low, ...band.high])], spec.y);
  const x = (value) => left + xAxis.part(value) * (width - left - right);
  const y = (value) => height - bottom - Math.min(Math.max(yAxis.part(value), -0.02), 1.02) * (height - top - bottom);
  const said = described(spec, series, format);
  const drawing = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": said });
  for (const tick of yAxis.ticks) {
    drawing.append(s("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }));
    drawing.append(s("text", { x: left - 7, y: y(tick) + 4, "text-anchor": "end" }, short(format(tick))));
  }
  drawing.append(s("line", { class: "base", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
  for (const tick of xAxis.ticks) {
    drawing.append(s("text", { x: x(tick), y: height - bottom + 15, "text-anchor": "middle" }, short(number(tick))));
  }
  drawing.append(s("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, spec.x.label));
  for (const band of bands) drawing.append(s("path", { class: band.look, d: area(band, x, y) }));
  if (Number.isFinite(spec.horizon)) drawHorizon(drawing, spec.horizon, xAxis, x);
  drawSeries(drawing, series, x, y);
  return { drawing, x };
}

function drawSeries(drawing, series, x, y) {
  const ends = [];
  for (const one of [...series].reverse()) {
    const color = one.look.split(" ")[0];
    drawing.append(s("path", { class: `series ${one.look}`, d: path(one.xs, one.ys, x, y) }));
    const places = one.xs.map((_, i) => i).filter((i) => Number.isFinite(one.ys[i]) && Number.isFinite(y(one.ys[i])));
    for (const i of one.points || places.length === 1 ? places : []) {
      drawing.append(s("circle", { class: `point ${color}`, cx: x(one.xs[i]), cy: y(one.ys[i]), r: 2.8 }));
    }
    const look = one === series[0] ? `${color} strong` : color;
    if (places.length) ends.push({ y: y(one.ys[places.at(-1)]), text: one.label || one.name, look });
  }
  const { width, height, right, top, bottom } = BOX;
  for (const end of apart(ends, 12.5, top, height - bottom - 3)) {
    drawing.append(s("text", { class: `end ${end.look}`, x: width - right + 7, y: end.at + 4 }, end.text));
  }
}

function drawHorizon(drawing, horizon, xAxis, x) {
  const { top, bottom, height, width, left, right } = BOX;
  const name = `horizon ${metricText("horizon", horizon)}`;
  let [at, text, anchor] = [left, `← ${name}`, "start"];
  if (horizon > xAxis.high) [at, text, anchor] = [width - right, `${name} →`, "end"];
  else if (horizon >= xAxis.low) {
    const place = x(horizon);
    drawing.append(s("line", { class: "horizon", x1: place, x2: place, y1: top, y2: height - bottom }));
    [at, text, anchor] = place < width / 2 ? [place + 4, name, "start"] : [place - 4, name, "end"];
  }
  drawing.append(s("text", { class: "horizon-name", x: at, y: top - 7, "text-anchor": anchor }, text));
}

function described(spec, series, format) {
  const parts = series.filter((one) => !one.mute).map((one) => {
    const places = one.xs.map((_, i) => i).filter((i) => Number.isFinite(one.ys[i]));
    const say = (i) => `${format(one.ys[i])} at ${spec.x.name} = ${number(one.xs[i])}`;
    if (places.length === 1) return `${one.name} ${say(places[0])}`;
    return `${one.name} from ${say(places[0])} to ${say(places.at(-1))}`;
  });
  return `${spec.title}. ${parts.join("; ")}.`;
}

// A vertical line follows the pointer to the nearest measured point; the numbers are shown below the chart.
function follow(drawing, readout, spec, series, x, format) {
  const steps = [...new Set(series.flatMap((one) => one.xs))].sort((a, b) => a - b);
  const cross = s("line", { class: "cross", y1: BOX.top, y2: BOX.height - BOX.bottom, visibility: "hidden" });
  drawing.append(cross);
  const show = (at) => {
    const followed = series.filter((one) => !one.mute).map((one) => [one, one.ys[one.xs.indexOf(at)]]);
    const values = followed.filter(([, value]) => Number.isFinite(value));
    readout.replaceChildren(
      h("b", null, `${spec.x.name} = ${short(number(at))}`),
      ...values.flatMap(([one, value]) => [" ", h("span", null, h("i", null, one.name), ` ${format(value)}`)]),
    );
  };
  show(steps.at(-1));
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * BOX.width;
    const nearest = steps.reduce((best, step) => (Math.abs(x(step) - at) < Math.abs(x(best) - at) ? step : best));
    filled(cross, { x1: x(nearest), x2: x(nearest), visibility: "visible" }, []);
    show(nearest);
  });
  drawing.addEventListener("pointerleave", () => {
    cross.setAttribute("visibility", "hidden");
    show(steps.at(-1));
  });
}

// Built when it is opened: a hundred hidden tables would slow down the page.
function asTable(spec, series, format) {
  const details = h("details", null, h("summary", null, "Numbers"));
  details.addEventListener("toggle", () => {
    if (!details.open || details.querySelector("table")) return;
    const shown = series.filter((one) => !one.mute);
    const steps = [...new Set(shown.flatMap((one) => one.xs))].sort((a, b) => a - b);
    const titles = [spec.x.name, ...shown.map((one) => one.name)].map((name) => h("th", { scope: "col" }, name));
    const rows = steps.map((step) =>
      h("tr", null, h("th", { scope: "row" }, number(step)), shown.map((one) => {
        const place = one.xs.indexOf(step);
        return h("td", null, place < 0 ? MISSING : format(one.ys[place]));
      })),
    );
    const scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Numbers: ${spec.title}` });
    const head = h("thead", null, h("tr", null, titles));
    scroll.append(h("table", { class: "numbers", "aria-label": spec.title }, head, h("tbody", null, rows)));
    details.append(scroll);
  });
  return details;
}
