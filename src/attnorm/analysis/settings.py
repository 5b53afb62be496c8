"""The settings of a run: validated once, in the form that identifies its parts; normalizers and default text."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from typing import Any, Literal, get_args

import torch

from attnorm.arithmetic import ceil_div
from attnorm.normalizers.contract import Mechanism, Normalizer
from attnorm.normalizers.declaration import LayerFacts, warm_start_of
from attnorm.normalizers.registry import entries, entry_of, get, resolve
from attnorm.normalizers.spec import parse_spec
from attnorm.text import did_you_mean

GROUPS = ("core", "gradient", "vectors", "sensitivity", "coverage")
PROBED_GROUPS = ("circuits", "output")  # measured by passes of their own on a loaded model; "all" leaves them out
USUAL_GROUPS = "core"  # all that verdicts need; analyze then takes about twice the plain forward pass on a CPU
Vectors = Literal["values", "inputs"]
Rows = int | Literal["auto", "all", "last"]
Windows = int | Literal["auto"]
Normalizers = str | Normalizer | Iterable[str | Normalizer]

BUDGET = 8192  # tokens per text, over all its windows
TOP_N = (1, 5, 10, 20, 100)
TEMPERATURES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0)
EPSILONS = (1e-3, 1e-1, 10.0)  # step sizes of the papers' finite differences; columns gain_* of `sensitivity`
READ_KEYS, READ_ROWS, MAX_READ_KEYS = 8, 4, 1024  # default keys per listed row, default listed rows, most keys
TOKENS_BEFORE_PATCHES = 8  # of an image: class and register tokens

SAMPLED_ROWS = 64  # rows with the costly metrics, unless a number of rows is given
MIN_SAMPLED_PER_WINDOW = 8
FAST_SAMPLED_ROWS, MIN_SAMPLED_ROWS = 16, 4  # if a number of rows is given: up to 1,024 keys, and at any length

PASSAGE = "the bundled model's own passage"
TOPICS = "pydoc_data.topics"
DEFAULT_TEXTS = (PASSAGE, TOPICS)


@dataclass(frozen=True, kw_only=True)
class AnalysisSettings:
    """Plain values only: the manifest and the key of every part contain them."""

    normalizers: dict[str, str]  # name in the tables -> description that identifies it
    top_n: tuple[int, ...]
    rows: Rows
    vectors: Vectors
    vector_rows: int | None  # None: depends on the length, see sampled_rows_at
    metrics: tuple[str, ...]
    temperatures: tuple[float, ...]
    epsilons: tuple[float, ...]
    seed: int
    windows: int | Literal["auto"] = 1  # as given
    window_count: int = 1  # largest number of windows of a text; windows share vector_rows
    budget: int = 0
    bos: bool | None = None
    read_keys: int = 0  # heaviest keys listed per row; 0: no token of the text is stored
    read_rows: int | tuple[int, ...] = READ_ROWS  # number of rows, or which rows

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
    """Validate the options of analyze(), observe() and measure(); raise ValueError for the first wrong one."""
    if rows not in ("auto", "all", "last") and not (_is_integer(rows) and int(rows) >= 1):
        raise ValueError(f"rows: expected 'auto', 'all', 'last' or a number of rows of at least 1, got {rows!r}")
    if vectors not in get_args(Vectors):
        raise ValueError(f"unknown vectors {vectors!r}; {did_you_mean(vectors, get_args(Vectors))}")
    if vector_rows is None and not _is_integer(rows):
        vector_rows = SAMPLED_ROWS
    if vector_rows is not None and (not _is_integer(vector_rows) or vector_rows < 1):
        raise ValueError(f"vector_rows: expected an integer of at least 1, got {vector_rows!r}")
    if not _is_integer(seed):
        raise ValueError(f"seed: expected an integer, got {seed!r}")
    if not _is_integer(read_keys) or not 0 <= read_keys <= MAX_READ_KEYS:
        raise ValueError(
            f"read_keys (--tokens): expected an integer from 0 to {MAX_READ_KEYS}, got {read_keys!r}. Give the number "
            "of keys to list per row, or 0 for none."
        )
    sizes: list[Any] = [top_n] if isinstance(top_n, int) else list(top_n)
    if not sizes or not all(_is_integer(value) and value >= 1 for value in sizes):
        raise ValueError(f"top_n: expected integers of at least 1, for example (1, 5, 10), got {top_n!r}")
    steps = sorted({float(value) for value in temperatures})
    if not steps or not all(0 < value < math.inf for value in steps):
        raise ValueError(f"temperatures: expected positive numbers, for example (0.5, 1, 2), got {temperatures!r}")
    return AnalysisSettings(
        normalizers={name: description(normalizer) for name, normalizer in normalizers.items()},
        top_n=tuple(sorted(set(sizes))),
        rows=rows,
        vectors=vectors,  # type: ignore[arg-type]  # validated above
        vector_rows=vector_rows,
        metrics=groups(metrics),
        temperatures=tuple(steps),
        epsilons=EPSILONS,
        seed=seed,
        read_keys=read_keys,
        read_rows=_read_rows(read_rows),
    )


def sampled_rows_at(settings: AnalysisSettings, n: int) -> int:
    """Return how many of the longest rows of a window with n keys get the costly metrics.

    If a number of rows is given, speed matters: 16 rows of up to 1,024 keys give nearly the same separability as all
    rows, and longer rows are sampled less, so that they cost no more than the forward pass.
    """
    if settings.vector_rows is not None:
        shared = ceil_div(settings.vector_rows, settings.window_count)
        return max(min(settings.vector_rows, MIN_SAMPLED_PER_WINDOW), shared)
    row_count = settings.rows if isinstance(settings.rows, int) else 0
    return max(MIN_SAMPLED_ROWS, row_count // 16, min(FAST_SAMPLED_ROWS, FAST_SAMPLED_ROWS * 1024 // max(n, 1)))


def whole_pictures(settings: AnalysisSettings, grids: Sequence[tuple[int, int]]) -> AnalysisSettings:
    """List every patch, for the first token and the middle patch, unless keys or rows were chosen.

    grids: rows and columns of patches of each image.
    """
    if not grids or (settings.read_keys, settings.read_rows) != (READ_KEYS, READ_ROWS):
        return settings
    most = max(rows * columns for rows, columns in grids)
    middle = {rows // 2 * columns + columns // 2 - rows * columns for rows, columns in grids}  # from the end
    read_keys = min(most + TOKENS_BEFORE_PATCHES, MAX_READ_KEYS)
    return replace(settings, read_keys=read_keys, read_rows=tuple(sorted({0, *middle})))


def groups(metrics: str | Iterable[str]) -> tuple[str, ...]:
    """Return the metric groups to measure for "all", one name or several; core and gradient are always measured.

    "all" stands for the groups that are measured on the given texts, alone or among others.
    """
    if metrics == "all":
        return GROUPS
    names = [metrics] if isinstance(metrics, str) else list(metrics)
    all_groups = (*GROUPS, *PROBED_GROUPS)
    for name in names:
        if name not in ("all", *all_groups):
            raise ValueError(f"unknown metric group {name!r}; {did_you_mean(name, ('all', *all_groups))}")
    implied = GROUPS if "all" in names else ()
    return tuple(name for name in all_groups if name in ("core", "gradient", *implied, *names))


def named_normalizers(normalizers: Any) -> dict[str, Normalizer | None]:
    """Return name in the tables -> normalizer; None stands for "model", the normalizer that the model runs."""
    requested = [normalizers] if isinstance(normalizers, str | Normalizer | Mechanism) else list(normalizers)
    if not requested:
        raise ValueError(
            "normalizers: expected at least one, got none. Use ('model',) to measure the model as it runs."
        )
    named: dict[str, Normalizer | None] = {}
    for request in requested:
        if isinstance(request, str) and request != "model":
            entry_of(parse_spec(request)[0], others=["model"])
        normalizer = None if isinstance(request, str) and request == "model" else resolve(request)
        if isinstance(normalizer, Mechanism):
            raise TypeError(
                f"expected row normalizers, got the mechanism {normalizer.name!r}, which has no rows of logits to "
                "measure. Choose another name."
            )
        if normalizer is not None and isinstance(request, str) and ":" in request:
            normalizer.name = request  # with its options: entmax may occur with several
        name = "model" if normalizer is None else normalizer.name
        if name in named:
            raise ValueError(
                f"normalizers: expected different names, got {name!r} twice. Change the attribute .name of one of them."
            )
        if normalizer is not None and request != name and name == "model":
            raise ValueError(
                "normalizers: expected another name than 'model', which stands for the normalizer that the model "
                "runs. Change its attribute .name."
            )
        named[name] = normalizer
    return named


def started_at_length(
    named: Mapping[str, Normalizer | None], given: Any, length: int, *, causal: bool = True
) -> dict[str, Normalizer | None]:
    """Start length rules that are given by name at this training length, as attnorm.patch does.

    Only the option that depends on the length is set. Normalizers given as objects, or with a train_length of their
    own, stay as they are.
    """
    names = {given} if isinstance(given, str) else set()
    if isinstance(given, Iterable) and not isinstance(given, str):
        names = {item for item in given if isinstance(item, str)}
    layer = LayerFacts(heads=1, length=length, causal=causal)
    started = dict(named)
    for spec in names & set(named) - {"model"}:
        name, options = parse_spec(spec)
        if by_length := warm_start_of(entries()[name].factory()).length_options(layer, options):
            normalizer = get(name, **options, **by_length)
            assert isinstance(normalizer, Normalizer)
            normalizer.name = spec
            started[spec] = normalizer
    return started


def start_note(names: Sequence[str], lengths: Sequence[int]) -> str:
    """Say at which training lengths these normalizers were compared."""
    at = " and ".join(map(str, lengths))
    return (
        f"{', '.join(names)} start{'s' * (len(names) == 1)} with train_length {at}, the measured length or the "
        "model's own if that is shorter. Another one is an option, e.g. ssmax:train_length=512"
    )


def start_notes(
    named: Mapping[str, Normalizer | None], started: Mapping[str, Normalizer | None], length: int
) -> list[str]:
    """Return a note on the normalizers that started_at_length changed, if there are any."""
    names = [name for name in named if started[name] is not named[name]]
    if not names:
        return []
    return [start_note(names, [length])]


def description(normalizer: Normalizer | Mechanism | None) -> str:
    """Describe structure and parameters in one line that is equal for equal normalizers only."""
    if normalizer is None:
        return "as the model runs"
    digest = hashlib.sha256()
    for name, tensor in sorted(normalizer.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().to("cpu", torch.float64).numpy().tobytes())
    structure = " ".join(repr(normalizer).split())
    options = sorted(  # attributes such as alpha or k, which the repr of nn.Module does not show
        (key, repr(value))
        for part in normalizer.modules()
        for key, value in vars(part).items()
        if not key.startswith("_") and key != "training" and isinstance(value, str | int | float | bool | tuple)
    )
    digest.update(repr((structure, options)).encode())
    return f"{structure} {digest.hexdigest()[:16]}"


def _read_rows(value: Any) -> int | tuple[int, ...]:
    if _is_integer(value) and value >= 1:
        return int(value)
    listed = [] if isinstance(value, str | int | float) or value is None else list(value)
    if not listed or not all(_is_integer(row) for row in listed):
        raise ValueError(
            f"read_rows: expected a number of rows or a list of rows, got {value!r}. Give 4 for four rows spread over "
            "the text, or (-1, 120) for the last row and row 120."
        )
    return tuple(sorted({int(row) for row in listed}))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def default_text(*, bundled: bool) -> dict[str, str]:
    """Return {name: text}, to be measured if none is given: available offline, and readable for the model.

    The bundled model is measured on a passage that it wrote itself. Three books that it had not seen (loss 3.3 to 3.7
    nats per token) give the same 13 dispersed heads as the passage. Python's help topics (loss 5.07), which it cannot
    read, differ in two heads.
    """
    return {PASSAGE: passage()} if bundled else {TOPICS: topics()}


def passage() -> str:
    """Return 3,000 tokens that the bundled model wrote, from a fixed random seed."""
    return (files("attnorm.models") / "bundled" / "passage.txt").read_text(encoding="utf-8")


def topics() -> str:
    """Return the topics of Python's help() in alphabetical order: about 65,000 words of technical English."""
    from pydoc_data.topics import topics  # half a megabyte, needed here only

    return "\n\n".join(topics[name] for name in sorted(topics))
