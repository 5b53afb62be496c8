"""A stored number that changed on the disk is never read as another number: the file is named and made again."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from attnorm.analysis import analyze as analyze_module
from attnorm.analysis import store
from attnorm.analysis.result import Analysis
from attnorm.analysis.store import DamagedFileError
from attnorm.analysis.tables import Part
from tests.analysis.tables_of import tables
from tests.analysis.test_store import bits
from tests.analysis.tiny_models import llama

KEY = "k" * 64


def flipped(path: Path, count: int, seed: int = 0) -> list[bytes]:
    """The file with one bit flipped, at random places and in each of 16 regions."""
    content = path.read_bytes()
    chance = random.Random(seed)
    places = [chance.randrange(len(content)) for _ in range(count)]
    places += [len(content) * region // 16 for region in range(16)]
    damaged = []
    for place in places:
        changed = bytearray(content)
        changed[place] ^= 1 << chance.randrange(8)
        damaged.append(bytes(changed))
    return damaged


def each_damage(path: Path, count: int, read: Callable[[], object]) -> tuple[int, int]:
    """How many damages were noticed, and how many changed nothing that is read; any other fails."""
    whole, content = read(), path.read_bytes()
    noticed = harmless = 0
    for damaged in flipped(path, count):
        path.write_bytes(damaged)
        try:
            assert read() == whole
            harmless += 1
        except ValueError:
            noticed += 1
    path.write_bytes(content)
    assert read() == whole
    return noticed, harmless


def saved_part(folder: Path) -> Path:
    store.write_part(folder, Part(KEY, {"text": "t", "length": 16, "tokens": 16, "seconds": 0.1}, tables()))
    return folder / "parts" / KEY


def few_or_many(few: int, many: int) -> pytest.MarkDecorator:
    """How many bits are flipped: few on every commit, many in the nightly tests."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.nightly)])


@few_or_many(12, 1000)
@pytest.mark.parametrize("name", ["heads", "top_n", "sensitivity"])
def test_every_flipped_bit_of_a_finished_part_is_noticed(tmp_path: Path, name: str, count: int) -> None:
    part = saved_part(tmp_path)

    def read() -> object:
        found = store.read_part(tmp_path, KEY)
        assert found is not None
        return bits(found.tables)

    _, harmless = each_damage(part / f"{name}.parquet", count, read)
    assert harmless == 0


@few_or_many(200, 1000)
def test_a_flipped_bit_of_part_json_changes_no_number(tmp_path: Path, count: int) -> None:
    part = saved_part(tmp_path)

    def read() -> object:
        found = store.read_part(tmp_path, KEY)
        assert found is not None
        return bits(found.tables), {name: found.about.get(name) for name in ("key", "text", "length", "tokens")}

    noticed, harmless = each_damage(part / "part.json", count, read)
    assert noticed > harmless


def test_a_run_that_is_damaged_names_the_file_with_both_digests_and_is_made_again(tmp_path: Path) -> None:
    model, text = llama(), list(range(1, 60))
    run = tmp_path / "run"

    def measure() -> Analysis:
        return analyze_module.analyze(model, text, lengths=(48,), metrics="core", out=run)

    whole = bits(measure().tables)
    table = run / "heads.parquet"
    noticed, harmless = each_damage(table, 60, lambda: bits(Analysis.load(run).tables))
    assert (noticed, harmless) == (76, 0)
    table.write_bytes(flipped(table, 1)[0])
    expected = json.loads((run / "manifest.json").read_text())["digests"]["heads"]
    with pytest.raises(DamagedFileError, match=rf"heads\.parquet.*{expected}.*[0-9a-f]{{64}}"):
        Analysis.load(run)
    with pytest.warns(UserWarning, match=r"heads\.parquet"):
        assert bits(measure().tables) == whole
    assert bits(Analysis.load(run).tables) == whole

    # A damaged part of a run that was interrupted is measured again.
    (part,) = (run / "parts").iterdir()
    (part / "heads.parquet").write_bytes(flipped(part / "heads.parquet", 1)[0])
    manifest = json.loads((run / "manifest.json").read_text())
    del manifest["sha256"]
    (run / "manifest.json").write_text(json.dumps({**manifest, "finished": False}))
    with pytest.warns(UserWarning, match=r"heads\.parquet.*measured again"):
        assert bits(measure().tables) == whole
    assert store.read_part(run, part.name) is not None


@few_or_many(150, 1000)
def test_a_flipped_bit_of_the_manifest_changes_nothing_that_is_read(tmp_path: Path, count: int) -> None:
    run = tmp_path / "run"
    analyze_module.analyze(llama(), list(range(1, 40)), lengths=(32,), metrics="core", out=run)

    def read() -> object:
        found = Analysis.load(run)
        return bits(found.tables), {name: found.manifest.get(name) for name in ("model", "settings", "parts", "texts")}

    noticed, harmless = each_damage(run / "manifest.json", count, read)
    assert noticed > 10 * harmless


def test_folders_without_digests_are_read_as_before(tmp_path: Path) -> None:
    part = saved_part(tmp_path)
    about = json.loads((part / "part.json").read_text())
    del about["digests"], about["sha256"]
    (part / "part.json").write_text(json.dumps(about))
    found = store.read_part(tmp_path, KEY)
    assert found is not None
    assert bits(found.tables) == bits(tables())
