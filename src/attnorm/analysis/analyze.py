"""analyze(): run a model over texts, measure its attention, and judge every head.

The parts of a run (analysis/plan.py) are measured one by one; each is written before the next one starts. The finished
layers of a long part are written too (analysis/store.py).
"""

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from attnorm.analysis import circuits, store
from attnorm.analysis.collect import Collector
from attnorm.analysis.manifest import finished_manifest, new_manifest
from attnorm.analysis.output_bottleneck import load_larger, measure_output
from attnorm.analysis.plan import AnalysisPlan, PartPlan, check_read_rows, check_windows, plan, unigram_entropies
from attnorm.analysis.reads import token_texts
from attnorm.analysis.result import Analysis, reject_another_run
from attnorm.analysis.settings import (
    BUDGET,
    READ_KEYS,
    READ_ROWS,
    TEMPERATURES,
    TOP_N,
    USUAL_GROUPS,
    AnalysisSettings,
    Normalizers,
    Rows,
    Windows,
    default_text,
    description,
    named_normalizers,
    settings_of,
    start_notes,
    started_at_length,
    whole_pictures,
)
from attnorm.analysis.store import FinishedLayers
from attnorm.analysis.tables import Part, merge_parts
from attnorm.analysis.verdicts import Thresholds
from attnorm.analysis.verdicts.thresholds import checked
from attnorm.metrics.normalized import MODEL
from attnorm.metrics.sampling import query_masks
from attnorm.models.describe import describe
from attnorm.models.dispatch import check_has_rows, check_observable
from attnorm.models.forward_pass import reading, run
from attnorm.models.inputs import Text, texts_from
from attnorm.models.layer_normalizer import measured_length
from attnorm.models.load import BUNDLED, LoadedModel, load
from attnorm.models.media import PatchPicture, picture_of, with_model_inputs
from attnorm.models.observe import observe
from attnorm.models.output_gates import OutputGates, output_gates
from attnorm.models.threads import exclusive
from attnorm.normalizers.contract import Normalizer
from attnorm.provenance import versions


@dataclass(frozen=True)
class AnalysisProgress:
    """State of a run; `progress` is called with it before each part, after each layer and after each part."""

    parts_done: int
    parts_total: int
    tokens_done: int  # in finished parts
    tokens_total: int
    text: str
    length: int | None
    layers_done: int
    layers_total: int
    layers_found: int = 0  # how many of layers_done were read from the disk
    resumed: bool = False  # the finished part was read from the disk


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
    larger: Any = None,
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
        tokenizer: Object, hub name or folder (default: the tokenizer of the model).
        lengths: Tokens per window (default: the whole text if it fits into the model and the budget, else an eighth
            of the budget, or the model's limit if that is shorter).
        windows: Number of disjoint windows per text, spread over it; heads are judged over all of them. "auto": as
            many as the budget allows, at most 16.
        budget: Tokens per text, over all its windows, if lengths or windows are chosen automatically.
        bos: True adds the model's BOS token to every window, False removes it (default: what the tokenizer does).
        top_n: Sizes N of the sets of heaviest keys for which mass, distances and separability are measured.
        rows: Query rows per window: "auto" (up to 512, spread over all lengths), "all", "last" or a number.
        normalizers: "model" is the normalizer that the model runs. Others are applied to the same logits. A
            length rule given by name, such as ssmax, starts at the longest length measured, but not beyond the
            model's own; "ssmax:train_length=512" names another.
        vectors: Vectors for distances and separability: "values" or layer "inputs".
        vector_rows: Number of longest rows with the costly metrics (default: 64; if `rows` is a number, 16, and fewer
            above 1,024 keys, down to 4).
        metrics: "core" has all that verdicts need and takes about twice the time of the plain forward pass on one CPU
            thread. The groups vectors (distances, separability, saturation), sensitivity and coverage, or "all", take
            several times as long. "circuits" is not in "all": it runs the model on random tokens and needles up to the
            longest length, and adds induction, previous-token and retrieval scores. Nor is "output", the rank of the
            output layer's logits (output_bottleneck).
        temperatures: Divisors of the logits for the group sensitivity.
        larger: A larger model with the same tokenizer; with the group output, it estimates the rank that the text
            needs.
        seed: Random seed for row sampling and permutations; verdicts do not depend on it.
        read_keys: Heaviest keys to store per listed row, with their text (tables `reads` and `tokens`); 0 stores no
            text. For an image the default stores all patches of two rows: the first token and the patch in the middle.
        read_rows: Number of listed rows, spread over the text including the last, or which ones, e.g. (-1, 120).
        dtype: "float32", "bfloat16", "float16", "float64" or "auto" for the checkpoint's own (default: float32 on a
            CPU, else "auto").
        device: "cpu", "cuda", "cuda:1" or "auto" for all GPUs (default: the GPU if there is one).
        revision: Commit, branch or tag on the hub.
        trust_remote_code: Allow the model's repository to run its own Python code.
        out: Folder for the result. The same call resumes an interrupted run from it.
        resume: Reuse finished parts in `out`; False measures everything again.
        progress: Called with an AnalysisProgress after every layer.
        thresholds: Thresholds of the verdicts (default: attnorm.Thresholds()).

    >>> attnorm.analyze("gpt2", text, lengths=(256, 1024), normalizers=("model", "entmax15"), out="runs/gpt2")
    """
    named = named_normalizers(normalizers)
    check_windows(windows, budget)
    thresholds = checked(thresholds)
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
    if larger is not None and "output" not in settings.metrics:
        raise ValueError(f"larger: expected output among the metrics, got {', '.join(settings.metrics)}. Add output.")
    source = BUNDLED if model is None else model
    loaded = load(
        source, tokenizer=tokenizer, dtype=dtype, device=device, revision=revision, trust_remote_code=trust_remote_code
    )
    if larger is not None:
        larger = load_larger(larger, loaded, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    if isinstance(model, LoadedModel):
        source = model.requested_name or model.model
    with exclusive(loaded.model, *([] if larger is None else [larger.model])):
        check_observable(loaded.model)
        if MODEL in named:
            check_has_rows(loaded.model)
        source_texts = texts_from(default_text(bundled=source == BUNDLED) if inputs is None else inputs)
        texts = [with_model_inputs(text, loaded) for text in source_texts]
        parts_plan = plan(loaded, texts, lengths, windows=windows, budget=budget, bos=bos)
        check_read_rows(settings.read_rows, parts_plan.parts)
        longest = max((length for part in parts_plan.parts if (length := part.sequence_length)), default=None)
        train_length = measured_length(loaded.model, longest)
        causal = not getattr(loaded.model.config, "is_encoder_decoder", False)
        started = started_at_length(named, normalizers, train_length, causal=causal)
        parts_plan = replace(parts_plan, notes=(*parts_plan.notes, *start_notes(named, started, train_length)))
        named = started
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
        if larger is not None:
            manifest["settings"]["larger"] = f"{larger.name} ({describe(larger)['fingerprint'][:12]})"
        folder = None if out is None else Path(out)
        if folder is not None:
            reject_another_run(folder, manifest)
            if resume and _is_finished(folder):
                try:
                    analysis = Analysis.load(folder).judged(thresholds)
                    analysis.save(folder)
                    return analysis
                except store.DamagedFileError as error:
                    problem = str(error).rstrip(".")
                    warnings.warn(f"{problem}. The tables are combined again from the finished parts.", stacklevel=2)
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
            finished["output"] = measure_output(loaded, source_texts, larger=larger).as_dict()
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


@dataclass(frozen=True)
class Job:
    """Model, normalizers and settings, which all parts share."""

    loaded: LoadedModel
    normalizers: Mapping[str, Normalizer | None]
    settings: AnalysisSettings


def measure_parts(
    job: Job,
    plan: AnalysisPlan,
    manifest: Mapping[str, Any],
    folder: Path | None,
    resume: bool,
    progress: Callable[[AnalysisProgress], None],
) -> list[Part]:
    """Return all parts of the plan; a part is read from the disk, or measured and written."""
    state = AnalysisProgress(
        parts_done=0,
        parts_total=len(plan.parts),
        tokens_done=0,
        tokens_total=sum(part.tokens for part in plan.parts),
        text=plan.parts[0].text.name,
        length=plan.parts[0].length,
        layers_done=0,
        layers_total=int(manifest["model"]["layers"]),
    )
    done: list[Part] = []
    for part, entry in zip(plan.parts, manifest["parts"], strict=True):
        state = replace(state, text=part.text.name, length=part.length, layers_done=0, layers_found=0, resumed=False)
        progress(state)
        result, damaged = _read_finished_part(folder, entry["key"]) if folder is not None and resume else (None, False)
        if result is None:
            layers = None if folder is None else FinishedLayers(folder, entry["key"])
            if layers is not None and not resume:
                layers.remove()
            result = _measure(job, part, entry["key"], state, progress, layers)
            if folder is not None and layers is not None:
                with store.explained_when_full(folder):
                    store.write_part(folder, result, replace=damaged or not resume)
                layers.remove()
            state = replace(state, layers_done=state.layers_total)
        else:
            state = replace(state, resumed=True)
        done.append(result)
        state = replace(state, parts_done=len(done), tokens_done=state.tokens_done + part.tokens)
        progress(state)
    return done


def _read_finished_part(folder: Path, key: str) -> tuple[Part | None, bool]:
    """Return the finished part or None, and whether there is a damaged one, which is measured again."""
    try:
        return store.read_part(folder, key), False
    except store.DamagedFileError as error:
        warnings.warn(f"{str(error).rstrip('.')}. This part is measured again.", stacklevel=2)
        return None, True


def _measure(
    job: Job,
    part: PartPlan,
    key: str,
    state: AnalysisProgress,
    progress: Callable[[AnalysisProgress], None],
    layers: FinishedLayers | None,
) -> Part:
    """Run the model over one part and measure it; finished layers are read from and written to `layers`."""
    started = time.perf_counter()

    def after_layer(done: int) -> None:
        total = max(done, state.layers_total)
        progress(replace(state, layers_done=done, layers_found=collector.found, layers_total=total))

    encoder_decoder = bool(job.loaded.model.config.is_encoder_decoder)
    tokens = query_masks(part.model_inputs, encoder_decoder=encoder_decoder)
    settings = job.settings if part.window == 0 else replace(job.settings, read_keys=0)  # list the first window only
    texts = None
    if settings.read_keys:
        texts = token_texts(part.model_inputs, job.loaded.tokenizer, encoder_decoder=encoder_decoder)
    collector = Collector(settings, job.normalizers, tokens, after_layer, texts, layers)
    with (
        _write_layers_on_error(layers),
        observe(job.loaded.model, collector, inputs=job.settings.vectors == "inputs"),
        output_gates(job.loaded.model) as gates,
    ):
        output = run(job.loaded, part.model_inputs)
        collector.finish()
    length = collector.longest if part.length is None else part.length
    about = {
        "text": part.text.name,
        "length": length,
        "tokens": part.tokens,
        "seconds": round(time.perf_counter() - started, 3),
        "versions": versions(),
        "repeats": collector.repeats,
        "window": part.window,
        "start": part.start,
        **reading(job.loaded, part.model_inputs, output).as_dict(),
    }
    tables = collector.tables(part.text.name, length, part.window)
    return Part(key, about, {**tables, "heads": with_gates(tables["heads"], gates)})


def with_gates(heads: pa.Table, gates: OutputGates) -> pa.Table:
    """The table of heads with the output gates of the model, where it has some."""
    if not gates.layers:
        return heads
    keys = list(zip(*(heads[name].to_pylist() for name in ("normalizer", "kind", "layer", "head")), strict=True))
    for name, values in {
        "output_gate": {layer: layer_gates.gate.tolist() for layer, layer_gates in gates.layers.items()},
        "gated_sink_mass": {layer: layer_gates.gated_sink_mass.tolist() for layer, layer_gates in gates.layers.items()},
    }.items():
        column = [
            values[kind, layer][head] if normalizer == MODEL and (kind, layer) in values else math.nan
            for normalizer, kind, layer, head in keys
        ]
        heads = heads.set_column(
            heads.column_names.index(name),
            heads.schema.field(name),
            pa.array(column, pa.float64()).cast(heads.schema.field(name).type),
        )
    return heads


@contextlib.contextmanager
def _write_layers_on_error(layers: FinishedLayers | None) -> Iterator[None]:
    """Write the finished layers if an error or Ctrl-C stops the pass."""
    try:
        yield
    except BaseException:
        if layers is not None:
            with contextlib.suppress(OSError):  # the first error is the one to report
                layers.write()
        raise
