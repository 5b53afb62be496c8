"""The report: one HTML file that contains its styles, script and data, and opens anywhere, offline.

A Content-Security-Policy allows only this style sheet and this script, by their hashes: no name of a text, model or
folder can run code or fetch anything. Headline, advice, table, explanations and manifest are HTML and need no
JavaScript; heat map, curves, sorting and filters are drawn by the script.
"""

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from attnorm.analysis.result import Analysis
from attnorm.analysis.store import write_file
from attnorm.report.html import page_text
from attnorm.report.html.data import payload
from attnorm.report.html.scores import LINE, WIDTH, Evaluated
from attnorm.report.vocabulary import VERDICTS
from attnorm.safe_text import policy_hash

HERE = Path(__file__).parent
STYLES = ("colours", "page", "explorer", "charts", "reads", "table", "scores", "print")
SCRIPTS = (
    "data", "format", "colour", "state", "elements", "chart", "curves", "heatmap", "picture", "reads", "panel", "table",
    "coverage", "main",
)  # fmt: skip


def render(analysis: Analysis, evaluation: Evaluated | None = None) -> str:
    """Return the page as HTML.

    evaluation: scores of the model before and after a swap, which get a section of their own.
    """
    style, script = _join_files("style", "css", STYLES), _join_files("script", "js", SCRIPTS)
    scores = None if evaluation is None else evaluation.score_table()
    return (
        _templates()
        .get_template("page.html.j2")
        .render(
            policy=f"default-src 'none'; style-src {policy_hash(style)}; script-src {policy_hash(script)}; "
            "img-src data:; base-uri 'none'; form-action 'none'",
            style=style,
            script=script,
            data=payload(analysis),
            **page_text.page_words(analysis),
            verdict_words=VERDICTS,
            evaluation=scores if scores is not None and scores.rows else None,  # none: stopped in its first part
            width=WIDTH,
            line=LINE,
        )
    )


def save(analysis: Analysis, path: str | Path, evaluation: Evaluated | None = None) -> Path:
    """Write the page atomically and return its path."""
    target = Path(path)
    write_file(target, render(analysis, evaluation).encode())
    return target


@cache
def _join_files(folder: str, suffix: str, names: tuple[str, ...]) -> str:
    parts = [(HERE / folder / f"{name}.{suffix}").read_text(encoding="utf-8") for name in names]
    text = "\n".join(parts)
    return f'(() => {{\n"use strict";\n{text}\n}})();' if suffix == "js" else text


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
    environment.filters.update(number=page_text.number, share=page_text.share, plain=page_text.plain)
    return environment
