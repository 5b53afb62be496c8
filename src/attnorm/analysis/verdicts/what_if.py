"""What-ifs: how numbers and verdicts of heads change if another normalizer is applied to the same logits."""

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from attnorm.analysis.settings import BUDGET, DEFAULT_TEXTS, GROUPS, USUAL_GROUPS, groups
from attnorm.analysis.verdicts.rules import judged_suffix
from attnorm.analysis.verdicts.thresholds import DIFFERS, DISPERSED, Thresholds, thresholds_of
from attnorm.normalizers.contract import Properties
from attnorm.normalizers.registry import available, get
from attnorm.report_data import VERDICTS, Advice, Row, WhatIf, number
from attnorm.text import count_words

Rows = Sequence[Row]

MIN_CHANGE = 0.005  # smaller changes of a median are ignored
TO_MEASURE = ("ssmax", "entmax15")  # one length-aware, one sparse

_BETTER_FIRST = tuple(name for name in reversed(VERDICTS) if name not in (*DISPERSED, DIFFERS))

# Default options of analyze, which a command need not repeat.
USUAL: dict[str, Any] = {
    "normalizers": ["model"],
    "rows": "auto",
    "metrics": [*groups(USUAL_GROUPS)],
    "top_n": [1, 5, 10, 20, 100],
    "vectors": "values",
    "seed": 0,
    "windows": "auto",
    "budget": BUDGET,
}


def repeat_command(manifest: Mapping[str, Any], **changes: Any) -> str:
    """Return the command that repeats a run with changed options; a Python call if the run had Python objects."""
    settings, model = manifest.get("settings", {}), manifest.get("model", {})
    texts = [text for text in manifest.get("texts", []) if text["name"] not in DEFAULT_TEXTS]
    names = {name.partition(":")[0] for name in changes.get("normalizers") or settings.get("normalizers") or []}
    typed = model.get("source", "") is not None and all(text.get("media") or text.get("file", True) for text in texts)
    if not typed or not names <= {"model", *available()}:
        return f"attnorm.analyze(..., {', '.join(f'{name}={value!r}' for name, value in changes.items())})"
    words = ["attnorm", "analyze", str(model.get("source") or model.get("name", "MODEL"))]
    for text in texts:
        words += [f"--{text.get('media', 'text')}", text["name"]]
    on_cpu = model.get("device", "cpu") == "cpu"
    options = {
        "lengths": [length for length in settings.get("lengths") or [] if length],
        **{name: settings.get(name) for name in USUAL},
        "metrics": _as_typed(settings.get("metrics")),
        "tokenizer": model.get("tokenizer"),
        "dtype": None if on_cpu and model.get("dtype") == "float32" else model.get("dtype"),
    }
    changed = {name: value for name, value in options.items() if value and value != USUAL.get(name)}
    for name, value in {**changed, **changes}.items():
        words += [f"--{name.replace('_', '-')}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    if settings.get("bos") is not None:
        words += ["--bos" if settings["bos"] else "--no-bos"]
    judged_by = thresholds_of(manifest.get("thresholds", {}))
    for name, (threshold, _) in judged_by.differences(Thresholds()).items():
        words += ["--threshold", f"{name}={threshold:g}"]
    return shlex.join(words)


def _as_typed(metrics: Sequence[str] | None) -> Sequence[str] | None:
    """Return "all" in place of the groups that it stands for."""
    if not metrics or not set(GROUPS) <= set(metrics):
        return metrics
    return ["all", *(name for name in metrics if name not in GROUPS)]


def compare_medians(change: str, quantity: str, metric: str, pairs: Iterable[tuple[Row, Row]]) -> list[WhatIf]:
    """Return the median of a metric before and after a change, over pairs in which both are known; empty if none."""
    value_pairs = [
        (a, b) for x, y in pairs if (a := number(x, metric)) is not None and (b := number(y, metric)) is not None
    ]
    if not value_pairs:
        return []
    before, after = (median(values) for values in zip(*value_pairs, strict=True))
    return [WhatIf(change=change, quantity=quantity, before=before, after=after, heads=len(value_pairs))]


def pair_heads(before: Rows, after: Rows) -> list[tuple[Row, Row]]:
    """Return pairs of rows that belong to the same head."""
    after_by_head = {head_key(row): row for row in after}
    return [(row, after_by_head[head_key(row)]) for row in before if head_key(row) in after_by_head]


def head_key(row: Row) -> tuple[Any, ...]:
    return row["text"], row["length"], row["kind"], row["layer"], row["head"]


def select_verdicts(rows: Rows, verdicts: Sequence[str]) -> list[Row]:
    return [row for row in rows if row["verdict"] in verdicts]


def stand_in(heads: Rows, manifest: Mapping[str, Any]) -> str | None:
    """Return the judged normalizer if the model runs another one, whose numbers were not measured; else None."""
    name = heads[0]["normalizer"] if heads else "model"
    return None if name in ("model", own_normalizer(manifest)) else name


def own_normalizer(manifest: Mapping[str, Any]) -> str | None:
    """Return the normalizer that the model runs; None if unknown or if layers differ."""
    runs: str | None = manifest.get("model", {}).get("runs", "softmax")
    return runs


def advise_normalizer(
    chosen: Rows, others: Mapping[str, Rows], manifest: Mapping[str, Any], runs: str | None
) -> list[Advice]:
    """Return advice about normalizers that make dispersed heads sharper at this length, and a caution about others."""
    dispersed = select_verdicts(chosen, DISPERSED)
    if not dispersed:
        return []
    measured = {name: pair_heads(dispersed, rows) for name, rows in others.items() if _may_sharpen(name)}
    measured = {name: pairs for name, pairs in measured.items() if pairs}
    sharper = {name: pairs for name, pairs in measured.items() if _is_sharper(pairs)}
    broader = {name: pairs for name, pairs in measured.items() if name not in sharper}
    instead = stand_in(chosen, manifest)
    to_measure = ["model", *(name for name in TO_MEASURE if name != runs)]
    advice = []
    if sharper or not measured:
        what_if = [
            what_if_row
            for name, pairs in sharper.items()
            for what_if_row in _what_if_rows(name, pairs, sharper, chosen, others)
        ]
        thresholds = thresholds_of(manifest.get("thresholds", {}))
        advice.append(
            Advice(
                title=_title(runs) + ("" if instead is None else f" instead of {instead}"),
                text=" ".join([_explain_dispersed(dispersed, runs), *_describe_factors(sharper, thresholds, instead)]),
                heads=len(dispersed),
                what_if=tuple(what_if),
                command=None if what_if else repeat_command(manifest, normalizers=to_measure),
            )
        )
    if broader:
        advice.append(_caution(broader, dispersed, chosen, others, manifest))
    return advice


def _caution(
    broader: Mapping[str, Sequence[tuple[Row, Row]]],
    dispersed: Rows,
    model_heads: Rows,
    others: Mapping[str, Rows],
    manifest: Mapping[str, Any],
) -> Advice:
    names = " and ".join(broader)
    instead = stand_in(model_heads, manifest)
    factors = _describe_factors(broader, thresholds_of(manifest.get("thresholds", {})), instead)
    than = "" if instead is None else f" than {instead}"
    return Advice(
        title=f"{names} without training {'does' if len(broader) == 1 else 'do'} not help",
        text=" ".join(
            [
                (
                    f"On the logits of {count_words(len(dispersed), 'dispersed head')}, {names} "
                    f"{'gives' if len(broader) == 1 else 'give'} no sharper weights{than} at this length."
                ),
                *factors,
            ]
        ),
        heads=len(dispersed),
        what_if=tuple(
            what_if_row
            for name, pairs in broader.items()
            for what_if_row in _what_if_rows(name, pairs, broader, model_heads, others)
        ),
        caution=True,
    )


def _what_if_rows(
    name: str,
    pairs: Sequence[tuple[Row, Row]],
    compared: Mapping[str, Sequence[tuple[Row, Row]]],
    model_heads: Rows,
    others: Mapping[str, Rows],
) -> list[WhatIf]:
    all_heads = pair_heads(model_heads, others[name])
    before, after = (len(select_verdicts(side, ("frozen",))) for side in zip(*all_heads, strict=True))
    return [
        *compare_medians(name, "entropy / log n", "entropy_ratio", pairs),
        *compare_medians(name, "largest weight", "max_weight", pairs),
        *_verdict_changes(name, compared),
        _count_change(name, "frozen, of all heads", before, after, len(all_heads)),
        *compare_medians(name, "Jacobian norm", "jacobian_norm", pairs),
    ]


def _is_sharper(pairs: Sequence[tuple[Row, Row]]) -> bool:
    """Whether the median entropy of the heads falls, and their median largest weight does not fall."""
    entropy = compare_medians("", "", "entropy_ratio", pairs)
    weight = compare_medians("", "", "max_weight", pairs)
    falls = bool(entropy) and entropy[0].after < entropy[0].before - MIN_CHANGE
    return falls and not (weight and weight[0].after < weight[0].before - MIN_CHANGE)


def _title(runs: str | None) -> str:
    """Return the title; it does not suggest the normalizer that the model already runs."""
    properties = properties_of(runs)
    aware, sparse = bool(properties and properties.length), bool(properties and properties.exact_zeros)
    kinds = {(True, False): "A sparse", (False, True): "A length-aware", (True, True): "Another length-aware or sparse"}
    return f"{kinds.get((aware, sparse), 'A length-aware or sparse')} normalizer"


def _explain_dispersed(dispersed: Rows, runs: str | None) -> str:
    """Describe why the heads are dispersed, as far as it is known."""
    count = {name: len(select_verdicts(dispersed, (name,))) for name in DISPERSED}
    heads, normalizer = count_words(len(dispersed), "dispersed head"), runs or "the model's normalizer"
    if forced := count["dispersed-forced"]:
        properties = properties_of(runs)
        aware = bool(properties and properties.length)
        scale = "Scale the logits up further" if aware else "Scale the logits with the length (as ssmax does)"
        return (
            f"{forced} of {heads} are beyond their horizon, where {normalizer} can give no key half of the weight. "
            f"{scale}, or set small weights to 0 (as entmax15 does)."
        )
    if by_choice := count["dispersed-by-choice"]:
        whose = heads if by_choice == len(dispersed) else f"{by_choice} of {heads}"
        return f"The logits of {whose} would allow sharper weights, and a sharper normalizer can use this."
    return f"How sharp {normalizer} could be on the logits of {heads} is not known. Measure another normalizer on them."


def _describe_factors(
    sharper: Mapping[str, Sequence[tuple[Row, Row]]], thresholds: Thresholds, instead: str | None
) -> list[str]:
    if instead is not None:  # horizons include its factor, so their ratio is not the factor of the model's logits
        return []
    sentences = (_describe_factor(name, pairs, thresholds) for name, pairs in sharper.items())
    return [sentence for sentence in sentences if sentence is not None]


def _describe_factor(name: str, pairs: Sequence[tuple[Row, Row]], thresholds: Thresholds) -> str | None:
    """Describe the factor by which a rescaled softmax multiplies the logits, and the factor that would be needed."""
    log_horizons = [
        (math.log(a - 1), math.log(b - 1), before["n_high"])
        for before, after in pairs
        if before["verdict"] == "dispersed-forced"
        and (a := number(before, f"horizon{judged_suffix(before, thresholds)}")) is not None
        and (b := number(after, f"horizon{judged_suffix(before, thresholds)}")) is not None
        and a > 2
    ]
    if not log_horizons:
        return None
    factor, needed = median(b / a for a, b, _ in log_horizons), median(math.log(n - 1) / a for a, _, n in log_horizons)
    if factor >= needed:
        return None
    longest = max(n for *_, n in log_horizons)
    s = f" (s = {needed / math.log(longest):.2g})" if name == "ssmax" else ""
    flattens = ", which flattens them" if factor < 0.995 else ""
    return (
        f"Before training, {name} multiplies their logits by {factor:.2g} here{flattens}. For half of the heads beyond "
        f"their horizon, a factor of {needed:.2g}{s} would let one key get half of the weight; training has to find it."
    )


def _verdict_changes(name: str, sharper: Mapping[str, Sequence[tuple[Row, Row]]]) -> list[WhatIf]:
    """Return how many of the dispersed heads get each verdict with this normalizer.

    All normalizers list the same verdicts: those that any of them gives.
    """
    verdicts = {change: Counter(other["verdict"] for _, other in pairs) for change, pairs in sharper.items()}
    mine, heads = verdicts[name], verdicts[name].total()
    fates = [verdict for verdict in (*_BETTER_FIRST, None) if any(counts[verdict] for counts in verdicts.values())]
    return [
        _count_change(name, "dispersed heads", heads, sum(mine[verdict] for verdict in DISPERSED), heads),
        *(
            _count_change(name, f"become {verdict}" if verdict else "are no longer judged", 0, mine[verdict], heads)
            for verdict in fates
        ),
    ]


def _count_change(change: str, quantity: str, before: int, after: int, heads: int) -> WhatIf:
    return WhatIf(change=change, quantity=quantity, before=before, after=after, heads=heads)


def _may_sharpen(name: str) -> bool:
    """Whether the normalizer declares a length rule or exact zeros; True if it is not registered."""
    properties = properties_of(name)
    return properties is None or bool(properties.length) or properties.exact_zeros


def properties_of(name: str | None) -> Properties | None:
    """Return the properties of a normalizer; None if it is not registered or needs options."""
    try:
        return None if name is None else get(name).properties
    except (ValueError, TypeError):
        return None
