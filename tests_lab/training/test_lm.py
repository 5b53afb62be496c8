"""`train_lm`: it learns, its output is an ordinary Hugging Face folder, and stopping it in any way loses nothing."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from attnorm_lab.training import checkpoints
from attnorm_lab.training.checkpoints import TrainingInterrupted
from attnorm_lab.training.lm.train import LMProgress
from tests_lab.training.conftest import tiny

Train = Callable[..., dict[str, Any]]


def last_state(out: Path) -> dict[str, torch.Tensor]:
    (checkpoint,) = (out / "checkpoints").iterdir()
    weights = load_file(checkpoint / "model.safetensors")
    moments = load_file(checkpoint / "optimizer.safetensors")
    assert not weights.keys() & moments.keys()
    return weights | moments


def assert_equal_runs(one: Path, other: Path) -> None:
    ours, theirs = last_state(one), last_state(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def metrics(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def curve(out: Path) -> list[dict[str, float]]:
    """The log without what the machine decides."""
    of_machine = {"tokens_per_second", "peak_memory_bytes"}
    return [{name: entry[name] for name in entry.keys() - of_machine} for entry in metrics(out)]


@pytest.fixture(scope="module")
def trained(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("trained") / "run"
    record = train(
        out, steps=160,
        options={"evaluate_every": 80, "checkpoint_every": 60, "sample_tokens": 80, "note": "Made up."},
    )  # fmt: skip
    return out, record


@pytest.fixture(scope="module")
def uninterrupted(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(out)
    return out


def test_it_beats_counting_tokens_and_comes_near_counting_pairs(trained: tuple[Path, dict[str, Any]]) -> None:
    validation = trained[1]["result"]["validation"]
    model, bigram, unigram = (validation[name]["nats_per_token"] for name in ("model", "bigram", "unigram"))
    assert bigram < unigram
    assert model < bigram < 0.5 * unigram
    bits = model * validation["tokens"] / validation["bytes"] / 0.6931471805599453
    assert validation["model"]["bits_per_byte"] == pytest.approx(bits, abs=1e-4)


def test_the_metrics_tell_the_course_of_training(trained: tuple[Path, dict[str, Any]]) -> None:
    entries = metrics(trained[0])
    assert [entry["step"] for entry in entries] == list(range(10, 161, 10))
    assert all(entry["tokens"] == entry["step"] * 8 * 32 for entry in entries)
    assert [entry["step"] for entry in entries if "valid_loss" in entry] == [80, 160]
    assert entries[-1]["loss"] < entries[0]["loss"]
    assert all(entry["tokens_per_second"] > 0 and entry["gradient_norm"] > 0 for entry in entries)


def test_the_output_is_an_ordinary_model_in_half_precision(trained: tuple[Path, dict[str, Any]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, record = trained
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.float16}
    model: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    assert model.config.model_type == "gpt2"
    assert model.lm_head.weight is model.transformer.wte.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == record["result"]["parameters"]
    assert tokenizer.model_max_length == model.config.n_positions == 32
    assert tokenizer.eos_token_id == model.config.eos_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    prompt = tokenizer("The old captain", return_tensors="pt")
    written = tokenizer.decode(model.generate(**prompt, max_new_tokens=12, do_sample=False)[0])
    assert re.match(r"The old captain (saw|never forgot|asked for|lost|had always known) ", written)


def test_the_sample_is_as_long_as_asked_and_longer_than_the_context(trained: tuple[Path, dict[str, Any]]) -> None:
    from transformers import AutoTokenizer

    sample = (trained[0] / "sample.txt").read_text(encoding="utf-8")
    tokenizer: Any = AutoTokenizer.from_pretrained(trained[0])
    assert abs(len(tokenizer(sample).input_ids) - 80) <= 2  # drawn tokens may spell what encodes to fewer
    assert "captain" in sample or "brother" in sample or "letter" in sample


def test_a_model_that_sees_one_token_writes_too(train: Train, tmp_path: Path) -> None:
    train(tmp_path, steps=1, context=1, options={"sample_tokens": 3})
    assert (tmp_path / "sample.txt").read_text(encoding="utf-8")


def test_a_model_that_needs_every_earlier_query_writes_without_a_cache(train: Train, tmp_path: Path) -> None:
    train(tmp_path, architecture="llama", normalizer="selective", steps=1, options={"sample_tokens": 3})
    assert (tmp_path / "sample.txt").read_text(encoding="utf-8")


def test_the_card_and_the_record_say_what_was_done(trained: tuple[Path, dict[str, Any]], texts: Any) -> None:
    out, record = trained
    card = (out / "README.md").read_text(encoding="utf-8")
    assert json.loads((out / "training.json").read_text()) == record
    model, bigram = (record["result"]["validation"][name]["nats_per_token"] for name in ("model", "bigram"))
    for fact in (
        f"{model:.3f}",
        f"{bigram:.3f}",
        "Made up.",
        "train.txt",
        record["run"]["train"][0]["sha256"],
        "seed 0",
    ):
        assert fact in card
    assert str(texts[0].parent) not in card + (out / "training.json").read_text()


def test_a_finished_run_is_not_done_again(trained: tuple[Path, dict[str, Any]], train: Train) -> None:
    out, record = trained
    before = (out / "metrics.jsonl").stat().st_mtime_ns
    assert train(out, steps=160) == record
    assert (out / "metrics.jsonl").stat().st_mtime_ns == before


def test_the_same_seed_gives_the_same_bits_and_another_does_not(
    train: Train, uninterrupted: Path, tmp_path: Path
) -> None:
    train(tmp_path / "again")
    assert_equal_runs(tmp_path / "again", uninterrupted)
    train(tmp_path / "other", steps=1, seed=1)
    train(tmp_path / "first", steps=1)
    assert not torch.equal(*(last_state(tmp_path / name)["transformer.wte.weight"] for name in ("other", "first")))


def test_training_is_announced_before_its_first_step(train: Train, tmp_path: Path) -> None:
    seen: list[LMProgress] = []
    train(tmp_path / "run", steps=2, options={"report": seen.append})
    first, second, *_ = (now for now in seen if now.stage == "training")
    assert (first.done, first.total, first.metrics) == (0, 2, None)
    assert second.metrics


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_interruption_loses_no_step(
    number: signal.Signals, train: Train, uninterrupted: Path, tmp_path: Path
) -> None:
    def interrupt(now: LMProgress) -> None:
        if now.stage == "training" and now.done == 10:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(TrainingInterrupted) as stopped:
        train(tmp_path / "run", options={"report": interrupt, "checkpoint_every": 1000})
    assert stopped.value.step == 11  # the step after the signal is finished, then all is saved
    assert signal.getsignal(number) is before
    assert not (tmp_path / "run" / "model.safetensors").exists()
    train(tmp_path / "run")
    assert_equal_runs(tmp_path / "run", uninterrupted)
    assert curve(tmp_path / "run") == curve(uninterrupted)


def test_a_killed_run_continues_from_its_last_checkpoint(
    train: Train, texts: tuple[Path, Path], encoded: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    program = f"""
import os, signal
from pathlib import Path
from attnorm_lab.training.lm.train import train_lm
from attnorm_lab.training.lm.model import LMSettings
def kill(now):
    if now.stage == "training" and now.done == 20:
        os.kill(os.getpid(), signal.SIGKILL)
settings = LMSettings(**{tiny().as_dict()!r})
train_lm([Path({str(texts[0])!r})], Path({str(texts[1])!r}), Path({str(out)!r}), settings,
         data=Path({str(encoded)!r}), device="cpu", checkpoint_every=8, report=kill)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000016"]
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2')  # killed in the middle of a line
    train(out, options={"checkpoint_every": 8})
    assert_equal_runs(out, uninterrupted)
    steps = [entry["step"] for entry in metrics(out)]
    assert steps == sorted(set(steps))
    assert steps[-1] == 30


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    train: Train, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "run", checkpoints._optimizer_tensors

    def full_disk(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
        if (out / "checkpoints" / "step-00000008").exists():
            raise OSError(28, "No space left on device")
        return whole(model, optimizer)

    monkeypatch.setattr(checkpoints, "_optimizer_tensors", full_disk)
    with pytest.raises(OSError, match="No space left"):
        train(out, options={"checkpoint_every": 8})
    monkeypatch.undo()
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000008"]
    train(out)
    assert_equal_runs(out, uninterrupted)


def test_a_time_limit_still_gives_a_model_which_can_be_trained_on(
    train: Train, uninterrupted: Path, tmp_path: Path
) -> None:
    record = train(tmp_path / "run", options={"max_minutes": 0.0})
    assert record["result"]["steps"] == 1
    assert "1 steps of 30 planned" in (tmp_path / "run" / "README.md").read_text()
    record = train(tmp_path / "run")
    assert record["result"]["steps"] == 30
    assert_equal_runs(tmp_path / "run", uninterrupted)
    assert curve(tmp_path / "run") == curve(uninterrupted)


def test_starting_over_forgets_the_earlier_steps(train: Train, uninterrupted: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", options={"max_minutes": 0.0})
    seen: list[int] = []
    train(tmp_path / "run", options={"resume": False, "report": lambda now: seen.append(now.done)})
    assert seen[0] == 10 or 0 in seen
    assert [entry["step"] for entry in metrics(tmp_path / "run")] == [10, 20, 30]
    assert_equal_runs(tmp_path / "run", uninterrupted)


def test_a_loss_that_breaks_down_is_said_and_never_saved(train: Train, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"loss.*(nan|inf).*learning.rate.*1e\+30"):
        train(tmp_path / "run", learning_rate=1e30, warmup=0, options={"checkpoint_every": 3})
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def test_a_loss_that_rose_again_is_said(trained: tuple[Path, dict[str, Any]], train: Train, tmp_path: Path) -> None:
    assert trained[1]["result"]["rise"] is None
    record = train(tmp_path / "run", steps=26, learning_rate=3.0, warmup=20, options={"evaluate_every": 1})
    rise, entries = record["result"]["rise"], metrics(tmp_path / "run")
    assert rise["last"] == entries[-1]["valid_loss"] > rise["lowest"] == min(entry["valid_loss"] for entry in entries)
    assert entries[rise["at_step"] - 1]["valid_loss"] == rise["lowest"]
    assert "The loss rose while training" in (tmp_path / "run" / "README.md").read_text()


def test_bfloat16_trains_too(train: Train, tmp_path: Path) -> None:
    train(tmp_path / "run", dtype="bfloat16", layers=1, context=16, batch=4, steps=12)
    assert last_state(tmp_path / "run")["transformer.wte.weight"].dtype == torch.float32
    losses = [entry["loss"] for entry in metrics(tmp_path / "run")]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.nightly
def test_compiled_blocks_train_to_the_same_loss(train: Train, uninterrupted: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", options={"compiled": True})
    plain, compiled = (metrics(out)[-1]["valid_loss"] for out in (uninterrupted, tmp_path / "run"))
    assert compiled == pytest.approx(plain, rel=1e-2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["ssmax", "entmax15"])  # traced with its block, and beside the graphs
def test_compiled_blocks_train_with_any_normalizer(name: str, train: Train, tmp_path: Path) -> None:
    change: dict[str, Any] = {"architecture": "llama", "normalizer": name, "layers": 9}
    for compiled in (False, True):
        train(tmp_path / str(compiled), **change, options={"compiled": compiled, "evaluate_every": 10})
    plain, fast = ([entry["valid_loss"] for entry in metrics(tmp_path / str(compiled))] for compiled in (False, True))
    assert fast == pytest.approx(plain, rel=1e-2)
