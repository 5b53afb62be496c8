"""The statistics and the theory behind the retrieval tables, against definitions and brute force."""

import numpy as np
import pytest
from scipy.stats import ttest_rel

from attnorm.arithmetic import holm
from attnorm_lab.experiments.retrieval.results import (
    compare_with,
    lines_of,
    predicted_right,
    read_hard,
    scales_of,
)
from attnorm_lab.training.retrieval.data import CLASSES
from tests_lab.experiments.retrieval_records import found, record, training


def test_differences_are_paired_by_seed_whatever_the_order() -> None:
    of = training()
    base = [record(of, 16, seed, "own", value) for seed, value in enumerate((0.5, 0.7, 0.6))]
    other = [record(of, 16, seed, "own", value) for seed, value in ((2, 0.65), (0, 0.52), (1, 0.78))]
    found_ = compare_with(base, {("ssmax", "own"): other}, [16])[("ssmax", "own"), 16]
    assert found_.mean.value == pytest.approx(0.05)
    assert found_.p == pytest.approx(ttest_rel([0.52, 0.78, 0.65], [0.5, 0.7, 0.6]).pvalue)
    assert found_.p == found_.p_holm


def test_equal_rows_do_not_differ_and_a_single_seed_says_nothing() -> None:
    of = training()
    base = [record(of, 16, seed, "own", 0.5) for seed in range(3)]
    assert compare_with(base, {("a", "own"): base}, [16])[("a", "own"), 16].p == 1
    assert compare_with(base, {("a", "own"): base[:1]}, [16]) == {}


@pytest.mark.parametrize("seeds", [2, 3, 6])
def test_a_difference_that_is_equal_in_few_seeds_is_no_proof(seeds: int) -> None:
    of = training()
    base, other = ([record(of, 16, seed, "own", value) for seed in range(seeds)] for value in (0.5, 0.75))
    assert compare_with(base, {("a", "own"): other}, [16])[("a", "own"), 16].p == 2 ** (1 - seeds)


def test_hard_attention_on_both_sides_compares_what_training_changed() -> None:
    members = [
        found(training(label="softmax"), {"own": (90, 80), "hard": (90, 85)}),
        found(training(label="sparsemax"), {"own": (60, 50), "hard": (95, 91)}, jitter=0.3),
        found(training(section="recall", label="ssmax"), {"own": (91, 81), "hard": (50, 40)}),
    ]
    small, large = read_hard(members).to_pylist()
    assert (small["label"], small["size"], large["size"]) == ("sparsemax", 16, 64), "recall has no softmax"
    assert (large["accuracy"], large["softmax"], large["difference"]) == pytest.approx((0.91, 0.85, 0.06))
    expected = ttest_rel([0.907, 0.91, 0.913], [0.849, 0.85, 0.851])
    assert large["p_holm"] == large["p_paired_t"] == pytest.approx(expected.pvalue)


def test_the_correction_covers_the_rows_of_a_table_and_no_others() -> None:
    members = [
        found(training(label="softmax"), {"own": (90, 80), "hard": (90, 85)}),
        found(training(label="ssmax"), {"own": (91, 81), "hard": (50, 40)}, jitter=0.3),
        found(training(label="entmax15"), {"own": (90, 78), "hard": (50, 40)}, jitter=0.2),
    ]
    lines = lines_of(members)
    differences = {(line.label, line.row.tested_with): line.difference for line in lines if line.row.size == 64}
    assert differences["softmax", "own"] is None
    assert differences["ssmax", "hard"] is None
    compared = [differences[key] for key in (("softmax", "hard"), ("ssmax", "own"), ("entmax15", "own"))]
    assert all(difference is not None for difference in compared)
    assert holm([d.p for d in compared if d]) == [d.p_holm for d in compared if d]


@pytest.mark.parametrize(("leak", "size"), [(2e-3, 64), (2e-3, 512), (1e-2, 512)])
def test_wrong_logits_are_predicted_as_brute_force_finds_them(leak: float, size: int) -> None:
    generator = np.random.default_rng(1)
    sets = 4000
    priority, label = generator.random((sets, size)), generator.integers(CLASSES, size=(sets, size))
    offset = leak * generator.standard_normal((sets, CLASSES))
    logit = priority + np.take_along_axis(offset, label, 1)
    right = float((logit.argmax(1) == priority.argmax(1)).mean())
    assert predicted_right(leak, size) == pytest.approx(right, abs=0.03)


def test_the_prediction_goes_from_certainty_to_chance() -> None:
    assert predicted_right(0, 10**6) == 1
    assert predicted_right(1, 10**6) == pytest.approx(1 / CLASSES, abs=0.01)


def test_the_leak_among_the_contenders_is_taken_where_it_is_known() -> None:
    coarse = found(training(sizes=(1024,)), {"own": (50,)})
    fine = found(training(sizes=(1024,)), {"own": (50,)}, slope_at_top=400.0, leak_at_top=1e-5)
    (first,), (second,) = scales_of([coarse]), scales_of([fine])
    assert second.predicted_right > first.predicted_right
    assert second.slope == first.slope == 100
    falling = found(training(sizes=(1024,)), {"own": (50,)}, leak=None)
    assert scales_of([falling]) == []


def test_a_leak_over_all_priorities_says_nothing_about_the_top_after_squeezed_training() -> None:
    (scale,) = scales_of([found(training(sizes=(1024,)), {"own": (50,)}, squeezed=0.9)])
    assert scale.predicted_right is None
    (known,) = scales_of(
        [found(training(sizes=(1024,)), {"own": (50,)}, squeezed=0.9, slope_at_top=9.0, leak_at_top=0.1)]
    )
    assert known.predicted_right == pytest.approx(predicted_right(0.1, 1024))
