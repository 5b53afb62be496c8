// The curves of one head, with the bounds of theory.
const N_AXIS = { label: "visible keys n, logarithmic", name: "n" };

function halfOfRows(row, name) {
  const [xs, low, high] = ["n", `${name}_q25`, `${name}_q75`].map((column) => curve(row, "byLength", column));
  return { xs, low, high, look: "band c-main" };
}

// Only softmax, also with rescaled logits, has a known floor, ceiling and horizon.
function whose(row, limit, values) {
  const name = runs(row) || "what this layer runs";
  if (!values.some(Number.isFinite)) return ` No ${limit} is known for ${name}.`;
  return name === "softmax" ? "" : ` The ${limit} is for ${name}, with its factor on the logits.`;
}

function entropyChart(row) {
  const xs = curve(row, "byLength", "n");
  return chart({
    title: "Entropy against length",
    unit: "nats",
    how:
      "log n is uniform attention; the floor is the sharpest attention that the logits allow. The band contains half of the " +
      `rows.${whose(row, "floor", curve(row, "byLength", "entropy_floor"))}`,
    x: N_AXIS,
    y: { zero: true },
    bands: [halfOfRows(row, "entropy_nats")],
    series: [
      { name: "entropy", xs, ys: curve(row, "byLength", "entropy_nats"), look: "c-main thick", points: true },
      { name: "log n", xs, ys: xs.map(Math.log), look: "c-soft thin" },
      { name: "floor", xs, ys: curve(row, "byLength", "entropy_floor"), look: "c-ink dashed" },
    ],
    horizon: headValue(row, "horizon"),
  });
}

function gapChart(row) {
  const xs = curve(row, "byLength", "n");
  const ys = curve(row, "byLength", "effective_gap");
  const slope = headValue(row, "gap_slope");
  const error = headValue(row, "gap_slope_error");
  const give = Number.isFinite(error) ? ` ± ${number(error)}` : "";
  const withoutSink = curve(row, "byLength", "effective_gap_without_sink");
  const known = xs.map((_, i) => i).filter((i) => Number.isFinite(ys[i]));
  const mean = (values) => known.reduce((sum, i) => sum + values[i], 0) / known.length;
  const logs = xs.map(Math.log);
  const through = (tilt) => logs.map((value) => mean(ys) + tilt * (value - mean(logs)));
  const from = (tilt) => logs.map((value) => ys[known[0]] + tilt * (value - logs[known[0]]));
  const fitted = known.length > 1 && Number.isFinite(slope);
  return chart({
    title: "Effective gap against length",
    unit: Number.isFinite(slope) ? `nats; slope ${number(slope)}${give}` : "nats",
    how: "With slope 1 the largest weight stays as the context grows; with slope 0 attention disperses.",
    x: { ...N_AXIS, label: "visible keys n, logarithmic (so log n is linear)" },
    y: {},
    bands: [halfOfRows(row, "effective_gap")],
    series: [
      { name: "gap", xs, ys, look: "c-main thick", points: true },
      { name: "without sink", label: "no sink", xs, ys: withoutSink, look: "c-third" },
      fitted && { name: "fitted line", label: "fit", xs, ys: through(slope), look: "c-ink dashed" },
      known.length > 1 && { name: "slope 1", xs, ys: from(1), look: "c-soft thin", mute: true },
      known.length > 1 && { name: "slope 0", xs, ys: from(0), look: "c-soft thin", mute: true },
    ].filter(Boolean),
    horizon: headValue(row, "horizon"),
  });
}

function weightChart(row) {
  const xs = curve(row, "byLength", "n");
  const ys = curve(row, "byLength", "max_weight");
  return chart({
    title: "Largest weight against length",
    unit: "and the ceiling that the logits allow",
    how:
      "The ceiling is the largest weight that the logit spread allows among n keys; 1/n is uniform attention." +
      whose(row, "ceiling", curve(row, "byLength", "weight_ceiling")),
    x: N_AXIS,
    y: { domain: [0, 1] },
    series: [
      { name: "largest weight", label: "weight", xs, ys, look: "c-main thick", points: true },
      { name: "ceiling", xs, ys: curve(row, "byLength", "weight_ceiling"), look: "c-ink dashed" },
      { name: "1/n", xs, ys: xs.map((n) => 1 / n), look: "c-soft thin" },
    ],
    horizon: headValue(row, "horizon"),
  });
}

function setAxis(xs) {
  return { label: "N, heaviest keys, logarithmic", name: "N", ticks: xs.length <= 7 ? xs : null, base: 10 };
}

function massChart(row) {
  const xs = curve(row, "topN", "top_n");
  const n = curve(row, "byLength", "n").at(-1) ?? heads.nHigh[row];
  return chart({
    title: "Weight of the N heaviest keys",
    unit: "share of the row",
    how: "A selective head gives most of its weight to few keys. N/n is uniform attention.",
    x: setAxis(xs),
    y: { domain: [0, 1] },
    format: (value) => share(value),
    series: [
      { name: "N heaviest", label: "heaviest", xs, ys: curve(row, "topN", "mass"), look: "c-main thick", points: true },
      { name: "N/n", xs, ys: xs.map((N) => Math.min(1, N / n)), look: "c-soft thin" },
    ],
  });
}

function separabilityChart(row) {
  const xs = curve(row, "topN", "top_n");
  const of = (name) => curve(row, "topN", name);
  return chart({
    title: "Separability against N",
    unit: "share of the N keys that are distinguishable",
    how:
      "Above the gray band, the selected keys are more distinguishable than with permuted weights; inside it, they are " +
      "not. The moment bounds are a heuristic at the radius of the data.",
    absent: notMeasured("--metrics vectors"),
    x: setAxis(xs),
    y: { domain: [0, 1] },
    format: (value) => share(value),
    bands: [{ xs, low: of("separability_null_low"), high: of("separability_null_high"), look: "null-band" }],
    series: [
      { name: "measured", xs, ys: of("separability"), look: "c-main thick", points: true },
      { name: "on the sphere", label: "on sphere", xs, ys: of("separability_sphere"), look: "c-third" },
      { name: "permuted", xs, ys: of("separability_null"), look: "c-soft" },
      { name: "upper moment bound", label: "upper", xs, ys: of("separability_upper"), look: "c-ink dotted" },
      { name: "lower moment bound", label: "lower", xs, ys: of("separability_lower"), look: "c-ink dotted" },
    ],
  });
}

function distanceChart(row) {
  const xs = curve(row, "topN", "top_n");
  const of = (name) => curve(row, "topN", name);
  const bounds = ["fixed_printed", "fixed_tight", "random_printed", "random_lower", "random_upper"];
  const [least, most] = extent(finite(["relative_distance", ...bounds].flatMap(of)));
  const wide = most > 6 * least;
  return chart({
    title: "Distance of the other keys from the selected ones",
    unit: "over (n − N) ‖s‖",
    how:
      "Far keys with little weight have the value 1. The band contains the values of a random set of N keys. “Printed” " +
      "bounds are as published; the one for random sets has a misprint.",
    absent: notMeasured("--metrics vectors"),
    x: setAxis(xs),
    y: { logarithmic: wide, zero: !wide },
    bands: [{ xs, low: of("random_lower"), high: of("random_upper"), look: "null-band" }],
    series: [
      { name: "measured", xs, ys: of("relative_distance"), look: "c-main thick", points: true },
      { name: "fixed bound", label: "fixed", xs, ys: of("fixed_tight"), look: "c-ink dashed" },
      { name: "fixed, printed", xs, ys: of("fixed_printed"), look: "c-ink dotted" },
      { name: "random, upper", xs, ys: of("random_upper"), look: "c-soft thin" },
      { name: "random, lower", xs, ys: of("random_lower"), look: "c-soft thin" },
      { name: "random, printed", label: "rand., printed", xs, ys: of("random_printed"), look: "c-second dotted" },
    ],
  });
}

function sensitivityChart(row) {
  const xs = curve(row, "sensitivity", "temperature");
  const of = (name) => curve(row, "sensitivity", name);
  const softmax = runs(row) === "softmax";
  const gain = (step, look) => ({ name: `g, ε = ${step}`, label: `g, ε ${step}`, xs, ys: of(`gain_${step}`), look });
  const printed = xs.map((T) => Math.min(1 / (4 * T), Math.SQRT2));
  const wrong = softmax ? " The printed bound min{1/(4T), √2} is too small." : "";
  return chart({
    title: "Sensitivity against temperature",
    unit: "largest singular value",
    how: `The exact norm stays below K/T. A random step of size ε has a much smaller effect (g).${wrong}`,
    absent: notMeasured("--metrics sensitivity"),
    x: { label: "temperature T, in addition to the model's own, logarithmic", name: "T", ticks: xs.length <= 7 ? xs : null, base: 10 },
    y: { logarithmic: true },
    series: [
      { name: "exact norm", label: "norm", xs, ys: of("jacobian_norm"), look: "c-main thick", points: true },
      { name: "largest of the rows", label: "worst row", xs, ys: of("jacobian_norm_max"), look: "c-main thin" },
      { name: "bound K/T", label: "bound", xs, ys: of("bound"), look: "c-ink dashed" },
      softmax && { name: "printed bound", label: "printed", xs, ys: printed, look: "c-second dotted" },
      gain("0.001", "c-third"), gain("0.1", "c-fourth dashed"), gain("10", "c-fifth dotted"),
    ].filter(Boolean),
  });
}

const NORMALIZER_LOOKS = [
  "c-main thick", "c-second", "c-third dashed", "c-fourth dotted", "c-fifth", "c-ink dashed", "c-soft dotted",
];

// The same head, text and length under every measured normalizer.
function relatives(row) {
  const choice = Object.fromEntries(KEY.map((name) => [name, heads[name][row]]));
  return choicesOf("normalizer")
    .map((name, normalizer) => ({ name, row: rowOf({ ...choice, normalizer }, heads.layer[row], heads.head[row]) }))
    .filter((one) => one.row >= 0);
}

function normalizerSeries(row, column) {
  return relatives(row).map((one, i) => ({
    name: one.name,
    label: one.name.length > 13 ? `${one.name.slice(0, 12)}…` : one.name,
    xs: curve(one.row, "byLength", "n"),
    ys: curve(one.row, "byLength", column),
    look: NORMALIZER_LOOKS[i % NORMALIZER_LOOKS.length],
    points: one.row === row,
  }));
}

function keysUnderEach(row) {
  const xs = curve(row, "byLength", "n");
  return chart({
    title: "Effective keys under each normalizer",
    unit: "on the same logits",
    how: "Number of keys that share the attention. A flat line selects; a line along n disperses.",
    x: N_AXIS,
    y: { logarithmic: true },
    series: [
      ...normalizerSeries(row, "effective_keys"),
      { name: "n", label: "all n", xs, ys: xs, look: "c-soft thin", mute: true },
    ],
  });
}

function weightUnderEach(row) {
  return chart({
    title: "Largest weight under each normalizer",
    unit: "on the same logits",
    how: "A suitable normalizer keeps the largest weight high as the context grows.",
    x: N_AXIS,
    y: { domain: [0, 1] },
    series: normalizerSeries(row, "max_weight"),
  });
}
