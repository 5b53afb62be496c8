"""The manifest of a run: what is known before it starts, and what its parts add to it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attnorm.analysis import store
from attnorm.analysis.manifest import SCHEMA, now, part_key, versions
from attnorm.analysis.plan import AnalysisPlan, described
from attnorm.analysis.readable import readings, warnings_of
from attnorm.analysis.settings import AnalysisSettings, description, vector_rows_at
from attnorm.metrics.vectors import NULL_ROWS
from attnorm.models.describe import describe
from attnorm.models.dispatch import attention_sites, running_normalizer
from attnorm.models.inputs import Text
from attnorm.models.load import LoadedModel

_ABOUT = ("text", "length", "window", "start", "tokens", "seconds", "first_token", "loss", "loss_tokens")


def new_manifest(
    loaded: LoadedModel, texts: Sequence[Text], planned: AnalysisPlan, settings: AnalysisSettings, source: str | None
) -> dict[str, Any]:
    """source: what to type to measure the model again, where it was loaded by name or from a folder."""
    model = {**describe(loaded), **_what_it_runs(loaded)}
    about = {text.name: described(text) | _coverage(planned, text) for text in texts}
    lengths = sorted({part.length for part in planned.parts if part.length is not None})
    plain = {"lengths": lengths, **settings.as_dict()}
    return {
        "schema": SCHEMA,
        "finished": False,
        "created": now(),
        "model": {**model, "source": source},
        "texts": list(about.values()),
        "parts": [
            {
                "text": part.text.name,
                "length": part.length,
                "window": part.window,
                "start": part.start,
                "key": part_key(model, about[part.text.name], part.length, plain, part.start),
            }
            for part in planned.parts
        ],
        "settings": plain,
        "versions": versions(),
        "notes": [*planned.notes, *sampling_notes(settings, lengths)],
    }


def _coverage(planned: AnalysisPlan, text: Text) -> dict[str, Any]:
    found = planned.coverage.get(text.name)
    return {} if found is None else found.as_dict()


def _what_it_runs(loaded: LoadedModel) -> dict[str, Any]:
    """What stands behind the name "model" in the tables: softmax, or what was patched in; None where layers differ."""
    patched = {site.path: running_normalizer(module) for module, site in attention_sites(loaded.model).items()}
    names = {"softmax" if normalizer is None else normalizer.name for normalizer in patched.values()}
    details = {path: description(normalizer) for path, normalizer in patched.items() if normalizer is not None}
    return {"runs": names.pop() if len(names) == 1 else None, "runs_details": details}


def sampling_notes(settings: AnalysisSettings, lengths: Sequence[int]) -> list[str]:
    if not set(settings.metrics) & {"vectors", "sensitivity", "coverage"}:
        return []
    most = vector_rows_at(settings, min(lengths, default=1))
    compared = min(NULL_ROWS, most)
    if lengths and max(lengths) * (1 - math.sqrt(1 / 2)) <= compared:
        return []  # the longest rows, a half octave of them, are all taken
    sampled = f"come from at most {most} of the longest rows of each sequence (separability and its null: {compared})"
    return [f"distances, separability, sensitivity and coverage {sampled}; all other numbers from every measured row"]


def completed(manifest: Mapping[str, Any], done: Sequence[store.Part], unigrams: Mapping[str, float]) -> dict[str, Any]:
    """The manifest of a finished run. unigrams: by text, the entropy of its measured tokens (readable.py)."""
    parts = [{"key": part.key, **{name: part.about.get(name) for name in _ABOUT}} for part in done]
    broken = sum(_broken_heads(part) for part in done)
    notes = list(manifest["notes"])
    if broken:
        heads = sum(part.tables["heads"].num_rows for part in done)
        notes.insert(
            0,
            f"{broken} of {heads} measured heads have logits or weights that are not finite (see broken_rows); those "
            "rows are left out of every number. The checkpoint, or the precision it runs in, is broken there",
        )
    if any(part.about.get("repeats") for part in done):
        notes.append(
            "layers of this model attend more than once in a pass: the heads of later calls are numbered on after "
            "those of the first, whose coverage is the layer's"
        )
    read = readings(parts, unigrams)
    notes = [*warnings_of(read), *notes]
    return {**manifest, "finished": True, "parts": parts, "reading": read, "notes": notes}


def _broken_heads(part: store.Part) -> int:
    return sum(1 for rows in part.tables["heads"]["broken_rows"].to_pylist() if rows)
