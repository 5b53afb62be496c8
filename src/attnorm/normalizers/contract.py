"""The classes that a normalizer consists of. Each part declares the properties that it guarantees.

    logits -> logit rules -> selections -> map (with or without a sink) -> weights

A `Map` turns a row of logits into a row of weights. Before the map, a `LogitRule` changes the logits (a `ScaleRule`
multiplies them by one factor per row), and a `Selection` hides keys. A `Sink` is one more key whose weight is dropped.
`Normalizer` combines one map with any number of rules and selections and at most one sink, and derives its properties
from theirs. A `Mechanism` needs more than one row of logits at a time (queries and keys, or other rows), so it is
called with q, k, v instead.

An operator of torch.library takes tensors and numbers, no objects. Every normalizer has a handle for it, a tensor with
its id, by which `normalizer_of` finds it while it exists. torch.compile would compile once more for every number; a
tensor is an input of the graph, so that all layers share one.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from attnorm.normalizers.block import Block, Positions
from attnorm.text import count_words

RowSum = Literal["one", "at most one", "free"]
JacobianForm = Literal["diagonal", "threshold", "quotient"]


@dataclass(frozen=True, kw_only=True)
class Properties:
    """Properties that the weights of a map or a normalizer have for every row of logits."""

    row_sum: RowSum
    signed: bool = False
    exact_zeros: bool = False
    shift_invariant: bool = True
    permutation_equivariant: bool = True
    length: str = ""  # how the weights depend on the number of visible keys or on positions; empty: not at all

    def __post_init__(self) -> None:
        if self.row_sum not in get_args(RowSum):
            raise ValueError(f"row_sum must be one of {', '.join(map(repr, get_args(RowSum)))}, got {self.row_sum!r}")


class KernelForm(NamedTuple):
    """How the one-pass GPU kernels compute a map: its name in kernels/maps.py, and its constants."""

    map: str
    power: int = 1
    floor: float = 0.0  # added to the denominator
    row_factor: Callable[[Any], Any] | None = None  # function of n (..., Q, 1) that multiplies the logits
    row_shift: Callable[[Any], Any] | None = None  # function of n that is added to the logits afterwards
    takes_numbers: bool = False  # whether both also take n as a number, and then return one
    counts_keys: bool = False  # whether the map depends on n; then no selection may hide keys from it
    float16: bool = True  # whether float16 can represent its weights
    ranged: bool = False  # whether the map reads the row's range: from its smallest logit, or 0, to its largest, or 0


class ThresholdForm(NamedTuple):
    """How the threshold kernels compute a map on a GPU: its name in kernels/threshold_maps.py, and a number per row."""

    map: str
    parameter: Callable[[Any], Any] | None = None  # function of n (B, H, Q, 1); the result broadcasts to it
    takes_numbers: bool = False  # whether it also takes n as a number, and then returns one


class Map(nn.Module):
    """Base class of maps: the logits of a block become weights of the same shape. Hidden keys must get exactly 0."""

    properties: Properties
    jacobian: JacobianForm | None = None  # its form, see `slopes`; then its norm is computed for every row, and exactly

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.forward is not base_of(cls, Map).forward:  # other weights than those of its base class
            for name in ("jacobian", "kernel_form", "threshold_form"):
                if name not in vars(cls):
                    setattr(cls, name, vars(Map)[name])

    def forward(self, block: Block) -> Tensor:
        raise NotImplementedError

    def lipschitz(self, n: int) -> float | None:
        """Return a bound on the l2 -> l2 norm of the Jacobian over all rows of n visible keys; None if none is known.

        It is the largest norm, except for a learned alpha of entmax and a knee of kneemax that no two weights reach.
        """
        return None

    def slopes(self, block: Block, weights: Tensor) -> Tensor:
        """Return the numbers u of the keys from which the Jacobian is made; values at hidden keys are ignored.

        diagonal    diag(u): a weight depends on its own logit and on n
        threshold   diag(u) - u u^T / sum u: u is a function of the weight, 0 at 0; `weights` may be that of a sink
        quotient    (I - p 1^T) diag(u) for the weights p = F(z) / sum F(z): u = F'(z) / sum F(z)
        """
        if self.jacobian != "diagonal":
            expected = f"{type(self).__name__}.slopes for jacobian={self.jacobian!r}"
            raise NotImplementedError(f"expected {expected}, got none. Add the method.")
        return slope_of_each(lambda logits: self(block.with_logits(logits)), block.logits)

    def kernel_form(self) -> KernelForm | None:
        """Return the form of this map in the one-pass GPU kernels; None if they do not have it."""
        return None

    def threshold_form(self) -> ThresholdForm | None:
        """Return the form of this map in the threshold GPU kernels; None if they do not have it."""
        return None


class Part(nn.Module):
    """Base class of rules, selections and sinks, and of the normalizer that they form.

    Engines and metrics compute the classes of this package in their own ways. They do not know a class that overrides
    a method by which such a class computes: it runs in blocks, by its own methods.
    """

    known_to_engines: bool = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        base = base_of(cls, Part)
        changed = [name for name in COMPUTING if getattr(cls, name, None) is not getattr(base, name, None)]
        overridden = [getattr(base, name, None) for name in changed]
        if any(method not in (None, nn.Module.forward) and not is_abstract(method) for method in overridden):
            cls.known_to_engines = vars(cls).get("known_to_engines", False)


COMPUTING = ("forward", "all_weights", "factor", "scaled", "factor_of_rows", "prepare", "weights")


def is_abstract(method: Any) -> bool:
    return getattr(method, "__isabstractmethod__", False)


def base_of(cls: type, kind: type) -> Any:
    """Return the next class of this kind; one before it that is of no kind, a mixin, may override its methods."""
    return next(base for base in cls.__mro__[1:] if issubclass(base, kind))


class LogitRule(Part):
    """Base class of rules that change the logits before the map."""

    length: str = ""
    additive: bool = False  # whether it adds numbers that do not depend on the logits: then the Jacobian is the map's
    shift_invariant: bool = True
    permutation_equivariant: bool = True

    @abstractmethod
    def forward(self, block: Block) -> Tensor:
        """Return the new logits; values at hidden keys are ignored."""
        raise NotImplementedError

    def gain(self, n: int) -> float | None:
        """Return the largest factor by which the rule stretches differences of logits among n keys; None if unknown.

        For rows without given positions: rules that read a position (`log_scaled`) stretch further at larger ones.
        """
        return None

    def kernel_rule(self) -> tuple[str, float | Tensor] | None:
        """Return name and parameter of the rule in kernels/maps.py; None if the one-pass kernels do not have it.

        The parameter is one number, or (H,) with one number per head. It gets no gradient.
        """
        return None


class ScaleRule(LogitRule):
    """A logit rule that multiplies each row by one factor.

    The factor does not depend on the logits, so it can scale q.
    """

    may_round_queries: bool = False  # factors of ordinary size, for which half precision may round q times the factor

    @abstractmethod
    def factor(self, n: Tensor, positions: Tensor | None, hidden_states: Tensor | None) -> Tensor:
        """Return the factor, broadcastable to (..., heads, Q, 1).

        n: number of visible keys (..., Q, 1). positions: given positions of the queries (..., Q, 1), or None.
        """
        raise NotImplementedError

    def log_length(self) -> tuple[float | Tensor, int] | None:
        """Return slope and shortest if the factor without given positions is slope * log(max(n, shortest)), else None.

        The slope is one number, or (H,) with one number per head. A kernel computes such a factor beside the product.
        """
        return None

    def common_factor(self, n: int) -> tuple[float, Tensor | None] | None:
        """Return the factor of rows that all see n keys: a number, and None or a tensor that multiplies it.

        The tensor has one element, or (H,) one per head. None if the factor depends on more than n and parameters, or
        if this method is not written: it saves operations of torch, of which decoding pays for each.
        """
        if (log_length := self.log_length()) is None:
            return None
        slope, shortest = log_length
        log_n = math.log(max(n, shortest))
        return (log_n, slope) if isinstance(slope, Tensor) else (slope * log_n, None)

    def forward(self, block: Block) -> Tensor:
        positions = None if block.given_positions is None else block.positions.query[..., None]
        return self.scaled(block.logits, block.n, positions, block.hidden_states)

    def scaled(self, rows: Tensor, n: Tensor, positions: Tensor | None, hidden_states: Tensor | None) -> Tensor:
        """Multiply rows, which are logits (..., Q, K) or queries (..., Q, D), by their factors, in the rows' dtype."""
        return rows * self.factor_of_rows(rows.shape[:-1], rows.dtype, n, positions, hidden_states)

    def factor_of_rows(
        self,
        rows: torch.Size,
        dtype: torch.dtype,
        n: Tensor,
        positions: Tensor | None,
        hidden_states: Tensor | None,
    ) -> Tensor:
        """Return the factor in the dtype, (..., 1), after a check that it broadcasts to rows (..., heads, Q).

        Raises:
            ValueError: It has factors for another number of heads.
        """
        factor = self.factor(n, positions, hidden_states)
        # Compares shapes itself: torch.broadcast_shapes takes longer than the product, for every token and layer.
        sizes = zip(reversed(factor.shape), (1, *reversed(rows)), strict=False)
        if factor.dim() > len(rows) + 1 or not all(size in (1, expected) for size, expected in sizes):
            raise ValueError(
                f"{type(self).__name__} has factors of shape {tuple(factor.shape)}, one per head, but got rows of "
                f"shape {tuple(rows)}; expected (..., heads, queries) with the same number of heads"
            )
        return factor if factor.dtype == dtype else factor.to(dtype)

    def gain(self, n: int) -> float | None:
        device = next((tensor.device for tensor in (*self.parameters(), *self.buffers())), None)
        with torch.no_grad():
            factor = self.factor(torch.full((1, 1), float(n), dtype=torch.float64, device=device), None, None)
        return factor.abs().max().item()


class Selection(Part):
    """Base class of selections: they hide keys from the map, which then have weight 0."""

    length: str = ""
    permutation_equivariant: bool = True
    continuous: bool = True
    kernel_window: int | None = None  # for the kernels: keep exactly the keys less than this many positions away

    @abstractmethod
    def forward(self, block: Block) -> Tensor:
        """Return which keys to keep: boolean, broadcastable to the logits."""
        raise NotImplementedError


class Sink(Part):
    """One more key with its own logit and no value. The weight that it takes is dropped from the row."""

    logit: Tensor

    def __init__(self, logit: float = 0.0, *, learned: bool = True, heads: int | None = None) -> None:
        super().__init__()
        set_per_head(self, "logit", logit, heads, learned=learned)

    def forward(self, block: Block, map_: Map) -> Tensor:
        return self.all_weights(block, map_)[..., 1:]

    def all_weights(self, block: Block, map_: Map) -> Tensor:
        """Return the weights with that of the sink in front, (..., 1 + L)."""
        shape = (*block.logits.shape[:-1], 1)
        column = per_head(self.logit, block.logits).to(block.logits.dtype).expand(shape)
        logits = torch.cat([column, block.logits], dim=-1)
        mask = block.mask
        if mask is not None:
            visible = mask.expand(*mask.shape[:-1], block.logits.shape[-1])
            mask = torch.cat([visible.new_ones(*visible.shape[:-1], 1), visible], dim=-1)
        positions = block.given_positions
        if isinstance(positions, Positions):
            positions = Positions(positions.query, torch.cat([positions.key[..., :1], positions.key], dim=-1))
        weights: Tensor = map_(Block(logits, mask, positions, block.hidden_states, block.sinks + 1))
        return weights


class Normalizer(Part):
    """Turns logits into weights, row by row: `normalizer(logits, mask)`."""

    def __init__(
        self,
        map: Map,
        *,
        scale: Iterable[LogitRule] = (),
        select: Iterable[Selection] = (),
        sink: Sink | None = None,
        name: str = "custom",
    ) -> None:
        super().__init__()
        if not hasattr(map, "properties"):
            raise TypeError(
                f"expected properties of {type(map).__name__}, got none. Add a line to the class, for example "
                'properties = attnorm.Properties(row_sum="one")'
            )
        if sink is not None and not map.properties.permutation_equivariant:
            raise ValueError(
                f"{type(map).__name__} uses the order or the positions of the keys, so that it cannot have a "
                "sink. Leave the sink out, or use a permutation-equivariant map."
            )
        self.name = name
        self.scale = nn.ModuleList(scale)
        self.select = nn.ModuleList(select)
        self.map = map
        self.sink = sink
        self.handle = remember(self)

    def __setstate__(self, state: dict[str, Any]) -> None:  # a copy is another object
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.handle = remember(self)

    def forward(
        self,
        logits: Tensor,
        mask: Tensor | None = None,
        *,
        positions: Tensor | Positions | None = None,
        hidden_states: Tensor | None = None,
    ) -> Tensor:
        """Return weights of the logits' shape and dtype.

        Args:
            logits: (..., Q, K); if parameters are per head, dimension -3 is the heads.
            mask: Boolean, True = may attend.
            positions: Positions of the queries, (Q,) or (B, Q) (default: the last query is at the last key).
            hidden_states: Layer input of the queries, (B, Q, width), for rules that read it.
        """
        weights = self.weights(Block.of(logits, mask, positions, hidden_states))
        if weights.shape != logits.shape:
            raise ValueError(
                f"{self.name!r} made weights of shape {tuple(weights.shape)} from logits of "
                f"{tuple(logits.shape)}. Return one weight for every logit."
            )
        return weights.to(logits.dtype)

    def weights(self, block: Block) -> Tensor:
        """Return the weights of a block, in its dtype; `forward` checks the input and calls this."""
        block = self.prepare(block)
        weights: Tensor = self.map(block) if self.sink is None else self.sink(block, self.map)
        return block.hide(weights)

    def prepare(self, block: Block) -> Block:
        """Return the block that the map receives: all rules and selections applied."""
        for rule in self.scale:
            block = block.with_logits(block.hide(rule(block)))
        for selection in self.select:
            block = block.narrowed(selection(block))
        return block

    @property
    def parts(self) -> list[nn.Module]:
        """Return the map, all rules and selections, and the sink if there is one."""
        sink = self._modules.get("sink")
        return [self.map, *self.rules, *self.selections, *([] if sink is None else [sink])]

    # Not list(self.scale): looking up a submodule by attribute takes 2 us, and decoding asks eight times per call.
    @property
    def rules(self) -> list[LogitRule]:
        return list(self._modules["scale"]._modules.values())  # type: ignore[union-attr, arg-type]

    @property
    def selections(self) -> list[Selection]:
        return list(self._modules["select"]._modules.values())  # type: ignore[union-attr, arg-type]

    def has_known_parts(self) -> bool:
        """Whether engines and metrics know all rules and selections, the sink, and the class itself.

        Raises:
            TypeError: The class overrides `forward`, which they do not call.
        """
        if type(self).forward is not Normalizer.forward:
            raise TypeError(
                f"expected {type(self).__name__} to override Normalizer.weights, got an override of forward, which "
                "attention does not call. Write weights(self, block) instead; it returns the weights of block.logits."
            )
        parts = *self.rules, *self.selections, self._modules.get("sink")
        return self.known_to_engines and all(part is None or getattr(part, "known_to_engines", False) for part in parts)

    @property
    def properties(self) -> Properties:
        base = self.map.properties
        row_sum: RowSum = "at most one" if self.sink is not None and base.row_sum == "one" else base.row_sum
        parts: list[LogitRule | Selection] = [*self.rules, *self.selections]
        return Properties(
            row_sum=row_sum,
            signed=base.signed,
            exact_zeros=base.exact_zeros or bool(self.selections),
            shift_invariant=base.shift_invariant and self.sink is None and all(r.shift_invariant for r in self.rules),
            permutation_equivariant=base.permutation_equivariant
            and all(part.permutation_equivariant for part in parts),
            length=", ".join(text for text in [*(part.length for part in parts), base.length] if text),
        )

    def lipschitz(self, n: int) -> float | None:
        """Return a bound on the norm of d weights / d logits over rows of n visible keys; None if none is known.

        It holds without given positions, see `LogitRule.gain`. Without a sink, and rules other than scale rules, it is
        the largest norm if that of the map is.
        """
        if not all(selection.continuous for selection in self.selections):
            return None
        possible_keys = range(1, n + 1) if self.selections else (n,)  # a selection may keep any number of keys
        bounds, gains = [], [rule.gain(n) for rule in self.rules]
        for keys in possible_keys:
            # A sink is one more entry of the row, but n of a map that divides by it (relu) does not count the sink.
            for entries in (keys,) if self.sink is None else (keys, keys + 1):
                bound = self.map.lipschitz(entries)
                if bound is None or None in gains:
                    return None
                bounds.append(bound)
        return max(bounds) * math.prod(gain for gain in gains if gain is not None)

    def extra_repr(self) -> str:
        return f"name={self.name!r}"


class Mechanism(nn.Module):
    """Base class of attention that is not a function of one row of logits.

    Called with q, k, v like attnorm.attention.
    """

    properties: Properties
    name: str = "custom"
    reads_hidden_states: bool = False  # whether `forward` also takes hidden_states=
    another_architecture: str = ""  # the reason why it cannot replace softmax in a trained model; empty if it can
    no_causal_form: str = ""  # the reason why it cannot be causal, and what to do; empty if it can
    causal_only: bool = False
    needs_every_query: bool = False  # also the earlier ones, so that a cache of keys and values is not enough

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        scale: float | None = None,
        positions: Tensor | Positions | None = None,
    ) -> Tensor:
        raise NotImplementedError


def slope_of_each(function: Callable[[Tensor], Tensor], points: Tensor) -> Tensor:
    """Return the derivative of an elementwise function."""
    with torch.inference_mode(False), torch.enable_grad():
        point = points.clone().requires_grad_()
        (slopes,) = torch.autograd.grad(function(point).sum(), point)
    return slopes


def at_least_one(n: Any) -> Any:
    """Return max(n, 1) of a tensor or a number."""
    return n.clamp(min=1) if isinstance(n, Tensor) else max(n, 1.0)


def same_as(n: Any, value: float) -> Any:
    """Return the value, or a tensor like n that is filled with it."""
    return torch.full_like(n, value) if isinstance(n, Tensor) else value


def per_head_parameter(value: float, heads: int | None) -> nn.Parameter:
    """Return a parameter with one number for all heads (heads=None), or one per head."""
    return nn.Parameter(_per_head_values(value, heads))


def set_per_head(module: nn.Module, name: str, value: float, heads: int | None, *, learned: bool) -> None:
    """Set such a number as an attribute of a module: a parameter if it is learned, a buffer if it is fixed."""
    if learned:
        module.register_parameter(name, per_head_parameter(value, heads))
    else:
        module.register_buffer(name, _per_head_values(value, heads))


def _per_head_values(value: float, heads: int | None) -> Tensor:
    if heads is not None and heads < 1:
        raise ValueError(f"heads must be at least 1, got {heads}. Use None for one value shared by all heads.")
    if math.isnan(value):
        raise ValueError(f"expected a number as the start value of a parameter, got {value}.")
    return torch.tensor(float(value)) if heads is None else torch.full((heads,), float(value))


def per_head(parameter: Tensor, logits: Tensor) -> Tensor:
    """Reshape the parameter so that it broadcasts to logits (..., heads, Q, K)."""
    if parameter.dim() == 0:
        return parameter
    heads = logits.shape[-3] if logits.dim() > 2 else 0
    if heads != parameter.shape[0]:
        own, given = count_words(parameter.shape[0], "head"), count_words(heads, "head")
        raise ValueError(
            f"expected logits (..., {parameter.shape[0]}, queries, keys) for a normalizer with parameters for {own}, "
            f"got {given}. Build it with heads={heads or None}."
        )
    return parameter[:, None, None]


_normalizers: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


def remember(normalizer: nn.Module) -> Tensor:
    """Return the handle of this normalizer, on the CPU."""
    if torch.compiler.is_dynamo_compiling():  # it exists only inside the graph: that of a layer with its own sinks
        return torch.full((), 0, dtype=torch.int64, device="cpu")
    _normalizers[id(normalizer)] = normalizer
    with outside_transforms():
        # Not torch.tensor: tests reject it in code that runs beside a GPU, where it would copy from pageable memory.
        return torch.full((), id(normalizer), dtype=torch.int64, device="cpu")


def outside_transforms() -> AbstractContextManager[Any]:
    """Suspend torch.func: a tensor made under torch.func.grad has no memory that can be copied, not even afterwards."""
    suspended: AbstractContextManager[Any] = temporarily_clear_interpreter_stack()
    return suspended


def normalizer_of(handle: Tensor) -> nn.Module:
    return _normalizers[int(handle)]
