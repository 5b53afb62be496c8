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
    all_lines = list(lines)
    models = contenders(all_lines)
    parts = [
        ("Loss", losses_table(models)), ("Pass keys found", needle_table(models)),
        ("Where the key lay", depth_table(models)), ("Cost", cost_table(models)),
        ("Attention", attention_table(models)), ("Sharper heads, better recall?", recall_table(models)),
        ("Learned by the normalizers", learned_table(all_lines, models)), ("Learning rates", rates_table(all_lines)),
        ("While training", course_table(all_lines)), ("Trials", trials_table(all_lines)), ("Summary", summary(models)),
    ]  # fmt: skip
    return "\n\n".join(f"## {title}\n\n{body}" for title, body in parts if body) + "\n"


def losses_table(models: Sequence[LMContender]) -> str:
    """Return nats per token by text and window length."""
    if not models:
        return ""
    columns = [(text, length) for text, lengths in models[0].losses.items() for length in lengths]
    rows = [
        [model.name, str(model.seeds), *(model.losses[text][length].written(4) for text, length in columns)]
        for model in models
    ]
    return table(["normalizer", "seeds", *(f"{text}, {length:,}" for text, length in columns)], rows)


def needle_table(models: Sequence[LMContender]) -> str:
    """Return the percentage of keys with every character right, and of characters."""
    tested = [model for model in models if model.keys_found]
    if not tested:
        return ""
    lengths = list(tested[0].keys_found)
    best_first = sorted(tested, key=lambda model: [-model.keys_found[length].mean for length in reversed(lengths)])
    rows = [
        [
            model.name,
            *(model.keys_found[length].written(1, 100) for length in lengths),
            *(model.characters[length].written(1, 100) for length in lengths),
            model.among_many.written(1, 100) if model.among_many else "",
        ]
        for model in best_first
    ]
    headings = [f"{what} at {length:,}" for what in ("keys", "characters") for length in lengths]
    return table(["normalizer", *(f"% {heading}" for heading in headings), "% keys among many"], rows)


def depth_table(models: Sequence[LMContender]) -> str:
    """Return the percentage of keys found by position, at the length where models differ most."""
    length = most_different_length(models)
    looked = [model for model in models if length is not None and model.by_depth.get(length)]
    if length is None or not looked:
        return ""
    depths = list(looked[0].by_depth[length])
    rows = [[model.name, *(f"{100 * model.by_depth[length][depth]:.0f}" for depth in depths)] for model in looked]
    return table([f"key at token, of {length:,}", *(f"{depth * length:,.0f}" for depth in depths)], rows)


def cost_table(models: Sequence[LMContender]) -> str:
    rows = [
        [
            model.name,
            _number(model.tokens_per_second, "{:,.0f}"),
            _number(None if model.peak_memory_bytes is None else model.peak_memory_bytes / 2**30, "{:.1f}"),
            model.computed,
            _number(model.tokens, "{:,}"),
            _number(model.parameters, "{:,}"),
            _number(model.learning_rate, "{:g}"),
        ]
        for model in models
        if model.at_inference is None
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


def attention_table(models: Sequence[LMContender]) -> str:
    looked = [model for model in models if model.attention]
    rows = [
        [
            model.name,
            *(_number(model.attention.get(name), f"{{:.{digits}f}}") for name, (_, digits) in ATTENTION.items()),
        ]
        for model in looked
    ]
    return table(["normalizer", *(heading for heading, _ in ATTENTION.values())], rows) if rows else ""


def recall_table(models: Sequence[LMContender]) -> str:
    """Return keys found at the length where models differ most, with a 95 % interval; lowest entropy first."""
    length = most_different_length(models)
    if length is None:
        return ""
    tested = [model for model in models if model.keys_found and "entropy_ratio" in model.attention]
    rows = []
    for model in sorted(tested, key=lambda model: model.attention["entropy_ratio"]):
        low, high = wilson_interval(model.keys_found[length].mean, model.questions)
        rows.append(
            [model.name, f"{model.attention['entropy_ratio']:.3f}", model.keys_found[length].written(0, 100),
             f"{100 * low:.0f} to {100 * high:.0f}", model.characters[length].written(0, 100)]
        )  # fmt: skip
    return table(["normalizer", "entropy / log n", f"% keys at {length:,}", "95 %", "% characters"], rows)


def learned_table(lines: Sequence[Line], models: Sequence[LMContender]) -> str:
    """Return the normalizers' parameters over all heads, and their factor on the logits at every measured length."""
    lengths = sorted({n for model in models for by_length in model.losses.values() for n in by_length})
    rows = [
        [
            parameter.normalizer,
            str(parameter.seed),
            parameter.what,
            *(f"{x:.3f}" for x in (parameter.mean, parameter.smallest, parameter.largest)),
        ]
        for parameter in learned_parameters(lines, lengths)
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


def summary(models: Sequence[LMContender]) -> str:
    """Return the summary: the best normalizers, and whether sharper heads find more keys."""
    trained = [model for model in models if model.at_inference is None]
    if len(trained) < 2:
        return ""
    text, lengths = next(iter((text, list(by)) for text, by in models[0].losses.items()))
    sentences = []
    for length in (lengths[0], lengths[-1]):
        best = min(models, key=lambda model: model.losses[text][length].mean)
        softmax = next((model for model in models if model.name == "softmax"), None)
        behind = "" if softmax is None or softmax is best else f"; softmax {softmax.losses[text][length].mean:.4f}"
        sentences.append(
            f"On windows of {length:,} tokens {best.name} has the lowest loss on {text}, "
            f"{best.losses[text][length].mean:.4f} nats{behind}."
        )
    tested = [model for model in models if model.keys_found]
    if tested:
        for length in (min(tested[0].keys_found), max(tested[0].keys_found)):
            most = max(model.keys_found[length].mean for model in tested)
            best_ones = [model.name for model in tested if model.keys_found[length].mean == most]
            finds = f"{', '.join(best_ones)} {'finds' if len(best_ones) == 1 else 'find'} most keys, {100 * most:.1f} %"
            sentences.append(f"At {length:,} tokens {finds if most else 'no model finds a key'}.")
        sentences.append(_describe_correlation(tested))
    return " ".join(sentence for sentence in sentences if sentence)


def _describe_correlation(models: Sequence[LMContender]) -> str:
    length = most_different_length(models)
    assert length is not None
    pairs = [
        (model.attention["entropy_ratio"], model.keys_found[length].mean)
        for model in models
        if model.at_inference is None and "entropy_ratio" in model.attention
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
