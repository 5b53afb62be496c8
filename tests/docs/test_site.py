"""The site builds without a warning, shows every public name and every command, and needs no network."""

import html
import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import attnorm
from attnorm.cli.normalizers import describe_all, promises
from attnorm.metrics.catalogue import METRICS
from attnorm.normalizers.registry import BUILT_IN
from attnorm_lab.errata.tables import built_in_claims

ROOT = Path(__file__).resolve().parents[2]


def _needs_the_docs_extra() -> None:
    for needed in ("mkdocs", "material", "mkdocstrings_handlers.python", "latex2mathml", "ziamath"):
        pytest.importorskip(needed)
    for group, name in (("themes", "material"), ("plugins", "material/offline"), ("plugins", "mkdocstrings")):
        if not entry_points(group=f"mkdocs.{group}", name=name):  # the files are there, mkdocs does not know them
            pytest.skip(f"mkdocs.{group} has no {name!r}; install attnorm[docs]")


# One test, so that parallel workers do not build the site twice; only the worker that builds it imports mkdocs.
def test_the_site_builds_strictly_and_is_complete(tmp_path: Path) -> None:
    _needs_the_docs_extra()
    from mkdocs import config as mkdocs_config
    from mkdocs.commands import build as mkdocs_build

    config = mkdocs_config.load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path))
    config.plugins["material/search"].config.enabled = False  # its index takes a quarter of the time
    mkdocs_build.build(config)
    pages = {page.relative_to(tmp_path).as_posix(): page.read_text() for page in tmp_path.rglob("*.html")}

    anchors = set(re.findall(r'id="(attnorm\.\w+)"', "".join(pages.values())))
    assert {f"attnorm.{name}" for name in attnorm.__all__} <= anchors, (
        "public names without a section in docs/reference"
    )

    assert not [anchor for anchor in anchors if anchor == "attnorm.attention.attend"], "internals are not shown"

    for name in ("analyze", "doctor", "lab-reproduce", "lab-train-lm"):
        assert f'id="attnorm-{name}"' in pages["reference/command-line.html"]
    assert "train/CLASS/*.jpg and test/CLASS/*.jpg" in pages["reference/command-line.html"]

    sheets = pages["normalizers.html"]
    for description in (one for one in describe_all() if one.name in BUILT_IN):
        section = re.search(rf'<h3 id="{description.name}">.*?(?=<h[23]|</article)', sheets, re.DOTALL)
        assert section is not None, f"normalizers.html has no section of {description.name}"
        assert promises(description) in html.unescape(section[0])
    for claim in built_in_claims():
        assert f">{claim.id}<" in pages["theory.html"]
    for metric in METRICS:
        assert f"<code>{metric.name}</code>" in pages["reference/measuring.html"]

    for name, page in pages.items():
        loaded = re.findall(r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"', page)
        assert not loaded, f"{name} loads from the network: {loaded}"
        assert "\ue000" not in page, f"{name} has a formula that was not drawn"
        assert "<merror" not in page
        text = re.sub(r"<(pre|code|script|style|math)\b.*?</\1>", "", page, flags=re.DOTALL)
        assert not re.search(r"\$[^$]*\\\w", text), f"{name} has a formula that was left as TeX"
        assert ">>>" not in html.unescape(text), f"{name} shows a prompt as prose"
        assert "<blockquote>\n<blockquote>" not in page, f"{name} shows a prompt as a quotation"
        assert not re.search(r"<td[^>]*>[^\n]*<code>[^<\n]*\\\|", page), f"{name} shows the backslash of a table"
    assert "<math" in pages["theory/gradient.html"]
