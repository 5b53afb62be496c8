"""The logit spread of real heads: the table of Velickovic et al. 2024 for any model, beside Proposition 3.1.

The spread d = largest - smallest logit sets the ceiling: among n keys no weight exceeds 1/(1 + (n-1) e^-d). The paper's
table gives one number per model; over which rows and at which length our source does not say. So three readings stand
side by side: each head's last row, the mean of its longest rows, and the last row without the first key.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from attnorm.analysis.head_rows import keys
from attnorm.experiments.experiment import Experiment, Finding, Outcome, Subject, Tell, Verdict
from attnorm.experiments.observed import longest_rows, look_at
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.normalized import MODEL
from attnorm.metrics.rows import measure_rows
from attnorm.models.projections import projections
from attnorm.models.support import attention_sites
from attnorm.theory.dispersion import horizon
from attnorm.theory.spread import proposition31_bound

# Velickovic et al. 2024: range, mean and standard deviation over heads.
PRINTED = {"Gemma 2B": (2.28, 14.78, 5.69, 2.05), "Gemma 7B": (0.09, 32.74, 5.82, 2.61)}
READINGS = {
    "last": "last row",
    "mean": "mean of the longest rows",
    "last_without_sink": "last row, first key left out",
}
NEAR = 12.0  # nats: a horizon of 160,000 keys, contexts of today

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Spreads:
    """One number per head, and (heads, lengths) against the number of keys."""

    layer: Floats
    head: Floats
    readings: dict[str, Floats]
    bound: Floats  # Proposition 3.1 at the last row; NaN where the projections cannot be read
    n: Floats
    against_n: Floats


def measure(subject: Subject, tell: Tell, length: int, rows: int) -> Spreads:
    modules = [module for module, _ in attention_sites(subject.loaded().model).items()]
    numbered = {getattr(module, "layer_idx", None): module for module in modules}
    at = np.unique(np.geomspace(16, length, 13).round().astype(int))
    found: dict[str, list[Floats]] = {name: [] for name in ("layer", "head", "bound", "against_n", *READINGS)}

    def look(call: AttentionCall) -> None:
        long = longest_rows(call, rows)
        wanted = torch.unique(torch.cat([long, torch.from_numpy(at) - 1]))
        values = measure_rows(call, [None], wanted, (1,))[MODEL].values
        spread, rest = (
            values[name][0].double().cpu().numpy() for name in ("logit_spread", "logit_spread_without_sink")
        )
        heads = len(spread)
        found["layer"].append(np.full(heads, call.layer, dtype=np.float64))
        found["head"].append(np.arange(heads, dtype=np.float64))
        found["last"].append(spread[:, -1])
        found["mean"].append(np.nanmean(spread[:, torch.isin(wanted, long).numpy()], 1))
        found["last_without_sink"].append(rest[:, -1])
        found["against_n"].append(spread[:, torch.isin(wanted, torch.from_numpy(at) - 1).numpy()])
        found["bound"].append(_bound(call, numbered.get(call.layer, modules[min(call.layer, len(modules) - 1)])))

    look_at(subject, length, look, tell, "spread of every head", inputs=True)
    joined = {name: np.concatenate(values) for name, values in found.items()}
    return Spreads(
        layer=joined["layer"],
        head=joined["head"],
        readings={name: joined[name] for name in READINGS},
        bound=joined["bound"],
        n=at.astype(np.float64),
        against_n=joined["against_n"],
    )


def _bound(call: AttentionCall, module: Any) -> Floats:
    made = projections(module, call)
    heads = call.query_BHQD.shape[1]
    if made is None or call.inputs_BKC is None or call.bias is not None or call.softcap is not None:
        return np.full(heads, np.nan)
    x = call.inputs_BKC[0].float()
    bound = proposition31_bound(
        made.query_weight, made.key_weight, x[-1:], x, query_bias=made.query_bias, key_bias=made.key_bias,
        scaling=call.scale,
    )  # fmt: skip
    return bound[:, 0].double().cpu().numpy()


def run(subject: Subject, tell: Tell, parts: Path) -> Outcome:
    length = subject.lengths((512,) if subject.quick else (256, 512, 1024, 2048))[-1]
    rows = 16 if subject.quick else 64
    found = measure(subject, tell, length, rows)
    from attnorm.experiments.figures.spread import figure

    name = subject.loaded().name
    about = f"{name}, {subject.passages()[0].name}, {length:,} tokens, {len(found.head)} heads"
    return Outcome(
        words=_words(found, name),
        findings=judged(found),
        figures={"spread": figure(found, name, about)},
        tables={"spread": summary(found, name), "heads": table(found)},
        parameters={"length": length, "rows": rows, "readings": READINGS, "seed": subject.seed},
    )


def summary(found: Spreads, name: str) -> pa.Table:
    """The paper's table, its models first, then ours in every reading."""
    rows: list[dict[str, Any]] = [
        {"model": model, "reading": "as printed", "smallest": a, "largest": b, "mean": mean, "deviation": std}
        for model, (a, b, mean, std) in PRINTED.items()
    ]
    for reading, meaning in READINGS.items():
        values = found.readings[reading]
        rows.append(
            {
                "model": name, "reading": meaning, "smallest": float(values.min()), "largest": float(values.max()),
                "mean": float(values.mean()), "deviation": float(values.std()),
            }
        )  # fmt: skip
    for row in rows:
        row["horizon_of_mean"] = float(horizon(row["mean"]))
    return pa.Table.from_pylist(rows)


def table(found: Spreads) -> pa.Table:
    return pa.table(
        {
            "layer": found.layer.astype(np.int64), "head": found.head.astype(np.int64),
            **{f"spread_{name}": values for name, values in found.readings.items()},
            "proposition31_bound": found.bound,
            **{f"spread_at_{n:.0f}": found.against_n[:, place] for place, n in enumerate(found.n)},
        }
    )  # fmt: skip


def judged(found: Spreads) -> tuple[Finding, ...]:
    last = found.readings["last"]
    inside = 5.69 - 2.05 <= last.mean() <= 5.82 + 2.61
    growth = np.polyfit(np.log(found.n), np.nanmean(found.against_n, 0), 1)[0]
    told = "; ".join(
        f"{found.readings[name].mean():.2f} ± {found.readings[name].std():.2f} ({meaning})"
        for name, meaning in READINGS.items()
    )
    verdict: Verdict = "reproduces" if inside else "partly" if last.mean() < 5.82 + 3 * 2.61 else "does not"
    return (
        Finding(
            claim="The logit spread of real heads is small: Gemma 2B 5.69 ± 2.05, Gemma 7B 5.82 ± 2.61 [V]",
            ours=f"{told} nats; range {last.min():.2f} to {last.max():.2f}",
            verdict=verdict,
            why=f"it is no constant of a model: it grows by {growth:.2f} nats per e-fold of n, so a table without a "
            "length says little",
        ),
        _proposition(found, last),
        Finding(
            claim="... far below what floating point allows, so dispersion comes sooner than in the worst case (notes "
            "on [V])",
            ours=f"the mean spread has its horizon at {keys(float(horizon(float(last.mean()))))} keys; half of the "
            f"heads have theirs below {keys(float(horizon(float(np.median(last)))))}",
            verdict="reproduces" if float(np.median(last)) < NEAR else "partly",
            why="sooner is not soon: beyond the horizon 1 + e^spread no key can have half of the weight, before it the "
            "spread forbids nothing",
        ),
    )


def _proposition(found: Spreads, last: Floats) -> Finding:
    claim = "Spread <= 2 smax(Q) smax(K) ||y|| max ||x|| (Proposition 3.1 [V])"
    known = ~np.isnan(found.bound)
    if not known.any():
        return Finding(claim, "not applicable: q and k of this model are not its input times a matrix", "not tested")
    ratio = found.bound[known] / last[known]
    broken = int((ratio < 1).sum())
    return Finding(
        claim=claim,
        ours=f"holds in {int(known.sum()) - broken} of {int(known.sum())} heads; the bound is {np.median(ratio):.0f} "
        f"times the spread in the median head (smallest {ratio.min():.1f}, largest {ratio.max():.0f})",
        verdict="reproduces" if not broken else "does not",
        why="norms multiply what never points the same way; RoPE changes no norm, so the bound stays",
    )


def _words(found: Spreads, name: str) -> str:
    last = found.readings["last"]
    return (
        f"In the last row the {len(last)} heads of {name} have a logit spread of {last.mean():.2f} ± "
        f"{last.std():.2f} nats; the paper has 5.69 ± 2.05 for Gemma 2B and 5.82 ± 2.61 for Gemma 7B. The spread "
        f"grows with the context, from {np.nanmean(found.against_n[:, 0]):.1f} at {found.n[0]:.0f} keys to "
        f"{np.nanmean(found.against_n[:, -1]):.1f} at {found.n[-1]:,.0f}, as the extremes of more numbers do."
    )


EXPERIMENT = Experiment(
    name="spread",
    title="The logit spread of real heads",
    source="Velickovic et al. 2024, table of logit spreads and Proposition 3.1",
    question="How large is the logit spread in practice, and how far is it from what the weights allow?",
    run=run,
)
