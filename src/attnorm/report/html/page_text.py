"""The words and the plain table of the page: what it says before any script runs."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attnorm.analysis.verdicts.sentences import threshold_sentences
from attnorm.analysis.verdicts.thresholds import Thresholds, thresholds_of
from attnorm.metrics.catalogue import BY_NAME, METRICS
from attnorm.report.html.numbers import MISSING, number, plain, share
from attnorm.report.selection import chosen_rows, column, default_choice
from attnorm.report.vocabulary import GROUPS, KINDS, SHARES, TABLE_METRICS, VERDICTS, verdict_word


def page_words(analysis: Any) -> dict[str, Any]:
    """Everything the templates show as text."""
    manifest, verdict, choice = analysis.manifest, analysis.verdict, default_choice(analysis)
    model = manifest.get("model") or {}
    return {
        "model_name": str(model.get("name") or "a model") if isinstance(model, Mapping) else str(model),
        "headline": verdict.headline.partition("; "),  # the clause that matters most is set larger
        "sentences": [with_lead(sentence) for sentence in verdict.sentences],
        "counts": verdict_counts(verdict.counts),
        "advice": [advice_words(one) for one in verdict.advice if not getattr(one, "caution", False)],
        "cautions": [advice_words(one) for one in verdict.advice if getattr(one, "caution", False)],
        "choice": choice,
        "choice_words": [choice["text"], length_text(choice["length"]), KINDS.get(choice["kind"], choice["kind"])],
        "notes": [f"{str(note).rstrip('.')}." for note in manifest.get("notes") or []],
        "facts": key_facts(manifest),
        "table_metrics": [BY_NAME[name] for name in TABLE_METRICS],
        "rows": table_rows(analysis.heads, choice),
        "metric_groups": [(title, [one for one in METRICS if one.group == group]) for group, title in GROUPS.items()],
        "settings": settings_of(manifest),
        "judged_by": threshold_sentences(thresholds_of(manifest.get("thresholds") or {}), manifest),
        "manifest": sections(manifest),
        "created": str(manifest.get("created") or ""),
        "version": str((manifest.get("versions") or {}).get("attnorm") or ""),
    }


def with_lead(sentence: str) -> tuple[str, str]:
    """What a sentence is about, where it begins with a question or a title, and the rest."""
    found = re.match(r"([^.;]{3,60}?[?:]) (.*)", sentence, re.DOTALL)
    return (found[1], found[2]) if found else ("", sentence)


def verdict_counts(counts: Mapping[str, int]) -> list[dict[str, Any]]:
    """The verdicts that occur, most urgent first, with where their part of the bar (100 wide) begins and ends."""
    order = [word.name for word in VERDICTS]
    names = [name for name in order if counts.get(name)]
    names += [name for name in counts if counts[name] and name not in order]
    total = sum(counts[name] for name in names) or 1
    parts, start = [], 0.0
    for name in names:
        width = 100 * counts[name] / total
        parts.append({"word": verdict_word(name), "count": counts[name], "start": start, "width": width})
        start += width
    return parts


def advice_words(advice: Any) -> dict[str, Any]:
    """One piece of advice: title, text, the command that would measure more, and its what-if numbers as a table."""
    what_if = list(getattr(advice, "what_if", ()))
    return {
        "title": getattr(advice, "title", ""),
        "text": getattr(advice, "text", advice),
        "command": getattr(advice, "command", None) or "",
        "table": what_if_table(what_if) if what_if else None,
    }


def what_if_table(what_if: Sequence[Any]) -> dict[str, Any]:
    """A row per quantity and a column per change, beside how it is now.

    Where a quantity is known of other heads under one change than under another, "now" differs: the cell says both.
    """
    changes = list(dict.fromkeys(one.change for one in what_if))
    rows = []
    for quantity in dict.fromkeys(one.quantity for one in what_if):
        found = {one.change: one for one in what_if if one.quantity == quantity}
        now = number(next(iter(found.values())).before)
        cells = []
        for change in changes:
            one = found.get(change)
            before, after = (number(one.before), number(one.after)) if one else (now, MISSING)
            cells.append(after if before == now else f"{before} → {after}")
        rows.append([quantity, now, *cells])
    return {"headings": ["", "now", *changes], "rows": rows}


def length_text(length: int | None) -> str:
    return "whole input" if length is None else f"{length:,} tokens"


def metric_text(name: str, value: float | None) -> str:
    """Keys are counted: from ten on without a fraction."""
    if name in SHARES:
        return share(value)
    counted = BY_NAME[name].unit == "keys" and value is not None and 10 <= value < 10_000
    return number(math.floor(value + 0.5) if counted and value is not None else value)


def key_facts(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The line under the headline: how large the model is and how it was run."""
    model = manifest.get("model")
    model = model if isinstance(model, Mapping) else {}
    facts = []
    if model.get("layers") and model.get("heads"):
        facts.append(("heads", f"{plain(model['layers'])} layers × {plain(model['heads'])} heads"))
    if isinstance(model.get("parameters"), int):
        facts.append(("parameters", f"{_large(model['parameters'])} parameters"))
    facts += [(name, str(model[name])) for name in ("class", "dtype", "device") if model.get(name)]
    return facts


def _large(count: int) -> str:
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return f"{count:,}"


def table_rows(heads: Any, choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The heads of the first choice, as the table shows them before it can be sorted."""
    chosen = chosen_rows(heads, choice)
    values = {name: column(chosen, name).tolist() for name in TABLE_METRICS}
    judged = "verdict" in chosen.column_names
    verdicts = chosen.column("verdict").to_pylist() if judged else [None] * chosen.num_rows
    evidence = chosen.column("evidence").to_pylist() if judged else [None] * chosen.num_rows
    return [
        {
            "layer": layer,
            "head": head,
            "word": verdict_word(verdicts[row]),
            "evidence": evidence[row] or "",
            "numbers": [metric_text(name, values[name][row]) for name in TABLE_METRICS],
        }
        for row, (layer, head) in enumerate(
            zip(chosen.column("layer").to_pylist(), chosen.column("head").to_pylist(), strict=True)
        )
    ]


def settings_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What Methods needs to name; missing entries are empty."""
    given = manifest.get("settings")
    given = given if isinstance(given, Mapping) else {}
    wanted = ("rows", "vectors", "vector_rows", "seed", "top_n", "temperatures", "metrics")
    return {name: plain(given[name]) if given.get(name) is not None else "" for name in wanted}


def sections(manifest: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The manifest as titled lists; what is nested deeper is named by its path."""
    titled: list[tuple[str, list[tuple[str, str]]]] = []
    manifest = {**manifest, "thresholds": _beside_defaults(manifest.get("thresholds") or {})}
    loose = [(str(key), plain(value)) for key, value in manifest.items() if not _nested(value)]
    for key, value in manifest.items():
        if _nested(value):
            titled.append((_title(key), list(_leaves(value))))
    return [*titled, *([("Run", loose)] if loose else [])]


def _beside_defaults(thresholds: Mapping[str, Any]) -> dict[str, str]:
    """Each threshold, with the default where it is another."""
    changed = thresholds_of(thresholds).differences(Thresholds())
    usual = {name: f" (default {default:g})" for name, (_, default) in changed.items()}
    return {name: f"{value:g}{usual.get(name, '')}" for name, value in thresholds.items()}


def _nested(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(one, Mapping) for one in value)
    return isinstance(value, Mapping) and bool(value)


def _title(key: Any) -> str:
    return str(key).replace("_", " ").capitalize()


def _leaves(value: Any, path: str = "") -> Iterable[tuple[str, str]]:
    entries = value.items() if isinstance(value, Mapping) else enumerate(value, start=1)
    for key, one in entries:
        name = f"{path} › {key}" if path else str(key)
        if _nested(one):
            yield from _leaves(one, name)
        else:
            yield name, plain(one)
