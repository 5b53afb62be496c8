"""Small rows that hypothesis can shrink: weights, vectors, a mask and N."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from attnorm.theory.selection import SelectedRows, select


def floats(bound: float) -> st.SearchStrategy[float]:
    return st.floats(-bound, bound, allow_nan=False, width=32)


@dataclass(frozen=True)
class ClaimCase:
    logits: Tensor
    vectors: Tensor
    top_n: int

    @property
    def weights(self) -> Tensor:
        return torch.softmax(self.logits, -1)

    @property
    def rows(self) -> SelectedRows:
        return select(self.weights, self.vectors, self.top_n)


@st.composite
def cases(draw: st.DrawFn, most_keys: int = 7, most_dimensions: int = 3, spread: float = 8.0) -> ClaimCase:
    L = draw(st.integers(2, most_keys))
    d = draw(st.integers(1, most_dimensions))
    logits = draw(st.lists(floats(spread / 2), min_size=L, max_size=L))
    vectors = draw(st.lists(st.lists(floats(3), min_size=d, max_size=d), min_size=L, max_size=L))
    top_n = draw(st.integers(1, L - 1))
    return ClaimCase(torch.tensor(logits, dtype=torch.float64), torch.tensor(vectors, dtype=torch.float64), top_n)
