"""The pyramid of `train vision`: its shape, where the normalizer is, learned landmarks, and the saved folder."""

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from typer.testing import CliRunner

import attnorm
from attnorm.cli import app
from attnorm.models.patch_state import normalizer_of, patched_modules
from attnorm_lab.training.vision import train
from attnorm_lab.training.vision.data import generated_textures
from attnorm_lab.training.vision.model import VisionSettings, build_model
from attnorm_lab.training.vision.train import model_card, save_vit, train_vit

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
