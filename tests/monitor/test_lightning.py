"""In Lightning: on the steps that it logs, to its loggers, once per accumulated batch."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

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


def _trainer(every: int, *loggers: Logger) -> Any:
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0))
    return SimpleNamespace(
        fit_loop=loop, global_step=0, log_every_n_steps=every, is_global_zero=True, loggers=[*loggers]
    )


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("accumulated", [1, 2])
def test_it_measures_on_logging_steps(accumulated: int) -> None:
    module = nn.ModuleDict({"inner": llama()})  # a LightningModule holds the model
    logger = Logger()
    trainer = _trainer(2, logger)
    callback = AttentionMonitor().lightning()
    for batch in range(4 * accumulated):
        callback.on_train_batch_start(trainer, module, None, batch)
        module["inner"](input_ids=tokens(2, 32)).logits.mean().backward()
        callback.on_train_batch_end(trainer, module, None, None, batch)
        trainer.fit_loop.epoch_loop._batches_that_stepped += (batch + 1) % accumulated == 0
    assert [*logger.heard] == [1, 3]
    assert "attn/layer_01/entropy_mean" in logger.heard[3]


@pytest.mark.usefixtures("stand_in")
def test_an_exception_gives_the_model_back() -> None:
    model = llama()
    callback = AttentionMonitor().lightning()
    callback.on_train_batch_start(_trainer(1), model, None, 0)
    callback.on_exception(_trainer(1), model, RuntimeError())
    with observe(model, lambda call: None):
        model(input_ids=tokens())


def test_without_lightning_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning.pytorch.callbacks", "pytorch_lightning.callbacks"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install lightning"):
        AttentionMonitor().lightning()
