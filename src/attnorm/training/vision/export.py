"""Write a trained image classifier as a Hugging Face folder with its record and a model card."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnorm.files import write_json, write_text
from attnorm.models.load import silence_transformers
from attnorm.normalizers.registry import entries
from attnorm.normalizers.spec import parse_spec
from attnorm.provenance import package_versions
from attnorm.text import visible
from attnorm.training.vision.model import STAGES
from attnorm.training.vision.train import Record

SHOWN_CLASSES = 20  # in the model card


def save_vit(model: Any, record: Record, side: int, folder: Path, *, images: str = "", command: str = "") -> None:
    """Write the model, the processor that prepares images as in training, the record, and a model card.

    images: the source of the images, for the card. command: the command line, for the card.
    """
    with silence_transformers():
        from transformers import ViTImageProcessor  # without torchvision the import has a notice

        model.save_pretrained(folder)
        ViTImageProcessor(size={"height": side, "width": side}).save_pretrained(folder)
    write_text(folder / "README.md", model_card(record, list(model.config.id2label.values()), side, images, command))
    write_json(folder / "vision.json", record)


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
pixels: {record["tokens"]:,} per image of {side} x {side}. Trained with `attnorm train vision`.

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
