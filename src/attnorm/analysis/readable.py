"""Can the model read the text? Its loss beside what the text's own token frequencies would reach.

A model that predicts the measured tokens hardly better than a table of their frequencies does not read the text, and
its attention there says little about how it attends to texts that it can read. The table's loss is the entropy of the
token counts of all windows of a text. A warning is given where the model's loss is above UNREADABLE of it.

Measured losses as a share of that entropy: docs/guide.md.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attnorm.analysis.plan import PartPlan

UNREADABLE = 0.75


def unigram_entropies(parts: Iterable[PartPlan]) -> dict[str, float]:
    """By text, the entropy in nats of the counts of all tokens in its windows; texts without token ids are left out."""
    counts: dict[str, Counter[int]] = {}
    for part in parts:
        ids = part.model_inputs.get("input_ids")
        if ids is not None:
            counts.setdefault(part.text.name, Counter()).update(ids.flatten().tolist())
    return {text: _entropy(found) for text, found in counts.items()}


def readings(parts: Sequence[Mapping[str, Any]], unigrams: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """By text: loss and perplexity over all its windows, the first token, and whether the model can read it."""
    found: dict[str, dict[str, Any]] = {}
    for text in dict.fromkeys(part["text"] for part in parts):
        own = [part for part in parts if part["text"] == text]
        tokens = sum(part.get("loss_tokens") or 0 for part in own)
        loss = sum(part["loss"] * part["loss_tokens"] for part in own if part.get("loss") is not None) / max(tokens, 1)
        entropy = unigrams.get(text)
        known = tokens > 0
        found[text] = {
            "first_token": own[0].get("first_token"),
            "loss": loss if known else None,
            "perplexity": math.exp(min(loss, 700.0)) if known else None,
            "unigram_entropy": entropy,
            "readable": None if not known or not entropy else loss <= UNREADABLE * entropy,
        }
    return found


def warnings_of(read: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [
        f"the model can hardly read {text!r}: its loss is {one['loss']:.2f} nats per token, the text's own token "
        f"frequencies reach {one['unigram_entropy']:.2f}. Verdicts on a text that a model cannot read say little; "
        "choose a text like those that it was trained on"
        for text, one in read.items()
        if one["readable"] is False
    ]


def _entropy(counts: Counter[int]) -> float:
    total = counts.total()
    return -sum(count / total * math.log(count / total) for count in counts.values()) if total else 0.0
