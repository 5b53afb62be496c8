"""Measure how the weight of the largest logit falls as the number of keys n grows (`attnorm lab dispersion`).

One row of n scores: the winner, in the middle of the context, scores `gap`; the others are normal noise around 0. The
result is w / max(1, sum |w|): the winner's weight, but rows that sum to more than 1 are divided by their sum. The
weights of a mechanism are the derivative of its output by the values, for queries and keys with these scores.

Verdicts at the largest context: a winner with more than half of the weight of its row *stays*, one with less than
the uniform weight 1/n *collapses*, and everything between *fades*. Theory uses one half too:
beyond the length 1 + e^spread, the horizon, softmax cannot give more than that to any key.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from attnorm.attention import attention
from attnorm.mechanisms.differential import Differential
from attnorm.normalizers.contract import Mechanism, Normalizer
from attnorm.normalizers.registry import available, get
from attnorm.text import markdown_table

Verdict = Literal["stays", "fades", "collapses"]

MEANING: dict[Verdict, str] = {
    "stays": "more than half of the row",
    "fades": "less than half of the row",
    "collapses": "less than an equal share 1/n",
}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One normalizer: the part of the row that the winner keeps among `lengths` keys."""

    name: str
    label: str  # the name with the settings it was drawn with
    lengths: tuple[int, ...]
    kept: tuple[float, ...]

    @property
    def verdict(self) -> Verdict:
        if self.kept[-1] > 0.5:
            return "stays"
        return "fades" if self.kept[-1] >= 1 / self.lengths[-1] else "collapses"


@dataclass(frozen=True, kw_only=True)
class Dispersion:
    """The winner's score is `gap`; the others' scores are normal with mean 0 and this noise; medians over the draws."""

    gap: float
    noise: float
    draws: int
    seed: int
    curves: tuple[Curve, ...]
    left_out: dict[str, str]  # name -> why the question does not apply

    def groups(self) -> Iterator[tuple[Verdict, list[Curve]]]:
        """Yield the curves by verdict, each group from the most to the least weight kept."""
        for verdict in get_args(Verdict):
            members = [curve for curve in self.curves if curve.verdict == verdict]
            if members:
                yield verdict, sorted(members, key=lambda curve: curve.kept[::-1], reverse=True)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with the verdict of each curve."""
        return {**asdict(self), "curves": [{**asdict(curve), "verdict": curve.verdict} for curve in self.curves]}

    @property
    def setting(self) -> str:
        """The experiment in one sentence."""
        others = f"the other scores are normal noise, N(0, {self.noise**2:g})" if self.noise else "all others score 0"
        return f"One key scores {self.gap:g}; {others}."


def dispersion_table(dispersion: Dispersion) -> str:
    """Return a table in Markdown, by the weight at the most keys, with five of the lengths."""
    lengths = dispersion.curves[0].lengths if dispersion.curves else ()
    columns = printed_lengths(lengths)
    rows = [
        [curve.label, verdict, *(percent(curve.kept[column]) for column in columns)]
        for verdict, curves in dispersion.groups()
        for curve in curves
    ]
    verdicts = "; ".join(f"{verdict}: {meaning}" for verdict, meaning in MEANING.items())
    draws = f"Median of {dispersion.draws} draws. " if dispersion.noise else ""
    parts = [
        f"Weight of the largest logit among n keys. {dispersion.setting}",
        markdown_table(["normalizer", "at the most keys", *(f"{lengths[column]:,}" for column in columns)], rows, 2),
        f"Verdicts: {verdicts}. {draws}Rows with a sum above 1 are divided by it.",
        *(f"not measured: {name} - {reason}" for name, reason in dispersion.left_out.items()),
    ]
    return "\n\n".join(parts)


def printed_lengths(lengths: tuple[int, ...]) -> list[int]:
    """Return the indices of about five lengths to print, including the first and the last."""
    return sorted({round(i * (len(lengths) - 1) / 4) for i in range(5)}) if lengths else []


def percent(part: float) -> str:
    """Return a share as a percentage with two significant digits, for example 98 %, 4.1 %, 0.069 %."""
    value = 100 * part
    if value >= 99.5:
        return "100 %"
    if value < 0.001:
        return "0 %" if value == 0 else "< 0.001 %"
    digits = 0 if value >= 9.95 else 1 if value >= 0.995 else 2 if value >= 0.0995 else 3
    return f"{value:.{digits}f} %"


LENGTHS = tuple(2**power for power in range(4, 18))  # 16 .. 131,072

# Options that change the result and are part of the label; all other normalizers use their defaults.
SETTINGS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "entmax": (("entmax, α = 1.25", {"alpha": 1.25}),),
    "ssmax": (("ssmax, s = 0.17", {}), ("ssmax, s = 0.43", {"s": 0.43})),  # the start; the paper's Figure 1
    "asentmax": (("asentmax, γ = 0", {}), ("asentmax, γ = 1", {"gamma": 1.0})),
    "adaptive_temperature": (("adaptive_temperature", {}), ("adaptive_temperature, monotone", {"monotone": True})),
    "topk": (("topk, k = 64", {}), ("topk, k = √n", {"k": "sqrt"})),
    "log_scaled": (("log_scaled, Qwen", {}), ("log_scaled, Llama 4", {"rule": "llama4"})),
    "kernel": (("kernel, softplus", {}),),
    "local": (("local, 256 keys", {}),),
    "differential": (("differential, λ = 0.2", {"head_norm": False, "width": 1}),),
}

# Mechanisms whose weights do not follow from a row of scores.
NOT_MEASURED = {
    "selective": "it depends on what earlier queries selected; if they selected nothing it is softmax",
    "differential_v2": "its second query can cancel any weight; with a lambda of 0 it is softmax",
    "tda": "cosines lie between -1 and 1, so that no gap of logits applies; threshold_relu has its weights",
    "laser": "its output is a smooth maximum of the values, with the weights of its normalizer",
    "forget": "it depends on how many tokens lie between key and query; with gates of 1 it is softmax",
    "soft": "its landmarks are averages of keys, so that the result depends on the positions of the keys and not only "
    "on their logits",
}


def dispersion(
    *,
    gap: float = 6.0,
    noise: float = 1.0,
    lengths: Sequence[int] = LENGTHS,
    draws: int = 5,
    seed: int = 0,
    names: Sequence[str] | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> Dispersion:
    """Return the curves of all normalizers, or of `names`; `progress` gets each name before it is measured."""
    _check(gap, noise, lengths, draws)
    curves: list[Curve] = []
    left_out: dict[str, str] = {}
    rows = {n: _scores(n, gap, noise, draws if noise else 1, seed) for n in lengths}
    for name in available() if names is None else names:
        progress(name)
        if name in NOT_MEASURED:
            left_out[name] = NOT_MEASURED[name]
            continue
        try:
            for label, options in SETTINGS.get(name, ((name, {}),)):
                normalizer = get(name, **options)
                kept = tuple(_kept_weight(normalizer, rows[n], n // 2) for n in lengths)
                curves.append(Curve(name=name, label=label, lengths=tuple(lengths), kept=kept))
        # A registered normalizer may need more than scores.
        except (TypeError, ValueError, NotImplementedError) as error:
            left_out[name] = str(error)
    return Dispersion(gap=gap, noise=noise, draws=draws, seed=seed, curves=tuple(curves), left_out=left_out)


def _check(gap: float, noise: float, lengths: Sequence[int], draws: int) -> None:
    increasing = len(lengths) > 0 and min(lengths) > 1 and list(lengths) == sorted(set(lengths))
    for name, value, is_right, expected in (
        ("gap", gap, gap > 0, "a positive difference between the largest logit and the mean of the others"),
        ("noise", noise, noise >= 0, "a standard deviation of the other logits of at least 0"),
        ("lengths", list(lengths), increasing, "increasing numbers of keys, 2 or more"),
        ("draws", draws, draws >= 1, "an integer of at least 1"),
    ):
        if not is_right:
            raise ValueError(f"{name}: expected {expected}, got {value}.")


def _scores(n: int, gap: float, noise: float, draws: int, seed: int) -> Tensor:
    """Return scores (draws, 1, n) with the winner at n // 2."""
    generator = torch.Generator().manual_seed(seed)
    scores = noise * torch.randn(draws, 1, n, generator=generator, dtype=torch.float64)
    scores[..., n // 2] = gap
    return scores


def _kept_weight(normalizer: Normalizer | Mechanism, scores: Tensor, winner: int) -> float:
    weights = _weights(normalizer, scores, winner)
    share = weights[..., winner].abs() / weights.abs().sum(-1).clamp(min=1)
    return share.median().item()


def _weights(normalizer: Normalizer | Mechanism, scores: Tensor, winner: int) -> Tensor:
    """Return the weights (draws, 1, n)."""
    if isinstance(normalizer, Normalizer):
        with torch.no_grad():
            weights: Tensor = normalizer(scores)
        return weights
    if normalizer.name not in PROBES:
        raise ValueError("it needs queries and keys, and attnorm has none that give these logits")
    return torch.cat([PROBES[normalizer.name](normalizer, row, winner) for row in scores.split(1)])


def _linear_in_values(mechanism: Mechanism, q: Tensor, k: Tensor, *, scale: float | None) -> Tensor:
    """Return the weights (1, 1, n) of one query: the derivative of the output by the values."""
    values = torch.zeros(1, 1, k.shape[-2], 1, dtype=k.dtype, requires_grad=True)
    output = attention(q, k, values, mechanism, scale=scale)
    (weights,) = torch.autograd.grad(output.sum(), values)
    return weights[..., 0].detach()


def _probe_gaussian(mechanism: Mechanism, scores: Tensor, winner: int) -> Tensor:
    # The query lies on the best key, the others at the distance whose kernel is exp(score - best score).
    distance = torch.sqrt(2 * (scores.amax(-1, keepdim=True) - scores))[..., None]
    return _linear_in_values(mechanism, torch.zeros_like(distance[..., :1, :]), distance, scale=1.0)


def _probe_linear(mechanism: Mechanism, scores: Tensor, winner: int) -> Tensor:
    # Width 64: q . k / 8 gives the scores, and the rest of each key is unit normal noise orthogonal to q.
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 1, 64, generator=generator)
    k = torch.randn(1, 1, scores.shape[-1], 64, generator=generator)
    wanted = 8 * scores[..., None].float()
    k = k + (wanted - (k * q).sum(-1, keepdim=True)) * q / q.square().sum()
    return _linear_in_values(mechanism, q, k, scale=None).double()


def _probe_differential(mechanism: Mechanism, scores: Tensor, winner: int) -> Tensor:
    # The second map sees the same noise but no winner. Its share lambda is the paper's start.
    assert isinstance(mechanism, Differential)
    with torch.no_grad():
        mechanism.vectors.zero_()
    without_winner = scores.clone()
    without_winner[..., winner] = 0.0
    k = torch.cat([scores, without_winner], dim=1)[..., None]
    return _linear_in_values(mechanism, torch.ones_like(k[..., :1, :]), k, scale=1.0)


PROBES: dict[str, Callable[[Mechanism, Tensor, int], Tensor]] = {
    "gaussian": _probe_gaussian,
    "linear": _probe_linear,
    "differential": _probe_differential,
}
