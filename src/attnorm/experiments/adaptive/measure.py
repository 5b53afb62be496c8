"""Measure adaptive temperature: four versions of the polynomial, what they do to real rows, and the loss."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from attnorm.experiments.attention_rows import SampledRows, sample_rows
from attnorm.experiments.experiment import ExperimentSubject, Floats, ProgressCallback
from attnorm.experiments.losses import AS_IT_RUNS, WindowMean, losses, mean, windows_of
from attnorm.normalizers.adaptive_temperature import PRINTED as PRINTED_COEFFICIENTS
from attnorm.normalizers.adaptive_temperature import EntropyRule, adaptive_temperature, fit
from attnorm.normalizers.contract import Normalizer
from attnorm.theory.dispersion import entropy_nats

KEEP = 0.5  # target weight of a row's winner in the re-fit
FIT_ROWS = 4096
PRINTED, REFIT = "printed", "re-fit"
MONOTONE = {PRINTED: "printed, monotone", REFIT: "re-fit, monotone"}


@dataclass(frozen=True)
class Adaptive:
    """Rows of real heads: number of keys, entropy in the unchanged model, and entropy and largest weight by version."""

    n: Floats
    entropy: Floats
    largest: Floats
    after: dict[str, tuple[Floats, Floats]]
    rules: dict[str, EntropyRule]
    losses: dict[str, Floats]  # by window, nats per token, AS_IT_RUNS among them

    def change(self, name: str) -> WindowMean:
        return mean(self.losses[name] - self.losses[AS_IT_RUNS])


def versions(rows: SampledRows, seed: int) -> dict[str, EntropyRule]:
    """Return the polynomials by name: printed and re-fit to these rows, both also in a monotone form."""
    generator = torch.Generator().manual_seed(seed)
    some = rows.where(torch.randperm(len(rows.n), generator=generator)[:FIT_ROWS])
    some = some.where(some.n > 2)
    fitted = fit(some.logits, mask=some.visible, keep=KEEP)
    rules = {}
    for name, coefficients in ((PRINTED, PRINTED_COEFFICIENTS), (REFIT, fitted)):
        rules[name] = EntropyRule(coefficients)
        rules[MONOTONE[name]] = EntropyRule(coefficients, monotone=True)
    return rules


def acting(rule: EntropyRule, highest: float = 12.0) -> list[tuple[float, float]]:
    """Return the intervals of entropy with beta > 1; one that reaches the highest, e^12 keys, ends at infinity."""
    H = torch.linspace(0, highest, 12_001, dtype=torch.float64)
    above = (rule.beta(H) > 1).numpy()
    edges = np.flatnonzero(np.diff(np.concatenate([[False], above, [False]]).astype(int)))
    return [(float(H[a]), float(H[b]) if b < len(H) else math.inf) for a, b in edges.reshape(-1, 2)]


REACH = acting(EntropyRule())[0]  # of the printed polynomial, in nats
MOST_KEYS = int(math.exp(REACH[1]))  # beyond it uniform rows are not corrected


def measure(
    subject: ExperimentSubject, progress: ProgressCallback, length: int, rows: int, windows: tuple[int, int]
) -> Adaptive:
    sampled = sample_rows(subject, progress, length, rows)
    sampled = sampled.where(sampled.n > 1)
    rules = versions(sampled, subject.seed)
    plain = _softmax(sampled, torch.ones(len(sampled.n)))
    entropy = entropy_nats(plain)
    after = {}
    for name, rule in rules.items():
        weights = _softmax(sampled, rule.beta(entropy.double()).to(entropy.dtype))
        after[name] = entropy_nats(weights).double().numpy(), weights.amax(-1).double().numpy()
    wanted: dict[str, Normalizer | None] = {AS_IT_RUNS: None}
    wanted |= {name: adaptive_temperature(rule.coefficients, monotone=rule.monotone) for name, rule in rules.items()}
    found = losses(subject, progress, wanted, windows_of(subject, *windows))
    return Adaptive(
        n=sampled.n.double().numpy(),
        entropy=entropy.double().numpy(),
        largest=plain.amax(-1).double().numpy(),
        after=after,
        rules=rules,
        losses=found,
    )


def _softmax(rows: SampledRows, factor: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.where(rows.visible, rows.logits * factor.unsqueeze(-1), -torch.inf), -1)
