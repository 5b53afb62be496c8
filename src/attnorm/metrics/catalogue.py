"""The catalogue of all metrics of a head: name, unit, definition, and how to interpret it."""

from dataclasses import dataclass
from typing import Literal

Group = Literal["weights", "limits", "sink", "gradient", "rate", "vectors", "circuits"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    name: str
    label: str
    unit: str  # "" for a pure number
    group: Group
    meaning: str  # one sentence: what it is
    reading: str  # one sentence: what high and low mean for a model builder
    per_row: bool = True  # measured on every row and summarized by mean and quantiles; else one number per head
    logarithmic: bool = False  # best drawn on a logarithmic scale
    bounded: tuple[float, float] | None = None  # the range it cannot leave, for color scales

    @property
    def title(self) -> str:
        """Label and unit, for a figure."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


METRICS: tuple[Metric, ...] = (
    Metric(
        name="entropy_ratio", label="Entropy / log n", unit="", group="weights", bounded=(0, 1),
        meaning="Entropy of the row's weights over its largest possible value, log n.",
        reading="1 is uniform attention over all n visible keys, 0 is attention to a single key.",
    ),
    Metric(
        name="entropy_nats", label="Entropy", unit="nats", group="weights",
        meaning="Shannon entropy of the row's weights, rescaled to sum to one.",
        reading="exp(entropy) is roughly the number of keys in use. Compare it with its floor and with log n.",
    ),
    Metric(
        name="effective_keys", label="Effective keys", unit="keys", group="weights", logarithmic=True,
        meaning="1 / sum of squared weights: the number of keys with equal weights that would be as concentrated.",
        reading="It stays small as the context grows if the head selects, and grows with n if the head is dispersed.",
    ),
    Metric(
        name="max_weight", label="Largest weight", unit="", group="weights", bounded=(0, 1),
        meaning="The largest weight of the row, not rescaled: with a learned sink the weights sum to less than 1.",
        reading="Near 1 the output is one value; near 1/n nothing is selected.",
    ),
    Metric(
        name="effective_gap", label="Effective gap", unit="nats", group="rate",
        meaning="Log-odds of the largest weight against the mean of the others: logit(max weight) + log(n - 1) where "
        "the row sums to 1.",
        reading="To keep the largest weight, it must grow by 1 when n grows 2.7-fold (e). A constant gap disperses.",
    ),
    Metric(
        name="row_sum", label="Row sum", unit="", group="weights",
        meaning="The sum of the row's weights.",
        reading="1 for softmax; less where a sink or an unnormalized map lets a head attend to nothing.",
    ),
    Metric(
        name="logit_spread", label="Logit spread", unit="nats", group="limits",
        meaning="Largest minus smallest visible logit of the row, scale and softcap included.",
        reading="It sets the ceiling: with spread d no weight among n keys can exceed 1 / (1 + (n - 1) exp(-d)).",
    ),
    Metric(
        name="max_logit", label="Largest logit", unit="nats", group="limits",
        meaning="The largest visible logit of the row.",
        reading="Very large logits (hundreds) precede loss spikes and overflow in half precision.",
    ),
    Metric(
        name="weight_ceiling", label="Weight ceiling", unit="", group="limits", bounded=(0, 1),
        meaning="The largest weight that the row's spread d, times the factor of a rescaled softmax, allows among its "
        "n keys: 1/(1+(n-1)e^-d); only known for softmax and its rescalings.",
        reading="If it is well above the largest weight, the head could be sharper but is not: dispersion by choice.",
    ),
    Metric(
        name="entropy_floor", label="Entropy floor", unit="nats", group="limits",
        meaning="The smallest entropy that the row's spread allows among its n keys, for softmax and its rescalings.",
        reading="A head near its floor is as sharp as its logits allow, which is the opposite of dispersed.",
    ),
    Metric(
        name="horizon", label="Horizon", unit="keys", group="limits", logarithmic=True,
        meaning="1 + e^d for the logit spread d, which includes the factor of a rescaled softmax: with more keys, no "
        "key can get half of the weight. The sink counts as a key. It is the value of the median row, because rows "
        "with a wide spread would dominate a mean.",
        reading="If it is shorter than your context, the ceiling is binding: dispersion is forced.",
    ),
    Metric(
        name="sink_mass", label="Sink mass", unit="", group="sink", bounded=(0, 1),
        meaning="Weight on the row's first visible key (in a sliding-window layer the first key of the window) and on "
        "learned sinks, where the model has them.",
        reading="Near 1 the head attends to almost nothing but the sink.",
    ),
    Metric(
        name="entropy_ratio_without_sink", label="Entropy / log n, no sink", unit="", group="sink", bounded=(0, 1),
        meaning="The same ratio for the other keys alone, their weights rescaled to sum to one.",
        reading="Shows whether the weight outside the sink is on few keys or spread out.",
    ),
    Metric(
        name="effective_keys_without_sink", label="Effective keys, no sink", unit="keys", group="sink",
        logarithmic=True,
        meaning="Effective number of keys among those other than the first.",
        reading="Like effective keys, for the keys that carry content: a sink can hide their dispersion.",
    ),
    Metric(
        name="max_weight_without_sink", label="Largest weight, no sink", unit="", group="sink", bounded=(0, 1),
        meaning="Largest weight among the other keys, rescaled to sum to one.",
        reading="Like the largest weight, for the keys that carry content.",
    ),
    Metric(
        name="effective_gap_without_sink", label="Effective gap, no sink", unit="nats", group="sink",
        meaning="Effective gap among the keys other than the first.",
        reading="Like the effective gap, for the keys that carry content.",
    ),
    Metric(
        name="logit_spread_without_sink", label="Logit spread, no sink", unit="nats", group="sink",
        meaning="Logit spread among the keys other than the first.",
        reading="The sink often holds an extreme logit; this is the spread of the keys that carry content.",
    ),
    Metric(
        name="horizon_without_sink", label="Horizon, no sink", unit="keys", group="sink", logarithmic=True,
        meaning="The horizon of the keys other than the first, for the median row.",
        reading="Like the horizon, for the keys that carry content. Verdicts use it for heads with a sink.",
    ),
    Metric(
        name="jacobian_norm", label="Jacobian norm", unit="", group="gradient",
        meaning="Largest singular value of d weights / d logits of the row, exact.",
        reading="Near 0 almost no gradient reaches the logits: the head is frozen. 1/2 is the worst case of softmax.",
    ),
    Metric(
        name="output_gate", label="Output gate", unit="", group="weights", per_row=False, bounded=(0, 1),
        meaning="Share of the head's output that the model's own gate lets pass, mean over rows; NaN without gates.",
        reading="Near 0 the head is switched off, whatever its weights are.",
    ),
    Metric(
        name="gated_sink_mass", label="Sink mass behind the gate", unit="", group="sink", per_row=False, bounded=(0, 1),
        meaning="Sink mass of a row times its output gate, mean over rows; NaN without gates.",
        reading="Near 0 the sink adds nothing to the output: the head closes its gate where it attends to the sink.",
    ),
    Metric(
        name="gap_slope", label="Slope of the gap", unit="", group="rate", per_row=False,
        meaning="Least-squares slope of the effective gap on log n over the row's bins of n.",
        reading="0 disperses as theory predicts, 1 compensates fully for the growing context.",
    ),
    Metric(
        name="gap_slope_without_sink", label="Slope of the gap, no sink", unit="", group="rate", per_row=False,
        meaning="The same slope for the keys other than the first.",
        reading="Like the slope of the gap, for the keys that carry content.",
    ),
    Metric(
        name="forced_share", label="Rows beyond the horizon", unit="", group="rate", per_row=False, bounded=(0, 1),
        meaning="Share of the rows with more visible keys than their horizon.",
        reading="Near 1: no softmax head with these logits could select here. Near 0: the ceiling does not bind.",
    ),
    Metric(
        name="mean_cosine", label="Mean cosine", unit="", group="vectors", per_row=False, bounded=(-1, 1),
        meaning="Mean cosine between different vectors x_i that the head mixes.",
        reading="The papers assume isotropic vectors, 0; near 1 all point the same way and cannot be distinguished.",
    ),
    Metric(
        name="effective_rank", label="Effective rank", unit="", group="vectors", per_row=False,
        meaning="(trace C)^2 / trace C^2 of the vectors' second moments C: the number of dimensions in use.",
        reading="Near the head's width: isotropic vectors, as assumed. Small: a few directions dominate.",
    ),
    Metric(
        name="smallest_distance", label="Smallest distance", unit="", group="vectors", per_row=False,
        meaning="Smallest distance between two of the vectors, over their mean norm.",
        reading="The papers' separability assumes it positive; 0 means repeated vectors.",
    ),
    Metric(
        name="induction", label="Induction score", unit="", group="circuits", per_row=False, bounded=(0, 1),
        meaning="Mean weight, on random tokens repeated once, on the token after the earlier occurrence of the query's "
        "token; at the probed length where it is largest.",
        reading="Near 1 the head continues what it has seen before: an induction head.",
    ),
    Metric(
        name="previous_token", label="Previous-token score", unit="", group="circuits", per_row=False, bounded=(0, 1),
        meaning="Mean weight on the token before the query, on the same random tokens.",
        reading="Near 1 the head passes on the previous token, which induction heads need.",
    ),
    Metric(
        name="retrieval", label="Retrieval score", unit="", group="circuits", per_row=False, bounded=(0, 1),
        meaning="Mean weight on the next token of a needle inside a text while the model copies the needle.",
        reading="Near 1 the head finds and copies what the question asks for: a retrieval head.",
    ),
    Metric(
        name="circuit_reach", label="Sharp to", unit="keys", group="circuits", per_row=False, logarithmic=True,
        meaning="Number of keys up to which the right key of the head's circuit has at least half of the weight; 0 if "
        "it never has, circuit_probed if it always has.",
        reading="Beyond it the head loses its target: plan the context below it, or change the normalizer.",
    ),
    Metric(
        name="circuit_probed", label="Longest probe", unit="keys", group="circuits", per_row=False, logarithmic=True,
        meaning="Number of keys of the longest probe of circuits.",
        reading="A reach as large as this is a lower bound.",
    ),
)  # fmt: skip

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}
PER_ROW: tuple[str, ...] = tuple(metric.name for metric in METRICS if metric.per_row)
PER_HEAD: tuple[str, ...] = tuple(metric.name for metric in METRICS if not metric.per_row)
