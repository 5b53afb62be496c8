"""Run a plan: start what is not finished, start again what lost its worker, and merge the results."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnorm.run_folder import only_process
from attnorm.sweep.engines import Engine, WorkerDied, open_engine
from attnorm.sweep.folder import (
    PAGE,
    ItemState,
    failure_of,
    forget_failures,
    merged_rows,
    open_sweep,
    read_items,
    result_of,
    states,
    write_failure,
    write_page,
    write_table,
)
from attnorm.sweep.plan import Item, Plan
from attnorm.sweep.worker import Outcome

RETRIES = 3
MERGE_SECONDS = 60  # between two versions of the table and the page while items run
Report = Callable[[Outcome, int, int], None]


@dataclass(frozen=True)
class SweepResult:
    states: list[ItemState]
    rows: list[dict[str, Any]]

    @property
    def counts(self) -> Counter[str]:
        return Counter(item_state.state for item_state in self.states)


def sweep(
    plan: Plan,
    out: Path,
    *,
    on: str = "local",
    workers: int | None = None,
    address: str | None = None,
    retries: int = RETRIES,
    extend: bool = False,
    report: Report = lambda outcome, done, total: None,
) -> SweepResult:
    """Run all items of the plan that are not finished; write the merged table and the page.

    Args:
        on: "local", "ray" or "slurm".
        workers: Most items at the same time (default: as many as fit).
        address: Ray cluster (default: RAY_ADDRESS, a running cluster, or one started here).
        retries: How often an item is started again after its worker died.
        extend: Accept a folder with another plan.
        report: Called after every item with its outcome, the number of items done and their total.

    Raises:
        ValueError: The folder holds another sweep, another process runs it, or the engine cannot be used.
        ImportError: The library of the engine is not installed.
    """
    with only_process(out):
        open_sweep(out, plan, extend=extend)
        missing = [item for item in plan.items if result_of(out, item.id) is None]
        done, total = len(plan.items) - len(missing), len(plan.items)
        if missing:
            engine = open_engine(
                on, out, plan.resources, workers=workers, address=address, slurm=plan.slurm
            )  # before old failures are forgotten: a cluster out of reach changes nothing
            forget_failures(out, missing)
            merged = time.monotonic()
            for outcome in run_items(engine, out, missing, retries):
                done += 1
                report(outcome, done, total)
                if time.monotonic() - merged > MERGE_SECONDS:
                    merge(out, plan.items)
                    merged = time.monotonic()
        return merge(out, plan.items)


def merge(out: Path, items: Sequence[Item] | None = None) -> SweepResult:
    """Write the table and the page from what is finished."""
    items = read_items(out) if items is None else items
    result = SweepResult(states(out, items), merged_rows(out, items))
    write_table(out, result.rows)
    write_page(out / PAGE, result.states, result.rows)
    return result


def run_items(engine: Engine, out: Path, items: Iterable[Item], retries: int) -> "Iterable[Outcome]":
    """Yield one outcome per item, in the order in which they end; closes the engine."""
    attempts: Counter[str] = Counter()
    running: dict[Future[list[Outcome]], list[Item]] = {}
    kill = True
    try:
        waiting = deque(engine.chunks(list(items)))
        while waiting or running:
            while waiting and (engine.in_flight is None or len(running) < engine.in_flight):
                chunk = waiting.popleft()
                running[engine.submit(chunk)] = chunk
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                chunk = running.pop(future)
                for outcome in _outcomes(future, out, chunk, attempts, retries):
                    if isinstance(outcome, Outcome):
                        _record_failure(out, chunk, outcome)
                        yield outcome
                    else:
                        waiting.append([outcome])
        kill = False
    finally:
        engine.close(kill=kill)


def _outcomes(
    future: "Future[list[Outcome]]", out: Path, chunk: list[Item], attempts: Counter[str], retries: int
) -> "Iterable[Outcome | Item]":
    """Outcomes of a chunk, and the items to start again because their worker died."""
    try:
        yield from future.result()
        return
    except WorkerDied as died:
        reason = str(died)
    for item in chunk:
        if (result := result_of(out, item.id)) is not None:
            yield Outcome(item.id, "", result["rows"], result["seconds"], result.get("pruned", False))
        elif len(chunk) > 1 and (failure := failure_of(out, item.id)) is not None:
            yield Outcome(item.id, failure["error"])
        elif attempts[item.id] < retries:
            attempts[item.id] += 1
            yield item
        else:
            tried = f"{retries + 1} times" if retries else "once"
            yield Outcome(item.id, f"{reason}; tried {tried}. If it needs more memory, raise memory_gb in [resources].")


def _record_failure(out: Path, chunk: list[Item], outcome: Outcome) -> None:
    """Keep the error of an item whose worker could not write it: killed, or its disk is full."""
    item = next(item for item in chunk if item.id == outcome.id)
    if outcome.error and failure_of(out, item.id) is None:
        with suppress(OSError):
            write_failure(out, item, outcome.error, "")
