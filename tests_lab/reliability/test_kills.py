"""kill -9 at a random moment loses nothing: the same command continues, and its result is that of a quiet run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests_lab.reliability.kills import (
    COMMANDS,
    Command,
    Runner,
    kill_and_resume,
    kill_in_the_middle,
    leftovers,
    started,
)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    log = tmp_path_factory.mktemp("kills") / "log.txt"
    with started(log) as one:
        yield one


@pytest.mark.slow
@pytest.mark.timeout(600)  # the first start imports the libraries; a busy machine is no failure
@pytest.mark.parametrize("name", ["evaluate"])  # the tests of analysis and training kill theirs; all commands at night
def test_a_command_killed_in_the_middle_gives_what_a_quiet_run_gives(name: str, runner: Runner, tmp_path: Path) -> None:
    tally = kill_in_the_middle(COMMANDS[name], runner, tmp_path)
    assert tally.kills == 1
    assert tally.lost == []
    assert tally.leftovers == 0


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_killed_in_the_middle_continues(name: str, runner: Runner, tmp_path: Path) -> None:
    tally = kill_in_the_middle(COMMANDS[name], runner, tmp_path)
    assert (tally.kills, tally.lost, tally.leftovers) == (1, [], 0)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", COMMANDS)
def test_many_kills_lose_nothing(name: str, runner: Runner, tmp_path: Path) -> None:
    tally = kill_and_resume(COMMANDS[name], runner, tmp_path, trials=20, kills=3, seed=1)
    assert tally.lost == []
    assert tally.leftovers == 0
    assert tally.kills >= 10  # the others come too late, as a continued run is shorter


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", COMMANDS)
def test_new_interpreters_as_a_user_starts_them(name: str, tmp_path: Path) -> None:
    with started(tmp_path / "log.txt", launcher=False) as runner:
        tally = kill_and_resume(COMMANDS[name], runner, tmp_path / "runs", trials=3, kills=2, seed=2)
    assert tally.lost == []


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
