"""attnorm train: small language models (lm), pass keys (needle), and picking from sets (retrieval)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from attnorm.cli.analysis_options import numbers_of
from attnorm.cli.output import Json, SafeConsole, say, show, show_json, usage_errors
from attnorm.cli.train_needle import needle
from attnorm.cli.train_retrieval import retrieval
from attnorm.provenance import recorded_command

if TYPE_CHECKING:
    from attnorm.training.lm.run import LMProgress as Stage

_SAFE = "earlier checkpoints are complete, and the same command continues from the last one"

train = typer.Typer(
    name="train",
    help="Train small models: on text (lm), to find keys in text (needle), to pick from sets (retrieval).",
    no_args_is_help=True,
)
train.command()(retrieval)
train.command()(needle)


@train.command()
def lm(
    texts: Annotated[list[Path], typer.Argument(metavar="TEXT", help="Text files to train on: .txt or .txt.xz.")],
    valid: Annotated[Path, typer.Option(help="Text file held out for the validation loss.")],
    out: Annotated[Path, typer.Option(help="Folder for the model; if it holds this run, the run continues.")],
    architecture: Annotated[str, typer.Option(help="gpt2, or llama (rotary positions).")] = "gpt2",
    normalizer: Annotated[
        str, typer.Option(metavar="NAME", help="Normalizer instead of softmax; `attnorm normalizers` lists them.")
    ] = "softmax",
    normalizer_options: Annotated[
        str, typer.Option(metavar="KEY=VALUE,...", help="Options of the normalizer, e.g. alpha=1.3,learned=true.")
    ] = "",
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 6,
    heads: Annotated[int, typer.Option(help="Attention heads per layer.")] = 6,
    width: Annotated[int, typer.Option(help="Width of the model; a multiple of the heads.")] = 192,
    context: Annotated[int, typer.Option(help="Tokens per window, and positions of the model.")] = 1024,
    vocab: Annotated[int, typer.Option(help="Size of the vocabulary, which is trained on the text.")] = 4096,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.", show_default="1000")] = None,
    tokens: Annotated[int | None, typer.Option(help="Total number of tokens, instead of --steps.")] = None,
    batch: Annotated[int, typer.Option(help="Windows per step.")] = 16,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    warmup: Annotated[int, typer.Option(help="Warmup steps; a cosine schedule to 0 follows.")] = 100,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of AdamW, on matrices only.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Random seed for weights, windows and the tokenizer's sample.")] = 0,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16 (autocast).", show_default="bfloat16 on CUDA, else float32")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1.", show_default="cuda if there is one")] = None,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="torch.compile the blocks.")] = False,
    dense: Annotated[
        bool,
        typer.Option("--dense", help="Compute attention over the whole matrix of weights: often faster, if it fits."),
    ] = False,
    eval_every: Annotated[int, typer.Option(help="Steps between validation losses.")] = 250,
    eval_lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Window lengths for the final loss.",
            show_default="1, 2 and 4 times the context, as far as the model has positions",
        ),
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 250,
    resume: Annotated[bool, typer.Option(help="Continue from the last checkpoint, or start from scratch.")] = True,
    max_minutes: Annotated[
        float | None, typer.Option(help="Stop training after this many minutes, then evaluate and write the model.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder for the encoded texts; runs may share it.", show_default="OUT/data")
    ] = None,
    sample: Annotated[int, typer.Option(help="Tokens of generated text in sample.txt.")] = 0,
    note: Annotated[str, typer.Option(help="Source and licence of the text, for the model card.")] = "",
    as_json: Json = False,
) -> None:
    """Train a small language model and write a standard Hugging Face folder with a model card.

    Reports the validation loss next to unigram and bigram counts on the same tokens. Run the same command again to
    continue an interrupted run. Exit code 130: interrupted, with a checkpoint.

    Example: attnorm train lm book.txt --valid other.txt --normalizer ssmax --out my-lm
    """
    import torch

    from attnorm.training.lm.run import train_lm
    from attnorm.training.lm.settings import LMSettings

    with usage_errors():
        if steps is not None and tokens is not None:
            raise ValueError("give --steps or --tokens, not both")
        if tokens is not None:
            steps = -(-tokens // max(1, batch * context))
        on_cuda = torch.cuda.is_available() if device is None else device.startswith("cuda")
        settings = LMSettings(
            architecture=architecture, layers=layers, heads=heads, width=width, context=context, vocab=vocab,
            steps=1000 if steps is None else steps, batch=batch, learning_rate=lr, warmup=warmup,
            weight_decay=weight_decay, seed=seed, dtype=dtype or ("bfloat16" if on_cuda else "float32"),
            normalizer=normalizer, normalizer_options=_options(normalizer_options),
        )  # fmt: skip
        try:
            with _progress() as report:
                record = train_lm(
                    texts, valid, out, settings, data=data, device=device, compiled=compiled,
                    attention="dense" if dense else "engine", resume=resume,
                    evaluate_every=eval_every, checkpoint_every=checkpoint_every, max_minutes=max_minutes,
                    lengths=numbers_of("--eval-lengths", eval_lengths),
                    sample_tokens=sample, note=note, command=recorded_command(), report=report,
                )  # fmt: skip
        except KeyboardInterrupt as stopped:  # without a message if no step was running
            say(str(stopped) or f"interrupted; {_SAFE}")
            raise typer.Exit(130) from None
        except OSError as error:
            say(f"cannot write {error.filename or out}: {error.strerror}; {_SAFE}")
            raise typer.Exit(1) from None
    if as_json:
        show_json(record)
        return
    from attnorm.training.lm.card import rise_in_words

    show(_losses(record["result"]))
    if record["result"]["rise"]:
        say(f"warning: the loss rose: {rise_in_words(record['result']['rise'])}")
    say(f"wrote {out}")


def _losses(result: dict[str, Any]) -> Table:
    validation = result["validation"]
    table = Table(
        title=f"Validation loss after {result['tokens']:,} tokens",
        caption=f"{validation['tokens']:,} tokens, {validation['bytes']:,} bytes{_speed(result)}",
    )
    table.add_column("")
    for name in ("nats per token", "perplexity", "bits per byte"):
        table.add_column(name, justify="right")
    lengths = validation.get("by_length", ())
    rows = {name: validation[name] for name in ("model", "bigram", "unigram")}
    if len(lengths) > 1:
        rows |= {f"model, windows of {figures['length']:,}": figures for figures in lengths}
    for name, figures in rows.items():
        table.add_row(
            name, f"{figures['nats_per_token']:.3f}", f"{figures['perplexity']:.1f}", f"{figures['bits_per_byte']:.3f}"
        )
    return table


def _speed(result: dict[str, Any]) -> str:
    speed, peak = (result.get(name) for name in ("tokens_per_second", "peak_memory_bytes"))
    memory = "" if peak is None else f"; at most {peak / 2**30:.2f} GiB of memory"
    return ("" if speed is None else f"; {speed:,.0f} tokens/s") + memory


def _options(text: str) -> dict[str, Any]:
    """Parse 'alpha=1.3,learned=true' to {"alpha": 1.3, "learned": True}."""
    from attnorm.normalizers.spec import parse_value

    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not (key and equals and value) or key in found:
            raise ValueError(
                f"--normalizer-options takes key=value with commas between, each key once; got {part!r} in {text!r}"
            )
        found[key] = parse_value(value)
    return found


@contextmanager
def _progress() -> "Iterator[Callable[[Stage], None]]":
    """Show a bar on stderr, or a line per validation loss if stderr is not a terminal."""
    console = SafeConsole(stderr=True)
    columns = (
        TextColumn("{task.description:10}", markup=False), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None, figures="")
        stage = ""

        def report(now: "Stage") -> None:
            nonlocal stage
            figures = _figures(now.metrics) if now.metrics else ""
            bar.update(task, description=now.stage, completed=now.done, total=now.total, figures=figures)
            if not console.is_terminal:
                if now.stage != stage:
                    say(now.stage)
                elif now.metrics and "valid_loss" in now.metrics:
                    say(f"step {now.done:,} of {now.total:,}: {figures}")
            stage = now.stage

        yield report


def _figures(metrics: dict[str, Any]) -> str:
    words = [f"loss {metrics['loss']:.3f}"]
    if "valid_loss" in metrics:
        words.append(f"validation {metrics['valid_loss']:.3f}")
    return ", ".join([*words, f"{metrics['tokens_per_second']:,.0f} tokens/s"])
