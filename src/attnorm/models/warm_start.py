"""Build the normalizer that replaces softmax in one layer of a trained model, as close to softmax as it can start.

How each normalizer starts is declared in its own file (WarmStart); given options override each value.
"""

from collections.abc import Mapping
from typing import Any

import torch

from attnorm.normalizers.contract import Mechanism, Normalizer
from attnorm.normalizers.declaration import LayerFacts, Options, WarmStart, warm_start_of
from attnorm.normalizers.registry import entries, get

# Where a config does not say for how long a context the model was made: what ssmax itself assumes.
USUAL_LENGTH = 1024
# Options that say what the layer is rather than where to start: given without a warm start too.
FACTS = ("heads", "train_length")


def build(name: str, given: Options, layer: LayerFacts, *, warm: bool) -> tuple[Normalizer | Mechanism, dict[str, Any]]:
    """A new normalizer for one layer, and all options it was made with."""
    known = entries().get(name)
    entry = WarmStart("unknown") if known is None else warm_start_of(known.factory())
    start = entry.options(layer, given)
    if not warm:
        start = {option: value for option, value in start.items() if option in FACTS}
    options = {**start, **given}
    normalizer = get(name, **options)
    if warm:
        state = normalizer.state_dict()  # parameters or buffers: whether learned or fixed
        for key, value in entry.values(layer, given, options).items():
            state[key].copy_(torch.as_tensor(value, dtype=torch.float32).detach().cpu())
    return normalizer, options


def trained_length(config: Any) -> int:
    """For how long a context a model was made, before any extension of its rotary embedding."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [part for part in rope.values() if isinstance(part, Mapping)]
    candidates = [
        *(part.get("original_max_position_embeddings") for part in (rope, *by_layer_type)),
        getattr(config, "max_position_embeddings", None),
        getattr(config, "n_positions", None),
        getattr(config, "max_target_positions", None),
    ]
    return next((int(length) for length in candidates if isinstance(length, int) and length > 2), USUAL_LENGTH)
