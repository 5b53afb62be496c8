"""Local attention: a query sees the keys less than `window` positions away, https://arxiv.org/abs/2004.05150."""

from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import Normalizer, Selection
from attnorm.normalizers.softmax import Softmax


class Local(Selection):
    length = "window"
    permutation_equivariant = False
    swap_untrained = False

    def __init__(self, window: int = 256) -> None:
        super().__init__()
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self.window = window

    def forward(self, block: Block) -> Tensor:
        return block.positions.distance.abs() < self.window

    def extra_repr(self) -> str:
        return f"window={self.window}"


def local(window: int = 256) -> Normalizer:
    """softmax over the keys within a window around the query."""
    return Normalizer(Softmax(), select=[Local(window)], name="local")
