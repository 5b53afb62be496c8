"""In a Trainer: the right steps, before every reporter, and nothing of the training changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import attnorm
from attnorm.models.observe import observe
from attnorm.models.patch import patch
from attnorm.monitor import watch as watching
from attnorm.monitor.measure import MEANS_OF_ALL
from attnorm.monitor.monitor import AttentionMonitor
from tests.models.tiny import llama, tokens
from tests.monitor.training import Reporter, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore::attnorm.monitor.alerts.AttentionAlert")


def test_the_public_name() -> None:
    assert attnorm.AttentionMonitor is AttentionMonitor
    assert issubclass(AttentionMonitor, TrainerCallback)


def test_reporters_hear_the_numbers_on_logging_steps_only(tmp_path: Path) -> None:
    reporter, model = Reporter(), llama()
    trainer = trainer_of(model, tmp_path, reporter)
    monitor = AttentionMonitor().attach(trainer)
    assert trainer.callback_handler.callbacks[0] is monitor
    trainer.train()
    assert reporter.steps == [3, 6]
    first = reporter.heard[0]
    assert {"loss", "attn/layer_00/entropy_mean", "attn/layer_01/sink_mass_max", "attn/alert/dispersion"} <= {*first}
    assert {f"attn/layer_01/{name}_mean" for name in MEANS_OF_ALL} <= {*first}
    assert all(isinstance(value, float) for key, value in first.items() if key.startswith("attn/"))
    history = [entry for entry in trainer.state.log_history if "attn/layer_00/entropy_mean" in entry]
    assert [entry["step"] for entry in history] == [3, 6]
    assert monitor.numbers.items() <= reporter.heard[1].items()


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"logging_first_step": True, "logging_steps": 4}, [1, 4]),
        ({"logging_strategy": "epoch"}, [4, 6]),
        ({"logging_strategy": "no"}, []),
        ({"logging_steps": 0.5}, [3, 6]),
        ({"gradient_accumulation_steps": 2, "max_steps": 4, "logging_steps": 2}, [2, 4]),
    ],
)
def test_whatever_the_trainer_calls_a_logging_step(tmp_path: Path, options: dict[str, Any], steps: list[int]) -> None:
    reporter = Reporter()
    trainer = trainer_of(llama(), tmp_path, reporter, **options)
    AttentionMonitor().attach(trainer)
    trainer.train()
    assert reporter.steps == steps


def test_an_accumulated_batch_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = watching.Sampler.take
    monkeypatch.setattr(watching.Sampler, "take", lambda self, call: (taken.append(call.layer), take(self, call))[1])
    trainer = trainer_of(
        llama(), tmp_path, Reporter(), gradient_accumulation_steps=3, max_steps=1, logging_steps=1,
        gradient_checkpointing=True,
    )  # fmt: skip
    AttentionMonitor().attach(trainer)
    trainer.train()
    assert taken == [0, 1]


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_the_weights_learned_are_the_same_to_the_bit(tmp_path: Path, checkpointing: bool) -> None:
    learned = []
    for watched in (False, True):
        model = llama(attention_dropout=0.1)
        patch(model, "ssmax", train_length=32)
        trainer = trainer_of(model, tmp_path, Reporter(), gradient_checkpointing=checkpointing, logging_steps=1)
        if watched:
            AttentionMonitor().attach(trainer)
        trainer.train()
        learned.append(model.state_dict())
    for name, value in learned[0].items():
        assert torch.equal(learned[1][name], value), name


@pytest.mark.nightly  # 2 s; test_measurement.py measures a compiled model
def test_a_model_that_the_trainer_compiles(tmp_path: Path) -> None:
    torch._dynamo.reset()
    reporter, model = Reporter(), llama()
    trainer = trainer_of(model, tmp_path, reporter, torch_compile=True, torch_compile_backend="eager")
    AttentionMonitor().attach(trainer)
    trainer.train()
    assert reporter.steps == [3, 6]


def test_appended_it_still_measures_and_says_what_is_missing(tmp_path: Path) -> None:
    reporter = Reporter()
    trainer = trainer_of(llama(), tmp_path, reporter)
    trainer.add_callback(AttentionMonitor())
    with pytest.warns(UserWarning, match=r"monitor\.attach\(trainer\)"):
        trainer.train()
    assert reporter.steps == []
    assert any("attn/layer_00/entropy_mean" in entry for entry in trainer.state.log_history)


def test_what_is_logged_between_the_parts_of_a_batch_has_another_step(tmp_path: Path) -> None:
    class Talks(TrainerCallback):
        def on_substep_end(self, *_: Any, **__: Any) -> None:
            trainer.log({"chatter": 1.0})

    reporter = Reporter()
    trainer = trainer_of(llama(), tmp_path, Talks(), reporter, gradient_accumulation_steps=2)
    AttentionMonitor().attach(trainer)
    trainer.train()
    assert sum("chatter" in logs for logs in reporter.heard) == 6
    assert reporter.steps == [3, 6]
    assert [entry["step"] for entry in trainer.state.log_history if "attn/alert/dispersion" in entry] == [3, 6]


def test_attached_twice_it_runs_once_and_a_second_one_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(llama(), tmp_path, Reporter())
    monitor = AttentionMonitor()
    monitor.attach(trainer)
    monitor.attach(trainer)
    assert trainer.callback_handler.callbacks.count(monitor) == 1
    with pytest.raises(ValueError, match="AttentionMonitor"):
        AttentionMonitor().attach(trainer)


def test_the_terminal_is_not_flooded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_of(llama(), tmp_path, Reporter())
    AttentionMonitor().attach(trainer)
    trainer.train()
    printed = capsys.readouterr().out
    assert "'loss'" in printed
    assert "attn/" not in printed


def test_a_run_that_breaks_off_leaves_nothing_behind(tmp_path: Path) -> None:
    model = llama()
    trainer = trainer_of(model, tmp_path, Reporter(), logging_steps=1)
    monitor = AttentionMonitor().attach(trainer)

    class Stops(TrainerCallback):
        def on_substep_end(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        on_pre_optimizer_step = on_substep_end

    trainer.add_callback(Stops())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    with observe(model, lambda call: None):
        model(input_ids=tokens())
    trainer.remove_callback(Stops)
    trainer.train()
    assert monitor.numbers


def test_several_gpus_by_data_parallel_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(llama(), tmp_path, Reporter())
    monkeypatch.setattr(type(trainer.args), "n_gpu", 2)
    with pytest.raises(ValueError, match=r"DataParallel.*2 GPUs"):
        AttentionMonitor().attach(trainer)


def test_what_is_no_trainer_or_no_model_is_told_where_it_belongs() -> None:
    monitor = AttentionMonitor(every=1)
    with pytest.raises(TypeError, match=r"LlamaForCausalLM.*monitor\.step\(model\)"):
        monitor.attach(llama())
    with pytest.raises(TypeError, match="'gpt2'"), monitor.step("gpt2"):
        pass
