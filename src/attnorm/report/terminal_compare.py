"""A comparison of analyses in the terminal: heads per verdict, quartiles of metrics, the heads that changed most."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attnorm.analysis.compare import CHANGE_METRICS, METRICS, Change, Comparison, Side
from attnorm.analysis.verdicts.rows import keys
from attnorm.metrics.catalogue import BY_NAME
from attnorm.report.terminal_heads import STYLE, titled_table
from attnorm.report.vocabulary import VERDICTS, verdict_word

CHANGES = 10


def comparison_tables(comparison: Comparison) -> RenderableType:
    parts: list[RenderableType] = [_sides(comparison.sides)]
    for label in comparison.matched:
        changes = [change for change in comparison.changes if change.label == label]
        parts += [_changes(comparison.sides[0], label, changes, comparison.changed_verdicts[label])]
    parts += [Text(f"note: {note}", style="yellow") for note in comparison.notes]
    return Group(*parts)


def _sides(sides: Sequence[Side]) -> Table:
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
    found = side.quartiles[name]
    if found is None:
        return "-"
    low, middle, high = (number_words(name, value) for value in found)
    return f"{middle} ({low} .. {high})"


def number_words(name: str, value: float) -> str:
    return keys(value) if BY_NAME[name].unit == "keys" else f"{round(value, 2) + 0.0:.2f}"  # no -0.00


def _changes(first: Side, label: str, changes: Sequence[Change], changed: int) -> RenderableType:
    """Return a table of the largest changes; heads with another verdict come first."""
    moved = sorted(changes, key=lambda change: (change.verdicts[0] == change.verdicts[1], -change.size))
    shown = [change for change in moved if change.size > 0 or change.verdicts[0] != change.verdicts[1]][:CHANGES]
    title = f"{label} against {first.label}: {changed} of {len(changes)} heads have another verdict"
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
