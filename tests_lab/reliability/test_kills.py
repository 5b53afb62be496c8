"""kill -9 at a random moment loses nothing: the same command continues, and its result is that of a quiet run."""

from pathlib import Path

import pytest

from tests_lab.reliability.kills import COMMANDS, Command, Runner, kill_and_resume, kill_in_the_middle, leftovers


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path / "log.txt")


@pytest.mark.nightly  # on every commit the tests of analysis and training kill theirs
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_killed_in_the_middle_continues(name: str, runner: Runner, tmp_path: Path) -> None:
    tally = kill_in_the_middle(COMMANDS[name], runner, tmp_path)
    assert (tally.kills, tally.lost, tally.leftovers) == (1, [], 0)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", COMMANDS)
def test_many_kills_lose_nothing(name: str, runner: Runner, tmp_path: Path) -> None:
    tally = kill_and_resume(COMMANDS[name], runner, tmp_path, trials=5, kills=3, seed=1)
    assert tally.lost == []
    assert tally.leftovers == 0
    assert tally.kills >= 5  # the others come too late, as a continued run is shorter


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_comparison_notices_what_is_lost(runner: Runner, tmp_path: Path) -> None:
    """A command whose result is never twice the same, and one whose result cannot be read."""
    different = Command("different", lambda *_: ["normalizers"], lambda folder: str(folder), begun="")
    assert "differs" in kill_and_resume(different, runner, tmp_path / "a", trials=1, kills=0, seed=0).lost[0]

    def unreadable(folder: Path) -> str:
        if folder.name != "quiet":
            raise ValueError("damaged")
        return ""

    broken = Command("broken", lambda *_: ["normalizers"], unreadable, begun="")
    assert "cannot be read" in kill_and_resume(broken, runner, tmp_path / "b", trials=1, kills=0, seed=0).lost[0]


def test_drafts_of_killed_processes_are_counted_and_locks_are_not(tmp_path: Path) -> None:
    draft = tmp_path / "parts" / ".fig1.123.tmp"
    draft.mkdir(parents=True)
    (tmp_path / ".lock").touch()
    assert leftovers(tmp_path) == [draft]
