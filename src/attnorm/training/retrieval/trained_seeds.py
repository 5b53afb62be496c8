"""Trained models on disk: one safetensors file for the seeds that were trained together, with settings in its header.

Files are found by task, normalizer and recipe. A run with more seeds trains only the missing ones: no seed depends on
the others.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnorm.files import atomic_replace
from attnorm.provenance import settings_hash
from attnorm.training.retrieval.data import Task
from attnorm.training.retrieval.model import Retrievers, normalizer_for
from attnorm.training.retrieval.recipe import RetrievalRecipe

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
    what = {"task": task, "normalizer": normalizer, "recipe": recipe.identity(), "device": device}
    return f"{task}-{normalizer.translate({ord(':'): '_', ord('='): '_'})}-{settings_hash(what)[:10]}"


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
            raise ValueError(f"{path} is damaged ({error}); remove it, and its models are trained again") from None
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
            f"{stack.path} does not fit this version of attnorm ({str(error).splitlines()[0]}); "
            "choose another folder, or remove the file to train its models again"
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
