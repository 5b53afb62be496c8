"""Jobs of Slurm through submitit."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from attnorm.sweep.engine import ClusterLost, WorkerDied
from attnorm.sweep.plan import Item, Resources, require_known
from attnorm.sweep.work import Hook, Outcome, run_chunk

POLL_SECONDS = 0.5


class SlurmEngine:
    """Jobs of Slurm through submitit; each job runs its share of the items in one process."""

    OPTIONS = ("cluster", "jobs", "minutes")
    in_flight: int | None = None

    def __init__(
        self, out: Path, resources: Resources, table: dict[str, Any], workers: int | None, hook: Hook | None
    ) -> None:
        try:
            import submitit
        except ImportError:
            raise ImportError(
                "--on slurm needs submitit, which is not installed. Run: pip install 'attnorm[slurm]'"
            ) from None
        require_known("[slurm]", {name: 0 for name in table if not name.startswith("slurm_")}, self.OPTIONS)
        self._call = (str(out.resolve()), resources.threads, hook)
        self.slots = int(workers or table.get("jobs", 16))
        try:
            self._executor: Any = submitit.AutoExecutor(out / "slurm", cluster=table.get("cluster"))
            if self._executor.cluster == "local" and table.get("cluster") != "local":
                raise ValueError("no sbatch on this machine")
            self._executor.update_parameters(
                name="attnorm-sweep", timeout_min=int(table.get("minutes", 60)), cpus_per_task=resources.threads,
                gpus_per_node=int(resources.gpus),
                **({} if resources.memory_gb is None else {"mem_gb": resources.memory_gb}),
                **{name: value for name, value in table.items() if name.startswith("slurm_")},
            )  # fmt: skip
        except (RuntimeError, ValueError, TypeError, NameError) as error:
            raise ClusterLost(
                f'cannot use Slurm here ({error}). Run it on a login node with sbatch, or set cluster = "local" in '
                "[slurm] to try the plan on this machine."
            ) from None
        self._jobs: list[Any] = []

    def chunks(self, items: Sequence[Item]) -> list[list[Item]]:
        """Neighbours stay together: they have the same model."""
        size = -(-len(items) // self.slots) if items else 1
        return [list(items[start : start + size]) for start in range(0, len(items), size)]

    def submit(self, items: list[Item]) -> "Future[list[Outcome]]":
        out, threads, hook = self._call
        job = self._executor.submit(run_chunk, out, [item.as_dict() for item in items], threads, hook)
        self._jobs.append(job)
        answer: Future[list[Outcome]] = Future()
        threading.Thread(target=self._follow, args=(job, answer), daemon=True).start()
        return answer

    def _follow(self, job: Any, answer: "Future[list[Outcome]]") -> None:
        while not job.done():
            time.sleep(POLL_SECONDS)
        try:
            answer.set_result(job.result())
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            answer.set_exception(WorkerDied(f"job {job.job_id} ended in the state {job.state}: {reason}"))

    def close(self, *, kill: bool = False) -> None:
        for job in self._jobs if kill else ():
            if not job.done():
                job.cancel(check=False)
