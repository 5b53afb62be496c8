"""The tables of an analysis and their columns: what is saved, exported, shown and merged."""

from collections.abc import Mapping

import pyarrow as pa

from attnorm.metrics.catalogue import PER_HEAD, PER_ROW

QUANTILES = (5, 25, 50, 75, 95)

# Verdicts are derived from the other columns when the tables of all parts are put together (analysis/verdicts/).
VERDICT_COLUMNS = [
    ("verdict", pa.string()),
    ("flags", pa.list_(pa.string())),
    ("evidence", pa.string()),
    ("leaning", pa.string()),  # the verdict of the numbers as they are; `verdict` is "undecided" where it may change
    ("confidence", pa.float64()),  # share of bootstrap resamples that give the same verdict
    ("agreement", pa.float64()),  # share of windows that give the same verdict
    ("deciding", pa.string()),  # the column that decides, its value, its 95 % interval and its threshold
    ("deciding_value", pa.float64()),
    ("deciding_low", pa.float64()),
    ("deciding_high", pa.float64()),
    ("deciding_threshold", pa.float64()),
    ("saturation", pa.string()),  # "saturated", "distinguishes" or "not judged"
    ("saturation_top_n", pa.int64()),
    ("saturation_excess", pa.float64()),  # separability - null, with its 90 % interval
    ("saturation_low", pa.float64()),
    ("saturation_high", pa.float64()),
    ("saturation_power", pa.float64()),  # of the test that would show no excess, if there is none
]

_KEY = [
    ("text", pa.string()),
    ("length", pa.int64()),
    ("normalizer", pa.string()),
    ("kind", pa.string()),
    ("layer", pa.int64()),
]
HEAD_KEY = [*_KEY, ("head", pa.int64())]


def _numbers(*names: str) -> list[tuple[str, pa.DataType]]:
    return [(name, pa.float64()) for name in names]


def with_quantiles(metric: str) -> list[str]:
    """The median row under the metric's own name, the mean as entropy_nats_mean, quantiles as entropy_nats_q05, ..."""
    return [metric, f"{metric}_mean", *(f"{metric}_q{q:02d}" for q in QUANTILES)]


# One row per head. Per-row metrics are summarised over the longest rows only, those with n_low <= n <= n_high visible
# keys: rows of different n are never averaged into one number. All lengths are in `by_length`. With several windows of
# a text every number is the mean over windows, of a horizon the median.
HEADS = pa.schema(
    [
        *HEAD_KEY,
        ("kv_head", pa.int64()),
        ("rows", pa.int64()),  # measured in [n_low, n_high]
        ("broken_rows", pa.int64()),  # of all measured rows: logits or weights not finite; left out of every number
        ("n_low", pa.int64()),
        ("n_high", pa.int64()),
        *_numbers(*(column for name in PER_ROW for column in with_quantiles(name))),
        *_numbers(*PER_HEAD, "gap_slope_error", "worst_norm"),  # worst_norm: bound on the Jacobian norm at n_high
    ]
)

# One row per head and bin of visible keys n: the curves against length, out of one pass.
BY_LENGTH = pa.schema(
    [
        *HEAD_KEY,
        ("n_low", pa.int64()),
        ("n_high", pa.int64()),
        ("rows", pa.int64()),
        *_numbers(
            "n",
            *(f"{name}{suffix}" for name in PER_ROW for suffix in ("", "_mean", "_q25", "_q50", "_q75")),
        ),
    ]
)

# One row per head and block of consecutive long rows: medians of what verdicts are decided by, for their intervals.
BLOCK_METRICS = (
    "entropy_ratio", "entropy_nats", "entropy_floor", "max_weight", "sink_mass", "horizon", "jacobian_norm",
    "entropy_ratio_without_sink", "horizon_without_sink",
)  # fmt: skip
BLOCK_NORM = "jacobian_norm_q75"
BLOCKS = pa.schema(
    [
        *HEAD_KEY,
        ("window", pa.int64()),
        ("block", pa.int64()),
        ("rows", pa.int64()),
        *_numbers(*BLOCK_METRICS, BLOCK_NORM),
    ]
)

# One row per head and N: the N heaviest keys. Means over the longest rows: `mass` over all of them, the rest over the
# sampled ones, which `rows` counts where they were measured. See docs/theory/distance.md and geometry.md.
TOP_N_NUMBERS = (
    "mass",
    "d_tilde",
    "relative_distance",  # d_tilde / ((n - N) ||s||)
    "fixed_printed",
    "fixed_tight",
    "random_printed",
    "random_lower",
    "random_upper",
    "separability",  # Ns / N
    "separability_null",  # mean over permuted values
    "separability_null_low",  # 5 % and 95 % of the permutations' means
    "separability_null_high",
    "separability_sphere",  # vectors scaled to norm 1
    "separability_sphere_null",
    "separability_lower",  # moment bounds, heuristic at the data's own radius
    "separability_upper",
    "separability_excess_error",  # standard error of separability - null over the compared rows
)
TOP_N = pa.schema([*HEAD_KEY, ("top_n", pa.int64()), ("rows", pa.int64()), *_numbers(*TOP_N_NUMBERS)])

# One row per head and temperature on top of the model's own: how far weights move when logits do.
SENSITIVITY = pa.schema(
    [
        *HEAD_KEY,
        ("temperature", pa.float64()),
        ("rows", pa.int64()),
        *_numbers("jacobian_norm", "jacobian_norm_max", "bound", "gain_0.001", "gain_0.1", "gain_10"),
    ]
)

# One row per layer and N: what the heads cover together, measured and as independence would have it.
COVERAGE = pa.schema(
    [*_KEY, ("top_n", pa.int64()), ("rows", pa.int64()), *_numbers("per_head", "union", "independent")]
)

# One row per chosen query row and key that a head reads, by rank: the heaviest keys and the text of both positions.
# `weight` is the normalizer's own, not rescaled to a row sum of 1; a token is null where a position is no token.
READS = pa.schema(
    [
        *HEAD_KEY,
        ("window", pa.int64()),
        ("row", pa.int64()),
        ("rank", pa.int64()),
        ("key", pa.int64()),
        ("weight", pa.float64()),
        ("row_token", pa.string()),
        ("key_token", pa.string()),
    ]
)

# One row per position of a measured sequence: the text around the keys that are read.
TOKENS = pa.schema(
    [
        ("text", pa.string()),
        ("length", pa.int64()),
        ("window", pa.int64()),
        ("side", pa.string()),  # encoder or decoder; input for a model with one stack
        ("position", pa.int64()),
        ("token_id", pa.int64()),
        ("token", pa.string()),
    ]
)

SCHEMAS = {
    "heads": HEADS,
    "by_length": BY_LENGTH,
    "top_n": TOP_N,
    "sensitivity": SENSITIVITY,
    "coverage": COVERAGE,
    "blocks": BLOCKS,
    "reads": READS,
    "tokens": TOKENS,
}
OPTIONAL = ("reads", "tokens")  # runs of earlier versions have no such files

# Derived when parts are put together: one row per head and window, with the window's own verdict.
WINDOW_NUMBERS = (
    *BLOCK_METRICS, BLOCK_NORM, "max_weight_without_sink", "effective_keys", "effective_keys_without_sink",
    "gap_slope", "gap_slope_without_sink", "gap_slope_error",
)  # fmt: skip
WINDOWS = pa.schema(
    [
        *HEAD_KEY,
        ("window", pa.int64()),
        ("start", pa.int64()),  # token of the text at which the window starts
        ("rows", pa.int64()),
        ("broken_rows", pa.int64()),
        ("n_low", pa.int64()),
        ("n_high", pa.int64()),
        *_numbers(*WINDOW_NUMBERS, "worst_norm"),
        ("verdict", pa.string()),
    ]
)
TABLES = (*SCHEMAS, "windows")


def complete(tables: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
    """The tables with an empty one for each optional table that is missing."""
    return {**{name: SCHEMAS[name].empty_table() for name in OPTIONAL}, **tables}
