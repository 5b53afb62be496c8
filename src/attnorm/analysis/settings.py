"""What is measured and how: the parameters of a run, checked once, in the form that identifies its parts."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch

from attnorm.normalizers.contract import Mechanism, Normalizer
from attnorm.normalizers.registry import resolve
from attnorm.suggest import did_you_mean

GROUPS = ("core", "gradient", "vectors", "sensitivity", "coverage")
USUAL_GROUPS = "core"  # what all verdicts rest on; with it, analyze costs at most twice the plain pass on a CPU
Vectors = Literal["values", "inputs"]
Rows = int | Literal["auto", "all", "last"]
Windows = int | Literal["auto"]

BUDGET = 8192  # tokens of each text, over all its windows

FEWEST_ROWS_OF_A_WINDOW = 8  # with the costly numbers, where several windows share them
VECTOR_ROWS, FEWEST_VECTOR_ROWS = 16, 4  # of a run on some rows, up to 1,024 keys and of any length

READ_KEYS, READ_ROWS, MOST_READ_KEYS = 8, 4, 1024  # by default: keys per row, rows; and the most keys

EPSILONS = (1e-3, 1e-1, 10.0)  # the sizes of the papers' finite differences; columns gain_* of the sensitivity table


@dataclass(frozen=True, kw_only=True)
class AnalysisSettings:
    """Plain values only: they go into the manifest and into the key of every part."""

    normalizers: dict[str, str]  # name in the tables -> what it is, so that two of one name cannot be mistaken
    top_n: tuple[int, ...]
    rows: Rows
    vectors: Vectors
    vector_rows: int | None  # None: by the length, see vector_rows_at
    metrics: tuple[str, ...]
    temperatures: tuple[float, ...]
    epsilons: tuple[float, ...]
    seed: int
    windows: int | Literal["auto"] = 1  # as asked for
    window_count: int = 1  # of the text that has most; they share the rows of the costly numbers
    budget: int = 0
    bos: bool | None = None
    read_keys: int = 0  # heaviest keys of each chosen row; 0: no token of the text is kept
    read_rows: int | tuple[int, ...] = READ_ROWS  # how many rows, or which

    def as_dict(self) -> dict[str, Any]:
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {**plain, "normalizers": list(self.normalizers), "normalizer_details": dict(self.normalizers)}


def settings_of(
    *,
    normalizers: Mapping[str, Normalizer | None],
    top_n: Sequence[int] | int,
    rows: Rows,
    vectors: str,
    vector_rows: int | None,
    metrics: str | Iterable[str],
    temperatures: Sequence[float],
    seed: int,
    read_keys: int = 0,
    read_rows: int | Sequence[int] = READ_ROWS,
) -> AnalysisSettings:
    if rows not in ("auto", "all", "last") and not (_is_integer(rows) and int(rows) >= 1):
        raise ValueError(f"rows must be 'auto', 'all', 'last' or a number of rows of at least 1, got {rows!r}")
    if vectors not in get_args(Vectors):
        raise ValueError(f"unknown vectors {vectors!r}; {did_you_mean(vectors, get_args(Vectors))}")
    if vector_rows is None and not _is_integer(rows):
        vector_rows = 64
    if vector_rows is not None and (not _is_integer(vector_rows) or vector_rows < 1):
        raise ValueError(f"vector_rows must be a whole number of at least 1, got {vector_rows!r}")
    if not _is_integer(seed):
        raise ValueError(f"seed must be a whole number, got {seed!r}")
    return AnalysisSettings(
        normalizers={name: description(normalizer) for name, normalizer in normalizers.items()},
        top_n=_whole_numbers("top_n", top_n),
        rows=rows if isinstance(rows, str) else int(rows),
        vectors=vectors,  # type: ignore[arg-type]  # one of them, checked above
        vector_rows=vector_rows,
        metrics=groups(metrics),
        temperatures=_temperatures(temperatures),
        epsilons=EPSILONS,
        seed=int(seed),
        read_keys=_read_keys(read_keys),
        read_rows=_read_rows(read_rows),
    )


def vector_rows_at(settings: AnalysisSettings, n: int) -> int:
    """How many of the longest rows of a window, of n keys, get the costly numbers; windows share vector_rows.

    Where a number of rows was asked for, speed was: 16 rows of up to 1,024 keys, which give separability against its
    null nearly as all rows do, and fewer longer ones, so that their cost stays within that of the pass itself.
    """
    if settings.vector_rows is not None:
        shared = -(-settings.vector_rows // settings.window_count)
        return max(min(settings.vector_rows, FEWEST_ROWS_OF_A_WINDOW), shared)
    asked = settings.rows if isinstance(settings.rows, int) else 0
    return max(FEWEST_VECTOR_ROWS, asked // 16, min(VECTOR_ROWS, VECTOR_ROWS * 1024 // max(n, 1)))


def groups(metrics: str | Iterable[str]) -> tuple[str, ...]:
    """The groups to measure, in their own order: "all", one name, or several. Core and gradient come from one pass."""
    if metrics == "all":
        return GROUPS
    asked = [metrics] if isinstance(metrics, str) else list(metrics)
    for name in asked:
        if name not in GROUPS:
            raise ValueError(f"unknown metric group {name!r}; {did_you_mean(name, ('all', *GROUPS))}")
    return tuple(name for name in GROUPS if name in ("core", "gradient", *asked))


def named_normalizers(normalizers: Any) -> dict[str, Normalizer | None]:
    """Name in the tables -> normalizer, None for "model": whatever the model itself runs."""
    asked = [normalizers] if isinstance(normalizers, str | Normalizer | Mechanism) else list(normalizers)
    if not asked:
        raise ValueError("normalizers is empty; leave it out to measure the model as it runs, ('model',)")
    named: dict[str, Normalizer | None] = {}
    for one in asked:
        chosen = None if isinstance(one, str) and one == "model" else resolve(one)
        if isinstance(chosen, Mechanism):
            raise TypeError(
                f"{chosen.name!r} is no function of a row of logits, so it cannot be measured on the model's logits; "
                "patch it into the model and analyze that, with normalizers=('model',)"
            )
        name = "model" if chosen is None else chosen.name
        if name in named:
            raise ValueError(f"two normalizers are named {name!r}; give one of them another .name")
        if chosen is not None and one != name and name == "model":
            raise ValueError(
                "the name 'model' stands for what the model itself runs; give the normalizer another .name"
            )
        named[name] = chosen
    return named


def description(normalizer: Normalizer | Mechanism | None) -> str:
    """Structure and parameters in one line: equal for equal normalizers, different for different ones."""
    if normalizer is None:
        return "as the model runs"
    digest = hashlib.sha256()
    for name, tensor in sorted(normalizer.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().to("cpu", torch.float64).numpy().tobytes())
    structure = " ".join(repr(normalizer).split())
    plain = sorted(
        (key, repr(value))
        for part in normalizer.modules()
        for key, value in vars(part).items()
        if _is_plain(key, value)
    )
    digest.update(repr((structure, plain)).encode())
    return f"{structure} {digest.hexdigest()[:16]}"


def _is_plain(name: str, value: Any) -> bool:
    """An option kept as an attribute (alpha, k, a window): nn.Module's repr does not show it."""
    return not name.startswith("_") and name != "training" and isinstance(value, str | int | float | bool | tuple)


def _whole_numbers(name: str, values: Sequence[int] | int) -> tuple[int, ...]:
    numbers: list[Any] = [values] if isinstance(values, int) else list(values)
    if not numbers or not all(_is_integer(value) and value >= 1 for value in numbers):
        raise ValueError(f"{name} must be whole numbers of at least 1, e.g. (1, 5, 10), got {values!r}")
    return tuple(sorted({int(value) for value in numbers}))


def _read_keys(value: Any) -> int:
    if not _is_integer(value) or not 0 <= value <= MOST_READ_KEYS:
        raise ValueError(
            f"expected read_keys (--tokens) between 0 and {MOST_READ_KEYS}, got {value!r}. Give the number of keys to "
            "list for each row, or 0 for none."
        )
    return int(value)


def _read_rows(value: Any) -> int | tuple[int, ...]:
    if _is_integer(value) and value >= 1:
        return int(value)
    listed = [] if isinstance(value, str | int | float) or value is None else list(value)
    if not listed or not all(_is_integer(row) for row in listed):
        raise ValueError(
            f"expected read_rows as a number of rows or a list of rows, got {value!r}. Give 4 for four rows spread "
            "over the text, or (-1, 120) for the last row and row 120."
        )
    return tuple(sorted({int(row) for row in listed}))


def _temperatures(values: Sequence[float]) -> tuple[float, ...]:
    numbers = [float(value) for value in values]
    if not numbers or not all(0 < value < math.inf for value in numbers):
        raise ValueError(f"temperatures must be positive numbers, e.g. (0.5, 1, 2), got {values!r}")
    return tuple(sorted(set(numbers)))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
