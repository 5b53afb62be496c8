"""Analyses in the terminal: verdict, grid of heads, worst heads and advice of one; what differs between several.

Every cell of the grid has letters too, so that it can be read without colors.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from attnorm.metrics.catalogue import BY_NAME
from attnorm.metrics.sampling import AUTO_ROWS
from attnorm.report.summary import measured_on
from attnorm.report.top_keys import TopKeys, quote_token, top_keys
from attnorm.report.views import KINDS, VERDICTS, chosen_rows, verdict_word
from attnorm.report_data import (
    CHANGE_METRICS,
    KEY,
    METRICS,
    Advice,
    Change,
    Comparison,
    ReportData,
    Row,
    Side,
    WhatIf,
    input_word,
    number,
)
from attnorm.text import format_keys

STYLE: dict[str, str] = {
    "broken": "bold #ffffff on #b00020",
    "dispersed-forced": "#000000 on #ff6e67",
    "dispersed-by-choice": "#000000 on #f4bf4f",
    "dispersed": "#000000 on #ffd9a0",
    "undecided": "#000000 on #d0d0d0",
    "differs": "#000000 on #c58fff",
    "silent": "#ffffff on #6a1fb0",
    "sink-dominated": "#000000 on #6fa8ff",
    "frozen": "#000000 on #7fe0e6",
    "sensitive": "#000000 on #ff9ed2",
    "healthy": "bold green",
    "unknown": "dim",
}
WORST = 8
RANK = {word.name: rank for rank, word in enumerate(VERDICTS)}
PER_LAYER = "effective keys"  # heading of the column next to the grid
READING_HEADS, READ_KEYS, LONGEST_TOKEN = 5, 4, 14  # size of the table of read tokens; characters of a token
CHANGES = 10


def analysis_summary(data: ReportData) -> RenderableType:
    """Return what `attnorm analyze` prints at the end."""
    heads = data.rows
    parts: list[RenderableType] = [
        Text(data.headline, style="bold"),
        Text(_describe_run(data), style="dim"),
        Text(),
    ]
    for kind in dict.fromkeys(row["kind"] for row in heads):
        parts += [HeadGrid([row for row in heads if row["kind"] == kind], kind), Text()]
    parts += [_legend(heads), Text(), *(Text(sentence) for sentence in data.sentences)]
    if (worst := _worst(heads)) is not None:
        parts += [Text(), worst]
    if (read := _reads_table(data)) is not None:
        parts += [Text(), read]
    for title, cautions in (("What to try", False), ("What does not help", True)):
        advice = [item for item in data.advice if item.caution == cautions]
        parts += [Text(), Text(title, style="bold"), *_advice(advice)] if advice else []
    parts += [Text(f"note: {note}", style="dim") for note in data.manifest.get("notes", [])]
    return Group(*parts)


def titled_table(title: str, *headings: str) -> Table:
    """Return a table whose last column wraps."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, no_wrap=heading != headings[-1])
    return table


class HeadGrid:
    """A grid with a row per layer and a column per head, split into blocks of heads that fit the width."""

    def __init__(self, heads: Sequence[Row], kind: str) -> None:
        self.heads = heads
        self.kind = kind

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        cells = {(row["layer"], row["head"]): row for row in self.heads}
        layers, heads = sorted({layer for layer, _ in cells}), sorted({head for _, head in cells})
        margin = len(f"layer {layers[-1]}") + 2
        yield Text(f"{KINDS.get(self.kind, self.kind)}: layers down, heads across", style="dim")
        fitting = max((options.max_width - margin - len(PER_LAYER) - 3) // 3, 1)
        for start in range(0, len(heads), fitting):
            block = heads[start : start + fitting]
            yield Text(" " * margin + "".join(f"{head:>2} " for head in block) + f"  {PER_LAYER}", style="dim")
            for layer in layers:
                line = Text.assemble((f"layer {layer}".ljust(margin), "dim"))
                for head in block:
                    line.append_text(_cell(cells.get((layer, head)))).append(" ")
                yield line.append(f"  {_keys_in_use([row for row in self.heads if row['layer'] == layer])}")


def _cell(row: Row | None) -> Text:
    if row is None:
        return Text("  ")
    word = verdict_word(row["verdict"])
    mark = " ." if word.name == "healthy" else word.mark.rjust(2)
    return Text(mark, style=STYLE.get(word.name, STYLE["unknown"]))


def _keys_in_use(rows: Sequence[Row]) -> str:
    """Return the median of effective keys over the layer's heads, and n. A silent head reads none."""
    reading = [row for row in rows if row["verdict"] != "silent"]
    counts = [value for row in reading if (value := number(row, "effective_keys")) is not None]
    return f"{format_keys(median(counts))} of {max(row['n_high'] for row in rows):,}" if counts else "-"


def _legend(heads: Sequence[Row]) -> Table:
    """Return the verdicts that occur with their meaning, most frequent first."""
    counts = Counter(verdict_word(row["verdict"]) for row in heads)
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    for word, count in sorted(counts.items(), key=lambda item: (-item[1], item[0].name)):
        mark = "." if word.name == "healthy" else word.mark
        table.add_row(Text(mark, style=STYLE.get(word.name, "dim")), f"{count} {word.label}", Text(word.meaning, "dim"))
    return table


def _worst(heads: Sequence[Row]) -> Table | None:
    """Return the worst heads, one of each verdict before a second of any."""
    unhealthy = [row for row in heads if row["verdict"] not in ("healthy", None)]
    if not unhealthy:
        return None
    shown = list(_take_turns(unhealthy))[:WORST]
    several = len({row["kind"] for row in heads}) > 1
    title = (
        "Heads to look at" if len(shown) == len(unhealthy) else f"Heads to look at ({len(shown)} of {len(unhealthy)})"
    )
    table = titled_table(title, "head", "verdict", "evidence")
    for row in sorted(shown, key=_rank):
        word = verdict_word(row["verdict"])
        kind_prefix = f"{row['kind']} " if several else ""
        table.add_row(
            f"{kind_prefix}layer {row['layer']} head {row['head']}",
            Text.assemble((word.mark, STYLE.get(word.name, "")), f" {word.label}"),
            Text(_evidence(row)),
        )
    return table


def _evidence(row: Row) -> str:
    """Return the evidence without what was not judged, which the sentences above list for all heads."""
    before, _, unknown = str(row["evidence"]).partition(" Not judged: ")
    return f"{before} {unknown.partition('. ')[2]}".strip()


def _take_turns(rows: Sequence[Row]) -> Iterator[Row]:
    queues = [
        sorted(
            (row for row in rows if row["verdict"] == word.name), key=lambda row: -(number(row, "entropy_ratio") or 0)
        )
        for word in VERDICTS
    ]
    while any(queues):
        for queue in queues:
            if queue:
                yield queue.pop(0)


def _rank(row: Row) -> tuple[int, int, int]:
    return RANK.get(row["verdict"], len(RANK)), row["layer"], row["head"]


def _advice(advice: Sequence[Advice]) -> Iterator[RenderableType]:
    for position, item in enumerate(advice, 1):
        yield Text(f"{position}. {item.heading}")
        yield Padding(Text(item.text, style="dim"), (0, 0, 0, 3))
        for change in dict.fromkeys(effect.change for effect in item.what_if):
            # Counts of 0 before and after are left out; the HTML report has them.
            effects = [
                effect for effect in item.what_if if effect.change == change and (effect.before, effect.after) != (0, 0)
            ]
            words = ", ".join(what_if_words(effect) for effect in effects)
            yield Padding(Text.assemble((f"{change}: ", "cyan"), words), (0, 0, 0, 3))
        if item.command:
            yield Padding(Text.assemble("Measure this with: ", (item.command, "cyan")), (0, 0, 0, 3))


def what_if_words(what: WhatIf) -> str:
    """Format a what-if: "entropy / log n 0.93 -> 0.31", "9 become healthy"."""
    if what.quantity.startswith("become "):
        quantity = what.quantity.replace("become", "becomes") if what.after == 1 else what.quantity
        return f"{_format_number(what.after)} {quantity}"
    return f"{what.quantity} {_format_number(what.before)} -> {_format_number(what.after)}"


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:.2g}"


def _describe_run(data: ReportData) -> str:
    manifest = data.manifest
    model, texts, word = manifest["model"], manifest["texts"], input_word(manifest)
    text = texts[0]["name"] if len(texts) == 1 else f"{len(texts)} {word}s"
    rows = manifest["settings"]["rows"] or "different between runs"  # None: merged
    rows = f"up to {AUTO_ROWS} per {'image' if word == 'image' else 'window'}" if rows == "auto" else rows
    return f"{model['name']}, {model['dtype']} on {model['device']}; {text}; {measured_on(data)}; rows: {rows}"


def _reads_table(data: ReportData) -> Table | None:
    """Return the keys that the sharpest heads read in their last listed row, one head per layer; None without reads."""
    sharpest: dict[tuple[str, int], Row] = {}
    for row in sorted((row for row in data.rows if row["verdict"] != "silent"), key=_sharpness):
        sharpest.setdefault((row["kind"], row["layer"]), row)
    top_keys_per_head: list[tuple[Row, TopKeys]] = []
    for row in list(sharpest.values())[:READING_HEADS]:
        reads = chosen_rows(data.tables["reads"], {name: row[name] for name in KEY})
        if reads.num_rows:
            top_keys_per_head.append((row, top_keys(reads, -1)))
    if not top_keys_per_head:
        return None
    names = dict.fromkeys(row["normalizer"] for row, _ in top_keys_per_head if row["normalizer"] != "model")
    weight = f"weight with {', '.join(names)}" if names else "weight"
    title = f"What the sharpest head of some layers reads in the last recorded row (position, token or patch, {weight})"
    table = titled_table(title, "head", "query", "keys with the largest weights")
    for row, reading in sorted(top_keys_per_head, key=lambda read: (read[1].layer, read[1].head)):
        picture = (data.manifest.get("pictures") or {}).get(row["text"])
        read = ", ".join(
            f"{_position(key.key, key.token, row, picture)} {key.weight:.2f}" for key in reading.keys[:READ_KEYS]
        )
        row_label = _position(reading.row, reading.token, row, picture)
        table.add_row(Text(f"layer {reading.layer} head {reading.head}"), Text(row_label), Text(read))
    return table


def _position(position: int, token: str | None, head: Row, picture: Mapping[str, Any] | None) -> str:
    """Return a position with its token or, in an image, with the row and column of its patch, counted from 1."""
    if token is None and picture is not None and head["kind"] != "cross":
        columns, patches = picture["columns"], picture["rows"] * picture["columns"]
        patch = position - (head["n_high"] - patches)  # patches are the last tokens
        if position < patch:  # attention within windows: fewer keys than patches
            return f"{position}"
        place = f"row {patch // columns + 1}, column {patch % columns + 1}" if patch >= 0 else "no patch"
        return f"{position} ({place})"
    return f"{position}" if token is None else f"{position} {quote_token(token, LONGEST_TOKEN)}"


def _sharpness(row: Row) -> float:
    ratio = row.get("entropy_ratio")
    on_sink = (row.get("sink_mass") or 0.0) > 0.5  # such a head reads little else than the first key
    return (2.0 if ratio is None or ratio != ratio else float(ratio)) + (1.0 if on_sink else 0.0)


def comparison_tables(comparison: Comparison) -> RenderableType:
    parts: list[RenderableType] = [_sides_table(comparison.sides)]
    for label in comparison.matched:
        changes = [change for change in comparison.changes if change.label == label]
        parts += [_changes(comparison.sides[0], label, changes, comparison.changed_verdicts[label])]
    parts += [Text(f"note: {note}", style="yellow") for note in comparison.notes]
    return Group(*parts)


def _sides_table(sides: Sequence[Side]) -> Table:
    table = titled_table("Heads per verdict, and median (quartiles) over heads", "")
    for side in sides:
        table.add_column(side.label, justify="right", overflow="fold")
    table.add_row("heads", *(str(side.heads) for side in sides))
    table.add_row("longest rows, keys", *(f"{side.longest:,}" for side in sides))
    if len({side.normalizer for side in sides}) > 1:
        table.add_row("normalizer", *(side.normalizer for side in sides))
    table.add_section()
    for word in VERDICTS:
        counts = [side.counts[word.name] for side in sides]
        if any(counts):
            table.add_row(Text(word.label, style=STYLE[word.name]), *(str(count) if count else "." for count in counts))
    table.add_section()
    for name in METRICS:
        if any(side.quartiles[name] for side in sides):
            table.add_row(BY_NAME[name].label, *(_quartiles(name, side) for side in sides))
    return table


def _quartiles(name: str, side: Side) -> str:
    quartiles = side.quartiles[name]
    if quartiles is None:
        return "-"
    low, middle, high = (number_words(name, value) for value in quartiles)
    return f"{middle} ({low} to {high})"


def number_words(name: str, value: float) -> str:
    return format_keys(value) if BY_NAME[name].unit == "keys" else f"{value:z.2f}"


def _changes(first: Side, label: str, changes: Sequence[Change], changed: int) -> RenderableType:
    """Return a table of the largest changes; heads with another verdict come first."""
    moved = sorted(changes, key=lambda change: (change.verdicts[0] == change.verdicts[1], -change.size))
    shown = [change for change in moved if change.size > 0 or change.verdicts[0] != change.verdicts[1]][:CHANGES]
    title = f"{label} compared with {first.label}: {changed} of {len(changes)} heads have another verdict"
    if not shown:
        return Text(f"{title}; no head changed.", style="bold")
    table = titled_table(title)
    table.add_column("head", no_wrap=True)
    table.add_column("verdict", min_width=max(len(word.label) for word in VERDICTS))
    for name in CHANGE_METRICS:
        table.add_column(BY_NAME[name].label, justify="right", min_width=len("0.00 -> 0.00"))
    for change in shown:
        numbers = [change.numbers.get(name) for name in CHANGE_METRICS]
        table.add_row(
            f"{'' if change.kind == 'decoder' else change.kind + ' '}layer {change.layer} head {change.head}",
            _verdicts(change),
            *(
                "-" if pair is None else " -> ".join(number_words("entropy_ratio", value) for value in pair)
                for pair in numbers
            ),
        )
    return table


def _verdicts(change: Change) -> Text:
    before, after = (verdict_word(name) for name in change.verdicts)
    if before == after:
        return Text(before.label, style="dim")
    return Text.assemble(before.label, " -> ", (after.label, STYLE.get(after.name, "")))
