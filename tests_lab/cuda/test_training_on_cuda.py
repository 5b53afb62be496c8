"""A patched model trains on CUDA: checkpointed, compiled, under autocast, with the gradients of the CPU.

Skipped without a GPU. What is compiled takes long on a CPU: rehearse there with -k 'not compiled'.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

import attnorm
from attnorm.models.load import load
from attnorm.models.patch import Patch
from attnorm.models.private_names import whole_windows
from attnorm_lab.training.device import accelerated
from attnorm_lab.training.lm.attention import in_training
from attnorm_lab.training.lm.model import LMSettings, build_model
from attnorm_lab.training.lm.train import TrainingStep
from attnorm_lab.training.run import CapturedStep
from attnorm_lab.training.vision import model as vision_model
from attnorm_lab.training.vision.data import as_model_input, generated_textures
from attnorm_lab.training.vision.model import VisionSettings
from attnorm_lab.training.vision.train import _Update, repeated_blocks
from tests.cuda.on_device import DEVICE, FAMILIES, NEEDS_DEVICE, relative_error, tiny, tokens, wide
from tests.models.tiny import LEARNED, logits

pytestmark = NEEDS_DEVICE

TRAINED: dict[str, dict[str, Any]] = {**LEARNED, "entmax15": {}, "kneemax": {}, "stick_breaking": {}, "linear": {}}
PAIRS = [("llama", name) for name in TRAINED]
PAIRS += [(family, name) for family in FAMILIES if family != "llama" for name in ("ssmax", "entmax", "sink")]
COMPILED = ["ssmax", "entmax15", "sigmoid"]  # on SDPA and both kinds of our kernels


def gradients(
    model: PreTrainedModel, ids: Tensor, run: Callable[..., Any] | None = None, autocast: bool = False
) -> dict[str, Tensor]:
    model.zero_grad()
    device = model.device.type
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        found = logits(model, ids, use_cache=False) if run is None else run(ids, use_cache=False).logits
    # Every output counts for itself: after a layer norm a plain mean of squares is constant.
    probe = torch.linspace(-1, 1, found.numel(), device=device, dtype=torch.float64).reshape(found.shape)
    (found.double() * probe).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Over all gradients together."""
    assert found.keys() == expected.keys()
    return relative_error(*(torch.cat([g[name].flatten().cpu().double() for name in found]) for g in (found, expected)))


def assert_learns(handle: Patch) -> None:
    for parameter in handle.parameters():
        assert parameter.device.type == DEVICE
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()
        assert (parameter.grad != 0).all(), "one number per head, each of its own"


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_gradients_are_those_of_the_cpu(family: str, name: str) -> None:
    model, ids = tiny(family), tokens()
    twin = copy.deepcopy(model).cpu()
    handle = attnorm.patch(model, name, **TRAINED[name])
    attnorm.patch(twin, name, **TRAINED[name])
    found, expected = gradients(model, ids), gradients(twin.double(), ids.cpu())
    assert_learns(handle)
    assert error(found, expected) < 1e-3
    learned = {path: g for path, g in expected.items() if "attnorm" in path or "sinks" in path}
    if learned:
        assert error({path: found[path] for path in learned}, learned) < 1e-3


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_gradient_checkpointing_changes_no_gradient(family: str, name: str, autocast: bool) -> None:
    model, ids = tiny(family).train(), tokens()
    handle = attnorm.patch(model, name, **TRAINED[name])
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.config.attn_pdrop = model.config.attention_probs_dropout_prob = 0.0
    plain = {path: g.clone() for path, g in gradients(model, ids, autocast=autocast).items()}
    model.gradient_checkpointing_enable()
    again = gradients(model, ids, autocast=autocast)
    assert_learns(handle)
    assert error(again, plain) < (1e-2 if autocast else 1e-5)


@pytest.mark.parametrize("name", ["ssmax", "sigmoid", "scale_invariant", "softpick", "entmax15"])
def test_half_precision_gradients_follow_those_of_float64(name: str) -> None:
    """At most thrice the error that softmax has in the same precision."""
    ids = tokens(2, 40)
    errors = {}
    for normalizer in ("softmax", name):
        model = wide()
        twin = copy.deepcopy(model).cpu()
        attnorm.patch(model, normalizer)
        attnorm.patch(twin, normalizer)
        expected = gradients(twin.double(), ids.cpu())
        if DEVICE == "cuda" or normalizer in ("softmax", "ssmax", "entmax15"):
            assert error(gradients(model, ids), expected) < 1e-3
        errors[normalizer] = error(gradients(model, ids, autocast=True), expected)
    assert errors[name] < 3 * errors["softmax"] + 1e-3


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_model_says_the_same(name: str) -> None:
    model, ids = wide(layers=1), tokens(2, 40)
    attnorm.patch(model, name)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        found = torch.compile(model)(ids, use_cache=False).logits
    assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "checkpointing"), [("ssmax", True), ("entmax15", False), ("sigmoid", False)])
def test_a_compiled_training_step_under_autocast(name: str, checkpointing: bool) -> None:
    """As close to the exact gradients as the step that is not compiled."""
    model, ids = wide(layers=1).train(), tokens(2, 40)
    handle = attnorm.patch(model, name)
    exact = {path: g.clone() for path, g in gradients(model, ids).items()}
    if checkpointing:
        model.gradient_checkpointing_enable()
    eager = error(gradients(model, ids, autocast=True), exact)
    compiled = error(gradients(model, ids, torch.compile(model), autocast=True), exact)
    assert_learns(handle)
    assert compiled < 2 * eager + 1e-3


@pytest.mark.parametrize("name", ["ssmax", "entmax15"])
def test_the_bundled_model_learns_a_text(name: str) -> None:
    model = load("bundled", device=DEVICE, dtype=torch.float32).model.train()
    handle = attnorm.patch(model, name, train_length=256)
    model.gradient_checkpointing_enable()
    ids = torch.arange(2 * 256, device=DEVICE).reshape(2, 256) * 7 % model.config.vocab_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = [p.detach().clone() for p in handle.parameters()]
    losses = []
    for _ in range(6):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert all(not torch.equal(p, old) for p, old in zip(handle.parameters(), before, strict=True))


@pytest.mark.parametrize(
    "name",
    ["softmax", "ssmax", "entmax15", "sigmoid", "gaussian", "linear", "soft:landmarks=8:learned=32:normalised=true"],
)
def test_a_captured_step_trains_as_the_step_itself_does(name: str) -> None:
    settings = LMSettings(
        layers=2, heads=2, width=64, context=128, vocab=300, batch=4, dtype="bfloat16", normalizer=name, steps=8
    )
    batches = torch.randint(300, (8, 4, 129), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    courses = []
    for captures in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = build_model(settings, 300, 0).to(DEVICE).train()
        with (
            accelerated(torch.device(DEVICE), settings.dtype) as accelerator,
            in_training(model, compiled=True),
            whole_windows(),
        ):
            update = TrainingStep(model, settings, accelerator, compiled=True)
            if not captures:
                update._can_be_captured = lambda: False  # type: ignore[method-assign]
            courses.append([float(update(1e-3, windows)[0]) for windows in batches])
            assert (update.captured is not None) == captures
    # AdamW turns rounding of a small gradient into a step of the same size, so only the first digits are equal.
    assert_close(*(torch.tensor(course) for course in courses), rtol=5e-3, atol=0)


@pytest.mark.parametrize(
    ("name", "shared_keys"),
    [("softmax", False), ("gaussian", False), ("soft", True), ("linear", False), ("entmax15", False)],
)
def test_a_captured_image_classifier_has_the_gradients_of_the_step_itself(name: str, shared_keys: bool) -> None:
    settings = VisionSettings(
        layers=2, heads=2, width=64, patch=8, batch=32, normalizer=name, shared_keys=shared_keys,
        dtype="bfloat16" if DEVICE == "cuda" else "float32",
    )  # fmt: skip
    images = generated_textures(train=256, test=32, side=32).train.to(torch.device(DEVICE))
    model = vision_model.build_model(settings, images.classes, images.side).to(DEVICE).train()
    update = _Update(model, settings)
    batches = list(zip(images.pixels.split(32), images.labels.split(32), strict=True))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*CUDA graph")
        for pixels, labels in batches[:4]:
            update(1e-3, as_model_input(pixels), labels)
    assert (update.captured is not None) == (DEVICE == "cuda")
    for pixels, labels in batches[4:6]:
        found = _loss_and_gradients(update.captured or update._gradients, model, as_model_input(pixels), labels)
        expected = _loss_and_gradients(update._gradients, model, as_model_input(pixels), labels)
        for one, other in zip(found, expected, strict=True):
            # Kernels may add in another order; the gradients of a batch differ from those of the next by their size.
            assert float((one - other).norm()) <= 0.02 * float(other.norm())


@pytest.mark.parametrize(("name", "patch"), [("softmax", 8), ("gaussian", 8), ("soft", 8), ("soft", 1), ("linear", 1)])
def test_compiled_layers_of_an_image_classifier_have_the_gradients_of_the_others(name: str, patch: int) -> None:
    """With patches of 1 there are 1,025 tokens: torch 2.11 pads longer strides than 1,024, on a GPU alone."""
    settings = VisionSettings(layers=2, heads=2, width=64, patch=patch, batch=32, normalizer=name)
    images = generated_textures(train=32, test=32, side=32).train.to(torch.device(DEVICE))
    pixels = as_model_input(images.pixels)
    gradients = []
    for compiled in (False, True):
        model = vision_model.build_model(settings, images.classes, images.side).to(DEVICE).train()
        update = _Update(model, settings, repeated_blocks(model) if compiled else ())
        gradients.append(_loss_and_gradients(update._gradients, model, pixels, images.labels))
    for compiled_part, eager_part in zip(*reversed(gradients), strict=True):
        assert float((compiled_part - eager_part).norm()) <= 1e-3 * float(eager_part.norm())


def _loss_and_gradients(step: Callable[..., Tensor], model: Any, pixels: Tensor, labels: Tensor) -> list[Tensor]:
    """The loss and the gradients of all parameters, as one vector. A captured step writes its own gradients."""
    kept = [parameter.grad for parameter in model.parameters()]
    if not isinstance(step, CapturedStep):
        model.zero_grad(set_to_none=True)
    loss = step(pixels, labels)
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad = gradient
    return [loss.clone(), gradients.clone()]
