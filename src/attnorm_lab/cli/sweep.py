"""attnorm lab sweep: run a plan of many items; attnorm lab search: find the best normalizer of every layer with Optuna.

Both run on this machine, on Ray or on Slurm, and share the options about it.
"""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Table

from attnorm.cli.output import Json, ProgressBar, duration, failures, plain_table, say, show, show_json, usage_errors

if TYPE_CHECKING:
    from attnorm_lab.runs.engines import Outcome
    from attnorm_lab.runs.folder import ItemState
    from attnorm_lab.runs.search.results import SearchResult, TrialResult

_ITEMS_KEPT = "Interrupted; finished items are kept, and the same command resumes."
_SHOWN_ITEMS = 40  # items in the table of --status

On = Annotated[
    str, typer.Option("--on", metavar="local|ray|slurm", help="Where items run: on this machine, on Ray or on Slurm.")
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Maximum number of items that run in parallel; on Slurm, of jobs.",
        show_default="as many as fit; 16 jobs",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="Address of the Ray cluster.", show_default="RAY_ADDRESS, a running one, or a new one"
    ),
]
Retries = Annotated[int, typer.Option(min=0, help="How often to start an item again after its worker process died.")]


def sweep(
    plan: Annotated[
        Path | None, typer.Argument(metavar="PLAN", help="Plan in TOML; --status does not need it.", show_default=False)
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Output folder for all results. The same command resumes an interrupted sweep."
        ),
    ] = Path("sweep"),
    on: On = "local",
    workers: Workers = None,
    address: Address = None,
    retries: Retries = 3,
    extend: Annotated[
        bool, typer.Option("--extend", help="Run a changed plan in the same folder; results of equal items are kept.")
    ] = False,
    status: Annotated[bool, typer.Option("--status", help="Show the progress of the sweep in DIR and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Run every combination of a plan once, and compare the results in one table and one page.

    A plan names a command (analyze, train lm, train retrieval, reproduce), lists to combine, and values for all. Each
    item gets its own run folder in DIR/items. A failed item does not stop the others; run the command again to
    retry it. Finished items are never run again.

    Exit codes: 0 all items finished; 1 no disk space or memory; 2 wrong usage or input; 3 some items failed; 130
    interrupted.

    Example: attnorm lab sweep plan.toml --out sweep --on ray
    """
    with usage_errors():
        from attnorm_lab.runs.folder import PAGE, TABLE, read_items, states
        from attnorm_lab.runs.plan import read_plan
        from attnorm_lab.runs.run import sweep as run

        if status:
            _show_states(states(out, read_items(out)), as_json)
            return
        if plan is None:
            raise ValueError("expected a plan, got none. Write one (docs/scaling.md), or show a sweep with --status.")
        planned = read_plan(plan)
    with failures(lambda: _ITEMS_KEPT, writes_to=out), ProgressBar("starting") as progress:
        report = partial(_report, progress, "running")
        result = run(
            planned, out, on=on, workers=workers, address=address, retries=retries, extend=extend, report=report
        )
    _show_states(result.states, as_json)
    say(f"table: {out / TABLE}")
    say(f"page: {out / PAGE}")
    if result.counts["failed"]:
        raise typer.Exit(3)


def _report(progress: ProgressBar, word: str, outcome: "Outcome", done: int, total: int) -> None:
    """Show a finished item or trial in the progress bar, and its error above the bar."""
    if outcome.error:
        say(f"failed: {outcome.id}: {outcome.error}")
    ending = "failed" if outcome.error else "pruned" if outcome.pruned else f"{outcome.seconds:.1f} s"
    progress(word, done, total, detail=ending)


def _show_states(states: "list[ItemState]", as_json: bool) -> None:
    if as_json:
        show_json([_as_dict(each) for each in states])
        return
    counts = Counter(each.state for each in states)
    title = f"{len(states):,} items: {', '.join(f'{count:,} {state}' for state, count in counts.items())}"
    table = plain_table("item", "values", "state", "time", "host or error", title=title)
    order = ("failed", "running", "finished", "pruned", "waiting")
    for each in sorted(states, key=lambda each: order.index(each.state))[:_SHOWN_ITEMS]:
        seconds = "" if each.seconds is None else duration(each.seconds)
        table.add_row(each.item.id, each.item.label, each.state, seconds, each.error or each.host)
    if len(states) > _SHOWN_ITEMS:
        table.caption = f"{len(states) - _SHOWN_ITEMS:,} more; --json lists all"
    show(table)


def _as_dict(each: "ItemState") -> dict[str, Any]:
    return {
        "item": each.item.id, "values": each.item.varied, "state": each.state, "seconds": each.seconds,
        "host": each.host, "error": each.error,
    }  # fmt: skip


_TRIALS_KEPT = "Interrupted; all trials are kept, and the same command resumes."
_SHOWN_TRIALS = 10


def search(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="Search plan in TOML.")],
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Output folder for all trials. The same command resumes an interrupted search."
        ),
    ] = Path("search"),
    on: On = "local",
    workers: Workers = None,
    address: Address = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="URL of the database for Optuna's studies.", show_default="a journal in DIR"),
    ] = None,
    retries: Retries = 3,
    as_json: Json = False,
) -> None:
    """Search for the normalizer of every layer, its options and the learning rate with Optuna.

    Each trial trains a small language model, as `attnorm lab train lm` does. Several objectives give a Pareto front.
    The best recipe is written to DIR/recipe.toml, which `attnorm lab train lm --recipe` and attnorm.patch read. If
    the plan has a table `confirm`, the best mixed and the best uniform recipe are trained again with other seeds.

    Exit codes: 0 done; 1 no disk space or memory; 2 wrong usage or input; 3 no trial finished; 130 interrupted.

    Example: attnorm lab search plan.toml --out search --workers 2
    """
    with usage_errors():
        from attnorm_lab.runs.search.plan import read_search_plan
        from attnorm_lab.runs.search.run import search as run

        planned = read_search_plan(plan)
    with failures(lambda: _TRIALS_KEPT, writes_to=out), ProgressBar("starting") as progress:
        report = partial(_report, progress, "trials")
        result = run(
            planned, out, on=on, workers=workers, address=address, storage=storage, retries=retries, report=report
        )
    if as_json:
        from dataclasses import asdict

        show_json(asdict(result))
    else:
        show(_search_tables(result))
    if result.best is None:
        say("No trial finished. `attnorm lab sweep --status --out DIR` shows the errors.")
        raise typer.Exit(3)
    say(f"recipe: {out / 'recipe.toml'}")
    say(f"page: {out / 'index.html'}")


def _search_tables(result: "SearchResult") -> Group:
    counts = Counter(trial.state for trial in result.trials)
    done = [trial for trial in result.trials if trial.values]
    names = list(done[0].values) if done else []
    title = f"{len(result.trials)} trials: {', '.join(f'{count} {state}' for state, count in counts.items())}"
    caption = "*: no other trial is better in every objective"
    table = plain_table("trial", *names, "learning rate", "recipe", title=title, caption=caption)
    front = {trial.number for trial in result.front}
    first = sorted(done, key=lambda trial: (trial.number not in front, trial is not result.best))
    for trial in (
        *first[:_SHOWN_TRIALS],
        *(each for each in (result.best_uniform,) if each and each not in first[:_SHOWN_TRIALS]),
    ):
        mark = " *" if trial.number in front else ""
        cells = (f"{value:.4g}" for value in trial.values.values())
        table.add_row(f"{trial.number}{mark}", *cells, f"{trial.learning_rate:.3g}", _recipe(trial))
    parts: list[Any] = [table]
    if result.importance:
        parts.append(_importance(result))
    if result.confirmation:
        parts.append(_confirmation(result.confirmation))
    return Group(*parts)


def _recipe(trial: "TrialResult") -> str:
    return " ".join(f"{layers}:{spec}" for layers, spec in trial.recipe.items())


def _importance(result: "SearchResult") -> Table:
    table = plain_table("choice", *result.importance, right=result.importance, title="Importance of each choice")
    for choice in next(iter(result.importance.values())):
        table.add_row(choice, *(f"{100 * shares.get(choice, 0):.0f} %" for shares in result.importance.values()))
    return table


def _confirmation(confirmation: dict[str, Any]) -> Table:
    title = f"Best mixed and best uniform recipe, {len(confirmation['seeds'])} other seeds"
    table = plain_table("objective", "mixed", "uniform", "mixed - uniform", "p", title=title)
    for name, comparison in confirmation["objectives"].items():
        means = [f"{sum(values) / len(values):.4g}" if (values := comparison["values"].get(side)) else "-" for side in
                 ("mixed", "uniform")]  # fmt: skip
        known = comparison["difference"] is not None and comparison["half_width"] is not None
        difference = f"{comparison['difference']:+.4g} ± {comparison['half_width']:.2g}" if known else "-"
        table.add_row(name, *means, difference, "-" if comparison["p"] is None else f"{comparison['p']:.2g}")
    return table
