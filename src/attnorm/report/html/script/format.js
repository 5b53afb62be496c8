// Numbers as text, in the same way as attnorm/text.py.
const MISSING = "–";
const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

function raised(exponent) {
  return String(exponent).replace(/[-0-9]/g, (digit) => (digit === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]));
}

function withMinus(text) {
  return text.replace("-", "−");
}

function number(value) {
  if (value === null || !Number.isFinite(value)) return MISSING;
  if (value === 0) return "0";
  const size = Number(Math.abs(value).toPrecision(3));
  if (size >= 1e12 || size < 1e-4) {
    const [mantissa, exponent] = value.toExponential(1).split("e");
    return withMinus(`${mantissa.replace(/\.0$/, "")} × 10${raised(Number(exponent))}`);
  }
  if (size >= 1e9) return withMinus(`${digits(value / 1e9)} billion`);
  if (size >= 1e6) return withMinus(`${digits(value / 1e6)} million`);
  if (size >= 1000 && !Number.isInteger(value)) return withMinus(grouped.format(Math.sign(value) * size));
  return withMinus(Number.isInteger(value) ? grouped.format(value) : digits(value));
}

// Three significant digits of a number between 0.0001 and 1,000.
function digits(value) {
  const places = Math.max(0, 2 - Math.floor(Math.log10(Number(Math.abs(value).toPrecision(3)))));
  return places ? value.toFixed(places) : grouped.format(value);
}

function share(value) {
  if (value === null || !Number.isFinite(value)) return MISSING;
  const percent = 100 * value;
  if (Math.abs(percent) > 0 && Math.abs(percent) < 0.05) return "<0.1 %";
  return `${withMinus(Math.abs(percent) < 9.95 ? percent.toFixed(1).replace(/\.0$/, "") : percent.toFixed(0))} %`;
}

// Inputs other than text are measured whole.
function lengthText(length) {
  return length === null ? "whole input" : `${number(length)} tokens`;
}

// Numbers of keys have two digits below 10, and no fraction from 10 on.
function metricText(name, value) {
  if (source.shares.includes(name)) return share(value);
  if (metrics.get(name)?.unit !== "keys" || !(value >= 1 && value < 1000)) return number(value);
  return value < 10 ? String(Number(value.toPrecision(2))) : grouped.format(Math.round(value));
}

function withUnit(name, value) {
  const unit = metrics.get(name)?.unit;
  return unit && Number.isFinite(value) ? `${metricText(name, value)} ${unit}` : metricText(name, value);
}

// At most four characters, for a cell of the map.
function brief(name, value) {
  if (!Number.isFinite(value)) return MISSING;
  if (source.shares.includes(name)) return (100 * value).toFixed(0);
  const size = Math.abs(value);
  if (size >= 1e6) return `e${Math.floor(Math.log10(size))}`;
  if (size >= 9950) return `${(value / 1000).toFixed(0)}k`;
  if (size >= 1000) return `${(value / 1000).toFixed(1)}k`;
  if (size >= 9.95) return withMinus(value.toFixed(0));
  const text = size >= 0.995 ? value.toFixed(1) : value.toFixed(2).replace(/^(-?)0\./, "$1.");
  return withMinus(/[1-9]/.test(text) ? text : "0");
}

function count(number, singular, plural = `${singular}s`) {
  return `${grouped.format(number)} ${number === 1 ? singular : plural}`;
}
