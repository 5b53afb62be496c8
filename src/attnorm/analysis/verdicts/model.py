"""The verdict on a model in sentences: which heads select, is the ceiling binding, what to try.

judge.py judges heads; this file counts their verdicts and describes them. The headline and the counts use only what is
always measured. Saturation, which needs a metric group of its own, has a separate sentence.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from statistics import median
from typing import Any

import pyarrow as pa

from attnorm.analysis.tables import HEAD_KEY
from attnorm.analysis.verdicts.advice import advise
from attnorm.analysis.verdicts.reach import FARTHEST, Ceiling, Rate, ceiling, circuit_sentences, rate
from attnorm.analysis.verdicts.rows import (
    head_id,
    head_rows,
    representative_rows,
    split_by_window,
)
from attnorm.analysis.verdicts.rules import is_selecting
from attnorm.analysis.verdicts.thresholds import (
    DIFFERS,
    DISPERSED,
    SATURATION,
    SELECTING,
    UNDECIDED,
    Thresholds,
    thresholds_of,
)
from attnorm.analysis.verdicts.what_if import own_normalizer, stand_in
from attnorm.metrics.sampling import AUTO_ROWS
from attnorm.report_data import VERDICTS, Advice, Row, input_word, number
from attnorm.text import format_keys, format_percent, minus_sign

FEW_KEYS = 128  # below it entropy, slopes and separability are mostly chance
FEW_ROWS = 16  # below it the median row of a head is a matter of which rows were taken
SHARES = ("10 %", "50 %", "90 %")  # of heads, for which the length where the ceiling binds is given
TEXTS = 8  # whose headlines are shown
_CURVE = [*(name for name, _ in HEAD_KEY), "n", "logit_spread", "logit_spread_without_sink"]


def headline(
    seeing_all: Sequence[Row],
    windowed: Sequence[Row],
    limit: Ceiling | None,
    runs: str | None,
    thresholds: Thresholds,
    *,
    texts: int = 0,
    word: str = "text",
) -> str:
    """Return the headline about the heads that see every key; broken heads come first.

    texts: number of texts if there are several, else 0. word: what they are called.
    """
    if not seeing_all:
        return "No head was measured."
    counts = Counter(row["verdict"] for row in seeing_all)
    total, longest = len(seeing_all), max(row["n_high"] or 0 for row in seeing_all)
    select = sum(is_selecting(row, thresholds) for row in seeing_all)
    keeping_up = sum(counts[name] for name in SELECTING) - select
    inside = [f"{counts[name]} of them {name}" for name in ("frozen", "sensitive") if counts[name]]
    narrow = " that see the most keys" if word == "image" else " without a window"
    view = narrow if windowed else ""
    on_texts = ""
    if texts:
        on_texts = f" on most of {texts} {word}s" if texts > 2 else f" on both {word}s"
    details = f" ({', '.join(inside)})" if inside else ""
    parts = [f"{select} of {total} heads{view} still select among {longest:,} keys{on_texts}{details}"]
    broken = sum(row["verdict"] == "broken" for row in (*seeing_all, *windowed))
    if broken:
        parts.insert(0, f"{broken} of {total + len(windowed)} heads {'is' if broken == 1 else 'are'} broken")
    others = (*reversed(DISPERSED), "sink-dominated", "silent", UNDECIDED, DIFFERS, None)
    rest = [f"{keeping_up} broad but keeping up with the length"] if keeping_up else []
    rest += [_count_words(counts, name, word) for name in others if counts[name]]
    if rest:
        parts.append(", ".join(rest))
    if limit is not None:
        what = "no key can get" if runs is None else f"{runs} can give no key"
        parts.append(f"{_heads_beyond(limit, total)}, where {what} half of the weight")
    return "; ".join(parts) + "."


def _heads_beyond(limit: Ceiling, total: int) -> str:
    """Describe how many heads are beyond their horizon; heads may have none."""
    if total == 1:
        return f"the head is {'' if limit.beyond else 'not '}beyond its horizon"
    if limit.heads == 1:
        return f"the only head with a horizon is {'' if limit.beyond else 'not '}beyond it"
    count = {0: "none", limit.heads: "all"}.get(limit.beyond, f"{limit.beyond}")
    if limit.heads < total:
        count = f"all {limit.heads}" if count == "all" else f"{count} of the {limit.heads}"
        return f"{count} heads with a horizon {'is' if limit.beyond < 2 else 'are'} beyond it"
    singular = limit.beyond < 2 and count != "all"
    return f"{count} {'is beyond its' if singular else 'are beyond their'} horizon"


def window_sentences(windowed: Sequence[Row], word: str) -> list[str]:
    """Describe the heads that see fewer keys than others, which the headline leaves out.

    In models of text they have a sliding window. In models of images a later stage may have merged patches, as well.
    """
    parts = []
    for n, rows in groupby(sorted(windowed, key=_keys_seen), key=_keys_seen):
        counts = Counter(row["verdict"] for row in rows)
        total = counts.total()
        listed = ", ".join(_count_words(counts, name, word) for name in (*reversed(VERDICTS), None) if counts[name])
        parts.append(f"{total} head{'s see' if total > 1 else ' sees'} at most {n:,} keys ({listed})")
    why = "fewer patches than others (merged, or a window)" if word == "image" else "a window"
    return [f"{', '.join(parts)}: {why}, so the headline and the horizon are about the others."] if parts else []


def length_sentences(heads: Iterable[Row], counted: Sequence[Row], thresholds: Thresholds) -> list[str]:
    """Describe the verdicts at each length, if a text was measured at several lengths."""
    normalizers = {row["normalizer"] for row in counted}
    head_ids = {head_id(row) for row in counted}
    measured = [row for row in heads if row["normalizer"] in normalizers and head_id(row) in head_ids]
    lengths = sorted({row["length"] for row in measured if row["length"] is not None})
    if len({(row["text"], row["length"]) for row in measured}) == len({row["text"] for row in measured}):
        return []
    parts: list[str] = []
    for length in lengths:
        rows, _ = representative_rows([row for row in measured if row["length"] == length])
        select = sum(is_selecting(row, thresholds) for row in rows)
        dispersed = sum(row["verdict"] in DISPERSED for row in rows)
        tokens, heads_word = (" tokens", " heads") if not parts else ("", "")
        parts.append(
            f"at {length:,}{tokens}, {select} of {len(rows)}{heads_word} select and {dispersed} "
            f"{'is' if dispersed == 1 else 'are'} dispersed"
        )
    return [f"By length: {'; '.join(parts)}."]


def _keys_seen(row: Row) -> int:
    keys: int = row["n_high"]
    return keys


def _count_words(counts: Mapping[str | None, int], name: str | None, word: str) -> str:
    words = {None: "not judged", DIFFERS: f"with verdicts that differ between {word}s"}
    return f"{counts[name]} {words.get(name, name)}"


def ceiling_sentences(limit: Ceiling | None, manifest: Mapping[str, Any], runs: str | None) -> list[str]:
    if limit is None:
        normalizer = "" if runs is None else f" under {runs}"
        return [f"Whether the ceiling is binding is not known: no head has a horizon{normalizer}."]
    now = {0: "No", limit.heads: "Yes"}.get(limit.beyond, "In part")
    what = "no key can get" if runs is None else f"{runs} can give no key"
    sentence = (
        f"Is the ceiling binding at {limit.length:,} keys? {now}: {limit.beyond} of {limit.heads} heads are beyond "
        f"their horizon. The horizon is the number of keys beyond which {what} half of the weight, because the logits "
        "of the head do not differ enough."
    )
    if runs != "softmax":  # its factor changes with the length or the input, and the horizon with it
        return [sentence]
    when = (
        "Longer contexts: with the present logit spread (largest minus smallest logit of a row), the ceiling binds "
        f"{_describe_lengths(limit.horizons)}."
    )
    if later := _describe_lengths(limit.binding, limit.horizons):
        when += f" If the spread keeps growing with n as it does inside the {input_word(manifest)}, it binds {later}."
    trained = manifest.get("model", {}).get("max_positions")
    made_for = f" The model was made for {trained:,} positions." if isinstance(trained, int) else ""
    return [sentence, when + made_for]


def _describe_lengths(lengths: Sequence[float], described: Sequence[float] = ()) -> str:
    """Describe from which length on the ceiling binds for 10, 50 and 90 % of the heads.

    described: lengths that the text before has described; equal clauses are left out.
    """
    clauses, before = _length_clauses(lengths), _length_clauses(described)
    return ", ".join(clause for clause in clauses if clause not in before)


def _length_clauses(lengths: Sequence[float]) -> list[str]:
    """Return one clause per length below FARTHEST, and one for all that are beyond it."""
    reached = [
        f"for {share} {'of the heads ' * (share == '10 %')}beyond {format_keys(length)} keys"
        for share, length in zip(SHARES, lengths, strict=bool(lengths))
        if length < FARTHEST
    ]
    far = f"only beyond {format_keys(FARTHEST)} keys"
    if not reached:
        return [f"for 10 % of the heads {far}"] if lengths else []
    return [*reached, *(f"for {share} {far}" for share in SHARES[len(reached) : len(reached) + 1])]


def rate_sentences(slopes: Rate | None) -> list[str]:
    if slopes is None:
        return ["The rate test needs rows of several lengths; this run has none."]
    low, middle, high = slopes.quartiles
    sentence = (
        "Rate test: the effective gap is the log-odds of the largest weight against the mean of the others. Its slope "
        f"on log n is {_signed(middle)} in the median head (quartiles {_signed(low)} to {_signed(high)}). Slope 1 "
        f"keeps the largest weight, slope 0 disperses as theory predicts. {slopes.keeping_up} of {slopes.heads} heads "
        f"have a slope of 0.9 or more, {slopes.below_half} have one below 0.5."
    )
    if slopes.without_sink is not None and abs(slopes.without_sink - middle) >= 0.1:
        sentence += f" Without the first key the median is {_signed(slopes.without_sink)}."
    return [sentence]


def _signed(value: float) -> str:
    return minus_sign(f"{value:z.2f}")


def reading_sentences(manifest: Mapping[str, Any]) -> list[str]:
    """Describe loss per token and first token of each text."""
    sentences = []
    several = len(manifest.get("reading") or {}) > 1
    for text, reading in (manifest.get("reading") or {}).items():
        parts = []
        if reading.get("loss") is not None:
            parts.append(f"{reading['loss']:.2f} nats per token (perplexity {format_keys(reading['perplexity'])})")
        if reading.get("first_token") is not None:
            parts.append(f"the first token is {reading['first_token']!r}")
        if parts:
            sentences.append(f"Loss of the model{f' on {text!r}' if several else ''}: {'; '.join(parts)}.")
    return sentences if any("nats" in sentence for sentence in sentences) else []


def text_sentences(texts: Mapping[str, str], word: str) -> list[str]:
    """Return the headline of each text; the main headline is about what most texts agree on."""
    shown = [
        f"On {text!r}: {words[0].lower() if words[0].isupper() else words[0]}{words[1:]}"
        for text, words in texts.items()
    ]
    more = [f"{len(shown) - TEXTS} more {word}s are in the tables."] if len(shown) > TEXTS else []
    return [*shown[:TEXTS], *more]


def confidence_sentences(heads: Sequence[Row], manifest: Mapping[str, Any], thresholds: Thresholds) -> list[str]:
    """Describe how many windows were judged, and how many heads are undecided."""
    decidable = [
        row for row in heads if number(row, "confidence") is not None and row["verdict"] not in ("broken", None)
    ]
    if not decidable:
        return []
    windows = max((text.get("windows") or 1 for text in manifest.get("texts", [])), default=1)
    rest = f"{windows} windows of the text" if windows > 1 else "one window of the text"
    if input_word(manifest) == "image":
        rest = "the rows of each image"
    unsure = sum(row["verdict"] == UNDECIDED for row in decidable)
    are = "is" if unsure == 1 else "are"
    unanimous = [row for row in decidable if (number(row, "agreement") or 0) >= 1 and row["verdict"] != UNDECIDED]
    agree = f" All windows give the same verdict on {len(unanimous)} of the heads." if windows > 1 else ""
    share = format_percent(thresholds.confidence)
    return [
        (
            f"Confidence, from {rest}: {len(decidable) - unsure} of {len(decidable)} heads keep their verdict in at "
            f"least {share} of the bootstrap resamples, {unsure} {are} undecided.{agree}"
        )
    ]


def silent_sentences(heads: Sequence[Row], thresholds: Thresholds) -> list[str]:
    """Count the heads that read no key."""
    silent = sum(row["verdict"] == "silent" for row in heads)
    if not silent:
        return []
    read = "reads" if silent == 1 else "read"
    less = f"sum to less than {thresholds.silent_sum:g} in the median row and on average"
    return [f"Silent heads: {silent} of {len(heads)} {read} no key. Their weights {less}."]


def saturation_sentences(heads: Sequence[Row], manifest: Mapping[str, Any], thresholds: Thresholds) -> list[str]:
    if not heads:
        return []
    answers = Counter(row.get("saturation") or "not judged" for row in heads)
    if all(number(row, "saturation_excess") is None for row in heads):
        measured = "vectors" in (manifest.get("settings", {}).get("metrics") or ())
        why = "no head uses enough keys" if measured else "needs the metric group vectors"
        return [f"Saturation: not judged ({why})."]
    powers = [power for row in heads if (power := number(row, "saturation_power")) is not None]
    typical = f"; median power of the test: {format_percent(median(powers))}" if powers else ""
    return [
        (
            f"Saturation: {answers['saturated']} of {len(heads)} heads distinguish their keys hardly better than with "
            f"permuted weights (90 % interval of the excess below {thresholds.saturation_margin:g}{typical}). "
            f"{answers['distinguishes']} distinguish them, {answers['not judged']} are not judged."
        )
    ]


def threshold_sentences(thresholds: Thresholds, manifest: Mapping[str, Any]) -> list[str]:
    """Describe thresholds that differ from the defaults, or from those at the time of the measurement."""
    sentences = []
    if changed := thresholds.differences(Thresholds()):
        changes = ", ".join(f"{name} {value:g} (default {default:g})" for name, (value, default) in changed.items())
        sentences.append(f"Judged by thresholds other than the default: {changes}.")
    first = manifest.get("first_thresholds")
    if again := thresholds.differences(thresholds_of(first)) if first is not None else {}:
        changes = ", ".join(f"{name} was {value:g}" for name, (_, value) in again.items())
        sentences.append(f"The verdicts were recomputed from the saved numbers; when these were measured, {changes}.")
    return sentences


def too_short(heads: Sequence[Row]) -> list[str]:
    longest = max((row["n_high"] or 0 for row in heads), default=0)
    if not 0 < longest < FEW_KEYS:
        return []
    few = f"The longest rows have {longest} key{'s' * (longest > 1)}, too few to decide reliably whether a head selects"
    return [f"{few}. Measure some hundred keys; verdicts and advice here are only a first look."]


def caveats(heads: Sequence[Row], changing: int, manifest: Mapping[str, Any]) -> list[str]:
    sentences, word = [], input_word(manifest)
    chosen = manifest.get("settings", {}).get("rows")
    longest = max((row["n_high"] for row in heads), default=0)
    all_rows = chosen == "all" or (chosen == "auto" and longest <= AUTO_ROWS)
    if changing:
        subject = "1 head gets" if changing == 1 else f"{changing} heads get"
        sentences.append(
            f"{subject} different verdicts from different {word}s. A verdict counts if more than half of the {word}s "
            "give it."
        )
    rows = [count for row in heads if row["verdict"] not in ("broken", None) and (count := row.get("rows"))]
    if rows and min(rows) < FEW_ROWS:
        few = (
            f"{min(rows)} row{'s' * (max(rows) > 1)}" if min(rows) == max(rows) else f"{min(rows)} to {max(rows)} rows"
        )
        larger = "a larger image" if word == "image" else "a longer text"
        remedy = larger if all_rows else "--rows all"
        sentences.append(f"Verdicts are based on {few} per head; {remedy} makes them more reliable.")
    missing = Counter(
        reason
        for row in heads
        for reason in ("sensitive (no Jacobian norm)", "frozen (no Jacobian norm)")
        if reason in (row["evidence"] or "")
    )
    for reason, count in missing.items():
        sentences.append(f"Not judged on {count} of {len(heads)} heads: {reason}.")
    return sentences


@dataclass(frozen=True, kw_only=True)
class ModelVerdict:
    """The verdict on a model: headline, counts, sentences and advice."""

    headline: str
    counts: dict[str, int]  # heads per verdict, all verdicts named; one head counts once, whatever the number of texts
    saturation: dict[str, int] = field(default_factory=dict)  # heads per answer
    texts: dict[str, str] = field(default_factory=dict)  # the headline of each text, where there are several
    sentences: list[str] = field(default_factory=list)
    advice: list[Advice] = field(default_factory=list)
    ceiling: Ceiling | None = None  # the numbers behind "is the ceiling binding?", of heads that see every key
    rate: Rate | None = None  # the numbers behind the rate test

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; an infinite length becomes None."""
        plain = asdict(self)
        for part in ("ceiling", "rate"):
            for name, value in (plain[part] or {}).items():
                if isinstance(value, tuple):
                    plain[part][name] = [bound if math.isfinite(bound) else None for bound in value]
        return plain


def model_verdict(
    tables: Mapping[str, pa.Table],
    manifest: Mapping[str, Any],
    thresholds: Thresholds = Thresholds(),  # noqa: B008  # frozen
) -> ModelVerdict:
    """Describe the model as it runs, at the longest length. tables: as in analysis/tables.py, with judged heads."""
    all_heads = head_rows(tables["heads"])
    heads, changing = representative_rows(all_heads)
    seeing_all, windowed = split_by_window(heads, all_heads)
    counts = Counter(row["verdict"] for row in heads)
    head_keys = {tuple(row[name] for name, _ in HEAD_KEY) for row in seeing_all}
    curves = [
        row
        for row in tables["by_length"].select(_CURVE).to_pylist()
        if tuple(row[name] for name, _ in HEAD_KEY) in head_keys
    ]
    runs, slopes = _running_normalizer(heads, manifest), rate(heads)
    limit = ceiling(seeing_all, curves if runs == "softmax" else (), thresholds)
    rows = {name: tables[name].to_pylist() for name in ("top_n", "coverage", "sensitivity")}
    word = input_word(manifest)
    texts = _headline_by_text(all_heads, runs, thresholds, word)
    blurred = Counter(row.get("saturation") or "not judged" for row in heads)
    return ModelVerdict(
        headline=_instead_of_own(heads, manifest)
        + headline(seeing_all, windowed, limit, runs, thresholds, texts=len(texts), word=word),
        counts={name: counts.get(name, 0) for name in VERDICTS},
        saturation={name: blurred.get(name, 0) for name in SATURATION},
        texts=texts,
        sentences=[
            *too_short(heads),
            *reading_sentences(manifest),
            *text_sentences(texts, word),
            *confidence_sentences(heads, manifest, thresholds),
            *silent_sentences(heads, thresholds),
            *ceiling_sentences(limit, manifest, runs),
            *window_sentences(windowed, word),
            *rate_sentences(slopes),
            *saturation_sentences(heads, manifest, thresholds),
            *circuit_sentences(heads),
            *((manifest.get("output") or {}).get("sentences") or ()),
            *length_sentences(all_heads, seeing_all, thresholds),
            *caveats(heads, changing, manifest),
            *threshold_sentences(thresholds, manifest),
        ],
        advice=advise(heads, {"heads": all_heads, **rows}, manifest, runs),
        ceiling=limit,
        rate=slopes,
    )


def _headline_by_text(heads: Sequence[Row], runs: str | None, thresholds: Thresholds, word: str) -> dict[str, str]:
    """Return the headline of each text; empty for a single text."""
    texts = list(dict.fromkeys(row["text"] for row in heads))
    if len(texts) < 2:
        return {}
    headlines = {}
    for text in texts:
        text_rows = [row for row in heads if row["text"] == text]
        text_heads, _ = representative_rows(text_rows)
        seeing_all, windowed = split_by_window(text_heads, text_rows)
        headlines[text] = headline(seeing_all, windowed, None, runs, thresholds, word=word)
    return headlines


def _instead_of_own(heads: Sequence[Row], manifest: Mapping[str, Any]) -> str:
    """Return the beginning of the headline if the verdict is about another normalizer than the model's own."""
    name = stand_in(heads, manifest)
    return "" if name is None else f"With {name} in place of {own_normalizer(manifest) or 'its own normalizer'}: "


def _running_normalizer(heads: Sequence[Row], manifest: Mapping[str, Any]) -> str | None:
    """Return the normalizer that the verdict is about; None if layers differ."""
    name: str | None = next((row["normalizer"] for row in heads), "model")
    return own_normalizer(manifest) if name == "model" else name
