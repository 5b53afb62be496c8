"""The manifest of a run: what was measured, on what, and how. It identifies a run and is enough to repeat it.

A manifest is plain JSON:

    schema      version of the tables          finished   false while parts are missing
    model       name, revision, class, fingerprint, layers, heads, dtype, device, ... (models.describe)
                source: the name or folder it was loaded from, null for an object
                runs: the normalizer that the tables call "model", null if layers differ
    texts       [{name, sha256, size, file, tokens, left_out, windows}]
    parts       [{text, length, window, start, key, tokens, seconds, first_token, loss, loss_tokens}]
    settings    lengths, top_n, rows, normalizers, normalizer_details, vectors, vector_rows, metrics, temperatures,
                epsilons, seed, windows, window_count, budget, bos, read_keys, read_rows; larger, if it was given
    reading     {text: loss, perplexity, unigram_entropy, first_token, readable}
    thresholds  thresholds of the verdicts     first_thresholds   the earlier ones, if the run was judged again
    versions    python, attnorm, torch, ...    created    UTC, ISO 8601
    notes       warnings for the reader        merged     manifests of the runs that were merged
"""

import hashlib
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnorm.analysis.settings import AnalysisSettings, description, sampled_rows_at
from attnorm.analysis.tables import Part
from attnorm.metrics.vectors import NULL_ROWS
from attnorm.provenance import now, versions

if TYPE_CHECKING:
    from attnorm.analysis.plan import AnalysisPlan
    from attnorm.models.inputs import Text
    from attnorm.models.load import LoadedModel

SCHEMA = 3
UNREADABLE = 0.75  # a loss above this share of the unigram entropy: the model hardly reads the text (docs/guide.md)
READABLE_TOKENS = 500  # of fewer tokens the entropy is too low to judge: 4.4 nats of 128 tokens of a book, 6.1 of 8,192

_PART_FACTS = ("text", "length", "window", "start", "tokens", "seconds", "first_token", "loss", "loss_tokens")
_SHOWN_AS = {"name": "model", "fingerprint": "weights"}  # entries of `model` in error messages


def new_manifest(
    loaded: "LoadedModel", texts: "Sequence[Text]", plan: "AnalysisPlan", settings: AnalysisSettings, source: str | None
) -> dict[str, Any]:
    """Return the manifest of an unfinished run. source: the name or folder that the model was loaded from."""
    # Imported here: reading a saved analysis needs no transformers.
    from attnorm.models.describe import describe
    from attnorm.models.dispatch import attention_sites, running_normalizer

    patched = {site.path: running_normalizer(module) for module, site in attention_sites(loaded.model).items()}
    names = {"softmax" if normalizer is None else normalizer.name for normalizer in patched.values()}
    model = {
        **describe(loaded),
        "runs": names.pop() if len(names) == 1 else None,
        "runs_details": {
            path: description(normalizer) for path, normalizer in patched.items() if normalizer is not None
        },
    }
    about = {
        text.name: text_facts(text) | (plan.coverage[text.name].as_dict() if text.name in plan.coverage else {})
        for text in texts
    }
    lengths = sorted({part.length for part in plan.parts if part.length is not None})
    plain = {"lengths": lengths, **settings.as_dict()}
    parts = [
        {
            "text": part.text.name,
            "length": part.length,
            "window": part.window,
            "start": part.start,
            "key": part_key(model, about[part.text.name], part.length, plain, part.start),
        }
        for part in plan.parts
    ]
    notes = [*plan.notes, *sampling_notes(settings, lengths)]
    return manifest_of({**model, "source": source}, list(about.values()), parts, plain, notes, finished=False)


def manifest_of(
    model: dict[str, Any],
    texts: list[dict[str, Any]],
    parts: list[dict[str, Any]],
    settings: dict[str, Any],
    notes: list[str],
    *,
    finished: bool,
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "finished": finished,
        "created": now(),
        "model": model,
        "texts": texts,
        "parts": parts,
        "settings": settings,
        "versions": versions(),
        "notes": notes,
    }


def finished_manifest(
    manifest: Mapping[str, Any], parts: Sequence[Part], unigrams: Mapping[str, float]
) -> dict[str, Any]:
    """Return the manifest of a finished run. unigrams: entropy of the tokens of each text (plan.py)."""
    facts = [{"key": part.key, **{name: part.about.get(name) for name in _PART_FACTS}} for part in parts]
    notes = list(manifest["notes"])
    broken_by_head: dict[tuple[Any, ...], bool] = {}  # over all windows
    for part in parts:
        columns = (part.tables["heads"][name].to_pylist() for name in ("broken_rows", "kind", "layer", "head"))
        for rows, *head in zip(*columns, strict=True):
            broken_by_head[tuple(head)] = rows > 0 or broken_by_head.get(tuple(head), False)
    broken = sum(broken_by_head.values())
    if broken:
        notes.insert(
            0,
            f"{broken} of {len(broken_by_head)} heads have rows with logits or weights that are not finite (column "
            "broken_rows). No number includes those rows. Check the weights of the model and its precision",
        )
    if any(part.about.get("repeats") for part in parts):
        notes.append(
            "layers of this model attend more than once per pass: heads of later calls are numbered after those of "
            "the first call, and coverage is measured on the first call only"
        )
    reading = readings(facts, unigrams)
    notes = [*unreadable_notes(reading), *notes]
    return {**manifest, "finished": True, "parts": facts, "reading": reading, "notes": notes}


def how_to_measure_again(manifest: Mapping[str, Any]) -> str:
    """Return the remedy for a run of another version of attnorm, which cannot be read."""
    source = manifest.get("model", {}).get("source")
    command = (
        "attnorm.analyze(model, out=...)" if source is None else f"attnorm analyze {shlex.quote(source)} --out ..."
    )
    return f"Measure again, in another folder: {command}"


def sampling_notes(settings: AnalysisSettings, lengths: Sequence[int]) -> list[str]:
    """Return a note on which metrics come from sampled rows, if any do."""
    if not set(settings.metrics) & {"vectors", "sensitivity", "coverage"}:
        return []
    most = sampled_rows_at(settings, min(lengths, default=1))
    compared = min(NULL_ROWS, most)
    if lengths and max(lengths) * (1 - math.sqrt(1 / 2)) <= compared:
        return []  # all of the longest rows, half an octave, are measured
    sampled = f"at most {most} of the longest rows of each sequence (separability and its null: {compared})"
    return [f"distances, separability, sensitivity and coverage use {sampled}; all other metrics use all measured rows"]


def readings(parts: Sequence[Mapping[str, Any]], unigrams: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Return for each text the loss over all its windows, the first token, and whether the model can read it."""
    readings_by_text: dict[str, dict[str, Any]] = {}
    for text in dict.fromkeys(part["text"] for part in parts):
        parts_of_text = [part for part in parts if part["text"] == text]
        tokens = sum(part.get("loss_tokens") or 0 for part in parts_of_text)
        total = sum(part["loss"] * part["loss_tokens"] for part in parts_of_text if part.get("loss") is not None)
        loss = total / max(tokens, 1)
        entropy = unigrams.get(text)
        readings_by_text[text] = {
            "first_token": parts_of_text[0].get("first_token"),
            "loss": loss if tokens else None,
            "perplexity": math.exp(min(loss, 700.0)) if tokens else None,
            "unigram_entropy": entropy,
            "readable": loss <= UNREADABLE * entropy if entropy and tokens >= READABLE_TOKENS else None,
        }
    return readings_by_text


def unreadable_notes(reading: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [
        f"the model can hardly read {text!r}: its loss is {facts['loss']:.2f} nats per token, and the entropy of the "
        f"text's token frequencies is {facts['unigram_entropy']:.2f}. Verdicts on such a text mean little. Choose a "
        "text like those that the model was trained on"
        for text, facts in reading.items()
        if facts["readable"] is False
    ]


def text_facts(text: "Text") -> dict[str, Any]:
    """Describe a text; its content is stored as a hash only."""
    content = text.content
    if isinstance(content, str):
        size = f"{len(content)} characters"
    elif isinstance(content, Tensor):
        size = f"{content.numel()} token ids"
    else:
        assert isinstance(content, Mapping), "media become model inputs before"
        size = ", ".join(f"{name} {tuple(value.shape)}" for name, value in content.items())
    facts = {"name": text.name, "sha256": content_hash(content), "size": size, "file": text.file}
    return facts | ({"media": text.media} if text.media else {})


def content_hash(content: str | Tensor | Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a text, of token ids or of a model's inputs."""
    digest = hashlib.sha256()
    if isinstance(content, str):
        digest.update(content.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()
    tensors = {"": content} if isinstance(content, Tensor) else content
    for name, value in sorted(tensors.items()):
        tensor = torch.as_tensor(value).detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def part_key(
    model: Mapping[str, Any], text: Mapping[str, Any], length: int | None, settings: Mapping[str, Any], start: int = 0
) -> str:
    """Return the name of a part: a hash of everything that determines its tables, and of nothing else."""
    identity = {
        "schema": SCHEMA,
        "model": {**model, "device": _device_type(model)},
        "text": [text["name"], text["sha256"]],
        "length": length,
        "start": start,
        "settings": {name: value for name, value in settings.items() if name not in ("lengths", "windows", "budget")},
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return one phrase per difference of two manifests; empty if they describe the same run."""
    identity_here, identity_there = _identity(here), _identity(there)
    different = [
        name
        for name in dict.fromkeys([*identity_here, *identity_there])
        if identity_here.get(name) != identity_there.get(name)
    ]
    implied: set[str] = set()  # by a difference that is listed
    if "model" in different:
        implied |= {_SHOWN_AS.get(name, name) for manifest in (there, here) for name in manifest.get("model", {})}
        implied -= {"model", "dtype", "device"}
    implied |= {"normalizer_details"} if "normalizers" in different else set()
    implied |= {"vector_rows"} if "rows" in different else set()
    return [
        _difference(name, identity_there.get(name), identity_here.get(name))
        for name in different
        if name not in implied
    ]


def merge_manifests(manifests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one manifest for merged tables: lists are joined, settings that differ are None, see `merged`."""
    first = manifests[0]
    settings = {name: _join_values([m["settings"].get(name) for m in manifests]) for name in first["settings"]}
    return {
        **first,
        "created": now(),
        "finished": all(m["finished"] for m in manifests),
        "texts": _join_values([m["texts"] for m in manifests]),
        "parts": _join_values([m["parts"] for m in manifests]),
        "settings": settings,
        "reading": {text: facts for m in manifests for text, facts in (m.get("reading") or {}).items()},
        "notes": _join_values([m["notes"] for m in manifests]),
        "merged": [original for m in manifests for original in m.get("merged", [m])],
    }


def _join_values(values: Sequence[Any]) -> Any:
    if all(isinstance(value, dict) for value in values):
        return {name: entry for value in values for name, entry in value.items()}
    if not all(isinstance(value, list) for value in values):
        return values[0] if all(value == values[0] for value in values) else None  # None: see `merged`
    union: list[Any] = []
    for value in values:
        union += [entry for entry in value if entry not in union]
    return sorted(union) if all(isinstance(entry, int | float) for entry in union) else union


def _identity(manifest: Mapping[str, Any]) -> dict[str, Any]:
    model, settings = manifest.get("model", {}), manifest.get("settings", {})
    return {
        "schema": manifest.get("schema"),
        **{_SHOWN_AS.get(name, name): value for name, value in model.items() if name != "source"},
        "device": _device_type(model),  # which GPU of a machine does not matter
        "texts": [[text["name"], text["sha256"][:12]] for text in manifest.get("texts", [])],
        **settings,
        "merged runs": [_identity(original) for original in manifest.get("merged", [])],
    }


def _device_type(model: Mapping[str, Any]) -> str:
    return str(model.get("device", "")).partition(":")[0]


def _difference(name: str, there: Any, here: Any) -> str:
    """Describe a difference without hashes."""
    if name in ("weights", "merged runs"):
        return f"other {name}"
    if name in ("normalizer_details", "runs_details"):
        return "other parameters of the normalizers"
    if name == "texts":
        there, here = ([text[0] for text in texts or []] for texts in (there, here))
        if there == here:
            return f"texts: other content under the name {_format_value(here)}"
    return f"{name.replace('_', ' ')}: {_format_value(there)} there, {_format_value(here)} here"


def _format_value(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    if value in (None, [], ""):
        return "none"
    return text if len(text) <= 80 else text[:77] + "..."
