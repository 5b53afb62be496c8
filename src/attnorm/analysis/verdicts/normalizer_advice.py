"""Another normalizer for heads that disperse: what is known of them, and what others do to the same logits."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from attnorm.analysis.verdicts.rows import Row, number
from attnorm.analysis.verdicts.rules import judged_keys
from attnorm.analysis.verdicts.thresholds import DISPERSED, VERDICTS, Thresholds, thresholds_of
from attnorm.analysis.verdicts.what_if import Advice, Rows, WhatIf, command, medians, pairs, with_verdict
from attnorm.normalizers.contract import Properties
from attnorm.normalizers.registry import get

TO_MEASURE = ("ssmax", "entmax15")  # one length-aware, one sparse

_BETTER_FIRST = tuple(name for name in reversed(VERDICTS) if name not in DISPERSED)


def advise_normalizer(
    chosen: Rows, others: Mapping[str, Rows], manifest: Mapping[str, Any], runs: str | None
) -> Advice | None:
    dispersed = with_verdict(chosen, DISPERSED)
    if not dispersed:
        return None
    sharper = {name: pairs(dispersed, rows) for name, rows in others.items() if _sharpens(name)}
    what_if: list[WhatIf] = []
    for name, both in sharper.items():
        if not both:
            continue
        what_if += _fates(name, sharper)
        all_heads = pairs(chosen, others[name])
        before, after = (len(with_verdict(side, ("frozen",))) for side in zip(*all_heads, strict=True))
        what_if.append(_counts(name, "frozen, of all heads", before, after, len(all_heads)))
        what_if += medians(name, "entropy / log n", "entropy_ratio", both)
        what_if += medians(name, "Jacobian norm", "jacobian_norm", both)
    measured = ["model", *(name for name in TO_MEASURE if name != runs)]
    return Advice(
        title=_title(runs),
        text=" ".join([_why(dispersed, runs), *_factors(sharper, thresholds_of(manifest.get("thresholds", {})))]),
        heads=len(dispersed),
        what_if=tuple(what_if),
        command=None if what_if else command(manifest, normalizers=measured),
    )


def _title(runs: str | None) -> str:
    """Not what the model has already."""
    properties = properties_of(runs)
    aware, sparse = bool(properties and properties.length), bool(properties and properties.exact_zeros)
    kinds = {(True, False): "A sparse", (False, True): "A length-aware", (True, True): "Another length-aware or sparse"}
    return f"{kinds.get((aware, sparse), 'A length-aware or sparse')} normalizer"


def _why(dispersed: Rows, runs: str | None) -> str:
    """What is known of the dispersed heads, and no more."""
    count = {name: len(with_verdict(dispersed, (name,))) for name in DISPERSED}
    heads, who = counted(len(dispersed), "dispersed head"), runs or "what the model runs"
    if forced := count["dispersed-forced"]:
        properties = properties_of(runs)
        further = "further up" if properties and properties.length else "up with the length"
        return (
            f"{forced} of {heads} are beyond their horizon, where {who} gives no key half of the weight: logits must "
            f"be scaled {further}, or small weights cut off."
        )
    if chosen := count["dispersed-by-choice"]:
        whose = heads if chosen == len(dispersed) else f"{chosen} of {heads}"
        return f"The logits of {whose} would allow sharper weights; a sharper normalizer takes what is there."
    return f"How sharp {who} could be on the logits of {heads} is not known; another normalizer on them shows more."


def _factors(sharper: Mapping[str, Sequence[tuple[Row, Row]]], thresholds: Thresholds) -> list[str]:
    told = (_factor(name, both, thresholds) for name, both in sharper.items())
    return [sentence for sentence in told if sentence is not None]


def _factor(name: str, both: Sequence[tuple[Row, Row]], thresholds: Thresholds) -> str | None:
    """Where one rescaled softmax stands against another: by what it multiplies the logits, and what it would take."""
    known = [
        (math.log(a - 1), math.log(b - 1), before["n_high"])
        for before, after in both
        if before["verdict"] == "dispersed-forced"
        and (a := number(before, f"horizon{judged_keys(before, thresholds)}")) is not None
        and (b := number(after, f"horizon{judged_keys(before, thresholds)}")) is not None
        and a > 2
    ]
    if not known:
        return None
    factor, needed = median(b / a for a, b, _ in known), median(math.log(n - 1) / a for a, _, n in known)
    if factor >= needed:
        return None
    longest = max(n for *_, n in known)
    s = f" (an s of {needed / math.log(longest):.2g})" if name == "ssmax" else ""
    flattens = ", less than 1, so that it flattens them" if factor < 0.995 else ""
    return (
        f"As it starts, {name} multiplies their logits by {factor:.2g} here{flattens}; for half of those beyond their "
        f"horizon to reach half of the weight it would take {needed:.2g}{s}, which training has to find."
    )


def _fates(name: str, sharper: Mapping[str, Sequence[tuple[Row, Row]]]) -> list[WhatIf]:
    """What the dispersed heads become: every verdict that any of the normalizers gives them, for each of them."""
    verdicts = {change: Counter(other["verdict"] for _, other in both) for change, both in sharper.items()}
    mine, heads = verdicts[name], verdicts[name].total()
    fates = [one for one in (*_BETTER_FIRST, None) if any(counts[one] for counts in verdicts.values())]
    return [
        _counts(name, "dispersed heads", heads, sum(mine[one] for one in DISPERSED), heads),
        *(_counts(name, f"of these {one or 'not judged'}", 0, mine[one], heads) for one in fates),
    ]


def _counts(change: str, quantity: str, before: int, after: int, heads: int) -> WhatIf:
    return WhatIf(change=change, quantity=quantity, before=before, after=after, heads=heads)


def _sharpens(name: str) -> bool:
    """Length-aware or with exact zeros, as the normalizer declares; one that is not registered is taken to be."""
    properties = properties_of(name)
    return properties is None or bool(properties.length) or properties.exact_zeros


def properties_of(name: str | None) -> Properties | None:
    """None for a normalizer that is not registered, or that its name alone does not make."""
    try:
        return None if name is None else get(name).properties
    except (ValueError, TypeError):
        return None


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
