"""What an experiment is: a question from a paper, the function that answers it (`Experiment`), and its `Outcome`.

`ExperimentSubject` is what it measures: the model and texts of a call of `attnorm lab reproduce`, loaded once for all
its experiments. The default is the setting of Mudarisov et al. 2025: GPT-2 (124M) on War and Peace. Their section 3 has
144 heads in 12 layers, contexts of 32 to 1,024 tokens, and consecutive chapters of the novel. It does not state which
chapters, rows and vectors. The novel is not part of this package; give it as a file.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from attnorm.arithmetic import Difference, difference_over_seeds, holm
from attnorm.files import read_text
from attnorm.provenance import file_hash

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.figure import Figure
    from torch import Tensor

    from attnorm.models.inputs import Text
    from attnorm.models.load import LoadedModel

# "not decided": measured, and the numbers do not decide. "not tested": not measured, or too little for a verdict.
Verdict = Literal["reproduces", "partly", "does not", "not decided", "not tested"]
UNDECIDED: tuple[Verdict, ...] = ("not decided", "not tested")
Floats = NDArray[np.float64]
Compared = TypeVar("Compared")  # what names a comparison

BUNDLED = "bundled"
RECORDS = "records.jsonl"  # optional file in the output folder: records from another machine, plain or .xz
ProgressCallback = Callable[[str, int, int], None]
"""Called with what is being done, how many steps of it are finished, and the total."""


def no_progress(what: str, done: int, total: int) -> None:
    """Report nothing."""


PAPER_MODEL = "gpt2"
PAPER_MODEL_FULL_NAME = "openai-community/gpt2"  # the same repository
PAPER_TEXT = "War and Peace"
PAPER_SHAPE = {"layers": 12, "heads": 12, "head_dim": 64, "max_positions": 1024}
# Experiments of that paper; the others test Velickovic et al., who used other models.
PAPER_EXPERIMENTS = ("fig1", "fig2", "fig3", "fig4", "gradients", "guidelines")
# In the first sentence of the English translations; editions put contents and prefaces before it.
PAPER_OPENING = "Genoa and Lucca"


@dataclass(frozen=True)
class ExperimentFinding:
    """One claim of a paper and our result."""

    claim: str  # what the paper says, with its number and section
    ours: str  # our number, in words with units
    verdict: Verdict
    why: str = ""  # one sentence: the explanation by the corrected theory

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def judge(holds: object, *, partly: object = False) -> Verdict:
    """Return "reproduces" if the claim holds, "partly" if a part of it does, and else "does not"."""
    return "reproduces" if holds else "partly" if partly else "does not"


def combine_verdicts(verdicts: Sequence[Verdict]) -> Verdict:
    """Combine verdicts: models without a decision do not count; different verdicts give "partly"."""
    decided = {verdict for verdict in verdicts if verdict not in UNDECIDED}
    if not decided:
        return "not decided" if "not decided" in verdicts else "not tested"
    return next(iter(decided)) if len(decided) == 1 else "partly"


def compare_over_seeds(
    pairs: Mapping[Compared, tuple[Mapping[int, float], Mapping[int, float]]],
) -> dict[Compared, tuple[Difference, float]]:
    """Test each pair over seeds; return the differences, and p after Holm's correction over the pairs.

    pairs: the number of each model by seed, of both sides. Pairs with too few seeds for a test are left out.
    """
    tests = {key: test for key, sides in pairs.items() if (test := difference_over_seeds(*sides)) is not None}
    corrected = holm([test.p for test in tests.values()])
    return {key: (test, p) for (key, test), p in zip(tests.items(), corrected, strict=True)}


def median(values: Floats) -> float:
    """Return the median of the finite values; NaN if there are none."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else math.nan


class UnfinishedError(Exception):
    """The time limit was reached before everything was trained; finished models are kept."""


def copied_records(parts: Path) -> tuple[Path, Path]:
    """Return the paths of records that a user may have copied into the output folder, plain and compressed.

    parts: the folder of intermediate results of an experiment, which is in `parts` of the output folder.
    """
    out = parts.parent.parent
    return out / RECORDS, out / f"{RECORDS}.xz"


@dataclass(frozen=True)
class Outcome:
    """The result of a run. Figures and tables are named by the stem of their files."""

    summary: str  # one paragraph
    findings: tuple[ExperimentFinding, ...]
    figures: "Mapping[str, Figure]"
    tables: "Mapping[str, pa.Table]"
    parameters: Mapping[str, Any]  # everything needed to repeat it: lengths, N, rows, seeds, ...


def untested(findings: Iterable[ExperimentFinding], why: str) -> tuple[ExperimentFinding, ...]:
    """Return the findings of a run that is too small for verdicts."""
    return tuple(replace(finding, verdict="not tested", why=why) for finding in findings)


def without_verdicts(outcome: Outcome) -> Outcome:
    """Return the outcome of models that train in seconds."""
    return replace(
        outcome,
        summary=f"{outcome.summary} Models this small show only that everything runs.",
        findings=untested(outcome.findings, "too small to judge"),
    )


@dataclass(frozen=True)
class Experiment:
    """A named experiment. `run` gets a folder for intermediate results, which may not exist yet."""

    name: str
    title: str
    source: str  # "Mudarisov et al. 2025, Figure 2"
    question: str
    run: "Callable[[ExperimentSubject, ProgressCallback, Path], Outcome]"
    needs_model: bool = True
    tokens: tuple[int, int] = (1, 1)  # fewest tokens of the text: in full, and with --quick
    removes_parts: bool = False  # its intermediate results are removed at the end

    def fewest_tokens(self, *, quick: bool) -> int:
        return self.tokens[quick]


@dataclass(frozen=True)
class ExperimentSubject:
    """A model by name and texts by path; both are loaded on first use."""

    model: str = BUNDLED  # "bundled", a folder or a hub name
    others: tuple[str, ...] = ()  # further models, for the experiments that compare several
    texts: tuple[Path, ...] = ()  # empty: the default text of attnorm.analyze
    valid: tuple[Path, ...] = ()  # held-out texts, for the experiments that train
    quick: bool = False  # small sizes: seconds
    seed: int = 0
    device: str | None = None
    only: tuple[str, ...] = ()  # parts of a long experiment, for example normalizers; empty: all
    longest: int | None = None  # tokens of the longest pass, for dispersion
    images: Path | None = None  # archive of labeled images, for vision
    minutes: float | None = None  # time limit, for the experiments that train a grid of models

    def each(self) -> "list[ExperimentSubject]":
        """Return one subject per model; each model is loaded when it is used."""
        return [replace(self, model=model, others=()) for model in (self.model, *self.others)]

    def loaded(self) -> "LoadedModel":
        return _loaded(self.model, self.device)

    def described(self) -> dict[str, Any]:
        """Return the description of the model for a manifest; cached."""
        return dict(_described(self.model, self.device))

    def passages(self) -> "list[Text]":
        """Return the texts with their names."""
        return _passages(self.texts, self.model == BUNDLED)

    def model_inputs(self, length: int) -> "dict[str, Tensor]":
        """Return the first `length` tokens of the first text as model inputs."""
        from attnorm.models.inputs import prepared

        return prepared(self.passages()[0], self.loaded(), length)

    def model_and_text(self) -> str:
        """Return the names of the model and of the first text, for the notes of figures."""
        return f"{self.loaded().name}, {self.passages()[0].name}"

    def longest_length(self, full: Iterable[int], quick: int) -> int:
        """Return the longest of the lengths `full` that text and model have; with --quick, `quick`."""
        return self.lengths((quick,) if self.quick else full)[-1]

    def lengths(self, wanted: Iterable[int]) -> tuple[int, ...]:
        """Return the lengths, sorted, for which the first text has tokens and the model has positions."""
        from attnorm.models.describe import longest_context

        loaded = self.loaded()
        limit, _ = longest_context(loaded.model)
        requested = sorted(set(wanted))
        fitting = tuple(length for length in requested if limit is None or length <= limit)
        tokens = self.tokens(max(fitting, default=1))
        fitting = tuple(length for length in fitting if length <= tokens)
        if not fitting:
            raise ValueError(
                f"{self.passages()[0].name!r} has {tokens} tokens and {loaded.name} positions for "
                f"{limit or 'any number of'}; this experiment needs at least {requested[0]}. Give a longer text "
                "with --text, or another model."
            )
        return fitting

    def tokens(self, wanted: int) -> int:
        """Return the number of tokens of the first text; of a long text, a number not below `wanted`."""
        from attnorm.models.inputs import prepared

        loaded, passage = self.loaded(), self.passages()[0]
        # Tokenizing the start of a book shows that it is long enough.
        start = str(passage.content)[: 16 * wanted]
        tokens = prepared(type(passage)(passage.name, start), loaded, None)["input_ids"].shape[1]
        if tokens < wanted and len(start) < len(str(passage.content)):
            tokens = prepared(passage, loaded, None)["input_ids"].shape[1]
        return int(tokens)

    def identity(self, *, with_model: bool) -> dict[str, Any]:
        """Return everything that decides a result, as plain values: a finished result is recognized by it."""
        identity: dict[str, Any] = {"quick": self.quick, "seed": self.seed, "only": sorted(self.only)}
        if with_model:
            identity |= self._model_and_texts()
            if self.others:
                identity["others"] = [list(subject._model_and_texts().values()) for subject in self.each()[1:]]
                _require_different_names([identity["model"], *(other[0] for other in identity["others"])])
        elif self.texts:
            # Texts to train on may be compressed and very long: hash the files.
            identity["texts"] = [[path.name, file_hash(path)] for path in self.texts]
        if self.longest is not None:
            identity["longest"] = self.longest
        if self.images is not None:
            identity["images"] = [self.images.name, file_hash(self.images)]
        if self.valid:
            identity["valid"] = [[path.name, file_hash(path)] for path in self.valid]
        return identity

    def _model_and_texts(self) -> dict[str, Any]:
        from attnorm.analysis.manifest import content_hash
        from attnorm.models.inputs import Media

        model = self.described()
        texts = []
        for text in self.passages():
            assert not isinstance(text.content, Media), "experiments read text"
            texts.append([text.name, content_hash(text.content)])
        return {"model": model["name"], "fingerprint": model["fingerprint"], "texts": texts}


_held: "dict[tuple[str, str | None], LoadedModel]" = {}


def _loaded(model: str, device: str | None) -> "LoadedModel":
    from attnorm.models.dispatch import check_observable
    from attnorm.models.load import load

    if (model, device) not in _held:
        _held.clear()  # two models may not fit into memory
        loaded = load(model, device=device)
        check_observable(loaded.model)
        _held[model, device] = loaded
    return _held[model, device]


@lru_cache(maxsize=32)
def _described(model: str, device: str | None) -> dict[str, Any]:
    from attnorm.models.describe import describe

    return describe(_loaded(model, device))


def _require_different_names(names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"expected models with different names, which identify results, got {name!r} twice. Remove one, "
                "or rename its folder."
            )


@lru_cache(maxsize=1)
def _passages(files: tuple[Path, ...], bundled: bool) -> "list[Text]":
    from attnorm.models.inputs import texts_from

    if not files:
        from attnorm.analysis.settings import default_text

        return texts_from(default_text(bundled=bundled))
    names = [path.name for path in files]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"expected texts with different file names, which identify results, got {twice!r} twice. Rename one."
        )
    return texts_from({path.name: read_text(path) for path in files})


def default_model(*, quick: bool) -> str:
    """Return the model of the paper; for small sizes the bundled one."""
    if quick:
        return BUNDLED
    from huggingface_hub import try_to_load_from_cache

    cached = (
        name
        for name in (PAPER_MODEL, PAPER_MODEL_FULL_NAME)
        if isinstance(try_to_load_from_cache(name, "config.json"), str)
    )
    return next(cached, PAPER_MODEL)


def paper_setting(
    experiment: str, model: Mapping[str, Any], text: str, content: object, *, quick: bool
) -> dict[str, Any]:
    """Return the manifest's entry about the paper's setting: whether it is the same, and the differences.

    model: as `attnorm.models.describe` has it. text: its name.
    """
    if experiment not in PAPER_EXPERIMENTS:
        return {}
    different = _differences_from_paper(model, text, content, quick=quick)
    paper = f"{PAPER_MODEL} ({PAPER_SHAPE['layers']} layers of {PAPER_SHAPE['heads']} heads) on {PAPER_TEXT}"
    sentence = (
        f"Not the paper's setting, {paper}: {'; '.join(different)}."
        if different
        else f"The paper's setting: {paper}. Rows, vectors and chapters it does not state: ours are in the parameters."
    )
    return {"paper_setting": {"same": not different, "sentence": sentence}}


def _differences_from_paper(model: Mapping[str, Any], text: str, content: object, *, quick: bool) -> Sequence[str]:
    name = str(model["name"])
    shape = {part: model.get(part) for part in PAPER_SHAPE}
    different = []
    if name.rsplit("/", 1)[-1] != PAPER_MODEL:
        different.append(f"the model is {name}")
    elif shape != PAPER_SHAPE:
        sentence = ", ".join(f"{part} {value}" for part, value in shape.items() if value != PAPER_SHAPE[part])
        different.append(f"what is called {name} here has another shape ({sentence})")
    if PAPER_OPENING not in " ".join(str(content)[:200_000].split()):
        different.append(f"the text is {text}")
    if quick:
        different.append("sizes are small (--quick)")
    return different
