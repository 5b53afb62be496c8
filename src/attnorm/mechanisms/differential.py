"""Differential attention: the difference of two maps cancels common noise; two versions with softmax, one with ReLU.

Version 1, Ye et al. 2024, https://arxiv.org/abs/2410.05258: softmax(z1) - lambda softmax(z2). Query and key heads come
in pairs (2h, 2h+1), values have one head per pair: q (B, 2H, Q, D), k (B, 2G, K, D), v (B, G, K, E) -> (B, H, Q, E).

    lambda = exp(<lq1, lk1>) - exp(<lq2, lk2>) + lambda_init,   lambda_init = 0.8 - 0.6 exp(-0.3 depth)

followed by RMS norm per head and the factor 1 - lambda_init. Depth counts layers from 0.

Version 2, Ye, Dong, Sun & Wei 2026, github.com/microsoft/unilm, Diff-Transformer/Diff-Transformer-V2:
o = a1 - sigmoid(w . x) a2, two query heads for each output head. q (B, 2H, Q, D), k (B, G, K, D), v (B, G, K, E) ->
(B, H, Q, E). The pair (2h, 2h + 1) shares key and value: a1 and a2 are ordinary attention, so one call computes both.
Against version 1: no lambda_init, no norm of the heads, and lambda = sigmoid(w_h . x) per token and head, below 1.

Threshold differential attention, Huang et al. 2026, https://arxiv.org/abs/2601.12145; github.com/snap-research/TDA:
[cos1 - tau]_+^p - lambda [cos2 - tau]_+^p, tau = beta sqrt(2 log n / d). cos1 and cos2 are cosines of q and k in two
views; heads come in pairs as in version 1. n is the number of visible keys: random unit vectors exceed tau rarely at
any length. Rows are not normalized over keys; an RMS norm per head follows. lambda starts at 1/2 and is learned.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize, rms_norm

from attnorm.engines.fused import fused
from attnorm.engines.inputs import in_forward_mode, validate_inputs, without_autocast
from attnorm.mechanisms import attend
from attnorm.normalizers.block import Positions, check_mask
from attnorm.normalizers.contract import Mechanism, Normalizer, Properties, per_head_parameter
from attnorm.normalizers.relu import ThresholdRelu
from attnorm.normalizers.softmax import Softmax


class Differential(Mechanism):
    """softmax(z1) - lambda softmax(z2), lambda learned per layer; signed weights.

    Cancels noise that both maps share. Query and key heads come in pairs, with one value head per pair. Rows sum to 1 -
    lambda and are signed: entropy is undefined.
    """

    name = "differential"
    properties = Properties(row_sum="free", signed=True)
    another_architecture = "takes the difference of paired heads that share their values"

    def __init__(self, *, width: int = 64, depth: int = 0, head_norm: bool = True) -> None:
        super().__init__()
        if depth < 0:
            raise ValueError(f"depth: expected the index of a layer, from 0, got {depth}.")
        self.start = 0.8 - 0.6 * math.exp(-0.3 * depth)
        self.head_norm = head_norm
        # The four vectors lq1, lk1, lq2, lk2 of the key width, shared by the heads of a layer.
        self.vectors = nn.Parameter(torch.randn(4, width) * 0.1)
        self._softmax = Normalizer(Softmax(), name="differential")

    def share(self, dtype: torch.dtype) -> Tensor:
        """lambda, computed in the dtype."""
        q1, k1, q2, k2 = self.vectors.to(dtype)
        return torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + self.start

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
        softmax = attend if in_forward_mode() else fused  # SDPA has no forward mode
        working = torch.promote_types(q.dtype, torch.float32)  # a difference of rounded maps would keep few digits
        with without_autocast(q.device):
            first, second = (
                softmax(
                    validate_inputs(query, key, v, mask=pair_mask, causal=causal, scale=scale, positions=positions),
                    self._softmax,
                )
                for query, key, pair_mask in _paired_heads(q, k, v, mask)
            )
            share = self.share(working)
        difference = first.to(working) - share * second.to(working)
        if self.head_norm:
            difference = rms_norm(difference, (difference.shape[-1],), eps=1e-5) * (1 - self.start)
        return difference.to(q.dtype).reshape(*q.shape[:-3], q.shape[-3] // 2, q.shape[-2], v.shape[-1])


class DifferentialV2(Mechanism):
    """a1 - sigmoid(w . x) a2 of two query heads that share key and value; signed weights.

    heads: output heads H, for a lambda of each. width: of the hidden states x from which lambda is read (default: a
    learned number per head, or for all, that does not depend on x). It starts at 1/2. head_width: D, inside models that
    have one query per output head: the second queries are a learned projection of x.

    Query heads of a pair are neighbors (2h, 2h + 1): interleave pairs, do not concatenate them. Train with attnorm lab
    train lm --normalizer differential_v2; a trained model has no second queries to patch.
    """

    name = "differential_v2"
    properties = Properties(row_sum="free", signed=True)
    another_architecture = "takes the difference of two query heads that share key and value"

    def __init__(self, *, heads: int | None = None, width: int | None = None, head_width: int | None = None) -> None:
        super().__init__()
        if width is not None and heads is None:
            raise ValueError(f"expected heads with width={width}: lambda is read per head. Pass heads=, half of q's.")
        if head_width is not None and (width is None or heads is None):
            raise ValueError(f"expected heads and width with head_width={head_width}: second queries are read from x.")
        self.width, self.head_width = width, head_width
        self.second: nn.Linear | None = None
        if head_width is not None and width is not None and heads is not None:
            self.second = nn.Linear(width, heads * head_width, bias=False)
            nn.init.normal_(self.second.weight, std=0.02)  # as the other projections of a model in transformers
        self.from_hidden = None if width is None or heads is None else nn.Linear(width, heads, bias=False)
        self.logit = None if width is not None else per_head_parameter(0.0, heads)
        self._softmax = Normalizer(Softmax(), name="differential_v2")

    def second_queries(self, hidden_states: Tensor) -> Tensor:
        """Return the second queries, (B, H, Q, D), before any rotation."""
        assert self.second is not None
        assert self.from_hidden is not None
        queries = self.second(hidden_states)
        by_head: Tensor = queries.unflatten(-1, (self.from_hidden.out_features, -1)).transpose(1, 2)
        return by_head

    @property
    def reads_hidden_states(self) -> bool:  # type: ignore[override]
        return self.from_hidden is not None

    def share(self, hidden_states: Tensor | None, dtype: torch.dtype) -> Tensor:
        """lambda, broadcastable to (B, H, Q, 1)."""
        if self.from_hidden is None:
            assert self.logit is not None
            logit = self.logit.to(dtype)
            return torch.sigmoid(logit if logit.dim() == 0 else logit[:, None, None])
        if hidden_states is None:
            raise ValueError("expected hidden_states of shape (batch, queries, width), from which lambda is read.")
        with without_autocast(hidden_states.device):
            logits = linear(hidden_states.to(dtype), self.from_hidden.weight.to(dtype))
        return torch.sigmoid(logits).mT[..., None]

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
        if q.dim() < 3 or q.shape[-3] % (2 * k.shape[-3]):
            raise ValueError(
                "expected two query heads for each output head, both with the same key head: "
                f"q (B, 2H, Q, D), k (B, G, K, D), H a multiple of G; got {tuple(q.shape)}, {tuple(k.shape)}."
            )
        inputs = validate_inputs(q, k, v, mask=mask, causal=causal, scale=scale, positions=positions)
        working = torch.promote_types(q.dtype, torch.float32)  # a difference of rounded maps would keep few digits
        outputs = attend(inputs, self._softmax).to(working)
        output = outputs[:, 0::2] - self.share(hidden_states, working) * outputs[:, 1::2]
        return output.to(q.dtype).reshape(*q.shape[:-3], q.shape[-3] // 2, q.shape[-2], v.shape[-1])


@dataclass(frozen=True)
class SecondQueries:
    """What `DifferentialV2` needs in a model whose attention has one query per head."""

    query_BHQD: Tensor
    hidden_states: Tensor  # from which lambda is read

    def paired(self, query_BHQD: Tensor) -> Tensor:
        """Return first and second query of each head, alternating, (B, 2H, Q, D)."""
        return torch.stack([query_BHQD, self.query_BHQD.to(query_BHQD.dtype)], 2).flatten(1, 2)


class ThresholdDifferential(Mechanism):
    """[cos1 - tau]_+^power - lambda [cos2 - tau]_+^power, tau = beta sqrt(2 log n / d): exact zeros, signed weights.

    Heads come in pairs, as in differential. Cosines ignore the norms of q and k, so a scale raises an error.
    """

    name = "tda"
    properties = Properties(
        row_sum="free", signed=True, exact_zeros=True, shift_invariant=False, length="threshold beta sqrt(2 log n / d)"
    )
    another_architecture = "takes the difference of paired heads that share their values"

    def __init__(
        self, *, beta: float = 1.0, power: float = 2.0, heads: int | None = None, head_norm: bool = True
    ) -> None:
        super().__init__()
        self.head_norm = head_norm
        self.logit = per_head_parameter(0.0, heads)
        self._view = Normalizer(ThresholdRelu(beta, power), name="tda")

    def share(self, dtype: torch.dtype) -> Tensor:
        """lambda, of each output head or of all, computed in the dtype."""
        return torch.sigmoid(self.logit.to(dtype))

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
        pairs = _paired_heads(q, k, v, mask)
        if scale is not None:
            raise ValueError(f"expected no scale, since cosines do not depend on one, got {scale}.")
        working, width = torch.promote_types(q.dtype, torch.float32), q.shape[-1]
        map_ = self._view.map
        assert isinstance(map_, ThresholdRelu)
        views: list[Tensor] = []
        for query, key, view_mask in pairs:
            inputs = validate_inputs(
                query.to(working), key.to(working), v.to(working), mask=view_mask, causal=causal, scale=width**0.5,
                positions=positions,
            )  # fmt: skip
            unit = [normalize(t, dim=-1) for t in (inputs.q_BHQD, inputs.k_BGKD)]
            # In logits sqrt(d) cos the threshold is beta sqrt(2 log n), and weights are d^(p/2) times as large.
            weighed = attend(replace(inputs, q_BHQD=unit[0], k_BGKD=unit[1]), self._view)
            views.append(weighed * float(width) ** (-map_.power / 2))
        share = self.share(working)
        output: Tensor = views[0] - (share if share.dim() == 0 else share[:, None, None]) * views[1]
        if self.head_norm:
            output = rms_norm(output, (output.shape[-1],), eps=1e-5)
        return output.to(q.dtype).reshape(*q.shape[:-3], q.shape[-3] // 2, q.shape[-2], v.shape[-1])


def _paired_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Return queries, keys and mask of the first heads of all pairs, and of the second ones."""
    if q.dim() < 3 or q.shape[-3] % 2 or k.shape[-3] != 2 * v.shape[-3]:
        raise ValueError(
            "expected query and key heads in pairs and one value head per pair: q (B, 2H, Q, D), k (B, 2G, K, D), "
            f"v (B, G, K, E); got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}."
        )
    if mask is not None:
        check_mask(mask, torch.Size((*q.shape[:-1], k.shape[-2])))
    masks = [mask, mask]
    if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
        masks = [mask[..., of_pair::2, :, :] for of_pair in (0, 1)]
    return [(q[..., of_pair::2, :, :], k[..., of_pair::2, :, :], masks[of_pair]) for of_pair in (0, 1)]
