"""How many keys the heaviest of each head are, counted one by one."""

import pytest
import torch
from torch import Tensor

from attnorm.metrics import sampling
from attnorm.metrics.reads import _shares


def counted(weights: Tensor, size: int) -> tuple[list[int], int]:
    """Of the heads (h, w): keys of positive weight among the `size` heaviest of each, and of all together."""
    chosen = [
        {key for key in sorted(range(len(row)), key=lambda key: -row[key])[:size] if row[key] > 0}
        for row in weights.tolist()
    ]
    return [len(keys) for keys in chosen], len(set().union(*chosen))


@pytest.mark.parametrize(
    "weights",
    [
        [[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]],
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]],
        [[0.0, 0.0, 0.0], [0.4, 0.6, 0.0]],
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
        [[1.0], [0.0]],
    ],
)
def test_heavy_keys_of_heads_and_of_all_heads_together(weights: list[list[float]]) -> None:
    rows, sizes = torch.tensor(weights), [1, 2, 3, 5]  # 5: more than there are keys
    found = _shares(rows[None, :, None], torch.tensor(sizes), 5)
    assert found.shape == (1, 3, 1, 4)
    for at, size in enumerate(sizes):
        own, together = counted(rows, size)
        assert found[0, :, 0, at].tolist() == [*own, together]


def test_a_bin_without_numbers_has_no_mean_whatever_was_computed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros, counts = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[0, 1]])
    both = torch.tensor([[[7.0], [3.0]]], dtype=torch.float64)
    monkeypatch.setattr(sampling, "_by_sorting", lambda *_: (zeros, both, both, counts, counts))
    monkeypatch.setattr(sampling, "runs_triton", lambda device: False)
    found = sampling.binned(torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int32), 2, (0.5,))
    assert found.mean.isnan().tolist() == [[True, False]]
    assert found.quantiles.isnan().tolist() == [[[True], [False]]]
