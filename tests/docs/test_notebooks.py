"""The notebooks run, and what is committed names no path of a machine."""

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def code_cells(name: str) -> list[str]:
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_there_are_three() -> None:
    assert NAMES == ["measure", "own-normalizer", "swap-and-finetune"]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "swap-and-finetune"])
def test_the_cells_of_a_notebook_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has imported the libraries. All of them run in a kernel at night.

    What swap-and-finetune does, docs/examples/finetune.py does too (tests/monitor/test_example.py).
    """
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    if any("to_pandas" in source for source in code_cells(name)):
        pytest.importorskip("pandas")
    for number, source in enumerate(code_cells(name)):
        exec(compile(source, f"{name}.ipynb, code cell {number}", "exec"), names)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_in_a_kernel(name: str, tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    from tools.notebooks import executed

    notebook = executed(FOLDER / f"{name}.ipynb", tmp_path)  # raises where a cell does
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_outputs_are_complete_and_name_no_machine(name: str) -> None:
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "run python tools/notebooks.py"
    for cell in code:
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            text = "".join(output.get("text", output.get("data", {}).get("text/plain", [])))
            assert not re.search(r"(?<!\w)/(home|root|work|tmp|usr|Users)/", text), text
