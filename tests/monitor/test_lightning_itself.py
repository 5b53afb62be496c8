"""Lightning itself, where it is installed: attention stands in its loggers' files beside the loss of the same batch."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from attnorm.models.observe import observe
from attnorm.monitor.alerts import AlertThresholds
from attnorm.monitor.monitor import AttentionMonitor
from attnorm.monitor.qk_clip import QKClip
from tests.models.tiny import llama, tokens

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::attnorm.monitor.alerts.AttentionAlert", "ignore:::lightning")


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.model = llama().train()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("valid_loss", self.model(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class TwoOptimizers(Module):
    """global_step moves on by two with each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        parameters = [*self.parameters()]
        return [torch.optim.SGD(part, lr=0.01) for part in (parameters[:4], parameters[4:])]


def _trainer(*callbacks: Any, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "max_steps": 6, "log_every_n_steps": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, **options,
    }  # fmt: skip
    return lightning.Trainer(callbacks=[*callbacks], **settings)


def _batches(count: int = 12) -> Any:
    return DataLoader(tokens(2 * count, 32), batch_size=2)


def _of_csv(folder: Path) -> Iterator[tuple[str, int, float]]:
    for file in folder.rglob("metrics.csv"):
        for row in csv.DictReader(file.read_text().splitlines()):
            yield from ((name, int(row["step"]), float(value)) for name, value in row.items() if value)


@pytest.mark.parametrize(
    ("module", "options", "steps"),
    [
        (Module, {"val_check_interval": 3}, [1, 3, 5]),
        (Module, {"accumulate_grad_batches": 2, "val_check_interval": 3}, [1, 3, 5]),
        (Module, {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 3, "log_every_n_steps": 1}, [*range(6)]),
        (TwoOptimizers, {"max_steps": 12}, [1, 3, 5]),
    ],
    ids=["validation in between", "accumulation", "epochs", "two optimizers"],
)
def test_at_the_steps_of_the_loss(tmp_path: Path, module: type[Any], options: dict[str, Any], steps: list[int]) -> None:
    from lightning.pytorch.loggers import CSVLogger

    monitor = AttentionMonitor(thresholds=AlertThresholds(dispersed_entropy=0.1))
    trainer = _trainer(monitor.lightning(), logger=CSVLogger(tmp_path), **options)
    trainer.fit(module(), _batches(), _batches(2))
    found = [*_of_csv(tmp_path)]
    for name in ("loss", "attn/layer_00/entropy_mean", "attn/layer_01/sink_mass_max", "attn/alert/dispersion"):
        assert [step for one, step, _ in found if one == name] == steps, name
    assert {name: value for name, step, value in found if step == steps[-1] and name in monitor.numbers} == (
        pytest.approx(monitor.numbers)
    )
    assert {(alert.kind, alert.step) for alert in monitor.alerts} >= {("dispersion", steps[0])}


@pytest.mark.parametrize(
    ("module", "options"),
    [(Module, {}), (Module, {"accumulate_grad_batches": 2}), (TwoOptimizers, {"max_steps": 12})],
    ids=["plain", "accumulation", "two optimizers"],
)
def test_qk_clip_scales_weights_after_every_optimizer_step(
    tmp_path: Path, module: type[Any], options: dict[str, Any]
) -> None:
    from lightning.pytorch.loggers import CSVLogger

    clip = QKClip(tau=0.01)
    _trainer(clip.lightning(), logger=CSVLogger(tmp_path), **options).fit(module(), _batches())
    assert clip.clips[0].step == 0
    assert [step for name, step, _ in _of_csv(tmp_path) if name == "attn/qk_clip/clipped_heads"] == [1, 3, 5]


def test_every_logger_gets_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = _trainer(AttentionMonitor().lightning(), logger=[CSVLogger(tmp_path), TensorBoardLogger(tmp_path, "tb")])
    trainer.fit(Module(), _batches())
    events = EventAccumulator(str(next(tmp_path.rglob("events.out.tfevents.*"))))
    events.Reload()
    name = "attn/layer_01/entropy_mean"
    points = [(point.step, pytest.approx(point.value)) for point in events.Scalars(name)]
    assert points == [(step, value) for one, step, value in _of_csv(tmp_path) if one == name]


def test_a_second_fit_is_measured_from_its_first_step_on() -> None:
    monitor = AttentionMonitor()
    callback = monitor.lightning()
    for _ in range(2):
        monitor.numbers = {}
        _trainer(callback, max_steps=2).fit(Module(), _batches())
        assert "attn/layer_01/entropy_mean" in monitor.numbers


@pytest.mark.parametrize("where", ["skips", "breaks"])
def test_a_batch_that_is_not_finished_leaves_the_model_its_own(where: str) -> None:
    class Meddling(Module):
        def on_train_batch_start(self, *_: Any) -> int:  # after the callbacks' hook of that name
            if where == "breaks":
                raise RuntimeError("meddled")
            return -1

    module = Meddling()
    trainer = _trainer(AttentionMonitor().lightning(), log_every_n_steps=1, max_epochs=1)
    if where == "breaks":
        with pytest.raises(RuntimeError, match="meddled"):
            trainer.fit(module, _batches())
    else:
        trainer.fit(module, _batches())
    with observe(module.model, lambda call: None):
        module.model(input_ids=tokens())


# Its category is in the package, which the process that hands out tests would import to read it.
@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
def test_the_package_of_the_old_name_takes_it_too() -> None:
    other = pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")

    class Old(other.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        training_step = Module.training_step
        configure_optimizers = Module.configure_optimizers

    monitor = AttentionMonitor()
    other.Trainer(
        max_steps=2, log_every_n_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[monitor.lightning()],
    ).fit(Old(llama()), _batches())  # fmt: skip
    assert "attn/layer_01/entropy_mean" in monitor.numbers


def test_the_monitor_itself_says_what_to_give_to_lightning() -> None:
    trainer = _trainer(AttentionMonitor())
    with pytest.raises(AttributeError, match=r"callbacks=\[monitor.lightning\(\)\]"):
        trainer.fit(Module(), _batches(1))
