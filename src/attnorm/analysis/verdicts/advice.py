"""Advice about a model: what to try and what not to expect, each with the numbers behind it.

If other normalizers were measured on the same logits, the advice says what they change. Otherwise it gives the command
that measures them. A what-if uses the model's present logits; training with another normalizer would change them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median, median_high
from typing import Any

from attnorm.analysis.verdicts.rows import split_by_window
from attnorm.analysis.verdicts.rules import BEYOND_NUMBERS, judged_horizon
from attnorm.analysis.verdicts.thresholds import DISPERSED, thresholds_of
from attnorm.analysis.verdicts.what_if import (
    Rows,
    advise_normalizer,
    compare_medians,
    head_key,
    own_normalizer,
    pair_heads,
    properties_of,
    repeat_command,
    select_verdicts,
    stand_in,
)
from attnorm.report_data import Advice, Row, WhatIf, input_word, number
from attnorm.text import count_words, format_keys, format_percent

MANY_PARKED = 0.25  # share of sink-dominated heads from which there is advice about them


def advise(
    chosen: Rows, tables: Mapping[str, Rows], manifest: Mapping[str, Any], runs: str | None = "softmax"
) -> list[Advice]:
    """Return all advice about a model, most important first.

    chosen: judged heads, one row each: of the model as it runs, or with the first normalizer if only others were
    measured. tables: rows of all heads and normalizers, by table. runs: the judged normalizer; None if unknown or if
    layers differ.
    """
    others = {name: rows for name, rows in _other_normalizers(tables["heads"], chosen).items() if name != runs}
    candidates = (
        _broken(chosen),
        *advise_normalizer(chosen, others, manifest, runs),
        _top_k(chosen, tables["top_n"], manifest),
        _more_heads(chosen, tables["coverage"], manifest),
        _temperature(chosen, tables["sensitivity"], manifest),
        _sinks(chosen, tables["heads"], others, runs, input_word(manifest)),
        _frozen(chosen),
        _silent(chosen, runs),
    )
    advice = [one for one in candidates if one is not None] or [_no_advice(chosen, manifest)]
    instead = stand_in(chosen, manifest)
    return advice if instead is None else [replace(one, baseline=f"with {instead}") for one in advice]


def _broken(model_heads: Rows) -> Advice | None:
    broken = select_verdicts(model_heads, ("broken",))
    if not broken:
        return None
    return Advice(
        title="Repair the checkpoint first",
        text="Logits or weights that are not finite make every later layer wrong. The numbers of those layers come "
        "only from rows that stayed finite. Look for NaN in the weights, or use float32 instead of half precision.",
        heads=len(broken),
    )


def _top_k(model_heads: Rows, top_n: Rows, manifest: Mapping[str, Any]) -> Advice | None:
    """Advise to let top-k grow more slowly than the length, with the weight that two sizes of N hold."""
    unselective_heads = _unselective_heads(model_heads, DISPERSED)
    if not unselective_heads:
        return None
    title = "If you use topk: choose k by the weight, not in proportion to the length"
    measured = _same_heads(top_n, unselective_heads)
    longest = max(row["n_high"] for row in model_heads)
    sizes = sorted({row["top_n"] for row in measured if 1 < row["top_n"] < longest and number(row, "mass") is not None})
    small, large = sizes[-2:] if len(sizes) > 1 else (0, 0)
    pairs = pair_heads(
        [row for row in measured if row["top_n"] == small], [row for row in measured if row["top_n"] == large]
    )
    change = f"top {large} instead of top {small}"
    what_if = compare_medians(change, "weight of the row", "mass", pairs)
    if not what_if:  # fewer than two sizes N, or merged runs without a common one
        return Advice(
            title=title,
            text="A k in proportion to the length keeps keys that top-k should leave out. How much weight a small k "
            "loses was not measured.",
            heads=len(unselective_heads),
            command=repeat_command(manifest, top_n=[5, 20, 100]),
        )
    what_if += compare_medians(change, "keys distinguishable", "separability", pairs)
    before, after = what_if[0].before, what_if[0].after
    text = (
        f"In {count_words(len(unselective_heads), 'head')}, the {small} heaviest of {longest:,} keys have "
        f"{format_percent(before)} of the weight, the {large} heaviest {format_percent(after)} (medians). Choose k so "
        "that the selected keys have most of the weight, and let it grow more slowly than the length."
    )
    return Advice(title=title, text=text, heads=len(unselective_heads), what_if=tuple(what_if))


def _more_heads(model_heads: Rows, coverage: Rows, manifest: Mapping[str, Any]) -> Advice | None:
    unselective_heads = _unselective_heads(model_heads, ("dispersed-forced",))
    if not unselective_heads:
        return None
    title = "Broader heads do not help: more heads cover more keys"
    layers = {_layer_key(row) for row in unselective_heads}
    names = ("per_head", "union", "independent")
    layer_rows = [
        row
        for row in coverage
        if _layer_key(row) in layers
        and row["top_n"] < max(head["n_high"] for head in unselective_heads)
        and all(number(row, name) is not None for name in names)
    ]
    if not layer_rows:
        return Advice(
            title=title,
            text="Several heads that each select a few keys cover more keys than one broad head. How much the keys of "
            "a layer's heads overlap was not measured.",
            heads=len(unselective_heads),
            command=repeat_command(manifest, metrics="all"),
            caution=True,
        )
    N = min((row["top_n"] for row in layer_rows), key=lambda size: abs(size - 20))
    one_head, together, independent = (median(row[name] for row in layer_rows if row["top_n"] == N) for name in names)
    overlap = (
        "The heads select many of the same keys, so more heads help only if they learn to select other keys."
        if together < 0.8 * independent
        else "The heads select few of the same keys, so each further head adds keys."
    )
    return Advice(
        title=title,
        text=f"In these layers, the top {N} keys of one head are {format_percent(one_head)} of the context. Those of "
        f"all heads together are {format_percent(together)}; heads that select independently would cover "
        f"{format_percent(independent)}. {overlap}",
        heads=len(unselective_heads),
        what_if=(
            WhatIf(
                change="all heads of the layer",
                quantity=f"covered by top {N}",
                before=one_head,
                after=together,
                heads=len(unselective_heads),
            ),
        ),
        caution=True,
    )


def _temperature(model_heads: Rows, sensitivity: Rows, manifest: Mapping[str, Any]) -> Advice | None:
    unselective_heads = _unselective_heads(model_heads, (*DISPERSED, "sensitive"))
    if not unselective_heads:
        return None
    title = "A lower temperature does not help"
    bounded = any(number(row, "horizon") is not None for row in unselective_heads)
    measured = [row for row in _same_heads(sensitivity, unselective_heads) if number(row, "jacobian_norm") is not None]
    lower = max((row["temperature"] for row in measured if row["temperature"] < 1), default=None)
    now = [row for row in measured if row["temperature"] == 1]
    then = [row for row in measured if row["temperature"] == lower]
    what_if = (
        compare_medians(f"T = {lower:g}", "Jacobian norm", "jacobian_norm", pair_heads(now, then)) if lower else []
    )
    if not what_if:
        return Advice(
            title=title,
            text="A lower temperature T sharpens all rows alike, and the worst case of the Jacobian norm grows as 1/T"
            + (". The horizon grows but stays finite." if bounded else "."),
            heads=len(unselective_heads),
            command=repeat_command(manifest, metrics="all"),
            caution=True,
        )
    what_if += compare_medians(what_if[0].change, "bound of the Jacobian norm", "bound", pair_heads(now, then))
    text = (
        f"Dividing the logits by {lower:g} changes the median Jacobian norm of "
        f"{count_words(len(unselective_heads), 'head')} from {what_if[0].before:.2g} to {what_if[0].after:.2g}. Its "
        "worst case grows as 1/T" + (", and the horizon grows but stays finite." if bounded else ".")
    )
    return Advice(title=title, text=text, heads=len(unselective_heads), what_if=tuple(what_if), caution=True)


def _sinks(model_heads: Rows, heads: Rows, others: Mapping[str, Rows], runs: str | None, word: str) -> Advice | None:
    parked = select_verdicts(model_heads, ("sink-dominated",))
    if len(parked) < MANY_PARKED * len(model_heads) or not parked:
        return None
    what_if: list[WhatIf] = []
    for name, rows in others.items():
        what_if += compare_medians(name, "sink mass", "sink_mass", pair_heads(parked, rows))
    properties = properties_of(runs)
    on_first, windowed = split_by_window(parked, heads)
    rest = f"{len(parked)} of {len(model_heads)} heads put most of their weight on the first key"
    if windowed:
        where = "that of their fewer patches" if word == "image" else "that of their window, which moves with the text"
        rest += f" ({len(windowed)} of them on {where})"
    keep = ". If you truncate the KV cache, keep the first token." if on_first else "."
    if properties is None or properties.row_sum != "one":
        whether = "" if properties is None else f", although rows of {runs} need not sum to 1"
        return Advice(
            title="Keep the first token" if on_first else "Heads on the first key of their window",
            text=f"{rest}{whether}{keep}",
            heads=len(parked),
            what_if=tuple(what_if),
        )
    return Advice(
        title="A way to attend to nothing",
        text=f"{rest}, because the weights of {runs} must sum to 1. With a learned sink, softpick or sigmoid a head "
        f"can attend to nothing instead{keep}",
        heads=len(parked),
        what_if=tuple(what_if),
    )


def _frozen(model_heads: Rows) -> Advice | None:
    frozen = select_verdicts(model_heads, ("frozen",))
    if not frozen:
        return None
    return Advice(
        title="Raise the temperature of frozen heads before fine-tuning",
        text="A head that gives all weight to one key may work well, but almost no gradient reaches its logits. A "
        "higher temperature in this head, or smaller norms of queries and keys, lets it learn again.",
        heads=len(frozen),
    )


def _silent(model_heads: Rows, runs: str | None) -> Advice | None:
    silent = select_verdicts(model_heads, ("silent",))
    if not silent:
        return None
    return Advice(
        title="Prune silent heads, or retrain them",
        text="These heads cost time and add almost nothing to the output here. If they are silent on other inputs too, "
        "prune them. To train them again, first change the initial values of "
        f"{runs or 'their normalizer'}, or its bias if it has one: rows without weight give almost no gradient.",
        heads=len(silent),
    )


def _unselective_heads(rows: Rows, verdicts: Sequence[str]) -> list[Row]:
    """Return heads with one of the verdicts, and heads that are saturated."""
    return [row for row in rows if row["verdict"] in verdicts or row.get("saturation") == "saturated"]


def _no_advice(model_heads: Rows, manifest: Mapping[str, Any]) -> Advice:
    thresholds = thresholds_of(manifest.get("thresholds", {}))
    judged = [value for row in model_heads if (value := judged_horizon(row, thresholds)) is not None]
    half = median_high(judged) if judged else BEYOND_NUMBERS
    reach = f"a horizon of {format_keys(half)} keys or more" if half < BEYOND_NUMBERS else "an infinite horizon"
    room = f" Half of the heads have {reach}." if min(judged, default=half) < BEYOND_NUMBERS else ""
    if (instead := stand_in(model_heads, manifest)) is not None:
        own, measured = own_normalizer(manifest), manifest.get("settings", {}).get("normalizers") or [instead]
        return Advice(
            title=f"Nothing more needs changing with {instead}",
            text=f"With {instead} no head is shown to be dispersed or saturated here.{room} "
            + (f"The model runs {own}, which was not measured." if own else "The model's own was not measured."),
            heads=0,
            command=repeat_command(manifest, normalizers=["model", *measured]),
        )
    return Advice(
        title="Nothing needs changing", text=f"No head is shown to be dispersed or saturated here.{room}", heads=0
    )


def _other_normalizers(heads: Rows, model_heads: Rows) -> dict[str, list[Row]]:
    """Return the rows of the same heads with the other measured normalizers, by name."""
    normalizer_of_head = {head_key(row): row["normalizer"] for row in model_heads}
    rows_by_normalizer: dict[str, list[Row]] = {}
    for row in heads:
        if normalizer_of_head.get(head_key(row), row["normalizer"]) != row["normalizer"]:
            rows_by_normalizer.setdefault(row["normalizer"], []).append(row)
    return rows_by_normalizer


def _same_heads(rows: Rows, heads: Rows) -> list[Row]:
    keys = {(*head_key(row), row["normalizer"]) for row in heads}
    return [row for row in rows if (*head_key(row), row["normalizer"]) in keys]


def _layer_key(row: Row) -> tuple[Any, ...]:
    return row["text"], row["length"], row["normalizer"], row["kind"], row["layer"]
