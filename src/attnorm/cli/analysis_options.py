"""Options that analyze, compare and stability share, how they are parsed, and analyze() with a progress bar."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnorm.cli.output import AnalysisBar, ProgressBar, failures, say

if TYPE_CHECKING:
    from attnorm.analysis.analyze import AnalysisProgress
    from attnorm.analysis.result import Analysis
    from attnorm.analysis.verdicts.thresholds import Thresholds
    from attnorm.evaluation.result import Evaluation
    from attnorm.models.inputs import Text

Texts = Annotated[
    list[Path] | None,
    typer.Option(
        "--text", metavar="FILE", help="Text to measure on, plain or .xz; repeatable (default: a built-in text)."
    ),
]
Images = Annotated[list[Path] | None, typer.Option("--image", metavar="FILE", help="Image to measure on; repeatable.")]
Audio = Annotated[
    list[Path] | None, typer.Option("--audio", metavar="FILE", help="WAV file to measure on; repeatable.")
]
Lengths = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        help="Tokens per window (default: the whole text if it fits into model and budget, else an eighth of the "
        "budget).",
    ),
]
Windows = Annotated[
    str | None,
    typer.Option(
        metavar="auto|K",
        help="Number of disjoint windows per text over which each head is judged (default: auto, up to 16 "
        "within the budget).",
        show_default=False,
    ),
]
Budget = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Tokens per text, over all its windows, if --lengths or --windows are chosen automatically (default: "
        "8192).",
        show_default=False,
    ),
]
Rows = Annotated[
    str | None,
    typer.Option(
        metavar="auto|all|last|K",
        help="Query rows to measure per window: auto (up to 512, spread over the window), all, last, or a number "
        "(default: auto).",
    ),
]
Metrics = Annotated[
    str | None,
    typer.Option(
        metavar="GROUP,GROUP,...",
        help="Groups of metrics to measure (default: core). core: all that the verdicts need; takes about "
        "twice the time of the plain forward pass on one CPU thread. vectors (separability, saturation), "
        "sensitivity and coverage take longer. all: these four. Two groups are not part of all: circuits "
        "(induction, previous-token and retrieval heads; needs extra forward passes) and output (rank of "
        "the output layer's logits).",
    ),
]
Seed = Annotated[
    int | None, typer.Option(help="Random seed for row sampling and permutations, not used by verdicts (default: 0).")
]
Bos = Annotated[
    bool | None,
    typer.Option(
        "--bos/--no-bos",
        help="Start every window with the BOS token, or without it (default: what the tokenizer does).",
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(metavar="NAME|DIR", help="Hub name or folder of a tokenizer (default: the tokenizer of the model)."),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Data type of the model: float32, bfloat16, float16, float64, or auto for that of the checkpoint "
        "(default: float32 on a CPU, else auto)."
    ),
]
Device = Annotated[
    str | None, typer.Option(help="Device: cpu, cuda, cuda:1, or auto for all GPUs (default: the GPU if there is one).")
]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Allow the model's repository to run its own Python code.")
]
Judging = Annotated[
    list[str] | None,
    typer.Option(
        "--threshold",
        metavar="NAME=VALUE",
        help="Change a threshold of the verdicts, for example near_floor=0.2; repeatable.",
    ),
]
Threads = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Number of CPU threads (default: PyTorch's default).")
]


def check_model(name: str) -> None:
    """Raise ValueError for a model that cannot be found, before libraries are loaded."""
    from attnorm.models.source import find

    find(name)


def texts_of(files: list[Path] | None) -> "dict[str, Text] | None":
    """Read text files by name; None if there are none."""
    if not files:
        return None
    from attnorm.files import read_text, text_name

    return as_texts({text_name(path): read_text(path) for path in files})


def inputs_of(texts: list[Path] | None, images: list[Path] | None, audio: list[Path] | None) -> "dict[str, Any] | None":
    """Return texts, images and sound by name; None if no file is given."""
    if not (images or audio):
        return texts_of(texts)
    from attnorm.files import text_name
    from attnorm.models.inputs import Media

    inputs: dict[str, Any] = dict(texts_of(texts) or {})
    inputs |= {text_name(path): Media(path, "image") for path in images or ()}
    inputs |= {text_name(path): Media(path, "audio") for path in audio or ()}
    for path in (*(images or ()), *(audio or ())):
        if not path.is_file():
            raise ValueError(f"expected a file, got {path}, which does not exist. Check the path.")
    return inputs


def as_texts(contents: dict[str, str]) -> "dict[str, Text]":
    """Mark texts as read from files."""
    from attnorm.models.inputs import Text

    return {name: Text(name, content, file=True) for name, content in contents.items()}


def names_of(value: str) -> list[str]:
    """'softmax, ssmax' -> ['softmax', 'ssmax']"""
    return [name.strip() for name in value.split(",") if name.strip()]


def check_minutes(option: str, minutes: float | None) -> None:
    """Raise ValueError for a time limit that is negative or not a number."""
    if minutes is not None and not minutes >= 0:
        raise ValueError(f"{option}: expected a number of minutes of at least 0, got {minutes:g}.")


def numbers_of(option: str, value: str | None) -> tuple[int, ...] | None:
    """'256,1024' -> (256, 1024)"""
    if value is None:
        return None
    try:
        return tuple(int(word) for word in value.replace("_", "").split(","))
    except ValueError:
        raise ValueError(f"{option}: expected integers separated by commas, e.g. 256,1024, got {value!r}") from None


def windows_of(value: str | None) -> Any:
    return _number_or(value, "--windows", ("auto",))


def _number_or(value: str | None, option: str, words: Iterable[str]) -> int | str | None:
    if value is None or value in words:
        return value
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{option}: expected {', '.join(words)} or an integer, got {value!r}") from None


def given_settings(
    inputs: Any,
    lengths: str | None,
    windows: str | None,
    budget: int | None,
    bos: bool | None,
    rows: str | None,
    metrics: str | None,
    seed: int | None,
) -> dict[str, Any]:
    """Validate options before the model is loaded; return those that are given as arguments of analyze()."""
    from attnorm.analysis.settings import groups

    values = {
        "inputs": inputs,
        "lengths": numbers_of("--lengths", lengths),
        "windows": windows_of(windows),
        "budget": budget,
        "bos": bos,
        "rows": _number_or(rows, "--rows", ("auto", "all", "last")),
        "metrics": None if metrics is None else groups("all" if metrics == "all" else names_of(metrics)),
        "seed": seed,
    }
    return {name: value for name, value in values.items() if value is not None}


def thresholds_of(changes: list[str] | None) -> "Thresholds":
    """Return the default thresholds with changes of the form name=value."""
    from attnorm.analysis.verdicts.thresholds import Thresholds

    return Thresholds().changed(changes or ())


def use_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def measure(model: str | None, *, out: Path | None = None, **options: Any) -> "Analysis":
    """Run analyze() with a progress bar. Ctrl-C prints what is kept and exits with 130."""
    from attnorm.analysis.analyze import analyze

    bar = ProgressBar("loading the model")
    progress = AnalysisBar(bar)
    with failures(lambda: _describe_kept_work(progress.last, out)), bar:  # the bar ends before a message is printed
        analysis = analyze(model, out=out, progress=progress, **options)
    if progress.last is None:
        say(f"{out} already contains this run, finished. Nothing was measured again.")
    return analysis


def _describe_kept_work(state: "AnalysisProgress | None", out: Path | None) -> str:
    if out is None:
        return "Interrupted. No results are kept. Pass --out DIR to keep finished parts and to resume."
    if state is None:
        return "Interrupted before the first part. Nothing was measured yet."
    layers = 0 if state.parts_done == state.parts_total else state.layers_done
    also = f", and {layers} of {state.layers_total} layers of part {state.parts_done + 1}" if layers else ""
    return (
        f"Interrupted. {state.parts_done} of {state.parts_total} parts are finished and kept in {out}{also}. "
        "Run the same command again to resume."
    )


def evaluation_of(folder: Path, scores_folder: Path | None = None) -> "Evaluation | None":
    """Return the scores that belong to an analysis: of the given folder, else of its own folder `evaluation`.

    Raises:
        ValueError: The folder contains no evaluation, or a damaged one.
    """
    inside = folder / "evaluation"
    if scores_folder is None and not (inside / "evaluation.json").is_file():
        return None
    from attnorm.evaluation.result import Evaluation

    return Evaluation.load(scores_folder or inside)
