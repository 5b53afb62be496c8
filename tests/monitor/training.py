"""A Trainer over a tiny model, and what hears its logs."""

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from tests.models.tiny import tokens


class Tokens(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int = 8, length: int = 32) -> None:
        self.ids = tokens(count, length)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Reporter(TrainerCallback):
    """A tracker like TensorBoard that keeps what it receives."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        self.heard.append({**(logs or {}), "step": state.global_step})

    @property
    def steps(self) -> list[int]:
        """On which attention was heard of."""
        return [logs["step"] for logs in self.heard if any(key.startswith("attn/layer") for key in logs)]


def trainer_of(model: PreTrainedModel, folder: Path, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "max_steps": 6,
        "logging_steps": 3,
        "learning_rate": 1e-3,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "seed": 0,
        **options,
    }
    arguments = TrainingArguments(str(folder), **settings)
    return Trainer(model, arguments, train_dataset=Tokens(), eval_dataset=Tokens(2), callbacks=[*callbacks])
