"""attnorm train needle: fine-tune a model to find pass keys, and test it far beyond its training length."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from attnorm.cli.analysis_options import numbers_of
from attnorm.cli.output import Json, say, show, show_json, usage_errors


def needle(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder that `train lm` wrote, or bundled.")],
    text: Annotated[Path, typer.Option(help="Text to hide keys in; its last quarter is for the test.")],
    characters: Annotated[int, typer.Option(help="Characters per answer.")] = 5,
    keys: Annotated[int, typer.Option(help="Keys per window in fine-tuning, or as many as fit.")] = 10,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 600,
    batch: Annotated[int, typer.Option(help="Windows per step.")] = 32,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    longer: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Test lengths, as multiples of the training length.",
            show_default="1,2,4; 1 for learned positions",
        ),
    ] = None,
    questions: Annotated[int, typer.Option(help="Questions per length and depth (five depths).")] = 20,
    seed: Annotated[int, typer.Option(help="Random seed for the keys and their positions.")] = 0,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 or bfloat16 (autocast).", show_default="float32 on a CPU, else as trained"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1.", show_default="cuda if there is one")] = None,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="torch.compile the blocks.")] = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a copy of the model on hidden pass keys, then count the keys found at increasing lengths.

    The loss covers the answers only. The folder of the model is not changed.

    Example: attnorm train needle my-lm --text other.txt
    """
    from attnorm.training.needle.run import train_needle, usual_longer
    from attnorm.training.needle.train import NeedleTask

    def report(step: int, loss: float) -> None:
        say(f"step {step:,} of {steps:,}: loss {loss:.3f}")

    with usage_errors():
        times = usual_longer(model) if longer is None else tuple(numbers_of("--longer", longer) or ())
        task = NeedleTask(
            characters=characters, keys=keys, steps=steps, batch=batch, learning_rate=lr, seed=seed,
            questions=questions, longer=times,
        )  # fmt: skip
        record = train_needle(model, text, task, device=device, dtype=dtype, compiled=compiled, report=report)
    if as_json:
        show_json(record)
    else:
        show(_found(record))


def _found(record: dict[str, Any]) -> Table:
    task = record["task"]
    depths = list(dict.fromkeys(answer["depth"] for answer in record["answers"]))
    table = Table(
        title="Pass keys found, %",
        caption=f"{task['questions']} questions each, answers of {task['characters']} characters; depth 0 is the start",
    )
    for name in ("length", "all", *(f"depth {depth:g}" for depth in depths), "characters"):
        table.add_column(name, justify="right")
    for length, figures in record["by_length"].items():
        here = [answer for answer in record["answers"] if answer["length"] == int(length)]
        cells = [figures["exact"], *(answer["exact"] for answer in here), figures["characters"]]
        table.add_row(f"{int(length):,}", *(f"{100 * cell:.0f}" for cell in cells))
    return table
