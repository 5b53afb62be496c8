"""Run a model over the start of a text and inspect its attention calls one by one."""

from collections.abc import Callable

import torch
from torch import Tensor

from attnorm.experiments.experiment import ExperimentSubject, ProgressCallback
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.sampling import length_bins, spread
from attnorm.models.dispatch import attention_sites
from attnorm.models.forward_pass import run
from attnorm.models.observe import observe


def run_forward_pass(
    subject: ExperimentSubject,
    length: int,
    on_call: Callable[[AttentionCall], None],
    progress: ProgressCallback,
    what: str,
    *,
    start: int = 0,
    inputs: bool = False,
    encoders: bool = False,
) -> None:
    """Run the model over `length` tokens of the first text; `on_call` gets every causal attention call.

    start: index of the first token.
    inputs: record the layer inputs that the keys were projected from.
    encoders: also pass calls in which every query sees all keys.
    """
    loaded = subject.loaded()
    kinds = ("decoder", "encoder") if encoders else ("decoder",)
    layers = len(attention_sites(loaded.model))
    seen = 0

    def one(call: AttentionCall) -> None:
        nonlocal seen
        if call.kind in kinds:
            on_call(call)
            seen += 1
        progress(what, min(seen, layers), layers)

    with observe(loaded.model, one, inputs=inputs):
        run(loaded, _from(start, subject.model_inputs(start + length)))
    if not seen:
        raise ValueError(f"{loaded.name} has no causal attention, which this experiment needs")


def _from(start: int, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    tokens = inputs["input_ids"].shape[1]
    return {
        name: value[:, start:] if value.dim() == 2 and value.shape[1] == tokens else value
        for name, value in inputs.items()
    }


def longest_rows(call: AttentionCall, count: int) -> Tensor:
    """Return `count` queries, evenly spaced in the longest half octave of contexts, including the last."""
    queries, keys = call.query_BHQD.shape[-2], call.key_BGKD.shape[-2]
    n = torch.arange(queries) + 1 + keys - queries
    return spread((n >= length_bins(keys)[0][0]).nonzero().squeeze(-1), count)
