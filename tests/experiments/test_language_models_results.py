"""Tables from lines: means over seeds, who is best, and whether sharper heads find more."""

from typing import Any

import pytest

from attnorm.experiments.language_models.markdown import all_tables, in_words
from attnorm.experiments.language_models.results import Spread, contenders, rank_correlation


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


def test_seeds_are_averaged_and_the_lowest_loss_comes_first() -> None:
    first, second = contenders(lines())
    assert (first.name, first.seeds, second.name, second.seeds) == ("ssmax", 2, "softmax", 1)
    assert first.losses["valid"][16].mean == pytest.approx(5.6)
    assert first.losses["valid"][8].half == pytest.approx(0.1)
    assert second.losses["valid"][8].half is None
    assert first.found[8].mean == pytest.approx(0.6)
    assert first.attention == {"entropy_ratio": pytest.approx(0.6)}
    assert first.tokens_per_second == 101.0


def test_the_tables_say_it() -> None:
    text = all_tables(lines())
    assert "| ssmax | 2 | 2.8000 ± 0.1000 | 5.6000 ± 0.2000 |" in text
    assert "| softmax | 1 | 3.0000 | 6.0000 |" in text
    assert "| ssmax | 60.0 ± 10.0 | 100.0 ± 0.0 | 30.0 ± 5.0 |" in text
    assert text.index("| softmax | 90.0 |") < text.index("| ssmax | 60.0 ± 10.0 |")
    assert "| ssmax | 101 | 1.0 | engine | 50 | 7 | 0.001 |" in text
    words = in_words(contenders(lines()))
    assert "On windows of 8 tokens ssmax has the lowest loss on valid, 2.8000 nats; softmax 3.0000." in words
    assert "At 8 tokens softmax finds most keys, 90.0 %." in words


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
