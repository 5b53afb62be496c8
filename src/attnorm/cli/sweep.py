"""attnorm sweep: run a plan of many items on this machine, on Ray or on Slurm."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from attnorm.cli.output import Json, failures, say, show, show_json, usage_errors
from attnorm.cli.progress import ProgressBar, duration

if TYPE_CHECKING:
    from attnorm.sweep.folder import ItemState
    from attnorm.sweep.work import Outcome

_KEPT = "Interrupted; finished items are kept, and the same command resumes."
_SHOWN = 40  # items in the table of --status

On = Annotated[str, typer.Option("--on", metavar="local|ray|slurm", help="Where the items run.")]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1, help="Largest number of parallel items; of jobs on Slurm.", show_default="as many as fit; 16 jobs"
    ),
]
Address = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Ray cluster.", show_default="RAY_ADDRESS, a running one, or a new one"),
]
Retries = Annotated[int, typer.Option(min=0, help="How often an item starts again after its worker died.")]


def sweep(
    plan: Annotated[
        Path | None, typer.Argument(metavar="PLAN", help="Plan in TOML; --status does not need it.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for all results; the same command resumes.")] = Path(
        "sweep"
    ),
    on: On = "local",
    workers: Workers = None,
    address: Address = None,
    retries: Retries = 3,
    extend: Annotated[
        bool, typer.Option("--extend", help="Run a changed plan in the same folder; equal items are kept.")
    ] = False,
    status: Annotated[bool, typer.Option("--status", help="Show the progress of the sweep in DIR and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Run every combination of a plan, each once, and write one table and one page that compare them.

    A plan names a command (analyze, train lm, train retrieval, reproduce), lists to combine, and values for all. Each
    item gets an ordinary run folder in DIR/items. A failed item does not stop the others; run the command again to
    retry it. Finished items are never run again.

    Exit codes: 0 all items finished; 1 no disk space or memory; 2 wrong usage or input; 3 some items failed; 130
    interrupted.

    Example: attnorm sweep plan.toml --out sweep --on ray
    """
    with usage_errors():
        from attnorm.sweep.folder import PAGE, TABLE, read_items, states
        from attnorm.sweep.plan import read_plan
        from attnorm.sweep.run import sweep as run

        if status:
            _show_states(states(out, read_items(out)), as_json)
            return
        if plan is None:
            raise ValueError("expected a plan, got none. Write one (docs/scaling.md), or show a sweep with --status.")
        planned = read_plan(plan)
    with failures(lambda: _KEPT, writes_to=out), ProgressBar("starting") as progress:

        def report(outcome: "Outcome", done: int, total: int) -> None:
            if outcome.error:
                say(f"failed: {outcome.id}: {outcome.error}")
            progress("running", done, total, detail="failed" if outcome.error else f"{outcome.seconds:.1f} s")

        result = run(
            planned, out, on=on, workers=workers, address=address, retries=retries, extend=extend, report=report
        )
    _show_states(result.states, as_json)
    say(f"table: {out / TABLE}")
    say(f"page: {out / PAGE}")
    if result.counts["failed"]:
        raise typer.Exit(3)


def _show_states(states: "list[ItemState]", as_json: bool) -> None:
    if as_json:
        show_json([_as_dict(each) for each in states])
        return
    counts: dict[str, int] = {}
    for each in states:
        counts[each.state] = counts.get(each.state, 0) + 1
    table = Table(
        title=f"{len(states):,} items: {', '.join(f'{count:,} {state}' for state, count in counts.items())}",
        title_justify="left", box=None, padding=(0, 2, 0, 0),
    )  # fmt: skip
    for name in ("item", "values", "state", "time", "host or error"):
        table.add_column(name)
    order = ("failed", "running", "finished", "pruned", "waiting")
    for each in sorted(states, key=lambda each: order.index(each.state))[:_SHOWN]:
        seconds = "" if each.seconds is None else duration(each.seconds)
        table.add_row(each.item.id, each.item.label, each.state, seconds, each.error or each.host)
    if len(states) > _SHOWN:
        table.caption = f"{len(states) - _SHOWN:,} more; --json lists all"
    show(table)


def _as_dict(each: "ItemState") -> dict[str, Any]:
    return {
        "item": each.item.id, "values": each.item.varied, "state": each.state, "seconds": each.seconds,
        "host": each.host, "error": each.error,
    }  # fmt: skip
