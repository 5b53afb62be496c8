"""Adaptive temperature on real heads: where the printed polynomial acts, and the effect of a re-fit or monotone form.

Velickovic et al. 2024 multiply the logits of a row by beta(H), a polynomial of the row's entropy H, fitted on a toy
task. It exceeds 1 only for 0.849 < H < 5.945 nats (`REACH`). Rows as flat as uniform over more than 381 keys
(`MOST_KEYS`), the most dispersed ones, are not changed. The re-fit uses this model's rows: the smallest factor at which
the winner of a row has half of the weight.
"""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from attnorm.experiments.adaptive.figure import figure
from attnorm.experiments.adaptive.measure import (
    KEEP,
    MOST_KEYS,
    PRINTED,
    REACH,
    REFIT,
    Adaptive,
    acting,
    measure,
)
from attnorm.experiments.experiment import (
    Experiment,
    ExperimentFinding,
    ExperimentSubject,
    Outcome,
    ProgressCallback,
    Verdict,
)
from attnorm.experiments.losses import AS_IT_RUNS, weighed
from attnorm.normalizers.adaptive_temperature import LEAST_ENTROPY, EntropyRule

LENGTHS, QUICK_LENGTH = (512, 1024, 2048), 512  # the longest that there is text for
WINDOWS, QUICK_WINDOWS = 8, 3  # stretches of the text on which losses are measured
LITTLE, MUCH = 0.01, 0.1  # nats per token: acceptable and unacceptable cost of a drop-in replacement


def run(subject: ExperimentSubject, progress: ProgressCallback, parts: Path) -> Outcome:
    length = subject.lengths((QUICK_LENGTH,) if subject.quick else LENGTHS)[-1]
    rows = 12 if subject.quick else 32
    windows = (256, QUICK_WINDOWS) if subject.quick else (min(length, 1024), WINDOWS)
    found = measure(subject, progress, length, rows, windows)

    text = subject.passages()[0].name
    about = f"{subject.loaded().name}, {text}, {len(found.n):,} rows of up to {length:,} keys, all heads"
    return Outcome(
        summary=_summary(found),
        findings=judge_claims(found),
        figures={"adaptive": figure(found, about)},
        tables={"versions": table(found), "rows": _rows(found)},
        parameters={
            "length": length, "rows_per_head": rows, "windows": windows, "keep": KEEP, "seed": subject.seed,
            "coefficients": {name: rule.coefficients for name, rule in found.rules.items()},
        },
    )  # fmt: skip


def judge_claims(found: Adaptive) -> tuple[ExperimentFinding, ...]:
    low, high = REACH
    H, long = found.entropy, found.n > MOST_KEYS
    shares = [float(np.mean(part)) for part in (low >= H, (low < H) & (high > H), high <= H)]
    reached = bool(long.any()) and float(np.mean(H[long] >= high)) <= 0.01
    after = {name: float(np.median(values[1])) for name, values in found.after.items()}
    harm, how_sure = weighed(found.change(PRINTED), LITTLE, MUCH)
    too_flat = (
        f"{float(np.mean(H[long] >= high)):.0%} of the rows of more than {MOST_KEYS} keys are too flat for it"
        if long.any()
        else f"no row has more than {MOST_KEYS} keys"
    )
    verdict: Verdict = "reproduces" if shares[1] > 0.8 else "partly" if shares[1] > 0.3 else "does not"
    beta_at_3 = {name: float(rule.beta(torch.tensor(3.0, dtype=torch.float64))) for name, rule in found.rules.items()}
    return (
        ExperimentFinding(
            claim="Adaptive temperature corrects rows whose entropy is above 0.5 nats (algorithm of [V])",
            ours=f"the printed polynomial exceeds 1 for {low:.3f} < H < {high:.3f} nats: {shares[1]:.0%} of the rows; "
            f"{shares[0]:.0%} are sharper, {shares[2]:.0%} flatter and left as they are",
            verdict=verdict,
            why="a polynomial of degree 4 with a negative leading coefficient falls again: uniform over more than "
            f"{MOST_KEYS} keys is not corrected",
        ),
        ExperimentFinding(
            claim="It delays dispersion, most in long contexts [V]",
            ours=f"{too_flat}; the median largest weight goes from {float(np.median(found.largest)):.2f} to "
            f"{after[PRINTED]:.2f} (printed), {after[REFIT]:.2f} (re-fit)",
            verdict="reproduces" if reached else "partly",
            why="the rows that need it most are beyond its reach; a monotone extension reaches them",
        ),
        ExperimentFinding(
            claim="The polynomial was fitted on one toy task and may not carry over (limitations of [V])",
            ours=f"fitted to this model's rows it acts {_where(found.rules[REFIT])}; its beta at H = 3 is "
            f"{beta_at_3[REFIT]:.2f}, the printed one's {beta_at_3[PRINTED]:.2f}",
            verdict="reproduces",
            why="how much a row must be sharpened depends on its gap, which the entropy determines only in part",
        ),
        ExperimentFinding(
            claim="A drop-in replacement at inference (highlights of [V])",
            ours=f"loss {float(found.losses[AS_IT_RUNS].mean()):.3f} nats per token as it runs; it changes by "
            + ", ".join(f"{found.change(name)} ({name})" for name in found.rules)
            + f" ({how_sure}, of the printed one)",
            verdict=harm,
            why="heads that average on purpose are sharpened too; it needs training, as the notes on [V] say of "
            "complex tasks, or a choice of heads",
        ),
    )  # fmt: skip


def _where(rule: EntropyRule) -> str:
    phrases = [f"from {a:.2f} nats on" if math.isinf(b) else f"for {a:.2f} to {b:.2f} nats" for a, b in acting(rule)]
    return " and ".join(phrases) or "nowhere"


def table(found: Adaptive) -> pa.Table:
    """Return one row per version of the polynomial."""
    rows = []
    for name, rule in found.rules.items():
        beta = rule.beta(torch.from_numpy(found.entropy)).numpy()
        where = acting(rule)
        rows.append(
            {
                "version": name, "coefficients": str(tuple(round(c, 4) for c in rule.coefficients)),
                "acts_from_nats": where[0][0] if where else float("nan"),
                "acts_to_nats": where[-1][1] if where else float("nan"),
                "rows_it_acts_on": float(np.mean(beta > 1)), "largest_beta": float(beta.max()),
                "median_entropy_after": float(np.median(found.after[name][0])),
                "median_largest_weight_after": float(np.median(found.after[name][1])),
                "loss": float(found.losses[name].mean()), "loss_as_it_runs": float(found.losses[AS_IT_RUNS].mean()),
                "change": found.change(name).value, "change_error": found.change(name).error,
                "windows": len(found.losses[name]),
            }
        )  # fmt: skip
    return pa.Table.from_pylist(rows)


def _rows(found: Adaptive) -> pa.Table:
    columns = {"n": found.n, "entropy_nats": found.entropy, "max_weight": found.largest}
    for name, (entropy, largest) in found.after.items():
        columns |= {f"entropy_nats {name}": entropy, f"max_weight {name}": largest}
    return pa.table(columns)


def _summary(found: Adaptive) -> str:
    low, high = REACH
    H = found.entropy
    return (
        f"The printed polynomial acts on {np.mean((low < H) & (high > H)):.0%} of {len(H):,} rows; "
        f"{np.mean(high <= H):.0%} are flatter than its upper end of {high:.2f} nats and stay as they are, "
        f"{np.mean(H <= LEAST_ENTROPY):.0%} are sharp already. In all layers without training it changes the "
        f"loss of {float(found.losses[AS_IT_RUNS].mean()):.3f} nats per token by {found.change(PRINTED)}, fitted to "
        f"this model's own rows by {found.change(REFIT)} (mean ± standard error of "
        f"{len(found.losses[AS_IT_RUNS])} windows): most flat heads have a reason to be flat."
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
