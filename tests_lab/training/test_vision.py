"""Image classifiers: reading an archive, changing images at random, and the model that settings describe."""

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from attnorm.models.patch_state import patched_modules
from attnorm_lab.training.vision.data import generated_textures, read_archive, shifted_and_mirrored
from attnorm_lab.training.vision.model import VisionSettings, build_model, square_landmarks


def archive(path: Path, files: dict[str, tuple[int, int, int]], side: int = 8) -> Path:
    with tarfile.open(path, "w:xz") as tar:
        for name, color in files.items():
            made = io.BytesIO()
            Image.new("RGB", (side, side), color).save(made, "PNG")
            member = tarfile.TarInfo(name)
            member.size = made.tell()
            made.seek(0)
            tar.addfile(member, made)
    return path


def test_an_archive_is_read_by_split_and_class(tmp_path: Path) -> None:
    files = {
        "cifar/train/cat/1.png": (255, 0, 0), "cifar/train/ant/2.png": (0, 255, 0), "cifar/test/ant/3.png": (0, 0, 255),
        "cifar/test/cat/4.png": (9, 9, 9), "cifar/README": (0, 0, 0),
    }  # fmt: skip
    images = read_archive(archive(tmp_path / "images.tar.xz", files))
    assert images.train.classes == ("ant", "cat")
    assert images.train.labels.tolist() == [1, 0]
    assert images.train.pixels[0, :, 3, 3].tolist() == [255, 0, 0]
    assert images.test.pixels.shape == (2, 3, 8, 8)


def test_an_archive_with_other_classes_in_the_test_is_rejected(tmp_path: Path) -> None:
    files = {"train/cat/1.png": (1, 1, 1), "test/dog/2.png": (1, 1, 1)}
    with pytest.raises(ValueError, match="dog"):
        read_archive(archive(tmp_path / "images.tar", files))


def test_what_is_not_an_archive_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no archive")
    with pytest.raises(ValueError, match=r"notes\.txt"):
        read_archive(tmp_path / "notes.txt")


def test_shifts_stay_within_an_eighth_and_half_are_mirrored() -> None:
    image = torch.zeros(400, 3, 16, 16, dtype=torch.uint8)
    image[:, :, 8, 5] = 200
    moved = shifted_and_mirrored(image, torch.Generator().manual_seed(0))
    _, rows, columns = (moved[:, 0] == 200).nonzero().T
    assert set(rows.tolist()) == set(range(6, 11))
    assert set(columns.tolist()) == set(range(3, 8)) | set(range(8, 13))
    assert 150 < (columns >= 8).sum() < 250


def test_a_shift_uncovers_the_reflected_image() -> None:
    image = torch.arange(1, 17, dtype=torch.uint8).expand(50, 3, 16, 16)
    moved = shifted_and_mirrored(image, torch.Generator().manual_seed(0))[:, 0, 0].int()
    assert moved.min() == 1
    assert (moved[:, 1:] - moved[:, :-1]).abs().unique().tolist() == [1]  # no jump at an edge
    assert moved[:, 0].unique().tolist() == [1, 2, 3, 14, 15, 16]


def test_textures_are_deterministic_and_of_every_class() -> None:
    one, two = generated_textures(40, 8, 16), generated_textures(40, 8, 16)
    assert torch.equal(one.train.pixels, two.train.pixels)
    assert set(one.train.labels.tolist()) == {0, 1, 2, 3}


def test_shared_keys_are_the_queries() -> None:
    shape: dict[str, Any] = {"layers": 1, "heads": 2, "width": 8}
    own = build_model(VisionSettings(normalizer="soft", **shape), ("a", "b"), 16)
    shared = build_model(VisionSettings(normalizer="soft", shared_keys=True, **shape), ("a", "b"), 16)
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (own, shared)]
    assert counts[0] - counts[1] == 8 * 8 + 8
    assert len(patched_modules(shared)) == 1


def test_landmarks_are_the_class_token_and_the_means_of_squares() -> None:
    keys = torch.randn(2, 3, 1 + 16, 5)
    found = square_landmarks(keys, 2)
    assert found.shape == (2, 3, 5, 5)
    assert torch.equal(found[:, :, 0], keys[:, :, 0])
    assert torch.allclose(found[:, :, 2], keys[:, :, [3, 4, 7, 8]].mean(-2), atol=1e-6)  # top right
    assert torch.allclose(square_landmarks(keys, 9), keys)  # not more landmarks than patches


def test_a_model_with_squares_prints_the_same_text_in_every_process() -> None:
    settings = VisionSettings(normalizer="soft", squares=2, layers=1, heads=2, width=8)
    assert " at 0x" not in repr(build_model(settings, ("a", "b"), 16))


def test_equal_seeds_start_from_equal_weights() -> None:
    models = [
        build_model(VisionSettings(normalizer=name, layers=1, heads=2, width=8), ("a", "b"), 16)
        for name in ("softmax", "entmax15")
    ]
    first, second = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
