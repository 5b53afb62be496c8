// One color scale from dark to light with even steps in lightness, and a readable text color for it.
const STOPS = ["#2a1a5e", "#34438c", "#2c6a94", "#25908c", "#4bb573", "#a3d04d", "#f6e34b"].map((hex) =>
  [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)),
);

function mixed(part) {
  const at = Math.min(Math.max(part, 0), 1) * (STOPS.length - 1);
  const low = Math.min(Math.floor(at), STOPS.length - 2);
  return STOPS[low].map((value, i) => Math.round(value + (at - low) * (STOPS[low + 1][i] - value)));
}

function scaleColor(part) {
  return `rgb(${mixed(part).join(" ")})`;
}

function luminance(rgb) {
  const [r, g, b] = rgb.map((value) => {
    const c = value / 255;
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// Black or white, whichever has more contrast.
function inkOn(part) {
  return luminance(mixed(part)) > 0.179 ? "#000000" : "#ffffff";
}

// Position of a value on the metric's scale, which is the same for every text, length and normalizer.
const domains = new Map();
function domainOf(name) {
  if (!domains.has(name)) {
    const metric = metrics.get(name);
    const values = finite(columnOf("heads", name, heads.count) || []);
    const usable = metric.logarithmic ? values.filter((value) => value > 0) : values;
    let [low, high] = metric.bounded || extent(usable);
    if (!(high > low)) [low, high] = [low - 0.5, low + 0.5];
    if (metric.logarithmic && low <= 0) low = high / 1000;
    domains.set(name, { low, high, logarithmic: Boolean(metric.logarithmic) });
  }
  return domains.get(name);
}

function partOf(name, value) {
  const { low, high, logarithmic } = domainOf(name);
  if (!Number.isFinite(value)) return NaN;
  return logarithmic ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
}
