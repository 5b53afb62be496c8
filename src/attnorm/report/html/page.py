"""The report: one HTML file with its style, script and data inside, so that it opens anywhere, offline, in ten years.

A Content-Security-Policy allows exactly the one style sheet and the one script, by their hashes: whatever a text, a
model or a folder is called, nothing else can run or be fetched. Headline, advice, table, explanations and manifest are
written out here and read without JavaScript; heat map, curves, sorting and filters are the script's.
"""

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from attnorm.analysis.store import write_whole
from attnorm.report.html import numbers, page_text
from attnorm.report.html.data import payload
from attnorm.report.vocabulary import VERDICTS

HERE = Path(__file__).parent
STYLES = ("colours", "page", "explorer", "charts", "reads", "table", "print")
SCRIPTS = (
    "data", "format", "colour", "state", "elements", "chart", "curves", "heatmap", "reads", "panel", "table",
    "coverage", "main",
)  # fmt: skip


def render(analysis: Any) -> str:
    """The page of an Analysis: anything with its tables, manifest and verdict."""
    style, script = _joined("style", "css", STYLES), _joined("script", "js", SCRIPTS)
    return (
        _templates()
        .get_template("page.html.j2")
        .render(
            policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
            "base-uri 'none'; form-action 'none'",
            style=style,
            script=script,
            data=payload(analysis),
            **page_text.page_words(analysis),
            verdict_words=VERDICTS,
        )
    )


def save(analysis: Any, path: str | Path) -> Path:
    """Writes the page, whole or not at all; the path."""
    target = Path(path)
    write_whole(target, render(analysis).encode())
    return target


@cache
def _joined(folder: str, suffix: str, names: tuple[str, ...]) -> str:
    parts = [(HERE / folder / f"{name}.{suffix}").read_text(encoding="utf-8") for name in names]
    text = "\n".join(parts)
    return f'(() => {{\n"use strict";\n{text}\n}})();' if suffix == "js" else text


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {
        "allow_nan": False,
        "separators": (",", ":"),
        "ensure_ascii": False,
    }
    environment.filters.update(number=numbers.number, share=numbers.share, plain=numbers.plain)
    return environment
