"""Verdicts: each from the numbers that DESIGN names, never from numbers that are not there."""

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from rich.console import Console

import attnorm
from attnorm.analysis.compare import compare
from attnorm.analysis.settings import groups
from attnorm.analysis.verdicts import (
    ModelVerdict,
    Thresholds,
    judge_all,
    model_verdict,
    representative_rows,
)
from attnorm.analysis.verdicts.advice import _no_advice, advise
from attnorm.analysis.verdicts.judge import Judgment, judge_head
from attnorm.analysis.verdicts.reach import binding_length
from attnorm.analysis.verdicts.rules import HeadCase, _entropy_floor, _relative_entropies, is_selecting, worst_norm
from attnorm.analysis.verdicts.thresholds import thresholds_of
from attnorm.analysis.verdicts.what_if import repeat_command
from attnorm.models.load import load
from attnorm.report.page_text import what_if_table
from attnorm.report.terminal import analysis_summary
from attnorm.report_data import VERDICTS
from attnorm.text import format_keys
from attnorm.theory.dispersion import entropy_floor
from tests.analysis.synthetic import CAST, EXPECTED, synthetic_manifest, synthetic_tables

SMALL: dict[str, Any] = {"lengths": (512,), "normalizers": ("model",)}


def judged(tables: dict[str, pa.Table], thresholds: Thresholds | None = None) -> dict[str, pa.Table]:
    thresholds = thresholds or Thresholds()
    return {**tables, "heads": judge_all(tables["heads"], tables["by_length"], tables["top_n"], thresholds)[0]}


def verdict_of(tables: dict[str, pa.Table], **manifest: Any) -> ModelVerdict:
    return model_verdict(judged(tables), {**synthetic_manifest(), **manifest})


def head(**numbers: Any) -> dict[str, Any]:
    """A head that selects, with some of its numbers changed."""
    row = {
        "normalizer": "model", "n_high": 1024, "broken_rows": 0, "entropy_ratio": 0.2, "entropy_nats": 1.4,
        "entropy_floor": 0.1, "max_weight": 0.8, "sink_mass": 0.01, "entropy_ratio_without_sink": 0.2,
        "horizon_without_sink": 8e3, "gap_slope": 0.95, "gap_slope_without_sink": 0.95, "gap_slope_error": 0.02,
        "horizon": 1e6, "jacobian_norm": 0.2, "jacobian_norm_q75": 0.25, "effective_keys_without_sink": 3.0,
        "effective_keys": 25.0,
    }  # fmt: skip
    return {**row, **numbers}


SMEARED = {"entropy_ratio": 0.9, "entropy_nats": 0.9 * math.log(1024), "gap_slope": 0.1, "max_weight": 0.01}


def judgment_of(runs: str | None = "softmax", **numbers: Any) -> Judgment:
    return judge_head(HeadCase(row=head(**numbers), thresholds=Thresholds(), runs=runs))


def verdict(runs: str | None = "softmax", **numbers: Any) -> str | None:
    return judgment_of(runs, **numbers).verdict


def test_every_verdict_is_found_on_heads_made_for_it() -> None:
    tables = judged(synthetic_tables(normalizers=("model",)))
    found = {
        (row["layer"], row["head"]): row["verdict"] for row in tables["heads"].to_pylist() if row["length"] == 1024
    }
    assert found == EXPECTED
    assert set(found.values()) == set(VERDICTS) - {"silent", "dispersed", "undecided", "differs"}, (
        "softmax rows sum to one, and softmax has a ceiling, which separates forced dispersion from chosen"
    )


def test_evidence_is_one_sentence_with_numbers() -> None:
    for row in judged(synthetic_tables(**SMALL))["heads"].to_pylist():
        assert row["evidence"].endswith(".")
        assert any(character.isdigit() for character in row["evidence"])
        assert "nan" not in row["evidence"].lower()
        assert row["verdict"] == (row["flags"] or ["healthy"])[0]


def test_dispersed_is_forced_beyond_the_horizon_and_by_choice_before_it() -> None:
    assert verdict(**SMEARED, horizon=1023.0) == "dispersed-forced"
    assert verdict(**SMEARED, horizon=1025.0) == "dispersed-by-choice"


def test_a_head_near_its_entropy_floor_is_never_dispersed() -> None:
    near = {**SMEARED, "entropy_floor": 0.9 * math.log(1024) - 0.01, "horizon": 3.0}
    assert verdict(**near) == "healthy"
    assert "lowest entropy that the logits allow" in judgment_of(**near).evidence
    assert verdict(**{**near, "entropy_floor": 5.0}) == "dispersed-forced"


def test_the_floor_is_compared_with_the_entropy_of_the_same_row() -> None:
    """The median of rows with 725 to 1,024 keys has 875: at its floor it is sharp, whatever log 1,024 would say."""
    floor = 0.95 * math.log(875)
    at_floor = {"entropy_ratio": 0.95, "entropy_nats": floor, "entropy_floor": floor, "gap_slope": 0.1, "n_low": 725}
    assert "only 0 % of the way" in judgment_of(**at_floor).evidence
    spread = 2.0
    content = float(entropy_floor(spread, 874)) / math.log(874)
    beside = {"sink_mass": 0.4, "gap_slope_without_sink": 0.0, "horizon_without_sink": 1 + math.exp(spread)}
    assert "only 0 % of the way" in judgment_of(**at_floor, **beside, entropy_ratio_without_sink=content).evidence


def test_beside_a_sink_the_floor_is_that_of_the_other_keys() -> None:
    spread = 2.0
    floor = float(entropy_floor(spread, 1023)) / math.log(1023)
    beside = {"sink_mass": 0.4, "gap_slope_without_sink": 0.0, "horizon_without_sink": 1 + math.exp(spread)}
    assert verdict(**beside, entropy_ratio_without_sink=floor + 0.001) == "healthy"
    assert verdict(**beside, entropy_ratio_without_sink=0.5 * (1 + floor)) == "dispersed-forced"


def test_a_horizon_beyond_all_numbers_forces_nothing() -> None:
    assert verdict(**SMEARED, horizon=math.inf) == "dispersed-by-choice"


def test_high_entropy_alone_is_not_dispersion_where_the_gap_keeps_up() -> None:
    assert verdict(**{**SMEARED, "gap_slope": 0.9}) == "healthy"
    assert verdict(**{**SMEARED, "gap_slope": 0.7, "gap_slope_error": 0.01}) == "dispersed-by-choice"
    assert verdict(**{**SMEARED, "gap_slope": 0.7, "gap_slope_error": 0.2}) == "healthy", "1 is within the error"


def test_a_broad_head_that_keeps_up_is_not_said_to_select() -> None:
    assert judgment_of(**{**SMEARED, "gap_slope": 0.9}).evidence.endswith("broad, but it keeps up with the length.")
    assert "broad" not in judgment_of().evidence
    tables = dict(synthetic_tables(cast=[["selects", "selects", "flat"]], **SMALL))
    changed = {"gap_slope": 0.9, "gap_slope_error": 0.01}
    rows = [row | (changed if row["head"] == 2 else {}) for row in tables["heads"].to_pylist()]
    tables["heads"] = pa.Table.from_pylist(rows, schema=tables["heads"].schema)
    apart = [row | {"separability": 0.9} for row in tables["top_n"].to_pylist()]
    tables["top_n"] = pa.Table.from_pylist(apart, schema=tables["top_n"].schema)
    model = verdict_of(tables)
    assert model.headline.startswith("2 of 3 heads still select among 512 keys; 1 broad but keeping up")
    assert model.counts["healthy"] == 3


def test_a_head_at_its_floor_selects_however_broad_it_is() -> None:
    near = head(**SMEARED, horizon=3.0) | {"entropy_floor": 0.9 * math.log(1024) - 0.01, "verdict": "healthy"}
    assert is_selecting(near, Thresholds())
    assert not is_selecting(near | {"entropy_floor": 5.0}, Thresholds())


def test_the_floor_beside_a_sink_is_that_of_the_theory() -> None:
    for spread in (0.0, 1e-3, 0.5, 9.0, 690.0):
        for n in (1.0, 1.5, 20.0, 1e5):
            assert _entropy_floor(spread, n) == pytest.approx(float(entropy_floor(spread, n)), rel=1e-13)


def test_a_sink_does_not_make_a_smear_look_sharp() -> None:
    looks_sharp = {"sink_mass": 0.4, "max_weight": 0.4, "entropy_ratio": 0.6, "gap_slope": 1.0}
    beside = {"entropy_ratio_without_sink": 0.98, "gap_slope_without_sink": 0.05, "horizon_without_sink": 8.4}
    forced = judgment_of(**looks_sharp, **beside)
    assert forced.verdict == "dispersed-forced"
    assert "horizon is 8.4 keys without the sink (with it: 1 million)" in forced.evidence
    assert verdict(**looks_sharp, **{**beside, "horizon_without_sink": 1e5}) == "dispersed-by-choice"
    assert "without the sink" not in judgment_of(**SMEARED).evidence
    assert verdict(**looks_sharp) == "healthy", "what is beside the sink selects"


def test_a_sink_does_not_make_a_selection_look_smeared() -> None:
    assert verdict(**SMEARED, sink_mass=0.3) == "healthy"


def test_most_of_the_mass_on_the_first_key_is_sink_dominated_even_if_it_froze_there() -> None:
    frozen = {"max_weight": 0.999, "jacobian_norm": 0.001, "jacobian_norm_q75": 0.002}
    assert verdict(sink_mass=0.51) == "sink-dominated"
    assert verdict(sink_mass=0.49) == "healthy"
    both = judgment_of(sink_mass=0.999, **frozen)
    assert (both.verdict, both.flags) == ("sink-dominated", ("sink-dominated", "frozen"))
    assert verdict(**frozen) == "frozen"


def test_mass_on_a_learned_sink_is_not_said_to_lie_on_the_first_key() -> None:
    assert judgment_of(sink_mass=0.9, row_sum=1.0).evidence.startswith(
        "90 % of the weight is on the first of 1,024 keys"
    )
    for runs in ("softmax", "sink", "softmax1"):
        assert "70 % on the learned sink" in judgment_of(runs, sink_mass=0.9, row_sum=0.3).evidence
    for runs in ("sigmoid", "composed:map=sigmoid:sink=sink"):
        assert "learned" not in judgment_of(runs, sink_mass=0.9, row_sum=0.3).evidence


UNDEFINED = (
    "entropy_ratio", "entropy_nats", "max_weight", "sink_mass", "effective_keys", "jacobian_norm_q75",
    "entropy_ratio_without_sink", "effective_keys_without_sink", "gap_slope", "horizon",
)  # fmt: skip
NO_WEIGHT = dict.fromkeys(UNDEFINED, math.nan) | {"row_sum": 0.0, "row_sum_mean": 0.0, "row_sum_q05": 0.0}


def test_a_head_whose_weights_are_all_zero_is_silent_and_not_unjudged() -> None:
    found = judgment_of("softpick", **NO_WEIGHT)
    assert (found.verdict, found.flags) == ("silent", ("silent",))
    assert found.evidence == "The weights of its median row sum to 0, below 0.01, so the head reads no key."
    assert verdict("softpick", **NO_WEIGHT, broken_rows=1) == "broken"


def test_tiny_weights_are_silent_wherever_they_lie() -> None:
    tiny = judgment_of("sigmoid", row_sum=0.0004, sink_mass=0.9999, max_weight=0.0004)
    assert (tiny.verdict, tiny.flags) == ("silent", ("silent",))
    assert "sum to 0.0004, below 0.01" in tiny.evidence
    assert verdict("sigmoid", row_sum=0.0099) == "silent"
    assert verdict("sigmoid", row_sum=0.01, jacobian_norm_q75=0.01) == "healthy"
    beside_sink = {"row_sum": 0.0004, "sink_mass": 0.9999, "max_weight": 0.0004}  # all of it on the first key
    assert verdict("composed:map=sigmoid:sink=sink", **beside_sink) == "silent"
    for runs in ("composed:map=softpick", None):  # its name does not say that there is no learned sink
        assert verdict(runs, row_sum=0.0004, sink_mass=0.5) == "silent"
    lower = HeadCase(
        row=head(row_sum=0.0004, jacobian_norm_q75=0.01), thresholds=Thresholds(silent_sum=1e-4), runs="sigmoid"
    )
    assert judge_head(lower).verdict == "healthy"


def test_a_head_that_reads_in_few_rows_is_not_silent() -> None:
    """Softpick may give no key weight in most rows; other metrics are then those of the rows with weight."""
    for numbers in ({"row_sum": 0.0}, {"row_sum": 0.002}):
        assert verdict("softpick", **numbers, row_sum_q05=0.0, row_sum_mean=0.06) == "healthy"
        assert verdict("softpick", **numbers, row_sum_q05=0.0, row_sum_mean=0.002) == "silent"
    cancels = {"row_sum": 0.0, "row_sum_q05": -0.4, "max_weight": 1e-4}
    assert verdict("odd_polynomial", **cancels, row_sum_mean=-0.1) == "healthy"


def test_a_learned_sink_that_takes_all_weight_is_a_sink_and_not_silence() -> None:
    """A model may have its own sinks beside softmax; their share is in the sink mass."""
    for runs in ("sink", "softmax1", "softmax", None):
        found = judgment_of(runs, row_sum=0.0004, sink_mass=0.9997, max_weight=1e-4)
        assert found.verdict == "sink-dominated"
    assert "100 % on the learned sink" in judgment_of("softmax", row_sum=0.0004, sink_mass=0.9997).evidence
    assert verdict("softmax", row_sum=1.0, sink_mass=0.0) == "healthy"


def test_signed_weights_that_cancel_are_not_silent() -> None:
    for signed in ({"runs": "odd_polynomial"}, {"runs": None, "row_sum_q05": -0.2}):
        cancels = {**signed, "row_sum": 0.001, "sink_mass": 0.1}
        assert verdict(**cancels, max_weight=0.3, effective_keys=10.0) == "healthy"
        small = judgment_of(**cancels, max_weight=1e-4, effective_keys=20.0)
        assert small.verdict == "silent"
        assert "absolute weights of its median row sum to at most 0.002, below 0.01" in small.evidence
    assert verdict("odd_polynomial", **NO_WEIGHT) == "silent"


def test_rows_with_fewer_than_two_keys_are_not_said_to_be_silent() -> None:
    alone = judgment_of("sigmoid", **{**NO_WEIGHT, "row_sum": 1e-9}, n_high=1)
    assert (alone.verdict, alone.evidence) == (None, "Not judged: no row with at least two visible keys.")
    unseen = judgment_of("sigmoid", **{**NO_WEIGHT, "row_sum": math.nan})
    assert (unseen.verdict, unseen.evidence) == (None, "Not judged: no row with at least two visible keys.")


def silent_tables() -> dict[str, pa.Table]:
    """Eight heads of sigmoid; two are silent, one of them has no weight at all."""
    tables = dict(synthetic_tables(cast=[["muddled"] * 8], **SMALL))
    changed = {0: NO_WEIGHT, 1: {"row_sum": 1e-3, "row_sum_mean": 1e-3}}
    rows = [row | changed.get(row["head"], {"row_sum": 0.9}) for row in tables["heads"].to_pylist()]
    return tables | {"heads": pa.Table.from_pylist(rows, schema=tables["heads"].schema)}


def test_the_model_is_said_to_have_silent_heads_and_what_to_do() -> None:
    tables = silent_tables()
    heads = judge_all(tables["heads"], tables["by_length"], tables["top_n"], model_runs="sigmoid")[0]
    assert heads["verdict"].to_pylist() == ["silent"] * 2 + ["healthy"] * 6
    assert heads["saturation"].to_pylist() == ["not judged"] * 2 + ["saturated"] * 6
    manifest = synthetic_manifest()
    manifest["model"]["runs"] = "sigmoid"
    model = model_verdict({**tables, "heads": heads}, manifest)
    assert model.headline.startswith("6 of 8 heads still select among 512 keys; 2 silent")
    assert model.counts["silent"] == 2
    (sentence,) = [one for one in model.sentences if one.startswith("Silent heads: 2 of 8 read no key")]
    assert "less than 0.01" in sentence
    (advice,) = [one for one in model.advice if "ilent" in one.title]
    assert advice.heads == 2
    assert "initial values of sigmoid" in advice.text
    assert model.rate is not None
    assert model.rate.heads == 6


def test_a_sharp_head_that_still_has_a_gradient_is_not_frozen() -> None:
    assert verdict(max_weight=0.995, jacobian_norm=0.1) == "healthy"


def test_sensitive_is_measured_against_the_normalizers_own_worst_case() -> None:
    assert verdict(jacobian_norm_q75=0.46) == "sensitive"
    assert verdict(jacobian_norm_q75=0.44) == "healthy"
    assert worst_norm("softmax", 1024) == 0.5
    assert worst_norm("entmax15", 1024) == pytest.approx(0.868, abs=1e-3)
    assert verdict(runs="entmax15", jacobian_norm_q75=0.46) == "healthy"
    assert verdict(runs="entmax15", jacobian_norm_q75=0.8) == "sensitive"
    unknown = judgment_of(runs="hard", jacobian_norm_q75=0.5)
    assert unknown.verdict == "healthy"
    assert "sensitive (no worst case is known for hard)" in unknown.evidence


def test_the_worst_case_is_that_of_the_parameters_which_were_measured() -> None:
    """A patched model may have learned a scale under which the worst case is many times that of the starting one."""
    assert verdict("ssmax", jacobian_norm_q75=2.0) == "sensitive"
    assert verdict("ssmax", jacobian_norm_q75=2.0, worst_norm=12.0) == "healthy"
    tables = synthetic_tables(cast=[["torn"]], **SMALL)
    steep = [row | {"worst_norm": 50.0} for row in tables["heads"].to_pylist()]
    others = tables["by_length"], tables["top_n"]
    assert judge_all(tables["heads"], *others)[0]["verdict"].to_pylist() == ["sensitive"]
    judged_steep, _ = judge_all(pa.Table.from_pylist(steep, schema=tables["heads"].schema), *others)
    assert judged_steep["verdict"][0].as_py() == "healthy"


def test_where_no_ceiling_is_known_neither_force_nor_choice_is_claimed() -> None:
    for runs in ("entmax15", None):
        found = judgment_of(**SMEARED, horizon=math.nan, entropy_floor=math.nan, runs=runs)
        assert found.verdict == "dispersed"
        assert "is not known" in found.evidence
        assert "although" not in found.evidence


def test_a_rescaled_softmax_is_judged_by_its_own_horizon() -> None:
    assert verdict(**SMEARED, horizon=8.0, runs="ssmax") == "dispersed-forced"
    assert verdict(**SMEARED, horizon=8e6, runs="ssmax") == "dispersed-by-choice"


def test_the_same_flat_logits_are_forced_under_softmax_and_under_ssmax() -> None:
    """Spread 2 among 512 keys: ssmax multiplies it by 1.05 there, which changes next to nothing."""
    tables = judged(synthetic_tables(cast=[["flat"] * 4], lengths=(512,)))
    found: dict[str, set[str]] = {}
    for row in tables["heads"].to_pylist():
        found.setdefault(row["normalizer"], set()).add(row["verdict"])
    assert found["model"] == found["ssmax"] == {"dispersed-forced"}
    assert not found["entmax15"] & {"dispersed-forced", "dispersed-by-choice"}


def test_a_norm_that_every_row_has_says_nothing_about_a_head() -> None:
    """Kneemax and sparsemax reach their worst case with any two keys in use; softmax with two equal ones only."""
    for runs, norm in (("kneemax", 0.5), ("sparsemax", 1.0)):
        found = judgment_of(runs=runs, jacobian_norm_q75=norm)
        assert found.verdict == "healthy"
        assert f"Not judged: sensitive (even random logits are near the worst case of {runs}" in found.evidence
    assert verdict(runs="softmax", jacobian_norm_q75=0.5) == "sensitive"
    assert "not judged" not in judgment_of(runs="kneemax", jacobian_norm_q75=0.2).evidence


def test_thresholds_that_are_not_the_default_are_told_with_it() -> None:
    tables, changed = synthetic_tables(**SMALL), Thresholds(dispersed_entropy=0.95)
    model = model_verdict(judged(tables, changed), synthetic_manifest(), changed)
    assert "Judged by thresholds other than the default: dispersed_entropy 0.95 (default 0.7)." in model.sentences
    assert not [one for one in verdict_of(tables).sentences if "hreshold" in one or "recomputed" in one]


@pytest.mark.parametrize("missing", ["jacobian_norm", "separability", "sink", "gap_slope", "horizon", "everything"])
def test_what_was_not_measured_is_named_and_not_guessed(missing: str) -> None:
    core = ("text", "length", "normalizer", "kind", "layer", "head", "rows", "n_low", "n_high", "n", "top_n")
    tables = {}
    for name, table in synthetic_tables(**SMALL).items():
        rows = table.to_pylist()
        for row in rows:
            for column in row:
                gone = missing in column or (missing == "everything" and column not in (*core, "broken_rows"))
                row[column] = math.nan if gone and isinstance(row[column], float) else row[column]
        tables[name] = pa.Table.from_pylist(rows, schema=table.schema)
    heads = judged(tables)["heads"].to_pylist()
    whole = [row for row in heads if row["verdict"] != "broken"]
    named = {
        "jacobian_norm": "sensitive (no Jacobian norm)", "separability": "",
        "sink": "sink-dominated (no sink mass)", "gap_slope": "", "horizon": "", "everything": "Not judged",
    }[missing]  # fmt: skip
    assert all(named in row["evidence"] for row in whole)
    absent = {"jacobian_norm": {"sensitive", "frozen"}, "separability": set(), "sink": {"sink-dominated"},
              "gap_slope": set(), "horizon": set(), "everything": set(VERDICTS)}[missing]  # fmt: skip
    assert not absent & {row["verdict"] for row in whole}
    assert len(verdict_of(tables).counts) == len(VERDICTS)


def test_without_a_slope_the_lengths_of_several_runs_give_one() -> None:
    tables = dict(synthetic_tables(normalizers=("model",), lengths=(256, 1024)))
    rows = [{**row, "gap_slope": math.nan} for row in tables["heads"].to_pylist()]
    tables["heads"] = pa.Table.from_pylist(rows, schema=tables["heads"].schema)
    found = {(row["layer"], row["head"]): row for row in judged(tables)["heads"].to_pylist() if row["length"] == 1024}
    assert {key: row["verdict"] for key, row in found.items()} == EXPECTED
    assert not any("rate" in row["evidence"] for row in found.values())


def test_bins_that_gave_no_slope_do_not_give_one_through_the_back_door() -> None:
    """One run of one length whose own bins are too few or too short for a line."""
    tables = dict(synthetic_tables(**SMALL))
    rows = [{**row, "gap_slope": math.nan, "gap_slope_without_sink": math.nan} for row in tables["heads"].to_pylist()]
    tables["heads"] = pa.Table.from_pylist(rows, schema=tables["heads"].schema)
    assert not any("gap has slope" in row["evidence"] for row in judged(tables)["heads"].to_pylist())


def test_one_length_only_leaves_the_rate_open_and_says_so() -> None:
    open_rate = judgment_of(**{**SMEARED, "gap_slope": math.nan})
    assert open_rate.verdict == "dispersed-by-choice"
    assert "Not judged: the slope of the gap" in open_rate.evidence


def test_one_broken_row_breaks_the_head() -> None:
    broken = judgment_of(broken_rows=1)
    assert broken.verdict == "broken"
    assert "1 measured row " in broken.evidence


def test_thresholds_are_adjustable_and_checked() -> None:
    strict = judged(synthetic_tables(**SMALL), Thresholds(sink_dominated=0.2))["heads"]["verdict"].to_pylist()
    assert strict.count("sink-dominated") > list(EXPECTED.values()).count("sink-dominated")
    with pytest.raises(ValueError, match=r"sink_dominated.*1\.5"):
        Thresholds(sink_dominated=1.5)
    with pytest.raises(ValueError, match="sensitive_quantile"):
        Thresholds(sensitive_quantile=80)
    with pytest.raises(ValueError, match="saturation_top_n"):
        Thresholds(saturation_top_n=0)


def test_judging_twice_changes_nothing() -> None:
    once = judged(synthetic_tables(**SMALL))
    again = judged(once)["heads"]
    assert again.column_names == once["heads"].column_names
    for name in ("verdict", "flags", "evidence"):
        assert again[name].equals(once["heads"][name])


def test_the_headline_counts_the_heads() -> None:
    model = verdict_of(synthetic_tables(normalizers=("model",)))
    assert model.headline.startswith("1 of 24 heads is broken; 14 of 24 heads still select among 1,024 keys")
    for part in (
        "3 dispersed-by-choice",
        "3 dispersed-forced",
        "3 sink-dominated",
        "6 of the 23 heads with a horizon are beyond it",
    ):
        assert part in model.headline
    assert sum(model.counts.values()) == 24
    assert "In part: 6 of 23 heads" in model.sentences[0]
    assert "made for 1,024 positions" in model.sentences[1]
    assert model.sentences[2].startswith("Rate test: the effective gap is the log-odds")


def windowed(tables: dict[str, pa.Table], layer: int, n: int) -> dict[str, pa.Table]:
    """The heads of one layer see no more than n keys."""
    rows = [row | ({"n_low": n, "n_high": n} if row["layer"] == layer else {}) for row in tables["heads"].to_pylist()]
    return {**tables, "heads": pa.Table.from_pylist(rows, schema=tables["heads"].schema)}


def test_heads_behind_a_window_are_told_apart_from_those_that_see_every_key() -> None:
    tables = synthetic_tables(cast=[["selects", "selects", "flat"], ["flat", "flat", "selects"]], **SMALL)
    model = verdict_of(windowed(tables, layer=1, n=64))
    assert model.headline.startswith("2 of 3 heads without a window still select among 512 keys; 1 dispersed-forced")
    assert model.ceiling is not None
    assert (model.ceiling.heads, model.ceiling.beyond) == (3, 1)
    assert any(
        sentence.startswith("3 heads see at most 64 keys (1 healthy, 2 dispersed-forced)")
        for sentence in model.sentences
    )
    assert sum(model.counts.values()) == 6


def test_runs_on_images_speak_of_neither_texts_nor_windows() -> None:
    cast = [["selects", "selects", "flat"], ["flat", "parked", "parked"]]
    tables = windowed(synthetic_tables(cast=cast, texts=("a", "b"), **SMALL), layer=1, n=64)
    sizes = [{"name": name, "sha256": name, "size": "pixel_values (1, 3, 16, 16)"} for name in ("a", "b")]
    of_images = verdict_of(tables, texts=sizes)
    words = " ".join(
        [of_images.headline, *of_images.sentences, *(f"{one.title} {one.text}" for one in of_images.advice)]
    )
    assert not re.search(r"\btexts?\b|\bwindows?\b(?!\))", words), words
    assert "on both images" in of_images.headline
    of_texts = verdict_of(tables)
    assert of_texts.counts == of_images.counts
    assert "on both texts" in of_texts.headline
    assert "without a window" in of_texts.headline
    mixed = verdict_of(tables, texts=[sizes[0], {"name": "b", "sha256": "b", "size": 100}])
    assert "on both texts" in mixed.headline


def test_the_sink_of_a_head_behind_a_window_is_the_first_key_of_the_window() -> None:
    tables = windowed(synthetic_tables(cast=[["parked", "selects"], ["parked", "selects"]], **SMALL), layer=1, n=64)
    evidence = {
        row["layer"]: row["evidence"] for row in judged(tables)["heads"].to_pylist() if "sink-dominated" in row["flags"]
    }
    assert "the first of 512 keys." in evidence[0]
    assert "the first of the 64 keys that it sees" in evidence[1]
    (advice,) = [one for one in verdict_of(tables).advice if "weight on the first key" in one.text]
    assert "2 of 4 heads" in advice.text
    assert "1 of them on that of their window" in advice.text
    assert "cache" in advice.text


def test_no_first_token_is_to_be_kept_for_heads_that_rest_on_that_of_their_window() -> None:
    tables = windowed(synthetic_tables(cast=[["selects", "selects"], ["parked", "parked"]], **SMALL), layer=1, n=64)
    (advice,) = [one for one in verdict_of(tables).advice if "weight on the first key" in one.text]
    assert "2 of them on that of their window" in advice.text
    assert "cache" not in advice.text
    assert "token" not in advice.title


def test_what_is_beside_the_first_key_of_a_window_is_named_so() -> None:
    case = HeadCase(row=head(sink_mass=0.4), thresholds=Thresholds(), runs="softmax")
    assert "1,023 keys other than the sink (which has 40 % of the weight)" in judge_head(case).evidence
    behind = judge_head(replace(case, windowed=True)).evidence
    assert "1,023 keys other than the first key of its window (which has 40 % of the weight)" in behind


def test_a_shorter_text_is_no_window() -> None:
    tables = synthetic_tables(cast=[["selects", "flat"]], texts=("a", "b"), lengths=(256, 512), normalizers=("model",))
    heads = [row for row in tables["heads"].to_pylist() if row["length"] == (256 if row["text"] == "a" else 512)]
    model = verdict_of({**tables, "heads": pa.Table.from_pylist(heads, schema=tables["heads"].schema)})
    assert "window" not in model.headline
    assert not any(sentence.startswith("At 256") for sentence in model.sentences), "no text has two lengths"


def test_several_lengths_of_one_text_are_told_in_one_line() -> None:
    model = verdict_of(synthetic_tables(cast=[["selects", "flat", "parked"]], normalizers=("model",)))
    line = (
        "By length: at 256 tokens, 1 of 3 heads select and 1 is dispersed; at 1,024, 1 of 3 select and 1 is dispersed."
    )
    assert line in model.sentences
    alone = verdict_of(synthetic_tables(cast=[["selects", "flat", "parked"]], **SMALL))
    assert not any(sentence.startswith("At ") for sentence in alone.sentences)


@pytest.mark.parametrize(("rows", "counted"), [(1, "1 row "), (15, "15 rows "), (16, None)])
def test_verdicts_from_few_rows_say_so(rows: int, counted: str | None) -> None:
    tables = synthetic_tables(cast=[["selects", "flat"]], **SMALL)
    heads = [row | {"rows": rows} for row in tables["heads"].to_pylist()]
    tables = {**tables, "heads": pa.Table.from_pylist(heads, schema=tables["heads"].schema)}
    sampled = {**synthetic_manifest(), "settings": {"rows": rows}}
    found = [sentence for sentence in model_verdict(judged(tables), sampled).sentences if "are based on" in sentence]
    assert found == (
        [] if counted is None else [f"Verdicts are based on {counted}per head; --rows all makes them more reliable."]
    )


@pytest.mark.parametrize(("length", "short"), [(64, True), (256, False)])
def test_a_text_of_few_tokens_gets_no_verdict_without_a_warning(length: int, short: bool) -> None:
    model = verdict_of(synthetic_tables(cast=[["selects", "flat"]], lengths=(length,), normalizers=("model",)))
    assert model.sentences[0].startswith("The longest rows have 64 keys, too few") == short
    texts = [advice.text for advice in model.advice]
    assert any("100 heaviest" in text for text in texts) != short, "100 of 64 keys are no selection"


def test_lengths_that_growth_does_not_change_are_told_once() -> None:
    """Heads beyond their horizon are bound where they are, whatever the others do."""
    model = verdict_of(synthetic_tables(cast=[["flat", "flat", "flat", "selects"]], **SMALL))
    (when,) = (sentence for sentence in model.sentences if "with the present logit spread" in sentence)
    assert "If the spread keeps growing" in when
    clauses = [clause for clause in when.replace(";", ",").split(",") if "beyond" in clause or "no length" in clause]
    lengths = [clause[clause.index("for ") :] for clause in clauses]
    assert len(lengths) == len(set(lengths))


def test_what_cannot_be_tried_is_a_caution() -> None:
    advice = verdict_of(synthetic_tables(**SMALL)).advice
    cautions = [one.title for one in advice if one.caution]
    assert [title.partition(" do")[0] for title in cautions] == ["Broader heads", "A lower temperature"]
    assert any("normalizer" in one.title for one in advice if not one.caution)


def test_a_model_without_fault_is_told_so() -> None:
    model = verdict_of(synthetic_tables(cast=[["selects"] * 3] * 2, **SMALL))
    assert model.headline == (
        "6 of 6 heads still select among 512 keys; none is beyond its horizon, where softmax can give no key half of "
        "the weight."
    )
    assert [advice.title for advice in model.advice] == ["Nothing needs changing"]


@pytest.mark.parametrize(
    ("horizons", "reach"),
    [
        ([100.0, 300.0, 500.0], "a horizon of 300 keys or more"),
        ([100.0, 300.0, math.inf, math.inf, math.inf], "an infinite horizon"),
        ([100.0, 300.0, 2.3e18, math.inf], "a horizon of 2.3 × 10¹⁸ keys or more"),
        ([math.inf, math.inf], None),
        ([], None),
    ],
    ids=str,
)
def test_heads_with_an_infinite_horizon_count_among_the_half(horizons: list[float], reach: str | None) -> None:
    text = _no_advice([{"horizon": horizon, "normalizer": "model"} for horizon in horizons], synthetic_manifest()).text
    assert ("Half of the heads" in text) == (reach is not None)
    assert reach is None or reach in text


def test_the_binding_length_follows_the_growth_of_the_spread() -> None:
    """Spread 2 + 1.5 sqrt(log n) meets log n where sqrt(log n) = (1.5 + sqrt(1.5^2 + 8)) / 2."""
    curve = [{"n": float(n), "logit_spread": 2 + 1.5 * math.sqrt(math.log(n))} for n in (8, 16, 32, 64)]
    root = (1.5 + math.sqrt(1.5**2 + 8)) / 2
    assert binding_length(curve, "logit_spread", horizon=150.0) == pytest.approx(math.exp(root**2), rel=1e-9)
    assert binding_length(curve[:2], "logit_spread", horizon=150.0) == 150, "two bins make no line"
    falling = [{**row, "logit_spread": 9 - row["logit_spread"]} for row in curve]
    assert binding_length(falling, "logit_spread", horizon=150.0) == 150


def test_where_the_spread_grows_the_binding_length_is_extrapolated() -> None:
    flat = verdict_of(synthetic_tables(cast=[["flat"] * 4], **SMALL))
    assert flat.ceiling is not None
    assert flat.ceiling.beyond == 4
    assert "Yes: 4 of 4" in flat.sentences[0]
    keeps_up = verdict_of(synthetic_tables(cast=[["selects"] * 4], **SMALL))
    assert keeps_up.ceiling is not None
    assert keeps_up.ceiling.binding[1] > 1e6, "its spread grows as fast as log n"
    assert json.dumps(keeps_up.as_dict(), allow_nan=False)


def test_a_spread_that_grows_never_binds_earlier_than_one_that_stays() -> None:
    late = [{"n": float(n), "logit_spread": 4.0 + 2.0 * (n == 128)} for n in (8, 16, 32, 64, 128)]
    assert binding_length(late, "logit_spread", horizon=1 + math.exp(6)) >= 1 + math.exp(6)


def running(name: str | None, cast: list[list[str]], measured: str) -> ModelVerdict:
    """A model patched with a normalizer: its rows go by "model"."""
    tables = synthetic_tables(cast=cast, lengths=(512,), normalizers=(measured,))
    rows = [row | {"normalizer": "model"} for row in tables["heads"].to_pylist()]
    heads = pa.Table.from_pylist(rows, schema=tables["heads"].schema)
    arguments = heads, tables["by_length"], tables["top_n"]
    about = synthetic_manifest()
    manifest = {**about, "model": {**about["model"], "runs": name}}
    return model_verdict({**tables, "heads": judge_all(*arguments, model_runs=name)[0]}, manifest)


def test_a_ceiling_is_told_of_the_normalizer_that_has_it() -> None:
    softmax, ssmax = (running(name, [["flat"] * 4], name) for name in ("softmax", "ssmax"))
    assert "all are beyond their horizon, where softmax" in softmax.headline
    assert "all are beyond their horizon, where ssmax" in ssmax.headline
    assert "Is the ceiling binding at 512 keys? Yes: 4 of 4" in ssmax.sentences[0]
    assert "with the present logit spread" in " ".join(softmax.sentences)
    said = " ".join(ssmax.sentences)
    assert "with the present logit spread" not in said, "its factor grows with n, so no length is foretold"


@pytest.mark.parametrize("runs", ["entmax15", None])
def test_no_ceiling_is_told_where_none_is_known(runs: str | None) -> None:
    model = running(runs, [["flat"] * 4], "entmax15")
    assert "ceiling" not in model.headline
    assert model.ceiling is None
    assert model.sentences[0].startswith("Whether the ceiling is binding is not known")


@pytest.mark.parametrize(
    ("runs", "title"), [("ssmax", "A sparse normalizer"), ("sparsemax", "A length-aware normalizer")]
)
def test_advice_does_not_offer_what_the_model_has(runs: str, title: str) -> None:
    model = running(runs, [["flat"] * 4], "ssmax" if runs == "ssmax" else "relu")
    (advice,) = (one for one in model.advice if "normalizer" in one.title)
    assert advice.title == title
    assert advice.command is not None
    assert runs not in advice.command
    assert "would allow" not in advice.text, "forced, or not known"


def test_advice_about_a_normalizer_that_the_model_does_not_run_says_so() -> None:
    def with_only(*names: str, cast: str = "flat") -> ModelVerdict:
        return verdict_of(synthetic_tables(cast=[[cast]], lengths=(128,), normalizers=names))

    dispersed = with_only("ssmax", "entmax15").advice
    (advice,) = (one for one in dispersed if one.title == "A sparse normalizer instead of ssmax")
    assert what_if_table(advice.what_if, advice.baseline)["headings"] == ["", "with ssmax", "entmax15"]
    (nothing,) = with_only("ssmax", cast="selects").advice
    assert nothing.title == "Nothing more needs changing with ssmax"
    assert "The model runs softmax, which was not measured." in nothing.text
    assert "--normalizers model," in str(nothing.command)
    assert {one.baseline for one in with_only("softmax").advice} == {"now"}


def test_advice_tells_by_how_much_a_rescaled_softmax_falls_short() -> None:
    """Uniform logits of spread 2 among 256 keys: half of the weight takes log(255) / 2 = 2.8 times as much."""
    tables = synthetic_tables(cast=[["flat"] * 4], lengths=(256,), normalizers=("model", "ssmax"))
    model = verdict_of(tables)
    (advice,) = (one for one in model.advice if one.title == "ssmax without training does not help")
    assert advice.caution, "what makes heads broader does not help"
    assert not [one for one in model.advice if "normalizer" in one.title]
    assert "ssmax multiplies their logits by 0.93 here, which flattens them" in advice.text
    assert "a factor of 2.8 (s = 0.5) would" in advice.text
    other = {"model": "log_scaled", "ssmax": "ssmax"}
    rows = [row | {"normalizer": other[row["normalizer"]]} for row in tables["heads"].to_pylist()]
    stands_in = verdict_of({**tables, "heads": pa.Table.from_pylist(rows, schema=tables["heads"].schema)})
    (advice,) = (one for one in stands_in.advice if one.title == "ssmax without training does not help")
    assert "no sharper weights than log_scaled" in advice.text
    assert "multiplies" not in advice.text, "its factor is known only beside the logits of the model"


def test_advice_tells_what_other_normalizers_do_to_the_same_logits() -> None:
    model = verdict_of(synthetic_tables(lengths=(512,)))
    (advice,) = (one for one in model.advice if "normalizer" in one.title)
    gains = {(one.change, one.quantity): one for one in advice.what_if}
    assert gains["entmax15", "dispersed heads"].after < gains["entmax15", "dispersed heads"].before == 6
    frozen = gains["entmax15", "frozen, of all heads"]
    assert frozen.after > frozen.before, "the price is stated too"
    for name in ("ssmax", "entmax15"):
        fates = [one.after for (change, quantity), one in gains.items() if change == name and "become" in quantity]
        assert sum(fates) + gains[name, "dispersed heads"].after == 6, "no head goes missing"
    quantities = [{quantity for change, quantity in gains if change == name} for name in ("ssmax", "entmax15")]
    assert quantities[0] == quantities[1], "a count of 0 is shown, not left out"
    assert ("ssmax", "entropy / log n") in gains
    assert advice.command is None


def test_advice_without_numbers_gives_the_command_that_measures_them() -> None:
    model = verdict_of(synthetic_tables(**SMALL), texts=[{"name": "war and peace.txt"}])
    (advice,) = (one for one in model.advice if "normalizer" in one.title)
    assert advice.what_if == ()
    assert advice.command is not None
    assert advice.command.startswith("attnorm analyze pretended/gpt --text 'war and peace.txt' --lengths 256,1024 ")
    assert " --normalizers model,ssmax,entmax15" in advice.command
    assert " --rows all --metrics all" in advice.command


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        ({"dtype": "bfloat16", "tokenizer": "gpt2"}, {}, "--tokenizer gpt2 --dtype bfloat16"),
        ({"device": "cuda"}, {}, "--dtype float32"),
        (
            {},
            {"top_n": [2, 7], "vectors": "inputs", "rows": 16, "seed": 3},
            "--rows 16 --top-n 2,7 --vectors inputs --seed 3",
        ),
        ({}, {"metrics": ["core", "gradient", "vectors"]}, "--metrics core,gradient,vectors"),
        ({}, {"metrics": [*groups("all")]}, "--metrics all"),
        ({}, {"metrics": [*groups(("all", "circuits"))]}, "--metrics all,circuits"),
        ({}, {"windows": 3, "budget": 512, "bos": True}, "--windows 3 --budget 512 --bos"),
        ({}, {"windows": "auto", "bos": False}, "--no-bos"),
        ({}, {"rows": None, "top_n": None, "metrics": None}, ""),  # merged runs that disagree
    ],
)
def test_the_command_keeps_what_the_run_was_asked_for(
    model: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    made = synthetic_manifest(lengths=(256,))
    usual = {"rows": "auto", "metrics": ["core", "gradient"]}
    manifest = {**made, "model": made["model"] | model, "settings": made["settings"] | usual | settings, "texts": []}
    said = repeat_command(manifest, normalizers=["model", "ssmax"])
    repeated = " ".join(said.replace(" --normalizers model,ssmax", "").split())
    assert repeated == f"attnorm analyze pretended/gpt --lengths 256 {words}".strip()


def test_the_command_names_normalizers_with_their_options() -> None:
    made = synthetic_manifest()
    settings = made["settings"] | {"normalizers": ["model", "topk:k=4"]}
    assert "--normalizers model,topk:k=4" in repeat_command({**made, "settings": settings, "texts": []}, metrics="all")


def test_the_command_names_images_and_sound() -> None:
    given = [{"name": "cat.png", "file": False, "media": "image"}, {"name": "a.wav", "file": False, "media": "audio"}]
    said = repeat_command({**synthetic_manifest(), "texts": given}, metrics="all")
    assert said.startswith("attnorm analyze pretended/gpt --image cat.png --audio a.wav ")
    assert said.endswith(" --metrics all")


@pytest.mark.parametrize(
    "given",
    [
        {"texts": [{"name": "text", "file": False}]},
        {"model": {"name": "gpt2", "source": None}},
        {"settings": {"normalizers": ["model", "custom"]}},
    ],
)
def test_what_was_given_as_an_object_is_measured_in_python(given: dict[str, Any]) -> None:
    said = repeat_command({**synthetic_manifest(), **given}, top_n=[5, 20, 100])
    assert said == "attnorm.analyze(..., top_n=[5, 20, 100])"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("frozen", "sensitive", "sensitive"), "sensitive"),
        (("frozen", "sensitive", "healthy"), "differs"),
        (("frozen", "undecided", "undecided"), "undecided"),
        (("frozen", "frozen", "undecided"), "frozen"),
        (("healthy", "sensitive", "undecided"), "differs"),
    ],
)
def test_with_several_texts_a_verdict_counts_only_where_most_texts_give_it(given: Any, expected: str) -> None:
    rows = judged(synthetic_tables(texts=("a", "b", "c"), **SMALL))["heads"].to_pylist()
    for row in rows:
        if (row["layer"], row["head"]) == (1, 0):
            row["verdict"] = dict(zip("abc", given, strict=True))[row["text"]]
    chosen, changing = representative_rows(rows)
    assert len(chosen) == sum(len(row) for row in CAST)
    assert changing == (len({*given} - {"undecided"}) > 1)
    assert next(row["verdict"] for row in chosen if (row["layer"], row["head"]) == (1, 0)) == expected


def test_two_texts_have_a_headline_each_and_one_for_what_holds_on_both() -> None:
    model = verdict_of(synthetic_tables(cast=[["selects", "flat"]], texts=("a", "b"), **SMALL))
    assert model.headline.startswith("1 of 2 heads still select among 512 keys on both texts; 1 dispersed-forced")
    assert set(model.texts) == {"a", "b"}
    assert all(words.startswith("1 of 2 heads still select among 512 keys;") for words in model.texts.values())
    assert sum(sentence.startswith(("On 'a': ", "On 'b': ")) for sentence in model.sentences) == 2


def test_of_texts_that_agree_the_longest_is_told() -> None:
    rows = judged(synthetic_tables(texts=("a", "b"), lengths=(256, 512), normalizers=("model",)))["heads"].to_pylist()
    uneven = [row for row in rows if row["length"] == (256 if row["text"] == "a" else 512)]
    same = [{**row, "verdict": "healthy"} for row in uneven]
    assert {row["text"] for row in representative_rows(same)[0]} == {"b"}


def test_top_k_advice_survives_runs_that_share_no_n() -> None:
    """Merged runs may have measured other sets on each text."""
    tables = dict(synthetic_tables(texts=("a", "b"), cast=[["flat"] * 2], **SMALL))
    kept = [row for row in tables["top_n"].to_pylist() if row["top_n"] == (5 if row["text"] == "a" else 20)]
    tables["top_n"] = pa.Table.from_pylist(kept, schema=tables["top_n"].schema)
    heads = judged(tables)["heads"].to_pylist()
    for row in heads:
        row["verdict"] = "dispersed-forced" if (row["head"] == 0) == (row["text"] == "a") else "healthy"
    chosen = [row for row in heads if row["verdict"] == "dispersed-forced"]
    rows = {name: tables[name].to_pylist() for name in ("top_n", "coverage", "sensitivity")}
    (advice,) = (one for one in advise(chosen, {"heads": heads, **rows}, synthetic_manifest()) if "topk" in one.title)
    assert advice.what_if == ()
    assert advice.command is not None


def test_a_normalizer_is_not_offered_as_a_change_to_itself() -> None:
    tables = synthetic_tables(lengths=(512,), cast=[["parked", "flat"]], normalizers=("ssmax", "entmax15"))
    changes = {one.change for advice in verdict_of(tables).advice for one in advice.what_if}
    assert "entmax15" in changes
    assert "ssmax" not in changes


def test_an_empty_analysis_has_a_verdict_too() -> None:
    tables = {name: table.slice(0, 0) for name, table in synthetic_tables(**SMALL).items()}
    assert verdict_of(tables).headline == "No head was measured."


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (8.37, "8.4"), (511.9, "512"), (1024, "1,024"), (2048.0, "2,048"), (2191.6, "2,190"), (473352.3, "473,000"),
        (999_700.5, "1 million"), (27_232_100, "27.2 million"), (2.1e15, "2.1 × 10¹⁵"),
        (math.inf, "infinitely many"),
    ],
)  # fmt: skip
def test_lengths_are_told_as_people_say_them(count: float, words: str) -> None:
    assert format_keys(count) == words


def test_a_head_with_one_key_beside_its_sink_and_no_horizon_has_no_floor() -> None:
    two, unknown = np.array([2.0]), np.array([np.nan])
    heads = {"entropy_nats": np.array([0.3]), "entropy_ratio": np.array([0.3 / np.log(2)]), "n_low": two}
    heads["entropy_floor"] = unknown
    found = _relative_entropies(heads, np.array([True]), np.array([0.4]), unknown, two)
    assert np.isnan(found).all()


def test_words_change_what_they_name_and_nothing_else() -> None:
    changed = Thresholds(near_floor=0.2).changed(["dispersed_entropy=0.95", " saturation_top_n = 5 "])
    assert changed == Thresholds(near_floor=0.2, dispersed_entropy=0.95, saturation_top_n=5)
    assert isinstance(changed.saturation_top_n, int)
    assert Thresholds().changed([]) == Thresholds()


def test_differences_name_both_sides() -> None:
    assert Thresholds(near_floor=0.2).differences(Thresholds()) == {"near_floor": (0.2, 0.1)}
    assert Thresholds().differences(Thresholds()) == {}


def test_saved_thresholds_of_another_version_are_read() -> None:
    assert thresholds_of({"near_floor": 0.2, "forgotten": 0.1}) == Thresholds(near_floor=0.2)


def analysis_with_bias(bias: float) -> attnorm.Analysis:
    """Return the analysis of the bundled model with sigmoid; a low bias takes the weight of most heads."""
    loaded = load("bundled")
    attnorm.patch(loaded.model, "sigmoid", warm_start=False, bias=bias)
    return attnorm.analyze(loaded.model, tokenizer=loaded.tokenizer, lengths=256, windows=2, rows=64)


@pytest.fixture(scope="module")
def zeros() -> attnorm.Analysis:
    return analysis_with_bias(-200.0)


@pytest.fixture(scope="module")
def tiny() -> attnorm.Analysis:
    return analysis_with_bias(-20.0)


def test_heads_without_any_weight_are_silent(zeros: attnorm.Analysis) -> None:
    rows = [row for row in zeros.heads.to_pylist() if row["row_sum"] == 0]
    assert len(rows) > 30
    for row in rows:
        assert (row["verdict"], row["leaning"], row["flags"]) == ("silent", "silent", ["silent"])
        assert (row["confidence"], row["agreement"]) == (1.0, 1.0)
        assert math.isnan(row["entropy_ratio"])
        assert row["evidence"].startswith("The weights of its median row sum to 0, below 0.01")
    assert "Not judged" not in " ".join(zeros.heads["evidence"].to_pylist())
    assert f"{len(rows)} silent" in zeros.verdict.headline


def test_heads_with_tiny_weights_are_silent_and_the_others_are_judged(tiny: attnorm.Analysis) -> None:
    counts = Counter(tiny.heads["verdict"].to_pylist())
    assert counts["silent"] > 15
    assert counts["dispersed"] > 0
    for row in tiny.heads.to_pylist():
        assert (row["leaning"] == "silent") == (max(row["row_sum"], row["row_sum_mean"]) < 0.01)


def test_terminal_comparison_and_report_name_them(tiny: attnorm.Analysis, tmp_path: Path) -> None:
    console = Console(width=160, record=True, file=(tmp_path / "terminal").open("w"))
    console.print(analysis_summary(tiny.report_data))
    text = console.export_text()
    assert "The weights sum to almost 0, so the head reads no key." in text
    assert "Prune silent heads" in text
    listed = text.partition("What the sharpest head of some layers reads")[2].partition("What to try")[0]
    silent = {(row["layer"], row["head"]) for row in tiny.heads.to_pylist() if row["verdict"] == "silent"}
    assert "layer 2 head" in listed
    assert not [head for head in silent if f"layer {head[0]} head {head[1]} " in listed]
    page = tiny.save_html(tmp_path / "report.html").read_text(encoding="utf-8")
    assert 'class="mark v-silent"' in page
    assert "Prune silent heads" in page
    assert compare({"one": tiny, "other": tiny}).sides[1].counts["silent"] == len(silent)


@pytest.mark.parametrize(("empty", "expected"), [(1.0, "silent"), (0.9, "judged"), (0.6, "judged"), (0.4, "judged")])
def test_a_head_that_reads_in_some_rows_is_judged_by_them(empty: float, expected: str) -> None:
    """Softpick gives no key weight in rows whose logits are all negative."""
    chance = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 128, 16, generator=chance).abs() for _ in range(2))
    q[:, :, torch.rand(128, generator=chance) < empty] *= -1
    analysis = attnorm.measure(q, k, k, normalizers=("softpick",), metrics="core")
    (row,) = analysis.heads.to_pylist()
    assert (row["row_sum"] == 0) == (empty > 0.5)
    assert (row["leaning"] == "silent") == (expected == "silent")
