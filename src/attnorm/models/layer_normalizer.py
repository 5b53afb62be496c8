"""Which normalizer each layer of a model gets: layer recipes, and building it for one layer of a trained model.

A layer recipe names one normalizer per layer or group of layers, as a mapping or as a TOML file.

    {"0-3": "softmax", "4-7": "entmax:alpha=1.3"}     layers count from 0; both ends of a range belong to it

Layers that a recipe leaves out, or names `softmax`, keep the softmax of the model. A recipe file has the same mapping
in its table [layers]; `learning_rate` above it is the rate that `attnorm lab train lm --recipe FILE` uses.

`build` starts a normalizer close to softmax, for all or some heads. The file of each normalizer declares its warm start
(WarmStart). Options that the user gives override it.
"""

import json
import operator
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnorm.files import write_text
from attnorm.normalizers.block import Block
from attnorm.normalizers.composition import common_properties
from attnorm.normalizers.contract import Map, Mechanism, Normalizer
from attnorm.normalizers.declaration import LayerFacts, Options, WarmStart, warm_start_of
from attnorm.normalizers.registry import entries, get, plain_options
from attnorm.normalizers.softmax import Softmax
from attnorm.normalizers.spec import parse_spec
from attnorm.text import did_you_mean

SOFTMAX = "softmax"
SUFFIX = ".toml"
MAX_LAYERS = 10_000
RANGE = re.compile(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?")

# Training length for configs that do not state one; also the default of ssmax.
USUAL_LENGTH = 1024
# Options that describe the layer; they are set without a warm start too.
FACTS = ("heads", "train_length")
# Attributes of attention modules that may hold the number of heads.
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")


@dataclass(frozen=True)
class RecipeFile:
    layers: dict[str, str]
    learning_rate: float | None = None


def is_recipe(value: Any) -> bool:
    """Whether a value is a mapping of layers, or the path of a recipe file."""
    return isinstance(value, Mapping | PathLike) or (isinstance(value, str) and value.endswith(SUFFIX))


def layer_groups(recipe: Any) -> dict[tuple[int, ...], Any]:
    """Return the normalizer of each group of layers, which are disjoint.

    recipe: a mapping, or the path of a recipe file.

    Raises:
        ValueError: Not layers, a layer that occurs twice, or no layer at all.
    """
    specs = recipe if isinstance(recipe, Mapping) else read_recipe_file(Path(recipe)).layers
    groups: dict[tuple[int, ...], Any] = {}
    assigned: set[int] = set()
    for key, normalizer in specs.items():
        layers = parse_layers(key)
        if twice := assigned.intersection(layers):
            raise ValueError(f"expected every layer once in a recipe, got layer {min(twice)} again in {key!r}")
        assigned.update(layers)
        groups[layers] = normalizer
    if not groups:
        raise ValueError('expected layers and normalizers, e.g. {"0-3": "softmax", "4-7": "entmax15"}, got none.')
    return groups


def parse_layers(key: Any) -> tuple[int, ...]:
    """Parse 4, "4", "0-3" or "0-1,6" to layers.

    Raises:
        ValueError: Something else.
    """
    layers: list[int] = []
    for part in str(key).split(",") if isinstance(key, str | int) and not isinstance(key, bool) else [""]:
        match = RANGE.fullmatch(part)
        first, last = (-1, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not 0 <= first <= last < MAX_LAYERS:
            raise ValueError(f'expected layers such as "3", "0-3" or "0-1,6", got {key!r}')
        layers.extend(range(first, last + 1))
    if len(set(layers)) < len(layers):
        raise ValueError(f"expected every layer once, got {key!r}")
    return tuple(layers)


def specs_by_layer(recipe: Mapping[str, str], count: int) -> list[str]:
    """Return the normalizer of each of `count` layers.

    Raises:
        ValueError: As `layer_groups`, or a layer that a model of so many layers does not have.
    """
    specs = [SOFTMAX] * count
    for layers, spec in layer_groups(recipe).items():
        if max(layers) >= count:
            raise ValueError(f"expected layers from 0 to {count - 1}, got {max(layers)} in a recipe")
        parse_spec(_text(spec))
        for layer in layers:
            specs[layer] = spec
    return specs


def compact(specs: Sequence[str]) -> dict[str, str]:
    """Return the shortest recipe for these layers: adjacent layers with the same normalizer are one range."""
    recipe: dict[str, str] = {}
    start = 0
    for layer in range(1, len(specs) + 1):
        if layer == len(specs) or specs[layer] != specs[start]:
            recipe[str(start) if layer == start + 1 else f"{start}-{layer - 1}"] = specs[start]
            start = layer
    return recipe


def read_recipe_file(path: Path) -> RecipeFile:
    """Read a recipe file.

    Raises:
        ValueError: It cannot be read, or contains something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except OSError as error:
        raise ValueError(f"cannot read the recipe {path}: {error.strerror}. Check the path.") from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise ValueError(f"{path}: expected a recipe in TOML, got an error: {error}.") from None
    keys = ("layers", "learning_rate")
    if unknown := [name for name in content if name not in keys]:
        raise ValueError(f"{path}: unknown key {unknown[0]!r}; {did_you_mean(unknown[0], keys)}")
    layers, rate = content.get("layers"), content.get("learning_rate")
    if not isinstance(layers, dict) or not layers:
        raise ValueError(f'{path}: expected a table [layers] such as "0-3" = "entmax15", got {layers!r}')
    if rate is not None and (not isinstance(rate, int | float) or isinstance(rate, bool) or not rate > 0):
        raise ValueError(f"{path}: expected a learning_rate above 0, got {rate!r}")
    try:
        for spec in layers.values():
            parse_spec(_text(spec))
        layer_groups(layers)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return RecipeFile(layers, None if rate is None else float(rate))


def write_recipe_file(
    path: Path, layers: Mapping[str, str], learning_rate: float | None = None, note: str = ""
) -> None:
    """Write a recipe file; `note` becomes comments at its top."""
    lines = [f"# {line}".rstrip() for line in note.splitlines()]
    if learning_rate is not None:
        lines.append(f"learning_rate = {float(learning_rate)!r}")
    lines += ["[layers]", *(f"{json.dumps(key)} = {json.dumps(spec)}" for key, spec in layers.items())]
    write_text(path, "\n".join(lines) + "\n")


def _text(spec: Any) -> str:
    if not isinstance(spec, str) or not spec:
        raise ValueError(f"expected the name of a normalizer, options as in topk:k=4, got {spec!r}")
    return spec


def build(name: str, given: Options, layer: LayerFacts, *, warm: bool) -> tuple[Normalizer | Mechanism, dict[str, Any]]:
    """Build a normalizer for one layer; return it with all options it was built with."""
    registered = entries().get(name)
    entry = WarmStart() if registered is None else warm_start_of(registered.factory())
    given = given if registered is None else plain_options(registered.factory(), given)
    start = entry.options(layer, given)
    if not warm:
        start = {option: value for option, value in start.items() if option in FACTS}
    options = {**start, **given}
    normalizer = get(name, **options)
    if warm:
        state = normalizer.state_dict()  # parameters if learned, buffers if fixed
        for key, value in entry.values(layer, given, options).items():
            state[key].copy_(torch.as_tensor(value, dtype=torch.float32).detach().cpu())
    return normalizer, options


def trained_length(config: Any) -> int:
    """Return the context length a model was trained for, before any extension of its rotary embedding."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [part for part in rope.values() if isinstance(part, Mapping)]
    candidates = [
        *(part.get("original_max_position_embeddings") for part in (rope, *by_layer_type)),
        getattr(config, "max_position_embeddings", None),
        getattr(config, "n_positions", None),
        getattr(config, "max_target_positions", None),
    ]
    return next((int(length) for length in candidates if isinstance(length, int) and length > 2), USUAL_LENGTH)


def measured_length(model: Any, length: int | None) -> int:
    """Return the training length at which a length rule starts in a comparison on texts of that length.

    Texts beyond the model's own length are what the rule is for, so that it starts at the model's length there, as
    where the length of the texts is not known.
    """
    own = trained_length(model.config.get_text_config(decoder=True))
    return own if length is None else min(length, own)


def starts_by_length(spec: str) -> bool:
    """Return whether a normalizer starts in another way at another training length, which its options do not state."""
    name, given = parse_spec(spec)
    start = warm_start_of(entries()[name].factory())
    return bool(start.length_options(LayerFacts(heads=1, length=USUAL_LENGTH), given))


class ByHead(Map):
    """A map with one normalizer (`chosen`) for the given heads and another one (`others`) for the rest.

    Dimension -3 of the logits holds the heads.
    """

    def __init__(self, chosen: Normalizer, heads: Sequence[int], others: Normalizer | None = None) -> None:
        super().__init__()
        self.chosen = chosen
        self.others = others or Normalizer(Softmax(), name="softmax")
        self.heads = tuple(heads)
        self.properties = common_properties(self.chosen.properties, self.others.properties)

    def forward(self, block: Block) -> Tensor:
        count = block.logits.shape[-3]
        rest = [head for head in range(count) if head not in self.heads]
        chosen = self.chosen.weights(_select_heads(block, self.heads))
        others = self.others.weights(_select_heads(block, rest))
        order = [*self.heads, *rest]  # of the heads in the concatenation
        return torch.cat([chosen, others], dim=-3)[..., [order.index(head) for head in range(count)], :, :]

    def lipschitz(self, n: int) -> float | None:
        bounds = self.chosen.lipschitz(n), self.others.lipschitz(n)
        return None if bounds[0] is None or bounds[1] is None else max(bounds[0], bounds[1])

    def extra_repr(self) -> str:
        return f"heads={self.heads}"


def restrict_to_heads(normalizer: Normalizer | Mechanism, heads: tuple[int, ...] | None) -> Normalizer | Mechanism:
    """Return a normalizer that applies to these heads only, with softmax for the others. None: all heads."""
    if heads is None:
        return normalizer
    if isinstance(normalizer, Mechanism):
        raise ValueError(
            f"{normalizer.name!r} is a mechanism, which works on all heads of a layer. Leave the heads out."
        )
    return Normalizer(ByHead(normalizer, heads), name=normalizer.name)


def head_count(module: nn.Module) -> int:
    """Return the number of query heads of an attention module."""
    for holder in (module, module.config):
        for name in HEADS:
            count = getattr(holder, name, None)
            if isinstance(count, int):
                return count
    projection, width = getattr(module, "q_proj", None), getattr(module, "head_dim", None)
    if isinstance(projection, nn.Linear) and isinstance(width, int):  # RF-DETR
        return projection.out_features // width
    raise ValueError(
        f"{type(module).__name__}: expected its number of heads in an attribute ({', '.join(HEADS)}), got none. "
        "Patch a part of the model without it, e.g. patch(model.get_decoder(), ...), or leave its layer out "
        "with layers=."
    )


def as_integer(value: Any) -> int:
    """Convert an integer of any type, also NumPy's, to int; raise TypeError for anything else, also for bool."""
    if isinstance(value, bool):
        raise TypeError(f"expected a whole number, got {value!r}")
    return operator.index(value)


def validate_heads(heads: Any, module: nn.Module, path: str) -> tuple[int, ...]:
    """Return head indices as a tuple; raise ValueError unless they are different heads of the module."""
    count = head_count(module)
    try:
        head_indices = tuple(map(as_integer, heads if isinstance(heads, Iterable) else [heads]))
    except TypeError:
        head_indices = ()
    if not head_indices or not all(0 <= head < count for head in head_indices):
        raise ValueError(f"{path}: expected heads from 0 to {count - 1}, got {heads!r}.")
    if len({*head_indices}) < len(head_indices):
        raise ValueError(f"{path}: expected each head once, got {heads!r}.")
    return head_indices


def check_fit(normalizer: Normalizer | Mechanism, module: nn.Module, path: str) -> None:
    """Raise ValueError if the normalizer has parameters for another number of heads: run it on two keys per head."""
    if isinstance(normalizer, Mechanism):
        return
    any_value = next((value for value in normalizer.state_dict().values()), torch.empty(0))
    logits = torch.zeros(1, head_count(module), 1, 2, device=any_value.device)
    try:
        with torch.no_grad():
            normalizer(logits)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{normalizer.name!r} does not fit {path}, which has {head_count(module)} heads: {error}"
        ) from None


def _select_heads(block: Block, heads: Sequence[int]) -> Block:
    mask = block.mask
    if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
        mask = mask[..., list(heads), :, :]
    return replace(block, logits=block.logits[..., list(heads), :, :], mask=mask)
