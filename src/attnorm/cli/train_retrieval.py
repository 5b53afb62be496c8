"""attnorm train retrieval: train models to pick from small sets and test them on large sets."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnorm.cli.analysis_options import names_of
from attnorm.cli.output import Json, ProgressBar, duration, failures, say, show, show_json, usage_errors
from attnorm.provenance import recorded_command

if TYPE_CHECKING:
    from attnorm.training.retrieval.train import RetrievalProgress

_KEPT = "Interrupted; finished work is kept, and the same command resumes."

Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1.", show_default="cuda if there is one")]

# Defaults with --quick.
_QUICK: dict[str, Any] = {
    "seeds": 3, "steps": 400, "batch": 64, "width": 32, "learning_rate": 3e-3, "sizes": "16,64,256,1024", "sets": 256,
}  # fmt: skip
_FULL: dict[str, Any] = {
    "seeds": 10, "steps": 20_000, "batch": 128, "width": 128, "learning_rate": 1e-3,
    "sizes": "16,64,256,1024,4096,16384", "sets": 128,
}  # fmt: skip


def retrieval(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the results; the same command resumes from it.")],
    normalizers: Annotated[
        str, typer.Option(metavar="NAME,NAME,...", help="Normalizers to train with, options as in topk:k=4.")
    ] = "softmax,ssmax,entmax15",
    task: Annotated[str, typer.Option(help="Task: max, recall or majority.")] = "max",
    seeds: Annotated[int | None, typer.Option(help="Models per normalizer.", show_default="10")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.", show_default="20000")] = None,
    sizes: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Set sizes of the tests.", show_default="16,64,256,1024,4096,16384"),
    ] = None,
    sets: Annotated[
        int | None,
        typer.Option("--sets", "--test-sets", help="Test sets per size; fewer of large ones.", show_default="128"),
    ] = None,
    test_with: Annotated[
        str, typer.Option(metavar="NAME,NAME,...", help="Normalizers that replace the trained one in further tests.")
    ] = "hard",
    batch: Annotated[int | None, typer.Option(help="Sets per step and model.", show_default="128")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the models.", show_default="128")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default="0.001")] = None,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of AdamW.")] = 1e-3,
    cosine: Annotated[bool, typer.Option(help="Use a cosine learning rate schedule to 0.")] = False,
    smallest: Annotated[int, typer.Option(help="Fewest items per set in training.")] = 5,
    largest: Annotated[int, typer.Option(help="Most items per set in training.")] = 16,
    leak_penalty: Annotated[float, typer.Option(help="Penalty on the share of logit variance due to the class.")] = 0.0,
    leak_from: Annotated[float, typer.Option(help="Share of the steps before the leak penalty starts.")] = 0.25,
    squeezed: Annotated[
        float, typer.Option(help="Share of the training sets whose priorities are squeezed toward 1 (task max).")
    ] = 0.0,
    standardized: Annotated[
        float, typer.Option(help="Scale the logits of each training set to this standard deviation (0: off).")
    ] = 0.0,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: a minute on a CPU.")] = False,
    device: Device = None,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="torch.compile the step.", show_default="on CUDA")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, or bfloat16 for the matrix products in training; tests are in float32.")
    ] = "float32",
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 2000,
    as_json: Json = False,
) -> None:
    """Train models that pick from sets of items, and test them on sets far larger than in training.

    Each seed is one model; all seeds train together, on the same data for every normalizer. Errors are split into wrong
    logits and dispersed weights. Run the same command again to resume.

    Exit codes: 1 no disk space or memory; 2 wrong usage or input; 130 interrupted.

    Example: attnorm train retrieval --normalizers softmax,ssmax --quick --out sets
    """
    with usage_errors():
        from attnorm.training.retrieval.data import RetrievalRecipe
        from attnorm.training.retrieval.evaluate import Trials, summarise
        from attnorm.training.retrieval.train import train_retrieval

        usual = _QUICK if quick else _FULL
        options = {"seeds": seeds, "steps": steps, "batch": batch, "width": width, "learning_rate": lr, "sets": sets}
        settings = usual | {name: value for name, value in options.items() if value is not None}
        recipe = RetrievalRecipe(
            **{name: settings[name] for name in ("steps", "batch", "width", "learning_rate")},
            smallest=smallest, largest=largest, weight_decay=weight_decay, leak_penalty=leak_penalty,
            leak_from=leak_from, squeezed=squeezed, standardized=standardized, cosine=cosine, dtype=dtype,
        )  # fmt: skip
        trials = Trials(sizes=_sizes(sizes or usual["sizes"]), sets=settings["sets"], others=tuple(names_of(test_with)))
    time_left = TimeLeft(trials.sizes, trials.sets)
    with failures(lambda: _KEPT, writes_to=out, out_of_memory="Use a smaller --batch."), ProgressBar() as progress:
        results = train_retrieval(
            names_of(normalizers), out, task=task, seeds=range(settings["seeds"]), recipe=recipe, trials=trials,
            device=device, compiled=compiled, checkpoint_every=checkpoint_every, command=recorded_command(),
            report=lambda state: _report(progress, time_left, state),
        )  # fmt: skip
    rows = summarise(results.records)
    if as_json:
        show_json([{"task": task, **row.as_dict()} for row in rows])
        return
    from attnorm.training.retrieval.evaluate import tables

    show(tables(task, rows))
    say(f"wrote {out}")


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(word) for word in names_of(text)}))
    except ValueError:
        raise ValueError(f"--sizes: expected integers separated by commas, got {text!r}") from None


def _report(progress: ProgressBar, time_left: "TimeLeft", state: "RetrievalProgress") -> None:
    time_left.see(state)
    stage = f"{state.normalizer} ({state.number} of {state.of}): {state.stage}"
    detail = "" if state.loss is None else f"loss {state.loss:.4f}"
    progress(stage, state.done, state.total, detail=detail, left=time_left.words)


class TimeLeft:
    """Estimates the time left for all normalizers from the speed of training steps and of tests so far.

    The time of a test is proportional to its items. `words` is empty until a speed is known; until the first test size
    is finished, it covers training only.
    """

    def __init__(self, sizes: Sequence[int], sets: int, now: Callable[[], float] = time.monotonic) -> None:
        from attnorm.training.retrieval.evaluate import sets_at

        self._items = [size * sets_at(size, sets) for size in sizes]
        self._now = now
        self._seconds = {"training": 0.0, "testing": 0.0}
        self._work = {"training": 0, "testing": 0}  # steps, and items, done in this process
        self._steps = 0  # of one normalizer
        self._last: RetrievalProgress | None = None
        self._at = now()

    def see(self, state: "RetrievalProgress") -> None:
        before, now = self._last, self._now()
        self._steps = state.total if state.stage == "training" else self._steps
        same = before is not None and (before.normalizer, before.stage) == (state.normalizer, state.stage)
        # The first steps after a start or a checkpoint are not timed: they include compilation and loading.
        if before is not None and same and state.done > before.done and (before.done or state.stage == "testing"):
            self._work[state.stage] += self._amount(state) - self._amount(before)
            self._seconds[state.stage] += now - self._at
        self._last, self._at = state, now

    @property
    def words(self) -> str:
        if self._last is None:
            return ""
        training, testing = (self._seconds_left(self._last, stage) for stage in ("training", "testing"))
        if training is None:
            return ""
        if testing is None:
            return f"about {duration(training)} of training left, then tests"
        left = training + testing
        return f"about {duration(left)} left" if left else ""

    def _seconds_left(self, state: "RetrievalProgress", stage: str) -> float | None:
        """Return the seconds left in that stage for all normalizers; None if its speed is not known."""
        total = self._steps if stage == "training" else sum(self._items)
        if state.stage == stage:
            done = self._amount(state)
        else:
            done = total if stage == "training" else 0
        remaining = total - done + total * (state.of - state.number)
        if not remaining:
            return 0.0
        return self._seconds[stage] / self._work[stage] * remaining if self._work[stage] else None

    def _amount(self, state: "RetrievalProgress") -> int:
        return state.done if state.stage == "training" else sum(self._items[: state.done])
