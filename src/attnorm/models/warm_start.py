"""Where a normalizer starts when it takes softmax's place in a trained model: as close to softmax as it can be.

One entry per normalizer; whoever patches a model may overrule each value. What has nothing to set is listed too, so
that the table says of every normalizer how far the patched model is from the trained one before any training.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnorm.normalizers.contract import Mechanism, Normalizer
from attnorm.normalizers.registry import entries, get

# Where a config does not say for how long a context the model was made: what ssmax itself assumes.
USUAL_LENGTH = 1024
# A sink this far below a row's logsumexp takes 5e-5 of its weight, and still learns. A head whose logits are all far
# below 0 would feel it (SmolLM2 does not: perplexity 18.48 after 18.50); a much lower start would learn nothing.
LOW_SINK = -10.0
# With the factor c, d log p / dz is 1 for softmax's weights and c p^(1 - alpha) for entmax's: equal at this weight if
# c = p^(alpha - 1). Of the factors tried on SmolLM2, those of 1/4 were best for entmax15 and for sparsemax.
MATCHED_WEIGHT = 0.25
# Options that say what the layer is rather than where to start: given without a warm start too.
FACTS = ("heads", "train_length")


@dataclass(frozen=True)
class Layer:
    """What a start may depend on."""

    heads: int
    length: int  # of the texts that the model was trained on
    causal: bool = True
    window: int | None = None
    sinks_H: Tensor | None = None  # the model's own


Options = Mapping[str, Any]


@dataclass(frozen=True)
class WarmStart:
    """How close to the trained model a normalizer starts, and why: by options that the user did not give (from the
    layer and those that were given), and by values of its state that no option sets (from all options)."""

    close: str
    why: str
    options: Callable[[Layer, Options], dict[str, Any]] = lambda layer, given: {}
    values: Callable[[Layer, Options, Options], dict[str, float | Tensor]] = lambda layer, given, options: {}


def mean_log_n(layer: Layer) -> float:
    """The mean of log n, n the visible keys of a row, over one text of the training length."""
    if layer.length < 3:
        raise ValueError(f"train_length must be at least 3, got {layer.length}: log n of so few keys says nothing")
    if not layer.causal:
        return math.log(layer.length)
    window = min(layer.length, layer.window or layer.length)
    return math.lgamma(window + 1) / layer.length + (1 - window / layer.length) * math.log(window)


def _of_learned(layer: Layer, given: Options) -> dict[str, Any]:
    return {"heads": layer.heads} if given.get("learned") else {}


def _ssmax(layer: Layer, given: Options) -> dict[str, Any]:
    return {"s": 0.0 if given.get("bias") else 1 / mean_log_n(layer), "heads": layer.heads}


def _ssmax_bias(layer: Layer, given: Options, options: Options) -> dict[str, float | Tensor]:
    return {"scale.0.bias": 1 - options["s"] * mean_log_n(layer)} if given.get("bias") else {}


def _entmax(layer: Layer, given: Options) -> dict[str, Any]:
    return {"alpha": 1.05, "heads": layer.heads} if given.get("learned") else {}


def _asentmax(layer: Layer, given: Options) -> dict[str, Any]:
    factor = MATCHED_WEIGHT ** (given.get("alpha", 1.5) - 1)
    beta, gamma = given.get("beta", factor / 2), given.get("gamma", 0.0)
    return {"delta": factor - beta * math.log(layer.length + 1) ** gamma, "beta": beta, "heads": layer.heads}


def _model_sinks(layer: Layer, given: Options, options: Options) -> dict[str, float | Tensor]:
    return {} if layer.sinks_H is None or "logit" in given else {"sink.logit": layer.sinks_H}


WARM_STARTS: dict[str, WarmStart] = {
    "softmax": WarmStart("the same", "T = 1; learned=True starts there", options=_of_learned),
    "ssmax": WarmStart(
        "near at the training length",
        "s = 1 / mean log n over the rows of a text of train_length tokens: a factor of 1 on average there, of less in "
        "shorter texts, which are flattened; with bias=True s = 0 and b = 1, exactly softmax",
        options=_ssmax,
        values=_ssmax_bias,
    ),
    "log_scaled": WarmStart(
        "the same up to the training length",
        "qwen's factor is 1 there, llama4's up to 8191 keys; yarn sharpens every row",
        options=lambda layer, given: {"train_length": layer.length},
    ),
    "adaptive_temperature": WarmStart("far", "nothing to set: rows of middling entropy are sharpened up to 2.4 times"),
    "topk": WarmStart("near", "nothing to set: the same for rows of at most k keys"),
    "sink": WarmStart(
        "near",
        f"logit {LOW_SINK:g}: the sink takes next to nothing, and can still learn, unless all logits of a row are as "
        "low; a model with sinks of its own starts from those, exactly",
        options=lambda layer, given: {"logit": LOW_SINK, "heads": layer.heads},
        values=_model_sinks,
    ),
    "entmax": WarmStart("near if learned", "learned=True starts at alpha = 1.05; a fixed alpha is as given", _entmax),
    "asentmax": WarmStart(
        "far",
        "delta = beta = 1/4, gamma = 0: with the factor 1/2 a weight of 1/4 changes with its logit as softmax's does",
        options=_asentmax,
    ),
    "scale_invariant": WarmStart(
        "near",
        "tau = the training length: within it no logit is stretched by more than 1.55 or lowered by more than 1.39",
        options=lambda layer, given: {"tau": float(layer.length)},
    ),
    "softmax1": WarmStart("far", "nothing to set: its sink is fixed at 0; `sink` learns it from far below"),
    "sigmoid": WarmStart("far", "nothing to set: the bias -log n of each row keeps the sum of weights near 1"),
    "kernel": WarmStart("far", "nothing to set; function='exp' is softmax itself"),
    "local": WarmStart("far", "nothing to set: the same for rows of at most `window` keys"),
    **{
        name: WarmStart("far", "nothing to set")
        for name in ["sparsemax", "entmax15", "kneemax", "sa_softmax", "relu", "softpick", "stick_breaking", "hard"]
    },
    **{
        name: WarmStart("far", "nothing to set: no function of the logits")
        for name in ["gaussian", "soft", "linear", "selective"]
    },
}


def build(name: str, given: Options, layer: Layer, *, warm: bool) -> tuple[Normalizer | Mechanism, dict[str, Any]]:
    """A new normalizer for one layer, and all options it was made with."""
    entry = WARM_STARTS.get(name) or WarmStart("unknown", "not from attnorm", options=_of_others(name))
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


def _of_others(name: str) -> Callable[[Layer, Options], dict[str, Any]]:
    """A registered factory that takes `heads` gets them."""
    entry = entries().get(name)
    takes = entry is not None and "heads" in inspect.signature(entry.factory()).parameters
    return lambda layer, given: {"heads": layer.heads} if takes else {}


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
