"""CLRS-Text: only answers are in the loss, one pass decides greedy decoding, and a stopped run resumes exactly."""

import json
import lzma
import math
import time
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from attnorm.metrics.rows import measure_rows
from attnorm.metrics.sampling import evenly_spaced
from attnorm.models.observe import observe
from attnorm.models.patch_state import normalizer_of, patched_modules
from attnorm_lab.experiments.clrs_text.results import SAME_QUESTIONS
from attnorm_lab.training.checkpoints import OutOfTimeError, StopRequest, finished_checkpoints
from attnorm_lab.training.clrs import data as clrs_data
from attnorm_lab.training.clrs.data import (
    Characters,
    ClrsData,
    ClrsExample,
    EncodedExample,
    encode_examples,
    groups_by_length,
    padded,
    prepare_data,
    quick_examples,
    read_examples,
    simple_examples,
    step_indices,
)
from attnorm_lab.training.clrs.evaluate import (
    OWN,
    REFITTED,
    ClrsTests,
    answer_entropy,
    answer_logits,
    bits_by_cell,
    check_answers,
    fitted_coefficients,
)
from attnorm_lab.training.clrs.train import ClrsBase, ClrsRecipe, ClrsRun, train_clrs, with_normalizer
from attnorm_lab.training.device import accelerated

CPU = torch.device("cpu")
PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "clrs-text"
TINY = ClrsRecipe(steps=4, batch=6, learning_rate=1e-2, warmup=1, layers=1, heads=2, width=16, tokens_at_once=128)


@pytest.fixture(scope="module")
def data() -> ClrsData:
    train, test = quick_examples(0)
    return prepare_data(train[::6], test[::4], Characters(), held_out=8, source={"made": 0})


def test_the_simple_tasks_have_the_format_and_the_right_answers() -> None:
    minimum, sort = (
        next(one for one in simple_examples((4,), 1, 0) if one.algorithm == name)
        for name in ("minimum", "insertion_sort")
    )
    keys = [float(word) for word in minimum.question.split("[")[1].split("]")[0].split()]
    assert minimum.question.startswith("minimum:\nkey: [")
    assert minimum.question.endswith("]\nmin:\n")
    assert minimum.answer == f"{int(np.argmin(keys))}\n\n"
    numbers = [float(word) for word in sort.answer.strip("[]\n").split()]
    assert numbers == sorted(numbers)
    assert len(numbers) == sort.size == 4


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the CLRS-Text files are not beside this checkout")
def test_the_simple_tasks_agree_with_the_published_data() -> None:
    for one in read_examples(PUBLISHED / "test.jsonl.xz", ["minimum", "insertion_sort"])[::16]:
        keys = [float(word) for word in one.question.split("[")[1].split("]")[0].split()]
        question, answer = clrs_data.SIMPLE[one.algorithm](keys)
        assert (f"{one.algorithm}:\n{question}\n", f"{answer}\n\n") == (one.question, one.answer)


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the CLRS-Text files are not beside this checkout")
def test_the_published_tasks_with_the_same_questions_are_those_of_the_results() -> None:
    tasks: dict[str, list[tuple[str, str]]] = {}
    for one in read_examples(PUBLISHED / "test.jsonl.xz"):
        tasks.setdefault(one.algorithm, []).append((one.question.removeprefix(one.algorithm), one.answer))
    same: dict[str, list[str]] = {}
    for algorithm, questions in sorted(tasks.items()):
        same.setdefault(json.dumps(questions), []).append(algorithm)
    assert (len(tasks), len(same)) == (30, 24)
    assert {tuple(group) for group in same.values() if len(group) > 1} == set(SAME_QUESTIONS)


def test_files_are_read_plain_and_compressed_and_checked(tmp_path: Path) -> None:
    record = {"algorithm": "minimum", "size": 2, "question": "q\n", "answer": "0\n\n"}
    lines = json.dumps(record) + "\n" + json.dumps({**record, "algorithm": "bfs"}) + "\n"
    (tmp_path / "a.jsonl").write_text(lines)
    with lzma.open(tmp_path / "a.jsonl.xz", "wt") as file:
        file.write(lines)
    both = [read_examples(tmp_path / name) for name in ("a.jsonl", "a.jsonl.xz")]
    assert both[0] == both[1]
    assert [one.algorithm for one in read_examples(tmp_path / "a.jsonl", ["bfs"])] == ["bfs"]
    with pytest.raises(ValueError, match=r"'bsf'.*bfs"):
        read_examples(tmp_path / "a.jsonl", ["bsf"])
    (tmp_path / "b.jsonl").write_text('{"algorithm": "x"}\n')
    with pytest.raises(ValueError, match=r"record 1.*'size'"):
        read_examples(tmp_path / "b.jsonl")
    with pytest.raises(ValueError, match=r"none\.jsonl"):
        read_examples(tmp_path / "none.jsonl")


def test_a_test_question_in_the_training_file_is_an_error() -> None:
    examples = simple_examples((3,), 10, 0)
    with pytest.raises(ValueError, match="1 test questions"):
        prepare_data(examples, examples[:1], Characters(), held_out=2, source={})


def test_the_held_out_part_is_disjoint_and_the_same_for_all_seeds(data: ClrsData) -> None:
    texts = [{one.tokens.tobytes() for one in part} for part in (data.train, data.held_out)]
    assert len(data.held_out) == 8
    train, test = quick_examples(0)
    again = prepare_data(train[::6], test[::4], Characters(), held_out=8, source={})
    assert [one.tokens.tobytes() for one in again.held_out] == [one.tokens.tobytes() for one in data.held_out]
    assert len(data.train) + 8 == len(train[::6])
    assert texts[1]


def test_steps_visit_every_example_once_per_epoch() -> None:
    seen = [index for step in range(5) for index in step_indices(10, 4, 3, step)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert step_indices(10, 4, 4, 0) != step_indices(10, 4, 3, 0)


def test_groups_hold_each_example_once_within_the_budget(data: ClrsData) -> None:
    groups = list(groups_by_length(data.train, 256))
    assert sorted(index for group in groups for index in group) == list(range(len(data.train)))
    for group in groups:
        assert len(group) == 1 or padded([data.train[i] for i in group]).inputs.numel() <= 256
    assert len(list(groups_by_length(data.train, 1))) == len(data.train)


def test_only_answer_tokens_are_predicted_and_padding_changes_nothing() -> None:
    short, long = encode_examples(
        [ClrsExample("a", 1, "ab\n", "c\n\n"), ClrsExample("a", 1, "ab\n" * 20, "defg\n\n")], Characters()
    )
    model = ClrsBase().build(TINY, CPU)
    examples = padded([long, short])
    assert bytes(examples.targets.tolist()) == b"defg\n\nc\n\n"
    assert bytes(examples.inputs.flatten()[examples.before].tolist()) == b"\ndefg\n\nc\n"
    together, alone = (answer_logits(model, part) for part in (examples, padded([short])))
    assert torch.allclose(together[-3:], alone, atol=1e-5)


@torch.inference_mode()
def greedy_answer(model: Any, example: EncodedExample) -> list[int]:
    """Generate as many tokens as the true answer has, each the most likely one."""
    model.eval()
    tokens = torch.from_numpy(example.tokens.astype(np.int64))
    seen = tokens[: example.answer_from]
    for _ in range(len(tokens) - example.answer_from):
        logits = model(input_ids=seen[None], use_cache=False).logits[0, -1]
        seen = torch.cat([seen, logits.argmax(-1, keepdim=True)])
    return [int(token) for token in seen[example.answer_from :]]


@pytest.mark.parametrize(
    "normalizer", ["softmax", pytest.param("adaptive_temperature", marks=pytest.mark.nightly), "entmax15"]
)
def test_one_pass_gives_the_exact_match_of_greedy_decoding(normalizer: str) -> None:
    """Constant answers are learned in a few steps; one task has answers that cannot be known."""
    examples = [
        ClrsExample(name, n, f"{n}{name}", f"{'xy' if name == 'k' else (7 * n) % 10}\n\n")
        for name in ("k", "u") for n in range(7)
    ]  # fmt: skip
    encoded = encode_examples(examples, Characters())
    recipe = with_normalizer(replace(TINY, width=32, tokens_at_once=512), normalizer)
    model = ClrsBase().build(recipe, CPU)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batch = padded(encoded)
    for _ in range(40):
        torch.nn.functional.cross_entropy(answer_logits(model, batch), batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    matches, loss = check_answers(model, encoded, CPU, "float32", 512)
    greedy = [greedy_answer(model, one) == one.tokens[one.answer_from :].tolist() for one in encoded]
    assert matches.tolist() == greedy
    assert 0 < matches.sum() < len(matches), "both outcomes must occur"
    assert math.isfinite(loss)
    assert bits_by_cell(encoded, matches)["k"]["3"] == str(int(matches[3]))


def test_the_logits_of_a_test_are_not_rounded() -> None:
    """Under bfloat16 autocast neighboring logits would often be equal."""
    batch = padded(encode_examples([ClrsExample("a", 1, "ab\n", "c\n\n")], Characters()))
    model = ClrsBase().build(TINY, CPU)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, exact = (answer_logits(model, batch, exact=exact) for exact in (False, True))
    assert (rounded.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
    assert not torch.equal(exact.bfloat16().float(), exact)


def test_groups_of_a_step_sum_to_the_loss_of_the_whole_batch(data: ClrsData, tmp_path: Path) -> None:
    """In one group or in many, the gradient is the mean over all answer tokens of the step."""
    weights = []
    for most in (1, 10**6):
        with accelerated(CPU, "float32") as accelerator, StopRequest() as stop:
            run = ClrsRun(tmp_path / str(most), ClrsBase(), replace(TINY, tokens_at_once=most), data, accelerator)
            entries = list(run.steps(math.inf, stop, None))
        weights.append((entries[-1]["loss"], torch.cat([p.detach().flatten() for p in run.model.parameters()])))
    assert weights[0][0] == pytest.approx(weights[1][0], rel=1e-4)
    assert torch.allclose(weights[0][1], weights[1][1], atol=2e-4)


def test_a_run_that_ran_out_of_time_resumes_to_the_same_result(data: ClrsData, tmp_path: Path) -> None:
    recipe = with_normalizer(TINY, "ssmax")
    tests = ClrsTests(observed=0)
    whole = train_clrs(tmp_path / "whole", ClrsBase(), recipe, data, tests, device="cpu")
    with pytest.raises(OutOfTimeError):
        train_clrs(tmp_path / "parts", ClrsBase(), recipe, data, tests, device="cpu", deadline=time.monotonic())
    parts = train_clrs(tmp_path / "parts", ClrsBase(), recipe, data, tests, device="cpu")
    for name in ("steps", "tokens", "held_out_loss", "exact", "test_loss", "learned"):
        assert parts["result"][name] == whole["result"][name], name
    assert train_clrs(tmp_path / "parts", ClrsBase(), recipe, data, tests, device="cpu") == parts
    with pytest.raises(ValueError, match="seed is 1 here and 0 there"):
        train_clrs(tmp_path / "parts", ClrsBase(), replace(recipe, seed=1), data, tests, device="cpu")


def test_the_model_of_a_finished_run_is_saved_if_a_later_call_asks(data: ClrsData, tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "checkpoint_every": TINY.steps}
    first = train_clrs(tmp_path, ClrsBase(), TINY, data, ClrsTests(observed=0), **options)
    assert train_clrs(tmp_path, ClrsBase(), TINY, data, ClrsTests(observed=0), save_model=True, **options) == first
    saved = load_file(tmp_path / "model" / "model.safetensors")
    (checkpoint,) = finished_checkpoints(tmp_path / "checkpoints")
    trained = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(saved[name], trained[name]) for name in saved)


def test_a_finished_run_without_its_last_checkpoint_does_not_train_again(data: ClrsData, tmp_path: Path) -> None:
    train_clrs(tmp_path, ClrsBase(), TINY, data, ClrsTests(observed=0), device="cpu")
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="checkpoint of step"):
        train_clrs(tmp_path, ClrsBase(), TINY, data, ClrsTests(observed=0), device="cpu", save_model=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize("asked", [False, True])
def test_without_checkpoints_between_steps_one_is_written_if_training_is_stopped(
    asked: bool, data: ClrsData, tmp_path: Path
) -> None:
    with accelerated(CPU, "float32") as accelerator, StopRequest() as stop:
        run = ClrsRun(tmp_path, ClrsBase(), replace(TINY, steps=1), data, accelerator)
        stop.requested = asked  # in the last step: the call is interrupted before the tests
        list(run.steps(math.inf, stop, None))
    assert bool(finished_checkpoints(tmp_path / "checkpoints")) == asked


def test_a_softmax_model_is_also_tested_with_both_adaptive_temperatures(data: ClrsData, tmp_path: Path) -> None:
    tests = ClrsTests(others=("adaptive_temperature", REFITTED), observed=1)
    few = replace(data, test=data.test[::5], held_out=data.held_out[:4])
    result = train_clrs(tmp_path, ClrsBase(), TINY, few, tests, device="cpu", attention="dense")["result"]
    assert list(result["exact"]) == [OWN, "adaptive_temperature", REFITTED]
    assert len(result["coefficients"]) == 5
    assert len({json.dumps(result["entropy"][name]) for name in result["exact"]}) == 3
    assert result["test_loss"][OWN] != result["test_loss"]["adaptive_temperature"]
    cells = {(one["algorithm"], one["size"]) for one in result["entropy"][OWN]}
    assert cells == {(one.algorithm, one.size) for one in few.test}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that modules compile. They run as they are."""
    compiled: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend=keep))
    return compiled


@pytest.mark.nightly  # 6 s; test_vision.py trains compiled layers
def test_compiled_blocks_train_and_test_the_same_with_one_graph_for_all_lengths(
    data: ClrsData, tmp_path: Path, graphs: list[Any]
) -> None:
    few = replace(data, test=data.test[::9], held_out=data.held_out[:4])
    recipe = replace(with_normalizer(TINY, "ssmax"), layers=2)
    lengths = {padded([one]).inputs.shape[1] for one in (*few.train, *few.test)}
    plain, compiled = (
        train_clrs(tmp_path / str(flag), ClrsBase(), recipe, few, device="cpu", compiled=flag)["result"]
        for flag in (False, True)
    )
    assert plain["held_out_loss"] == pytest.approx(compiled["held_out_loss"], rel=1e-4)
    assert plain["test_loss"][OWN] == pytest.approx(compiled["test_loss"][OWN], rel=1e-4)
    assert len(lengths) > 2
    assert len(graphs) <= 4  # training and tests, whatever the length; one more of each for a single example


def test_a_model_of_another_family_is_trained_and_tested_but_not_compiled(data: ClrsData, tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "gpt2"
    config = transformers.GPT2Config(vocab_size=256, n_embd=16, n_layer=1, n_head=2, n_positions=128)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    few = replace(data, test=data.test[:2], held_out=data.held_out[:2])
    recipe = replace(TINY, steps=1)
    with pytest.raises(ValueError, match="GPT2LMHeadModel"):
        train_clrs(tmp_path / "compiled", ClrsBase(folder), recipe, few, device="cpu", compiled=True)
    result = train_clrs(tmp_path / "run", ClrsBase(folder), recipe, few, device="cpu")["result"]
    assert result["entropy"][OWN]


def test_all_heads_are_replaced_in_training(data: ClrsData, tmp_path: Path) -> None:
    recipe = with_normalizer(replace(TINY, layers=2), "adaptive_temperature", {"monotone": True})
    model = ClrsBase().build(recipe, CPU)
    assert [normalizer_of(module).name for module in patched_modules(model).values()] == ["adaptive_temperature"] * 2


def test_a_pretrained_folder_is_fine_tuned_with_its_own_weights_and_grouped_heads(
    data: ClrsData, tmp_path: Path
) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    pretrained: Any = transformers.LlamaForCausalLM(config)
    pretrained.save_pretrained(tmp_path / "base")
    base = ClrsBase(tmp_path / "base")
    recipe = with_normalizer(TINY, "adaptive_temperature")
    built = base.build(recipe, CPU)
    assert torch.equal(built.model.embed_tokens.weight, pretrained.model.embed_tokens.weight)
    results = [
        train_clrs(tmp_path / way, base, recipe, data, ClrsTests(observed=0), device="cpu", attention=way)["result"]
        for way in ("engine", "dense")  # type: ignore[arg-type]
    ]
    assert results[0]["held_out_loss"] == pytest.approx(results[1]["held_out_loss"], abs=1e-3)
    assert set(base.identity()) == {"name", "model.safetensors"}


def test_the_fit_reads_answer_rows_and_the_entropy_is_that_of_the_rows(data: ClrsData) -> None:
    model = ClrsBase().build(TINY, CPU)
    first, again = (fitted_coefficients(model, data.held_out, CPU) for _ in range(2))
    assert first == pytest.approx(again, rel=1e-3)
    assert len(first) == 5
    (record, *_) = answer_entropy(model, data.test[:1], 1, CPU)
    one = data.test[0]
    keys = np.arange(one.answer_from, len(one.tokens))  # visible keys of the rows that predict the answer
    assert record["keys"] == pytest.approx(keys.mean())
    assert record["entropy_nats"] <= np.log(keys).mean() + 1e-6
    assert record["entropy_nats"] > 0.9 * np.log(keys).mean(), "random weights are nearly uniform"


@pytest.mark.parametrize("normalizer", ["softmax", "adaptive_temperature", "alibi"])
def test_the_entropy_is_that_of_the_metrics(data: ClrsData, normalizer: str) -> None:
    """Examples of several lengths and numbers of rows are measured together; each as if it were alone."""
    model = ClrsBase().build(with_normalizer(TINY, normalizer), CPU)
    for parameter in model.parameters():
        parameter.data *= 3  # away from uniform rows
    some = [next(one for one in data.test if one.size == size) for size in (2, 6, 4)]
    records = answer_entropy(model, some, 1, CPU)
    assert [record["size"] for record in records] == [2, 6, 4]
    for one, record in zip(some, records, strict=True):
        rows, values = measured_alone(model, one)
        for name in ("entropy_nats", "entropy_ratio"):
            assert record[name] == pytest.approx(float(values[name].mean()), rel=1e-4)
        assert record["keys"] == pytest.approx(float((rows + 1).double().mean()))


def measured_alone(model: Any, one: EncodedExample) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    rows = evenly_spaced(torch.arange(one.answer_from - 1, len(one.tokens) - 1), 8)
    found: list[dict[str, torch.Tensor]] = []
    with observe(model, lambda call: found.append(measure_rows(call, [None], rows, ())["model"].values)):
        model.base_model(input_ids=torch.from_numpy(one.tokens.astype(np.int64))[None, :-1])
    return rows, found[0]


def test_generating_needs_dm_clrs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clrs_data, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install dm-clrs"):
        clrs_data.dm_clrs_examples([], (4,), 1, 0)


def test_what_dm_clrs_generates_becomes_examples_without_duplicates(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class Generators:
        @staticmethod
        def clrs_generator(wanted: Any, num_samples: int, seed: int) -> Any:
            asked.update(wanted)
            for question in ("a", "b", "a", "c")[:num_samples]:
                yield {"algo_name": "bfs", "length": 4, "question": question, "answer": "0\n\n"}

    monkeypatch.setattr(clrs_data, "find_spec", lambda name: object())
    monkeypatch.setattr(clrs_data, "import_module", lambda name: Generators)
    made = clrs_data.dm_clrs_examples(["bfs"], (4, 5), 4, 0, known=["c"])
    assert [(one.algorithm, one.size, one.question) for one in made] == [("bfs", 4, "a"), ("bfs", 4, "b")]
    assert asked == {"bfs": [4, 5]}


@pytest.mark.parametrize("bad", [{"tokens_at_once": 0}, {"steps": 0}, {"learning_rate": 0.0}, {"dtype": "int8"}])
def test_bad_values_are_named(bad: dict[str, Any]) -> None:
    (value,) = bad.values()
    with pytest.raises(ValueError, match=str(value)):
        replace(TINY, **bad)
