"""The validated inputs of attnorm.attention as the AttentionCall that metrics read."""

from torch import Tensor
from torch.nn.functional import pad

from attnorm.engines.inputs import Inputs
from attnorm.metrics.call import AttentionCall
from attnorm.normalizers.block import Positions


def mask_of(inputs: Inputs) -> Tensor | None:
    """Return the mask as an AttentionCall has it: one with a row for each query has causality in it."""
    rows = inputs.mask is not None and inputs.mask.shape[-2] > 1
    return inputs.visible(0, inputs.queries, inputs.keys) if rows else inputs.mask


def call_of(inputs: Inputs) -> AttentionCall:
    return AttentionCall(
        layer=0,
        kind="decoder" if inputs.causal else "encoder",
        query_BHQD=inputs.q_BHQD.detach(),
        key_BGKD=inputs.k_BGKD.detach(),
        value_BGKE=inputs.v_BGKE.detach(),
        scale=inputs.scale,
        causal=inputs.causal,
        mask=mask_of(inputs),
        softcap=inputs.softcap,
        positions=positions_of(inputs),
        inputs_BKC=states_of(inputs),
    )


def states_of(inputs: Inputs) -> Tensor | None:
    """Return the hidden states of the queries, which are the last keys; those of earlier keys are not read."""
    before = inputs.keys - inputs.queries
    return None if inputs.hidden_states is None or before < 0 else pad(inputs.hidden_states, (0, 0, before, 0))


def positions_of(inputs: Inputs) -> Positions | None:
    """Return positions of the queries and keys, (1 or B, Q) and (1 or B, K)."""
    if inputs.positions is None:
        return None
    positions = Positions.of(inputs.positions, inputs.weights_shape, inputs.q_BHQD.device)
    query, key = (t.reshape(-1, t.shape[-1]) for t in (positions.query, positions.key))
    return Positions(query, key)
