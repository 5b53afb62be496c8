"""A small ViT or pyramid with a normalizer: its settings, and how it is built.

A pyramid merges 2 x 2 patches between its stages by strided convolutions, as SOFT's models do; its early stages have
most tokens. It is transformers' SegFormer without its reduction of keys. As in SOFT, the last stage keeps softmax. Only
the normalizer differs between models of a comparison: they start from the same weights.
"""

import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnorm.mechanisms.soft import Soft, square_means
from attnorm.models.patch import patch
from attnorm.models.patch_state import normalizer_of, patched_modules
from attnorm.normalizers.spec import parse_spec

STAGES = 3  # of a pyramid: 32 x 32 pixels with patches of 2 become 16 x 16, 8 x 8 and 4 x 4 tokens
ARCHITECTURES = ("vit", "pyramid")
LANDMARKS = ("segments", "squares", "convolution")


@dataclass(frozen=True, kw_only=True)
class VisionSettings:
    """One model and its training. Sizes are of a small ViT for images of 32 x 32.

    Raises:
        ValueError: A value is unknown, or sizes do not fit together.
    """

    architecture: str = "vit"  # or "pyramid", whose last stage has `width` and `heads`, the others a half and a quarter

    normalizer: str = "softmax"  # with options, as in soft:normalised=true
    shared_keys: bool = False  # K = Q, as in SOFT: one projection for both
    squares: int = 0  # of `soft`: landmarks are the means of squares x squares parts of the image; 0: segments
    landmarks: str = "segments"  # of `soft`; squares or convolution: means or learned, saved with the model
    landmark_side: int = 4  # with those, landmarks along the side of an image
    patch: int = 4
    layers: int = 6
    heads: int = 3
    width: int = 192
    epochs: int = 30
    batch: int = 256
    learning_rate: float = 1e-3
    warmup_share: float = 0.1
    weight_decay: float = 0.05
    seed: int = 0
    dtype: str = "float32"  # float32 or bfloat16 (autocast)

    def __post_init__(self) -> None:
        for name, value, accepted in (
            ("architecture", self.architecture, ARCHITECTURES),
            ("landmarks", self.landmarks, LANDMARKS),
        ):
            if value not in accepted:
                raise ValueError(f"{name}: expected one of {', '.join(accepted)}, got {value!r}.")
        if self.landmarks != LANDMARKS[0] and parse_spec(self.normalizer)[0] != "soft":
            raise ValueError(f"expected the normalizer soft with landmarks={self.landmarks!r}, got {self.normalizer}.")
        if self.landmarks != LANDMARKS[0] and self.squares:
            raise ValueError(f"expected landmarks or squares, got both, {self.landmarks} and {self.squares}.")
        if self.landmark_side < 1:
            raise ValueError(f"landmark_side must be at least 1, got {self.landmark_side}")

    def as_dict(self) -> dict[str, Any]:
        """Return the settings without those about architectures and landmarks that are not used."""
        unused = {"architecture"} if self.architecture == ARCHITECTURES[0] else set()
        if self.landmarks == LANDMARKS[0]:
            unused |= {"landmarks", "landmark_side"}
        return {name: value for name, value in asdict(self).items() if name not in unused}

    @property
    def stage_depths(self) -> list[int]:
        """Layers of each stage: equally many, and what remains to the later ones."""
        if self.architecture == ARCHITECTURES[0]:
            return [self.layers]
        return [(self.layers + stage) // STAGES for stage in range(STAGES)]

    @property
    def stage_widths(self) -> list[int]:
        return [self.width // 2 ** (len(self.stage_depths) - 1 - stage) for stage in range(len(self.stage_depths))]

    @property
    def stage_heads(self) -> list[int]:
        stages = len(self.stage_depths)
        return [max(1, self.heads // 2 ** (stages - 1 - stage)) for stage in range(stages)]


def build_model(settings: VisionSettings, classes: tuple[str, ...], side: int) -> Any:
    """Return a patched image classifier of transformers with random weights.

    Raises:
        ValueError: Patch, layers, width, heads or landmarks do not fit together or to the image.
    """
    if side % settings.patch:
        raise ValueError(f"expected a patch that divides the side of the image, {side}, got {settings.patch}.")
    torch.manual_seed(settings.seed)
    return (_build_vit if settings.architecture == "vit" else _build_pyramid)(settings, classes, side)


def _build_pyramid(settings: VisionSettings, classes: tuple[str, ...], side: int) -> Any:
    """Return a SegformerForImageClassification whose attention sees all tokens, patched in all stages but the last."""
    from transformers import SegformerConfig, SegformerForImageClassification

    depths, widths, heads = settings.stage_depths, settings.stage_widths, settings.stage_heads
    tokens = side // settings.patch
    if min(depths) < 1 or tokens % 2 ** (STAGES - 1):
        raise ValueError(
            f"expected at least {STAGES} layers and a side of {2 ** (STAGES - 1)} patches or a multiple for {STAGES} "
            f"stages, got {settings.layers} layers and {tokens} patches along the side. Use a smaller patch."
        )
    if any(width % head for width, head in zip(widths, heads, strict=True)) or settings.width % 2 ** (STAGES - 1):
        raise ValueError(f"expected widths that are multiples of the heads, got {widths} and {heads} heads by stage.")
    config = SegformerConfig(
        num_encoder_blocks=STAGES, depths=depths, sr_ratios=[1] * STAGES, hidden_sizes=widths,
        # Windows overlap their neighbors by half, as in SOFT and SegFormer.
        patch_sizes=[2 * settings.patch - 1 if settings.patch > 1 else 3] + [3] * (STAGES - 1),
        strides=[settings.patch] + [2] * (STAGES - 1), num_attention_heads=heads, mlp_ratios=[4] * STAGES,
        drop_path_rate=0.0, classifier_dropout_prob=0.0,
        id2label=dict(enumerate(classes)), label2id={name: index for index, name in enumerate(classes)},
    )  # fmt: skip
    build: Any = SegformerForImageClassification  # its constructor has no annotations
    model = build(config)
    first = 0
    for stage in range(STAGES - 1):
        layers = range(first, first + depths[stage])
        _replace_softmax(model, settings, layers, tokens // 2**stage, widths[stage] // heads[stage])
        first += depths[stage]
    _share_all_keys(model, settings)
    return model


def _replace_softmax(model: Any, settings: VisionSettings, layers: range, side: int, head_width: int) -> None:
    """Put the normalizer into these layers, whose images are side x side tokens."""
    name, options = parse_spec(settings.normalizer)
    if settings.landmarks != LANDMARKS[0]:
        if side % min(side, settings.landmark_side):
            raise ValueError(f"expected landmark_side to divide {side} tokens, got {settings.landmark_side}.")
        options = {**options, "stride": side // min(side, settings.landmark_side)}
        if settings.landmarks == "convolution":
            options["convolution"] = head_width
    patch(model, name, layers=layers, **options)


def _share_all_keys(model: Any, settings: VisionSettings) -> None:
    if settings.shared_keys:
        for module in patched_modules(model).values():
            _share_keys(module)


def _build_vit(settings: VisionSettings, classes: tuple[str, ...], side: int) -> Any:
    """Return a patched ViTForImageClassification."""
    from transformers import ViTConfig, ViTForImageClassification

    if settings.width % settings.heads:
        raise ValueError(f"expected a width that is a multiple of {settings.heads} heads, got {settings.width}.")
    config = ViTConfig(
        image_size=side, patch_size=settings.patch, hidden_size=settings.width, num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads, intermediate_size=4 * settings.width,
        id2label=dict(enumerate(classes)), label2id={name: index for index, name in enumerate(classes)},
    )  # fmt: skip
    model = ViTForImageClassification(config)
    _replace_softmax(model, settings, range(settings.layers), side // settings.patch, settings.width // settings.heads)
    _share_all_keys(model, settings)
    if settings.squares:
        for module in patched_modules(model).values():
            mechanism = normalizer_of(module)
            if not isinstance(mechanism, Soft):
                raise ValueError(
                    f"expected the normalizer soft with squares={settings.squares}, got {settings.normalizer}."
                )
            mechanism.landmarks = partial(square_landmarks, squares=settings.squares)
    return model


def square_landmarks(keys_BHLD: Tensor, squares: int) -> Tensor:
    """Return the class token and the means of squares x squares parts of the image, (B, H, 1 + squares^2, D).

    The paper pools by a learned convolution over the image. Means of the parts need no parameters.
    """
    token, patches = keys_BHLD[..., :1, :], keys_BHLD[..., 1:, :]
    return torch.cat([token, square_means(patches, min(squares, math.isqrt(patches.shape[-2])))], dim=-2)


def _share_keys(attention: nn.Module) -> None:
    """Use the projection of the queries for the keys too."""
    for queries, keys in (("q_proj", "k_proj"), ("query", "key")):  # names differ between versions of transformers
        if hasattr(attention, queries):
            setattr(attention, keys, getattr(attention, queries))
            return
    raise ValueError(f"expected an attention module with q_proj or query, got {type(attention).__name__}.")
