"""Image classifiers: archives, changes at random, both architectures, learned landmarks, the saved folder."""

import errno
import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import SafetensorError
from typer.testing import CliRunner

import attnorm
from attnorm.cli import app
from attnorm.models.patch_state import normalizer_of, patched_modules
from attnorm_lab.training.vision import train
from attnorm_lab.training.vision.data import generated_textures, read_archive, shifted_and_mirrored
from attnorm_lab.training.vision.model import VisionSettings, build_model, square_landmarks
from attnorm_lab.training.vision.train import model_card, save_vit, train_vit


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


SIDE = 16
CLASSES = ("a", "b", "c")


def settings(**changed: Any) -> VisionSettings:
    small: dict[str, Any] = {
        "architecture": "pyramid", "patch": 2, "layers": 4, "heads": 4, "width": 32, "epochs": 2, "batch": 16,
        "learning_rate": 5e-3,
    }  # fmt: skip
    return VisionSettings(**{**small, **changed})


def test_stages_halve_the_side_and_double_the_width() -> None:
    model = build_model(settings(normalizer="entmax15"), CLASSES, SIDE)
    assert model.config.depths == [1, 1, 2]
    assert model.config.hidden_sizes == [8, 16, 32]
    assert model.config.num_attention_heads == [1, 2, 4]
    stages: list[tuple[int, ...]] = []
    for stage in model.segformer.stages:
        stage.register_forward_hook(lambda module, args, output: stages.append(tuple(output.shape[1:])))
    assert model(pixel_values=torch.randn(2, 3, SIDE, SIDE)).logits.shape == (2, 3)
    assert stages == [(8, 8, 8), (16, 4, 4), (32, 2, 2)]


def test_the_last_stage_keeps_softmax() -> None:
    paths = list(patched_modules(build_model(settings(normalizer="gaussian"), CLASSES, SIDE)))
    assert [path.split(".")[2] for path in paths] == ["0", "1"]


def test_models_of_a_comparison_start_with_equal_weights() -> None:
    one, other = (build_model(settings(normalizer=name), CLASSES, SIDE).state_dict() for name in ("softmax", "soft"))
    ours = {name for name in one if "attnorm" not in name}
    assert ours == {name for name in other if "attnorm" not in name}
    assert all(torch.equal(one[name], other[name]) for name in ours)


@pytest.mark.parametrize("architecture", ["vit", "pyramid"])
def test_a_convolution_starts_as_the_mean_of_its_square_and_learns(architecture: str) -> None:
    means, learned = (
        build_model(
            settings(architecture=architecture, normalizer="soft", landmarks=kind, landmark_side=2), CLASSES, SIDE
        )
        for kind in ("squares", "convolution")
    )
    pixels = torch.randn(2, 3, SIDE, SIDE)
    torch.testing.assert_close(learned(pixel_values=pixels).logits, means(pixel_values=pixels).logits)
    sampling = [normalizer_of(module).sampling for module in patched_modules(learned).values()]
    expected = {"vit": [(8, 8, 4, 4)] * 4, "pyramid": [(8, 8, 4, 4), (8, 8, 2, 2)]}
    assert [tuple(each.shape) for each in sampling] == expected[architecture]  # type: ignore[union-attr,operator]
    learned(pixel_values=pixels).logits.square().sum().backward()
    assert all(float(each.grad.abs().max()) > 0 for each in sampling)  # type: ignore[union-attr,operator]


def test_a_trained_pyramid_is_saved_with_its_landmarks(tmp_path: Path) -> None:
    images = generated_textures(32, 16, SIDE)
    chosen = settings(normalizer="soft:normalised=true", landmarks="convolution", landmark_side=2)
    model, record = train_vit(chosen, images, torch.device("cpu"))
    assert record["problem"] is None
    assert record["tokens"] == 64
    assert record["training_loss"][-1] < record["training_loss"][0]
    assert record["settings"]["landmarks"] == "convolution"
    save_vit(model, record, SIDE, tmp_path / "run")
    again = attnorm.from_pretrained(tmp_path / "run").eval()
    pixels = torch.randn(2, 3, SIDE, SIDE)
    with torch.no_grad():
        torch.testing.assert_close(again(pixel_values=pixels).logits, model.eval()(pixel_values=pixels).logits)
    start = build_model(chosen, images.train.classes, SIDE).state_dict()
    name = next(name for name in start if name.endswith("sampling"))
    assert not torch.equal(again.state_dict()[name], start[name])


def test_a_full_disk_leaves_no_half_written_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, record = train_vit(settings(), generated_textures(32, 16, SIDE), torch.device("cpu"))

    def fill_the_disk(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(model, "save_pretrained", fill_the_disk)
    with pytest.raises(OSError, match="No space left") as full:
        save_vit(model, record, SIDE, tmp_path / "run")
    assert full.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_older_records_stay_valid() -> None:
    assert not {"architecture", "landmarks", "landmark_side"} & VisionSettings().as_dict().keys()
    assert settings().as_dict()["architecture"] == "pyramid"


def test_the_command_line_shows_losses_and_writes_a_card(tmp_path: Path) -> None:
    words = ["lab", "train", "vision", "--quick", "--architecture", "pyramid", "--patch", "4", "--epochs", "1"]
    words += ["--normalizer", "soft:normalised=true", "--landmarks", "convolution", "--landmark-side", "2"]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "run" / "vision.json").read_text())
    assert {record["settings"][name] for name in ("architecture", "landmarks")} == {"pyramid", "convolution"}
    last = f"{record['training_loss'][-1]:.3f}"
    assert re.findall(r"training: 4 of 4, loss ([\d.]+)", done.stderr) == [last]
    share = f"{record['correct'] / 64:.1%}"
    assert {share, f"{record['test_loss']:.3f}", last} <= set(re.findall(r"[\d.]+%?", done.stdout))
    card = (tmp_path / "run" / "README.md").read_text()
    for part in (share, f"{record['test_loss']:.3f}", last, "`soft`, normalised=True", "stripes"):
        assert part in card


def test_training_reports_the_mean_loss_of_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "LOSS_EVERY", 3)
    reports: list[tuple[int, int, float]] = []
    images = generated_textures(64, 16, SIDE)
    chosen = settings(architecture="vit", normalizer="softmax", layers=1, epochs=2, batch=16)
    _, record = train_vit(chosen, images, torch.device("cpu"), report=lambda *report: reports.append(report))
    assert [step for step, _, _ in reports] == list(range(1, 9))
    assert {steps for _, steps, _ in reports} == {8}
    losses = [loss for _, _, loss in reports]
    assert [losses[3], losses[7]] == record["training_loss"]
    assert losses[1] == losses[0] != losses[2]  # read at the first step, then at the third
    assert losses[4] == losses[3] != losses[5]


def test_the_card_of_a_training_that_failed() -> None:
    images = generated_textures(32, 16, SIDE)
    _, record = train_vit(settings(learning_rate=1e30, epochs=3), images, torch.device("cpu"))
    assert record["correct"] is None
    assert record["problem"] in model_card(record, CLASSES, SIDE, "", "")


@pytest.mark.nightly
def test_compiled_layers_train_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = settings(normalizer="linear", layers=3, epochs=1)
    images = generated_textures(32, 16, SIDE)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    monkeypatch.setitem(train.COMPILE_OPTIONS, "backend", backend)
    torch.compiler.reset()
    _, eager = train_vit(chosen, images, torch.device("cpu"))
    model, compiled = train_vit(chosen, images, torch.device("cpu"), compiled=True)
    assert len(graphs) == 3  # one for each stage, the last one too
    assert compiled["compiled"]
    assert not eager["compiled"]
    assert compiled["training_loss"] == pytest.approx(eager["training_loss"], rel=1e-4)
    assert compiled["test_loss"] == pytest.approx(eager["test_loss"], rel=1e-4)
    model(pixel_values=torch.randn(5, 3, SIDE, SIDE))
    assert len(graphs) == 3  # after training nothing is compiled
