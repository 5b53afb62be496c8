"""Comparisons: head by head where shapes agree, by distribution where they do not, and honest about what differs."""

import json
from dataclasses import replace
from typing import Any

import pyarrow as pa

from attnorm.analysis.compare import compare, sides_of
from attnorm.analysis.result import Analysis
from attnorm.analysis.verdicts.thresholds import Thresholds
from attnorm.files import finite
from attnorm.report_data import VERDICTS
from tests.analysis.synthetic import synthetic_manifest, synthetic_tables

CAST = (("selects", "flat", "parked"), ("lazy", "selects", "torn"))


def made(cast: Any = CAST, lengths: tuple[int, ...] = (256,), normalizers: tuple[str, ...] = ("model",)) -> Analysis:
    options: dict[str, Any] = {"cast": cast, "lengths": lengths, "normalizers": normalizers}
    return Analysis.of(synthetic_tables(**options), synthetic_manifest(**options), Thresholds())


def test_a_model_against_itself_has_not_changed() -> None:
    found = compare({"before": made(), "after": made()})
    assert found.matched == ["after"]
    assert found.changed_verdicts == {"after": 0}
    assert all(change.size == 0 for change in found.changes)
    assert found.sides[0].counts == found.sides[1].counts
    assert found.notes == []


def test_the_head_that_changed_comes_first() -> None:
    trained = (CAST[0], ("selects", *CAST[1][1:]))
    found = compare({"before": made(), "after": made(trained)})
    largest = found.changes[0]
    assert (largest.layer, largest.head) == (1, 0)
    assert largest.verdicts == ("dispersed-by-choice", "healthy")
    before, after = largest.numbers["entropy_ratio"]
    assert before > 0.9 > 0.3 > after
    assert largest.size > 0.6
    assert found.changed_verdicts == {"after": 1}


def test_counts_and_quartiles_are_over_heads() -> None:
    side = compare({"a": made(), "b": made()}).sides[0]
    assert side.heads == 6
    assert sum(side.counts.values()) == 6
    assert set(side.counts) == set(VERDICTS)
    low, middle, high = side.quartiles["entropy_ratio"] or (0, 0, 0)
    assert 0 <= low <= middle <= high <= 1


def test_silent_heads_have_no_quartiles() -> None:
    """Their numbers are those of rescaled weights, which the head does not use."""
    run = made()
    verdicts = pa.array(["silent"] * 3 + run.heads["verdict"].to_pylist()[3:])
    heads = run.heads.set_column(run.heads.column_names.index("verdict"), "verdict", verdicts)
    largest = pa.array([9.0] * 3 + run.heads["entropy_ratio"].to_pylist()[3:])
    heads = heads.set_column(heads.column_names.index("entropy_ratio"), "entropy_ratio", largest)
    (side,) = sides_of(replace(run, heads=heads))
    assert side.counts["silent"] == 3
    assert (side.quartiles["entropy_ratio"] or (9, 9, 9))[2] <= 1


def test_models_of_other_shape_are_compared_by_distribution_and_that_is_said() -> None:
    found = compare({"small": made(), "wide": made((("selects",) * 5,)), "same": made()})
    assert found.matched == ["same"]
    assert {change.label for change in found.changes} == {"same"}
    assert any("wide has other layers or heads than small" in note for note in found.notes)


def test_what_is_not_comparable_is_noted() -> None:
    short, long = made(lengths=(64,)), made()
    long.manifest["texts"][0]["sha256"] = "b" * 64
    long.manifest["model"]["dtype"] = "bfloat16"
    notes = " | ".join(compare({"short": short, "long": long}).notes)
    assert "short 64, long 256 keys" in notes
    assert "texts differ" in notes
    assert "short float32, long bfloat16" in notes


def test_sides_that_measured_other_rows_or_groups_are_noted() -> None:
    whole, quick = made(), made()
    quick.manifest["settings"] |= {"rows": 5, "metrics": ["core", "gradient"]}
    notes = compare({"whole": whole, "quick": quick}).notes
    assert "the measured rows differ: whole all, quick 5" in notes
    assert any("metric groups" in note and "quick core + gradient" in note for note in notes)


def test_one_analysis_is_compared_over_its_normalizers() -> None:
    found = compare({"run": made(normalizers=("model", "entmax15"))})
    assert [side.label for side in found.sides] == ["model", "entmax15"]
    assert found.changed_verdicts["entmax15"] > 0


def test_numbers_that_were_not_measured_are_none_and_never_nan() -> None:
    bare = made()
    rows = [{**row, **{name: float("nan") for name in row if "jacobian" in name}} for row in bare.heads.to_pylist()]
    heads = pa.Table.from_pylist(rows, schema=bare.heads.schema)
    without = Analysis(**{**bare.tables, "heads": heads}, manifest=bare.manifest)
    found = compare({"with": made(), "without": without})
    assert found.sides[1].quartiles["jacobian_norm"] is None
    assert "jacobian_norm" not in found.changes[0].numbers
    assert json.dumps(finite(found.as_dict()), allow_nan=False)
