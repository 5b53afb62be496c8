"""Open an engine by its name. Each is an existing one: processes of this machine, Ray, or Slurm through submitit."""

from pathlib import Path
from typing import Any

from attnorm.sweep.engine import Engine
from attnorm.sweep.local_engine import LocalEngine
from attnorm.sweep.plan import Resources
from attnorm.sweep.ray_engine import RayEngine
from attnorm.sweep.slurm_engine import SlurmEngine
from attnorm.sweep.work import Hook

NAMES = ("local", "ray", "slurm")


def open_engine(
    name: str,
    out: Path,
    resources: Resources,
    *,
    workers: int | None = None,
    address: str | None = None,
    slurm: dict[str, Any] | None = None,
    hook: Hook | None = None,
) -> Engine:
    """Start an engine.

    workers: processes on this machine, items at the same time on Ray (also the CPUs of a Ray that is started here), or
    jobs on Slurm (default: as many as fit; 16 jobs).

    Raises:
        ValueError: Unknown engine, a cluster out of reach, or an item that fits on no machine.
        ImportError: The library of the engine is not installed.
    """
    if name == "ray":
        return RayEngine(out, resources, address, workers, hook)
    if name == "slurm":
        return SlurmEngine(out, resources, slurm or {}, workers, hook)
    if name != "local":
        raise ValueError(f"expected an engine of {', '.join(NAMES)}, got {name!r}")
    return LocalEngine(out, resources, workers, hook)
