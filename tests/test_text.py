"""Pages allow only their own style and script, and escape every value."""

import base64
import hashlib
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from attnorm.text import markdown_table, render_page

TEMPLATE = (
    '<meta content="{{ policy }}"><style>{{ style }}</style><script>{{ script }}</script>{{ name | twice }}'
    "{{ data | tojson }}"
)


def page(folder: Path, **words: object) -> str:
    template = folder / "page.html.j2"
    template.write_text(TEMPLATE)
    return render_page(template, style="a > b {}", filters={"twice": lambda text: 2 * text}, **words)


def test_a_page_allows_only_its_style_and_escapes_values(tmp_path: Path) -> None:
    made = page(tmp_path, name="<b>", data=["<i>", 1])
    style_hash = base64.b64encode(hashlib.sha256(b"a > b {}").digest()).decode()
    assert made == (
        f'<meta content="default-src &#39;none&#39;; style-src &#39;sha256-{style_hash}&#39;; '
        'base-uri &#39;none&#39;; form-action &#39;none&#39;"><style>a > b {}</style><script></script>'
        '&lt;b&gt;&lt;b&gt;["\\u003ci\\u003e",1]'
    )


def test_a_page_may_allow_a_script_and_images(tmp_path: Path) -> None:
    made = page(tmp_path, name="", data=0, script="1 < 2", images="data:")
    assert "script-src &#39;sha256-" in made
    assert "img-src data:;" in made
    assert "<script>1 < 2</script>" in made


def test_a_value_that_a_template_lacks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UndefinedError, match="name"):
        page(tmp_path, data=0)


def test_a_markdown_table_has_one_line_per_row_whatever_its_cells_contain() -> None:
    assert markdown_table(["name", "from", "n"], [["a|b", "c\nd", "1,024"], ["e", "", "2"]], left=2).splitlines() == [
        "| name | from | n |",
        "|---|---|---:|",
        r"| a\|b | c d | 1,024 |",
        "| e |  | 2 |",
    ]
    assert markdown_table(["name"], []) == ""
