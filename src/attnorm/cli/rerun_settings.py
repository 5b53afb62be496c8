"""The settings and texts of a finished run, so that another model can be measured in the same way."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

SETTINGS = (
    "lengths", "windows", "budget", "bos", "rows", "top_n", "vectors", "vector_rows", "metrics", "seed", "read_keys",
    "read_rows",
)  # fmt: skip


def settings_of_run(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of analyze(), without those that differ between merged runs. bos=False and read_keys=0 stay."""
    settings = manifest["settings"]
    return {name: settings[name] for name in SETTINGS if settings.get(name) not in (None, [])}


def texts_of_run(manifest: Mapping[str, Any], folder: str) -> dict[str, str]:
    """Return name -> content; texts are read again, since a run stores only their names and hashes."""
    from attnorm.analysis.manifest import content_hash

    found: dict[str, str] = {}
    for text in manifest["texts"]:
        content = _content(text["name"])
        if content is None or content_hash(content) != text["sha256"]:
            what = "does not exist here" if content is None else "has changed"
            raise ValueError(
                f"the text {text['name']!r} that {folder} was measured on {what}. Give a text for the models with "
                "--text FILE."
            )
        found[text["name"]] = content
    return found


def _content(name: str) -> str | None:
    from attnorm.analysis.default_text import PASSAGE, TOPICS, passage, topics
    from attnorm.files import read_text

    if name in (PASSAGE, TOPICS):
        return passage() if name == PASSAGE else topics()
    try:
        return read_text(Path(name))
    except ValueError:
        return None
