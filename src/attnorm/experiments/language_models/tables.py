"""The results as Markdown tables and as a summary."""

from collections.abc import Iterable, Sequence

from attnorm.experiments.language_models.results import (
    Line,
    LMContender,
    contenders,
    learned_parameters,
    most_different_length,
    rank_correlation,
    wilson_interval,
)

# Attention statistics: heading and digits.
ATTENTION = {
    "entropy_ratio": ("entropy / log n", 3),
    "effective_keys": ("effective keys", 1),
    "max_weight": ("largest weight", 3),
    "sink_mass": ("first key and sink", 3),
    "row_sum": ("row sum", 3),
    "jacobian_norm": ("Jacobian norm", 3),
}


def all_tables(lines: Iterable[Line]) -> str:
    every = list(lines)
    found = contenders(every)
    parts = [
        ("Loss", losses_table(found)), ("Pass keys found", needle_table(found)),
        ("Where the key lay", depth_table(found)), ("Cost", cost_table(found)),
        ("Attention", attention_table(found)), ("Sharper heads, better recall?", recall_table(found)),
        ("Learned by the normalizers", learned_table(every, found)), ("Learning rates", rates_table(every)),
        ("While training", course_table(every)), ("Trials", trials_table(every)), ("Summary", summary(found)),
    ]  # fmt: skip
    return "\n\n".join(f"## {title}\n\n{body}" for title, body in parts if body) + "\n"


def losses_table(found: Sequence[LMContender]) -> str:
    """Return nats per token by text and window length."""
    if not found:
        return ""
    columns = [(text, length) for text, lengths in found[0].losses.items() for length in lengths]
    rows = [
        [one.name, str(one.seeds), *(one.losses[text][length].written(4) for text, length in columns)] for one in found
    ]
    return table(["normalizer", "seeds", *(f"{text}, {length:,}" for text, length in columns)], rows)


def needle_table(found: Sequence[LMContender]) -> str:
    """Return the percentage of keys with every character right, and of characters."""
    asked = [one for one in found if one.found]
    if not asked:
        return ""
    lengths = list(asked[0].found)
    best_first = sorted(asked, key=lambda one: [-one.found[length].mean for length in reversed(lengths)])
    rows = [
        [
            one.name,
            *(one.found[length].written(1, 100) for length in lengths),
            *(one.characters[length].written(1, 100) for length in lengths),
            one.among_many.written(1, 100) if one.among_many else "",
        ]
        for one in best_first
    ]
    headings = [f"{what} at {length:,}" for what in ("keys", "characters") for length in lengths]
    return table(["normalizer", *(f"% {heading}" for heading in headings), "% keys among many"], rows)


def depth_table(found: Sequence[LMContender]) -> str:
    """Return the percentage of keys found by position, at the length where models differ most."""
    length = most_different_length(found)
    looked = [one for one in found if length is not None and one.by_depth.get(length)]
    if length is None or not looked:
        return ""
    depths = list(looked[0].by_depth[length])
    rows = [[one.name, *(f"{100 * one.by_depth[length][depth]:.0f}" for depth in depths)] for one in looked]
    return table([f"key at token, of {length:,}", *(f"{depth * length:,.0f}" for depth in depths)], rows)


def cost_table(found: Sequence[LMContender]) -> str:
    rows = [
        [
            one.name,
            _number(one.tokens_per_second, "{:,.0f}"),
            _number(None if one.peak_memory_bytes is None else one.peak_memory_bytes / 2**30, "{:.1f}"),
            one.computed,
            _number(one.tokens, "{:,}"),
            _number(one.parameters, "{:,}"),
            _number(one.learning_rate, "{:g}"),
        ]
        for one in found
        if one.at_inference is None
    ]
    headings = [
        "normalizer",
        "tokens/s in this run",
        "peak GiB",
        "attention",
        "tokens read",
        "parameters",
        "learning rate",
    ]
    return table(headings, rows) if rows else ""


def attention_table(found: Sequence[LMContender]) -> str:
    looked = [one for one in found if one.attention]
    rows = [
        [one.name, *(_number(one.attention.get(name), f"{{:.{digits}f}}") for name, (_, digits) in ATTENTION.items())]
        for one in looked
    ]
    return table(["normalizer", *(heading for heading, _ in ATTENTION.values())], rows) if rows else ""


def recall_table(found: Sequence[LMContender]) -> str:
    """Return keys found at the length where models differ most, with a 95 % interval; lowest entropy first."""
    length = most_different_length(found)
    if length is None:
        return ""
    asked = [one for one in found if one.found and "entropy_ratio" in one.attention]
    rows = []
    for one in sorted(asked, key=lambda one: one.attention["entropy_ratio"]):
        low, high = wilson_interval(one.found[length].mean, one.questions)
        rows.append(
            [one.name, f"{one.attention['entropy_ratio']:.3f}", one.found[length].written(0, 100),
             f"{100 * low:.0f} to {100 * high:.0f}", one.characters[length].written(0, 100)]
        )  # fmt: skip
    return table(["normalizer", "entropy / log n", f"% keys at {length:,}", "95 %", "% characters"], rows)


def learned_table(lines: Sequence[Line], found: Sequence[LMContender]) -> str:
    """Return the normalizers' parameters over all heads, and their factor on the logits at every measured length."""
    lengths = sorted({n for one in found for by_length in one.losses.values() for n in by_length})
    rows = [
        [one.normalizer, str(one.seed), one.what, *(f"{x:.3f}" for x in (one.mean, one.smallest, one.largest))]
        for one in learned_parameters(lines, lengths)
    ]
    return table(["normalizer", "seed", "parameter", "mean", "smallest", "largest"], rows) if rows else ""


def course_table(lines: Sequence[Line]) -> str:
    """Return the validation loss during training, by million tokens read."""
    runs = [line for line in lines if line["stage"] == "main" and line.get("course")]
    courses = [{point[0]: point[2] for point in run["course"] if point[2] is not None} for run in runs]
    read = sorted({tokens for course in courses for tokens in course})
    rows = [
        [run["normalizer"], str(run["seed"]), *(_number(course.get(tokens), "{:.3f}") for tokens in read)]
        for run, course in zip(runs, courses, strict=True)
    ]
    return table(["normalizer", "seed", *(f"{tokens / 1e6:.1f} M" for tokens in read)], rows) if rows else ""


def rates_table(lines: Sequence[Line]) -> str:
    """Return the final validation loss of the short runs."""
    tried = [line for line in lines if line["stage"] == "rate"]
    rates = sorted({line["learning_rate"] for line in tried})
    rows = []
    for name in dict.fromkeys(line["normalizer"] for line in tried):
        ended = {line["learning_rate"]: line["valid_loss"] for line in tried if line["normalizer"] == name}
        best = min((loss for loss in ended.values() if loss is not None), default=None)
        cells = [_number(ended.get(rate), "{:.4f}") if rate in ended else "" for rate in rates]
        rows.append(
            [name, *(f"**{cell}**" if ended.get(r) == best else cell for r, cell in zip(rates, cells, strict=True))]
        )
    return table(["normalizer", *(f"{rate:g}" for rate in rates)], rows) if rows else ""


def trials_table(lines: Sequence[Line]) -> str:
    tried = [line for line in lines if line["stage"] == "trial"]
    rows = [
        [
            line["normalizer"],
            line["attention"],
            _number(line.get("tokens_per_second"), "{:,.0f}"),
            _number((line.get("peak_memory_bytes") or 0) / 2**30 or None, "{:.1f}"),
            (line["problem"] or "").splitlines()[0][:80] if line["problem"] else "",
        ]
        for line in tried
    ]
    return table(["normalizer", "attention", "tokens/s", "peak GiB", "problem"], rows) if rows else ""


def summary(found: Sequence[LMContender]) -> str:
    """Return the summary: the best normalizers, and whether sharper heads find more keys."""
    trained = [one for one in found if one.at_inference is None]
    if len(trained) < 2:
        return ""
    text, lengths = next(iter((text, list(by)) for text, by in found[0].losses.items()))
    sentences = []
    for length in (lengths[0], lengths[-1]):
        best = min(found, key=lambda one: one.losses[text][length].mean)
        softmax = next((one for one in found if one.name == "softmax"), None)
        behind = "" if softmax is None or softmax is best else f"; softmax {softmax.losses[text][length].mean:.4f}"
        sentences.append(
            f"On windows of {length:,} tokens {best.name} has the lowest loss on {text}, "
            f"{best.losses[text][length].mean:.4f} nats{behind}."
        )
    asked = [one for one in found if one.found]
    if asked:
        for length in (min(asked[0].found), max(asked[0].found)):
            most = max(one.found[length].mean for one in asked)
            best_ones = [one.name for one in asked if one.found[length].mean == most]
            finds = f"{', '.join(best_ones)} {'finds' if len(best_ones) == 1 else 'find'} most keys, {100 * most:.1f} %"
            sentences.append(f"At {length:,} tokens {finds if most else 'no model finds a key'}.")
        sentences.append(_sharper(asked))
    return " ".join(sentence for sentence in sentences if sentence)


def _sharper(asked: Sequence[LMContender]) -> str:
    length = most_different_length(asked)
    assert length is not None
    pairs = [
        (one.attention["entropy_ratio"], one.found[length].mean)
        for one in asked
        if one.at_inference is None and "entropy_ratio" in one.attention
    ]
    correlation = rank_correlation(pairs)
    if correlation is None:
        return ""
    return (
        f"Rank correlation of entropy / log n (before fine-tuning) with keys found at {length:,} tokens, over "
        f"{len(pairs)} normalizers: {correlation:+.2f}."
    )


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
