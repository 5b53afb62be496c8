"""The dispersion figure: valid files, every normalizer named, labels that do not overlap, the same bytes every time."""

import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image

from attnorm_lab.bench.dispersion import Curve, Dispersion, percent
from attnorm_lab.bench.figures import dispersion_figure, merge_coinciding_curves, save_dispersion_figure

LENGTHS = tuple(2**power for power in range(4, 18))


def curve(label: str, *, power: float = 0.0, start: float = 1.0, floor: int = 10**9) -> Curve:
    """Falls as n^-power from `start`, and to 0 beyond `floor` keys."""
    kept = tuple(start * (n / 16) ** -power if n < floor else 0.0 for n in LENGTHS)
    return Curve(name=label.partition(",")[0], label=label, lengths=LENGTHS, kept=kept)


def picture(*curves: Curve) -> Dispersion:
    return Dispersion(gap=6.0, noise=1.0, draws=3, seed=0, curves=curves, left_out={"soft": "no"})


ORDINARY = picture(
    curve("sparsemax"),
    curve("hard"),
    curve("entmax, α = 1.25", power=0.05),
    curve("softmax", power=0.7, start=0.9),
    curve("sink", power=0.7, start=0.905),
    curve("relu", power=1.0, start=0.3),
    curve("local, 256 keys", floor=1000),
)


def texts(dispersion: Dispersion) -> str:
    figure = dispersion_figure(dispersion)
    return "\n".join(text.get_text() for axes in figure.axes for text in axes.texts)


def test_both_files_are_valid_and_not_empty(tmp_path: Path) -> None:
    """And the same numbers give the same file."""
    svg, png = save_dispersion_figure(ORDINARY, tmp_path / "deep" / "er")
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert 10_000 < svg.stat().st_size < 400_000
    with Image.open(png) as image:
        assert image.size == (1920, 1080)
        darkest, lightest = image.convert("L").getextrema()
    assert darkest < 60
    assert lightest == 255  # light background
    assert save_dispersion_figure(ORDINARY, tmp_path)[0].read_bytes() == svg.read_bytes()


def test_every_curve_is_named_with_its_settings_and_every_group_explained() -> None:
    written = texts(ORDINARY)
    for one in ORDINARY.curves:
        assert one.label.replace(", ", " ") in written
    for word in ("STAYS", "FADES", "COLLAPSES", "more than half of the row", "equal share"):
        assert word in written


def test_curves_that_coincide_share_a_line_and_softmax_comes_first() -> None:
    lines = merge_coinciding_curves(ORDINARY)
    assert [[curve.name for curve in line] for line in lines] == [
        ["sparsemax", "hard"],
        ["entmax"],
        ["softmax", "sink"],
        ["relu"],
        ["local"],
    ]


def test_names_at_the_right_do_not_overlap() -> None:
    many = picture(*(curve(f"normalizer_{i}", power=0.5 + i / 1000) for i in range(25)))
    figure = dispersion_figure(many)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts if text.get_text().startswith("normalizer_")]
    boxes.sort(key=lambda box: box.y0)
    assert len(boxes) >= 5
    assert all(low.y1 <= high.y0 + 1 for low, high in pairwise(boxes))


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="all were skipped"):
        save_dispersion_figure(picture(), tmp_path)


def test_few_lengths_are_drawn_too(tmp_path: Path) -> None:
    short = Curve(name="softmax", label="softmax", lengths=(16, 32), kept=(0.9, 0.8))
    assert all(path.stat().st_size > 5000 for path in save_dispersion_figure(picture(short), tmp_path))


@pytest.mark.parametrize(
    ("part", "printed"),
    [(1.0, "100 %"), (0.996, "100 %"), (0.564, "56 %"), (0.0466, "4.7 %"), (0.00187, "0.19 %"), (0.000057, "0.006 %"),
     (1e-9, "< 0.001 %"), (0.0, "0 %")],
)  # fmt: skip
def test_percentages_show_the_digits_that_matter(part: float, printed: str) -> None:
    assert percent(part) == printed
