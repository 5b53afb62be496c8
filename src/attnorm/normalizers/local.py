"""Local attention: a query sees the keys less than `window` positions away, https://arxiv.org/abs/2004.05150."""

from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import Normalizer, Selection
from attnorm.normalizers.declaration import Row, WarmStart, declare
from attnorm.normalizers.softmax import Softmax, softmax_over


class Local(Selection):
    length = "window"
    permutation_equivariant = False

    def __init__(self, window: int = 256) -> None:
        super().__init__()
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self.window = self.kernel_window = window

    def forward(self, block: Block) -> Tensor:
        return block.positions.distance.abs() < self.window

    def extra_repr(self) -> str:
        return f"window={self.window}"


def _reference(row: Row, window: int = 256) -> Tensor:
    return softmax_over(row.z, row.distance.abs() < window)


@declare(
    reference=_reference,
    examples=[{}, {"window": 3}],
    warm_start=WarmStart("nothing to set: the same for rows of at most `window` keys"),
)
def local(window: int = 256) -> Normalizer:
    """softmax over the keys within a window around the query.

    For some layers next to global ones. Keys outside the window get no weight.
    """
    return Normalizer(Softmax(), select=[Local(window)], name="local")
