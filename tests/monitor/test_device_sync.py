"""On a GPU the monitor asks for no number before the step is done: each would wait for all that is still to compute."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnorm.metrics import call, nested_sets, row_statistics, separability
from attnorm.models.patch import patch
from attnorm.monitor import measure as measuring
from attnorm.monitor import watch as watching
from attnorm.monitor.monitor import AttentionMonitor
from attnorm.theory import rank_one_eigenvalues, rank_two_singular_values, selection
from tests.models.tiny import tiny, tokens

pytestmark = pytest.mark.filterwarnings("ignore::attnorm.monitor.alerts.AttentionAlert")

aten = torch.ops.aten
LOOKS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal}


class NobodyLooks(TorchDispatchMode):
    """Fails where a GPU would be waited for, or be sent numbers from pageable memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in LOOKS, func
        assert func.overloadpacket is not aten.lift_fresh, "a tensor made of Python's numbers"
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "picked by a mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "gemma3", "gpt_oss", "bert"])
@pytest.mark.parametrize("normalizer", [None, "ssmax"])
def test_a_gpu_is_not_waited_for(family: str, normalizer: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny(family).train(), tokens(2, 40)
    if normalizer is not None:
        patch(model, normalizer)
    monitor = AttentionMonitor(top_n=5)

    def measured() -> dict[str, float]:
        torch.manual_seed(1)
        with monitor.measuring(model, 1) as numbers:
            model(input_ids=ids)
        return numbers

    expected = measured()
    looked: list[int] = []
    take, measure = watching.Sampler.take, watching.ForwardWatch._measure

    def unseen(function: Any) -> Any:
        def run(*args: Any) -> Any:
            looked.append(1)
            with NobodyLooks():
                return function(*args)

        return run

    solvers = rank_one_eigenvalues, rank_two_singular_values
    for module in (row_statistics, call, *solvers, nested_sets, separability, selection):
        monkeypatch.setattr(module, "runs_asynchronously", lambda tensor: True)
    monkeypatch.setattr(watching.Sampler, "take", unseen(take))
    monkeypatch.setattr(watching.ForwardWatch, "_measure", unseen(measure))
    assert measured() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert len(looked) == 3  # two layers, and all that is measured of them


class Launches(TorchDispatchMode):
    """Counts the operations that a GPU would run; views are none."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_means_over_all_rows_are_no_further_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, measure = tiny("gpt2"), tokens(2, 40), watching.ForwardWatch._measure
    counts: list[int] = []

    def counted(watched: watching.ForwardWatch) -> None:
        with Launches() as launches:
            measure(watched)
        counts.append(launches.count)

    monkeypatch.setattr(measuring, "takes_all_rows", lambda *_: True)
    monkeypatch.setattr(watching.ForwardWatch, "_measure", counted)
    for omitted in ((), (), measuring.MEANS_OF_ALL):  # the first measurement also fills caches
        for name in omitted:
            monkeypatch.delitem(measuring.REPORTED, name)
        if omitted:
            monkeypatch.setattr(measuring, "MEANS_OF_ALL", ())
        with AttentionMonitor(top_n=5).measuring(model, 1) as numbers:
            model(input_ids=ids)
        assert ("attn/layer_00/entropy_all_rows_mean" in numbers) == (not omitted)
    assert counts[1] == counts[2] > 100
