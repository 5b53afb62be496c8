"""Check files from elsewhere before transformers builds a model from them.

A few bytes of a config.json or of a .gguf file can ask for a billion layers, or for an array longer than the file.
transformers would build or read them for minutes. A config can also name a repository of the hub, whose code
transformers would fetch and run as the attention. Shapes are not compared here: transformers compares them before it
allocates weights.
"""

import json
import mmap
import re
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from attnorm.models.private_names import remove_foreign_kernels
from attnorm.models.source import CannotLoad

MODULES = re.compile(r"(^|_)(layers?|blocks?|depths?|experts)$|(block|expert)_count$")
LABELS = re.compile("^num_labels$")
# Models that share weights between layers, or stack those of all experts, have fewer tensors than modules.
MOST_MODULES, MOST_LABELS = 1000, 1_000_000
MOST_BYTES = 16 << 20  # of a config.json; 22,000 labels are 1 MiB

GGUF_VERSIONS = (2, 3)
STRING, ARRAY = 8, 9  # types of metadata; the others are numbers of fixed size
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MOST_DIMENSIONS = 4  # of a tensor in llama.cpp
ALIGNMENT = "general.alignment"


def check_config(folder: Path) -> None:
    """Raise CannotLoad if the config.json of a folder asks for more modules than its weights can fill."""
    file = folder / "config.json"
    if not file.is_file():  # transformers explains it
        return
    if (size := file.stat().st_size) > MOST_BYTES:
        raise CannotLoad(f"expected at most {MOST_BYTES:,} bytes, got {size:,} in {file}. Download it again.")
    try:
        config = json.loads(file.read_bytes())
    except ValueError:  # the same
        return
    tensors = 0
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as weights:
            tensors += len(weights.keys())
    _check_counts(config, tensors, f"config.json of {folder}")


def _check_counts(config: Any, tensors: int, source: str) -> None:
    for key, value in _numbers(config):
        for pattern, most in ((MODULES, max(tensors, MOST_MODULES)), (LABELS, MOST_LABELS)):
            if pattern.search(key) and value > most:
                raise CannotLoad(
                    f"expected {key} of at most {most:,} for weights of {tensors:,} tensors, got {value} in the "
                    f"{source}. The file is damaged or belongs to another model. Download it again."
                )


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield all numbers of a JSON value, each with the key that it or its list has."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, key)
    elif isinstance(value, int | float):
        yield key, value


def check_gguf(file: Path) -> None:
    """Raise CannotLoad if the header of a .gguf file claims more than the file or its weights hold."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            metadata, tensors = _Header(content).read()
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError) as error:
            raise CannotLoad(
                f"the header of {file} is damaged or cut short ({type(error).__name__}: {error}). Download it again."
            ) from error
    _check_counts(metadata, tensors, f"header of {file}")


class _Header:
    """Read the header of a .gguf file from its start. Every read beyond the end of the file is a struct.error."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.at, self.order = content, 4, "<"

    def read(self) -> tuple[dict[str, Any], int]:
        """Return the numbers of the metadata and the number of tensors, whose places in the file are checked."""
        if (version := self._number("I")) >= 1 << 16:
            self.order, version = ">", int.from_bytes(version.to_bytes(4, "big"), "little")
        if version not in GGUF_VERSIONS:
            raise struct.error(f"expected version 2 or 3, got {version}")
        tensors, entries = self._number("Q"), self._number("Q")
        metadata = {}
        for _ in range(entries):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        ends = [self._tensor_end() for _ in range(tensors)]
        alignment = metadata.get(ALIGNMENT) or 32
        data = -(-self.at // alignment) * alignment
        if ends and data + max(ends) > len(self.content):
            raise struct.error(f"expected {data + max(ends):,} bytes, got {len(self.content):,}")
        return metadata, tensors

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(self.order + code, self.content, self.at)
        self._skip(struct.calcsize(code))
        return value

    def _skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self.content):
            raise struct.error(f"expected {self.at:,} bytes, got {len(self.content):,}")

    def _string(self) -> str:
        size = self._number("Q")
        self._skip(size)
        return self.content[self.at - size : self.at].decode()

    def _value(self, kind: int) -> Any:
        """Return a number; None for strings and arrays, which are not compared with the weights."""
        if kind == STRING:
            self._skip(self._number("Q"))
            return None
        if kind != ARRAY:
            return self._number(NUMBERS[kind])
        kind, length = self._number("I"), self._number("Q")
        if kind in NUMBERS:
            self._skip(length * struct.calcsize(NUMBERS[kind]))
        else:
            for _ in range(length):
                self._value(kind)
        return None

    def _tensor_end(self) -> int:
        """Return where the data of the next tensor ends, from the start of all data."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        self._string()
        if (dimensions := self._number("I")) > MOST_DIMENSIONS:
            raise struct.error(f"expected a tensor of at most {MOST_DIMENSIONS} dimensions, got {dimensions}")
        elements = 1
        for _ in range(dimensions):
            elements *= self._number("Q")
        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(self._number("I"))]
        except ValueError as error:
            raise struct.error(str(error)) from error
        return int(self._number("Q") + elements // block * size)


def ignore_foreign_kernels(config: Any, name: str) -> bool:
    """Remove kernels that are not part of transformers from a config, with a warning; return whether there were any."""
    if kernels := remove_foreign_kernels(config):
        warnings.warn(
            f"{name}: the config names the kernel {' and '.join(map(repr, dict.fromkeys(kernels)))}, which may be code "
            "of a hub repository. attnorm ignores it, and the kernels of transformers run.",
            stacklevel=3,
        )
    return bool(kernels)
