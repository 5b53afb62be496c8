"""A .gguf file (llama.cpp's format) as a model: configuration, weights and tokenizer come out of the one file.

Transformers dequantizes the weights, so what is measured is the quantized model at full arithmetic precision.
"""

import importlib.util
from pathlib import Path
from typing import Any

from attnorm.models.source import GGUF, CannotLoad

MAGIC = b"GGUF"
NEEDED = ("gguf", "accelerate")  # by transformers, to read one


def is_gguf(source: str | Path) -> bool:
    return isinstance(source, Path) and source.suffix == GGUF


def in_its_folder(file: Path) -> tuple[Path, dict[str, Any]]:
    """The folder and the options by which transformers' from_pretrained finds a .gguf file.

    Raises:
        CannotLoad: A package is missing, or the file is something else.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise CannotLoad(f"reading {file.name} needs {' and '.join(missing)}. Run: pip install {' '.join(missing)}")
    with file.open("rb") as opened:
        start = opened.read(len(MAGIC))
    if start != MAGIC:
        raise CannotLoad(
            f"expected a file that starts with {MAGIC.decode()}, got {start!r} in {file}. It is damaged or no GGUF "
            "file; download it again."
        )
    return file.absolute().parent, {"gguf_file": file.name}
