"""Tables from lines: means over seeds, who is best, and whether sharper heads find more."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from attnorm.files import read_jsonl
from attnorm.normalizers.asentmax import asentmax
from attnorm.normalizers.ssmax import ssmax
from attnorm_lab.experiments.language_models.results import (
    Spread,
    all_tables,
    contenders,
    differences_table,
    learned_parameters,
    most_informative_length,
    rank_correlation,
    summary,
)

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def lines() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    figures = {("softmax", 0): (3.0, 0.9), ("ssmax", 0): (2.9, 0.5), ("ssmax", 1): (2.7, 0.7)}
    for (name, seed), (loss, found) in figures.items():
        made += [
            {"stage": "rate", "normalizer": name, "learning_rate": 1e-3, "valid_loss": loss, "seed": seed},
            {
                "stage": "main", "normalizer": name, "seed": seed, "problem": None, "learning_rate": 1e-3,
                "tokens": 50, "parameters": 7, "tokens_per_second": 100.0 + seed, "peak_memory_bytes": 2**30,
                "attention": "engine",
            },
            {
                "stage": "measure", "normalizer": name, "at_inference": None, "seed": seed,
                "losses": {"valid": {"8": loss, "16": 2 * loss}},
                "attention_statistics": {"mean": {"entropy_ratio": found, "jacobian_norm": None}},
            },
            {
                "stage": "needle", "normalizer": name, "at_inference": None, "seed": seed,
                "by_length": {"8": {"exact": found, "characters": 1.0, "questions": 5}},
                "among_many": {"keys": 3, "questions": 60, "exact": found / 2, "characters": 1.0},
            },
        ]  # fmt: skip
    return made


def measured(**losses: tuple[float, ...]) -> list[dict[str, Any]]:
    return [
        {"stage": "measure", "normalizer": name, "at_inference": None, "seed": seed, "losses": {"valid": {"8": loss}}}
        for name, seeds in losses.items()
        for seed, loss in enumerate(seeds)
    ]


def test_losses_are_compared_with_those_of_the_same_seed_and_a_single_one_by_the_spread_of_the_others() -> None:
    shown = differences_table(measured(softmax=(3.0, 3.2, 3.1), ssmax=(2.9, 3.1, 3.01), sink=(3.15,)), "softmax")
    _, _, ssmax, sink = (line.split(" | ") for line in shown.splitlines())
    paired = stats.ttest_rel([2.9, 3.1, 3.01], [3.0, 3.2, 3.1]).confidence_interval(0.95)
    half_width = (paired.high - paired.low) / 2
    assert ssmax == ["| ssmax", "3", f"**-0.097 ± {half_width:.3f}** |"]
    spread = ((0.02 + np.var([2.9, 3.1, 3.01], ddof=1) * 2) / 4) ** 0.5
    assert sink == ["| sink", "1", f"+0.050 ± {stats.t.ppf(0.975, 4) * spread * (1 + 1 / 3) ** 0.5:.3f} |"]


def test_a_plan_of_one_seed_has_no_intervals() -> None:
    assert "±" not in differences_table(measured(softmax=(3.0,), ssmax=(2.9,)), "softmax")
    assert differences_table(measured(ssmax=(2.9,)), "softmax") == ""


def test_the_published_records_mark_few_differences() -> None:
    """nearmax is worse than softmax with ALiBi in every column, and no map alone is better than softmax."""
    small = read_jsonl(RESULTS / "language-models.jsonl.xz")
    rows = {row.split(" | ")[0]: row.split(" | ")[1:] for row in differences_table(small, "softmax").splitlines()[2:]}
    better = {name for name, cells in rows.items() if any(cell.startswith("**-") for cell in cells)}
    assert better == {"| alibi", "| nearmax"}
    rows = {row.split(" | ")[0]: row.split(" | ")[1:] for row in differences_table(small, "alibi").splitlines()[2:]}
    assert rows["| nearmax"][1] == "+0.047 ± 0.023"
    assert all(cell.strip("*").startswith("+") for cell in rows["| nearmax"][1:])


def test_seeds_are_averaged_and_the_lowest_loss_comes_first() -> None:
    first, second = contenders(lines())
    assert (first.name, first.seeds, second.name, second.seeds) == ("ssmax", 2, "softmax", 1)
    assert first.losses["valid"][16].mean == pytest.approx(5.6)
    assert first.losses["valid"][8].half == pytest.approx(0.1)
    assert second.losses["valid"][8].half is None
    assert first.keys_found[8].mean == pytest.approx(0.6)
    assert first.attention == {"entropy_ratio": pytest.approx(0.6)}
    assert first.tokens_per_second == 101.0


def test_seeds_whose_attention_was_computed_in_different_ways_are_marked() -> None:
    made = lines()
    next(line for line in made if line["stage"] == "main" and line["seed"] == 1)["attention"] = "dense"
    assert [(one.name, one.computed) for one in contenders(made)] == [
        ("ssmax", "engine and dense"),
        ("softmax", "engine"),
    ]
    assert "| engine and dense |" in all_tables(made)


def test_the_page_names_each_normalizer_whose_seeds_were_computed_in_different_ways() -> None:
    published = read_jsonl(RESULTS / "language-models.jsonl.xz")
    mixed = {one.normalizer for one in contenders(published) if " and " in one.computed}
    assert mixed == {"softpick"}
    assert "Seeds 0 and 1 of `softpick`" in (RESULTS / "language-models.md").read_text()


def test_the_tables_say_it() -> None:
    text = all_tables(lines())
    assert "| ssmax | 2 | 2.8000 ± 0.1000 | 5.6000 ± 0.2000 |" in text
    assert "| softmax | 1 | 3.0000 | 6.0000 |" in text
    assert "| ssmax | 60.0 ± 10.0 | 100.0 ± 0.0 | 30.0 ± 5.0 |" in text
    assert text.index("| softmax | 90.0 |") < text.index("| ssmax | 60.0 ± 10.0 |")
    assert "| ssmax | 101 | 1.0 | engine | 50 | 7 | 0.001 |" in text
    text = summary(contenders(lines()))
    assert "On windows of 8 tokens ssmax has the lowest loss on valid, 2.8000 nats; softmax 3.0000." in text
    assert "At 8 tokens softmax finds most keys, 90.0 %." in text


def test_without_results_there_is_nothing_to_say() -> None:
    assert contenders([]) == []
    assert all_tables([]) == "\n"


def test_rank_correlation() -> None:
    assert rank_correlation([(1, 10), (2, 20), (3, 30), (4, 100)]) == pytest.approx(1)
    assert rank_correlation([(1, 4), (2, 3), (3, 2), (4, 1)]) == pytest.approx(-1)
    assert rank_correlation([(1, 1), (2, 1), (3, 1), (4, 1)]) is None
    assert rank_correlation([(1, 1), (2, 2), (3, 3)]) is None
    assert rank_correlation([(1, 1), (1, 2), (2, 2), (3, 3)]) == pytest.approx(0.833, abs=1e-3)


def test_a_spread_is_written_with_its_half_width() -> None:
    assert Spread.of([1.0, 2.0]).written(2) == "1.50 ± 0.50"
    assert Spread.of([0.123]).written(1, 100) == "12.3"


def asked(name: str, at_8: float, at_16: float, at_32: float) -> dict[str, Any]:
    by_length = {"8": at_8, "16": at_16, "32": at_32}
    return {
        "stage": "needle", "normalizer": name, "at_inference": None, "seed": 0,
        "by_length": {n: {"exact": share, "characters": 1.0, "questions": 10} for n, share in by_length.items()},
        "answers": [
            {"length": 16, "depth": 0.25, "exact": 2 * at_16, "questions": 5},
            {"length": 16, "depth": 0.75, "exact": 0.0, "questions": 5},
        ],
    }  # fmt: skip


def test_models_are_compared_where_they_differ() -> None:
    made = [line for line in lines() if line["stage"] == "measure" and line["seed"] == 0]
    made += [asked("softmax", 1.0, 0.4, 0.0), asked("ssmax", 0.9, 0.1, 0.0)]
    found = contenders(made)
    assert most_informative_length(found) == 16
    assert most_informative_length([]) is None
    nothing = {**made[0], "normalizer": "linear"}
    assert most_informative_length(contenders([*made, nothing, asked("linear", 0.0, 0.0, 0.0)])) == 16
    assert {one.name: one.questions for one in found} == {"softmax": 10, "ssmax": 10}
    text = all_tables(made)
    assert "| normalizer | entropy / log n | % keys at 16 | 95 % |" in text
    assert "| softmax | 0.900 | 40 | 17 to 69 |" in text
    assert text.index("| ssmax | 0.500 | 10 |") < text.index("| softmax | 0.900 | 40 |")
    assert "| key at token, of 16 | 4 | 12 |" in text
    assert "| softmax | 80 | 0 |" in text
    assert "At 32 tokens no model finds a key." in text


def test_models_that_find_as_many_keys_are_all_named() -> None:
    made = [line for line in lines() if line["stage"] == "measure" and line["seed"] == 0]
    made += [asked("softmax", 1.0, 0.4, 0.0), asked("ssmax", 1.0, 0.1, 0.0)]
    assert "At 8 tokens ssmax, softmax find most keys, 100.0 %." in summary(contenders(made))


def test_what_normalizers_learned_is_given_as_it_acts() -> None:
    run = {"stage": "main", "seed": 0}
    made = [
        {**run, "normalizer": "softmax", "learned": {}},
        {
            **run,
            "normalizer": "ssmax",
            "learned": {"0.attention.scale.0.s": [0.1, 0.2], "1.attention.scale.0.s": [0.6]},
        },
        {**run, "normalizer": "asentmax", "learned": {"0.scale.0.raw_beta": [0.0], "0.scale.0.raw_gamma": [0.5]}},
    ]
    s, factor, beta, gamma, scale = learned_parameters(made, [100])
    assert (s.normalizer, s.what, s.mean, s.smallest, s.largest) == ("ssmax", "s", pytest.approx(0.3), 0.1, 0.6)
    assert (factor.what, factor.mean) == ("factor at 100 keys", pytest.approx(0.3 * 4.60517))
    assert (beta.what, beta.mean) == ("beta", pytest.approx(0.693147))
    assert (gamma.what, gamma.mean) == ("gamma", pytest.approx(0.924234))
    assert scale.mean == pytest.approx(1 + 0.693147 * 4.61512**0.924234)


def test_the_factor_that_is_written_is_the_one_that_acts() -> None:
    for made in (ssmax(0.3), asentmax(gamma=0.7)):
        learned = {name: [value.item()] for name, value in made.named_parameters()}
        line = {"stage": "main", "seed": 0, "normalizer": made.name, "learned": learned}
        assert learned_parameters([line], [300])[-1].mean == pytest.approx(made.rules[0].gain(300), rel=1e-5)
