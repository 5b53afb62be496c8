"""`Experiment` and `Outcome`: a question from a paper, the function that answers it on a model, and its answer."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure
from numpy.typing import NDArray

from attnorm.experiments.subject import ExperimentSubject, ProgressCallback

Verdict = Literal["reproduces", "partly", "does not", "not tested"]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ExperimentFinding:
    """One claim of a paper and our result."""

    claim: str  # what the paper says, with its number and section
    ours: str  # our number, in words with units
    verdict: Verdict
    why: str = ""  # one sentence: the explanation by the corrected theory

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class Outcome:
    """The result of a run. Figures and tables are named by the stem of their files."""

    summary: str  # one paragraph
    findings: tuple[ExperimentFinding, ...]
    figures: Mapping[str, Figure]
    tables: Mapping[str, pa.Table]
    parameters: Mapping[str, Any]  # everything needed to repeat it: lengths, N, rows, seeds, ...


@dataclass(frozen=True)
class Experiment:
    """A named experiment. `run` gets a folder for intermediate results, which may not exist yet."""

    name: str
    title: str
    source: str  # "Mudarisov et al. 2025, Figure 2"
    question: str
    run: Callable[[ExperimentSubject, ProgressCallback, Path], Outcome]
    needs_model: bool = True
    tokens: tuple[int, int] = (1, 1)  # fewest tokens of the text: in full, and with --quick
    passing: bool = False  # its intermediate results are removed at the end

    def fewest_tokens(self, *, quick: bool) -> int:
        return self.tokens[quick]
