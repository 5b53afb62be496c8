"""Provenance of results: package versions, time, hashes and the command, for the records of runs; the machine."""

import hashlib
import json
import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("attnorm", "torch", "transformers", "numpy", "pyarrow")


@cache  # reading the metadata of five packages takes a tenth of a second
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a source tree that was never installed
        return "unknown"


def versions() -> dict[str, str]:
    """Return the versions of Python, the platform and the packages that decide a measurement."""
    return {"python": platform.python_version(), "platform": platform.platform(), **package_versions(*_PACKAGES)}


def package_versions(*packages: str) -> dict[str, str]:
    """Return the installed version of each package; "unknown" if it is not installed."""
    return {package: _version(package) for package in packages}


def now() -> str:
    """Return the current time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def settings_hash(settings: Any) -> str:
    """Return the SHA-256 of plain settings; the order of dictionary keys does not matter."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's bytes.

    Raises:
        ValueError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}. Check the path.") from None


def recorded_command() -> str:
    """Return the command line of this process in a form that can be repeated: file names without their folders."""
    return shlex.join(["attnorm", *map(_without_folder, sys.argv[1:])])


def _without_folder(word: str) -> str:
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return f"{option}{equals}{Path(value).name}" if _is_path(value) else word


def _is_path(word: str) -> bool:
    """Tell a path from a model name on the hub, which also has a slash, and from free text."""
    if word.startswith(("/", "./", "../", "~")):
        return True
    try:
        return "/" in word and Path(word).parent.is_dir()
    except (OSError, ValueError):  # too long for a name, or a null byte
        return False


def machine_memory_gb() -> float | None:
    """Return the size of this machine's memory, in units of 2^30 bytes; None if the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    except (ValueError, OSError, AttributeError):
        return None
