"""Python in docs/reference, docs/how-to and docs/start.md runs; every public name has an example; commands exist."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import attnorm
from attnorm.cli import app
from attnorm.normalizers import registry

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(
    path.relative_to(DOCS).as_posix() for folder in ("reference", "how-to") for path in (DOCS / folder).glob("*.md")
)


COMMANDS = get_command(app)


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore::attnorm.monitor.alerts.AttentionAlert")
@pytest.mark.parametrize("page", [*PAGES, "start.md"])
def test_the_examples_of_a_page_run_one_after_another(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_registered", {})
    names: dict[str, Any] = {"__name__": "__main__"}
    text = (DOCS / page).read_text()
    if "to_pandas(" in text:
        pytest.importorskip("pandas")
    for code in blocks(text):
        exec(compile(code, page, "exec"), names)
        assert "QKClip" not in code or names["clip"].clips, "an example of QK-clip shows it acting"


@pytest.mark.parametrize("name", attnorm.__all__)
def test_a_public_name_has_an_example(name: str) -> None:
    text = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    section = re.search(rf"^::: attnorm\.{name}\n(.*?)(?=^:::|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert section is not None, f"docs/reference has no section for attnorm.{name}"
    assert any(re.search(rf"\b{name}\b", code) for code in blocks(section[1])), f"no example uses attnorm.{name}"


@pytest.mark.parametrize("page", sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")))
def test_commands_and_options_of_a_page_exist(page: str) -> None:
    shell = "".join(re.findall(r"^```bash\n(.*?)^```", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL))
    for line in re.findall(r"^attnorm (.*)$", shell, flags=re.MULTILINE):
        command, words = COMMANDS, line.partition("#")[0].split()
        while hasattr(command, "commands") and words:
            assert words[0] in command.list_commands(None), f"attnorm {line}"
            command = command.get_command(None, words.pop(0))
        known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert given <= known, f"attnorm {line}"


def test_the_table_of_verdict_rules_has_the_default_thresholds() -> None:
    rows = re.findall(
        r"^\|.*\| ([\d.]+)(?: %)? \| `(\w+)` \|$",
        (DOCS / "reference" / "verdict-rules.md").read_text(),
        flags=re.MULTILINE,
    )
    defaults = attnorm.Thresholds().as_dict()
    assert {name: float(value) for value, name in rows} == {name: defaults[name] for _, name in rows}
    elsewhere = {"sink_matters", "saturation_top_n", "saturation_margin", "separable"}
    assert {name for _, name in rows} == set(defaults) - elsewhere
