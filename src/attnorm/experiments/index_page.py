"""One HTML page for all finished experiments of a folder: figures, verdicts, links to every file; no scripts."""

import base64
import hashlib
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from attnorm.experiments.catalogue import EXPERIMENTS
from attnorm.files import write_text

INDEX = "index.html"
MARKS = {"reproduces": "yes", "partly": "half", "does not": "no", "not tested": "open"}  # verdict -> class of its mark

STYLE = """
:root { color-scheme: light dark; --paper: light-dark(#fbfaf7, #15171b); --raised: light-dark(#fff, #1c1f25);
  --ink: light-dark(#1f2023, #e9e7e2); --soft: light-dark(#5c5e66, #a9abb3); --line: light-dark(#dedbd3, #353941);
  --accent: light-dark(#3a49b0, #a9b5ff); }
body { margin: 0 auto; padding: 2rem 1.2rem 4rem; max-width: 68rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.3rem; margin: 0; }
a { color: var(--accent); } section p { max-width: 46rem; } .soft { color: var(--soft); font-size: .9rem; }
section { background: var(--raised); border: 1px solid var(--line); border-radius: 8px; padding: 1.2rem 1.4rem;
  margin-top: 1.6rem; }
figure { margin: 1rem 0; overflow-x: auto; } .picture { display: block; min-width: 40rem; }
img { display: block; box-sizing: border-box; width: 100%; height: auto; background: #fff;
  border: 1px solid var(--line); border-radius: 4px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; min-width: 44rem; font-size: .9rem; }
th { text-align: left; font-weight: 600; color: var(--soft); }
th, td { padding: .4rem .7rem .4rem 0; border-top: 1px solid var(--line); vertical-align: top; }
.mark { display: inline-block; padding: 0 .5em; border-radius: 3px; font-weight: 600; white-space: nowrap;
  border: 1.5px solid currentColor; }
.yes { color: light-dark(#14603f, #7fd6ae); } .half { color: light-dark(#7a5200, #e8c060); border-style: dashed; }
.no { color: light-dark(#a4330c, #f5a080); border-style: double; border-width: 3px; } .open { color: var(--soft); }
nav ul { padding: 0; list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; }
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<title>What reproduces</title>
<style>{{ style }}</style>
</head>
<body>
<h1>What reproduces</h1>
<p>{{ total }} claims of the papers, tested by <code>attnorm reproduce</code>:
{% for verdict, mark in marks.items() if counts[verdict] %}
<span class="mark {{ mark }}">{{ counts[verdict] }} {{ verdict }}</span>
{% endfor %}</p>
<nav><ul>
{% for one in records %}<li><a href="#{{ one.name }}">{{ one.name }}</a></li>
{% endfor %}</ul></nav>
{% for one in records %}
<section id="{{ one.name }}">
<h2>{{ one.title }}</h2>
<p class="soft">{{ one.source }}. {{ one.question }}</p>
<p>{{ one.words }}</p>
{% for name in one.figures %}
<figure><a class="picture" href="{{ one.name }}/{{ name }}.svg">
<img src="{{ one.name }}/{{ name }}.svg" alt="{{ one.title }}: {{ name }}"></a>
<figcaption class="soft">{{ name }}:
{% for suffix in ("svg", "png", "pdf") %}<a href="{{ one.name }}/{{ name }}.{{ suffix }}">{{ suffix }}</a> {% endfor %}
</figcaption></figure>
{% endfor %}
{% if one.findings %}
<div class="scroll"><table>
<thead><tr><th>claim</th><th>ours</th><th>verdict</th><th>why</th></tr></thead>
<tbody>
{% for finding in one.findings %}
<tr><td>{{ finding.claim }}</td><td>{{ finding.ours }}</td>
<td><span class="mark {{ marks[finding.verdict] }}">{{ finding.verdict }}</span></td><td>{{ finding.why }}</td></tr>
{% endfor %}
</tbody></table></div>
{% endif %}
<p class="soft">
{% for name, rows in one.tables.items() %}
{{ name }} ({{ rows }} rows): <a href="{{ one.name }}/{{ name }}.csv">csv</a>
<a href="{{ one.name }}/{{ name }}.parquet">parquet</a>;
{% endfor %}
<a href="{{ one.name }}/verdict.md">verdict</a>, <a href="{{ one.name }}/outcome.json">parameters and manifest</a>.
{{ "Model " ~ one.manifest.model.name if one.manifest.model is defined }}
{%- for other in one.manifest.others | default([]) %}, {{ other.name }}{% endfor %}
{{- "; " if one.manifest.model is defined }}
{{ "small sizes (--quick); " if one.settings.quick }}
{{ one.manifest.seconds }} s, {{ one.manifest.created }}.
{{ one.manifest.paper_setting.told if one.manifest.paper_setting is defined }}</p>
</section>
{% endfor %}
</body>
</html>
"""


def write_index(out: Path) -> Path:
    """Write the page of all finished experiments in the folder, in the catalogue's order; return its path."""
    records = [record for name in EXPERIMENTS if (record := _record(out / name / "outcome.json"))]
    path = out / INDEX
    write_text(path, render(records))
    return path


def render(records: list[dict[str, Any]]) -> str:
    counts = Counter(finding["verdict"] for record in records for finding in record["findings"])
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    page: str = _template().render(
        records=records,
        counts=counts,
        total=counts.total(),
        marks=MARKS,
        style=Markup(STYLE),  # unescaped: the policy allows exactly these bytes
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; img-src 'self' file:; base-uri 'none'",
    )
    return page


@cache
def _template() -> Any:
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(PAGE)


def _record(path: Path) -> dict[str, Any] | None:
    """Read a record; None if it is missing or damaged, so that the page shows the others."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record
