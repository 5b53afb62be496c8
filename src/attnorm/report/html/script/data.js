// The data of the page, and access to the numbers of a head. Missing numbers are NaN.
const source = JSON.parse(document.getElementById("data").textContent);
const heads = source.heads;
const VERDICT = { name: "verdict", label: "Verdict", unit: "", meaning: "", reading: "" };
const metrics = new Map([VERDICT, ...source.metrics].map((metric) => [metric.name, metric]));

function bytesOf(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

function fromHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return NaN;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

// The inverse of `packed` in data.py.
function unpack(column, count) {
  const missing = (value) => (value === null ? NaN : value);
  if ("all" in column) return new Array(count).fill(missing(column.all));
  if ("levels" in column) return Array.from(bytesOf(column.bytes), (index) => missing(column.levels[index]));
  const bytes = bytesOf("whole" in column ? column.whole : column.half);
  const view = new DataView(bytes.buffer);
  const values = new Array(count);
  if ("whole" in column) {
    for (let i = 0; i < count; i += 1) {
      values[i] = column.width === 2 ? view.getUint16(2 * i, true) : view.getUint32(4 * i, true);
    }
    return values;
  }
  for (let i = 0; i < count; i += 1) {
    const value = fromHalf(view.getUint16(2 * i, true)) * column.scale;
    values[i] = column.logarithmic ? 10 ** value : value;
  }
  return values;
}

const unpacked = new Map();
function columnOf(table, name, count) {
  const key = `${table}/${name}`;
  if (!unpacked.has(key)) {
    const packed = source[table].columns[name];
    unpacked.set(key, packed ? unpack(packed, count) : null);
  }
  return unpacked.get(key);
}

function headValue(row, name) {
  const column = columnOf("heads", name, heads.count);
  return column ? column[row] : NaN;
}

// A column of another table for one head, e.g. curve(row, "byLength", "n"): an array, empty if it was not measured.
function curve(row, table, name) {
  const starts = source[table].starts;
  const column = columnOf(table, name, starts[starts.length - 1]);
  return column ? column.slice(starts[row], starts[row + 1]) : [];
}

const KEY = ["text", "length", "normalizer", "kind"];
const rowsByKey = new Map();
const slices = new Map();
function sliceKey(choice) {
  return KEY.map((name) => choice[name]).join("|");
}
for (let row = 0; row < heads.count; row += 1) {
  const choice = Object.fromEntries(KEY.map((name) => [name, heads[name][row]]));
  const key = sliceKey(choice);
  rowsByKey.set(`${key}|${heads.layer[row]}|${heads.head[row]}`, row);
  if (!slices.has(key)) slices.set(key, []);
  slices.get(key).push(row);
}

function rowOf(choice, layer, head) {
  const row = rowsByKey.get(`${sliceKey(choice)}|${layer}|${head}`);
  return row === undefined ? -1 : row;
}

// The normalizer of a head; null for a patched model whose layers differ.
function runs(row) {
  const name = source.choices.normalizer[heads.normalizer[row]];
  return name === "model" ? source.runs : name;
}

function verdictOf(row) {
  return source.verdicts[heads.verdict[row]];
}

function evidenceOf(row) {
  return (heads.evidence && heads.evidence[row]) || "";
}

function headName(row) {
  return `Layer ${heads.layer[row]}, head ${heads.head[row]}`;
}

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return [low, high];
}

function finite(values) {
  return values.filter((value) => Number.isFinite(value));
}
