"""SHA-256 digests of stored numbers: a file that changed after it was written is named and not read.

The digests of table files stand in the JSON file beside them. A JSON file is sealed by a digest of its own content.
Files of earlier versions have neither and are read without a check.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SEAL = "sha256"
DIGESTS = "digests"


class DamagedFileError(ValueError):
    """Raised for a file whose content is not what was written."""


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def check_digest(path: Path, content: bytes, expected: str | None) -> None:
    """Raises DamagedFileError where the content has another digest; None: nothing is known about it."""
    found = digest_of(content)
    if expected is not None and found != expected:
        raise DamagedFileError(
            f"{path} is damaged: expected the SHA-256 digest {expected}, found {found}. "
            "Run the same analysis again with this folder: what is damaged is made again"
        )


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content with the digest of everything else in it."""
    plain = {name: value for name, value in content.items() if name != SEAL}
    return {**plain, SEAL: _seal_of(plain)}


def opened(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The content without its seal; raises DamagedFileError where the seal is that of another content."""
    if SEAL not in content:
        return content
    plain = {name: value for name, value in content.items() if name != SEAL}
    found = _seal_of(plain)
    if found != content[SEAL]:
        raise DamagedFileError(
            f"{path} is damaged or was edited: expected the SHA-256 digest {content[SEAL]}, found {found}. "
            f"Choose another folder, or delete {path} and run the same analysis again with this one"
        )
    return plain


def _seal_of(content: Mapping[str, Any]) -> str:
    as_read = json.loads(json.dumps(content))  # keys are text and tuples are lists
    return digest_of(json.dumps(as_read, sort_keys=True).encode())
