"""attention_statistics(q, k, normalizer): numbers of every attention row, without values and without the matrix.

Under torch.compile and torch.func the statistics are four operators of torch.library: the graph stays whole, and
torch.func.vmap calls an operator once for each index of the mapped dimension. Softmax with its
rescalings and, on devices that run Triton kernels, the maps that have one are called with tensors alone: what the rules
multiply the logits by, the sink's logit, and the other numbers of each row are computed before. All other normalizers
are called by a handle. Operators that return the output as well are in metrics/fused_maps.py.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from attnorm.engines.blocked import blocked
from attnorm.engines.execution import in_new_thread, runs_kernels
from attnorm.engines.inputs import (
    Inputs,
    Refused,
    check_tensors,
    checked_flag,
    is_number,
    row_factors,
    under_transform,
    unknown_options_message,
    validate_inputs,
    without_autocast,
)
from attnorm.engines.one_pass import row_factor_and_shift, sink_logits
from attnorm.engines.sparse import row_numbers
from attnorm.metrics import fused_maps
from attnorm.metrics.call import AttentionCall, LogitBlock, call_of, mask_of, positions_of, states_of
from attnorm.metrics.normalized import MeasuredNormalizer
from attnorm.metrics.rows import OnWeights, RowStatistics, measure_map_by_kernel, measure_rows
from attnorm.normalizers.block import Positions, is_exporting
from attnorm.normalizers.contract import KernelForm, Mechanism, Normalizer, ThresholdForm, normalizer_of
from attnorm.normalizers.registry import resolve_for_call
from attnorm.theory.selection import at_least_float32

# A softcap of this size changes no logit by more than rounding. Larger ones overflow in float32 and are ignored.
NO_CAP = 1e30
_NAMES = {"entropy": "entropy_nats"}  # as the catalogue of metrics calls them


class AttentionStatistics(NamedTuple):
    """One number per row, each of shape (B, H, Lq); z are the logits of the n visible keys, w their weights.

    n: visible keys
    max_logit, min_logit: max z and min z, with scale and soft cap, before the normalizer's own factor
    logsumexp: log of what softmax divides by, its factor and its learned sink included; NaN for other maps
    entropy: -sum p log p in nats, of p = |w| / sum |w|
    effective_keys: 1 / sum p^2
    max_weight: max |w|
    sink_mass: p of the first visible key; with a learned sink its w and what the sink took, 1 - sum w
    row_sum: sum w
    jacobian_norm: largest singular value of dw/dz; for maps without a closed form (sa_softmax, stick_breaking,
        scale_invariant, and rules that stretch single logits or read the row, such as softcap and
        adaptive_temperature) by power iteration, at most 0.5 % too small, in 8 rows of each head; NaN in the others
    top_mass: (B, H, Lq, len(top_n)), the sum of the N largest p for each N of top_n

    NaN where a number is not defined: all but n in rows that see no key, or a logit that is not finite; entropy,
    effective_keys, max_weight, top_mass and, without a learned sink, sink_mass in rows whose weights are all 0; and
    everywhere a number that the map does not have. Softmax and its rescalings take p from the logits: under a learned
    sink so large that max_weight and row_sum round to 0, the other numbers stay defined.
    """

    n: Tensor
    max_logit: Tensor
    min_logit: Tensor
    logsumexp: Tensor
    entropy: Tensor
    effective_keys: Tensor
    max_weight: Tensor
    sink_mass: Tensor
    row_sum: Tensor
    jacobian_norm: Tensor
    top_mass: Tensor

    def reshaped(self, shape: Sequence[int]) -> "AttentionStatistics":
        """Return the statistics with the rows reshaped to the dimensions of the queries."""
        return AttentionStatistics(*(t.reshape(*shape, *t.shape[3:]) for t in self))

    def __repr__(self) -> str:
        """Shape, device and a few means over the rows where they are defined, instead of all tensors."""
        parts = [f"shape={tuple(self.n.shape)}", f"device={str(self.n.device)!r}"]
        if type(self.n) is Tensor and not self.n.is_meta:  # tensors of a traced graph have no numbers
            names = ("n", "entropy", "effective_keys", "max_weight")
            parts += [f"mean {name}={float(getattr(self, name).float().nanmean()):.4g}" for name in names]
        if self.top_mass.shape[-1]:
            parts.append(f"top_mass={tuple(self.top_mass.shape)}")
        return f"AttentionStatistics({', '.join(parts)})"


_ROW_NUMBERS = [name for name in AttentionStatistics._fields if name not in ("n", "top_mass")]


def attention_statistics(
    q: Tensor,
    k: Tensor,
    normalizer: str | Normalizer = "softmax",
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    positions: Tensor | Positions | None = None,
    hidden_states: Tensor | None = None,
    softcap: float | None = None,
    top_n: Sequence[int] = (),
    **unknown: Refused,
) -> AttentionStatistics:
    """Statistics of every row of attention with queries (B, H, Lq, D) and keys (B, Hkv, Lk, D), in float32 at least.

    attnorm.attention returns the same numbers with its output if you pass return_statistics=True. Memory grows with the
    number of rows, never with rows times keys. The statistics have no gradient.

    On a CUDA device softmax, entmax, sparsemax, kneemax, sigmoid, relu and softpick, with any scale rules in front of
    them, run on Triton kernels; in bfloat16 the Jacobian norm is exact to 4e-3. Other normalizers run in blocks of
    logits. Under torch.compile the statistics are one operator of the graph.

    Args:
        mask, causal, scale, positions, hidden_states: As in attnorm.attention.
        softcap: Replace logits by softcap * tanh(logits / softcap).
        top_n: Sizes N of the sets of heaviest keys whose mass is returned.

    >>> statistics = attention_statistics(q, k, causal=True)
    >>> statistics.entropy.nanmean((0, 2))  # of each head
    """
    if unknown:
        raise TypeError(unknown_options_message("attention_statistics", unknown))
    causal = checked_flag("causal", causal)
    resolved = resolve_for_call(normalizer, q)
    if isinstance(resolved, Mechanism):
        raise TypeError(
            f"expected a row normalizer, got the mechanism {resolved.name!r}, which has no rows of logits. Pass one "
            "such as 'softmax': the command `attnorm normalizers` lists them."
        )
    if softcap is not None and (isinstance(softcap, bool) or not (is_number(softcap) and 0 < softcap < math.inf)):
        raise ValueError(f"expected a finite softcap above 0, got {softcap!r}. Leave it out for no cap.")
    top_n = _checked_sizes(top_n)
    check_tensors(q, k)
    inputs = validate_inputs(
        q, k, k, mask=mask, causal=causal, scale=scale, positions=positions, hidden_states=hidden_states
    )
    if softcap is not None and softcap < NO_CAP:
        inputs = replace(inputs, softcap=float(softcap))
    return statistics_of(inputs, resolved, top_n).reshaped(q.shape[:-1])


def _checked_sizes(top_n: Sequence[int]) -> list[int]:
    try:
        sizes = [0 if isinstance(N, bool) else index(N) for N in top_n]
    except TypeError:
        sizes = [0]
    if not isinstance(top_n, Sequence) or isinstance(top_n, bytes) or min(sizes, default=1) < 1:
        raise ValueError(
            f"expected top_n as a sequence of whole numbers from 1 up, got {top_n!r}. Pass for example top_n=(1, 10)."
        )
    return sizes


def statistics_of(
    inputs: Inputs, normalizer: Normalizer, top_n: Sequence[int] = (), on_weights: OnWeights | None = None
) -> AttentionStatistics:
    """Compute attention_statistics for validated inputs, (B, H, Q). on_weights: as in measure_rows."""
    row_names = [_NAMES.get(name, name) for name in _ROW_NUMBERS]
    if torch.compiler.is_compiling() or under_transform():
        return AttentionStatistics._make(compiled_statistics(inputs, normalizer, row_names, top_n))
    (rows,) = measure_rows(
        call_of(inputs), [normalizer], torch.arange(inputs.queries), top_n, names=row_names, mass_rows=None,
        on_weights=on_weights,
    ).values()  # fmt: skip
    numbers = {name: rows.values[_NAMES.get(name, name)] for name in _ROW_NUMBERS}
    return AttentionStatistics(n=rows.n, **numbers, top_mass=rows.top_mass)


def output_and_statistics_by_kernel(
    inputs: Inputs, normalizer: Normalizer, *, by_sdpa: bool = False
) -> tuple[Tensor, AttentionStatistics]:
    """Output (B, H, Q, E), with its gradient, and statistics from kernels that share work.

    For inputs to which `fused_rows.output_applies`, and a rescaled softmax or a map with a `fused_maps.kernel_form`.
    by_sdpa: gradients by SDPA.
    """
    names = " ".join(_NAMES.get(name, name) for name in _ROW_NUMBERS)
    form = fused_maps.kernel_form(normalizer) or KernelForm("softmax")
    tensors = inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE, mask_of(inputs)
    with without_autocast(inputs.q_BHQD.device):
        if isinstance(form, ThresholdForm):
            factor, parameter, trains = row_numbers(inputs, normalizer, form)
            output, n, numbers, *_ = fused_maps.threshold_output_and_statistics(
                *tensors, factor, parameter, inputs.causal, inputs.scale, form.map, trains, names
            )
        else:
            output, n, numbers, _ = fused_maps.output_and_statistics(
                *tensors, *row_factor_and_shift(inputs, normalizer, form), sink_logits(inputs, normalizer.sink),
                inputs.scale, inputs.causal, inputs.softcap, form.map, form.power, form.floor, by_sdpa, names,
            )  # fmt: skip
    return output, AttentionStatistics._make([n, *numbers.unbind(), numbers.new_empty((*n.shape, 0))])


def output_and_statistics(
    inputs: Inputs, normalizer: Normalizer, *, trains: bool
) -> tuple[Tensor, AttentionStatistics]:
    """Output (B, H, Q, E) and statistics of a map that is not softmax, from the same weights.

    trains: with a gradient, for a call of several blocks.
    """
    groups = inputs.groups
    value = at_least_float32(inputs.v_BGKE)
    output = value.new_zeros((*inputs.q_BHQD.shape[:3], value.shape[-1]))

    def add(block: LogitBlock, weights: Tensor) -> None:
        stop = min(block.first_key + weights.shape[-1], inputs.keys)
        heads = torch.arange(block.heads.start, block.heads.stop, device=value.device) // groups
        visible_values = value[block.item, heads, block.first_key : stop]
        output[block.item, block.heads, block.queries] = weights[..., : stop - block.first_key] @ visible_values

    statistics = statistics_of(inputs, normalizer, on_weights=add)
    return blocked(inputs, normalizer, measure=lambda: output) if trains else output, statistics


def compiled_statistics(
    inputs: Inputs, normalizer: Normalizer, names: Sequence[str], top_n: Sequence[int]
) -> list[Tensor]:
    """Return n, the numbers of these names, and the masses of top_n, from one operator."""
    if MeasuredNormalizer(normalizer.name, normalizer).scaled_softmax:
        return compiled_softmax_statistics(inputs, normalizer, names, top_n)
    form = fused_maps.kernel_form(normalizer)
    if form is not None and inputs.bias is None and runs_kernels(inputs.q_BHQD):
        return compiled_map_statistics(inputs, normalizer, form, names, top_n)
    return compiled_row_statistics(inputs, normalizer, names, top_n)


@dataclass(frozen=True)
class RescaledSoftmax(MeasuredNormalizer):
    """Softmax of logits times a factor of each row, with a learned sink: given as numbers."""

    factor_BHQ1: Tensor | None = None
    sink_H: Tensor | None = None

    @property
    def scaled_softmax(self) -> bool:
        return True

    @property
    def rescales(self) -> bool:
        return self.factor_BHQ1 is not None

    def learned_sink(self, call: AttentionCall, heads: slice) -> Tensor | None:
        return None if self.sink_H is None else self.sink_H[heads]

    def factor(self, call: AttentionCall, block: LogitBlock) -> Tensor | None:
        if self.factor_BHQ1 is None:
            return None
        return self.factor_BHQ1[block.item, block.heads][:, block.queries]


@torch.library.custom_op("attnorm::softmax_statistics", mutates_args=())
def softmax_statistics_operator(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    factor: Tensor | None,
    sink: Tensor | None,
    scale: float,
    causal: bool,
    softcap: float | None,
    names: str,
    top_n: Sequence[int],
) -> list[Tensor]:
    """n (B, H, Q), the numbers of these names (separated by spaces), (names, B, H, Q), the masses (B, H, Q, top_n)."""
    call = AttentionCall(0, "decoder" if causal else "encoder", q, k, k, scale, causal, mask, softcap)
    softmax = RescaledSoftmax("softmax", None, factor, sink)
    (statistics,) = measure_rows(
        call, [softmax], torch.arange(q.shape[-2]), tuple(top_n), names=names.split(), mass_rows=None
    ).values()
    return _as_tensors(statistics, names)


def _as_tensors(statistics: RowStatistics, names: str) -> list[Tensor]:
    # An operator must not return two views of one tensor.
    return [statistics.n, torch.stack([statistics.values[name] for name in names.split()]), statistics.top_mass]


def _empty(q: Tensor, *others: Any) -> list[Tensor]:
    """Return tensors of the shapes that an operator with these arguments returns."""
    *_, names, top_n = others
    shape = q.shape[:-1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return [
        q.new_empty(shape, dtype=torch.int64),
        q.new_empty((len(names.split()), *shape), dtype=dtype),
        q.new_empty((*shape, len(top_n)), dtype=dtype),
    ]


def compiled_softmax_statistics(
    inputs: Inputs, normalizer: Normalizer, names: Sequence[str], top_n: Sequence[int]
) -> list[Tensor]:
    """n, the numbers of these names and the masses, for inputs whose normalizer is a rescaled softmax."""
    n, numbers, masses = torch.ops.attnorm.softmax_statistics(
        inputs.q_BHQD.detach(), inputs.k_BGKD.detach(), mask_of(inputs), *_factor_and_sink(inputs, normalizer),
        inputs.scale, inputs.causal, inputs.softcap, " ".join(names), list(top_n),
    )  # fmt: skip
    return [n, *numbers.unbind(), masses]


def _factor_and_sink(inputs: Inputs, normalizer: Normalizer) -> tuple[Tensor | None, Tensor | None]:
    factor = row_factors(inputs, normalizer)
    sink = None
    if normalizer.sink is not None:
        sink = normalizer.sink.logit.detach().expand(inputs.q_BHQD.shape[1])
    return None if factor is None else factor.detach(), sink


@torch.library.custom_op("attnorm::map_statistics", mutates_args=())
def map_statistics_operator(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    factor: Tensor | None,
    shift: Tensor | None,
    parameter: Tensor | None,
    scale: float,
    causal: bool,
    softcap: float | None,
    map: str,
    power: int,
    floor: float,
    names: str,
    top_n: Sequence[int],
) -> list[Tensor]:
    """The same as softmax_statistics for a map of metrics/fused_maps.py. factor, shift, parameter: (B, H, Q)."""
    call = AttentionCall(0, "decoder" if causal else "encoder", q, k, k, scale, causal, mask, softcap)
    row_map = fused_maps.RowMap(map, power, floor, factor, shift, parameter)
    rows = torch.arange(q.shape[-2])
    return _as_tensors(measure_map_by_kernel(call, row_map, rows, tuple(top_n), names.split(), mass_rows=None), names)


def compiled_map_statistics(
    inputs: Inputs,
    normalizer: Normalizer,
    form: KernelForm | ThresholdForm,
    names: Sequence[str],
    top_n: Sequence[int],
) -> list[Tensor]:
    """n, the numbers of these names and the masses, for a normalizer with this form."""
    n = inputs.n().float().expand(*inputs.q_BHQD.shape[:3], 1)
    row_map = fused_maps.row_map(form, n, row_factors(inputs, normalizer))
    n, numbers, masses = torch.ops.attnorm.map_statistics(
        inputs.q_BHQD.detach(), inputs.k_BGKD.detach(), mask_of(inputs), row_map.factor, row_map.shift,
        row_map.parameter, inputs.scale, inputs.causal, inputs.softcap, row_map.map, row_map.power, row_map.floor,
        " ".join(names), list(top_n),
    )  # fmt: skip
    return [n, *numbers.unbind(), masses]


@torch.library.custom_op("attnorm::row_statistics", mutates_args=())
def row_statistics_operator(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    hidden_states: Tensor | None,
    normalizer: Tensor,
    state: Sequence[Tensor],
    scale: float,
    causal: bool,
    softcap: float | None,
    names: str,
    top_n: Sequence[int],
) -> list[Tensor]:
    """The same for any normalizer, given by its handle.

    state: its parameters and buffers. The graph may have changed them, or may have been called with others.
    """
    positions = None
    if query_positions is not None and key_positions is not None:
        positions = Positions(query_positions, key_positions)
    call = AttentionCall(
        0, "decoder" if causal else "encoder", q, k, k, scale, causal, mask, softcap, positions=positions,
        inputs_BKC=hidden_states,
    )  # fmt: skip
    measured = _with_state(normalizer_of(normalizer), state)
    measure = partial(
        measure_rows, call, [measured], torch.arange(q.shape[-2]), tuple(top_n),
        names=names.split(), mass_rows=None,
    )  # fmt: skip
    # An operator runs below autograd, which the Jacobian norm of some maps needs. In another thread autograd is active.
    (statistics,) = in_new_thread(measure, q.device).values()
    return _as_tensors(statistics, names)


def _state(normalizer: nn.Module) -> list[Tensor]:
    return [*normalizer.parameters(), *normalizer.buffers()]


def _is_same_memory(own: Tensor, given: Tensor) -> bool:
    # A parameter that torch.func.vmap maps has no memory of its own; the operator receives an item of it.
    return not is_functorch_wrapped_tensor(own) and own.data_ptr() == given.data_ptr()


def _with_state(normalizer: nn.Module, state: Sequence[Tensor]) -> Normalizer:
    """The normalizer, or a copy of it if these are not its own parameters and buffers."""
    assert isinstance(normalizer, Normalizer)
    own_state = _state(normalizer)
    if all(map(_is_same_memory, own_state, state)):
        return normalizer
    replacements: dict[int, Tensor] = {}
    for tensor, replacement in zip(own_state, state, strict=True):
        replacements[id(tensor)] = (
            nn.Parameter(replacement, requires_grad=False) if isinstance(tensor, nn.Parameter) else replacement
        )
    return copy.deepcopy(normalizer, replacements)


def compiled_row_statistics(
    inputs: Inputs, normalizer: Normalizer, names: Sequence[str], top_n: Sequence[int]
) -> list[Tensor]:
    """n, the numbers of these names and the masses, for any normalizer."""
    if is_exporting():
        raise ValueError(
            f"expected softmax or a rescaling of it in torch.export, got {normalizer.name!r}: an exported graph cannot "
            "hold the normalizer that its statistics need. Measure them outside the exported model."
        )
    positions = positions_of(inputs)
    states = states_of(inputs)
    n, numbers, masses = torch.ops.attnorm.row_statistics(
        inputs.q_BHQD.detach(), inputs.k_BGKD.detach(), mask_of(inputs),
        None if positions is None else positions.query, None if positions is None else positions.key,
        None if states is None else states.detach(), normalizer.handle,
        [tensor.detach() for tensor in _state(normalizer)], inputs.scale, inputs.causal, inputs.softcap,
        " ".join(names), list(top_n),
    )  # fmt: skip
    return [n, *numbers.unbind(), masses]


def _under_vmap(operator: Callable[..., list[Tensor]]) -> Callable[..., tuple[list[Tensor], list[int]]]:
    """Return the rule of torch.func.vmap for an operator: one call for each index of the mapped dimension."""

    def call_each(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[list[Tensor], list[int]]:
        calls = [
            operator(*(_at(index, argument, dim) for argument, dim in zip(arguments, in_dims, strict=True)))
            for index in range(info.batch_size)
        ]
        return [torch.stack(results) for results in zip(*calls, strict=True)], [0] * len(calls[0])

    return call_each


def _at(index: int, argument: Any, dim: Any) -> Any:
    if isinstance(argument, list | tuple) and isinstance(dim, list | tuple):
        return [_at(index, one, its_dim) for one, its_dim in zip(argument, dim, strict=True)]
    return argument if dim is None else argument.select(dim, index)


for operator in (softmax_statistics_operator, map_statistics_operator, row_statistics_operator):
    operator.register_fake(_empty)
    operator.register_vmap(_under_vmap(operator))
