"""Images and sound as model inputs, and the image that a vision model sees, with its grid of patches."""

import base64
import inspect
import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnorm.arithmetic import ceil_div
from attnorm.models.inputs import Media, Text
from attnorm.models.load import LoadedModel
from attnorm.models.private_names import loaded_from

PROCESSORS = {"image": "AutoImageProcessor", "audio": "AutoFeatureExtractor"}
EXPECTED = {"image": "pixel_values", "audio": "input_features or input_values"}
LONGEST_SIDE = 160  # pixels in the report


def with_model_inputs(text: Text, loaded: LoadedModel) -> Text:
    """Convert an image or sound to model inputs; return any other text unchanged."""
    if not isinstance(text.content, Media):
        return text
    return replace(text, content=_model_inputs(text.content, loaded))


def _model_inputs(media: Media, loaded: LoadedModel) -> dict[str, Tensor]:
    processor = _processor(media, loaded)
    if media.kind == "image":
        processed = processor(images=_read_image(media.path), return_tensors="pt")
    else:
        rate = int(processor.sampling_rate)
        processed = processor(_read_sound(media.path, rate), sampling_rate=rate, return_tensors="pt")
    accepted = inspect.signature(loaded.model.forward).parameters
    model_inputs = {name: value for name, value in processed.items() if name in accepted and isinstance(value, Tensor)}
    if not model_inputs:
        raise ValueError(
            f"expected a model that reads {EXPECTED[media.kind]}, got {type(loaded.model).__name__}, which takes none "
            f"of {', '.join(processed)}. Give it a text with --text."
        )
    dtype = loaded.model.dtype
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in model_inputs.items()}


def _processor(media: Media, loaded: LoadedModel) -> Any:
    import transformers

    source = loaded.source if loaded.source is not None else loaded_from(loaded.model.config)
    try:
        processor = getattr(transformers, PROCESSORS[media.kind]).from_pretrained(
            source, trust_remote_code=loaded.trusted, local_files_only=isinstance(source, Path)
        )
    except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
        reason = (str(error).strip() or type(error).__name__).split(". ")[0].splitlines()[0]
        expected = {"image": "an image processor", "audio": "a feature extractor for sound"}[media.kind]
        raise ValueError(
            f"expected {expected} beside the model {loaded.name}, got none that transformers can load ({reason}). "
            f"Save one in the model's folder: transformers.{PROCESSORS[media.kind]}."
            "from_pretrained(...).save_pretrained(folder)"
        ) from error
    if media.kind == "audio" and not hasattr(processor, "sampling_rate"):
        raise ValueError(f"expected a model that reads sound, got {loaded.name} with {type(processor).__name__}.")
    return processor


def _read_image(path: Path) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except UnidentifiedImageError:
        raise ValueError(f"expected an image that Pillow reads (PNG, JPEG, ...), got {path}. Convert it.") from None
    except OSError as error:
        raise ValueError(f"cannot read the image {path}: {error.strerror or error}. Check the file.") from None


def _read_sound(path: Path, rate: int) -> np.ndarray:
    """Read a sound as one channel in float32, at the sampling rate of the model."""
    from scipy.signal import resample_poly

    samples, own_rate = _samples(path)
    if samples.ndim == 2:
        samples = samples.mean(1)
    if not samples.size:
        raise ValueError(f"expected sound in {path}, got a file without samples.")
    if own_rate != rate:
        common = int(np.gcd(own_rate, rate))
        samples = resample_poly(samples, rate // common, own_rate // common)
    return np.ascontiguousarray(samples, dtype=np.float32)


def _samples(path: Path) -> tuple[np.ndarray, int]:
    """Return samples between -1 and 1, (samples,) or (samples, channels), and the sampling rate."""
    if not path.is_file():
        raise ValueError(f"cannot read the sound {path}: there is no such file. Check the path.")
    if path.suffix.lower() != ".wav":
        return _other_samples(path)
    from scipy.io import wavfile

    try:
        rate, samples = wavfile.read(path)
    except ValueError as error:
        raise ValueError(f"expected a WAV file, got {path} ({error}). Convert it.") from None
    if samples.dtype == np.uint8:
        return (samples.astype(np.float32) - 128) / 128, rate
    if np.issubdtype(samples.dtype, np.integer):
        return samples / float(-int(np.iinfo(samples.dtype).min)), rate
    return samples, rate


def _other_samples(path: Path) -> tuple[np.ndarray, int]:
    try:
        import soundfile  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise ValueError(f"expected a .wav file, got {path}. Convert it, or run: pip install soundfile") from None
    try:
        samples, rate = soundfile.read(path)
    except soundfile.LibsndfileError as error:
        raise ValueError(f"cannot read the sound {path}: {str(error).rstrip('.')}. Convert it to WAV.") from None
    return np.asarray(samples), int(rate)


@dataclass(frozen=True)
class PatchPicture:
    """An image and its grid of patches, which are the last rows x columns tokens of the model's input."""

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
    from PIL import Image

    step = ceil_div(max(pixels_CHW.shape[-2:]), LONGEST_SIDE)
    small = pixels_CHW[:, ::step, ::step].detach().float().cpu().nan_to_num()
    small = (small - small.min()) / (small.max() - small.min()).clamp(min=1e-6)
    bytes_HWC = (255 * small).round().to(torch.uint8).expand(3, -1, -1).permute(1, 2, 0).contiguous()
    png = io.BytesIO()
    Image.fromarray(bytes_HWC.numpy()).save(png, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
