"""The logit spread of real heads: the table of Velickovic et al. 2024 for any models, beside Proposition 3.1.

The spread d = largest - smallest logit sets the ceiling: among n keys no weight exceeds 1/(1 + (n-1) e^-d). The paper's
table gives one number per model; over which rows and at which length our source does not say. So three readings stand
side by side: each head's last row, the mean of its longest rows, and the last row without the first key. And since the
spread grows with the length, several models are also compared at the longest context that all of them have.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attnorm.experiments.arrays import Floats
from attnorm.experiments.experiment import Experiment, Outcome, Subject, Tell
from attnorm.experiments.observed import longest_rows, look_at
from attnorm.experiments.spread_findings import judged, words
from attnorm.experiments.spread_table import READINGS, Spreads, heads_table, spread_table
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.normalized import MODEL
from attnorm.metrics.rows import measure_rows
from attnorm.models.projections import projections
from attnorm.models.support import attention_sites
from attnorm.theory.spread import proposition31_bound

LENGTHS, QUICK_LENGTH = (256, 512, 1024, 2048), 512  # the longest that there is text for
FIRST = 16  # keys: the shortest context that is told


def measure(subject: Subject, tell: Tell, length: int, rows: int) -> Spreads:
    modules = [module for module, _ in attention_sites(subject.loaded().model).items()]
    numbered = {getattr(module, "layer_idx", None): module for module in modules}
    at = lengths_up_to(length)
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

    name = subject.loaded().name
    look_at(subject, length, look, tell, f"spread of every head of {name}", inputs=True)
    joined = {name: np.concatenate(values) for name, values in found.items()}
    return Spreads(
        model=name,
        text=subject.passages()[0].name,
        layer=joined["layer"],
        head=joined["head"],
        readings={name: joined[name] for name in READINGS},
        bound=joined["bound"],
        n=at.astype(np.float64),
        against_n=joined["against_n"],
    )


def lengths_up_to(length: int) -> NDArray[np.int64]:
    """Half an octave apart whatever the last one is, so that models of different reach meet at the same lengths."""
    steps = FIRST * 2 ** (np.arange(2 * np.log2(length / FIRST)) / 2)
    return np.unique([*steps.round().astype(np.int64), length])


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
    rows = 16 if subject.quick else 64
    found, lengths = [], {}
    for one in subject.each():
        length = one.lengths((QUICK_LENGTH,) if subject.quick else LENGTHS)[-1]
        found.append(measure(one, tell, length, rows))
        lengths[found[-1].model] = length
    from attnorm.experiments.figures.spread import figure

    return Outcome(
        words=words(found),
        findings=judged(found),
        figures={"spread": figure(found)},
        tables={"spread": spread_table(found), "heads": heads_table(found)},
        parameters={"length": lengths, "rows": rows, "readings": READINGS, "seed": subject.seed},
    )


EXPERIMENT = Experiment(
    name="spread",
    title="The logit spread of real heads",
    source="Velickovic et al. 2024, table of logit spreads and Proposition 3.1",
    question="How large is the logit spread in practice, and how far is it from what the weights allow?",
    run=run,
    tokens=(LENGTHS[0], QUICK_LENGTH),
)
