"""An analysis in the terminal: the verdict, layers x heads as coloured cells, the worst heads, what to try.

Every cell has letters as well, so that nothing is lost without colour, in a log or to a reader who does not see it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from attnorm.analysis.result import Analysis
from attnorm.analysis.verdicts import representative
from attnorm.analysis.verdicts.rows import Row, head_rows, keys, number
from attnorm.analysis.verdicts.what_if import Advice, WhatIf
from attnorm.metrics.sampling import AUTO_ROWS
from attnorm.report.terminal_reads import reads_table
from attnorm.report.vocabulary import KINDS, VERDICTS, verdict_word

STYLE: dict[str, str] = {
    "broken": "bold #ffffff on #b00020",
    "dispersed-forced": "#000000 on #ff6e67",
    "dispersed-by-choice": "#000000 on #f4bf4f",
    "dispersed": "#000000 on #ffd9a0",
    "undecided": "#000000 on #d0d0d0",
    "differs": "#000000 on #c58fff",
    "sink-dominated": "#000000 on #6fa8ff",
    "frozen": "#000000 on #7fe0e6",
    "sensitive": "#000000 on #ff9ed2",
    "healthy": "bold green",
    "unknown": "dim",
}
WORST = 8
RANK = {word.name: rank for rank, word in enumerate(VERDICTS)}
PER_LAYER = "keys in use"  # the heading of the column beside the cells


def analysis_summary(analysis: Analysis) -> RenderableType:
    """All that the end of a run shows."""
    heads, _ = representative(head_rows(analysis.heads))
    verdict = analysis.verdict
    parts: list[RenderableType] = [Text(verdict.headline, style="bold"), Text(_about(analysis), style="dim"), Text()]
    for kind in dict.fromkeys(row["kind"] for row in heads):
        parts += [HeadGrid([row for row in heads if row["kind"] == kind], kind), Text()]
    parts += [_legend(heads), Text(), *(Text(sentence) for sentence in verdict.sentences)]
    if (worst := _worst(heads)) is not None:
        parts += [Text(), worst]
    if (read := reads_table(analysis, heads)) is not None:
        parts += [Text(), read]
    for title, cautions in (("What to try", False), ("What not to expect", True)):
        given = [one for one in verdict.advice if one.caution == cautions]
        parts += [Text(), Text(title, style="bold"), *_advice(given)] if given else []
    parts += [Text(f"note: {note}", style="dim") for note in analysis.manifest.get("notes", [])]
    return Group(*parts)


class HeadGrid:
    """Layers down, heads across, in as many blocks of heads as the width needs."""

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
    """The middle of the layer's heads: effective keys of n."""
    known = [value for row in rows if (value := number(row, "effective_keys")) is not None]
    return f"{keys(median(known))} of {max(row['n_high'] for row in rows):,}" if known else "-"


def _legend(heads: Sequence[Row]) -> Table:
    """The verdicts that occur, the commonest first, with what they mean."""
    counts = Counter(verdict_word(row["verdict"]) for row in heads)
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    for word, count in sorted(counts.items(), key=lambda item: (-item[1], item[0].name)):
        mark = "." if word.name == "healthy" else word.mark
        table.add_row(Text(mark, style=STYLE.get(word.name, "dim")), f"{count} {word.label}", Text(word.meaning, "dim"))
    return table


def _worst(heads: Sequence[Row]) -> Table | None:
    """Heads that need a look, one of each verdict before a second of any."""
    unwell = [row for row in heads if row["verdict"] not in ("healthy", None)]
    if not unwell:
        return None
    shown = list(_taking_turns(unwell))[:WORST]
    several = len({row["kind"] for row in heads}) > 1
    title = "Heads to look at" if len(shown) == len(unwell) else f"Heads to look at ({len(shown)} of {len(unwell)})"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("head", "verdict", "because"):
        table.add_column(heading, no_wrap=heading != "because")
    for row in sorted(shown, key=_rank):
        word = verdict_word(row["verdict"])
        where = f"{row['kind']} " if several else ""
        table.add_row(
            f"{where}layer {row['layer']} head {row['head']}",
            Text.assemble((word.mark, STYLE.get(word.name, "")), f" {word.label}"),
            Text(_because(row)),
        )
    return table


def _because(row: Row) -> str:
    """Without what was not judged, which the sentences above name once for all heads."""
    sentence, _, unknown = str(row["evidence"]).partition("; not judged:")
    return f"{sentence}." if unknown else sentence


def _taking_turns(rows: Sequence[Row]) -> Iterator[Row]:
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
    for position, one in enumerate(advice, 1):
        concerned = f" ({one.heads} head{'s' * (one.heads != 1)})" if one.heads else ""
        yield Text(f"{position}. {one.title}{concerned}")
        yield Padding(Text(one.text, style="dim"), (0, 0, 0, 3))
        for change in dict.fromkeys(what.change for what in one.what_if):
            told = ", ".join(what_if_words(what) for what in one.what_if if what.change == change and _says_much(what))
            yield Padding(Text.assemble((f"{change}: ", "cyan"), told), (0, 0, 0, 3))
        if one.command:
            yield Padding(Text.assemble("measure it: ", (one.command, "cyan")), (0, 0, 0, 3))


def _says_much(what: WhatIf) -> bool:
    """A count that is 0 before and after is left out of a line; the tables of the report have it."""
    return (what.before, what.after) != (0, 0)


def what_if_words(what: WhatIf) -> str:
    """entropy / log n 0.93 -> 0.31"""
    return f"{what.quantity} {_short(what.before)} -> {_short(what.after)}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:.2g}"


def _about(analysis: Analysis) -> str:
    model, settings = analysis.manifest["model"], analysis.manifest["settings"]
    texts = [text["name"] for text in analysis.manifest["texts"]]
    what = texts[0] if len(texts) == 1 else f"{len(texts)} texts"
    lengths = ", ".join(f"{length:,}" for length in sorted(set(analysis.heads["length"].to_pylist())))
    rows = settings["rows"] or "different from run to run"  # None: merged
    rows = f"up to {AUTO_ROWS} a window" if rows == "auto" else rows
    most = max((text.get("windows") or 1 for text in analysis.manifest["texts"]), default=1)
    windows = f"{most} windows of " if most > 1 else ""
    return f"{model['name']}, {model['dtype']} on {model['device']}; {what}; {windows}{lengths} tokens; rows: {rows}"
