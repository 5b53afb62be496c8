"""What README, CONTRIBUTING and the docs say works when it is typed in, and no normalizer is missing from them."""

import re
import shlex
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

import attnorm
from attnorm.analysis.settings import passage
from attnorm.cli import app
from attnorm.normalizers import registry
from attnorm.normalizers.registry import BUILT_IN
from attnorm_lab.bench.dispersion import dispersion, percent

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
NORMALIZERS = (ROOT / "docs" / "normalizers.md").read_text()
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()
GUIDE = (ROOT / "docs" / "guide.md").read_text()

# Commands that are not run here, and why.
NOT_RUN = {
    "make test": "this is make test",
    "make format": "would rewrite the working tree",
    "make docs": "tests/docs builds the site",
    "make demo": "creates .venv and installs; what it runs afterwards is in tests/cli",
    ". .venv/bin/activate": "the tests run inside it already",
    "attnorm lab bench": "takes half an hour; tests_lab/bench runs it with --quick",
    "attnorm lab frontier": "tests_lab/cli/test_verify.py runs it",
    "attnorm doctor": "tests/cli/test_commands.py runs it",
    "attnorm lab dispersion": "takes ten seconds; tests/cli runs it on a few normalizers",
    "python -c": "needs the normalizer that the reader has just written; run in its place below",
}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """Lines of bash blocks, and commands in the cells of tables, in the order of the text."""
    found = re.findall(r"^```bash\n(.*?)^```|(?<=\| )`(attnorm [^`]+)`(?= \|)", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block, cell in found for line in (block or cell).replace("\\\n", "").splitlines()]
    return [command for line in lines if (command := line.partition("#")[0].strip())]


@pytest.mark.parametrize("code", [*blocks(README, "python"), *blocks(NORMALIZERS, "python"), *blocks(GUIDE, "python")])
def test_python_in_the_readme_and_the_docs_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "to_pandas" in code:
        pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    at_hand = repr(str(files("attnorm.models") / "bundled"))  # gpt2 needs a network
    exec(compile(code.replace('"gpt2"', at_hand), "documentation", "exec"), {})


# Their commands follow one another: a folder that one writes is read by the next.
STORIES = {"README": README, "guide": GUIDE}
MEASURING = ("attnorm analyze", "attnorm compare", "attnorm report")


def smaller(command: str) -> str:
    for option, divisor in (("--lengths", 8), ("--windows", 4), ("--rows", 8)):
        command = re.sub(
            rf"(?<={option} )[\d,]+",
            lambda numbers, by=divisor: re.sub(r"\d+", lambda one: str(-(-int(one[0]) // by)), numbers[0]),
            command,
        )
    return command


@pytest.mark.slow
@pytest.mark.timeout(1800)  # catches a hang, on a busy machine too
@pytest.mark.parametrize("story", ["README", pytest.param("guide", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("as_printed", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_measuring_commands_of_a_document_run(
    story: str, as_printed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an empty folder, with a book at hand; the bundled model stands in for gpt2, which needs a network.

    On every commit an eighth of the length, a quarter of the windows and an eighth of the rows that are printed.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("attnorm.analysis.plan.MAX_WINDOWS", 2 if as_printed else 1)  # 16 take as many seconds
    (tmp_path / "book.txt").write_text(passage())
    measuring = [command for command in commands(STORIES[story]) if command.startswith(MEASURING)]
    assert measuring
    for command in measuring if as_printed else map(smaller, measuring):
        result = CliRunner().invoke(app, shlex.split(command.replace("gpt2", "bundled"))[1:])
        assert result.exit_code == 0, f"{command}\n{result.output}"
    assert "bundled" in (tmp_path / "run" / "report.html").read_text()


OTHERS = [c for c in commands(README + CONTRIBUTING + BENCHMARKS + GUIDE) if not c.startswith(MEASURING)]


@pytest.mark.timeout(1800)  # catches a hang, on a busy machine too
@pytest.mark.parametrize("command", sorted({*OTHERS}))
def test_commands_in_the_documents_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write where they stand
    monkeypatch.setattr("attnorm_lab.experiments.fig4.QUICK_LENGTH", 64)  # a quarter of the tokens
    reason = next((reason for start, reason in NOT_RUN.items() if command.startswith(start)), None)
    if reason is not None:
        pytest.skip(reason)
    verb = shlex.split(command)
    assert verb[0] == "attnorm", f"a command that is neither run here nor excused in NOT_RUN: {command}"
    result = CliRunner().invoke(app, verb[1:])
    assert result.exit_code == 0, result.output
    assert result.stdout


def test_the_two_commands_are_there() -> None:
    assert {"make demo", "make test"} <= set(commands(README))


def test_the_number_under_the_picture_is_the_one_measured() -> None:
    (curve,) = dispersion(names=["softmax"], lengths=(131_072,)).curves
    assert f"leaves it {percent(curve.kept[-1])}" in NORMALIZERS.replace("\n", " ")


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize(
    "document",
    ["README.md", "CONTRIBUTING.md", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))],
)
def test_links_to_files_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_the_table_has_every_normalizer_and_none_that_is_gone() -> None:
    table = re.search(r"^## All normalizers\n(.*?)(?=^## )", NORMALIZERS, flags=re.MULTILINE | re.DOTALL)
    assert table is not None
    first_cells = re.findall(r"^\| (`.*?) \| .* \| .* \| .* \|$", table[1], flags=re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(first_cells))) == sorted(BUILT_IN)


def test_the_example_of_a_package_of_ones_own_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    exec(compile(blocks(CONTRIBUTING, "python")[2], "CONTRIBUTING", "exec"), {})
    assert "centered" in attnorm.available()


def test_the_number_of_normalizers_is_right() -> None:
    (number,) = re.findall(r"one of (\d+) normalizers", README)
    assert int(number) == len(BUILT_IN)
