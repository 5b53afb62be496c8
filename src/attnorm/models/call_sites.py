"""Which module of a model makes an attention call, and the layer index that its calls get.

Modules that run are kept on a stack by global forward hooks. The innermost one is where a call comes from. A call site
is a module, which forward of that module it is within one pass over the input, and which attention call within that
forward. Sites are numbered within their kind, in the order of their first calls.

A pass begins when a module that no other module called runs again: `model(x)` twice gives two passes, a loop over the
blocks of a model gives one.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from attnorm.metrics.call import Kind

COMPILED = "_orig_mod."  # what torch.compile puts in front of a module's name


@dataclass(frozen=True)
class CallSite:
    """Where attention calls come from."""

    kind: Kind
    layer: int  # within its kind
    path: str  # of the module, "" for a call outside of any module
    function: str  # torch's name of what is called


class CallSites:
    """The running modules of one thread, and the call sites seen so far."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model
        self.passes = 0
        self.roots: list[nn.Module] = []  # modules that no other module called
        self.inputs: dict[int, tuple[Any, ...]] = {}  # of each pass: the positional arguments of its first module
        self.sites: dict[tuple[Any, ...], CallSite] = {}
        self._thread = get_ident()
        self._running: list[tuple[nn.Module | None, int]] = []
        self._roots_of_pass: set[nn.Module] = set()
        self._forwards: Counter[nn.Module] = Counter()
        self._calls: Counter[tuple[nn.Module | None, int]] = Counter()
        self._layers: Counter[Kind] = Counter()
        self._paths: dict[nn.Module, str] = {}

    @contextmanager
    def followed(self) -> Iterator[None]:
        """While inside, modules that this thread runs are noted."""
        with ExitStack() as restore:
            restore.callback(register_module_forward_pre_hook(self._enter).remove)
            restore.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            yield

    def site(self, kind: Kind, function: str, inside: str = "") -> CallSite:
        """The site of a call that happens now. A site keeps its first kind: with a cache, later masks say less.

        inside: the name below the running module, where that does the work of one of its children.
        """
        if not self.passes:
            self._begin_pass(())
        module, forward = self._running[-1] if self._running else (None, 0)
        call = self._calls[module, forward]
        self._calls[module, forward] += 1
        key = (module, forward, call, function)
        if key not in self.sites:
            path = ".".join(part for part in (self._path(module), inside) if part)
            self.sites[key] = CallSite(kind, self._layers[kind], path, function)
            self._layers[kind] += 1
        return self.sites[key]

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if get_ident() != self._thread:
            return
        if not self._running:
            if not self.passes or module in self._roots_of_pass:
                self._begin_pass(args)
            self._roots_of_pass.add(module)
            if module not in self.roots:
                self.roots.append(module)
                self._name_modules(module)
        self._running.append((module, self._forwards[module]))
        self._forwards[module] += 1

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if get_ident() == self._thread and self._running and self._running[-1][0] is module:
            self._running.pop()

    def _begin_pass(self, args: tuple[Any, ...]) -> None:
        self.passes += 1
        self.inputs[self.passes] = args
        self._roots_of_pass.clear()
        self._forwards.clear()
        self._calls.clear()

    def _name_modules(self, root: nn.Module) -> None:
        for holder, prefix in ((self.model, ""), (root, f"{type(root).__name__}." if len(self.roots) > 1 else "")):
            for path, module in holder.named_modules() if holder is not None else ():
                self._paths.setdefault(module, (prefix + path).replace(COMPILED, ""))

    def _path(self, module: nn.Module | None) -> str:
        if module is None:
            return ""
        return self._paths.get(module) or type(module).__name__
