"""The image of a vision model for the report: its pixels as PNG, its grid of patches, and which keys are stored."""

import base64
import io
import struct
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import attnorm
from attnorm.models.media import picture_of
from attnorm.report.page import payload
from tests.analysis.tiny_models import vit


def pixels_of(png: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png.partition(",")[2]))))


def test_the_picture_has_the_pixels_of_the_model() -> None:
    values = torch.linspace(-1, 1, 3 * 8 * 12).reshape(1, 3, 8, 12)
    picture = picture_of({"pixel_values": values}, SimpleNamespace(patch_size=4))
    assert picture is not None
    assert (picture.rows, picture.columns) == (2, 3)
    assert isinstance(picture.rows, int)
    assert isinstance(picture.columns, int)
    expected = (255 * (values[0] + 1) / 2).round().permute(1, 2, 0).numpy()
    assert np.array_equal(pixels_of(picture.png), expected)


def test_a_large_image_becomes_small_and_a_gray_one_has_three_channels() -> None:
    picture = picture_of({"pixel_values": torch.rand(1, 1, 336, 336)}, SimpleNamespace(patch_size=14))
    assert picture is not None
    assert pixels_of(picture.png).shape == (112, 112, 3)
    assert picture.rows == 24


@pytest.mark.parametrize(
    ("inputs", "patch"),
    [
        ({"input_ids": torch.zeros(1, 3)}, 4),
        ({"pixel_values": torch.zeros(1, 2, 3, 8, 8)}, 4),  # video
        ({"pixel_values": torch.zeros(1, 3, 8, 8)}, None),
        ({"pixel_values": torch.zeros(1, 3, 8, 8)}, 16),
        ({"pixel_values": torch.zeros(1, 3, 8, 16)}, 9),
        ({"pixel_values": torch.zeros(1, 3, 16, 8)}, 9),
        ({"pixel_values": torch.zeros(1, 2, 8, 8)}, 4),
        ({"pixel_values": torch.zeros(1, 4, 8, 8)}, 4),
    ],
)
def test_other_inputs_have_no_picture(inputs: dict[str, torch.Tensor], patch: int | None) -> None:
    assert picture_of(inputs, SimpleNamespace(patch_size=patch)) is None


@pytest.mark.parametrize(("side", "pixels"), [(1, 1), (159, 159), (160, 160), (161, 81), (320, 160), (321, 107)])
def test_the_longer_side_has_at_most_160_pixels(side: int, pixels: int) -> None:
    picture = picture_of({"pixel_values": torch.rand(2, 1, side, 1)}, SimpleNamespace(patch_size=1))
    assert picture is not None
    assert pixels_of(picture.png).shape == (pixels, 1, 3)
    assert picture.as_dict() == {"png": picture.png, "rows": side, "columns": 1}


@pytest.mark.parametrize("value", [0.0, 2.5, float("nan")])
def test_an_image_of_one_value_is_black(value: float) -> None:
    picture = picture_of({"pixel_values": torch.full((1, 3, 2, 2), value)}, SimpleNamespace(patch_size=2))
    assert picture is not None
    assert (picture.rows, picture.columns) == (1, 1)
    assert not pixels_of(picture.png).any()


def test_small_differences_are_stretched_to_black_and_white() -> None:
    values = torch.tensor([0.5, 0.5 + 1e-5])[None, None, None]
    picture = picture_of({"pixel_values": values}, SimpleNamespace(patch_size=1))
    assert picture is not None
    assert pixels_of(picture.png)[0].tolist() == [[0, 0, 0], [255, 255, 255]]


IMAGE = {"pixel_values": torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))}


def test_every_patch_of_the_class_token_and_the_middle_is_stored_and_shown() -> None:
    analysis = attnorm.analyze(vit(), IMAGE, metrics="core")
    one = analysis.reads.to_pylist()[0]
    own = [r for r in analysis.reads.to_pylist() if (r["layer"], r["head"]) == (one["layer"], one["head"])]
    assert sorted({r["row"] for r in own}) == [0, 11]  # 1 + row 2 of 4, column 2 of 4
    assert sorted(r["key"] for r in own if r["row"] == 0) == list(range(17))
    assert sum(r["weight"] for r in own if r["row"] == 0) == pytest.approx(1, abs=1e-5)
    shown = payload(analysis.report_data)
    assert shown["pictures"][0]["rows"] == 4
    assert shown["reads"]["left_out"] == 0


def test_chosen_rows_and_keys_are_kept_and_without_keys_no_picture_is_stored() -> None:
    chosen = attnorm.analyze(vit(), IMAGE, metrics="core", read_keys=3, read_rows=(2,))
    assert {r["row"] for r in chosen.reads.to_pylist()} == {2}
    assert max(r["rank"] for r in chosen.reads.to_pylist()) == 3
    private = attnorm.analyze(vit(), IMAGE, metrics="core", read_keys=0)
    assert "pictures" not in private.manifest


def test_only_a_png_as_data_reaches_the_page() -> None:
    analysis = attnorm.analyze(vit(), IMAGE, metrics="core")
    (name,) = analysis.manifest["pictures"]
    analysis.manifest["pictures"][name]["png"] = "https://example.org/track.png"
    assert payload(analysis.report_data)["pictures"] == {}


def test_the_header_of_the_png_is_that_of_the_standard() -> None:
    """Width, height, 8 bits, RGB, and the only methods that there are of compression, filters and lines."""
    picture = picture_of({"pixel_values": torch.rand(1, 3, 8, 12)}, SimpleNamespace(patch_size=4))
    assert picture is not None
    content = base64.b64decode(picture.png.partition(",")[2])
    assert content[:16] == b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR"
    assert struct.unpack(">IIBBBBB", content[16:29]) == (12, 8, 8, 2, 0, 0, 0)
    assert content[29:33] == struct.pack(">I", zlib.crc32(content[12:29]))
