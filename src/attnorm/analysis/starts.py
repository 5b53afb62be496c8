"""Where a normalizer starts that is given by name: at this model's context length, as attnorm.patch would start it.

Only what depends on the length is taken from the warm start (s of ssmax, the training length of log_scaled, tau of
scale_invariant); the rest of a normalizer stays as its name makes it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from attnorm.models.warm_start import trained_length
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.declaration import LayerFacts, warm_start_of
from attnorm.normalizers.registry import entries, get


def starting_from(named: Mapping[str, Normalizer | None], model: Any, asked: Any) -> dict[str, Normalizer | None]:
    """named: as named_normalizers made it of `asked`. Objects are measured as they are given."""
    names = {asked} if isinstance(asked, str) else _names(asked)
    config = model.config.get_text_config(decoder=True)
    layer = LayerFacts(heads=1, length=trained_length(config), causal=not getattr(config, "is_encoder_decoder", False))
    return {
        name: _started(name, layer, normalizer) if name in names else normalizer for name, normalizer in named.items()
    }


def _names(asked: Any) -> set[str]:
    return {one for one in asked if isinstance(one, str)} if isinstance(asked, Iterable) else set()


def _started(name: str, layer: LayerFacts, otherwise: Normalizer | None) -> Normalizer | None:
    """The normalizer with the option that the length decides; `otherwise` where there is none."""
    start = warm_start_of(entries()[name].factory()) if name in entries() else None
    if start is None or start.by_length is None:
        return otherwise
    normalizer = get(name, **{start.by_length: start.options(layer, {})[start.by_length]})
    assert isinstance(normalizer, Normalizer)
    return normalizer
