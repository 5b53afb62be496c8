"""Thresholds as a person sets them: checked one by one, with what to write instead."""

from attnorm.analysis.verdicts.thresholds import Thresholds, thresholds_of


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
