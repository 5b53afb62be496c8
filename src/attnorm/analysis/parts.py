"""Measure the parts of a run one by one; each is written before the next one starts.

The finished layers of a long part are written too (analysis/store.py).
"""

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from attnorm.analysis import store
from attnorm.analysis.collect import Collector
from attnorm.analysis.plan import AnalysisPlan, PartPlan
from attnorm.analysis.reads import token_texts
from attnorm.analysis.settings import AnalysisSettings
from attnorm.analysis.store import FinishedLayers
from attnorm.metrics.normalized import MODEL
from attnorm.metrics.sampling import query_masks
from attnorm.models.forward_pass import reading, run
from attnorm.models.load import LoadedModel
from attnorm.models.observe import observe
from attnorm.models.output_gates import OutputGates, output_gates
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
) -> list[store.Part]:
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
    done: list[store.Part] = []
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


def _read_finished_part(folder: Path, key: str) -> tuple[store.Part | None, bool]:
    """Return the finished part or None, and whether there is a damaged one, which is measured again."""
    try:
        return store.read_part(folder, key), False
    except store.DamagedFileError as error:
        warnings.warn(f"{error}; this part is measured again", stacklevel=2)
        return None, True


def _measure(
    job: Job,
    part: PartPlan,
    key: str,
    state: AnalysisProgress,
    progress: Callable[[AnalysisProgress], None],
    layers: FinishedLayers | None,
) -> store.Part:
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
    return store.Part(key, about, {**tables, "heads": with_gates(tables["heads"], gates)})


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
