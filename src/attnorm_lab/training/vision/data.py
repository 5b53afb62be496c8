"""Labeled images: an archive with one folder per class, or generated textures that need no download."""

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch import Tensor

SPLITS = ("train", "test")
PICTURES = (".jpg", ".jpeg", ".png")
LARGEST_SHIFT = 1 / 8  # of the side, in training


@dataclass(frozen=True)
class LabeledImages:
    """Images with labels. pixels: uint8 (N, 3, side, side). labels: (N,) indices of `classes`."""

    pixels: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def side(self) -> int:
        return self.pixels.shape[-1]

    def to(self, device: torch.device) -> "LabeledImages":
        return LabeledImages(self.pixels.to(device), self.labels.to(device), self.classes)


@dataclass(frozen=True)
class ImageSplits:
    train: LabeledImages
    test: LabeledImages


def read_archive(path: Path) -> ImageSplits:
    """Read train/CLASS/*.jpg and test/CLASS/*.jpg from a .tar archive, compressed or not.

    Raises:
        ValueError: Not such an archive, images of different sizes, or a class that only one split has.
    """
    pictures: dict[str, list[tuple[str, np.ndarray]]] = {split: [] for split in SPLITS}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = PurePosixPath(member.name)
                if not member.isfile() or name.suffix.lower() not in PICTURES or len(name.parts) < 3:
                    continue
                split, label = name.parts[-3:-1]
                contents = archive.extractfile(member)
                if split in SPLITS and contents is not None:
                    pictures[split].append((label, _picture(contents.read(), member.name)))
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ValueError(f"expected a .tar archive of images, got {path} ({error}).") from None
    classes = {split: sorted({label for label, _ in pictures[split]}) for split in SPLITS}
    if not classes["train"] or classes["train"] != classes["test"]:
        raise ValueError(
            f"expected train/CLASS/*.jpg and test/CLASS/*.jpg in {path}, got the classes "
            f"{classes['train']} in train and {classes['test']} in test."
        )
    names = tuple(classes["train"])
    train, test = (_labeled(pictures[split], names, path) for split in SPLITS)
    return ImageSplits(train, test)


def _picture(contents: bytes, name: str) -> np.ndarray:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(contents)) as image:
            return np.asarray(image.convert("RGB"))
    except UnidentifiedImageError:
        raise ValueError(f"expected an image that Pillow reads, got {name}.") from None


def _labeled(pairs: list[tuple[str, np.ndarray]], classes: tuple[str, ...], path: Path) -> LabeledImages:
    sizes = {picture.shape[:2] for _, picture in pairs}
    if len(sizes) != 1 or len(set(next(iter(sizes)))) != 1:
        raise ValueError(f"expected square images of one size in {path}, got {sorted(sizes)[:4]}.")
    pixels = torch.from_numpy(np.stack([picture for _, picture in pairs])).permute(0, 3, 1, 2).contiguous()
    labels = torch.tensor([classes.index(label) for label, _ in pairs])
    return LabeledImages(pixels, labels, classes)


TEXTURES = ("stripes", "columns", "checks", "rings")  # a mirrored or shifted image stays in its class


def generated_textures(train: int, test: int, side: int, seed: int = 0) -> ImageSplits:
    """Colored textures in noise; the class is the texture. Phase, width, color and contrast are random."""
    random = np.random.default_rng(seed)
    first, second = (_textures(count, side, random) for count in (train, test))
    return ImageSplits(first, second)


def _textures(count: int, side: int, random: np.random.Generator) -> LabeledImages:
    labels = random.integers(len(TEXTURES), size=count)
    y, x = np.mgrid[:side, :side] / side - 0.5
    turns = 2 * np.pi * random.uniform(1.5, 2.5, size=(count, 1, 1))
    phase = random.uniform(0, 2 * np.pi, size=(2, count, 1, 1))
    stripes, columns = np.sin(turns * y + phase[0]), np.sin(turns * x + phase[1])
    rings = np.sin(turns * np.hypot(x, y) * 2 + phase[0])
    wave = np.choose(labels[:, None, None], [stripes, columns, stripes * columns, rings])
    color = random.uniform(20, 90, size=(count, 3, 1, 1))
    noise = random.normal(0, 15, size=(count, 3, side, side))
    pixels = np.clip(128 + color * wave[:, None] + noise, 0, 255).astype(np.uint8)
    return LabeledImages(torch.from_numpy(pixels), torch.from_numpy(labels), TEXTURES)


def as_model_input(pixels: Tensor) -> Tensor:
    """Bytes to float32 between -1 and 1, as the image processor of ViT does by default."""
    return pixels.float() / 127.5 - 1


def shifted_and_mirrored(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image by up to an eighth of its side and mirror half of them.

    What a shift uncovers is the reflected image: black borders would be seen in training only, and models whose weights
    do not sum to 1 fail on test images without them.

    generator: on the CPU, so that a GPU trains on the same images.
    """
    count, _, side, _ = pixels.shape
    most = round(LARGEST_SHIFT * side)
    top, left = torch.randint(-most, most + 1, (2, count, 1), generator=generator)
    mirrored = torch.rand(count, 1, generator=generator) < 0.5
    along = torch.arange(side)
    rows = _reflected(top + along, side).to(pixels.device)
    columns = _reflected(left + torch.where(mirrored, along.flip(0), along), side).to(pixels.device)
    image = torch.arange(count, device=pixels.device)
    moved = pixels[image[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return moved.permute(0, 3, 1, 2)


def _reflected(index: Tensor, side: int) -> Tensor:
    """Indices beyond an edge count back from it."""
    return (side - 1) - ((side - 1) - index.abs()).abs()
