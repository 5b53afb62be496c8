"""One process per run folder: two would overwrite each other's checkpoints and log."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attnorm.training.run_folder import RECORD

LOCK = ".lock"


@contextmanager
def locked_folder(out: Path) -> Iterator[None]:
    """Hold the folder, which is created if it is missing, until the block ends.

    The operating system releases the lock when the process ends, however it ends: no lock stays behind.

    Raises:
        ValueError: Another process holds the folder, it holds files that are no run, or `out` is a file.
    """
    from filelock import FileLock, Timeout

    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; name a folder for the output")
    if is_foreign(out):
        raise ValueError(f"{out} holds files, but no training run; choose an empty or a new folder")
    out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out / LOCK, timeout=0):
            yield
    except Timeout:
        raise ValueError(
            f"expected a folder that no other process trains in, got {out}. Wait until that run ends, or name another "
            "folder with --out"
        ) from None


def is_foreign(out: Path) -> bool:
    """Whether the folder holds files, hidden ones aside, and no training run."""
    if not out.is_dir() or (out / RECORD).exists():
        return False
    return any(not path.name.startswith(".") for path in out.iterdir())
