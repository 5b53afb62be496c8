"""A run whose output is a file reports within a part, not only after it."""

from dataclasses import replace

import pytest

from attnorm.analysis.analyze import AnalysisProgress
from attnorm.cli import output


def test_a_log_gets_a_line_within_a_part_once_enough_time_has_passed(capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    log = output.AnalysisBar(output.ProgressBar(now=lambda: clock[0]))
    state = AnalysisProgress(
        parts_done=0, parts_total=2, tokens_done=0, tokens_total=300, text="t", length=100, layers_done=0,
        layers_total=12,
    )  # fmt: skip
    log(state)
    for layer in range(1, 13):
        clock[0] += output.LOG_SECONDS / 4
        log(replace(state, layers_done=layer))
    first, *lines = capsys.readouterr().err.splitlines()
    assert first.startswith("measuring: 0%, part 1 of 2, 100 tokens, layer 0/12")
    assert [line.split(", ")[3] for line in lines] == [f"layer {layer}/12" for layer in (4, 8, 12)]
    assert lines[0].startswith("measuring: 11%")
    assert lines[0].endswith("1 tokens/s, 240 s left") or lines[0].endswith("4 min left")
    log(replace(state, parts_done=1, tokens_done=100, layers_done=12))
    (line,) = capsys.readouterr().err.splitlines()
    assert "part 1 of 2, 100 tokens, t, measured" in line


def test_parts_and_layers_of_an_earlier_run_take_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    log = output.AnalysisBar(output.ProgressBar(now=lambda: clock[0]))
    start = AnalysisProgress(0, 3, 0, 300, "a text", 100, 0, 10)
    log(start)
    log(replace(start, parts_done=1, tokens_done=100, resumed=True))
    capsys.readouterr()
    clock[0] = output.LOG_SECONDS
    log(replace(start, parts_done=1, tokens_done=100, layers_done=5, layers_found=2))
    (line,) = capsys.readouterr().err.splitlines()
    assert "50%" in line
    assert "1 tokens/s, 150 s left" in line or "1 tokens/s, 2 min left" in line, "30 tokens in 30 s; 150 are left"


def test_a_log_gets_a_line_at_the_start_at_the_end_and_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    with output.ProgressBar() as bar:
        for step in range(5):
            bar("training", step, 4, detail=f"loss {step}", left="", log=step == 2)
        bar("measured one")
        bar("measured one")
        bar("searching", 0.25, 1.0)
    assert capsys.readouterr().err.splitlines() == [
        "training: 0 of 4, loss 0", "training: 2 of 4, loss 2", "training: 4 of 4, loss 4", "measured one",
        "searching: 25%",
    ]  # fmt: skip
