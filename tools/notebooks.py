"""Run the notebooks of docs/notebooks and keep their outputs: python tools/notebooks.py [NAME ...]."""

import os
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"


def executed(path: Path, directory: Path) -> nbformat.NotebookNode:
    """Return the notebook with new outputs; it runs in `directory` and may write there."""
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", record_timing=False, resources={"metadata": {"path": directory}},
        coalesce_streams=True,  # otherwise a print may be stored as several outputs
    )  # fmt: skip
    client.execute(env={**os.environ, "OMP_NUM_THREADS": "1"})  # on a busy machine threads only wait for each other
    return notebook


def main(names: list[str]) -> None:
    for path in [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as directory:
            notebook = executed(path, Path(directory))
        notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
        for number, cell in enumerate(notebook.cells):
            cell.id = f"cell-{number}"
            if cell.cell_type == "code":  # warnings on stderr name paths of this machine
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1:])
