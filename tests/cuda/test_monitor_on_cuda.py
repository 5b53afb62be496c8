"""AttentionMonitor on CUDA says what it says on the CPU, and what analyze says. Skipped without a GPU."""

import copy
import importlib.util
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import attnorm
from attnorm.models.observe import observe
from tests.cuda.on_device import DEVICE, FAMILIES, NARROW, NEEDS_DEVICE, NORMALIZERS, relative_error, tiny, tokens

pytest.importorskip("attnorm.monitor.monitor", exc_type=ImportError)  # wants SciPy

from attnorm.monitor.monitor import AttentionMonitor

pytestmark = [NEEDS_DEVICE, pytest.mark.filterwarnings("ignore::attnorm.monitor.alerts.AttentionAlert")]
MECHANISMS = [name for name in NORMALIZERS if isinstance(attnorm.get(name), attnorm.Mechanism)]
COMPARED = ("entropy_nats", "max_logit", "sink_mass", "jacobian_norm", "logit_spread")


@pytest.fixture(autouse=True)
def _kernel_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequences are short; with fewer than 65 rows the statistics would come from blocks of logits."""
    monkeypatch.setattr("attnorm.metrics.fused_rows.MIN_KERNEL_ROWS", 1)


def measured(model: PreTrainedModel, ids: Tensor, autocast: bool = False, **options: Any) -> dict[str, float]:
    monitor = AttentionMonitor(every=1, top_n=5, **options)
    with (
        monitor.step(model) as numbers,
        torch.autocast(model.device.type, torch.bfloat16, enabled=autocast),
    ):
        model(input_ids=ids.to(model.device))
    return numbers


@pytest.mark.parametrize("normalizer", [None, "ssmax", "entmax15", "scale_invariant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_numbers_are_those_of_the_cpu(family: str, normalizer: str | None) -> None:
    model, ids = tiny(family), tokens(2, 40)
    if normalizer is not None:
        attnorm.patch(model, normalizer)
    # On CUDA all rows are measured, on a CPU as many as asked for.
    found, expected = (measured(one, ids, rows=64) for one in (model, copy.deepcopy(model).cpu()))
    assert len(found) > 20
    # On a CPU all rows measured are those of the longest half octave.
    found, expected = (
        {key: value for key, value in one.items() if "largest_logit" not in key and "all_rows" not in key}
        for one in (found, expected)
    )
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)


def analyzed(model: PreTrainedModel, ids: Tensor) -> dict[str, list[Any]]:
    table = attnorm.analyze(model, {"input_ids": ids.to(model.device)}, top_n=(5,)).heads
    return {name: table.column(name).to_pylist() for name in ("layer", "entropy_nats_mean", *COMPARED)}


@pytest.mark.parametrize("normalizer", [None, *(name for name in NORMALIZERS if name not in MECHANISMS)])
def test_analyze_says_what_it_says_on_the_cpu(normalizer: str | None) -> None:
    pytest.importorskip("pyarrow")
    model, ids = tiny("llama"), tokens(1, 40)
    if normalizer is not None:
        attnorm.patch(model, normalizer, **NARROW.get(normalizer, {}))
    found, expected = analyzed(model, ids), analyzed(copy.deepcopy(model).cpu(), ids)
    for name in COMPARED:
        assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4, nan_ok=True), name


@pytest.mark.parametrize("normalizer", [None, "ssmax", "entmax15"])
def test_analyze_and_the_monitor_agree(normalizer: str | None) -> None:
    pytest.importorskip("pyarrow")
    model, ids = tiny("llama"), tokens(1, 40)
    if normalizer is not None:
        attnorm.patch(model, normalizer)
    numbers, heads = measured(model, ids, rows=64), analyzed(model, ids)
    for layer in (0, 1):
        of_layer = [x for x, of in zip(heads["entropy_nats_mean"], heads["layer"], strict=True) if of == layer]
        assert numbers[f"attn/layer_{layer:02}/entropy_mean"] == pytest.approx(mean(of_layer), rel=1e-3)


def test_under_autocast_the_numbers_are_near() -> None:
    model, ids = tiny("llama"), tokens(2, 40)
    exact, rough = measured(model, ids), measured(model, ids, autocast=True)
    for layer in ("00", "01"):
        key = f"attn/layer_{layer}/entropy_mean"
        assert rough[key] == pytest.approx(exact[key], rel=0.05)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_loop_of_ones_own_learns_the_same(checkpointing: bool) -> None:
    """Watched on every second step; the other steps, the outputs and the gradients are as without it."""
    learned: list[Tensor] = []
    for watched in (False, True):
        model, ids = tiny("llama").train(), tokens(2, 40)
        attnorm.patch(model, "ssmax", train_length=40)
        if checkpointing:
            model.gradient_checkpointing_enable()
        monitor = AttentionMonitor(every=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(1, 5):
            if watched:
                with monitor.step(model) as numbers:
                    loss = model(input_ids=ids, labels=ids).loss
                    loss.backward()
                assert bool(numbers) == (step % 2 == 0)
            else:
                model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        learned.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert relative_error(learned[1], learned[0]) < 1e-5
    with observe(model, lambda call: None):  # nobody watches it any more
        model(input_ids=ids)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="transformers' Trainer wants accelerate")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_in_a_trainer(tmp_path: Path, precision: str) -> None:
    from tests.monitor.training import Reporter, trainer_of

    reporter, model = Reporter(), tiny("llama")
    handle = attnorm.patch(model, "ssmax", train_length=32)
    before = [p.detach().clone() for p in handle.parameters()]
    trainer = trainer_of(
        model, tmp_path, reporter, use_cpu=DEVICE == "cpu", bf16=precision == "bfloat16", gradient_checkpointing=True,
        learning_rate=1e-2,
    )  # fmt: skip
    monitor = AttentionMonitor().attach(trainer)
    trainer.train()
    assert model.device.type == DEVICE
    assert reporter.steps == [3, 6]
    assert monitor.numbers.items() <= reporter.heard[1].items()
    assert all(not torch.equal(p, old) for p, old in zip(handle.parameters(), before, strict=True))
