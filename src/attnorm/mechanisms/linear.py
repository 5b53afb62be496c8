"""Linear attention: weights f(q_i) . f(k_j) / sum_j f(q_i) . f(k_j) in O(L), for a positive feature map f.

Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236 (f = elu + 1). The sums over keys are computed once, or,
where the call is causal, carried from chunk to chunk. A mask that differs between queries has no linear form and runs
on blocks of queries with the same result.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from attnorm.engines.blocked import blocked
from attnorm.engines.inputs import Inputs, product, validate_inputs, without_autocast
from attnorm.normalizers.block import Block, Positions, is_exporting
from attnorm.normalizers.contract import Map, Mechanism, Normalizer, Properties
from attnorm.normalizers.declaration import WarmStart, declare
from attnorm.normalizers.kernel import FUNCTIONS

CHUNK = 128  # queries and keys between two sums that the causal form carries
CHUNKS_AT_ONCE = 32  # in one product on a GPU, which would wait for Python between small ones
SUM_CHUNK = 512  # tokens of one product in a sum over all tokens
ENOUGH_PRODUCTS = 256  # that keep a GPU busy

FeatureMap = Callable[[Tensor], Tensor]


class Share(Map):
    """z / sum z for logits that are positive already."""

    properties = Properties(row_sum="one", shift_invariant=False)

    def forward(self, block: Block) -> Tensor:
        total = block.hide(block.logits).sum(-1, keepdim=True)
        return block.hide(block.logits / torch.where(total > 0, total, 1.0))


class _Products(nn.Module):
    """Compute f(q) . f(k). A module, so that the parameters of a learned f are found."""

    def __init__(self, feature_map: FeatureMap, scale: float) -> None:
        super().__init__()
        self.feature_map, self.scale = feature_map, scale

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return self.feature_map(q * self.scale) @ self.feature_map(k).transpose(-1, -2)


@declare(warm_start=WarmStart("nothing to set: no function of the logits"))
class Linear(Mechanism):
    """f(q) . f(k) over its sum, f = elu + 1 or your own positive feature map: attention in O(L).

    q is not scaled unless you pass scale. Features with small gaps cannot select: it stays close to equal shares.
    """

    name = "linear"
    properties = Properties(row_sum="one", shift_invariant=False)

    def __init__(self, feature_map: FeatureMap | None = None) -> None:
        super().__init__()
        self.feature_map = feature_map or FUNCTIONS["elu+1"].value
        self._share = Normalizer(Share(), name="linear")

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
        """`scale` multiplies q before the feature map; 1 unless given."""
        inputs = validate_inputs(
            q, k, v, mask=mask, causal=causal, scale=1.0 if scale is None else scale, positions=positions
        )
        per_query = inputs.mask is not None and inputs.mask.shape[-2] > 1
        output = self._attend_in_blocks(inputs) if per_query else self._attend_by_sums(inputs)
        return output.reshape(*q.shape[:-1], v.shape[-1])

    def _attend_in_blocks(self, inputs: Inputs) -> Tensor:
        return blocked(inputs, self._share, scores=_Products(self.feature_map, inputs.scale))

    def _attend_by_sums(self, inputs: Inputs) -> Tensor:
        with without_autocast(inputs.q_BHQD.device):
            return self._summed(inputs)

    def _summed(self, inputs: Inputs) -> Tensor:
        dtype = inputs.q_BHQD.dtype
        working = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        k, v = (t.to(working).repeat_interleave(inputs.groups, dim=1) for t in (inputs.k_BGKD, inputs.v_BGKE))
        q, k = self.feature_map(inputs.q_BHQD.to(working) * inputs.scale), self.feature_map(k)
        if inputs.mask is not None:
            k = torch.where(inputs.mask.transpose(-1, -2), k, 0.0)
        v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)  # the last column sums the weights themselves
        summed = causal_sums(q, k, v, inputs.offset) if inputs.causal else product(q, sum_over_tokens(k, v))
        total = summed[..., -1:]
        return (summed[..., :-1] / torch.where(total > 0, total, 1.0)).to(dtype)


def causal_sums(q: Tensor, k: Tensor, v: Tensor, offset: int) -> Tensor:
    """sum_{j <= offset + i} (q_i . k_j) v_j, by chunks with the sum of k v^T carried along."""
    if offset < 0:  # the first queries see nothing
        later = causal_sums(q[..., -offset:, :], k, v, 0)
        return torch.cat([later.new_zeros(*later.shape[:-2], -offset, later.shape[-1]), later], dim=-2)
    state = k.new_zeros(*k.shape[:-2], k.shape[-1], v.shape[-1])
    if offset:  # onnxruntime does not return zeros for an empty product
        state = product(k[..., :offset, :].transpose(-1, -2), v[..., :offset, :])
    k, v = k[..., offset:, :], v[..., offset:, :]
    if is_exporting():  # a graph would keep the number of chunks that the length of the example has
        return _chunk_sums(state, *(t.unsqueeze(-3) for t in (q, k, v)))[0].flatten(-3, -2)
    outputs = []
    for parts in zip(*(t.split(CHUNK * _chunks_at_once(q), dim=-2) for t in (q, k, v)), strict=True):
        tokens = parts[0].shape[-2]
        chunked_length = tokens // CHUNK * CHUNK
        if chunked_length:
            chunks = [t[..., :chunked_length, :].unflatten(-2, (-1, CHUNK)) for t in parts]
            output, state = _chunk_sums(state, *chunks)
            outputs.append(output.flatten(-3, -2))
        if chunked_length < tokens or not tokens:  # the end of the text
            rest = [t[..., None, chunked_length:, :] for t in parts]
            output, state = _chunk_sums(state, *rest)
            outputs.append(output.flatten(-3, -2))
    return torch.cat(outputs, dim=-2)


def _chunks_at_once(q: Tensor) -> int:
    return CHUNKS_AT_ONCE if q.is_cuda else 1


def _chunk_sums(state: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of chunks (..., chunk, token, width), and the state after them.

    state: sum of k v^T before them.
    """
    products = product(k.transpose(-1, -2), v)
    states = torch.cat([state.unsqueeze(-3), products], dim=-3).cumsum(-3)
    within = product(q, k.transpose(-1, -2)).tril()
    return product(q, states[..., :-1, :, :]) + product(within, v), states[..., -1, :, :]


def sum_over_tokens(a: Tensor, b: Tensor) -> Tensor:
    """Return a^T b, (..., m, d), of a (..., L, m) and b (..., L, d).

    A GPU computes each of these products in a single program, which reads all tokens. A few long ones are divided into
    chunks of tokens, whose products are added; not in an exported graph, where their number may vary.
    """
    products, tokens = a.shape[:-2].numel(), a.shape[-2]
    if not a.is_cuda or is_exporting() or products >= ENOUGH_PRODUCTS or tokens < 2 * SUM_CHUNK:
        return product(a.transpose(-1, -2), b)
    return _sum_by_chunks(a, b)


def _sum_by_chunks(a: Tensor, b: Tensor) -> Tensor:
    chunked_length = a.shape[-2] // SUM_CHUNK * SUM_CHUNK
    chunks_of_a, chunks_of_b = (t[..., :chunked_length, :].unflatten(-2, (-1, SUM_CHUNK)) for t in (a, b))
    total = product(chunks_of_a.transpose(-1, -2), chunks_of_b).sum(-3)
    return total + product(a[..., chunked_length:, :].transpose(-1, -2), b[..., chunked_length:, :])
