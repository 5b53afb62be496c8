"""In Lightning: on the steps that it logs, to its loggers, once per accumulated batch."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnorm.models.observe import observe
from attnorm.monitor.monitor import AttentionMonitor
from tests.models.tiny import llama, tokens

pytestmark = pytest.mark.filterwarnings("ignore::attnorm.monitor.alerts.AttentionAlert")


class Logger:
    def __init__(self) -> None:
        self.heard: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.heard[step] = metrics


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the callback needs of Lightning, whether it is installed or not."""
    callbacks = ModuleType("lightning.pytorch.callbacks")
    callbacks.Callback = object  # type: ignore[attr-defined]
    for name in ("lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "lightning.pytorch.callbacks", callbacks)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("accumulated", [1, 2])
def test_it_measures_on_logging_steps(accumulated: int) -> None:
    module = nn.ModuleDict({"inner": llama()})  # a LightningModule holds the model
    logger = Logger()
    trainer = SimpleNamespace(global_step=0, log_every_n_steps=2, is_global_zero=True, loggers=[logger])
    callback = AttentionMonitor().lightning()
    for batch in range(4 * accumulated):
        callback.on_train_batch_start(trainer, module, None, batch)
        module["inner"](input_ids=tokens(2, 32)).logits.mean().backward()
        trainer.global_step += (batch + 1) % accumulated == 0
        callback.on_train_batch_end(trainer, module, None, None, batch)
    assert [*logger.heard] == [2, 4]
    assert "attn/layer_01/entropy_mean" in logger.heard[4]


@pytest.mark.usefixtures("stand_in")
def test_an_exception_gives_the_model_back() -> None:
    model = llama()
    trainer = SimpleNamespace(global_step=0, log_every_n_steps=1, is_global_zero=True, loggers=[])
    callback = AttentionMonitor().lightning()
    callback.on_train_batch_start(trainer, model, None, 0)
    callback.on_exception(trainer, model, RuntimeError())
    with observe(model, lambda call: None):
        model(input_ids=tokens())


def test_without_lightning_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning.pytorch.callbacks", "pytorch_lightning.callbacks"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'attnorm\[lightning\]'"):
        AttentionMonitor().lightning()


def test_with_lightning_itself() -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from lightning.pytorch.loggers.logger import DummyLogger

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Listening(DummyLogger):  # type: ignore[misc]
        heard: dict[int, dict[str, float]] = {}  # noqa: RUF012

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            if any(key.startswith("attn/") for key in metrics):
                self.heard[step] = metrics

    logger = Listening()
    trainer = lightning.Trainer(
        max_steps=4, log_every_n_steps=2, accelerator="cpu", logger=logger, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[AttentionMonitor().lightning()],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(tokens(8, 32), batch_size=2))
    assert [*logger.heard] == [2, 4]
    assert "attn/layer_01/entropy_mean" in logger.heard[4]
