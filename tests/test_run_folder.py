"""A folder belongs to one run, and one process at a time works on one thing."""

import subprocess
import sys
from pathlib import Path

import pytest

from attnorm.provenance import file_hash, settings_hash
from attnorm.run_folder import (
    differences,
    lock,
    make_writable,
    read_record,
    require_folder,
    require_only,
    require_same_run,
    try_lock,
)
from attnorm.text import did_you_mean


def test_a_folder_may_be_new_empty_or_of_the_same_kind(tmp_path: Path) -> None:
    require_only(tmp_path / "new", (), "something")
    (tmp_path / ".hidden").touch()
    require_only(tmp_path, (), "something")
    (tmp_path / "records.jsonl").touch()
    require_only(tmp_path, {"records.jsonl"}, "something")
    with pytest.raises(ValueError, match="contains something"):
        require_only(tmp_path, (), "something")
    for check in (require_folder, make_writable):
        with pytest.raises(ValueError, match="got the file"):
            check(tmp_path / "records.jsonl")
    make_writable(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_settings_that_differ_are_named_and_equal_ones_are_not() -> None:
    here = {"seed": 1, "text": "a.txt", "only_here": 3}
    there = {"seed": 0, "text": "a.txt", "only_there": None}
    assert differences(here, there) == ["seed is 1 here and 0 there", "only_here is 3 here and None there"]
    assert differences({"text": [1]}, {"text": [2]}, lambda value: "a.txt") == [
        "text is a.txt here and there, but with another content"
    ]
    require_same_run(here, dict(here), "out contains another run", "Remedy")
    with pytest.raises(ValueError, match=r"^out\b.*seed.*\b1\b.*\b0\b.*Remedy\.$"):
        require_same_run(here, there, "out contains another run", "Remedy")


@pytest.mark.parametrize(
    "content", ["{", "[]", "3", '"run"', '{"other": 1}', '{"run": 3}', '{"run": {}, "manifest": 3}']
)
def test_a_damaged_record_is_an_error_and_a_missing_one_is_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "record.json"
    assert read_record(path, ("run",), "remove it") is None
    path.write_text('{"run": {"seed": 0}}')
    assert read_record(path, ("run",), "remove it") == {"run": {"seed": 0}}
    path.write_text(content)
    with pytest.raises(ValueError, match=r"record.json.*remove it"):
        read_record(path, ("run",), "remove it")


TRY_LOCK = """
import sys
from pathlib import Path
from attnorm.run_folder import try_lock
for _ in sys.stdin:
    with try_lock(Path(sys.argv[1])) as mine:
        print(mine, flush=True)
"""


def test_a_lock_excludes_other_processes_and_ends_with_its_block(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "work.lock"
    command = [sys.executable, "-c", TRY_LOCK, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:

        def other_process_gets_it() -> bool:
            print(file=other.stdin, flush=True)
            return {"True\n": True, "False\n": False}[other.stdout.readline()]

        with lock(path):
            assert not other_process_gets_it()
            with try_lock(path) as mine:
                assert not mine
            with pytest.raises(TimeoutError), lock(path, timeout=0):
                pass
        with try_lock(path) as mine:
            assert mine
        assert other_process_gets_it()


def test_an_error_inside_a_lock_is_not_taken_for_a_lock_that_is_held(tmp_path: Path) -> None:
    def fail() -> None:
        raise TimeoutError("inside")

    with pytest.raises(TimeoutError, match="inside"), try_lock(tmp_path / "a.lock"):
        fail()


def test_hashes_depend_on_content_alone(tmp_path: Path) -> None:
    assert settings_hash({"a": 1, "b": [2]}) == settings_hash({"b": [2], "a": 1}) != settings_hash({"a": 1, "b": [3]})
    for name in ("one", "two"):
        (tmp_path / name).write_text("same")
    assert file_hash(tmp_path / "one") == file_hash(tmp_path / "two")
    with pytest.raises(ValueError, match="cannot read"):
        file_hash(tmp_path / "three")


def test_unknown_names_get_the_closest_known_one_or_all() -> None:
    assert did_you_mean("sofmax", ["softmax", "ssmax"]) == "did you mean 'softmax'?"
    assert did_you_mean("xyz", ["a", "b"]) == "known are 'a', 'b'"
