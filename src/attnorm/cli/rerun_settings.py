"""How a finished run was measured, so that a model beside it can be measured likewise: its settings and its texts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

SETTINGS = (
    "lengths", "windows", "budget", "bos", "rows", "top_n", "vectors", "vector_rows", "metrics", "seed", "read_keys",
    "read_rows",
)  # fmt: skip


def settings_of_run(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Options of analyze(), without those that merged runs disagree on. bos=False and read_keys=0 are kept."""
    settings = manifest["settings"]
    return {name: settings[name] for name in SETTINGS if settings.get(name) not in (None, [])}


def texts_of_run(manifest: Mapping[str, Any], folder: str) -> dict[str, str]:
    """Name -> content, read again: a run keeps only the names of its texts and what they must hash to."""
    from attnorm.analysis.manifest import content_hash

    found = {text["name"]: _content(text["name"]) for text in manifest["texts"]}
    for text in manifest["texts"]:
        content = found[text["name"]]
        if content is None or content_hash(content) != text["sha256"]:
            what = "is not here" if content is None else "has changed"
            raise ValueError(
                f"the text {text['name']!r} that {folder} was measured on {what}, so a model cannot be measured on it "
                "too; give a text for the models with --text FILE"
            )
    return {name: content for name, content in found.items() if content is not None}


def _content(name: str) -> str | None:
    from attnorm.analysis.default_text import PASSAGE, TOPICS, passage, topics
    from attnorm.files import read_text

    if name in (PASSAGE, TOPICS):
        return passage() if name == PASSAGE else topics()
    try:
        return read_text(Path(name))
    except ValueError:
        return None
