"""attnorm lab train retrieval and attnorm lab train clrs: train on small problems, and test on larger ones.

Retrieval models pick from sets; CLRS-Text models answer questions about algorithms.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from attnorm.cli.analysis_options import names_of, numbers_of
from attnorm.cli.output import Json, ProgressBar, duration, failures, say, show, show_json, usage_errors
from attnorm.provenance import recorded_command

if TYPE_CHECKING:
    from attnorm_lab.training.clrs.data import ClrsExample
    from attnorm_lab.training.retrieval.train import RetrievalProgress

_WORK_KEPT = "Interrupted; finished work is kept, and the same command resumes."

Device = Annotated[str | None, typer.Option(help="Device: cpu, cuda or cuda:1.", show_default="cuda if there is one")]
TrainingDtype = Annotated[
    str | None,
    typer.Option(help="Precision: float32 or bfloat16 (autocast).", show_default="bfloat16 on CUDA, else float32"),
]
Dense = Annotated[
    bool,
    typer.Option("--dense", help="Compute the whole L x L matrix of weights: often faster, but needs more memory."),
]
WeightDecay = Annotated[float, typer.Option(help="Weight decay of AdamW, applied to matrices only.")]


def folder_option(task: str, what: str) -> Any:
    """Return the option --out of a trainer. what: its help."""
    return typer.Option(metavar="DIR", help=what, show_default=f"with --quick: quick-{task}")


def training_folder(out: Path | None, task: str, *, quick: bool) -> Path:
    """Return the folder of a run: --out, or quick-TASK in the current folder for a run with --quick."""
    if out is None and not quick:
        raise ValueError("expected --out DIR, the folder to write to, got none. Only --quick chooses one.")
    return out or Path(f"quick-{task}")


def given(defaults: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Return the options that were passed, and `defaults` for others; what is in neither keeps its usual default."""
    return {**defaults, **{name: value for name, value in options.items() if value is not None}}


# Defaults with --quick. Without it they are those of the recipe, which help repeats (tests_lab/cli/test_defaults.py).
_RETRIEVAL_QUICK = {"steps": 400, "batch": 64, "width": 32, "learning_rate": 3e-3}
_SEEDS, _QUICK_SEEDS = 10, 3
_SETS, _QUICK_SETS = 128, 256
_QUICK_SIZES = (16, 64, 256, 1024)


def retrieval(
    out: Annotated[
        Path | None,
        folder_option(
            "retrieval", "Output folder for the results. The same command resumes an interrupted run from it."
        ),
    ] = None,
    normalizers: Annotated[
        str, typer.Option(metavar="NAME,NAME,...", help="Normalizers to train with, options as in topk:k=4.")
    ] = "softmax,ssmax,entmax15",
    task: Annotated[str, typer.Option(help="Task: max, recall or majority.")] = "max",
    seeds: Annotated[
        int | None,
        typer.Option(help="Number of models per normalizer, each with its own random seed.", show_default=str(_SEEDS)),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.", show_default="20000")] = None,
    sizes: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Set sizes of the tests.", show_default="16,64,256,1024,4096,16384"),
    ] = None,
    sets: Annotated[
        int | None,
        typer.Option(
            "--sets",
            "--test-sets",
            help="Number of test sets per size; large sizes get fewer.",
            show_default=str(_SETS),
        ),
    ] = None,
    test_with: Annotated[
        str, typer.Option(metavar="NAME,NAME,...", help="Normalizers that replace the trained one in further tests.")
    ] = "hard",
    batch: Annotated[int | None, typer.Option(help="Sets per step and model.", show_default="128")] = None,
    width: Annotated[int | None, typer.Option(help="Hidden width of the models.", show_default="128")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default="0.001")] = None,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of AdamW.")] = 1e-3,
    cosine: Annotated[bool, typer.Option(help="Use a cosine learning rate schedule to 0.")] = False,
    smallest: Annotated[int, typer.Option(help="Minimum number of items per training set.")] = 5,
    largest: Annotated[int, typer.Option(help="Maximum number of items per training set.")] = 16,
    leak_penalty: Annotated[
        float,
        typer.Option(help="Weight of the penalty on the share of the logits' variance that the class causes (0: off)."),
    ] = 0.0,
    leak_from: Annotated[float, typer.Option(help="Share of the steps after which the leak penalty starts.")] = 0.25,
    squeezed: Annotated[
        float, typer.Option(help="Task max: share of the training sets whose priorities are squeezed toward 1.")
    ] = 0.0,
    standardized: Annotated[
        float, typer.Option(help="Scale the logits of each training set to this standard deviation (0: off).")
    ] = 0.0,
    quick: Annotated[bool, typer.Option("--quick", help="Use small sizes, which take a minute on a CPU.")] = False,
    device: Device = None,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile", help="Compile the training step with torch.compile.", show_default="on CUDA"
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Precision: float32, or bfloat16 for the matrix products in training; tests always use float32."
        ),
    ] = "float32",
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 2000,
    as_json: Json = False,
) -> None:
    """Train models that pick from sets of items, and test them on sets far larger than in training.

    Each seed is one model; all seeds train together, on the same data for every normalizer. Errors are split into wrong
    logits and dispersed weights. Run the same command again to resume.

    Exit codes: 1 no disk space or memory; 2 wrong usage or input; 130 interrupted.

    Example: attnorm lab train retrieval --normalizers softmax,ssmax --quick --out sets
    """
    with usage_errors():
        from attnorm_lab.training.retrieval.data import RetrievalRecipe
        from attnorm_lab.training.retrieval.evaluate import SIZES, Trials, summarize
        from attnorm_lab.training.retrieval.train import train_retrieval

        out = training_folder(out, "retrieval", quick=quick)
        if seeds is None:
            seeds = _QUICK_SEEDS if quick else _SEEDS
        if sets is None:
            sets = _QUICK_SETS if quick else _SETS
        recipe = RetrievalRecipe(
            **given(_RETRIEVAL_QUICK if quick else {}, steps=steps, batch=batch, width=width, learning_rate=lr),
            smallest=smallest, largest=largest, weight_decay=weight_decay, leak_penalty=leak_penalty,
            leak_from=leak_from, squeezed=squeezed, standardized=standardized, cosine=cosine, dtype=dtype,
        )  # fmt: skip
        usual_sizes = _QUICK_SIZES if quick else SIZES
        trials = Trials(
            sizes=_sizes(sizes) if sizes else usual_sizes, sets=sets, others=tuple(names_of(test_with))
        )  # fmt: skip
    time_left = TimeLeft(trials.sizes, trials.sets)
    with failures(lambda: _WORK_KEPT, writes_to=out, out_of_memory="Use a smaller --batch."), ProgressBar() as progress:
        results = train_retrieval(
            names_of(normalizers), out, task=task, seeds=range(seeds), recipe=recipe, trials=trials,
            device=device, compiled=compiled, checkpoint_every=checkpoint_every, command=recorded_command(),
            report=lambda state: _report_retrieval(progress, time_left, state),
        )  # fmt: skip
    rows = summarize(results.records)
    if as_json:
        show_json([{"task": task, **row.as_dict()} for row in rows])
    else:
        from attnorm_lab.training.retrieval.evaluate import tables

        show(tables(task, rows))
    say(f"wrote {out}")


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(word) for word in names_of(text)}))
    except ValueError:
        raise ValueError(f"--sizes: expected integers separated by commas, got {text!r}") from None


def _report_retrieval(progress: ProgressBar, time_left: "TimeLeft", state: "RetrievalProgress") -> None:
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
        from attnorm_lab.training.retrieval.evaluate import sets_at

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


_CHECKPOINT_KEPT = "Interrupted; the checkpoint is kept, and the same command resumes from it."
_CLRS_QUICK = {"steps": 30, "batch": 16, "learning_rate": 3e-3, "warmup": 5, "layers": 2, "heads": 2, "width": 32}
_HELD_OUT, _QUICK_HELD_OUT = 2000, 20
_GENERATED_TEST = 32  # questions per algorithm and size


def clrs(
    out: Annotated[
        Path | None,
        folder_option("clrs", "Output folder for the run. The same command resumes an interrupted run from it."),
    ] = None,
    train: Annotated[
        Path | None,
        typer.Argument(metavar="TRAIN", help="Training questions, .jsonl or .jsonl.xz.", show_default="none"),
    ] = None,
    test: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Test questions, in the same format.", show_default="none")
    ] = None,
    generate: Annotated[
        int | None, typer.Option(metavar="N", help="Generate N training questions with dm-clrs, instead of TRAIN.")
    ] = None,
    sizes: Annotated[
        str, typer.Option(metavar="N,N,...", help="With --generate: problem sizes for training.")
    ] = "4,5,6,8,10,12",
    test_sizes: Annotated[
        str, typer.Option(metavar="N,N,...", help="With --generate: problem sizes for the test.")
    ] = "4,8,12,16,20,24",
    algorithms: Annotated[
        str, typer.Option(metavar="NAME,NAME,...", help="Algorithms to train and test on (default: all).")
    ] = "",
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|FILE",
            help="Pretrained model to fine-tune: a folder or a .gguf file.",
            show_default="a small Llama from scratch",
        ),
    ] = None,
    normalizer: Annotated[
        str, typer.Option(metavar="NAME", help="Normalizer of all heads, options as in topk:k=4.")
    ] = "softmax",
    test_with: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME,...",
            help="Normalizers that replace the trained one in further tests. re-fitted is an adaptive "
            "temperature that is fitted to the trained softmax model.",
        ),
    ] = "",
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.", show_default="1000")] = None,
    batch: Annotated[int | None, typer.Option(help="Questions per step.", show_default="256")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.", show_default="0.0003")] = None,
    warmup: Annotated[
        int | None, typer.Option(help="Steps of linear warmup; a cosine schedule to 0 follows.", show_default="50")
    ] = None,
    weight_decay: WeightDecay = 0.1,
    layers: Annotated[int | None, typer.Option(help="Without --model: number of layers.", show_default="4")] = None,
    heads: Annotated[
        int | None, typer.Option(help="Without --model: attention heads per layer.", show_default="4")
    ] = None,
    width: Annotated[int | None, typer.Option(help="Without --model: width of the model.", show_default="128")] = None,
    held_out: Annotated[
        int | None,
        typer.Option(
            help="Number of training questions that are held out to measure the loss.", show_default=str(_HELD_OUT)
        ),
    ] = None,
    tokens_at_once: Annotated[int, typer.Option(help="Maximum number of tokens per forward pass, with padding.")] = 2
    ** 14,
    observed: Annotated[
        int, typer.Option(help="Number of test questions per algorithm and size whose attention entropy is measured.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Random seed for weights and the order of questions.")] = 0,
    dtype: TrainingDtype = None,
    device: Device = None,
    dense: Dense = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the blocks: faster on a GPU after the first steps.")
    ] = False,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 250,
    save_model: Annotated[
        bool, typer.Option("--save-model", help="Also write the model as a Hugging Face folder, DIR/model.")
    ] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Train a tiny model on generated questions of two tasks, which takes seconds."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a model on CLRS-Text questions, and test it on larger problems than in training.

    The loss covers the answers only. An answer counts as right if every token of the greedy answer is right. Run the
    same command again to resume.

    Exit codes: 1 no disk space or memory; 2 wrong usage or input; 130 interrupted.

    Example: attnorm lab train clrs --quick --out clrs
    """
    import torch

    with usage_errors():
        from attnorm_lab.training.clrs.data import prepare_data
        from attnorm_lab.training.clrs.evaluate import ClrsTests
        from attnorm_lab.training.clrs.train import ClrsBase, ClrsRecipe, train_clrs, with_normalizer

        out = training_folder(out, "clrs", quick=quick)
        if held_out is None:
            held_out = _QUICK_HELD_OUT if quick else _HELD_OUT
        sizes_and_steps = given(
            _CLRS_QUICK if quick else {}, steps=steps, batch=batch, learning_rate=lr, warmup=warmup, layers=layers,
            heads=heads, width=width,
        )  # fmt: skip
        on_cuda = torch.cuda.is_available() if device is None else device.startswith("cuda")
        recipe = with_normalizer(
            ClrsRecipe(
                **sizes_and_steps, weight_decay=weight_decay, seed=seed, tokens_at_once=tokens_at_once,
                dtype=dtype or ("bfloat16" if on_cuda else "float32"),
            ),
            normalizer,
        )  # fmt: skip
        tests = ClrsTests(others=tuple(names_of(test_with)), observed=observed)
        base = ClrsBase(model)
        lengths = (numbers_of("--sizes", sizes) or (), numbers_of("--test-sizes", test_sizes) or ())
        questions, source = _questions(train, test, generate, lengths, names_of(algorithms), seed, quick=quick)
    with (
        failures(lambda: _CHECKPOINT_KEPT, writes_to=out, out_of_memory="Use a smaller --tokens-at-once."),
        ProgressBar("encoding") as progress,
    ):
        data = prepare_data(*questions, base.tokenizer(), held_out=held_out, source=source)
        record = train_clrs(
            out, base, recipe, data, tests, device=device, attention="dense" if dense else "engine",
            compiled=compiled, checkpoint_every=checkpoint_every, save_model=save_model,
            report=lambda stage, done, total, entry: progress(
                stage, done, total, detail=f"loss {entry['loss']:.3f}" if entry else ""
            ),
        )  # fmt: skip
    if as_json:
        show_json(record)
    else:
        for name, cells in record["result"]["exact"].items():
            show(_clrs_table(name, cells))
    say(f"wrote {out}")


def _questions(
    train: Path | None,
    test: Path | None,
    generate: int | None,
    sizes: "tuple[Any, Any]",
    algorithms: list[str],
    seed: int,
    *,
    quick: bool,
) -> "tuple[tuple[list[ClrsExample], list[ClrsExample]], dict[str, Any]]":
    """Return training and test questions, and the description of where they come from."""
    from attnorm.provenance import file_hash
    from attnorm_lab.training.clrs.data import dm_clrs_examples, quick_examples, read_examples

    if (train is None) != (test is None) or (train is not None and generate is not None):
        raise ValueError("expected TRAIN together with --test FILE, or --generate N, or --quick alone")
    if train is not None and test is not None:
        files = {
            name: {"name": path.name, "sha256": file_hash(path)} for name, path in (("train", train), ("test", test))
        }
        return (read_examples(train, algorithms), read_examples(test, algorithms)), {**files, "algorithms": algorithms}
    if generate is not None:
        count = _GENERATED_TEST * len(sizes[1]) * (len(algorithms) or 30)
        tested = dm_clrs_examples(algorithms, sizes[1], count, seed + 1)
        known = [example.question for example in tested]
        training = dm_clrs_examples(algorithms, sizes[0], generate, seed, known)
        return (training, tested), {"generated": generate, "sizes": sizes, "algorithms": algorithms, "seed": seed}
    if quick and algorithms:
        raise ValueError(
            f"--quick: expected no --algorithms, because it uses two fixed ones, got {','.join(algorithms)}. Remove "
            "one of the options."
        )
    if quick:
        return quick_examples(seed), {"quick": seed}
    raise ValueError("expected TRAIN with --test FILE, --generate N (dm-clrs), or --quick; got none")


def _clrs_table(tested_with: str, cells: dict[str, dict[str, str]]) -> Table:
    from attnorm_lab.training.clrs.evaluate import accuracy_by_size

    accuracy = accuracy_by_size(cells)
    sizes = sorted({size for by_size in accuracy.values() for size in by_size})
    table = Table(title=f"Right answers in %, by problem size; tested with: {tested_with}", title_justify="left")
    table.add_column("algorithm", no_wrap=True)
    for size in sizes:
        table.add_column(str(size), justify="right")
    for algorithm, by_size in accuracy.items():
        shares = (by_size.get(size) for size in sizes)
        table.add_row(algorithm, *("-" if cell is None else f"{100 * cell[0] / cell[1]:.0f}" for cell in shares))
    return table
