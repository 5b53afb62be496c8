"""The output folder of a run: it contains one run, one process at a time writes to it, and a stopped run resumes.

A run is identified by its settings, plain JSON values. The folder keeps them in a record; a later call with the same
settings continues, and a call with other settings raises an error that names the differences.
"""

import json
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SETTINGS = ("run", "settings", "manifest")  # entries of records that describe a run


def require_folder(out: Path) -> None:
    """Raise ValueError if `out` exists and is not a folder."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"expected a folder for the output, got the file {out}. Choose another name.")


def require_only(out: Path, own: Collection[str], content: str) -> None:
    """Raise ValueError if the folder contains files or folders other than `own`; hidden ones do not count.

    content: what the error says that the folder contains.
    """
    require_folder(out)
    if out.is_dir() and any(not path.name.startswith(".") and path.name not in own for path in out.iterdir()):
        raise ValueError(
            f"expected an empty or new folder, got {out}, which contains {content}. Choose another folder."
        )


def make_writable(out: Path) -> None:
    """Create the folder and check that files can be created in it.

    Raises:
        ValueError: It cannot be created or written.
    """
    require_folder(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(f"cannot write into {out}: {error.strerror}. Choose another folder with --out.") from None


def read_record(path: Path, required: Collection[str], remedy: str) -> dict[str, Any] | None:
    """Read a JSON record with at least the required entries; None if there is no such file.

    The entries of SETTINGS, where a record has them, are JSON objects.

    Raises:
        ValueError: The file is damaged; the message ends with the remedy.
    """
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise ValueError(f"expected a JSON object, got {type(record).__name__}")
        missing = [name for name in required if name not in record]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        for name in SETTINGS:
            if not isinstance(record.get(name, {}), dict):
                raise ValueError(f"expected a JSON object in {name}, got {record[name]!r}")
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(f"{path} is damaged ({error}). {remedy}") from None
    found: dict[str, Any] = record
    return found


def require_same_run(
    here: Mapping[str, Any], there: Mapping[str, Any], message: str, remedy: str, show: Callable[[Any], str] = str
) -> None:
    """Raise ValueError if the settings of this call differ from those of the run in the folder.

    here, there: settings of this call, and of the folder.
    message: the start of the message, for example "out contains another run".
    remedy: the last sentence of the message, without its full stop.
    """
    different = differences(here, there, show)
    if different:
        raise ValueError(f"{message}: {'; '.join(different)}. {remedy}.")


def differences(here: Mapping[str, Any], there: Mapping[str, Any], show: Callable[[Any], str] = str) -> list[str]:
    """Return one phrase per setting that differs: "seed is 1 here and 0 there"."""
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    return [_difference(name, show(here.get(name)), show(there.get(name))) for name in names]


def _difference(name: str, here: str, there: str) -> str:
    if here == there:  # files with the same name
        return f"{name} is {here} here and there, but with another content"
    return f"{name} is {here} here and {there} there"


@contextmanager
def lock(path: Path, timeout: float = -1) -> Iterator[None]:
    """Hold a lock file; wait up to `timeout` seconds for another process (default: without limit).

    The operating system releases the lock if the process ends.

    Raises:
        TimeoutError: Another process still holds it.
    """
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path, timeout=timeout):
        yield


@contextmanager
def only_process(out: Path) -> Iterator[None]:
    """Hold the folder, created if it is missing, until the block ends: two runs would overwrite each other's files.

    Raises:
        ValueError: Another process holds it, or `out` is a file.
    """
    require_folder(out)
    with try_lock(out / ".lock") as held:
        if not held:
            raise ValueError(
                f"expected a folder that no other process writes to, got {out}. Wait until that run ends, or "
                "choose another folder with --out."
            )
        yield


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Yield whether this process got the lock, without waiting."""
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(path, timeout=0)
    try:
        held.acquire()
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        held.release()
