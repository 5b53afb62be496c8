"""One model in several threads: the numbers of one thread, or an error that says why. Loading in several threads."""

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

import attnorm
from attnorm.analysis.result import Analysis
from attnorm.analysis.tables import nan_expected
from attnorm.metrics.call import AttentionCall
from attnorm.models.forward_pass import head_logits, run
from attnorm.models.load import LoadedModel, load
from attnorm.models.observe import observe
from attnorm.models.patch import Patch, patch, swap, unpatch
from attnorm.models.patch_state import patched_modules
from attnorm.monitor.monitor import AttentionMonitor
from attnorm.monitor.qk_clip import QKClip
from tests.models.families import ids, tiny

COUNT = 4
SHORT: dict[str, Any] = {"lengths": 24, "windows": 1, "rows": 4}
WAIT = 0.3  # seconds for a thread that must not get further; a longer wait could only find more


@pytest.fixture
def loaded() -> LoadedModel:
    return load("bundled")


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    model = tiny("llama").eval()
    yield model
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert not patched_modules(model)


def in_threads(work: Callable[[int], Any], count: int = COUNT) -> list[Any]:
    """Return work(0), work(1), ..., each computed in its own thread, all at once."""
    together = threading.Barrier(count)

    def start(number: int) -> Any:
        together.wait(60)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(start, range(count)))


def in_another_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(60)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids()).logits


def numbers(analysis: Analysis) -> str:
    return repr({name: table.to_pylist() for name, table in analysis.tables.items()})


def test_one_model_analyzed_in_several_threads_gives_the_numbers_of_one(loaded: LoadedModel) -> None:
    expected = numbers(attnorm.analyze(loaded, **SHORT))
    assert {numbers(attnorm_) for attnorm_ in in_threads(lambda _: attnorm.analyze(loaded, **SHORT))} == {expected}


def test_every_thread_can_load_and_analyze(loaded: LoadedModel) -> None:
    expected = {dtype: numbers(attnorm.analyze("bundled", dtype=dtype, **SHORT)) for dtype in ("float32", "bfloat16")}
    dtypes = ["float32", "bfloat16"] * (COUNT // 2)
    found = in_threads(lambda number: numbers(attnorm.analyze("bundled", dtype=dtypes[number], **SHORT)))
    assert found == [expected[dtype] for dtype in dtypes]


@pytest.mark.parametrize("change", ["load", "from_pretrained", "patch"])
def test_loading_and_patching_wait_for_an_analysis_in_another_thread(
    loaded: LoadedModel, change: str, tmp_path: Path
) -> None:
    expected = numbers(attnorm.analyze(loaded, **SHORT))
    with swap(saved := tiny("llama"), "ssmax"):
        attnorm.save_pretrained(saved, tmp_path)
    work = {
        "load": lambda: load("bundled", dtype="bfloat16"),  # torch's default dtype is then bfloat16 for a while
        "from_pretrained": lambda: attnorm.from_pretrained(tmp_path, dtype="bfloat16"),
        "patch": lambda: patch(loaded.model, "entmax15"),
    }[change]
    threads: list[threading.Thread] = []
    finished: list[bool] = []

    def progress(_: Any) -> None:
        if not threads:
            threads.append(threading.Thread(target=work))
            threads[0].start()
            threads[0].join(WAIT)
        finished.append(not threads[0].is_alive())

    assert numbers(attnorm.analyze(loaded, progress=progress, **SHORT)) == expected
    threads[0].join(60)
    assert set(finished) == {False}
    assert bool(patched_modules(loaded.model)) == (change == "patch")


def test_models_of_their_own_are_analyzed_at_the_same_time(loaded: LoadedModel) -> None:
    other, done = copy.deepcopy(loaded.model), []

    def progress(_: Any) -> None:
        if not done:
            done.append(in_another_thread(lambda: attnorm.analyze(other, torch.arange(24), **SHORT)))

    attnorm.analyze(loaded, progress=progress, **SHORT)
    assert done


def test_plain_calls_of_other_threads_are_not_recorded_and_keep_their_output(model: PreTrainedModel) -> None:
    expected, own = logits(model), tuple[list[AttentionCall], list[AttentionCall]]
    seen: own = ([], [])
    together = threading.Barrier(2)

    def watch(number: int) -> torch.Tensor:
        with observe(model, seen[number].append):
            together.wait(60)
            found = [logits(model) for _ in range(number + 1)]
            assert torch.equal(in_another_thread(lambda: logits(model)), expected)
            together.wait(60)
        return found[0]

    assert all(torch.equal(found, expected) for found in in_threads(watch, 2))
    assert [[call.layer for call in calls] for calls in seen] == [[0, 1], [0, 1, 0, 1]]


def test_plain_calls_during_a_measured_pass_keep_their_output(loaded: LoadedModel) -> None:
    """The head runs on given states, but only in the thread that measures."""
    model: Any = loaded.model
    tokens = torch.arange(8)[None]
    found: list[torch.Tensor] = []
    own_thread = threading.get_ident()

    def plain() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=tokens + 1).logits

    expected = plain()

    def call_elsewhere(*_: Any) -> None:
        if threading.get_ident() == own_thread:
            found.append(in_another_thread(plain))

    with observe(model, call_elsewhere):
        output = run(loaded, {"input_ids": tokens})
    with model.get_output_embeddings().register_forward_pre_hook(call_elsewhere):
        head_logits(model, tokens, output.last_hidden_state, type(output))
    assert len(found) > 1
    assert all(torch.equal(logits, expected) for logits in found)


def other_entries(loaded: LoadedModel, handle: Patch) -> list[Callable[[], Any]]:
    return [
        lambda: attnorm.analyze(loaded, **SHORT),
        lambda: patch(loaded.model, "ssmax"),
        lambda: swap(loaded.model, "ssmax").__enter__(),
        lambda: unpatch(loaded.model),
        lambda: swap(loaded.model.base_model, "ssmax").__enter__(),
        handle.remove,
        lambda: handle.paused().__enter__(),
        lambda: attnorm.evaluate(loaded, tasks="perplexity", lengths=16, limit=1),
        lambda: attnorm.output_bottleneck(loaded, contexts=4),
    ]


@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("block", ["swap()", "paused()"])
def test_a_block_of_one_thread_is_no_model_to_measure_or_change_for_another(
    loaded: LoadedModel, number: int, block: str
) -> None:
    """Waiting could take forever: the block may wait for the thread."""
    plain = logits(loaded.model)
    with ExitStack() as blocks:
        handle = blocks.enter_context(swap(loaded.model, "entmax15"))
        swapped = logits(loaded.model)
        expected = plain if block == "paused()" else swapped
        if block == "paused()":
            blocks.enter_context(handle.paused())
        with pytest.raises(RuntimeError, match=r"of another thread\. Leave that block first"):
            in_another_thread(other_entries(loaded, handle)[number])
        assert torch.equal(in_another_thread(lambda: logits(loaded.model)), expected)
        attnorm.analyze(loaded, **SHORT)  # its own thread may
    assert torch.equal(logits(loaded.model), plain)


def test_threads_that_patch_at_once_leave_one_patch(model: PreTrainedModel) -> None:
    expected = logits(model)

    def attempt(_: int) -> Patch | ValueError:
        try:
            return patch(model, "entmax15")
        except ValueError as error:
            return error

    found = in_threads(attempt)
    handles = [handle for handle in found if isinstance(handle, Patch)]
    assert len(handles) == 1
    assert all("already has 'entmax15'" in str(error) for error in found if error is not handles[0])
    handles[0].remove()
    assert torch.equal(logits(model), expected)


def test_a_call_that_has_asked_for_its_kernel_survives_the_end_of_an_observation(model: PreTrainedModel) -> None:
    """Another thread may be inside get_interface when the observing one restores it."""
    with observe(model, lambda call: None):
        replaced = AttentionInterface.get_interface
    assert callable(replaced(AttentionInterface(), "sdpa", None))


def test_compiled_models_run_uncompiled_until_the_last_thread_stops_observing() -> None:
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=count)
    first, second = tiny("llama"), tiny("llama")
    for model in (first, second):
        model.compile(backend="eager")
    blocks = [ExitStack(), ExitStack()]
    for model, block in zip((first, second), blocks, strict=True):
        block.enter_context(observe(model, lambda call: None))
    found = []
    for block in blocks:  # the first one ends first
        compiled(torch.ones(1))
        found.append(len(graphs))
        block.close()
    compiled(torch.ones(1))
    assert (found, len(graphs)) == ([0, 0], 1)


@pytest.mark.parametrize("kind", [AttentionMonitor, QKClip])
def test_a_monitor_measures_the_steps_of_its_own_thread(kind: Any) -> None:
    model = tiny("llama")

    def step(together: threading.Barrier) -> Any:
        watcher = kind(every=1) if kind is AttentionMonitor else kind(tau=1e-6)
        with watcher.measuring(model, 1) if kind is AttentionMonitor else watcher._observing(model) as found:
            together.wait(60)
            model(input_ids=ids())
            together.wait(60)
        largest = {} if kind is AttentionMonitor else watcher._largest
        watcher.close()  # QKClip observes until its step is finished
        return found if kind is AttentionMonitor else {watcher._names[k]: v.tolist() for k, v in largest.items()}

    expected = step(threading.Barrier(1))
    together = threading.Barrier(2)
    assert in_threads(lambda _: step(together), 2) == [expected, expected]


@pytest.mark.parametrize("watcher", [AttentionMonitor(every=1), QKClip()])
def test_one_monitor_is_not_for_two_threads(watcher: Any) -> None:
    model = tiny("llama")

    def enter(step: AbstractContextManager[Any]) -> None:
        with step:
            pass

    with watcher.step(model):
        model(input_ids=ids())
        with pytest.raises(RuntimeError, match=f"expected a {type(watcher).__name__} of one thread"):
            in_another_thread(lambda: enter(watcher.step(model)))


def test_filters_of_warnings_are_changed_by_one_thread_at_a_time() -> None:
    entered = threading.Event()

    def enter() -> None:
        with nan_expected():
            entered.set()

    with nan_expected():
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(WAIT)
    thread.join(60)
    assert entered.is_set()
