"""analyze(): run a model over texts, watch its attention, and say what every head does."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnorm.analysis import store
from attnorm.analysis.default_text import default_text
from attnorm.analysis.digests import DamagedFileError
from attnorm.analysis.over_windows import together
from attnorm.analysis.parts import AnalysisProgress, Job, measured_parts
from attnorm.analysis.plan import check_windows, plan
from attnorm.analysis.readable import unigram_entropies
from attnorm.analysis.result import Analysis, refuse_another_run
from attnorm.analysis.run_manifest import completed, new_manifest
from attnorm.analysis.settings import (
    BUDGET,
    READ_KEYS,
    READ_ROWS,
    USUAL_GROUPS,
    Rows,
    Windows,
    description,
    named_normalizers,
    settings_of,
)
from attnorm.analysis.starts import starting_from
from attnorm.analysis.verdicts import Thresholds
from attnorm.models.inputs import texts_from
from attnorm.models.load import BUNDLED, load
from attnorm.models.media import with_model_inputs
from attnorm.models.observe import check_observable
from attnorm.normalizers.contract import Normalizer

__all__ = ["AnalysisProgress", "analyze"]


def analyze(
    model: Any = None,
    inputs: Any = None,
    tokenizer: Any = None,
    *,
    lengths: Sequence[int] | int | None = None,
    windows: Windows = "auto",
    budget: int = BUDGET,
    bos: bool | None = None,
    top_n: Sequence[int] | int = (1, 5, 10, 20, 100),
    rows: Rows = "auto",
    normalizers: str | Normalizer | Iterable[str | Normalizer] = ("model",),
    vectors: str = "values",
    vector_rows: int | None = None,
    metrics: str | Iterable[str] = USUAL_GROUPS,
    temperatures: Sequence[float] = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0),
    seed: int = 0,
    read_keys: int = READ_KEYS,
    read_rows: int | Sequence[int] = READ_ROWS,
    dtype: Any = None,
    device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    out: str | Path | None = None,
    resume: bool = True,
    progress: Callable[[AnalysisProgress], None] | None = None,
    thresholds: Thresholds | None = None,
) -> Analysis:
    """Measure every attention head of a model; the model's own output stays as it is, and no L x L array is made.

    model: a hub name, a folder, a .gguf file, a loaded transformers model, or None for the small one of this package.
    inputs: a text, a pathlib.Path of one (plain or .xz), several of them, a dict name -> text, token ids, or a dict of
    model inputs. None: a passage of its own for the bundled model, Python's help topics for any other.
    tokenizer: an object, a hub name or a folder; None for the one beside the model.
    lengths: tokens of each window; None for the whole text where it fits into the model and the budget, else for
    windows of an eighth of the budget (or of the model's limit, where that is shorter).
    windows: disjoint windows of each text, from its start to its end; heads are judged over all of them. "auto": as
    many as the budget allows, at most 8. budget: tokens of each text over all its windows.
    bos: True adds the model's BOS token before every window of a text, False removes it; None: as the tokenizer does.
    top_n: the sizes N of the sets of heaviest keys for which mass, distances and separability are measured.
    rows: "auto" for up to 512 query rows of each window, spread over its lengths, "all", "last" or how many to measure.
    vector_rows: how many of the longest of them get the costly
    numbers (distances, separability, sensitivity, coverage); None for 64, and for 16 where a number of rows is
    given (fewer where they have more than 1,024 keys, down to 4).
    vectors: what they compare, "values" or layer "inputs".
    normalizers: "model" is what the model runs; others are measured on the same logits: what would they do here?
    One that is given by name starts from this model's context length, as in attnorm.patch.
    metrics: "core", with the gradient, on which all verdicts rest: on a CPU at most twice the time of the plain forward
    pass. "all", or further groups out of vectors (distances, separability, saturation), sensitivity and coverage, cost
    several times as much.
    temperatures: what logits are divided by where sensitivity is measured.
    seed: random seed of sampled rows and permutations; verdicts do not depend on it.
    read_keys: how many of the heaviest keys of a row are kept, with their text (tables `reads` and `tokens`); 0 keeps
    no token of the text. read_rows: how many rows, spread over the text with the last among them, or which ones, e.g.
    (-1, 120).
    dtype: "float32", "bfloat16", "float16", "float64" or "auto", the checkpoint's own; None for float32 on a CPU and
    the checkpoint's own elsewhere. device: "cpu", "cuda", "cuda:1" or "auto", over all GPUs; None for a GPU if there
    is one. revision: commit, branch or tag on the hub. trust_remote_code: run code that comes with the model.
    out: a folder for the result; an interrupted run that is started again with it goes on where it stopped, unless
    resume=False. progress: called with a AnalysisProgress after every layer. thresholds: of the verdicts.

    >>> attnorm.analyze("gpt2", text, lengths=(256, 1024), normalizers=("model", "entmax15"), out="runs/gpt2")
    """
    named = named_normalizers(normalizers)
    check_windows(windows, budget)
    settings = settings_of(
        normalizers=named,
        top_n=top_n,
        rows=rows,
        vectors=vectors,
        vector_rows=vector_rows,
        metrics=metrics,
        temperatures=temperatures,
        seed=seed,
        read_keys=read_keys,
        read_rows=read_rows,
    )
    chosen = BUNDLED if model is None else model
    loaded = load(
        chosen, tokenizer=tokenizer, dtype=dtype, device=device, revision=revision, trust_remote_code=trust_remote_code
    )
    check_observable(loaded.model)
    named = starting_from(named, loaded.model, normalizers)
    given = texts_from(default_text(bundled=chosen == BUNDLED) if inputs is None else inputs)
    texts = [with_model_inputs(text, loaded) for text in given]
    planned = plan(loaded, texts, lengths, windows=windows, budget=budget, bos=bos)
    settings = replace(
        settings,
        normalizers={name: description(normalizer) for name, normalizer in named.items()},
        windows=windows,
        window_count=planned.windows,
        budget=budget,
        bos=bos,
    )
    source = str(chosen) if isinstance(chosen, str | Path) else None
    manifest = new_manifest(loaded, texts, planned, settings, source)
    folder = None if out is None else Path(out)
    judged_by = Thresholds() if thresholds is None else thresholds
    if folder is not None:
        refuse_another_run(folder, manifest)
        if resume and _is_finished(folder):
            try:
                return _saved(Analysis.load(folder).judged(judged_by), folder)
            except DamagedFileError as error:
                warnings.warn(f"the tables are made again from the finished parts: {error}", stacklevel=2)
        with store.explained_when_full(folder):
            store.make_folder(folder)
            store.write_json(folder / store.MANIFEST, manifest)
    job = Job(loaded, named, settings)
    done = measured_parts(job, planned, manifest, folder, resume, progress or _silent)
    finished = completed(manifest, done, unigram_entropies(planned.parts))
    analysis = Analysis.of(together(done), finished, judged_by)
    return analysis if folder is None else _saved(analysis, folder)


def _is_finished(folder: Path) -> bool:
    path = folder / store.MANIFEST
    return path.is_file() and bool(store.read_json(path).get("finished"))


def _saved(analysis: Analysis, folder: Path) -> Analysis:
    analysis.save(folder)
    return analysis


def _silent(progress: AnalysisProgress) -> None:
    pass
