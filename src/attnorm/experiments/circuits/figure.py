"""The figure: weight and gap of the right key against the number of keys, and what other normalizers keep."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnorm.experiments.experiment import Floats
from attnorm.experiments.figure_style import CORRECTED, MEASURED, NULL, PALE, PRINTED, letter, note, tidy

LOOKS: dict[str, dict[str, Any]] = {"induction": CORRECTED, "previous_token": PRINTED, "retrieval": MEASURED}
WORDS = {"induction": "induction", "previous_token": "previous token", "retrieval": "retrieval"}
WHAT_IF_LOOKS: dict[str, dict[str, Any]] = {
    "model": MEASURED,
    "ssmax": CORRECTED,
    "log_scaled": {**NULL, "color": "#3b8f5a"},
    "entmax15": PRINTED,
    "hard": {**NULL, "color": "#7a4fa3", "marker": "x", "linestyle": ":"},
}
ROOM = {"left": 0.075, "right": 0.97, "top": 0.94, "bottom": 0.115, "wspace": 0.24, "hspace": 0.42}


class Curve(Protocol):
    """What the figure reads of a NamedHead."""

    @property
    def circuit(self) -> str: ...
    @property
    def n(self) -> Floats: ...
    @property
    def gap(self) -> Floats: ...
    @property
    def weights(self) -> Mapping[str, Floats]: ...


def figure(heads: Sequence[Curve], about: str) -> Figure:
    drawing = Figure(figsize=(8.8, 6.6), facecolor="white")
    panels = drawing.subplots(2, 2, gridspec_kw=ROOM)
    _weights(panels[0, 0], heads)
    _gaps(panels[0, 1], heads)
    _sharp(panels[1, 0], heads)
    _kept(panels[1, 1], heads)
    note(drawing, f"{about}; every line is a head with at least 0.3 of the weight on its key at some length")
    return drawing


def _by_circuit(heads: Sequence[Curve]) -> dict[str, list[Curve]]:
    found = {name: [head for head in heads if head.circuit == name] for name in LOOKS}
    return {name: own for name, own in found.items() if own}


def _weights(axes: Axes, heads: Sequence[Curve]) -> None:
    for name, own in _by_circuit(heads).items():
        for head in own:
            axes.plot(head.n, head.weights["model"], color=LOOKS[name]["color"], linewidth=0.7, alpha=0.35)
        middle = np.median([head.weights["model"] for head in own], axis=0)
        axes.plot(own[0].n, middle, **LOOKS[name], label=f"{WORDS[name]}, median of {len(own)}")
    axes.axhline(0.5, color=PALE, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_ylim(0, 1.25)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.set_ylabel("weight on the right key")
    _against_keys(axes)
    letter(axes, "a", "As the model runs; dashed: sharp")
    axes.legend(loc="upper left", fontsize=7, ncols=2) if heads else None


def _gaps(axes: Axes, heads: Sequence[Curve]) -> None:
    for name, own in _by_circuit(heads).items():
        gaps = np.array([head.gap for head in own])
        axes.plot(own[0].n, np.median(gaps, axis=0), **LOOKS[name], label=WORDS[name])
        low, high = np.quantile(gaps, (0.25, 0.75), axis=0)
        axes.fill_between(own[0].n, low, high, color=LOOKS[name]["color"], alpha=0.12, linewidth=0)
    if heads:
        n = heads[0].n
        axes.plot(n, np.log(n - 1), color=PALE, linestyle=(0, (4, 3)), linewidth=1, label="half of the weight")
        axes.legend(loc="upper left", fontsize=7, ncols=2)
        axes.set_ylim(top=axes.get_ylim()[1] + 2)
    axes.set_ylabel("gap of the right key, nats")
    _against_keys(axes)
    letter(axes, "b", "A constant gap falls below the dashed line")


def _sharp(axes: Axes, heads: Sequence[Curve]) -> None:
    names = list(heads[0].weights) if heads else []
    for name in names:
        sharp = np.mean([head.weights[name] >= 0.5 for head in heads], axis=0)
        axes.plot(heads[0].n, sharp, **WHAT_IF_LOOKS.get(name, NULL), label=_label(name))
    axes.set_ylim(0, 1.25)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.set_ylabel("share of these heads that are sharp")
    _against_keys(axes)
    letter(axes, "c", "Other normalizers on the same logits")
    axes.legend(loc="upper left", fontsize=7, ncols=3) if names else None


def _kept(axes: Axes, heads: Sequence[Curve]) -> None:
    for name, own in _by_circuit(heads).items():
        look = {key: value for key, value in LOOKS[name].items() if key not in ("linestyle", "linewidth")}
        first, last = ([head.weights["model"][index] for head in own] for index in (0, -1))
        axes.plot(first, last, **{**look, "markersize": 5}, linestyle="none", label=WORDS[name])
    axes.plot([0, 1], [0, 1], color=PALE, linewidth=0.8)
    axes.axhline(0.5, color=PALE, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xlim(0, 1.02)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(f"weight on the right key, {heads[0].n[0]:.0f} keys" if heads else "weight, shortest length")
    axes.set_ylabel(f"... and at {heads[0].n[-1]:,.0f} keys" if heads else "weight, longest length")
    letter(axes, "d", "Below the diagonal: lost with length")
    axes.legend(loc="upper left", fontsize=7) if heads else None
    tidy(axes)


def _label(name: str) -> str:
    return "as the model runs" if name == "model" else name


def _against_keys(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("visible keys n")
    tidy(axes)
