"""What analyze, compare and report share: options of measuring and judging, texts, failures told in one sentence."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnorm.cli.output import say, usage_errors
from attnorm.cli.progress import Watch, shown

if TYPE_CHECKING:
    from attnorm.analysis.parts import AnalysisProgress
    from attnorm.analysis.result import Analysis
    from attnorm.analysis.verdicts.thresholds import Thresholds
    from attnorm.models.inputs import Text

Texts = Annotated[
    list[Path] | None,
    typer.Option(
        "--text",
        metavar="FILE",
        help="Text to measure on, plain or .xz; may be given several times. Default: one that is built in.",
    ),
]
Images = Annotated[
    list[Path] | None,
    typer.Option("--image", metavar="FILE", help="Image to measure on; may be given several times."),
]
Audio = Annotated[
    list[Path] | None,
    typer.Option("--audio", metavar="FILE", help="Sound to measure on, WAV; may be given several times."),
]
Lengths = Annotated[
    str | None,
    typer.Option(metavar="N,N,...", help="Tokens of each window; default: the whole text, or an eighth of the budget."),
]
Windows = Annotated[
    str,
    typer.Option(
        metavar="auto|K", help="Disjoint windows of each text to judge heads over; auto: up to 8, as the budget allows."
    ),
]
Budget = Annotated[int, typer.Option(metavar="N", help="Tokens of each text, over all its windows.")]
Bos = Annotated[
    bool | None,
    typer.Option("--bos/--no-bos", help="Start every window with the BOS token, or without; default: as tokenized."),
]
Rows = Annotated[
    str, typer.Option(metavar="auto|all|last|K", help="Query rows of each window to measure; auto: up to 512.")
]
Metrics = Annotated[
    str,
    typer.Option(
        metavar="GROUPS",
        help="core: all that verdicts need, in at most 2x the time of the plain pass on a CPU. Costly, on request: "
        "vectors (separability, saturation), sensitivity, coverage, or all of them.",
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(metavar="NAME|DIR", help="Hub name or folder of a tokenizer; default: the one beside the model."),
]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16, float16, float64, auto; default: float32 on a CPU.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, auto; default: the GPU if there is one.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
Seed = Annotated[int, typer.Option(help="Random seed of sampled rows and permutations; verdicts do not depend on it.")]
Judging = Annotated[
    list[str] | None,
    typer.Option(
        "--threshold",
        metavar="NAME=VALUE",
        help="A threshold of the verdicts, e.g. near_floor=0.2; may be given several times.",
    ),
]
Threads = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Threads torch may use; its own choice by default.")
]


def check_model(name: str) -> None:
    """Says no to a name that leads nowhere, before seconds are spent on loading libraries."""
    from attnorm.models.source import find

    find(name)


def texts_of(files: list[Path] | None) -> "dict[str, Text] | None":
    """By name; None where no file is given, for one that is on every machine."""
    if not files:
        return None
    from attnorm.files import read_text, text_name

    return files_read({text_name(path): read_text(path) for path in files})


def inputs_of(texts: list[Path] | None, images: list[Path] | None, audio: list[Path] | None) -> "dict[str, Any] | None":
    """Texts, images and sound by name; None where no file is given."""
    if not (images or audio):
        return texts_of(texts)
    from attnorm.files import text_name
    from attnorm.models.inputs import Media

    found: dict[str, Any] = dict(texts_of(texts) or {})
    found |= {text_name(path): Media(path, "image") for path in images or ()}
    found |= {text_name(path): Media(path, "audio") for path in audio or ()}
    for path in (*(images or ()), *(audio or ())):
        if not path.is_file():
            raise ValueError(f"expected a file, got {path}, which does not exist. Check the path.")
    return found


def files_read(contents: dict[str, str]) -> "dict[str, Text]":
    """Name -> content, as analyze takes what comes from files."""
    from attnorm.models.inputs import Text

    return {name: Text(name, content, file=True) for name, content in contents.items()}


def numbers_of(option: str, value: str | None) -> tuple[int, ...] | None:
    """'256,1024' -> (256, 1024)"""
    if value is None:
        return None
    try:
        return tuple(int(word) for word in value.replace("_", "").split(","))
    except ValueError:
        raise ValueError(f"{option} takes whole numbers separated by commas, e.g. 256,1024; got {value!r}") from None


def rows_of(value: str) -> Any:
    if value in ("auto", "all", "last"):
        return value
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"--rows takes auto, all, last or a number of rows, got {value!r}") from None


def windows_of(value: str) -> Any:
    if value == "auto":
        return value
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"--windows takes auto or a number of windows, got {value!r}") from None


def groups_of(value: str) -> tuple[str, ...]:
    """The groups of metrics, checked before a model is loaded for nothing."""
    from attnorm.analysis.settings import groups

    names = tuple(name.strip() for name in value.split(",") if name.strip())
    return groups(names[0] if len(names) == 1 else names)


def thresholds_of(words: list[str] | None) -> "Thresholds":
    """The defaults with what the words change."""
    from attnorm.analysis.verdicts.thresholds import Thresholds

    return Thresholds().changed(words or ())


def use_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def measure(model: str | None, *, out: Path | None = None, **options: Any) -> "Analysis":
    """analyze() with progress on stderr. Ctrl-C says what is kept, and leaves with 130."""
    from attnorm.analysis.analyze import analyze

    watch = Watch()
    # The bar inside, so that it is gone before a message is printed.
    with failures(lambda: _what_is_kept(watch, out)), shown(watch) as progress:
        analysis = analyze(model, out=out, progress=progress, **options)
    if watch.last is None:
        say(f"{out} holds this run already, finished: nothing was measured again")
    return analysis


@contextmanager
def failures(
    when_interrupted: Callable[[], str] = lambda: "Interrupted.", writes_to: Path | None = None
) -> Iterator[None]:
    """Wrong input leaves with 2; a disk, a network or memory that gives out with 1; Ctrl-C with 130."""
    import torch

    try:
        with usage_errors():
            yield
    except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        raise typer.BadParameter(_told(error)) from None
    except KeyboardInterrupt:
        say(when_interrupted())
        raise typer.Exit(130) from None
    except (MemoryError, torch.OutOfMemoryError):
        say(
            "Error: out of memory. Take shorter --lengths, fewer --rows, --metrics core, or half precision with "
            "--dtype bfloat16."
        )
        raise typer.Exit(1) from None
    except OSError as error:
        say(f"Error: {_told(error, writes_to)}")
        raise typer.Exit(1) from None


def _told(error: Exception, writes_to: Path | None = None) -> str:
    """The message without '[Errno 28]'; a bare system error keeps the file, or the folder, it is about."""
    if isinstance(error, OSError) and error.strerror:
        where = error.filename if error.filename is not None else writes_to
        told = error.strerror if where is None else f"{error.strerror}: {where}"
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return f"{told}. Free some space, or name a folder on another disk with --out" if full else told
    return str(error)


def _what_is_kept(watch: Watch, out: Path | None) -> str:
    state = watch.last
    done = 0 if state is None else state.parts_done
    if out is None:
        return "Interrupted. Nothing is kept: with --out DIR finished parts would be, and the run could go on."
    if state is None:
        return "Interrupted before the first part; nothing was measured yet."
    return (
        f"Interrupted. {done} of {state.parts_total} parts are finished and kept in {out}{_layers_kept(state)}; "
        "run the same command again and it goes on from there."
    )


def _layers_kept(state: "AnalysisProgress") -> str:
    done = 0 if state.parts_done == state.parts_total else state.layers_done
    return f", and {done} of {state.layers_total} layers of part {state.parts_done + 1}" if done else ""
