"""Forgetting attention: softmax(z_ij + sum over l = j+1..i of log f_l), f_l = sigmoid(w . x_l + b) per head.

Lin, Nikishin, He & Courville 2025, https://arxiv.org/abs/2503.02130 (Forgetting Transformer). Each token multiplies the
weights of all keys before it by its forget gate f. The sum is F_i - F_j with F the running sum of log f; F_i is the
same for a whole row and changes nothing, so -F_j enters as one more coordinate of the keys: every fused kernel can do
it. Without hidden states f is a learned number per head, and the logit falls by -log f per token of distance.

Decoding with a cache needs the gates of all earlier tokens. They are stored as additional columns of the values
(`CacheWithGates`). So everything that a cache does with values (reorder for beams, crop, repeat, slide) it also does
with the gates. Columns have the dtype of the values: in half precision a gate is split into its rounded value and the
remainder.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, logsigmoid, pad

from attnorm.engines.inputs import Inputs, validate_inputs, without_autocast
from attnorm.mechanisms import attend
from attnorm.normalizers.block import Positions
from attnorm.normalizers.composition import resolve_part
from attnorm.normalizers.contract import Mechanism, Normalizer, per_head_parameter
from attnorm.normalizers.declaration import WarmStart, declare


@declare(
    warm_start=WarmStart(
        "b = 10: log f = -0.000045, so that a key 1,000 tokens back keeps 96 % of its weight; with width=, b = 14 and "
        "w = 0: 99.9 %, as w can move many coordinates at once",
        options=lambda layer, given_options: {
            "heads": layer.heads,
            "bias": 14.0 if given_options.get("width") else 10.0,
        },
        values=lambda layer, given_options, options: {"weight": 0.0} if options.get("width") else {},
        safe=True,
    )
)
class Forget(Mechanism):
    """softmax of logits lowered by a learned forget gate of every token between key and query; causal.

    heads: of q, for gates per head. width: of the hidden states x that the gates read (default: gates that do not
    depend on x). bias: b at the start; 5 is a gate of 0.993. normalizer: any shift invariant one, an
    object or a name, which may have options as in kneemax+knee=0.1.

    Recency instead of position encodings: attnorm lab train lm ... --normalizer forget:width=192. In a trained
    Hugging Face model: attnorm.patch(model, "forget", width=model.config.hidden_size), which starts at w = 0, b = 14,
    where a key 1,000 tokens back keeps 99.9 % of its weight. Caches of the model keep the gates. Keys ahead of a
    query must be hidden. A mask that hides keys between visible ones removes their gates from a decoding step, but
    not from the full sequence.
    """

    name = "forget"
    causal_only = True

    def __init__(
        self,
        *,
        heads: int | None = None,
        width: int | None = None,
        bias: float = 5.0,
        normalizer: str | Normalizer = "softmax",
    ) -> None:
        super().__init__()
        if width is not None and heads is None:
            raise ValueError(
                f"expected heads with width={width}, since each query head has its own gate, got None. Pass heads=, "
                "the number of query heads; attnorm.patch and the commands take it from the model."
            )
        if not isinstance(normalizer, str | Normalizer):
            raise TypeError(f"expected normalizer as a name or a Normalizer, got {normalizer!r}.")
        resolved = resolve_part(normalizer)
        if not isinstance(resolved, Normalizer) or not resolved.properties.shift_invariant:
            raise ValueError(
                f"expected a shift invariant normalizer, got {resolved.name!r}. Use 'softmax' or 'entmax15'."
            )
        self.normalizer = resolved
        self.properties = replace(
            resolved.properties,
            permutation_equivariant=False,
            length=", ".join(filter(None, ["forget gates between key and query", resolved.properties.length])),
        )
        self.bias = per_head_parameter(bias, heads)
        self.weight: nn.Parameter | None = None
        if width is not None and heads is not None:
            self.weight = nn.Parameter(torch.empty(heads, width))
            nn.init.kaiming_uniform_(self.weight, a=5**0.5)  # as nn.Linear

    @property
    def width(self) -> int | None:
        """Width of the hidden states that the gates read; None: they read none."""
        return None if self.weight is None else self.weight.shape[1]

    @property
    def reads_hidden_states(self) -> bool:  # type: ignore[override]
        return self.weight is not None

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
        hidden_states: Tensor | None = None,
    ) -> Tensor:
        """hidden_states: of all keys, (B, K, width). Keys ahead of a query must be hidden from it."""
        gates = self.log_gates(hidden_states, torch.promote_types(q.dtype, torch.float32))
        if gates.shape[-1] not in (1, k.shape[-2]):
            raise ValueError(
                f"expected hidden_states of all {k.shape[-2]} keys, got {gates.shape[-1]}. To decode with a cache, "
                "keep the log gates of earlier tokens and call .attend(..., log_gates=torch.cat([earlier, new], -1))."
            )
        return self.attend(q, k, v, log_gates=gates, mask=mask, causal=causal, scale=scale, positions=positions)

    def log_gates(self, hidden_states: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return log f of each token, (B, H, K) or (1, H or 1, 1), in at least the given dtype."""
        if self.weight is None:
            bias = self.bias if self.bias.dim() else self.bias[None]
            return logsigmoid(bias.to(torch.promote_types(bias.dtype, dtype)))[None, :, None]
        if hidden_states is None:
            raise ValueError("expected hidden_states of shape (batch, keys, width), from which the gates are read.")
        working = torch.promote_types(hidden_states.dtype, dtype)
        with without_autocast(hidden_states.device):
            logits = linear(hidden_states.to(working), self.weight.to(working), self.bias.to(working))
        return logsigmoid(logits).mT

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        log_gates: Tensor,
        mask: Tensor | None = None,
        causal: bool = True,
        scale: float | None = None,
        positions: Tensor | Positions | None = None,
    ) -> Tensor:
        """The output for log gates (B, H, K) of all keys, as a cache of earlier tokens has them."""
        working = torch.promote_types(q.dtype, torch.float32)
        inputs = validate_inputs(
            *(t.to(working) for t in (q, k, v)), mask=mask, causal=causal, scale=scale, positions=positions
        )
        gates = _gates_of_visible_keys(inputs, log_gates.to(working))
        # From the last key back: what is near is small, and keeps its digits.
        after = gates.flip(-1).cumsum(-1).flip(-1) - gates  # sum over later keys
        query = pad(inputs.q_BHQD * inputs.scale, (0, 1), value=1.0)
        keys, values = (t.repeat_interleave(inputs.groups, dim=1) for t in (inputs.k_BGKD, inputs.v_BGKE))
        keys = torch.cat([keys, after[..., None]], -1)
        output = attend(replace(inputs, q_BHQD=query, k_BGKD=keys, v_BGKE=values, scale=1.0), self.normalizer)
        return output.to(q.dtype).reshape(*q.shape[:-1], v.shape[-1])


def _gates_of_visible_keys(inputs: Inputs, log_gates: Tensor) -> Tensor:
    """Return the gates (B, H, K), 0 for keys that no query sees: padding has no gate."""
    gates = log_gates.expand(*inputs.q_BHQD.shape[:2], inputs.keys)
    return gates if inputs.mask is None else torch.where(inputs.seen(), gates, 0.0)


class KeyGates:
    """Log gates of all keys, (B, H, K). Before the cache adds the earlier ones: gates of the new tokens only."""

    def __init__(self, log_gates: Tensor) -> None:
        self.log_gates = log_gates

    def columns(self, value_BGKE: Tensor) -> Tensor:
        """Return the gates as columns of values, (B, G, K, columns); a key head has those of its query heads."""
        by_head = self.log_gates.unflatten(1, (value_BGKE.shape[1], -1)).mT
        rounded: Tensor = by_head.to(value_BGKE.dtype)
        if rounded.dtype.itemsize >= by_head.dtype.itemsize:
            return rounded
        return torch.cat([rounded, (by_head - rounded).to(rounded.dtype)], -1)

    def read(self, columns: Tensor) -> None:
        """Read the gates of all keys from the columns that a cache returns."""
        heads, working = self.log_gates.shape[1] // columns.shape[1], self.log_gates.dtype
        parts = columns.to(device=self.log_gates.device, dtype=working).split(heads, -1)
        self.log_gates = torch.stack(parts).sum(0).mT.flatten(1, 2)


class CacheWithGates:
    """Wraps the cache of a model for one attention module: stores the gates as additional columns of the values."""

    def __init__(self, cache: Any, gates: KeyGates) -> None:
        self._cache, self._gates = cache, gates

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        width, columns = value.shape[-1], self._gates.columns(value)
        self._check(layer, width + columns.shape[-1])
        keys, values = self._cache.update(key, torch.cat([value, columns], -1), layer, *args, **options)
        self._gates.read(values[..., width:])
        return keys, values[..., :width]

    def _check(self, layer: int, expected: int) -> None:
        layers = getattr(self._cache, "layers", [])
        stored = getattr(layers[layer], "values", None) if layer < len(layers) else None
        if isinstance(stored, Tensor) and stored.dim() == 4 and stored.shape[-1] != expected:
            raise ValueError(
                f"expected a cache with {expected} columns of values in layer {layer}, of which the last ones are "
                f"forget gates, got {stored.shape[-1]}. Start with an empty cache: the model was patched, paused or "
                "unpatched since this one was filled, or its sizes were fixed in advance."
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)
