"""A run whose output is a file reports within a part, not only after it."""

from dataclasses import replace

import pytest

from attnorm.analysis.parts import AnalysisProgress
from attnorm.cli import progress


def test_a_log_gets_a_line_within_a_part_once_enough_time_has_passed(capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    log = progress._Log(progress.Watch(lambda: clock[0]), lambda: clock[0])
    state = AnalysisProgress(
        parts_done=0, parts_total=2, tokens_done=0, tokens_total=300, text="t", length=100, layers_done=0,
        layers_total=12,
    )  # fmt: skip
    log.see(state)
    for layer in range(1, 13):
        clock[0] += progress.LOG_SECONDS / 4
        log.see(replace(state, layers_done=layer))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(";")[0] for line in lines] == [
        f"part 1 of 2, 100 tokens, layer {layer}/12" for layer in (4, 8, 12)
    ]
    assert all("left" in line for line in lines)
    log.see(replace(state, parts_done=1, tokens_done=100, layers_done=12))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("part 1 of 2, t at 100 tokens: measured")
