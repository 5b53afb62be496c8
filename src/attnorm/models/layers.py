"""The number that a layer goes by: within its kind, and one for each attention module and each time it runs.

A model's own `layer_idx` where every module of a stack has a different one (layers without attention leave a gap), else
the order of calls. Two stacks of one kind (a text and an image encoder) are counted on; a looped model, which runs the
same module several times in a forward, gets new numbers for each time.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from torch import nn

from attnorm.metrics.call import Kind
from attnorm.models.dispatch import Site


class LayerNumbers:
    """Told which modules start to run, it knows what to call them."""

    def __init__(self, sites: Mapping[nn.Module, Site]) -> None:
        self._sites = sites
        self._indices: dict[str, set[int]] = {}  # of each stack, in its own numbers
        for site in sites.values():
            indices = self._indices.setdefault(site.stack, set())
            indices.add(len(indices) if site.layer_index is None else site.layer_index)
        self._order: Counter[str] = Counter()  # of the calls of a stack in this forward
        self._times: Counter[nn.Module] = Counter()
        self._offsets: dict[tuple[Kind, str], int] = {}
        self._extra: dict[tuple[Kind, str, int], int] = {}
        self._taken: dict[Kind, set[int]] = {}

    def restart(self, modules: Iterable[nn.Module]) -> None:
        """A forward of the model that holds these begins."""
        for module in modules:
            self._order.pop(self._sites[module].stack, None)
            self._times.pop(module, None)

    def enter(self, module: nn.Module) -> int:
        """Its number within its stack, for the call that begins."""
        site = self._sites[module]
        order, times = self._order[site.stack], self._times[module]
        self._order[site.stack] += 1
        self._times[module] += 1
        if site.layer_index is None:
            return order
        return site.layer_index + times * (max(self._indices[site.stack]) + 1)

    def within_kind(self, module: nn.Module, kind: Kind, own: int) -> int:
        """The number within its kind, from the one within its stack."""
        stack = self._sites[module].stack
        indices, taken = self._indices[stack], self._taken.setdefault(kind, set())
        if (kind, stack) not in self._offsets:
            self._offsets[kind, stack] = max(taken) + 1 if taken & indices else 0
            taken |= {index + self._offsets[kind, stack] for index in indices}
        if own in indices:
            return own + self._offsets[kind, stack]
        if (kind, stack, own) not in self._extra:
            self._extra[kind, stack, own] = max(taken) + 1
            taken.add(self._extra[kind, stack, own])
        return self._extra[kind, stack, own]
