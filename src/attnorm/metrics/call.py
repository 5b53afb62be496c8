"""One attention call of a model, as it is measured: everything that decides its logits, weights and outputs.

Shape letters: see engines/inputs.py.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from attnorm.normalizers.block import Positions
from attnorm.normalizers.contract import Mechanism, Normalizer

Kind = Literal["decoder", "encoder", "cross"]


@dataclass(frozen=True)
class AttentionCall:
    """Queries and keys after position encoding, at the model's own head counts; nothing of size Q x K is made here."""

    layer: int  # counted within its kind
    kind: Kind  # causal self-attention, bidirectional self-attention, attention to an encoder
    query_BHQD: Tensor
    key_BGKD: Tensor
    value_BGKE: Tensor
    scale: float
    causal: bool  # aligned bottom-right: the last query sees every key
    # Boolean, True = may attend, broadcastable to (B, H, Q, K); one with a row for each query has causality in it.
    mask: Tensor | None = None
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    sinks_H: Tensor | None = None  # one learned logit per head that takes mass and gives no output
    bias: Tensor | None = None  # added to the logits (T5's relative positions), broadcastable to (B, H, Q, K)
    dropout: float = 0.0  # share of the weights that the model drops in training
    normalizer: Normalizer | Mechanism | None = None  # what a patched layer runs instead of softmax
    inputs_BKC: Tensor | None = None  # the layer input behind the keys, if requested
    positions: Positions | None = None  # (1 or B, Q) and (1 or B, K); None: counted, the last query at the last key
