"""A model in memory together with what turns text into its inputs."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class LoadedModel:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str  # on the hub, of its folder, or of its class
    revision: str | None = None  # commit hash where known
    tokenizer_problem: str = ""  # why there is none
    tokenizer_given: str | None = None  # where it was read from, if not from beside the model
    source: str | Path | None = None  # hub name or folder, where it was loaded here
    trusted: bool = False  # code that comes with it may run


def with_known_loss(model: PreTrainedModel) -> PreTrainedModel:
    """GPT-2's class name tells transformers no loss: it would take this one after a warning, and a Trainer's logs would
    be lower by the share of each text's first token."""
    if getattr(model, "loss_type", "known") is None and hasattr(model, "generate"):
        model.loss_type = "ForCausalLM"
    return model
