"""Train an image classifier and test it: accuracy, speed and memory in one record.

All models of a comparison see the same images in the same order. float32 products stay exact (no TF32): Newton's
inverse of SOFT needs their digits. The others run in bfloat16 on a GPU.
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attnorm.models.patch_state import patched_modules
from attnorm.training.device import MemoryPeak
from attnorm.training.lm.step import STEPS_BEFORE, CapturedStep, capture, whole_windows
from attnorm.training.vision.data import ImageSplits, LabelledImages, as_model_input, shifted_and_mirrored
from attnorm.training.vision.model import VisionSettings, build_model

UNTIMED_STEPS = STEPS_BEFORE + 1  # the first steps compile kernels, one captures a graph
LOSS_EVERY = 20
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
            total += update(pixels, train.labels[indices], rate)
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
        block._compiled_call_impl = None  # testing has other shapes, for which it would be compiled again
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


class _Update:
    """One update of the weights per call. On a GPU loss and gradients are a CUDA graph from the fourth call on."""

    def __init__(self, model: Any, settings: VisionSettings, blocks: Sequence[nn.Module] = ()) -> None:
        """blocks: the parts of the model to compile."""
        self.model, self.settings, self.optimizer = model, settings, _optimizer(model, settings)
        for block in blocks:
            block.compile(**COMPILE_OPTIONS)
        self.captured: CapturedStep | None = None
        self._calls = 0

    def __call__(self, pixels: Tensor, labels: Tensor, rate: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self._calls == STEPS_BEFORE and pixels.is_cuda:
            with whole_windows():
                self.captured = capture(self._gradients, pixels, labels)
            if self.captured is None:
                self.optimizer.zero_grad()
        self._calls += 1
        loss = (self._gradients if self.captured is None else self.captured)(pixels, labels)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.captured is None:
            self.optimizer.zero_grad()
        return loss

    def _gradients(self, pixels: Tensor, labels: Tensor) -> Tensor:
        loss = cross_entropy(_logits(self.model, pixels, self.settings), labels)
        loss.backward()
        return loss.detach()


def _logits(model: Any, pixels: Tensor, settings: VisionSettings) -> Tensor:
    with torch.autocast(pixels.device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
        logits: Tensor = model(pixel_values=pixels).logits
    return logits.float()


@torch.no_grad()
def evaluate(model: Any, images: LabelledImages, settings: VisionSettings) -> Record:
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
