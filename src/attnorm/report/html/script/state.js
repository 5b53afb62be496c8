// The current choice. Drawing functions listen to it; the address contains it, so that a view can be shared.
const choicesOf = (name) => source.choices[name];
const state = {
  ...Object.fromEntries(KEY.map((name) => [name, Math.max(0, choicesOf(name).indexOf(source.first[name]))])),
  metric: "verdict",
  row: -1,
  search: "",
  verdicts: new Set(),
};
const listeners = [];

function listen(listener) {
  listeners.push(listener);
}

function slice() {
  return slices.get(sliceKey(state)) || [];
}

// In merged analyses a text may lack a length; the nearest measured combination is used.
function settled(changes) {
  const wanted = { ...state, ...changes };
  if (slices.has(sliceKey(wanted))) return changes;
  const fixed = KEY.filter((name) => name in changes);
  let best = null;
  for (const key of slices.keys()) {
    const choice = Object.fromEntries(key.split("|").map((index, i) => [KEY[i], Number(index)]));
    const agrees = KEY.filter((name) => choice[name] === wanted[name]).length;
    if (fixed.every((name) => choice[name] === wanted[name]) && (!best || agrees > best.agrees)) best = { choice, agrees };
  }
  return best ? { ...changes, ...best.choice } : {};
}

function change(changes, origin = "") {
  const row = state.row;
  Object.assign(state, settled(changes));
  if (!("row" in changes) && row >= 0) state.row = rowOf(state, heads.layer[row], heads.head[row]);
  if (state.row < 0) state.row = mostTelling();
  for (const listener of listeners) listener(state, origin);
  writeAddress();
}

// The head to open first: the worst verdict, and among those the highest entropy.
function mostTelling() {
  const urgency = (row) => (heads.verdict[row] === null ? Infinity : heads.verdict[row]);
  const spread = (row) => headValue(row, "entropy_ratio") || 0;
  const curves = (row) => (curve(row, "byLength", "n").length ? 0 : 1);
  const empty = (row) => (["broken", "silent"].includes(verdictOf(row).name) ? 1 : 0); // nothing to draw
  const order = (a, b) => empty(a) - empty(b) || curves(a) - curves(b) || urgency(a) - urgency(b) || spread(b) - spread(a);
  return [...slice()].sort(order)[0] ?? -1;
}

function matches(row) {
  if (state.verdicts.size && !state.verdicts.has(verdictOf(row).name)) return false;
  const words = state.search.toLowerCase().split(/[\s,]+/).filter(Boolean);
  if (!words.length) return true;
  const layer = heads.layer[row];
  const head = heads.head[row];
  const names = [`l${layer}`, `h${head}`, `l${layer}h${head}`];
  const prose = `${verdictOf(row).label} ${verdictOf(row).name} ${evidenceOf(row)}`.toLowerCase();
  return words.every((word, i) => {
    if (word === "layer" || word === "head") return true;
    const before = words[i - 1];
    if (before === "layer") return word === String(layer);
    if (before === "head") return word === String(head);
    return names.includes(word) || (!/^[lh]\d/.test(word) && prose.includes(word));
  });
}

function filtering() {
  return state.verdicts.size > 0 || state.search.trim() !== "";
}

let addressReady = false;
function writeAddress() {
  if (!addressReady) return;
  const parts = new URLSearchParams({ metric: state.metric });
  for (const name of KEY) if (choicesOf(name).length > 1) parts.set(name, state[name]);
  if (state.row >= 0) parts.set("head", `${heads.layer[state.row]}.${heads.head[state.row]}`);
  history.replaceState(null, "", `#${parts}`);
}

// Empty if the address names a section of the page.
function readAddress() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const changes = {};
  if (metrics.has(parts.get("metric"))) changes.metric = parts.get("metric");
  for (const name of KEY) {
    const index = Number(parts.get(name));
    if (parts.has(name) && Number.isInteger(index) && index >= 0 && index < choicesOf(name).length) changes[name] = index;
  }
  const settledChanges = settled(changes);
  const [layer, head] = (parts.get("head") || "").split(".").map(Number);
  const row = rowOf({ ...state, ...settledChanges }, layer, head);
  return row >= 0 ? { ...settledChanges, row } : settledChanges;
}
