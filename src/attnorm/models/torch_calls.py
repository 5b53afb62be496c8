"""Observe calls of torch's attention functions in any PyTorch code, without changing its results.

A TorchFunctionMode sees every call into torch's Python interface, however the caller imported the function, and only
those of its own thread. Two things would change while such a mode is active, and both are undone here:

- nn.MultiheadAttention, nn.TransformerEncoder and nn.TransformerEncoderLayer leave their fast path, because they ask
  torch.overrides.has_torch_function. They get the answer that they would get without the mode.
- Compiled code calls no functions that could be observed. It runs uncompiled meanwhile.

Where a call comes from: modules that run are kept on a stack by global forward hooks, and the innermost one makes the
call. A call site is a module, the count of its forward calls within one pass over the input, and the count of attention
calls within that forward. Sites are numbered within their kind, in the order of their first calls. A pass begins when a
module that no other module called runs again: `model(x)` twice gives two passes, a loop over the blocks of a model one.
"""

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from attnorm.metrics.call import AttentionCall, Kind
from attnorm.models.observe import check_output
from attnorm.models.private_names import (
    COMPILED_PREFIX,
    fast_encoder_layer,
    fast_multi_head_attention,
    flex_operator,
    function_modes,
    in_backward_pass,
    without_innermost_mode,
)
from attnorm.models.threads import uncompiled_meanwhile
from attnorm.models.torch_functions import (
    read_flex_attention,
    read_multi_head_attention,
    read_native_multi_head_attention,
    read_scaled_dot_product_attention,
    read_transformer_encoder_layer,
)


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
        self._keys: dict[tuple[Any, ...], int] = {}  # of the last call of a site
        self._layers: Counter[Kind] = Counter()
        self._paths: dict[nn.Module, str] = {}

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Inside the block, record the modules that this thread runs."""
        with ExitStack() as restore:
            restore.callback(register_module_forward_pre_hook(self._enter).remove)
            restore.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            yield

    def site(self, call: AttentionCall, function: str, inside: str = "") -> CallSite:
        """Return the site of a call. A site keeps its first kind: with a cache, later masks contain less.

        Where a module attends to its own sequence and, in another pass, to another one, these are two sites. inside:
        the name below the running module, where that does the work of one of its children.
        """
        if not self.passes:
            self._begin_pass(())
        module, forward = self._running[-1] if self._running else (None, 0)
        key: tuple[Any, ...] = (module, forward, self._calls[module, forward], function)
        self._calls[module, forward] += 1
        queries, keys = call.query_BHQD.shape[2], call.key_BGKD.shape[2]
        earlier = self.sites.get(key)
        if earlier is not None and call.kind == "cross":
            # A decoder's cache may have a fixed size. That of a text without a mask, one token, grows with the queries.
            in_cache = queries <= keys and (earlier.kind == "decoder" or keys == self._keys[key] + queries)
            key = key if in_cache else (*key, "cross")
        self._keys[key] = keys
        if key not in self.sites:
            path = ".".join(part for part in (self._path(module), inside) if part)
            self.sites[key] = CallSite(call.kind, self._layers[call.kind], path, function)
            self._layers[call.kind] += 1
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
                self._paths.setdefault(module, (prefix + path).replace(COMPILED_PREFIX, ""))

    def _path(self, module: nn.Module | None) -> str:
        if module is None:
            return ""
        return self._paths.get(module) or type(module).__name__


@dataclass(frozen=True)
class Watched:
    """A function of torch that is observed: its name, and how its arguments are read."""

    name: str
    read: Callable[..., AttentionCall]
    inside: str = ""  # where the attention is below the module that calls


WATCHED: dict[Any, Watched] = {
    F.scaled_dot_product_attention: Watched("scaled_dot_product_attention", read_scaled_dot_product_attention),
    F.multi_head_attention_forward: Watched("MultiheadAttention", read_multi_head_attention),
    fast_multi_head_attention: Watched("MultiheadAttention", read_native_multi_head_attention),
    fast_encoder_layer: Watched("MultiheadAttention", read_transformer_encoder_layer, "self_attn"),
    flex_operator(): Watched("flex_attention", read_flex_attention),
}

OnCall = Callable[[AttentionCall, CallSite], None]

_only_one = threading.Lock()


@contextmanager
def watch_torch(on_call: OnCall, model: nn.Module | None = None) -> Iterator[CallSites]:
    """Inside the block, pass each attention call of this thread to `on_call`, after torch has computed its result.

    Results are bit for bit the unobserved ones, with or without gradients. model: gives names to modules that are
    called one by one. Raises RuntimeError where another watch is active in this process.
    """
    if not _only_one.acquire(blocking=False):
        raise RuntimeError(
            "expected no active attnorm.observe(), got a second one. Leave the first `with` block before you "
            "enter another. Two threads cannot observe at the same time."
        )
    with ExitStack() as restore:
        restore.callback(_only_one.release)
        sites = CallSites(model)
        restore.enter_context(sites.followed())
        restore.enter_context(uncompiled_meanwhile())
        restore.enter_context(warnings.catch_warnings())
        # The hooks of call_sites fire once more for a compiled model's wrapper, which is as it should be.
        warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
        restore.enter_context(_fast_paths_kept())
        restore.enter_context(_Watch(on_call, sites))
        yield sites


class _Watch(TorchFunctionMode):
    def __init__(self, on_call: OnCall, sites: CallSites) -> None:
        super().__init__()
        self.on_call = on_call
        self.sites = sites
        self._checked: set[CallSite] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        watched = WATCHED.get(func) if func.__hash__ is not None else None
        # Gradient checkpointing runs a layer again during the backward pass: no new call of the model.
        if watched is not None and not in_backward_pass():
            with torch.no_grad():
                self._record_call(watched, result, args, kwargs)
        return result

    def _record_call(self, watched: Watched, result: Any, args: Any, kwargs: Any) -> None:
        call = watched.read(*args, **kwargs)
        if call.query_BHQD.device.type == "meta" or not call.query_BHQD.numel() or not call.key_BGKD.numel():
            return
        site = self.sites.site(call, watched.name, watched.inside)
        call = replace(call, kind=site.kind, layer=site.layer)
        with torch.autocast(call.query_BHQD.device.type, enabled=False):
            if site not in self._checked and _comparable(watched, result, args, kwargs):
                output_BHQE = result.reshape(*call.query_BHQD.shape[:3], -1)
                check_output(call, output_BHQE.transpose(1, 2), site.path, watched.name)()
                self._checked.add(site)
            self.on_call(call, site)


def _comparable(watched: Watched, result: Any, args: Any, kwargs: Any) -> bool:
    """Whether the result is the attention output itself: not projected further, and without dropout."""
    dropout = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    return watched.read is read_scaled_dot_product_attention and isinstance(result, Tensor) and not dropout


@contextmanager
def _fast_paths_kept() -> Iterator[None]:
    """Keep the fast paths of torch.nn modules, which they would not take while a function mode is active.

    They look torch.overrides.has_torch_function up at each call and give it tensors only. An operator with functions
    among its arguments (flex_attention) gives those too, and must notice the mode to be seen. Torch's other functions
    hold the original.
    """
    ordinary = torch.overrides.has_torch_function

    def without_the_watch(arguments: Any) -> bool:
        modes = function_modes()
        alone = len(modes) == 1 and isinstance(modes[0], _Watch)
        if alone and all(argument is None or isinstance(argument, Tensor) for argument in arguments):
            with without_innermost_mode():
                return ordinary(arguments)
        return ordinary(arguments)

    torch.overrides.has_torch_function = without_the_watch  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.overrides.has_torch_function = ordinary
