"""How sure a verdict is, and what must not change it: optional groups, seeds, one window more or less."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnorm.analysis.analyze import analyze
from attnorm.analysis.compare import passages, same_numbers, stability
from attnorm.analysis.result import Analysis
from attnorm.analysis.tables import WINDOW_NUMBERS, WINDOWS
from attnorm.analysis.verdicts import Thresholds
from attnorm.analysis.verdicts.judge import judge_all, judge_head, saturation
from attnorm.analysis.verdicts.rules import NOT_JUDGED, HeadCase, always_near_worst, codes_on_both_sides, verdict_codes
from attnorm.report_data import VERDICTS
from tests.analysis.synthetic import synthetic_tables
from tests.analysis.tiny_models import gpt2, ids, llama

share = st.one_of(st.sampled_from([0.0, 0.1, 0.5, 0.7, 0.99, 1.0, math.nan]), st.floats(0, 1))
positive = st.one_of(st.sampled_from([0.0, 1.0, 1e5, math.inf, math.nan]), st.floats(0, 2000))
slope = st.one_of(st.just(math.nan), st.floats(-1, 2))
HEAD = st.fixed_dictionaries(
    {
        "entropy_ratio": share, "entropy_nats": st.floats(0, 7),
        "entropy_floor": st.one_of(st.just(math.nan), st.floats(0, 6)),
        "max_weight": share, "sink_mass": share, "horizon": positive, "jacobian_norm": share, "gated_sink_mass": share,
        "jacobian_norm_q75": share, "entropy_ratio_without_sink": share, "horizon_without_sink": positive,
        "row_sum": st.one_of(share, st.sampled_from([-0.005, 1e-4]), st.floats(0, 0.02)),
        "row_sum_q05": st.sampled_from([0.0, -0.1, math.nan]),
        "row_sum_mean": st.sampled_from([0.0, 0.002, 0.3, -0.3, math.nan]),
        "effective_keys": st.one_of(st.just(math.nan), st.floats(1, 100)),
        "gap_slope": slope, "gap_slope_without_sink": slope, "gap_slope_error": st.floats(0, 0.3),
        "n_high": st.integers(1, 2048), "n_low": st.integers(1, 2048), "broken_rows": st.sampled_from([0, 0, 0, 1]),
    }
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    row=HEAD,
    what_if=st.booleans(),
    over_lengths=slope,
    runs=st.sampled_from(["softmax", "sink", "softpick", "odd_polynomial", None]),
)
def test_arrays_of_heads_get_the_verdicts_that_the_rules_give_one_by_one(
    row: dict[str, Any], what_if: bool, over_lengths: float, runs: str | None
) -> None:
    row = row | {"normalizer": "model", "n_low": min(row["n_low"], row["n_high"]), "worst_norm": 0.5}
    if row["n_high"] < 2:
        row |= dict.fromkeys(("entropy_ratio", "entropy_ratio_without_sink"), math.nan)  # as it is measured
    alone = None if math.isnan(over_lengths) else over_lengths
    case = HeadCase(row=row, thresholds=Thresholds(), runs=runs, slope_over_lengths=alone, what_if=what_if)
    arrays = {name: np.array([value]) for name, value in row.items() if name != "normalizer"}
    arrays |= {"near_worst": np.array([always_near_worst(runs, 0.9)]), "what_if": np.array([what_if])}
    arrays |= {"signed": np.array([case.signed]), "sums_to_one": np.array([case.sums_to_one])}
    arrays["reads_on_average"] = np.array([case.reads_on_average])
    code = int(verdict_codes({**arrays, "slope_over_lengths": np.array([over_lengths])}, Thresholds())[0])
    assert (None if code == NOT_JUDGED else VERDICTS[code]) == judge_head(case).verdict


def windows_of(tables: dict[str, pa.Table], values: list[float]) -> pa.Table:
    """As many windows as values, each with that entropy ratio; all else as in the heads table."""
    rows = []
    for head in tables["heads"].to_pylist():
        for window, ratio in enumerate(values):
            own = {name: head[name] for name in (*WINDOW_NUMBERS, "worst_norm")} | {"entropy_ratio": ratio}
            kept = {
                name: head[name] for name in WINDOWS.names if name in head and name not in own and name != "verdict"
            }
            rows.append({**kept, **own, "window": window, "start": 100 * window, "verdict": None})
    return pa.Table.from_pylist(rows, schema=WINDOWS)


def tables_over(values: list[float]) -> tuple[pa.Table, pa.Table, pa.Table, pa.Table]:
    """Return heads, by_length, top_n and windows of one head with these entropy ratios."""
    tables = synthetic_tables(cast=[["flat"]], lengths=(512,), normalizers=("model",))
    mean = float(np.mean(values))
    heads = [
        row
        | {
            "entropy_ratio": mean, "entropy_ratio_q50": mean, "gap_slope": 0.1, "entropy_floor": 0.0,
            "entropy_floor_q50": 0.0,
        }
        for row in tables["heads"].to_pylist()
    ]  # fmt: skip
    heads_table = pa.Table.from_pylist(heads, schema=tables["heads"].schema)
    return heads_table, tables["by_length"], tables["top_n"], windows_of({"heads": heads_table}, values)


def judged_over(values: list[float]) -> tuple[dict[str, Any], list[str]]:
    heads, by_length, top_n, windows = tables_over(values)
    found, by_window = judge_all(heads, by_length, top_n, windows=windows)
    return found.to_pylist()[0], by_window["verdict"].to_pylist()


def with_rounding_errors(table: pa.Table, chance: np.random.Generator) -> pa.Table:
    """The table with every number multiplied by 1 + 1e-6 noise."""
    for index, field in enumerate(table.schema):
        if pa.types.is_floating(field.type):
            numbers = table[field.name].to_numpy(zero_copy_only=False)
            noisy = numbers * (1 + 1e-6 * chance.standard_normal(len(numbers)))
            table = table.set_column(index, field, pa.array(noisy, type=field.type))
    return table


@pytest.mark.parametrize("values", [[0.62, 0.66, 0.7, 0.74, 0.76, 0.78], [0.64, 0.66, 0.67, 0.69, 0.7, 0.75]])
def test_rounding_errors_do_not_move_confidence(values: list[float]) -> None:
    """With entropies of two digits many resamples have the mean 0.70, which is the threshold."""
    chance = np.random.default_rng(0)
    heads, by_length, top_n, windows = tables_over(values)
    confidence = judge_all(heads, by_length, top_n, windows=windows)[0]["confidence"][0].as_py()
    assert 0.55 < confidence < 0.95
    for _ in range(5):
        noisy_heads, noisy_windows = with_rounding_errors(heads, chance), with_rounding_errors(windows, chance)
        moved = judge_all(noisy_heads, by_length, top_n, windows=noisy_windows)[0]["confidence"][0].as_py()
        assert moved == pytest.approx(confidence, abs=1e-4)


SMEARED: dict[str, float] = {
    "entropy_ratio": 0.8, "entropy_nats": 0.8 * math.log(1000), "entropy_floor": 0.1, "max_weight": 0.2,
    "sink_mass": 0.02, "horizon": 5e4, "jacobian_norm": 0.2, "jacobian_norm_q75": 0.3,
    "entropy_ratio_without_sink": 0.4, "horizon_without_sink": 5e4, "gap_slope": 0.2, "gap_slope_without_sink": 0.2,
    "gap_slope_error": 0.0, "slope_over_lengths": math.nan, "n_high": 1000, "n_low": 1000, "broken_rows": 0,
    "worst_norm": 0.5, "near_worst": False, "what_if": False, "row_sum": 0.5, "signed": False, "sums_to_one": False,
    "reads_on_average": False, "effective_keys": 100.0,
}  # fmt: skip
SHARP = SMEARED | {"entropy_ratio": 0.3, "entropy_nats": 0.3 * math.log(1000)}


@pytest.mark.parametrize(
    ("head", "name", "threshold"),
    [
        (SMEARED | {"entropy_nats": math.nan, "entropy_floor": math.nan}, "entropy_ratio", 0.7),
        (SMEARED, "entropy_nats", 0.1 + 0.1 * (math.log(1000) - 0.1)),
        (SMEARED, "gap_slope", 0.75),
        (SMEARED | {"gap_slope_error": 0.2}, "gap_slope", 0.6),
        (SMEARED, "horizon", 1000),
        (SMEARED, "sink_mass", 0.1),
        (SMEARED, "sink_mass", 0.5),
        (SHARP, "jacobian_norm_q75", 0.45),
        (SHARP | {"jacobian_norm": 0.01}, "max_weight", 0.99),
        (SHARP | {"max_weight": 0.995}, "jacobian_norm", 0.02),
        (SMEARED, "row_sum", 0.01),
        (SMEARED | {"signed": True, "effective_keys": 10.0}, "max_weight", 0.001),
    ],
)
def test_beyond_the_nearest_threshold_lies_the_verdict_of_its_other_side(
    head: dict[str, float], name: str, threshold: float
) -> None:
    sides = {column: np.full(3, value) for column, value in head.items()}
    sides[name] = threshold * np.array([1 - 1e-5, 1 + 1e-5, 1.1])
    codes, beyond, distance = codes_on_both_sides(sides, Thresholds(), 1e-3)
    assert codes.tolist() == verdict_codes(sides, Thresholds()).tolist()
    assert codes[0] != codes[1]
    assert beyond.tolist() == [codes[1], codes[0], codes[2]]
    assert distance[:2] == pytest.approx(1e-5, rel=0.7)


def test_windows_that_agree_make_a_verdict_sure() -> None:
    row, by_window = judged_over([0.80, 0.82, 0.81, 0.83, 0.80, 0.82])
    assert row["verdict"] == row["leaning"] == "dispersed-forced"
    assert (row["confidence"], row["agreement"]) == (1.0, 1.0)
    assert by_window == ["dispersed-forced"] * 6
    assert row["deciding"] == "entropy_ratio"
    assert 0.80 <= row["deciding_low"] < row["deciding_value"] < row["deciding_high"] <= 0.83
    assert "6 of 6 windows give this verdict. 95 % bootstrap interval of entropy / log n: 0.8" in row["evidence"]


def test_a_head_too_close_to_a_threshold_is_undecided_and_says_between_what() -> None:
    row, by_window = judged_over([0.60, 0.80, 0.62, 0.81, 0.64, 0.79])
    assert row["verdict"] == "undecided"
    assert row["leaning"] == "dispersed-forced"
    assert 0.4 < row["confidence"] < 0.9
    assert row["agreement"] == 0.5
    assert Counter(by_window) == {"healthy": 3, "dispersed-forced": 3}
    assert row["deciding_low"] < row["deciding_threshold"] == 0.7 < row["deciding_high"]
    assert "leaning to dispersed-forced" in row["evidence"]
    assert "the most frequent other verdict is healthy" in row["evidence"]


def test_without_windows_and_blocks_confidence_is_not_claimed() -> None:
    tables = synthetic_tables(lengths=(512,), normalizers=("model",))
    heads, _ = judge_all(tables["heads"], tables["by_length"], tables["top_n"])
    assert all(math.isnan(one) for one in heads["confidence"].to_pylist() if one != 1.0)
    assert "undecided" not in heads["verdict"].to_pylist()


def test_evidence_names_what_decides_in_words_and_not_by_its_column() -> None:
    cast = ["lazy", "smeared beside a sink", "torn", "certain", "parked"]
    tables = synthetic_tables(cast=[cast], lengths=(512,), normalizers=("model",))
    arguments = tables["heads"], tables["by_length"], tables["top_n"]
    windows = with_rounding_errors(windows_of(tables, [0.69, 0.71, 0.7, 0.9]), np.random.default_rng(0))
    heads, _ = judge_all(*arguments, windows=windows)
    decided = {
        row["deciding"]: row["evidence"] for row in heads.to_pylist() if "95 % bootstrap interval" in row["evidence"]
    }
    assert len(decided) == len(cast)
    assert "entropy / log n without the sink: " in decided["entropy_ratio_without_sink"]
    assert "Jacobian norm that 25 % of the rows reach: " in decided["jacobian_norm_q75"]
    assert not [words for words in decided.values() if "_" in words]


@pytest.fixture(scope="module")
def one_window() -> Analysis:
    return analyze(gpt2(), ids(128), metrics="core")


def test_one_window_takes_its_confidence_from_blocks_of_rows(one_window: Analysis) -> None:
    found = one_window
    assert found.manifest["texts"][0]["windows"] == 1
    assert found.blocks.num_rows == 8 * found.heads.num_rows
    assert all(0 < one <= 1 for one in found.heads["confidence"].to_pylist())
    assert found.windows["window"].to_pylist() == [0] * found.heads.num_rows


@pytest.fixture(scope="module")
def core() -> Analysis:
    """Eight windows of 64 tokens."""
    return analyze(gpt2(), ids(512), lengths=64, metrics="core")


def test_headline_and_verdicts_do_not_depend_on_optional_groups_or_the_seed(core: Analysis) -> None:
    every = analyze(gpt2(), ids(512), lengths=64, metrics="all", seed=3, vector_rows=4)
    assert core.verdict.headline == every.verdict.headline
    for name in ("verdict", "leaning", "confidence", "agreement", "flags", "evidence"):
        assert core.heads[name].equals(every.heads[name]), name
    assert set(core.heads["saturation"].to_pylist()) == {"not judged"}
    assert core.windows.num_rows == 8 * core.heads.num_rows
    assert set(core.windows["start"].to_pylist()) == set(range(0, 512, 64))


def test_numbers_over_windows_are_means_of_those_of_each_window() -> None:
    model, text = gpt2(), ids(512)
    whole = analyze(model, text, lengths=64, windows=4, metrics="core")
    windows = whole.windows.to_pylist()
    for row in whole.heads.to_pylist():
        own = [one for one in windows if (one["layer"], one["head"]) == (row["layer"], row["head"])]
        assert row["entropy_ratio"] == pytest.approx(np.mean([one["entropy_ratio"] for one in own]), rel=1e-12)
        assert row["horizon"] == pytest.approx(np.median([one["horizon"] for one in own]), rel=1e-12)
        assert row["rows"] == sum(one["rows"] for one in own)
    start = windows[-1]["start"]
    alone = analyze(model, text[:, start : start + 64] if text.dim() > 1 else text[start : start + 64], metrics="core")
    last = [one for one in windows if one["start"] == start]
    assert [one["entropy_ratio"] for one in last] == alone.heads["entropy_ratio"].to_pylist()


def test_the_number_under_a_metrics_name_is_the_one_that_is_judged(one_window: Analysis) -> None:
    for row in one_window.heads.to_pylist():
        assert row["entropy_ratio"] == row["entropy_ratio_q50"] == row["deciding_value"]
        assert row["entropy_ratio_mean"] != row["entropy_ratio"]
        assert f"Entropy is {row['entropy_ratio']:.2f}".lower() in row["evidence"].lower()


SETS = {"top_n": 20, "rows": 64, "separability": 0.5, "separability_null": 0.48, "separability_excess_error": 0.02}


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({}, "saturated"),
        ({"separability_excess_error": 0.2}, "not judged"),  # no evidence either way is no evidence for saturation
        ({"separability_excess_error": math.nan}, "not judged"),
        ({"separability": 0.65}, "distinguishes"),
        ({"separability": 0.83, "separability_null": 0.83}, "distinguishes"),  # most of its keys are distinguishable
        ({"separability": math.nan}, "not judged"),
        ({"top_n": 1}, "not judged"),
        ({"top_n": 100}, "not judged"),
    ],
)
def test_saturation_needs_evidence_for_it(numbers: dict[str, Any], expected: str) -> None:
    row = {"sink_mass": 0.0, "effective_keys": 25.0, "entropy_ratio_without_sink": 0.3}
    assert saturation(row, [SETS | numbers], Thresholds()).saturation == expected


def test_the_power_of_the_saturation_test_is_that_of_its_error() -> None:
    row = {"sink_mass": 0.0, "effective_keys": 25.0}
    sharp, blunt = (
        saturation(row, [SETS | {"separability_excess_error": error}], Thresholds()).saturation_power
        for error in (0.02, 0.1)
    )
    assert sharp > 0.99
    assert blunt < 0.3
    drawn = np.random.default_rng(0).normal(0, 0.05, 4000)
    shown = np.mean(
        [
            saturation(
                row, [SETS | {"separability": 0.48 + one, "separability_excess_error": 0.05}], Thresholds()
            ).saturation
            == "saturated"
            for one in drawn
        ]
    )
    stated = saturation(row, [SETS | {"separability_excess_error": 0.05}], Thresholds()).saturation_power
    assert shown == pytest.approx(stated, abs=0.03)


def test_a_what_if_is_judged_by_its_sharpness_and_not_by_the_slope_that_its_factor_adds() -> None:
    row = {
        "normalizer": "ssmax", "n_high": 1024, "broken_rows": 0, "entropy_ratio": 0.81, "entropy_nats": 5.6,
        "entropy_floor": 0.1, "max_weight": 0.08, "sink_mass": 0.0, "gap_slope": 1.2, "gap_slope_error": 0.01,
        "horizon": 1e6, "jacobian_norm": 0.1, "jacobian_norm_q75": 0.1,
    }  # fmt: skip
    case = {"row": row, "thresholds": Thresholds(), "runs": "ssmax"}
    assert judge_head(HeadCase(**case)).verdict == "healthy", "a model that runs it keeps up with the length"
    assert judge_head(HeadCase(**case, what_if=True)).verdict == "dispersed-by-choice"


def test_ssmax_starts_at_the_measured_length_and_the_run_says_so() -> None:
    specs = ("model", "ssmax", "ssmax:train_length=96")
    for positions, lengths in ((128, None), (2048, None), (2048, (32, 96))):
        run = analyze(gpt2(positions=positions), ids(96), lengths=lengths, normalizers=specs, metrics="core")
        entropies = {
            name: [row["entropy_nats"] for row in run.heads.to_pylist() if row["normalizer"] == name] for name in specs
        }
        assert entropies["ssmax"] == pytest.approx(entropies["ssmax:train_length=96"])
        assert any(note.startswith("ssmax starts with train_length 96") for note in run.manifest["notes"])
        assert "train_length 96" in run.summary()


def test_ssmax_starts_at_the_models_own_length_in_longer_texts() -> None:
    run = analyze(llama(), ids(300), lengths=300, normalizers=("ssmax",), metrics="core")  # made for 256
    assert any(note.startswith("ssmax starts with train_length 256") for note in run.manifest["notes"])


def test_stability_counts_heads_that_no_run_contradicts(core: Analysis) -> None:
    runs = {"0": core, "1": analyze(gpt2(), ids(512, seed=1), lengths=64, metrics="core")}
    found = stability(runs)
    assert found.heads == found.judged + sum(
        all(run.heads["verdict"][at].as_py() == "undecided" for run in runs.values()) for at in range(found.heads)
    )
    assert 0 <= found.same <= found.kept <= found.judged
    alone = dict.fromkeys(("a", "b"), runs["0"])
    assert stability(alone).rate == 1.0
    assert stability(alone).again == 1.0
    assert (found.windows, found.length) == (8, 64)
    with pytest.raises(ValueError, match="two runs"):
        stability({"a": runs["0"]})


def test_a_pair_of_runs_counts_undecided_once_as_a_change_and_once_as_no_contradiction() -> None:
    run = analyze(gpt2(layers=1, heads=4), ids(64), metrics="core")

    def judged_as(*verdicts: str) -> Analysis:
        at = run.heads.schema.get_field_index("verdict")
        return replace(run, heads=run.heads.set_column(at, "verdict", pa.array(verdicts)))

    first = judged_as("healthy", "healthy", "healthy", "undecided")
    found = stability({"a": first, "b": judged_as("healthy", "undecided", "dispersed-forced", "undecided")})
    # Judged in a: three heads, one alike, one undecided in b, one contradicted. Judged in b: two, one alike.
    assert found.again == pytest.approx(2 / 5)
    assert found.uncontradicted == pytest.approx(3 / 5)
    assert (found.judged, found.kept, found.same, found.undecided) == (3, 2, 1, 1.5)
    assert set(found.changing) == {"decoder layer 0 head 2"}
    nothing = judged_as(*["undecided"] * 4)
    assert stability({"a": nothing, "b": nothing}).as_dict()["again"] is None


def test_a_window_measured_again_has_the_numbers_it_has_in_the_run() -> None:
    model, text = gpt2(), ids(512)
    run = analyze(model, text, lengths=64, windows=4, metrics="core")
    assert same_numbers(run, analyze(model, text, lengths=64, windows=1, metrics="core", seed=1))
    assert not same_numbers(run, analyze(model, ids(512, seed=1), lengths=64, windows=1, metrics="core"))


def test_passages_hold_the_whole_text() -> None:
    text = " ".join(f"word{number}" for number in range(1000))
    found = passages(text, 3)
    assert "".join(found.values()) == text
    assert list(found) == ["passage 1 of 3", "passage 2 of 3", "passage 3 of 3"]
    assert all(part.startswith("word") for part in found.values())


def judged_sums(sums: list[float], **numbers: float) -> tuple[dict[str, Any], list[str]]:
    """One head of softpick, with a window of each row sum."""
    heads, by_length, top_n, windows = tables_over([math.nan] * len(sums))
    mean = float(np.mean(sums))
    changed = [row | numbers | {"row_sum": mean, "row_sum_mean": mean} for row in heads.to_pylist()]
    own = [row | numbers | {"row_sum": value} for row, value in zip(windows.to_pylist(), sums, strict=True)]
    tables = pa.Table.from_pylist(changed, schema=heads.schema), by_length, top_n
    found, by_window = judge_all(*tables, windows=pa.Table.from_pylist(own, schema=WINDOWS), model_runs="softpick")
    return found.to_pylist()[0], by_window["verdict"].to_pylist()


def test_a_silent_head_has_a_confidence_even_if_every_weight_is_zero() -> None:
    row, by_window = judged_sums([0.0] * 5, sink_mass=math.nan, max_weight=math.nan)
    assert (row["verdict"], row["confidence"], row["agreement"]) == ("silent", 1.0, 1.0)
    assert by_window == ["silent"] * 5
    assert row["evidence"].endswith("reads no key. 5 of 5 windows give this verdict.")
    assert (row["deciding"], row["deciding_value"], row["deciding_threshold"]) == ("row_sum", 0.0, 0.01)
    few, _ = judged_sums([0.0] * 2, sink_mass=math.nan, max_weight=math.nan)
    assert math.isnan(few["confidence"]), "two windows without blocks are nothing to resample"


def test_a_head_near_the_threshold_of_silence_is_undecided() -> None:
    row, by_window = judged_sums([0.004, 0.016, 0.005, 0.013, 0.006, 0.014], entropy_ratio=0.3)
    assert (row["verdict"], row["leaning"]) == ("undecided", "silent")
    assert by_window == ["silent", "healthy"] * 3
    assert "95 % bootstrap interval of the sum of the weights: 0.01 to 0.01 (threshold 0.01)" in row["evidence"]
