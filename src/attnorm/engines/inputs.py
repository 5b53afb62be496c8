"""The record that every engine receives: q, k, v of one attention call with its mask, validated once.

Shape letters in the whole package: B batch, H query heads, G key/value heads (H is a multiple of G), Q queries, K keys,
D width of queries and keys, E width of values, C width of the layer input. q_BHQD has the shape (B, H, Q, D).
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Never, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnorm.normalizers.block import Positions, check_mask, check_positions_and_states, is_exporting
from attnorm.normalizers.contract import Normalizer, ScaleRule
from attnorm.text import count_words

if TYPE_CHECKING:
    Refused: TypeAlias = Never
else:
    Refused = Any  # the runtime shape checks of the tests do not support Never

HALF = (torch.float16, torch.bfloat16)
DTYPES = (*HALF, torch.float32, torch.float64)
FLOAT16_HEADROOM = 2.0**8  # factor that moves from q into the scale in float16, see `with_rounded_queries`

# The options of torch's scaled_dot_product_attention, and what replaces them here.
SDPA_OPTIONS = {
    "attn_mask": "mask=, boolean with True = may attend; an additive one is attn_mask > torch.finfo(dtype).min / 2",
    "is_causal": "causal=True, aligned bottom-right: the last query sees every key, where torch aligns top-left",
    "enable_gqa": "nothing: leave it out, fewer key heads than query heads are shared by groups anyway",
}

NOTHING = nullcontext()  # has no state, so that all calls share it

# Elements of the boolean mask built for one step of queries.
MASK_ELEMENTS = 2**24


@dataclass(frozen=True)
class Inputs:
    """One attention call. `n` is the number of visible keys of a row, as in the papers."""

    q_BHQD: Tensor
    k_BGKD: Tensor
    v_BGKE: Tensor
    mask: Tensor | None  # boolean, True = may attend, (B or 1, H or 1, Q or 1, K)
    causal: bool  # bottom-right: the last query sees every key
    scale: float
    positions: Tensor | Positions | None = None
    hidden_states: Tensor | None = None
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    bias: Tensor | None = None  # (B or 1, H or 1, Q, K), added to the logits after the softcap
    dropout: float = 0.0  # probability of dropping a weight

    @property
    def queries(self) -> int:
        return self.q_BHQD.shape[-2]

    @property
    def keys(self) -> int:
        return self.k_BGKD.shape[-2]

    @property
    def groups(self) -> int:
        """Query heads per key/value head."""
        return self.q_BHQD.shape[1] // self.k_BGKD.shape[1]

    @property
    def offset(self) -> int:
        """Number of keys before the first query: in a causal call, query i sees the keys 0 to offset + i."""
        return self.keys - self.queries

    @property
    def weights_shape(self) -> torch.Size:
        return torch.Size((*self.q_BHQD.shape[:3], self.keys))

    @property
    def plain_logits(self) -> bool:
        """Whether the logits are scaled dot products without softcap and bias, so that row factors can multiply q."""
        return self.softcap is None and self.bias is None

    @property
    def needs_grad(self) -> bool:
        if not torch.is_grad_enabled():
            return False
        tensors = (self.q_BHQD, self.k_BGKD, self.v_BGKE, self.hidden_states, self.bias)
        return any(t is not None and t.requires_grad for t in tensors)

    @property
    def full_mask(self) -> Tensor | None:
        """The mask (B, H, Q, K) as the kernels take it, expanded and not copied; it does not include causality."""
        return None if self.mask is None else self.mask.expand(self.weights_shape)

    def visible(self, start: int, stop: int, keys: int) -> Tensor | None:
        """Return the mask of the queries start..stop over the first `keys` keys, in four dimensions.

        It combines the given mask and causality. None if these queries see all of these keys.
        """
        mask = self.mask
        if mask is not None and keys < self.keys:
            mask = mask[..., :keys]
        if mask is not None and mask.shape[-2] != 1 and stop - start < self.queries:
            mask = mask[..., start:stop, :]
        if not self.causal or keys <= self.offset + start + 1:
            return mask
        device = self.q_BHQD.device
        last_seen = torch.arange(self.offset + start, self.offset + stop, device=device)
        ordered = (torch.arange(keys, device=device) <= last_seen[:, None])[None, None]
        return ordered if mask is None else mask & ordered

    def reach(self, stop: int) -> int:
        """Return how many leading keys the queries before `stop` can see; at least 1."""
        return max(self.offset + stop, 1) if self.causal else self.keys

    def n(self) -> Tensor:
        """Return the number of visible keys of each row, (..., Q, 1) or (1, 1).

        Does not build the mask of all rows at once.
        """
        dtype = torch.float64 if self.q_BHQD.dtype == torch.float64 else torch.float32
        device = self.q_BHQD.device
        if self.mask is None and (not self.causal or self.queries == 1):
            return torch.full((1, 1), float(self.keys), dtype=dtype, device=device)
        if self.mask is None:
            n = torch.arange(self.offset + 1, self.keys + 1, dtype=dtype, device=device)[:, None]
            return n if self.offset >= 0 else n.clamp(min=0)
        if self.mask.shape[-2] != 1 or not self.causal:
            counts = [v.sum(-1, keepdim=True, dtype=dtype) for v in self._masks()]
            return counts[0] if len(counts) == 1 else torch.cat(counts, dim=-2)
        last_seen = torch.arange(self.offset, self.keys, device=device)
        up_to = self.mask.cumsum(-1, dtype=dtype)[..., last_seen.clamp(min=0)]
        return torch.where(last_seen < 0, 0.0, up_to).transpose(-1, -2)

    def seen(self) -> Tensor:
        """Return which keys at least one query sees, (B or 1, H or 1, K). Needs a mask."""
        first, *others = (visible.any(-2) for visible in self._masks())
        for visible_to_any in others:
            first = first | visible_to_any
        return first

    def _masks(self) -> Iterator[Tensor]:
        """Yield the combined mask for spans of queries; one mask if it is the same for all queries."""
        assert self.mask is not None
        if self.mask.shape[-2] == 1:  # the last query sees the same keys with and without causality
            yield self.mask
            return
        for start, stop in self.steps(self.mask_rows()):
            visible = self.visible(start, stop, self.keys)
            assert visible is not None
            yield visible

    def mask_rows(self) -> int:
        """Return how many queries to process at a time so that their mask has about MASK_ELEMENTS elements."""
        masks = 1 if self.mask is None else math.prod(self.mask.shape[:2])
        return max(1, MASK_ELEMENTS // max(1, masks * self.keys))

    def steps(self, rows: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) for spans of `rows` queries.

        One empty span if there are no queries. All queries in one span in an exported graph.
        """
        if is_exporting():
            yield 0, self.queries
            return
        for start in range(0, max(self.queries, 1), rows):
            yield start, min(start + rows, self.queries)

    def query_positions(self) -> Tensor | None:
        """Return the given positions of the queries, (..., Q, 1); None if the caller gave none."""
        if self.positions is None:
            return None
        return Positions.of(self.positions, self.weights_shape, self.q_BHQD.device).query[..., None]


def needs_gradient(inputs: Inputs, normalizer: Normalizer) -> bool:
    """Whether the output needs a gradient."""
    return torch.is_grad_enabled() and (inputs.needs_grad or any(p.requires_grad for p in normalizer.parameters()))


def row_factors(inputs: Inputs, normalizer: Normalizer) -> Tensor | None:
    """Return the product of all scale rules' factors, (B, H, Q, 1) in at least float32; None without such rules.

    Factors that all sequences or heads share are expanded, not copied.
    """
    rows, factors = inputs.q_BHQD.shape[:3], None
    dtype = torch.float64 if inputs.q_BHQD.dtype == torch.float64 else torch.float32
    for rule in normalizer.rules:
        if isinstance(rule, ScaleRule):
            factor = rule.factor_of_rows(rows, dtype, inputs.n(), inputs.query_positions(), inputs.hidden_states)
            factors = factor if factors is None else factors * factor
    return None if factors is None else factors.expand(*rows, 1)


def head_numbers(numbers: Tensor, inputs: Inputs, owner: str = "the normalizer has parameters") -> Tensor:
    """Expand a number, or one per head, to (H,) in float32 on the device of q.

    Raises:
        ValueError: There are numbers for another number of heads.
    """
    heads = inputs.q_BHQD.shape[1]
    if numbers.dim() == 1 and numbers.shape[0] != heads:
        own, given = count_words(numbers.shape[0], "head"), count_words(heads, "head")
        raise ValueError(f"{owner} for {own}, but q has {given}. Build it with heads={heads}.")
    return numbers.to(inputs.q_BHQD.device, torch.float32).expand(heads).contiguous()


def with_rounded_queries(q: Tensor, inputs: Inputs) -> Inputs:
    """Return the call with the queries q, rounded once to the dtype of the keys.

    q is in at least float32 and already multiplied by the factors of the scale rules. In float16 a factor may exceed
    the largest number, 65504: there a power of two moves from q into the scale. Coordinates that underflow because of
    it are at most 2^-17 of a query, far below the rounding error of its other coordinates.
    """
    dtype = inputs.k_BGKD.dtype
    if dtype != torch.float16:
        return replace(inputs, q_BHQD=in_dtype(q, dtype))
    return replace(inputs, q_BHQD=(q / FLOAT16_HEADROOM).to(dtype), scale=inputs.scale * FLOAT16_HEADROOM)


def in_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The same as t.to(dtype), which takes longer than this where nothing changes."""
    return t if t.dtype == dtype else t.to(dtype)


def in_forward_mode() -> bool:
    """Whether forward-mode derivatives are computed (torch.func.jvp or forward_ad), which fused kernels lack."""
    return forward_ad._current_level >= 0


def under_transform() -> bool:
    """Whether torch.func or forward mode is active, for which our operators have no rules."""
    return torch._C._are_functorch_transforms_active() or in_forward_mode()


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Turn autocast off: every engine chooses its own precision from the dtype of its inputs.

    In a compiled graph this holds for the forward pass only, see `product`. Such a graph may run under autocast later.
    Elsewhere nothing is done where autocast is off: torch.autocast takes as long as a small operation.
    """
    compiled = torch.compiler.is_compiling() and device.type != "meta"
    if compiled or autocast_dtype(device) is not None:
        return torch.autocast(device.type, enabled=False)
    return NOTHING


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast; None where it is off, and on the meta device, for which torch raises an error."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, whose gradients have the precision of a and b in compiled graphs too.

    torch.compile traces a backward pass with the autocast of the whole call, so that gradients of float32 products
    become products in half precision, even of a region without autocast. An inverse, for one, does not survive it.
    """
    if not torch.compiler.is_compiling():
        return a @ b
    result: Tensor = _Product.apply(a, b)  # type: ignore[no-untyped-call]
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        with without_autocast(a.device):
            of_a, of_b = grads[0] @ b.transpose(-1, -2), a.transpose(-1, -2) @ grads[0]
        return of_a.sum_to_size(a.shape), of_b.sum_to_size(b.shape)


def validate_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    positions: Tensor | Positions | None,
    hidden_states: Tensor | None = None,
) -> Inputs:
    """Check shapes, dtypes and mask, and return the call in four dimensions.

    Keys and values that no query sees, and queries that see no key, become zeros.
    """
    check_tensors(q, k, v)
    check_positions_and_states(positions, hidden_states)
    if scale is not None:
        _check_scale(scale)
    if q.dim() != 4:
        q, k, v = (to_four_dimensions(t) for t in (q, k, v))
    if hidden_states is not None:
        _check_states_of_queries(hidden_states, q)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    inputs = Inputs(q, k, v, None, causal, scale, positions, hidden_states)
    if mask is None:
        unseen = causal and inputs.offset < 0  # the first queries see no key
        return replace(inputs, q_BHQD=torch.where(inputs.n() > 0, q, 0.0)) if unseen else inputs
    check_mask(mask, inputs.weights_shape)
    if mask.device != q.device:
        raise ValueError(
            f"expected the mask on {q.device}, the device of q, got {mask.device}. Pass mask.to(q.device)."
        )
    mask = to_four_dimensions(mask)
    if mask.shape[-1] != inputs.keys:
        mask = mask.expand(*mask.shape[:-1], inputs.keys)
    return _zero_unseen(replace(inputs, mask=mask))


def _check_scale(scale: Any) -> None:
    if isinstance(scale, Tensor) and scale.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "expected a number for scale, got a tensor that requires a gradient, which it would not get. Multiply q by "
            "it and pass scale=1.0, or learn it with attnorm.get('softmax', learned=True)."
        )
    if not (is_number(scale) and math.isfinite(scale)):
        raise ValueError(f"expected a finite number for scale, got {scale!r}. Leave it out for 1/sqrt(width).")


def _check_states_of_queries(states: Tensor, q_BHQD: Tensor) -> None:
    batch, queries = q_BHQD.shape[0], q_BHQD.shape[-2]
    batch_fits = states.dim() == 2 or (states.dim() == 3 and states.shape[0] in (1, batch))
    if not batch_fits or states.shape[-2] != queries:
        raise ValueError(
            f"expected hidden_states of the queries, ({batch}, {queries}, width), got shape {tuple(states.shape)}. "
            f"Pass the layer input that q is projected from. With a cache it is hidden_states[:, -{queries}:]."
        )


def is_number(value: Any) -> bool:
    """Whether it is a number, or a tensor of one element."""
    shape = getattr(value, "shape", ())
    return hasattr(value, "__float__") and (shape == () or (isinstance(value, Tensor) and value.numel() == 1))


def checked_flag(name: str, value: Any) -> Any:
    """Return a flag; raise TypeError if it is neither True nor False, such as "no", which would count as True."""
    if isinstance(value, np.bool_):
        return bool(value)
    if not isinstance(value, bool | torch.SymBool):
        raise TypeError(f"expected {name}=True or {name}=False, got {value!r}.")
    return value


def to_four_dimensions(t: Tensor) -> Tensor:
    """Return the tensor with dimensions of size 1 in front."""
    return t if t.dim() == 4 else t.reshape(*([1] * (4 - t.dim())), *t.shape)


def _zero_unseen(inputs: Inputs) -> Inputs:
    """Set keys, values and queries that take no part to 0: padding may hold NaN, and 0 times NaN is NaN."""
    q, k, v = inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE
    seen_keys = inputs.seen()
    if seen_keys.shape[1] > 1:  # a mask per query head: a key is seen if any head of its group sees it
        seen_keys = seen_keys.unflatten(1, (-1, inputs.groups)).any(2)
    k, v = (torch.where(seen_keys[..., None], t, 0.0) for t in (k, v))
    return replace(inputs, q_BHQD=torch.where(inputs.n() > 0, q, 0.0), k_BGKD=k, v_BGKE=v)


def unknown_options_message(function: str, unknown: Iterable[str]) -> str:
    instead = "; ".join(f"for {name}= write {SDPA_OPTIONS[name]}" for name in unknown if name in SDPA_OPTIONS)
    names = ", ".join(f"{name}=" for name in unknown)
    return f"{function}() does not take {names}; {instead or f'help(attnorm.{function}) lists what it takes'}"


def check_tensors(q: Any, k: Any, *given: Any) -> None:
    """Check q, k and, if it is given, v. A call without values checks q and k first: then errors do not name v.

    Text is built for an error only: under torch.compile a shape in a text becomes a constant of the graph.
    """
    v = given[0] if given else k
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        tensors = _named(q, k, *given)
        raise TypeError(
            f"{_each(tensors)}: expected torch tensors, got {_each(type(t).__name__ for t in tensors.values())}"
        )
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        tensors = _named(q, k, *given)
        raise TypeError(
            f"{_each(tensors)}: expected one floating dtype of at least 16 bits for all, got "
            f"{_each(t.dtype for t in tensors.values())}. Convert them, e.g. q.float()."
        )
    if not q.device == k.device == v.device:
        tensors = _named(q, k, *given)
        raise ValueError(
            f"{_each(tensors)}: expected one device for all, got {_each(t.device for t in tensors.values())}. "
            "Move them, e.g. k.to(q.device)."
        )
    problem = _problem_of_shapes(q.shape, k.shape, v.shape)
    if problem is not None:
        tensors = _named(q, k, *given)
        names = _each(tensors)
        shapes = _each(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
        raise ValueError(f"{problem.format(names=names)}; got {shapes}")


def _problem_of_shapes(q: torch.Size, k: torch.Size, v: torch.Size) -> str | None:
    dims = len(q)
    if not dims == len(k) == len(v) or dims not in (2, 3, 4):
        return "{names} must all be (batch, heads, length, width), or lack leading dimensions"
    if q[-1] != k[-1]:
        return f"q and k must have the same width, got {q[-1]} and {k[-1]}"
    if k != v and k[:-1] != v[:-1]:
        return "k and v must agree in all but the width"
    if k[-2] == 0 or k[-1] == 0:
        return "there must be at least one key, of width 1 or more"
    if dims == 4 and q[0] != k[0]:
        return "q and k must have the same batch size"
    if dims > 2 and (q[-3] == 0 or k[-3] == 0):
        return "{names} must have at least one head: skip the call of a layer without heads"
    if dims > 2 and q[-3] % k[-3]:
        return "the query heads must be a multiple of the key heads"
    return None


def _named(*tensors: Any) -> dict[str, Any]:
    return dict(zip("qkv", tensors, strict=False))


def _each(parts: Iterable[object]) -> str:
    return ", ".join(map(str, parts))
