"""Dispersion against context length: the rate test, and for how many heads the ceiling of softmax binds.

If dispersion were forced, the entropy of a head would climb to log n and the log-odds of its winner against the mean of
the others, the effective gap, would stay where they are: slope 0 on log n. Slope 1 keeps the largest weight at every
length. In a causal model one pass holds all shorter contexts, so every curve here comes from one pass, binned by n.

The same logits are measured as the model runs, among the keys beside the first (the sink), and from queries and keys
before their rotation to positions: what the content alone would select.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from attnorm.analysis import store
from attnorm.analysis.collect import Collector
from attnorm.analysis.settings import Settings, settings_of
from attnorm.experiments.dispersion_findings import judged, words
from attnorm.experiments.dispersion_reach import LENGTHS, QUICK_LENGTHS, reach, wanted
from attnorm.experiments.dispersion_tables import CONTENT, RUNS, bound_shares, head_table, kv_effect
from attnorm.experiments.experiment import Experiment, Outcome, Subject, Tell
from attnorm.experiments.observed import look_at
from attnorm.metrics.call import AttentionCall
from attnorm.models.positions import longest_context
from attnorm.models.rotation import before_rotation

TABLES = ("heads", "by_length")


@dataclass(frozen=True)
class Pass:
    """What one pass of a length gave: for each variant the heads and the curves against n."""

    length: int
    variants: Mapping[str, Mapping[str, pa.Table]]  # RUNS, and CONTENT where the model rotates


def measure(subject: Subject, tell: Tell, length: int, rows: int, folder: Path) -> Pass:
    """One pass; its tables are kept in the folder and read from there when they are complete."""
    done = folder / f"{length}-{rows}"
    if (done / "finished").exists():
        names = [variant for variant in (RUNS, CONTENT) if (done / f"{variant}-heads.parquet").exists()]
        return Pass(
            length, {one: {name: store.read_table(done / f"{one}-{name}.parquet") for name in TABLES} for one in names}
        )
    settings = _settings(rows, subject.seed)
    runs, content = (Collector(settings, {"model": None}, {}, lambda _: None) for _ in range(2))
    rotated = False
    with before_rotation(subject.loaded().model) as before:

        def look(call: AttentionCall) -> None:
            nonlocal rotated
            runs(call)
            plain = before.of(call)
            if plain is not None:
                content(plain)
                rotated = True

        look_at(subject, length, look, tell, f"{length:,} tokens")
    found = {RUNS: runs, CONTENT: content} if rotated else {RUNS: runs}
    name = subject.passages()[0].name
    variants = {
        one: {table: collector.tables(name, length)[table] for table in TABLES} for one, collector in found.items()
    }
    done.mkdir(parents=True, exist_ok=True)
    for one, tables in variants.items():
        for table, content_of in tables.items():
            store.write_table(done / f"{one}-{table}.parquet", content_of)
    (done / "finished").touch()
    return Pass(length, variants)


def run(subject: Subject, tell: Tell, parts: Path) -> Outcome:
    limit, hard = longest_context(subject.loaded().model)
    quick, longest = subject.quick, subject.longest
    main = subject.lengths(wanted(limit, quick=quick, longest=longest))[-1]
    tokens = subject.tokens(max(2 * (limit or main), longest or 0))
    name = subject.loaded().name
    far = reach(main, limit, hard=hard, tokens=tokens, quick=quick, longest=longest, model=name)
    rows = 96 if subject.quick else 384
    passes = [measure(subject, tell, main, rows, parts)]
    if far.beyond is not None:
        passes.append(measure(subject, tell, far.beyond, rows // 2, parts))
    heads = {(one.length, variant): head_table(tables) for one in passes for variant, tables in one.variants.items()}
    curves = {(one.length, name): tables["by_length"] for one in passes for name, tables in one.variants.items()}
    ceilings = bound_shares(heads, curves)
    groups = kv_effect(heads[main, RUNS], np.random.default_rng(subject.seed))
    from attnorm.experiments.figures.dispersion import by_layer, overview

    findings = judged(heads, curves, ceilings, groups, far)
    about = f"{name}, {subject.passages()[0].name}, {main:,} tokens, {rows} rows per head, binned by n"
    curve = curves[main, RUNS]
    return Outcome(
        words=words(heads, ceilings, far),
        findings=findings,
        figures={
            "dispersion": overview(heads, curves, ceilings, main, about),
            "entropy-by-layer": by_layer(curve, heads[main, RUNS], "entropy", about),
            "gap-by-layer": by_layer(curve, heads[main, RUNS], "gap", about),
        },
        tables={"heads": _joined(heads), "by-length": _joined(curves), "ceiling": ceilings},
        parameters={
            "lengths": [one.length for one in passes],
            "rows": rows,
            "rows_beyond": rows // 2,
            "made_for": limit,
            "reach": far.told,
            "rotation": "measured" if (main, CONTENT) in heads else "not applicable: the model does not rotate",
            "key_value_groups": groups,
            "seed": subject.seed,
        },
    )


def _settings(rows: int, seed: int) -> Settings:
    return settings_of(
        normalizers={"model": None}, top_n=(1,), rows=rows, vectors="values", vector_rows=None, metrics="core",
        temperatures=(1.0,), seed=seed,
    )  # fmt: skip


def _joined(tables: Mapping[tuple[int, str], pa.Table]) -> pa.Table:
    named: list[Any] = []
    for (_, variant), table in tables.items():
        column = pa.array([variant] * table.num_rows)
        named.append(table.add_column(0, "logits", column))
    return pa.concat_tables(named)


EXPERIMENT = Experiment(
    name="dispersion",
    title="Dispersion against context length",
    source="Velickovic et al. 2024, Lemma 2.1 and Theorem 2.2; the rate test asked for in comments on Mudarisov et "
    "al. 2025",
    question="Does attention disperse at the rate that theory predicts, and for how many heads does the ceiling bind?",
    run=run,
    tokens=(LENGTHS[0], QUICK_LENGTHS[0]),
    passing=True,
)
