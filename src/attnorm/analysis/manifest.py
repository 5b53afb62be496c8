"""What was measured, on what, and how: enough to repeat a run, to name its parts, and to tell two runs apart.

A manifest is plain JSON:

    schema      version of the tables          finished   false while parts are still missing
    model       name, revision, class, fingerprint, layers, heads, dtype, device, ... (models.load.describe);
                source: what it was loaded by, null for an object
                runs: the normalizer behind the rows named "model", null where layers differ
    texts       [{name, sha256, size, file, tokens, left_out, windows}]
    parts       [{text, length, window, start, key, tokens, seconds, first_token, loss, loss_tokens}]
    settings    lengths, top_n, rows, normalizers, normalizer_details, vectors, vector_rows, metrics, temperatures,
                epsilons, seed, windows, window_count, budget, bos
    reading     {text: loss, perplexity, unigram entropy, first token, readable}
    thresholds  those of the verdicts          first_thresholds   those before, where verdicts were made again
    versions    python, attnorm, torch, ...    created    UTC, ISO 8601
    notes       sentences a reader must know   merged     manifests of the runs, where several were put together
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnorm.provenance import now as now
from attnorm.provenance import versions as versions

SCHEMA = 3
READABLE = (2, SCHEMA)  # older tables are completed and judged again when they are loaded

_WORDS = {"name": "model", "fingerprint": "weights"}


def content_hash(content: str | Tensor | Mapping[str, Tensor]) -> str:
    """sha256 of a text, of token ids or of a model's inputs."""
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
    """The name of a part: everything that decides its tables, and nothing that does not."""
    decisive = {
        "schema": SCHEMA,
        "model": {**model, "device": _device_type(model)},
        "text": [text["name"], text["sha256"]],
        "length": length,
        "start": start,
        "settings": {name: value for name, value in settings.items() if name not in ("lengths", "windows", "budget")},
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def differences(there: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """What two manifests disagree on, in words, one "name: there, here" each; empty if they describe the same run."""
    ours, theirs = _identity(asked), _identity(there)
    different = [name for name in dict.fromkeys([*ours, *theirs]) if ours.get(name) != theirs.get(name)]
    implied: set[str] = set()  # by what is told already
    if "model" in different:
        implied |= {_WORDS.get(name, name) for one in (there, asked) for name in one.get("model", {})}
        implied -= {"model", "dtype", "device"}
    implied |= {"normalizer_details"} if "normalizers" in different else set()
    implied |= {"vector_rows"} if "rows" in different else set()
    return [_told(name, theirs.get(name), ours.get(name)) for name in different if name not in implied]


def merged(manifests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One manifest for tables put together: what all agree on as it is, lists joined, the originals under `merged`."""
    first = manifests[0]
    settings = {name: _joined([m["settings"].get(name) for m in manifests]) for name in first["settings"]}
    return {
        **first,
        "created": now(),
        "finished": all(m["finished"] for m in manifests),
        "texts": _joined([m["texts"] for m in manifests]),
        "parts": _joined([m["parts"] for m in manifests]),
        "settings": settings,
        "reading": {text: one for m in manifests for text, one in (m.get("reading") or {}).items()},
        "notes": _joined([m["notes"] for m in manifests]),
        "merged": [original for m in manifests for original in m.get("merged", [m])],
    }


def _joined(values: Sequence[Any]) -> Any:
    if all(isinstance(value, dict) for value in values):
        return {name: entry for value in values for name, entry in value.items()}
    if not all(isinstance(value, list) for value in values):
        return values[0] if all(value == values[0] for value in values) else None  # None: see the originals
    union: list[Any] = []
    for value in values:
        union += [entry for entry in value if entry not in union]
    return sorted(union) if all(isinstance(entry, int | float) for entry in union) else union


def _identity(manifest: Mapping[str, Any]) -> dict[str, Any]:
    model, settings = manifest.get("model", {}), manifest.get("settings", {})
    return {
        "schema": manifest.get("schema"),
        **{_WORDS.get(name, name): value for name, value in model.items() if name != "source"},
        "device": _device_type(model),  # two GPUs of one machine are the same to a run
        "texts": [[text["name"], text["sha256"][:12]] for text in manifest.get("texts", [])],
        **settings,
        "merged runs": [_identity(original) for original in manifest.get("merged", [])],
    }


def _device_type(model: Mapping[str, Any]) -> str:
    return str(model.get("device", "")).partition(":")[0]


def _told(name: str, there: Any, here: Any) -> str:
    """Without hashes and descriptions that only a program compares."""
    if name in ("weights", "merged runs"):
        return f"other {name}"
    if name in ("normalizer_details", "runs_details"):
        return "other parameters of the normalizers"
    if name == "texts":
        there, here = ([text[0] for text in texts or []] for texts in (there, here))
        if there == here:
            return f"texts: other content under the name {_plain(here)}"
    return f"{name.replace('_', ' ')}: {_plain(there)} there, {_plain(here)} here"


def _plain(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    if value in (None, [], ""):
        return "none"
    return text if len(text) <= 80 else text[:77] + "..."
