"""attnorm train clrs: train a model to answer CLRS-Text questions, and test it on larger problems."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from attnorm.cli.analysis_options import names_of, numbers_of
from attnorm.cli.output import Json, ProgressBar, failures, say, show, show_json, usage_errors
from attnorm.cli.train_retrieval import Device

if TYPE_CHECKING:
    from attnorm.training.clrs.data import ClrsExample

_KEPT = "Interrupted; the checkpoint is kept, and the same command resumes from it."
_QUICK: dict[str, Any] = {
    "steps": 30, "batch": 16, "lr": 3e-3, "warmup": 5, "layers": 2, "heads": 2, "width": 32, "held_out": 20,
}  # fmt: skip
_FULL: dict[str, Any] = {
    "steps": 1000, "batch": 256, "lr": 3e-4, "warmup": 50, "layers": 4, "heads": 4, "width": 128, "held_out": 2000,
}  # fmt: skip
_GENERATED_TEST = 32  # questions per algorithm and size


def clrs(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the run; the same command resumes from it.")],
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
        str, typer.Option(metavar="N,N,...", help="With --generate: sizes in training.")
    ] = "4,5,6,8,10,12",
    test_sizes: Annotated[
        str, typer.Option(metavar="N,N,...", help="With --generate: sizes in the test.")
    ] = "4,8,12,16,20,24",
    algorithms: Annotated[
        str, typer.Option(metavar="NAME,NAME,...", help="Only these algorithms (default: all).")
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
            help="Normalizers that replace the trained one in further tests; re-fitted is an adaptive temperature "
            "fitted to the trained softmax model.",
        ),
    ] = "",
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.", show_default="1000")] = None,
    batch: Annotated[int | None, typer.Option(help="Questions per step.", show_default="256")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.", show_default="0.0003")] = None,
    warmup: Annotated[int | None, typer.Option(help="Warmup steps; a cosine to 0 follows.", show_default="50")] = None,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of AdamW, on matrices only.")] = 0.1,
    layers: Annotated[int | None, typer.Option(help="From scratch: layers.", show_default="4")] = None,
    heads: Annotated[int | None, typer.Option(help="From scratch: heads per layer.", show_default="4")] = None,
    width: Annotated[int | None, typer.Option(help="From scratch: width.", show_default="128")] = None,
    held_out: Annotated[
        int | None, typer.Option(help="Training questions kept apart for the held-out loss.", show_default="2000")
    ] = None,
    tokens_at_once: Annotated[int, typer.Option(help="Padded tokens of one forward pass.")] = 2**14,
    observed: Annotated[
        int, typer.Option(help="Test questions per algorithm and size whose attention entropy is measured.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Random seed for weights and the order of questions.")] = 0,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16 (autocast).", show_default="bfloat16 on CUDA, else float32")
    ] = None,
    device: Device = None,
    dense: Annotated[bool, typer.Option("--dense", help="Compute whole weight matrices; often faster.")] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the blocks: faster on a GPU after the first steps.")
    ] = False,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 250,
    save_model: Annotated[
        bool, typer.Option("--save-model", help="Also write the model as a Hugging Face folder, DIR/model.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny model on generated questions of two tasks: seconds.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a model on CLRS-Text questions, and test it on larger problems than in training.

    The loss covers the answers only. An answer counts as right if every token of the greedy answer is right. Run the
    same command again to resume.

    Exit codes: 1 no disk space or memory; 2 wrong usage or input; 130 interrupted.

    Example: attnorm train clrs --quick --out clrs
    """
    import torch

    with usage_errors():
        from attnorm.training.clrs.data import prepare_data
        from attnorm.training.clrs.model import ClrsBase, ClrsRecipe, with_normalizer
        from attnorm.training.clrs.train import ClrsTests, train_clrs

        options = {
            "steps": steps, "batch": batch, "lr": lr, "warmup": warmup, "layers": layers, "heads": heads,
            "width": width, "held_out": held_out,
        }  # fmt: skip
        settings = (_QUICK if quick else _FULL) | {name: value for name, value in options.items() if value is not None}
        on_cuda = torch.cuda.is_available() if device is None else device.startswith("cuda")
        recipe = with_normalizer(
            ClrsRecipe(
                **{name: settings[name] for name in ("steps", "batch", "warmup", "layers", "heads", "width")},
                learning_rate=settings["lr"], weight_decay=weight_decay, seed=seed, tokens_at_once=tokens_at_once,
                dtype=dtype or ("bfloat16" if on_cuda else "float32"),
            ),
            normalizer,
        )  # fmt: skip
        tests = ClrsTests(others=tuple(names_of(test_with)), observed=observed)
        base = ClrsBase(model)
        lengths = (numbers_of("--sizes", sizes) or (), numbers_of("--test-sizes", test_sizes) or ())
        questions, source = _questions(train, test, generate, lengths, names_of(algorithms), seed, quick=quick)
    with (
        failures(lambda: _KEPT, writes_to=out, out_of_memory="Use a smaller --tokens-at-once."),
        ProgressBar("encoding") as progress,
    ):
        data = prepare_data(*questions, base.tokenizer(), held_out=settings["held_out"], source=source)
        record = train_clrs(
            out, base, recipe, data, tests, device=device, attention="dense" if dense else "engine",
            compiled=compiled, checkpoint_every=checkpoint_every, save_model=save_model,
            report=lambda stage, done, total, entry: progress(
                stage, done, total, detail=f"loss {entry['loss']:.3f}" if entry else ""
            ),
        )  # fmt: skip
    if as_json:
        show_json(record)
        return
    for name, cells in record["result"]["exact"].items():
        show(_table(name, cells))
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
    from attnorm.training.clrs.data import dm_clrs_examples, quick_examples, read_examples

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
    if quick:
        return quick_examples(seed), {"quick": seed}
    raise ValueError("no questions: expected TRAIN with --test FILE, --generate N (dm-clrs), or --quick; got none")


def _table(tested_with: str, cells: dict[str, dict[str, str]]) -> Table:
    from attnorm.training.clrs.train import accuracy_by_size

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
