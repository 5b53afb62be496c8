"""Run a plan: start unfinished items, restart items whose worker died, and merge the results.

A worker (`run_item`) runs an item once, whatever happens to the workers around it. The item's lock admits one process;
whoever gets it next finds the result, or continues from the last checkpoint. An error of the item becomes its outcome,
so one bad item stops no other.
"""

import errno
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from attnorm.files import finite
from attnorm.provenance import now, versions
from attnorm.run_folder import lock, only_process
from attnorm_lab.runs.engines import Engine, Outcome, Work, WorkerDied, check_engine, open_engine
from attnorm_lab.runs.folder import (
    PAGE,
    RECORD,
    TABLE,
    ItemState,
    failure_of,
    forget_failures,
    item_folder,
    lock_of,
    merged_rows,
    open_sweep,
    read_items,
    result_of,
    states,
    write_failure,
    write_page,
    write_result,
    write_table,
)
from attnorm_lab.runs.plan import Item, Plan
from attnorm_lab.runs.tasks import TASKS, models_loaded
from attnorm_lab.training.checkpoints import NotFiniteError

RETRIES = 3
MERGE_SECONDS = 60  # between two versions of the table and the page while items run
OutcomeCallback = Callable[[Outcome, int, int], None]


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
    report: OutcomeCallback = lambda outcome, done, total: None,
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
        ValueError: The folder contains another sweep, another process runs it, or the engine cannot be used.
        ImportError: The library of the engine is not installed.
    """
    check_engine(on)  # before the folder belongs to this plan
    with only_process(out):
        open_sweep(out, plan, extend=extend)
        missing = [item for item in plan.items if result_of(out, item.id) is None]
        done, total = len(plan.items) - len(missing), len(plan.items)
        if missing:
            work = work_in(out, on, plan.resources.threads)
            engine = open_engine(
                on, out, plan.resources, work, workers=workers, address=address, slurm=plan.slurm
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
    write_table(out / TABLE, result.rows)
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


class Pruned(Exception):  # noqa: N818 - not an error: the run was stopped because others are better
    """Raised by a hook to stop an item early; its rows so far are its result."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        super().__init__("pruned")
        self.rows = rows


Hook = Callable[[Mapping[str, Any], Path, Path], list[dict[str, Any]]]


def work_in(out: Path, on: str, threads: int, hook: Hook | None = None) -> Work:
    """Return what the workers of the engine `on` call. hook: what to run instead of an item's command."""
    folder = out if on == "local" else out.resolve()  # other machines have another working directory
    return partial(_run_chunk, str(folder), threads, hook)


def _run_chunk(out: str, threads: int, hook: Hook | None, items: list[dict[str, Any]]) -> list[Outcome]:
    import torch

    torch.set_num_threads(threads)
    return [run_item(Path(out), Item(**item), hook) for item in items]


def run_item(out: Path, item: Item, hook: Hook | None = None) -> Outcome:
    """Run an item, or return its result if it is finished. hook: what to run instead of the item's command."""
    if not (out / RECORD).is_file():
        return Outcome(
            item.id,
            f"expected the sweep in {out} on {socket.gethostname()}, got no {RECORD}. Use a folder that all machines "
            "share.",
        )
    with lock(lock_of(out, item.id)):
        if (result := result_of(out, item.id)) is not None:
            return Outcome(item.id, "", result["rows"], result["seconds"], result.get("pruned", False), found=True)
        started, loaded = time.monotonic(), models_loaded()
        pruned = False
        try:
            try:
                rows = (hook or TASKS[item.command].run)(item.values, item_folder(out, item.id), out)
            except Pruned as stopped:
                rows, pruned = stopped.rows, True
            rows = finite(rows)
            seconds = round(time.monotonic() - started, 3)
            about = {"models_loaded": models_loaded() - loaded, "process": os.getpid(), "versions": versions()}
            write_result(
                out, item, {"rows": rows, "seconds": seconds, "pruned": pruned, "host": socket.gethostname(),
                            "time": now(), **about},
            )  # fmt: skip
        except Exception as error:
            words = describe_error(error)
            with suppress(OSError):  # the disk may be full; the driver records the failure too
                write_failure(out, item, words, socket.gethostname())
            diverged = isinstance(error, NotFiniteError)
            return Outcome(item.id, words, seconds=round(time.monotonic() - started, 3), diverged=diverged)
        return Outcome(item.id, "", rows, seconds, pruned)


def describe_error(error: BaseException) -> str:
    """Return the error of an item with what to do about it."""
    from attnorm.engines.execution import is_out_of_memory  # loads torch

    where = socket.gethostname()
    if is_out_of_memory(error):
        return f"out of memory on {where}. Use a shorter length, a smaller batch, or a larger machine."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left on {where}: {error.filename or 'disk full'}. Free some space and run the sweep again."
    return str(error) or type(error).__name__ if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
