"""A model in memory together with what turns text into its inputs."""

from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class LoadedModel:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str  # on the hub, of its folder, or of its class
    revision: str | None = None  # commit hash where known
    tokenizer_problem: str = ""  # why there is none
    tokenizer_given: str | None = None  # where it was read from, if not from beside the model
