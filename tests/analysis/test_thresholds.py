"""Thresholds as a person sets them: checked one by one, with what to write instead."""

import pytest

from attnorm.analysis.verdicts.thresholds import Thresholds, thresholds_of


def test_words_change_what_they_name_and_nothing_else() -> None:
    changed = Thresholds(near_floor=0.2).changed(["dispersed_entropy=0.95", " saturation_top_n = 5 "])
    assert changed == Thresholds(near_floor=0.2, dispersed_entropy=0.95, saturation_top_n=5)
    assert isinstance(changed.saturation_top_n, int)
    assert Thresholds().changed([]) == Thresholds()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dispersed_entropy"], "set as NAME=VALUE, e.g. dispersed_entropy=0.95; got 'dispersed_entropy'"),
        (["dispersed_entrop=1"], "unknown threshold 'dispersed_entrop'; did you mean 'dispersed_entropy'"),
        (["=1"], "unknown threshold ''; known are 'dispersed_entropy'"),
        (["zebra=1"], "unknown threshold 'zebra'; known are"),
        (["dispersed_entropy=high"], "dispersed_entropy takes a number between 0 and 1, got 'high'"),
        (["dispersed_entropy="], "dispersed_entropy.*got ''"),
        (["dispersed_entropy=1.5"], "dispersed_entropy is a share, expected between 0 and 1, got 1.5"),
        (["dispersed_entropy=nan"], "expected between 0 and 1, got nan"),
        (["saturation_top_n=2.5"], "saturation_top_n takes a whole number, got '2.5'"),
        (["saturation_top_n=0"], "saturation_top_n must be a whole number of at least 1, got 0"),
        (["sensitive_quantile=80"], "sensitive_quantile must be one of"),
        (["near_floor=0.1", "near_floor=0.2"], "near_floor is set twice"),
    ],
)
def test_what_cannot_be_is_refused_by_name(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Thresholds().changed(words)


def test_differences_name_both_sides() -> None:
    assert Thresholds(near_floor=0.2).differences(Thresholds()) == {"near_floor": (0.2, 0.1)}
    assert Thresholds().differences(Thresholds()) == {}


def test_saved_thresholds_of_another_version_are_read() -> None:
    assert thresholds_of({"near_floor": 0.2, "forgotten": 0.1}) == Thresholds(near_floor=0.2)
