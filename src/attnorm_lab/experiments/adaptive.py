"""Adaptive temperature on real heads: where the printed polynomial acts, and the effect of a re-fit or monotone form.

Velickovic et al. 2024 multiply the logits of a row by beta(H), a polynomial of the row's entropy H, fitted on a toy
task. It exceeds 1 only for 0.849 < H < 5.945 nats (`REACH`). Rows as flat as uniform over more than 381 keys
(`MAX_KEYS`), the most dispersed ones, are not changed. The re-fit uses this model's rows: the smallest factor at which
the winner of a row has half of the weight.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from attnorm.normalizers.adaptive_temperature import MIN_ENTROPY, EntropyRule, adaptive_temperature, fit
from attnorm.normalizers.adaptive_temperature import PRINTED as PRINTED_COEFFICIENTS
from attnorm.normalizers.contract import Normalizer
from attnorm.theory.dispersion import entropy_nats
from attnorm_lab.experiments.experiment import (
    Experiment,
    ExperimentFinding,
    ExperimentSubject,
    Floats,
    Outcome,
    ProgressCallback,
    judge,
)
from attnorm_lab.experiments.model_runs import (
    AS_IT_RUNS,
    SampledRows,
    WindowMean,
    judge_loss_change,
    losses,
    mean,
    sample_rows,
    windows_of,
)

LENGTHS, QUICK_LENGTH = (512, 1024, 2048), 512  # the longest that there is text for
WINDOWS, QUICK_WINDOWS = 8, 3  # windows of the text for the losses
LITTLE, MUCH = 0.01, 0.1  # nats per token: acceptable and unacceptable cost of a drop-in replacement
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
    fit_rows = rows.where(torch.randperm(len(rows.n), generator=generator)[:FIT_ROWS])
    fit_rows = fit_rows.where(fit_rows.n > 2)
    fitted = fit(fit_rows.logits, mask=fit_rows.visible, keep=KEEP)
    rules = {}
    for name, coefficients in ((PRINTED, PRINTED_COEFFICIENTS), (REFIT, fitted)):
        rules[name] = EntropyRule(coefficients)
        rules[MONOTONE[name]] = EntropyRule(coefficients, monotone=True)
    return rules


def acting_intervals(rule: EntropyRule) -> list[tuple[float, float]]:
    """Return the intervals of entropy with beta > 1; one that reaches e^12 keys ends at infinity."""
    H = torch.linspace(0, 12.0, 12_001, dtype=torch.float64)
    above = (rule.beta(H) > 1).numpy()
    edges = np.flatnonzero(np.diff(np.concatenate([[False], above, [False]]).astype(int)))
    return [(float(H[a]), float(H[b]) if b < len(H) else math.inf) for a, b in edges.reshape(-1, 2)]


REACH = acting_intervals(EntropyRule())[0]  # of the printed polynomial, in nats
MAX_KEYS = int(math.exp(REACH[1]))  # beyond it uniform rows are not corrected


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
    normalizers: dict[str, Normalizer | None] = {AS_IT_RUNS: None}
    normalizers |= {
        name: adaptive_temperature(rule.coefficients, monotone=rule.monotone) for name, rule in rules.items()
    }
    losses_by_name = losses(subject, progress, normalizers, windows_of(subject, *windows))
    return Adaptive(
        n=sampled.n.double().numpy(),
        entropy=entropy.double().numpy(),
        largest=plain.amax(-1).double().numpy(),
        after=after,
        rules=rules,
        losses=losses_by_name,
    )


def _softmax(rows: SampledRows, factor: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.where(rows.visible, rows.logits * factor.unsqueeze(-1), -torch.inf), -1)


def run(subject: ExperimentSubject, progress: ProgressCallback, parts: Path) -> Outcome:
    length = subject.longest_length(LENGTHS, QUICK_LENGTH)
    rows = 12 if subject.quick else 32
    windows = (256, QUICK_WINDOWS) if subject.quick else (min(length, 1024), WINDOWS)
    adaptive = measure(subject, progress, length, rows, windows)
    return Outcome(
        summary=_summary(adaptive),
        findings=judge_claims(adaptive),
        figures={},
        tables={"versions": table(adaptive), "rows": _rows_table(adaptive)},
        parameters={
            "length": length, "rows_per_head": rows, "windows": windows, "keep": KEEP, "seed": subject.seed,
            "coefficients": {name: rule.coefficients for name, rule in adaptive.rules.items()},
        },
    )  # fmt: skip


def judge_claims(adaptive: Adaptive) -> tuple[ExperimentFinding, ...]:
    low, high = REACH
    H, long = adaptive.entropy, adaptive.n > MAX_KEYS
    shares = [float(np.mean(part)) for part in (low >= H, (low < H) & (high > H), high <= H)]
    reached = bool(long.any()) and float(np.mean(H[long] >= high)) <= 0.01
    after = {name: float(np.median(values[1])) for name, values in adaptive.after.items()}
    harm, how_sure = judge_loss_change(adaptive.change(PRINTED), LITTLE, MUCH)
    too_flat = (
        f"{float(np.mean(H[long] >= high)):.0%} of the rows of more than {MAX_KEYS} keys are too flat for it"
        if long.any()
        else f"no row has more than {MAX_KEYS} keys"
    )
    verdict = judge(shares[1] > 0.8, partly=shares[1] > 0.3)
    beta_at_3 = {
        name: float(rule.beta(torch.tensor(3.0, dtype=torch.float64))) for name, rule in adaptive.rules.items()
    }
    return (
        ExperimentFinding(
            claim="Adaptive temperature corrects rows whose entropy is above 0.5 nats (algorithm of [V])",
            ours=f"the printed polynomial exceeds 1 for {low:.3f} < H < {high:.3f} nats: {shares[1]:.0%} of the rows; "
            f"{shares[0]:.0%} are sharper, {shares[2]:.0%} flatter and left as they are",
            verdict=verdict,
            why="a polynomial of degree 4 with a negative leading coefficient falls again: uniform over more than "
            f"{MAX_KEYS} keys is not corrected",
        ),
        ExperimentFinding(
            claim="It delays dispersion, most in long contexts [V]",
            ours=f"{too_flat}; the median largest weight changes from {float(np.median(adaptive.largest)):.2f} to "
            f"{after[PRINTED]:.2f} (printed), {after[REFIT]:.2f} (re-fit)",
            verdict=judge(reached, partly=True),
            why="the rows that need it most are beyond its reach; a monotone extension reaches them",
        ),
        ExperimentFinding(
            claim="The polynomial was fitted on one toy task and may not carry over (limitations of [V])",
            ours=f"fitted to this model's rows it acts {_describe_intervals(adaptive.rules[REFIT])}; its beta at H = "
            f"3 is {beta_at_3[REFIT]:.2f}, the printed one's {beta_at_3[PRINTED]:.2f}",
            verdict="reproduces",
            why="how much a row must be sharpened depends on its gap, which the entropy determines only in part",
        ),
        ExperimentFinding(
            claim="A drop-in replacement at inference (highlights of [V])",
            ours=f"loss {float(adaptive.losses[AS_IT_RUNS].mean()):.3f} nats per token as it runs; it changes by "
            + ", ".join(f"{adaptive.change(name)} ({name})" for name in adaptive.rules)
            + f" ({how_sure}, of the printed one)",
            verdict=harm,
            why="heads that average on purpose are sharpened too; it needs training, as the notes on [V] say of "
            "complex tasks, or a choice of heads",
        ),
    )  # fmt: skip


def _describe_intervals(rule: EntropyRule) -> str:
    phrases = [
        f"from {a:.2f} nats on" if math.isinf(b) else f"for {a:.2f} to {b:.2f} nats" for a, b in acting_intervals(rule)
    ]
    return " and ".join(phrases) or "nowhere"


def table(adaptive: Adaptive) -> pa.Table:
    """Return one row per version of the polynomial."""
    rows = []
    for name, rule in adaptive.rules.items():
        beta = rule.beta(torch.from_numpy(adaptive.entropy)).numpy()
        where = acting_intervals(rule)
        rows.append(
            {
                "version": name, "coefficients": str(tuple(round(c, 4) for c in rule.coefficients)),
                "acts_from_nats": where[0][0] if where else float("nan"),
                "acts_to_nats": where[-1][1] if where else float("nan"),
                "rows_it_acts_on": float(np.mean(beta > 1)), "largest_beta": float(beta.max()),
                "median_entropy_after": float(np.median(adaptive.after[name][0])),
                "median_largest_weight_after": float(np.median(adaptive.after[name][1])),
                "loss": float(adaptive.losses[name].mean()),
                "loss_as_it_runs": float(adaptive.losses[AS_IT_RUNS].mean()),
                "change": adaptive.change(name).value, "change_error": adaptive.change(name).error,
                "windows": len(adaptive.losses[name]),
            }
        )  # fmt: skip
    return pa.Table.from_pylist(rows)


def _rows_table(adaptive: Adaptive) -> pa.Table:
    columns = {"n": adaptive.n, "entropy_nats": adaptive.entropy, "max_weight": adaptive.largest}
    for name, (entropy, largest) in adaptive.after.items():
        columns |= {f"entropy_nats {name}": entropy, f"max_weight {name}": largest}
    return pa.table(columns)


def _summary(adaptive: Adaptive) -> str:
    low, high = REACH
    H = adaptive.entropy
    return (
        f"The printed polynomial acts on {np.mean((low < H) & (high > H)):.0%} of {len(H):,} rows; "
        f"{np.mean(high <= H):.0%} are flatter than its upper end of {high:.2f} nats and stay as they are, "
        f"{np.mean(H <= MIN_ENTROPY):.0%} are sharp already. In all layers without training it changes the "
        f"loss of {float(adaptive.losses[AS_IT_RUNS].mean()):.3f} nats per token by {adaptive.change(PRINTED)}, "
        f"fitted to this model's own rows by {adaptive.change(REFIT)} (mean ± standard error of "
        f"{len(adaptive.losses[AS_IT_RUNS])} windows): most flat heads have a reason to be flat."
    )


EXPERIMENT = Experiment(
    name="adaptive",
    title="Where adaptive temperature acts",
    source="Velickovic et al. 2024, adaptive temperature",
    question="On which rows of real heads does the printed polynomial act, and what would a re-fit or a monotone one "
    "do?",
    run=run,
    tokens=(LENGTHS[0], QUICK_LENGTH),
)
