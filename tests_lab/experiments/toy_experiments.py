"""Experiments that cost nothing, put into the catalogue for the tests of the frame."""

import sys
import types
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attnorm_lab.experiments import catalogue
from attnorm_lab.experiments.experiment import (
    Experiment,
    ExperimentFinding,
    ExperimentSubject,
    Outcome,
    ProgressCallback,
)

FINDINGS = (
    ExperimentFinding("a | b <i>", "1 of 2", "does not", "because"),
    ExperimentFinding("c", "2 of 2", "reproduces"),
)


class Toy:
    """Counts its runs."""

    def __init__(
        self,
        name: str = "toy",
        *,
        fails: BaseException | None = None,
        needs_model: bool = False,
        tokens: int = 1,
        removes_parts: bool = False,
        takes: Mapping[str, int | None] = catalogue.ONE_OF_EACH,
    ) -> None:
        self.name, self.fails, self.takes, self.runs = name, fails, takes, 0
        self.parts: list[Path] = []
        self.experiment = Experiment(
            name,
            f"The {name}",
            "Someone 2025",
            "Is it so?",
            self.run,
            needs_model,
            (tokens, -(-tokens // 2)),
            removes_parts,
        )

    def run(self, subject: ExperimentSubject, progress: ProgressCallback, parts: Path) -> Outcome:
        self.runs += 1
        self.parts.append(parts)
        progress("playing", 1, 2)
        if self.experiment.removes_parts:
            parts.mkdir(parents=True)
        if self.fails is not None:
            raise self.fails
        figure = Figure(figsize=(2, 2))
        figure.add_artist(Line2D([0, 1], [0, 1 / self.runs]))  # letters would cost a second in the PDF
        table = pa.table({"head": [0, 1], "value": [0.5, float("nan")]})
        return Outcome("It <b>is</b> so.", FINDINGS, {"picture": figure}, {"numbers": table}, {"missing": float("nan")})

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> "Toy":
        module = types.ModuleType(f"attnorm_toy_{self.name}")
        module.EXPERIMENT = self.experiment  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        for table in (catalogue.EXPERIMENTS, catalogue.PAPERS):
            monkeypatch.setitem(table, self.name, catalogue.ExperimentEntry(module.__name__, "a toy", self.takes))
        return self
