"""What an experiment is: a question from a paper, a recipe that answers it on any model, and the answer's form."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure
from numpy.typing import NDArray

from attnorm.experiments.subject import ProgressCallback, Subject

__all__ = ["Experiment", "Finding", "Outcome", "ProgressCallback", "Subject", "Verdict"]

Verdict = Literal["reproduces", "partly", "does not", "not tested"]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Finding:
    """One claim of a paper and what we found."""

    claim: str  # what the paper says, with its number and place
    ours: str  # our number, in words with units
    verdict: Verdict
    why: str = ""  # one sentence: what the corrected theory says about it

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class Outcome:
    """What a run of an experiment gave. Figures and tables go by the stem of their files."""

    summary: str  # the verdict paragraph
    findings: tuple[Finding, ...]
    figures: Mapping[str, Figure]
    tables: Mapping[str, pa.Table]
    parameters: Mapping[str, Any]  # everything needed to run it again: lengths, N, rows, seeds, ...


@dataclass(frozen=True)
class Experiment:
    """A recipe. The path it is given is a folder of its own for parts that can be resumed; it may not exist yet."""

    name: str
    title: str
    source: str  # "Mudarisov et al. 2025, Figure 2"
    question: str
    run: Callable[[Subject, ProgressCallback, Path], Outcome]
    needs_model: bool = True
    tokens: tuple[int, int] = (1, 1)  # of the text, at least: in full, and with --quick
    passing: bool = False  # its parts are of no use once it is finished

    def fewest_tokens(self, *, quick: bool) -> int:
        return self.tokens[quick]
