"""analyze(): run a model over texts, measure its attention, and judge every head."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnorm.analysis import circuits, store
from attnorm.analysis.default_text import default_text
from attnorm.analysis.manifest import finished_manifest, new_manifest
from attnorm.analysis.merge import merge_parts
from attnorm.analysis.output_bottleneck import measure_output
from attnorm.analysis.parts import AnalysisProgress, Job, measure_parts
from attnorm.analysis.plan import check_windows, plan, unigram_entropies
from attnorm.analysis.result import Analysis, reject_another_run
from attnorm.analysis.settings import (
    BUDGET,
    READ_KEYS,
    READ_ROWS,
    TEMPERATURES,
    TOP_N,
    USUAL_GROUPS,
    Normalizers,
    Rows,
    Windows,
    description,
    named_normalizers,
    settings_of,
    started_at_length,
    whole_pictures,
)
from attnorm.analysis.verdicts import Thresholds
from attnorm.models.dispatch import check_observable
from attnorm.models.inputs import Text, texts_from
from attnorm.models.load import BUNDLED, LoadedModel, load
from attnorm.models.media import PatchPicture, picture_of, with_model_inputs

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
    top_n: Sequence[int] | int = TOP_N,
    rows: Rows = "auto",
    normalizers: Normalizers = ("model",),
    vectors: str = "values",
    vector_rows: int | None = None,
    metrics: str | Iterable[str] = USUAL_GROUPS,
    temperatures: Sequence[float] = TEMPERATURES,
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
    """Measure every attention head of a model. The model's output does not change, and no L x L array is created.

    Args:
        model: Hub name, folder, .gguf file or loaded transformers model (default: the small bundled model).
        inputs: A text, a pathlib.Path to one (plain or .xz), several of them, a dict name -> text, token ids, or a dict
            of model inputs (default: a built-in text).
        tokenizer: Object, hub name or folder (default: the tokenizer next to the model).
        lengths: Tokens per window (default: the whole text if it fits into the model and the budget, else an eighth
            of the budget, or the model's limit if that is shorter).
        windows: Number of disjoint windows per text, spread over it; heads are judged over all of them. "auto": as
            many as the budget allows, at most 16.
        budget: Tokens per text, over all its windows.
        bos: True adds the model's BOS token to every window, False removes it (default: as the tokenizer does).
        top_n: Sizes N of the sets of heaviest keys for which mass, distances and separability are measured.
        rows: Query rows per window: "auto" (up to 512, spread over all lengths), "all", "last" or a number.
        normalizers: "model" is the normalizer that the model runs. Others are applied to the same logits. A
            normalizer given by name starts at this model's context length, as in attnorm.patch.
        vectors: Vectors for distances and separability: "values" or layer "inputs".
        vector_rows: Number of longest rows with the costly metrics (default: 64; if `rows` is a number, 16, and fewer
            above 1,024 keys, down to 4).
        metrics: "core" has all that verdicts need and takes at most twice the time of the plain forward pass on a CPU.
            The groups vectors (distances, separability, saturation), sensitivity and coverage, or "all", take several
            times as long. "circuits" is not in "all": it runs the model on random tokens and needles up to the longest
            length, and adds induction, previous-token and retrieval scores. Nor is "output", the rank of the output
            layer's logits (output_bottleneck).
        temperatures: Divisors of the logits for the group sensitivity.
        seed: Random seed for row sampling and permutations; verdicts do not depend on it.
        read_keys: Heaviest keys to store per listed row, with their text (tables `reads` and `tokens`); 0 stores no
            text. For an image the default stores all patches of two rows: the first token and the patch in the middle.
        read_rows: Number of listed rows, spread over the text including the last, or which ones, e.g. (-1, 120).
        dtype: "float32", "bfloat16", "float16", "float64" or "auto" for the checkpoint's own (default: float32 on a
            CPU, else "auto").
        device: "cpu", "cuda", "cuda:1" or "auto" for all GPUs (default: the GPU if there is one).
        revision: Commit, branch or tag on the hub.
        trust_remote_code: Run code that comes with the model.
        out: Folder for the result. The same call resumes an interrupted run from it.
        resume: Use finished parts in `out`.
        progress: Called with an AnalysisProgress after every layer.
        thresholds: Thresholds of the verdicts.

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
    source = BUNDLED if model is None else model
    loaded = load(
        source, tokenizer=tokenizer, dtype=dtype, device=device, revision=revision, trust_remote_code=trust_remote_code
    )
    if isinstance(model, LoadedModel):
        source = model.asked or model.model
    check_observable(loaded.model)
    named = started_at_length(named, loaded.model, normalizers)
    source_texts = texts_from(default_text(bundled=source == BUNDLED) if inputs is None else inputs)
    texts = [with_model_inputs(text, loaded) for text in source_texts]
    parts_plan = plan(loaded, texts, lengths, windows=windows, budget=budget, bos=bos)
    pictures = _pictures(texts, loaded) if read_keys else {}
    settings = replace(
        whole_pictures(settings, [(picture.rows, picture.columns) for picture in pictures.values()]),
        normalizers={name: description(normalizer) for name, normalizer in named.items()},
        windows=windows,
        window_count=parts_plan.windows,
        budget=budget,
        bos=bos,
    )
    loaded_from = str(source) if isinstance(source, str | Path) else None
    manifest = new_manifest(loaded, texts, parts_plan, settings, loaded_from)
    folder = None if out is None else Path(out)
    thresholds = thresholds or Thresholds()
    if folder is not None:
        reject_another_run(folder, manifest)
        if resume and _is_finished(folder):
            try:
                analysis = Analysis.load(folder).judged(thresholds)
                analysis.save(folder)
                return analysis
            except store.DamagedFileError as error:
                warnings.warn(f"{error}; the tables are combined again from the finished parts", stacklevel=2)
        with store.explained_when_full(folder):
            store.make_folder(folder)
            store.write_json(folder / store.MANIFEST, manifest)
    job = Job(loaded, named, settings)
    parts = measure_parts(job, parts_plan, manifest, folder, resume, progress or (lambda state: None))
    finished = finished_manifest(manifest, parts, unigram_entropies(parts_plan.parts))
    tables = merge_parts(parts)
    if "circuits" in settings.metrics:
        longest = max((part.length or 0 for part in parts_plan.parts), default=0)
        lengths = circuits.probe_lengths(max(longest, circuits.SHORTEST))
        circuit_table = circuits.measure_circuits(loaded, named, lengths, seed=settings.seed)
        tables["heads"] = circuits.with_circuits(tables["heads"], circuit_table)
    if "output" in settings.metrics:
        finished["output"] = measure_output(loaded, source_texts).as_dict()
    if pictures:
        finished["pictures"] = {name: picture.as_dict() for name, picture in pictures.items()}
    analysis = Analysis.of(tables, finished, thresholds)
    if folder is not None:
        analysis.save(folder)
    return analysis


def _pictures(texts: Sequence[Text], loaded: LoadedModel) -> dict[str, PatchPicture]:
    """Return the images among the inputs by name."""
    pictures = {
        text.name: picture_of(text.content, loaded.model.config) for text in texts if isinstance(text.content, Mapping)
    }
    return {name: picture for name, picture in pictures.items() if picture is not None}


def _is_finished(folder: Path) -> bool:
    path = folder / store.MANIFEST
    return path.is_file() and bool(store.read_json(path).get("finished"))
