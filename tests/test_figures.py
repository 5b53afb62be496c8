"""Labels of figures: they do not overlap, stay close to their lines, and break between names only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnorm.figures import place_labels, wrapped

heights = st.floats(0.01, 0.2)


@given(st.lists(st.tuples(st.floats(0, 1), heights), min_size=1, max_size=12))
def test_labels_keep_their_order_and_their_distance(labels: list[tuple[float, float]]) -> None:
    labels.sort(reverse=True)
    wanted, tall = [center for center, _ in labels], [height for _, height in labels]
    placed = place_labels(wanted, tall)
    for i in range(len(placed) - 1):
        assert placed[i] - placed[i + 1] >= (tall[i] + tall[i + 1]) / 2 - 1e-9
    assert sum(placed) == pytest.approx(sum(wanted))  # least squares moves groups, not the whole


def test_labels_with_room_stay_where_they_are() -> None:
    assert place_labels([0.9, 0.5, 0.1], [0.1, 0.1, 0.1]) == pytest.approx([0.9, 0.5, 0.1])
    assert place_labels([0.9, 0.5], [0.1, 0.1], highest=0.8) == pytest.approx([0.8, 0.5])
    assert place_labels([0.9, 0.9], [0.2, 0.2], highest=0.9) == pytest.approx([0.9, 0.7])
    with pytest.raises(ValueError, match=r"2.*1"):
        place_labels([0.5, 0.4], [0.1])


def test_wrapping_cuts_between_names_only() -> None:
    assert wrapped(["softmax", "sink", "sa_softmax"], 14) == ["softmax, sink,", "sa_softmax"]
    assert wrapped(["a_name_longer_than_the_width"], 5) == ["a_name_longer_than_the_width"]
