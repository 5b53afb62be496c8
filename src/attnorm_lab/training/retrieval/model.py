"""The model of Velickovic et al. 2024: an MLP reads each item, one attention head mixes them, an MLP names the class.

https://arxiv.org/abs/2410.01104, appendix A. S copies with different seeds are trained side by side as one module. They
share nothing: every weight has a leading dimension S, and the normalizer takes the copies as its heads, so that what it
learns is separate for each copy.

Normalizers are given by name and options, such as topk:k=4, where the defaults are not meant for sets.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnorm.files import atomic_replace
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.registry import get
from attnorm.normalizers.spec import parse_spec
from attnorm.provenance import settings_hash
from attnorm_lab.training.retrieval.data import CLASSES, RetrievalRecipe, Task, stream


class StackedLinear(nn.Module):
    """S linear layers; copy s is initialized like torch.nn.Linear, from its own generator."""

    def __init__(self, generators: list[torch.Generator], inputs: int, outputs: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.stack([(torch.rand(*shape, generator=g) * 2 - 1) * bound for g in generators]))

        self.weight_SIO = drawn(inputs, outputs)
        self.bias_S1O = drawn(1, outputs)

    def forward(self, x_SNI: Tensor) -> Tensor:
        return torch.baddbmm(self.bias_S1O, x_SNI, self.weight_SIO)


class StackedMLP(nn.Module):
    def __init__(self, generators: list[torch.Generator], inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.first = StackedLinear(generators, inputs, width)
        self.second = StackedLinear(generators, width, outputs)

    def forward(self, x_SNI: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x_SNI)))  # type: ignore[no-any-return]


class Retrievers(nn.Module):
    """One model per seed; the seed determines its initial weights."""

    def __init__(self, task: Task, normalizer: Normalizer, seeds: Sequence[int], width: int) -> None:
        super().__init__()
        generators = [stream("weights", seed, 0, torch.device("cpu")) for seed in seeds]
        self.copies, self.width = len(seeds), width
        self.normalizer = normalizer
        self.read_item = StackedMLP(generators, task.item_width, width, width)
        self.read_query = StackedMLP(generators, task.query_width, width, width)
        self.to_query, self.to_key, self.to_value = (StackedLinear(generators, width, width) for _ in range(3))
        self.name_class = StackedMLP(generators, width, width, CLASSES)

    def read(self, items_SBNF: Tensor) -> Tensor:
        """Return the features of the items, (S, B * N, D), from which keys and values are computed."""
        read: Tensor = self.read_item(items_SBNF.flatten(1, 2))
        return read

    def logits(self, read_SXD: Tensor, query_SBF: Tensor) -> Tensor:
        """Return the logits (S, B, N) of the items."""
        keys = self.to_key(read_SXD).unflatten(1, (query_SBF.shape[1], -1))
        queries = self.to_query(self.read_query(query_SBF))
        logits: Tensor = (keys @ queries[..., None]).squeeze(-1) / math.sqrt(self.width)
        return logits

    def values(self, read_SXD: Tensor, sets: int) -> Tensor:
        """Return the values (S, B, N, D) of the items, which belong to `sets` sets."""
        values: Tensor = self.to_value(read_SXD).unflatten(1, (sets, -1))
        return values

    def weights(self, logits_SBN: Tensor, visible_SBN: Tensor, normalizer: Normalizer | None = None) -> Tensor:
        """Return the weights (S, B, N): copies are the normalizer's heads, each set is a row. None: the trained one."""
        rows, mask = (x.transpose(0, 1)[:, :, None] for x in (logits_SBN, visible_SBN))
        weights: Tensor = (normalizer or self.normalizer)(rows, mask)
        return weights[:, :, 0].transpose(0, 1)

    def classes(self, mixed_SBD: Tensor) -> Tensor:
        """Return the scores of the classes, (S, B, C)."""
        scores: Tensor = self.name_class(mixed_SBD)
        return scores


def mixture(weights_SBN: Tensor, values_SBND: Tensor) -> Tensor:
    return (weights_SBN[:, :, None] @ values_SBND).squeeze(2)


def normalizer_for(spelling: str, copies: int) -> Normalizer:
    """Return a normalizer from its specification, with separate parameters for each copy.

    Raises:
        ValueError: Unknown, or not a map from rows of logits to weights.
    """
    name, options = parse_spec(spelling)
    try:
        normalizer = get(name, **options)
    except TypeError as error:
        raise ValueError(str(error)) from None
    if not isinstance(normalizer, Normalizer):
        raise ValueError(
            f"{name!r} is a mechanism, which needs q, k and v of a sequence, but sets of items have rows of "
            "logits only. Choose a row normalizer; `attnorm normalizers` lists them."
        )
    if not any(True for _ in normalizer.parameters()):
        return normalizer
    try:
        per_copy = get(name, heads=copies, **options)
    except TypeError:
        raise ValueError(
            f"expected a normalizer with the option `heads`, got {name!r}, because seeds that are trained "
            "together would share its parameters. Choose another normalizer."
        ) from None
    assert isinstance(per_copy, Normalizer)
    return per_copy


FOLDER = "models"
HEADER = "attnorm"


@dataclass(frozen=True)
class TrainedSeeds:
    """Models that were trained together: their file and its header (run, task, normalizer, recipe, seeds, ...)."""

    path: Path
    about: dict[str, Any]

    @property
    def run(self) -> str:
        return str(self.about["run"])

    @property
    def seeds(self) -> list[int]:
        seeds: list[int] = self.about["seeds"]
        return seeds


def run_key(task: str, normalizer: str, recipe: RetrievalRecipe, device: str) -> str:
    """Return a short name for everything that decides the weights of a seed; CPU and CUDA draw different data."""
    identity = {"task": task, "normalizer": normalizer, "recipe": recipe.identity(), "device": device}
    return f"{task}-{normalizer.translate({ord(':'): '_', ord('='): '_'})}-{settings_hash(identity)[:10]}"


def trained_seeds_name(key: str, seeds: Sequence[int]) -> str:
    return f"{key}-seeds-{_ranges(seeds)}"


def find_trained_seeds(out: Path, key: str = "") -> list[TrainedSeeds]:
    """Return the trained models in the folder, or those of one run, by name.

    Raises:
        ValueError: A file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    stacks = []
    for path in sorted((out / FOLDER).glob(f"{key or '*'}-seeds-*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads(file.metadata()[HEADER])
        except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is damaged ({error}). Remove it to train its models again.") from None
        stacks.append(TrainedSeeds(path, about))
    return stacks


def save_trained_seeds(
    out: Path, key: str, seeds: Sequence[int], models: Retrievers, about: dict[str, Any]
) -> TrainedSeeds:
    from safetensors.torch import save

    path = out / FOLDER / f"{trained_seeds_name(key, seeds)}.safetensors"
    about = {"run": key, **about, "seeds": list(seeds)}
    weights = {name: value.detach().cpu().contiguous() for name, value in models.state_dict().items()}
    with atomic_replace(path) as draft:
        draft.write_bytes(save(weights, {HEADER: json.dumps(about)}))
    return TrainedSeeds(path, about)


def load_trained_seeds(stack: TrainedSeeds, task: Task, device: torch.device) -> Retrievers:
    """Load the models of a file.

    Raises:
        ValueError: The weights do not fit these models.
    """
    from safetensors.torch import load_file

    normalizer = normalizer_for(stack.about["normalizer"], len(stack.seeds))
    models = Retrievers(task, normalizer, stack.seeds, stack.about["recipe"]["width"])
    try:
        models.load_state_dict(load_file(stack.path))
    except RuntimeError as error:
        raise ValueError(
            f"{stack.path} does not fit this version of attnorm ({str(error).splitlines()[0]}). Choose another "
            "folder, or remove the file to train its models again."
        ) from None
    return models.to(device).eval()


def _ranges(seeds: Sequence[int]) -> str:
    """Return seeds as ranges: 0-9, or 0-4+7 if some are missing."""
    ends: list[list[int]] = []
    for seed in seeds:
        if ends and seed == ends[-1][1] + 1:
            ends[-1][1] = seed
        else:
            ends.append([seed, seed])
    return "+".join(f"{first}-{last}" if last > first else str(first) for first, last in ends)
