"""Selective attention: tokens that head 0 attended to are pushed away from later queries, in every head.

    S = relu(logits of head 0), 0 for the first visible key and for the query's own key
    F_i = sum of S over strictly earlier queries;   weights = softmax(z - F)

Leviathan, Kalman & Matias 2024, https://arxiv.org/abs/2410.02703. Parameter-free. F needs every earlier query: to
decode with a cache, carry the penalty that `attend` returns.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from attnorm.engines.blocked import BLOCK_ELEMENTS
from attnorm.engines.inputs import Inputs, under_transform, validate_inputs, without_autocast
from attnorm.normalizers.block import Block, Positions
from attnorm.normalizers.contract import Mechanism, Normalizer, Properties
from attnorm.normalizers.declaration import WarmStart, declare
from attnorm.normalizers.softmax import Softmax


@declare(warm_start=WarmStart("nothing to set: no function of the logits"))
class Selective(Mechanism):
    """softmax(z - F), F the sum of [z]_+ of head 0 over earlier queries: keys that it selected get lower logits.

    The first key and the query's own key are not penalized. No parameters. A KV cache is not enough to decode: keep the
    penalty that `attend` returns.
    """

    name = "selective"
    needs_every_query = True
    properties = Properties(
        row_sum="one", shift_invariant=False, permutation_equivariant=False, length="what earlier queries selected"
    )

    def __init__(self, *, block_elements: int = BLOCK_ELEMENTS) -> None:
        super().__init__()
        self.block_elements = block_elements
        self._softmax = Normalizer(Softmax(), name="selective")

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
        if q.shape[-2] != k.shape[-2]:
            raise ValueError(
                "expected as many queries as keys, because selective attention needs every earlier query, got "
                f"{q.shape[-2]} queries for {k.shape[-2]} keys. To decode with a cache, call .attend(q, k, v, "
                "penalty=...) with the penalty that it returned before."
            )
        return self.attend(q, k, v, mask=mask, causal=causal, scale=scale, positions=positions)[0]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        penalty: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = True,
        scale: float | None = None,
        positions: Tensor | Positions | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Output, and the penalty F (B, 1, 1, K) to pass with the next queries; `penalty` may cover fewer keys."""
        inputs = validate_inputs(q, k, v, mask=mask, causal=causal, scale=scale, positions=positions)
        working = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
        q4, k4, v4 = (t.to(working) for t in (inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE))
        k4, v4 = (t.repeat_interleave(inputs.groups, dim=1) for t in (k4, v4))
        carried = q4.new_zeros(q4.shape[0], 1, 1, inputs.keys)
        if penalty is not None:
            _check_penalty(penalty, carried.shape)
            carried = carried + pad(penalty.to(working), (0, inputs.keys - penalty.shape[-1]))
        rows = max(1, self.block_elements // max(1, q4.shape[0] * q4.shape[1] * inputs.keys))
        # torch.func has no checkpoint.
        recompute = inputs.needs_grad and rows < inputs.queries and not under_transform()
        outputs = []
        for start, stop in inputs.steps(rows):
            arguments = (inputs, start, stop, q4[..., start:stop, :], k4, v4, carried)
            if recompute:
                output, carried = checkpoint(self._block, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                output, carried = self._block(*arguments)
            outputs.append(output)
        return torch.cat(outputs, dim=-2).to(q.dtype).reshape(*q.shape[:-1], v.shape[-1]), carried

    def _block(
        self, inputs: Inputs, start: int, stop: int, q: Tensor, k: Tensor, v: Tensor, carried: Tensor
    ) -> tuple[Tensor, Tensor]:
        mask = inputs.visible(start, stop, inputs.keys)
        with without_autocast(q.device):
            logits = (q * inputs.scale) @ k.transpose(-1, -2)
            first_head = Block.of(logits[:, :1], None if mask is None else mask[:, :1])
            selected = self._selection_scores(first_head, inputs.offset + start)
            earlier = carried + selected.cumsum(-2) - selected
            weights = self._softmax.weights(Block.of(logits - earlier, mask))
            return weights @ v, carried + selected.sum(-2, keepdim=True)

    @staticmethod
    def _selection_scores(block: Block, first_row: int) -> Tensor:
        """S of head 0 for rows whose own keys start at `first_row`."""
        selected = block.hide(block.logits.relu())
        rows, keys = selected.shape[-2:]
        index = torch.arange(keys, device=selected.device)
        is_own_key = index == torch.arange(first_row, first_row + rows, device=selected.device)[:, None]
        first = index == 0 if block.mask is None else block.mask & (block.mask.cumsum(-1) == 1)
        return torch.where(is_own_key | first, 0.0, selected)


def _check_penalty(penalty: Tensor, expected: torch.Size) -> None:
    fits = penalty.dim() == 4 and penalty.shape[0] == expected[0] and penalty.shape[1:3] == (1, 1)
    if not fits or penalty.shape[-1] > expected[-1]:
        raise ValueError(
            f"expected a penalty of shape {tuple(expected)} or with fewer keys, got {tuple(penalty.shape)}. Pass the "
            "penalty that .attend returned for the earlier queries."
        )
