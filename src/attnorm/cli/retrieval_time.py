"""How long `train retrieval` still takes: from the pace of the training steps and of the test items so far."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from attnorm.cli.progress import duration

if TYPE_CHECKING:
    from attnorm.training.retrieval.run import RetrievalProgress


class TimeLeft:
    """Sees every report of a run; `words` is the estimate for all normalizers, or empty while nothing is known.

    A test takes time in proportion to its items. Until the first test size is finished, only training is estimated,
    and the words say so.
    """

    def __init__(self, sizes: Sequence[int], sets: int, now: Callable[[], float] = time.monotonic) -> None:
        from attnorm.training.retrieval.evaluate import sets_at

        self._items = [size * sets_at(size, sets) for size in sizes]
        self._now = now
        self._seconds = {"training": 0.0, "testing": 0.0}
        self._work = {"training": 0, "testing": 0}  # steps, items: done in this process
        self._steps = 0  # of one training
        self._last: RetrievalProgress | None = None
        self._at = now()

    def see(self, state: "RetrievalProgress") -> None:
        before, at = self._last, self._now()
        self._steps = state.total if state.stage == "training" else self._steps
        same = before is not None and (before.normalizer, before.stage) == (state.normalizer, state.stage)
        # The first steps after a start or a checkpoint are not timed: they hold compilation and loading.
        if before is not None and same and state.done > before.done and (before.done or state.stage == "testing"):
            self._work[state.stage] += self._amount(state) - self._amount(before)
            self._seconds[state.stage] += at - self._at
        self._last, self._at = state, at

    @property
    def words(self) -> str:
        if self._last is None:
            return ""
        training, testing = (self._left(self._last, stage) for stage in ("training", "testing"))
        if training is None:
            return ""
        if testing is None:
            return f"about {duration(training)} of training left, then tests"
        left = training + testing
        return f"about {duration(left)} left" if left else ""

    def _left(self, state: "RetrievalProgress", stage: str) -> float | None:
        """Seconds of that stage for all normalizers; None where its pace is not known."""
        whole = self._steps if stage == "training" else sum(self._items)
        if state.stage == stage:
            done = self._amount(state)
        else:
            done = whole if stage == "training" else 0
        remaining = whole - done + whole * (state.of - state.number)
        if not remaining:
            return 0.0
        return self._seconds[stage] / self._work[stage] * remaining if self._work[stage] else None

    def _amount(self, state: "RetrievalProgress") -> int:
        return state.done if state.stage == "training" else sum(self._items[: state.done])
