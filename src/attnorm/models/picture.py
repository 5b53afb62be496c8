"""The image that a vision model sees, and the grid of patches that are its tokens: what a report needs to draw them."""

import base64
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

LONGEST_SIDE = 160  # pixels in the report


@dataclass(frozen=True)
class PatchPicture:
    """The patches are the last rows x columns tokens; class and register tokens come before them."""

    png: str  # a data URI
    rows: int
    columns: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def picture_of(model_inputs: Mapping[str, Tensor], config: Any) -> PatchPicture | None:
    """Return the first image of a batch, as the model sees it; None if the inputs are not one image in square patches.

    config: of the model; the size of its patches is `patch_size`.
    """
    pixels = model_inputs.get("pixel_values")
    patch = getattr(config, "patch_size", None)
    if pixels is None or pixels.dim() != 4 or pixels.shape[1] not in (1, 3) or not isinstance(patch, int):
        return None
    height, width = pixels.shape[-2:]
    if height < patch or width < patch:
        return None
    return PatchPicture(_data_uri(pixels[0]), height // patch, width // patch)


def _data_uri(pixels_CHW: Tensor) -> str:
    """Undo the normalization up to brightness and contrast: smallest value black, largest white."""
    step = -(-max(pixels_CHW.shape[-2:]) // LONGEST_SIDE)
    small = pixels_CHW[:, ::step, ::step].detach().float().cpu().nan_to_num()
    small = (small - small.min()) / (small.max() - small.min()).clamp(min=1e-6)
    bytes_HWC = (255 * small).round().to(torch.uint8).expand(3, -1, -1).permute(1, 2, 0).contiguous()
    return "data:image/png;base64," + base64.b64encode(_png(bytes_HWC)).decode()


def _png(bytes_HWC: Tensor) -> bytes:
    """Return an RGB image as PNG; Pillow may not be installed."""
    height, width, _ = bytes_HWC.shape
    lines = b"".join(b"\0" + line.numpy().tobytes() for line in bytes_HWC)  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [_chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(lines, 9)), _chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
