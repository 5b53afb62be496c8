"""Compare analyses: of several models or normalizers (`compare`), and of one model on several passages (`stability`).

compare: heads are matched with those of the first side by (kind, layer, head) if both sides have the same ones: a model
before and after training, or one model under two normalizers. Models of different shapes are compared by their
distributions.

stability: a head is judged in a run if its verdict there is not "undecided". Two rates compare pairs of runs:

    again           of the heads judged in one run, the share with the same verdict in another; an "undecided" there
                    counts as a change
    uncontradicted  of the heads judged in one run, the share with the same verdict or "undecided" in another

Over all runs, of the heads judged in at least one: `kept` counts those with no second verdict beside "undecided",
`same` those with one verdict in every run.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from attnorm.analysis.result import Analysis
from attnorm.analysis.tables import WINDOW_NUMBERS
from attnorm.analysis.verdicts.rows import head_id, head_rows, representative_rows
from attnorm.analysis.verdicts.thresholds import UNDECIDED
from attnorm.report_data import CHANGE_METRICS, METRICS, VERDICTS, Change, Comparison, Row, Side, number


def compare(analyses: Mapping[str, Analysis]) -> Comparison:
    """Compare analyses, given by label, with the first one.

    A single analysis with several normalizers is compared with itself: each normalizer is a side.
    """
    if not analyses:
        raise ValueError("expected at least one analysis, got none. Pass one.")
    labeled = _label_analyses(analyses)
    if len(labeled) < 2:
        (label,) = analyses
        raise ValueError(
            f"{label}: expected several normalizers to compare, got one. Give a second folder or model, or "
            "measure it again with --normalizers model,ssmax,entmax15."
        )
    rows = {
        label: representative_rows(head_rows(run.heads), normalizer)[0] for label, (run, normalizer) in labeled.items()
    }
    sides = [_make_side(label, *labeled[label], rows[label]) for label in labeled]
    first, *others = (_index_by_head(rows[label]) for label in labeled)
    labels = list(labeled)[1:]
    matched = {label: heads for label, heads in zip(labels, others, strict=True) if heads.keys() == first.keys()}
    changes = [_change(label, key, first[key], heads[key]) for label, heads in matched.items() for key in heads]
    different = Counter(change.label for change in changes if change.verdicts[0] != change.verdicts[1])
    return Comparison(
        sides=sides,
        matched=list(matched),
        changes=sorted(changes, key=lambda change: -change.size),
        changed_verdicts={label: different[label] for label in matched},
        notes=_notes({label: run for label, (run, _) in labeled.items()}, sides, matched),
    )


def sides_of(analysis: Analysis) -> list[Side]:
    """Summarize an analysis, one side per normalizer."""
    return [
        _make_side(name, run, normalizer, representative_rows(head_rows(run.heads), normalizer)[0])
        for name, (run, normalizer) in _label_analyses({"": analysis}).items()
    ]


def _label_analyses(analyses: Mapping[str, Analysis]) -> dict[str, tuple[Analysis, str | None]]:
    if len(analyses) > 1:
        return {label: (run, None) for label, run in analyses.items()}
    ((_, run),) = analyses.items()
    return {name: (run, name) for name in dict.fromkeys(run.heads["normalizer"].to_pylist())}


def _make_side(label: str, run: Analysis, normalizer: str | None, heads: Sequence[Row]) -> Side:
    counts = Counter(row["verdict"] for row in heads)
    reading = [row for row in heads if row["verdict"] != "silent"]  # a silent head has numbers of rescaled weights
    return Side(
        label=label,
        normalizer=heads[0]["normalizer"] if heads else (normalizer or "model"),
        headline=run.verdict.headline,
        longest=max((row["n_high"] or 0 for row in heads), default=0),
        heads=len(heads),
        counts={name: counts.get(name, 0) for name in VERDICTS},
        quartiles={name: _quartiles([number(row, name) for row in reading]) for name in METRICS},
    )


def _quartiles(values: Sequence[float | None]) -> tuple[float, float, float] | None:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    low, middle, high = np.quantile(numbers, (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


def _index_by_head(rows: Sequence[Row]) -> dict[tuple[str, int, int], Row]:
    return {(row["kind"], row["layer"], row["head"]): row for row in rows}


def _change(label: str, key: tuple[str, int, int], before: Row, after: Row) -> Change:
    numbers = {
        name: (a, b)
        for name in METRICS
        if (a := number(before, name)) is not None and (b := number(after, name)) is not None
    }
    size = max((abs(numbers[name][1] - numbers[name][0]) for name in CHANGE_METRICS if name in numbers), default=0.0)
    kind, layer, head = key
    return Change(
        label=label,
        kind=kind,
        layer=layer,
        head=head,
        verdicts=(before["verdict"], after["verdict"]),
        numbers=numbers,
        size=size if math.isfinite(size) else 0.0,
    )


def _notes(runs: Mapping[str, Analysis], sides: Sequence[Side], matched: Mapping[str, Any]) -> list[str]:
    first, *others = runs
    notes = [
        f"{label} has other layers or heads than {first}, so only the distributions over heads are compared"
        for label in others
        if label not in matched
    ]
    if len({side.longest for side in sides}) > 1:
        lengths = ", ".join(f"{side.label} {side.longest:,}" for side in sides)
        notes.append(f"the longest rows differ ({lengths} keys); entropy, effective keys and gap depend on the length")
    texts = {label: frozenset(text["sha256"] for text in run.manifest["texts"]) for label, run in runs.items()}
    if len(set(texts.values())) > 1:
        notes.append("the texts differ, so that differences between heads may come from the texts")
    if any(run.thresholds != runs[first].thresholds for run in runs.values()):
        notes.append("the thresholds differ. To judge all sides by the same ones, pass --threshold")
    for section, name, difference in (
        ("settings", "rows", "the measured rows differ"),
        ("settings", "metrics", "the metric groups differ"),
        ("model", "dtype", "the dtype differs"),
        ("model", "device", "the device differs"),
    ):
        values = {label: _text_or_differs(run.manifest[section].get(name)) for label, run in runs.items()}
        if len(set(values.values())) > 1:
            notes.append(f"{difference}: {', '.join(f'{label} {value}' for label, value in values.items())}")
    return notes


def _text_or_differs(value: Any) -> str:
    """Format a value of the manifest; None means that it differs between merged runs."""
    if value is None:
        return "several"
    return " + ".join(value) if isinstance(value, list) else str(value)


Head = tuple[str, int, int]


@dataclass(frozen=True, kw_only=True)
class Stability:
    runs: int
    heads: int
    windows: int  # of each run, the most of any
    length: int  # tokens of a window, the longest of any
    judged: int  # in at least one run
    kept: int  # of these, contradicted by no run
    same: int  # of these, with the same verdict in every run
    again: float  # over pairs of runs, see above
    uncontradicted: float  # over pairs of runs, see above
    undecided: float  # heads per run, on average
    one_window: int  # heads that would keep their verdict if each run were judged by its first window alone
    changing: dict[str, dict[str, int]]  # "kind layer head" -> verdict -> runs, of heads that do not keep theirs

    @property
    def rate(self) -> float:
        return self.kept / self.judged if self.judged else float("nan")

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; a rate is None if no head was judged."""
        plain = {**asdict(self), "rate": self.rate}
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value for name, value in plain.items()
        }


def passages(content: str, count: int) -> dict[str, str]:
    """Equal parts of a text, in its order, each cut at a space."""
    if count < 1 or len(content) < 2 * count:
        least = 2 * max(count, 1)
        raise ValueError(
            f"expected a text of at least {least} characters for {count} passages, got {len(content)} "
            "characters. Use a longer text or fewer passages."
        )
    edges = [0]
    for index in range(1, count):
        target = index * len(content) // count
        space = content.find(" ", target)
        edges.append(target if space < 0 else space + 1)
    edges.append(len(content))
    return {f"passage {n + 1} of {count}": content[edges[n] : edges[n + 1]] for n in range(count)}


def stability(runs: Mapping[str, Analysis]) -> Stability:
    """Compare the verdicts of several analyses of one model, given by name."""
    if len(runs) < 2:
        raise ValueError(f"expected at least two runs to compare, got {len(runs)}. Pass more runs.")
    verdicts = [_verdicts(run) for run in runs.values()]
    common = set.intersection(*(set(run_verdicts) for run_verdicts in verdicts))
    verdicts_by_head = {head: [run_verdicts[head] for run_verdicts in verdicts] for head in sorted(common)}
    decided = {
        head: {name for name in names if name not in (UNDECIDED, None)} for head, names in verdicts_by_head.items()
    }
    judged = [head for head, names in decided.items() if names]
    kept = [head for head in judged if len(decided[head]) == 1]
    first = [_first_windows(run) for run in runs.values()]
    again, uncontradicted = _agreement_over_pairs(list(verdicts_by_head.values()), len(runs))
    return Stability(
        runs=len(runs),
        heads=len(verdicts_by_head),
        windows=max((text.get("windows") or 1 for run in runs.values() for text in run.manifest["texts"]), default=1),
        length=max((row["length"] or 0 for run in runs.values() for row in head_rows(run.heads)), default=0),
        judged=len(judged),
        kept=len(kept),
        same=sum(len(set(verdicts_by_head[head])) == 1 for head in kept),
        again=again,
        uncontradicted=uncontradicted,
        undecided=sum(names.count(UNDECIDED) for names in verdicts_by_head.values()) / len(runs),
        one_window=sum(len({window_verdicts.get(head) for window_verdicts in first}) == 1 for head in verdicts_by_head),
        changing={
            f"{kind} layer {layer} head {head}": dict(
                Counter(str(name) for name in verdicts_by_head[kind, layer, head])
            )
            for kind, layer, head in judged
            if len(decided[kind, layer, head]) > 1
        },
    )


def same_numbers(run: Analysis, window: Analysis) -> bool:
    """Whether a run of one window gives the numbers that this window has in `run`, bit for bit."""
    columns = ["kind", "layer", "head", "start", *WINDOW_NUMBERS]
    run_rows, window_rows = (
        {(row["start"], head_id(row)): row for row in analysis.windows.select(columns).to_pylist()}
        for analysis in (run, window)
    )
    return bool(window_rows) and all(
        str(run_rows.get(key)) == str(row) for key, row in window_rows.items()
    )  # NaN equals NaN as text


def _agreement_over_pairs(verdicts: list[list[str | None]], runs: int) -> tuple[float, float]:
    """`again` and `uncontradicted`: over ordered pairs of runs, the first of which judges the head."""
    pairs = [
        (names[first], names[second])
        for names in verdicts
        for first in range(runs)
        for second in range(runs)
        if first != second and names[first] not in (UNDECIDED, None)
    ]
    if not pairs:
        return float("nan"), float("nan")
    alike = sum(a == b for a, b in pairs)
    return alike / len(pairs), (alike + sum(b == UNDECIDED for _, b in pairs)) / len(pairs)


def _verdicts(run: Analysis) -> dict[Head, str | None]:
    heads, _ = representative_rows(head_rows(run.heads))
    return {head_id(row): row["verdict"] for row in heads}


def _first_windows(run: Analysis) -> dict[Head, str | None]:
    rows = run.windows.select(
        ["text", "length", "normalizer", "kind", "layer", "head", "window", "verdict"]
    ).to_pylist()
    longest = max((row["length"] for row in rows), default=0)
    return {
        head_id(row): row["verdict"]
        for row in rows
        if row["window"] == 0 and row["length"] == longest and row["normalizer"] == "model"
    }
