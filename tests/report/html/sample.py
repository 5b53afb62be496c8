"""Analyses for the tests of the report: small, of GPT-2's size, with the core group only, with hostile names."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from attnorm.analysis.tables import SCHEMAS
from attnorm.analysis.verdicts import Thresholds, judge_all, model_verdict, representative_rows
from attnorm.analysis.verdicts.rows import head_rows
from attnorm.report_data import ReportData
from tests.analysis.synthetic import synthetic_manifest, synthetic_tables

CAST = (
    ("flat", "lazy", "selects", "torn"),
    ("selects", "certain", "parked", "muddled"),
    ("selects beside a sink", "smeared beside a sink", "selects", "broken"),
)
HOSTILE = '</script><img src=x onerror="window.hurt=1"><script>window.hurt=1</script>\'"&{{7*7}} 🦉 \u202eשלום\u2028'


@cache
def sample() -> ReportData:
    """12 heads of every verdict, two texts, two lengths, two normalizers."""
    options: dict[str, Any] = {
        "cast": CAST, "texts": ("prose", "code"), "lengths": (64, 160), "normalizers": ("model", "entmax15"),
    }  # fmt: skip
    return judged(synthetic_tables(**options), synthetic_manifest(**options))


@cache
def core_only() -> ReportData:
    """As after metrics="core": no distances, no sensitivity, no coverage, no Jacobian norm."""
    tables, nothing = dict(sample().tables), ("top_n", "sensitivity", "coverage", "reads", "tokens")
    for name in nothing:
        tables[name] = tables[name].slice(0, 0)
    for table in ("heads", "by_length"):
        for name in tables[table].column_names:
            if name.startswith("jacobian_norm") or name in ("mean_cosine", "effective_rank", "smallest_distance"):
                place = tables[table].column_names.index(name)
                tables[table] = tables[table].set_column(place, name, pa.nulls(tables[table].num_rows, pa.float64()))
    return judged(tables, sample().manifest)


@cache
def hostile() -> ReportData:
    """Every name that a user chooses, and every sentence, tries to break out of the page."""
    tables = dict(sample().tables)
    for name, table in tables.items():
        for column in ("text", "normalizer", "kind"):
            if column not in table.column_names:
                continue
            old = table.column(column).to_pylist()
            spoiled = [value if value == "model" else f"{value} {HOSTILE}" for value in old]
            tables[name] = table = table.set_column(table.column_names.index(column), column, pa.array(spoiled))
    for name, column in (("tokens", "token"), ("reads", "key_token"), ("reads", "row_token")):
        spoiled = [f"{value} {HOSTILE}" for value in tables[name].column(column).to_pylist()]
        place = tables[name].column_names.index(column)
        tables[name] = tables[name].set_column(place, column, pa.array(spoiled))
    made = judged(tables, {**sample().manifest, "notes": [HOSTILE], HOSTILE: {HOSTILE: [HOSTILE]}})
    heads = made.tables["heads"]
    place = heads.column_names.index("evidence")
    heads = heads.set_column(place, "evidence", pa.array([HOSTILE] * heads.num_rows))
    place = heads.column_names.index("verdict")
    heads = heads.set_column(place, "verdict", pa.array([HOSTILE, *heads.column("verdict").to_pylist()[1:]]))
    place = heads.column_names.index("flags")
    heads = heads.set_column(place, "flags", pa.array([[HOSTILE, "sensitive"]] * heads.num_rows))
    manifest = {**made.manifest, "model": {**made.manifest["model"], "name": HOSTILE, "class": HOSTILE}}
    counts = {HOSTILE: 3, "healthy": 2}
    return with_tables(made, heads=heads)._replace(
        manifest=manifest, headline=HOSTILE, counts=counts, sentences=[HOSTILE], advice=[]
    )


@cache
def with_gaps() -> ReportData:
    """As after merging: the second text has the shorter length only."""
    tables = {
        name: table.filter(pc.or_(pc.equal(table["text"], "prose"), pc.equal(table["length"], 64)))
        for name, table in dict(sample().tables).items()
    }
    return judged(tables, sample().manifest)


@cache
def empty() -> ReportData:
    return judged(
        {name: table.slice(0, 0) for name, table in dict(sample().tables).items()}, {"model": {}, "settings": {}}
    )


@cache
def gpt2_size(
    lengths: tuple[int, ...] = (256, 512, 1024),
    normalizers: tuple[str, ...] = ("model", "ssmax", "entmax15", "sigmoid"),
) -> ReportData:
    """12 x 12 heads, 8 temperatures: heads repeated with noise, for the size.

    Three times the 12 bins of 512 keys are as many as the 10, 12 and 14 bins of 256, 512 and 1,024.
    """
    options: dict[str, Any] = {"cast": CAST, "lengths": (512,), "normalizers": ("model",)}
    once = synthetic_tables(**options)
    colder = once["sensitivity"].column("temperature").to_numpy() / 3
    place = once["sensitivity"].column_names.index("temperature")
    more = once["sensitivity"].set_column(place, "temperature", pa.array(colder))
    reads = [_moved(once["reads"], "row", -row) for row in range(2)]  # four rows of eight keys, as by default
    tables = {**once, "sensitivity": pa.concat_tables([once["sensitivity"], more]), "reads": pa.concat_tables(reads)}
    repeated = _repeated(tables, 12, 12, lengths, normalizers)
    return judged(repeated, synthetic_manifest(**options))


def judged(tables: dict[str, pa.Table], manifest: dict[str, Any]) -> ReportData:
    heads, _ = judge_all(
        tables["heads"].select(SCHEMAS["heads"].names), tables["by_length"], tables["top_n"], Thresholds()
    )
    complete = {**tables, "heads": heads}
    verdict = model_verdict(complete, manifest, Thresholds())
    return ReportData(
        complete, manifest, verdict.headline, verdict.counts, verdict.sentences, verdict.advice,
        rows=representative_rows(head_rows(heads))[0], threshold_sentences=[],
        default_thresholds=Thresholds().as_dict(),
    )  # fmt: skip


def with_tables(data: ReportData, **tables: pa.Table) -> ReportData:
    return data._replace(tables={**data.tables, **tables})


def _repeated(
    tables: dict[str, pa.Table], layers: int, heads: int, lengths: Sequence[int], normalizers: Sequence[str]
) -> dict[str, pa.Table]:
    noise = np.random.default_rng(0)
    return {
        name: pa.concat_tables(
            _placed(table, noise, layer, head, length, normalizer)
            for layer in range(0, layers if "layer" in table.column_names else 1, len(CAST))
            for head in range(0, heads if "head" in table.column_names else 1, len(CAST[0]))
            for length in lengths
            for normalizer in (normalizers if "normalizer" in table.column_names else ("model",))
        )
        for name, table in tables.items()
    }


def _placed(
    table: pa.Table, noise: np.random.Generator, layer: int, head: int, length: int, normalizer: str
) -> pa.Table:
    columns = {}
    for field in table.schema:
        values = table.column(field.name)
        if field.name in ("layer", "head"):
            values = pa.array([value + (layer if field.name == "layer" else head) for value in values.to_pylist()])
        elif field.name == "length":
            values = pa.array([length] * table.num_rows)
        elif field.name == "normalizer":
            values = pa.array([normalizer] * table.num_rows)
        elif pa.types.is_floating(field.type) and field.name not in ("n", "temperature"):
            values = pa.array(values.to_numpy() * noise.uniform(0.8, 1.2, table.num_rows))
        columns[field.name] = values
    return pa.table(columns, schema=table.schema)


def _moved(table: pa.Table, column: str, by: int) -> pa.Table:
    place = table.column_names.index(column)
    return table.set_column(place, column, pc.add(table[column], by))
