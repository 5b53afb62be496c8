"""Train an image classifier, test it (accuracy, speed and memory in one record), and write it as a Hugging Face folder.

All models of a comparison see the same images in the same order. float32 products stay exact (no TF32): Newton's
inverse of SOFT needs their digits. The others run in bfloat16 on a GPU.
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attnorm.files import atomic_replace, write_json, write_text
from attnorm.models.load import silence_transformers
from attnorm.models.patch_state import patched_modules
from attnorm.models.private_names import replace_compiled_call, whole_windows
from attnorm.models.saving import ordinary_files
from attnorm.normalizers.registry import entries
from attnorm.normalizers.spec import parse_spec
from attnorm.provenance import package_versions
from attnorm.text import visible
from attnorm_lab.training.device import MemoryPeak
from attnorm_lab.training.run import LARGEST_GRADIENT, STEPS_BEFORE, WeightUpdate
from attnorm_lab.training.vision.data import ImageSplits, LabeledImages, as_model_input, shifted_and_mirrored
from attnorm_lab.training.vision.model import STAGES, VisionSettings, build_model

UNTIMED_STEPS = STEPS_BEFORE + 1  # the first steps compile kernels, one captures a graph
LOSS_EVERY = 20
SHOWN_CLASSES = 20  # in the model card
COMPILE_OPTIONS: dict[str, Any] = {"dynamic": False}
Record = dict[str, Any]


def train_vit(
    settings: VisionSettings,
    images: ImageSplits,
    device: torch.device,
    *,
    compiled: bool = False,
    report: Callable[[int, int, float], None] | None = None,
) -> tuple[Any, Record]:
    """Train and test one model. A loss that is not finite ends the training and is part of the record.

    compiled: compile the layers with torch.compile for training. report: called with the steps done, all steps, and the
    mean training loss of the epoch so far, which is read every LOSS_EVERY steps: a GPU waits for it.
    """
    train, test = images.train.to(device), images.test.to(device)
    model = build_model(settings, train.classes, train.side).to(device)
    blocks = repeated_blocks(model) if compiled else []
    update = _Update(model, settings, blocks)
    steps = settings.epochs * (len(train) // settings.batch)
    if not steps:
        raise ValueError(f"expected at least one batch of {settings.batch} images, got {len(train)} images.")
    random = torch.Generator().manual_seed(settings.seed)
    peak = MemoryPeak(device)  # recorded on a GPU only: that of a process covers all models it has trained
    course: list[float] = []
    shown_loss = math.nan
    problem, step, started, timed = None, 0, time.perf_counter(), 0
    clock = started
    for _ in range(settings.epochs):
        model.train()
        total = torch.zeros((), device=device)
        order = torch.randperm(len(train), generator=random)
        batches = order.split(settings.batch)[: len(train) // settings.batch]
        for done, indices in enumerate(batches, 1):
            if step == UNTIMED_STEPS:
                _finish(device)
                clock, timed = time.perf_counter(), step
            indices = indices.to(device)
            pixels = as_model_input(shifted_and_mirrored(train.pixels[indices], random))
            rate = settings.learning_rate * _schedule(step, steps, settings.warmup_share)
            total += update(rate, pixels, train.labels[indices])[0]
            step += 1
            if report is not None:
                if step == 1 or step % LOSS_EVERY == 0 or done == len(batches):
                    shown_loss = float(total) / done
                report(step, steps, shown_loss)
        course.append(float(total) / len(batches))
        if not math.isfinite(course[-1]):
            problem = f"the loss of epoch {len(course)} is {course[-1]}"
            break
    _finish(device)
    seconds = time.perf_counter() - clock
    for block in blocks:
        replace_compiled_call(block, None)  # testing has other shapes, for which it would be compiled again
    record: Record = {
        "settings": settings.as_dict(), "tokens": (train.side // settings.patch) ** 2, "problem": problem,
        "training_loss": [loss if math.isfinite(loss) else None for loss in course],
        "images_per_second": settings.batch * (step - timed) / seconds, "cuda_graph": update.captured is not None,
        "compiled": compiled,
        "peak_bytes": peak.bytes() if device.type == "cuda" else None,
        "seconds": time.perf_counter() - started,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained_on": len(train), "tested_on": len(test),
    }  # fmt: skip
    return model, record | ({"correct": None} if problem else evaluate(model, test, settings))


def _optimizer(model: nn.Module, settings: VisionSettings) -> torch.optim.Optimizer:
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, fused=decayed[0].is_cuda)


def _schedule(step: int, steps: int, warmup_share: float) -> float:
    """Linear warmup, then a cosine to 0."""
    warmup = max(1, round(warmup_share * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers, those without a patch too: all modules of the class of `encoder.layer.3`, if it is patched."""
    patched = next(iter(patched_modules(model)))  # such as encoder.layer.3.attention
    numbered = re.match(r".*\.\d+(?=\.)", patched)
    assert numbered is not None
    kind = type(model.get_submodule(numbered[0]))
    return [module for module in model.modules() if type(module) is kind]


class _Update(WeightUpdate):
    """One update per call."""

    def __init__(self, model: Any, settings: VisionSettings, blocks: Sequence[nn.Module] = ()) -> None:
        """blocks: the parts of the model to compile."""
        super().__init__(model, _optimizer(model, settings))
        self.settings = settings
        for block in blocks:
            block.compile(**COMPILE_OPTIONS)

    def _gradients(self, *inputs: Tensor) -> Tensor:
        pixels, labels = inputs
        loss = cross_entropy(_logits(self.model, pixels, self.settings), labels)
        loss.backward()
        return loss.detach()

    def _clip(self) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)

    def _can_be_captured(self) -> bool:
        return bool(next(self.model.parameters()).is_cuda)

    def _capturing(self) -> AbstractContextManager[None]:
        return whole_windows()


def _logits(model: Any, pixels: Tensor, settings: VisionSettings) -> Tensor:
    with torch.autocast(pixels.device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
        logits: Tensor = model(pixel_values=pixels).logits
    return logits.float()


@torch.no_grad()
def evaluate(model: Any, images: LabeledImages, settings: VisionSettings) -> Record:
    """Return how many images are classified right, the mean loss, and images per second in inference."""
    model.eval()
    correct = loss = torch.zeros((), device=images.pixels.device)
    started = time.perf_counter()
    for pixels, labels in zip(images.pixels.split(settings.batch), images.labels.split(settings.batch), strict=True):
        logits = _logits(model, as_model_input(pixels), settings)
        correct = correct + (logits.argmax(-1) == labels).sum()
        loss = loss + cross_entropy(logits, labels, reduction="sum")
    right, total = int(correct), float(loss)
    rate = len(images) / (time.perf_counter() - started)
    mean = total / len(images)
    return {
        "correct": right,
        "test_loss": mean if math.isfinite(mean) else None,
        "test_images_per_second": rate,
    }


def _finish(device: torch.device) -> None:
    """Wait for the GPU, so that a clock sees finished work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def save_vit(model: Any, record: Record, side: int, folder: Path, *, images: str = "", command: str = "") -> None:
    """Write the model, the processor that prepares images as in training, the record, and a model card.

    images: the source of the images, for the card. command: the command line, for the card.
    """
    with silence_transformers(), atomic_replace(folder) as draft:
        from transformers import ViTImageProcessor  # without torchvision the import has a notice

        with ordinary_files(draft):
            model.save_pretrained(draft)
        ViTImageProcessor(size={"height": side, "width": side}).save_pretrained(draft)
        write_text(draft / "README.md", model_card(record, list(model.config.id2label.values()), side, images, command))
        write_json(draft / "vision.json", record)


def model_card(record: Record, classes: Sequence[str], side: int, images: str, command: str) -> str:
    """Return README.md for the record of a trained model."""
    settings = record["settings"]
    name, options = parse_spec(settings["normalizer"])
    entry = entries().get(name)
    paper = f" ([{entry.paper}]({entry.url}))" if entry is not None and entry.url.startswith("https://") else ""
    chosen = "".join(f", {option}={value}" for option, value in options.items())
    pyramid = "architecture" in settings
    described = (
        f"A pyramid (SegFormer without reduction of keys): {STAGES} stages, the last one with softmax"
        if pyramid
        else "A vision transformer (ViT)"
    )
    landmarks = f" Landmarks: {settings['landmarks']}." if "landmarks" in settings else ""
    if record["correct"] is None:
        tested = f"Training stopped: {record['problem']}. The model was not tested."
    else:
        loss = "not finite" if record["test_loss"] is None else f"{record['test_loss']:.3f} nats"
        tested = (
            f"{record['correct'] / record['tested_on']:.1%} of {record['tested_on']:,} test images right, "
            f"loss {loss}. Guessing gets {1 / len(classes):.1%}."
        )
    alone = "\n`transformers` alone would load the same weights and run them with softmax.\n" * (name != "softmax")
    course = ["not finite" if loss is None else f"{loss:.3f}" for loss in record["training_loss"]]
    versions = " and ".join(" ".join(pair) for pair in package_versions("torch", "transformers").items())
    return f"""---
library_name: transformers
pipeline_tag: image-classification
tags:
- attnorm
---

# An image classifier of {record["parameters"] / 1e6:.2f} million parameters

{described}. Attention uses `{name}`{chosen}{paper}.{landmarks} {settings["layers"]} layers, {settings["heads"]} heads \
and width {settings["width"]}{" in the last stage" * pyramid}, patches of {settings["patch"]} x {settings["patch"]} \
pixels: {record["tokens"]:,} per image of {side} x {side}. Trained with `attnorm lab train vision`.

```python
import attnorm
from transformers import AutoImageProcessor
model = attnorm.from_pretrained("path/to/this/folder")
processor = AutoImageProcessor.from_pretrained("path/to/this/folder")
```
{alone}
## Test

{tested}

## Data

{images or "The source of the images was not stated when the model was trained."}

{record["trained_on"]:,} training images, shifted and mirrored at random, and {record["tested_on"]:,} test images. \
{len(classes)} classes: {", ".join(visible(each, 40) for each in classes[:SHOWN_CLASSES])}\
{", ..." * (len(classes) > SHOWN_CLASSES)}.

## Recipe
{f"{chr(10)}```{chr(10)}{command}{chr(10)}```{chr(10)}" if command else ""}
{settings["epochs"]} epochs in batches of {settings["batch"]}, AdamW, learning rate {settings["learning_rate"]:g} \
after a warmup of {settings["warmup_share"]:.0%} of the steps and then along a cosine to 0, weight decay \
{settings["weight_decay"]:g}, {settings["dtype"]}, seed {settings["seed"]}; {record["seconds"] / 60:.1f} minutes, \
{record["images_per_second"]:,.0f} images/s. Trained with {versions}. \
Training loss: {course[0]} in the first epoch, {course[-1]} in the last. `vision.json` has everything above as data.

## Limits

This model is meant for measurements, not for use.
"""
