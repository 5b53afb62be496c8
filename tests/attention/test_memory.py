"""No array of queries x keys is ever made, and what is alive at once stays far below one, forward and backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attnorm
from attnorm.engines import blocked as blocked_engine
from attnorm.engines import inputs as engine_inputs

LENGTH = 512
WIDTH = 4
MAP = LENGTH * LENGTH


class Watch(TorchDispatchMode):
    """Elements of the largest array made, and the most elements alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}  # some of them no longer alive
        self.largest = self.most = self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.made and storage._cdata not in self._storages((args, kwargs)):
                    elements = storage.nbytes() // 4
                    self.largest = max(self.largest, elements)
                    self.made[storage._cdata] = (StorageWeakRef(storage), elements)
                    self.elements += elements
        if self.elements > self.most:  # only then can more be alive than ever before
            self.made = {key: entry for key, entry in self.made.items() if not entry[0].expired()}
            self.elements = sum(elements for _, elements in self.made.values())
            self.most = max(self.most, self.elements)
        return result

    def _storages(self, arguments: Any) -> set[int]:
        return {leaf.untyped_storage()._cdata for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)}


def inputs(heads: int = 1, value_heads: int = 1) -> list[Tensor]:
    return [torch.randn(1, h, LENGTH, WIDTH, requires_grad=True) for h in (heads, heads, value_heads)]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_engine, "BLOCK_ELEMENTS", LENGTH * 16)
    monkeypatch.setattr(engine_inputs, "MASK_ELEMENTS", LENGTH * 16)


def watched(attend: Callable[..., Tensor], tensors: list[Tensor]) -> Watch:
    with Watch() as watch:
        attend(*tensors).sum().backward()
    assert tensors[0].grad is not None
    assert tensors[0].grad.isfinite().all()
    return watch


PADDING = (torch.arange(LENGTH) < LENGTH - 24)[None, None, None]

MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "padding, causal": {"causal": True, "mask": PADDING},
}


NAMES = [name for name in attnorm.available() if isinstance(attnorm.get(name), attnorm.Normalizer)]


# Those that differ in what the engines keep of a block: scales, thresholds, selections, scans, two passes.
OFTEN = {
    "softmax", "ssmax", "alibi", "sink", "softpick", "sigmoid", "topk", "local", "entmax15", "kneemax",
    "stick_breaking", "adaptive_temperature", "sa_softmax",
}  # fmt: skip
# Each of them with one of the masks, in turn; with the other at night, as the other normalizers.
IN_TURN = [
    pytest.param(name, mask, marks=pytest.mark.nightly if (number + other) % 2 or name not in OFTEN else ())
    for number, name in enumerate(NAMES)
    for other, mask in enumerate(MASKS)
]


@pytest.mark.parametrize(("name", "mask"), IN_TURN)
@pytest.mark.every_second("name")
def test_no_map_of_all_queries_and_keys_is_made(name: str, mask: str) -> None:
    normalizer = attnorm.get(name)
    watch = watched(lambda q, k, v: attnorm.attention(q, k, v, normalizer, **MASKS[mask]), inputs())
    assert watch.largest <= MAP // 4
    assert watch.most <= MAP // 2


def test_adaptive_temperature_makes_no_map_in_its_two_passes() -> None:
    q, k, v = inputs()
    with torch.no_grad(), Watch() as watch:
        attnorm.attention(q, k, v, "adaptive_temperature", causal=True, mask=PADDING)
    assert watch.largest <= MAP // 4
    assert watch.most <= MAP // 2


MECHANISMS: dict[str, tuple[Callable[[], attnorm.Mechanism], dict[str, Any]]] = {
    "linear": (lambda: attnorm.get("linear"), {}),
    "linear, causal": (lambda: attnorm.get("linear"), {"causal": True, "mask": PADDING}),
    "linear, any mask": (lambda: attnorm.get("linear"), {"mask": torch.rand(LENGTH, LENGTH) < 0.9}),
    "gaussian": (lambda: attnorm.get("gaussian"), {"causal": True}),
    "selective": (lambda: attnorm.get("selective", block_elements=LENGTH * 16), {"causal": True}),
    "soft": (lambda: attnorm.get("soft", landmarks=16), {"mask": PADDING}),
    "differential": (lambda: attnorm.get("differential"), {"causal": True, "mask": PADDING}),
    "laser": (lambda: attnorm.get("laser", normalizer="entmax15"), {"causal": True, "mask": PADDING}),
    "forget": (lambda: attnorm.get("forget"), {"causal": True, "mask": PADDING}),
}


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.every_second("name", first=1)
def test_no_mechanism_makes_a_map_of_all_queries_and_keys(name: str) -> None:
    make, options = MECHANISMS[name]
    mechanism = make()
    watch = watched(
        lambda q, k, v: attnorm.attention(q, k, v, mechanism, **options), inputs(2 if name == "differential" else 1, 1)
    )
    assert watch.largest <= MAP // 4
    assert watch.most <= MAP // 2


def test_the_watch_sees_a_whole_map() -> None:
    """The tests above can fail: written out, attention makes and keeps several maps."""
    watch = watched(lambda q, k, v: attnorm.normalize(q @ k.transpose(-1, -2), "entmax15") @ v, inputs())
    assert watch.largest >= MAP
    assert watch.most >= 2 * MAP


def test_softmax_copies_no_input() -> None:
    tensors = [t.detach() for t in inputs()]
    with Watch() as watch:
        attnorm.attention(*tensors, causal=True)
    large = [elements for _, elements in watch.made.values() if elements >= LENGTH * WIDTH]
    assert large == [LENGTH * WIDTH], "the output alone"
