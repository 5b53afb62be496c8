"""Measure what the practical guidelines of Mudarisov et al. 2025 are about: one function for each, on any model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata, spearmanr
from torch import Tensor
from torch.nn.functional import pad

from attnorm.metrics.call import AttentionCall, LogitBlock, logit_blocks
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.topk import topk
from attnorm.theory.dispersion import entropy_nats
from attnorm.theory.geometry import distinguishable, independent_coverage, separability, union_coverage
from attnorm.theory.gradient import entmax_jacobian_norm
from attnorm.theory.selection import SelectedRows, at_least_float32, select, top_n_indices
from attnorm_lab.experiments.experiment import ExperimentSubject, Floats, ProgressCallback
from attnorm_lab.experiments.gradients import TEMPERATURES
from attnorm_lab.experiments.model_runs import (
    AS_IT_RUNS,
    WindowMean,
    longest_rows,
    losses,
    mean,
    permute_weights,
    run_forward_pass,
    windows_of,
)

SHARES = (0.01, 0.03, 0.06, 0.12, 0.25, 0.5)  # of the context, the paper's 0.06 among them
PAPERS_SHARE = 0.06
PAPERS_LEVEL = 0.8  # separability below which the paper calls a head saturated
MIN_KEYS = 16  # keys that a row keeps at least
TOP_N = 20  # above 16, where separability levels off in the paper
HEADS = 3
MAX_TRIPLES = 20
DRAWS, FEW_DRAWS = 20, 4  # of the null: at TOP_N, where a quantile is needed, and elsewhere


@dataclass(frozen=True)
class Selected:
    """Medians over heads, for each share N/L of the context."""

    mass: Floats
    separability: Floats
    null: Floats
    losses: dict[float, Floats]  # by window, nats per token if only this share of the keys is kept; 1: all

    def change(self, share: float) -> WindowMean:
        return mean(self.losses[share] - self.losses[1.0])


@dataclass(frozen=True)
class EarlySign:
    """Every head at a quarter of the length and at the full length."""

    entropy_before: Floats  # entropy / log n
    entropy_after: Floats
    apart_before: Floats  # separability
    apart_after: Floats
    chance_after: Floats  # the 95 % quantile of its null

    @property
    def by_level(self) -> NDArray[np.bool_]:
        """Saturated by the paper's definition: at most 80 % are distinguishable."""
        return self.apart_after <= PAPERS_LEVEL

    @property
    def by_null(self) -> NDArray[np.bool_]:
        """Saturated by attnorm's definition: no more distinguishable than with permuted weights."""
        return self.apart_after <= self.chance_after

    def area_under_curve(self, saturated: NDArray[np.bool_]) -> float:
        """Return how often a head that will be saturated has more entropy than one that will not; 1/2 is chance."""
        positive, negative = int(saturated.sum()), int((~saturated).sum())
        if not positive or not negative:
            return float("nan")
        ranks = rankdata(self.entropy_before)
        return float((ranks[saturated].sum() - positive * (positive + 1) / 2) / (positive * negative))

    def correlation(self) -> float:
        """Return the rank correlation over heads of the changes of entropy and separability."""
        changes = self.entropy_after - self.entropy_before, self.apart_after - self.apart_before
        if any(np.ptp(change) == 0 for change in changes):
            return float("nan")
        return float(spearmanr(*changes).statistic)


@dataclass(frozen=True)
class Cooled:
    """Means over the sampled rows, by temperature and head."""

    separability: Floats  # (temperatures, heads)
    norm: Floats
    trained_temperature: float  # in the paper's units, on raw logits


@dataclass(frozen=True)
class Covered:
    """Shares of selected keys that three heads of a layer distinguish; means over layers, rows and triples."""

    alone: float  # one head, of its own top N: separability
    predicted: float  # 1 - (1 - p)^3
    own: float  # of the first head's top N, by any of the three
    together: float  # of all that the three select, by any of the three


@dataclass(frozen=True)
class HeadSeparability:
    """Every head at one length: means over the sampled rows."""

    entropy: Floats  # entropy / log n
    mass: Floats  # (counts, heads): of the N heaviest keys
    separability: Floats
    null: Floats  # mean over permuted rows
    chance: Floats  # (heads,): 95 % quantile of the null at TOP_N


def counts_of(length: int) -> list[int]:
    """Return the N of every share, then TOP_N."""
    return [*(max(1, round(share * length)) for share in SHARES), TOP_N]


def measure_separability(
    subject: ExperimentSubject, progress: ProgressCallback, length: int, rows: int
) -> HeadSeparability:
    """Measure in one pass how many of the N heaviest keys are distinguishable, also with permuted weights."""
    generator = torch.Generator().manual_seed(subject.seed)
    counts = counts_of(length)
    columns: dict[str, list[Floats]] = {name: [] for name in ("entropy", "mass", "separability", "null", "chance")}

    def on_call(call: AttentionCall) -> None:
        parts: dict[str, list[Tensor]] = {name: [] for name in ("entropy", "mass", "separability", "null")}
        for block in logit_blocks(call, longest_rows(call, rows).to(call.query_BHQD.device), all_heads=True):
            heads = block.logits.shape[0]
            selected_rows = _select_rows(call, block, 1.0)
            n = selected_rows.visible.sum(-1)
            parts["entropy"].append((entropy_nats(selected_rows.weights) / n.log()).reshape(heads, -1))
            sets = [_keep_heaviest(selected_rows, N) for N in counts]
            parts["mass"].append(torch.stack([selection.mass.reshape(heads, -1) for selection in sets]))
            parts["separability"].append(
                torch.stack([separability(selection).reshape(heads, -1) for selection in sets])
            )
            draws = [_permute_weights(selected_rows, generator) for _ in range(DRAWS)]
            null = [
                torch.stack([separability(_keep_heaviest(draw, N)).reshape(heads, -1) for draw in draws[:FEW_DRAWS]])
                for N in counts[:-1]
            ]
            last = torch.stack([separability(_keep_heaviest(draw, TOP_N)).reshape(heads, -1) for draw in draws])
            parts["null"].append(torch.cat([*(by_draw.mean(0, keepdim=True) for by_draw in null), last]))
        means = {name: torch.cat(values, -1).nanmean(-1).double().cpu().numpy() for name, values in parts.items()}
        drawn = means.pop("null")
        for name, value in means.items():
            columns[name].append(value)
        columns["null"].append(np.concatenate([drawn[: len(SHARES)], drawn[len(SHARES) :].mean(0, keepdims=True)]))
        columns["chance"].append(np.quantile(drawn[len(SHARES) :], 0.95, axis=0))

    run_forward_pass(subject, length, on_call, progress, f"heaviest keys, {length:,} tokens")
    return HeadSeparability(**{name: np.concatenate(values, axis=-1) for name, values in columns.items()})


def selected(
    subject: ExperimentSubject, progress: ProgressCallback, separabilities: HeadSeparability, windows: tuple[int, int]
) -> Selected:
    names = {share: f"the heaviest {share:.0%} of the keys" for share in SHARES} | {1.0: AS_IT_RUNS}
    normalizers: dict[str, Normalizer | None] = {names[1.0]: None}
    normalizers |= {
        names[share]: topk(lambda n, part=share: torch.ceil(part * n).clamp(min=MIN_KEYS))  # type: ignore[misc]
        for share in SHARES
    }
    measured = losses(subject, progress, normalizers, windows_of(subject, *windows))
    mass, apart, null = (
        np.nanmedian(values[:-1], 1)
        for values in (separabilities.mass, separabilities.separability, separabilities.null)
    )
    return Selected(mass, apart, null, {share: measured[name] for share, name in names.items()})


def early_sign(before: HeadSeparability, after: HeadSeparability) -> EarlySign:
    columns = (before.entropy, after.entropy, before.separability[-1], after.separability[-1], after.chance)
    known = np.isfinite(np.stack(columns)).all(0)
    return EarlySign(*(values[known] for values in columns))


def cooled_and_covered(
    subject: ExperimentSubject, progress: ProgressCallback, length: int, rows: int
) -> tuple[Cooled, Covered]:
    """Measure in one pass separability and gradients at lower temperatures, and the joint coverage of three heads."""
    apart: list[Tensor] = []
    norms: list[Tensor] = []
    shares: list[tuple[float, float, float]] = []
    scales: list[float] = []

    def on_call(call: AttentionCall) -> None:
        scales.append(call.scale)
        by_block: list[tuple[Tensor, Tensor]] = []
        for block in logit_blocks(call, longest_rows(call, rows).to(call.query_BHQD.device), all_heads=True):
            by_temperature = []
            for T in TEMPERATURES:
                selected_rows = _select_rows(call, block, T)
                heads = block.logits.shape[0]
                norm = entmax_jacobian_norm(
                    selected_rows.weights.reshape(heads, -1, selected_rows.weights.shape[-1]), temperature=T
                )
                by_temperature.append((separability(selected_rows).reshape(heads, -1), norm))
                if T == 1.0:
                    shares.append(_measure_coverage(selected_rows, heads))
            by_block.append(
                (
                    torch.stack([separable for separable, _ in by_temperature]),
                    torch.stack([other for _, other in by_temperature]),
                )
            )
        apart.append(torch.cat([separable for separable, _ in by_block], -1).nanmean(-1).cpu())
        norms.append(torch.cat([other for _, other in by_block], -1).nanmean(-1).cpu())

    run_forward_pass(subject, length, on_call, progress, "cooled, and three heads together")
    alone, own, together = np.nanmean(shares, 0)
    return (
        Cooled(
            torch.cat(apart, -1).double().numpy(), torch.cat(norms, -1).double().numpy(), 1 / float(np.median(scales))
        ),
        Covered(float(alone), float(independent_coverage(float(alone), HEADS)), float(own), float(together)),
    )


def _select_rows(call: AttentionCall, block: LogitBlock, temperature: float) -> SelectedRows:
    """Select the top N keys of the block's rows at a temperature: (groups, heads of the group x rows, keys)."""
    visible = block.visible.expand(block.logits.shape)
    logits = torch.where(visible, block.logits / temperature, -torch.inf)
    weights = torch.softmax(logits, -1)
    x = at_least_float32(call.value_BGKE)[block.item, :, block.first_key : block.first_key + weights.shape[-1]]
    x = pad(x, (0, 0, 0, weights.shape[-1] - x.shape[-2]))
    groups = (len(x), -1, weights.shape[-1])
    return select(weights.reshape(groups), x, TOP_N, visible.reshape(groups), logits.reshape(groups))


def _keep_heaviest(rows: SelectedRows, top_n: int) -> SelectedRows:
    order = rows.weights if rows.log_weights is None else rows.log_weights
    return rows.with_indices(top_n_indices(order, top_n, rows.visible))


def _permute_weights(rows: SelectedRows, generator: torch.Generator) -> SelectedRows:
    """Permute the weights of each row over its visible keys."""
    scores = torch.rand(rows.visible.shape, generator=generator).to(rows.weights.device)
    logs = None if rows.log_weights is None else permute_weights(rows.log_weights, rows.visible, scores)
    return replace(rows, weights=permute_weights(rows.weights, rows.visible, scores), log_weights=logs)


def _measure_coverage(selected_rows: SelectedRows, heads: int) -> tuple[float, float, float]:
    """Return the coverage alone, of the first head's keys, and of all keys that three heads select; over triples."""
    shape = (heads, -1, selected_rows.weights.shape[-1])
    distinct, picked = distinguishable(selected_rows).reshape(shape), selected_rows.chosen.reshape(shape)  # (h, r, w)
    alone = float(separability(selected_rows).nanmean())
    own, together = [], []
    for three in _triples(heads):
        covered, selections = distinct[list(three)].transpose(0, 1), picked[list(three)].transpose(0, 1)  # (r, 3, w)
        own.append(float(union_coverage(covered, selections[:, 0]).union.nanmean()))
        together.append(float(union_coverage(covered, selections.any(1)).union.nanmean()))
    return alone, float(np.mean(own)), float(np.mean(together))


def _triples(heads: int) -> Sequence[tuple[int, ...]]:
    """Return evenly spaced triples of heads; fewer heads if a layer has less than three."""
    triples = list(combinations(range(heads), min(HEADS, heads)))
    return triples[:: max(1, len(triples) // MAX_TRIPLES)]


@dataclass(frozen=True)
class GuidelineNumbers:
    selected: Selected
    early: EarlySign
    cooled: Cooled
    covered: Covered


def measure(
    subject: ExperimentSubject, progress: ProgressCallback, length: int, rows: int, windows: tuple[int, int]
) -> GuidelineNumbers:
    before, after = (measure_separability(subject, progress, tokens, rows) for tokens in (length // 4, length))
    cooled, covered = cooled_and_covered(subject, progress, length, rows)
    return GuidelineNumbers(selected(subject, progress, after, windows), early_sign(before, after), cooled, covered)
