"""The small attention model of Velickovic et al. 2024, many copies trained side by side as one stacked module.

Items and query each pass an MLP with one hidden layer of GELU; one attention head with one query mixes the items; a
last MLP names the class. The S copies share nothing but the clock: every weight has a leading dimension S, and the
normalizer takes them as its heads, so that what it learns is learned for each copy alone.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnorm.normalizers.contract import Normalizer
from attnorm.training.retrieval_tasks import CLASSES, Sets, Task

WIDTH = 128


class StackedLinear(nn.Module):
    """S linear layers; copy s starts as torch.nn.Linear does, from its own seed."""

    def __init__(self, generators: list[torch.Generator], inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.stack([(torch.rand(*shape, generator=g) * 2 - 1) * bound for g in generators]))

        self.weight_SIO = drawn(inputs, outputs)
        self.bias_S1O = drawn(1, outputs) if bias else None

    def forward(self, x_SNI: Tensor) -> Tensor:
        if self.bias_S1O is None:
            return torch.bmm(x_SNI, self.weight_SIO)
        return torch.baddbmm(self.bias_S1O, x_SNI, self.weight_SIO)


class StackedMLP(nn.Module):
    def __init__(self, generators: list[torch.Generator], inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = StackedLinear(generators, inputs, WIDTH)
        self.second = StackedLinear(generators, WIDTH, outputs)

    def forward(self, x_SNI: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x_SNI)))  # type: ignore[no-any-return]


class Retrievers(nn.Module):
    """One model per seed."""

    def __init__(self, task: Task, normalizer: Normalizer, seeds: list[int]) -> None:
        super().__init__()
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.normalizer = normalizer
        self.read_item = StackedMLP(generators, task.item_width, WIDTH)
        self.read_query = StackedMLP(generators, task.query_width, WIDTH)
        self.to_query, self.to_key, self.to_value = (StackedLinear(generators, WIDTH, WIDTH) for _ in range(3))
        self.name_class = StackedMLP(generators, WIDTH, CLASSES)

    def logits(self, items_SBNF: Tensor, query_SBF: Tensor) -> tuple[Tensor, Tensor]:
        """Attention logits (S, B, N) and the values (S, B, N, D)."""
        S, B, N, _ = items_SBNF.shape
        read = self.read_item(items_SBNF.reshape(S, B * N, -1))
        key_SBND = self.to_key(read).reshape(S, B, N, WIDTH)
        query_SBD = self.to_query(self.read_query(query_SBF))
        logits = (key_SBND @ query_SBD[..., None]).squeeze(-1) / math.sqrt(WIDTH)
        return logits, self.to_value(read).reshape(S, B, N, WIDTH)

    def weights(self, logits_SBN: Tensor, visible_BN: Tensor, normalizer: Normalizer | None = None) -> Tensor:
        """(S, B, N): the copies are the normalizer's heads, each set is one row."""
        chosen = normalizer or self.normalizer
        weights: Tensor = chosen(logits_SBN.transpose(0, 1)[:, :, None], visible_BN[:, None, None])
        return weights[:, :, 0].transpose(0, 1)

    def forward(self, sets: Sets) -> Tensor:
        """Class scores (S, B, C)."""
        logits, values = self.logits(sets.items_SBNF, sets.query_SBF)
        return self.classes(self.weights(logits, sets.visible_BN), values)

    def classes(self, weights_SBN: Tensor, values_SBND: Tensor) -> Tensor:
        mixed = (weights_SBN[:, :, None] @ values_SBND).squeeze(2)
        scores: Tensor = self.name_class(mixed)
        return scores
