"""The frame of the experiments: what is written, what is not run again, what is refused, and in which words."""

import base64
import contextlib
import hashlib
import html
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pyarrow.parquet as pq
import pytest

from attnorm_lab.cli import reproduce as command
from attnorm_lab.experiments import catalogue, run
from attnorm_lab.experiments.experiment import (
    ExperimentFinding,
    ExperimentSubject,
    Outcome,
    Verdict,
    combine_verdicts,
    without_verdicts,
)
from attnorm_lab.experiments.run import render_index, reproduce
from tests_lab.experiments.toy_experiments import Toy

SUBJECT = ExperimentSubject(quick=True)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    return Toy(takes={**catalogue.ONE_OF_EACH, catalogue.ONLY: None}).enter(monkeypatch)


def test_every_verdict_has_a_color_on_the_page_and_in_the_terminal() -> None:
    assert set(run.MARKS) == set(command._COLORS) == set(get_args(Verdict))


@pytest.mark.parametrize(
    ("verdicts", "combined"),
    [
        (["reproduces", "not decided", "not tested"], "reproduces"),
        (["reproduces", "does not"], "partly"),
        (["not tested", "not decided"], "not decided"),
        (["not tested"], "not tested"),
    ],
)
def test_models_without_a_decision_do_not_count(verdicts: list[Verdict], combined: Verdict) -> None:
    assert combine_verdicts(verdicts) == combined


def test_a_quick_run_keeps_its_numbers_and_has_no_verdicts() -> None:
    full = Outcome("Done.", (ExperimentFinding("claim", "4.1", "reproduces", "because"),), {}, {}, {"seed": 3})
    quick = without_verdicts(full)
    assert quick.findings == (ExperimentFinding("claim", "4.1", "not tested", "too small to judge"),)
    assert quick.summary.startswith("Done. ")
    assert quick.parameters == full.parameters


def test_every_form_of_figures_and_tables_is_written_with_verdict_and_manifest(toy: Toy, tmp_path: Path) -> None:
    (written,) = reproduce(["toy"], SUBJECT, tmp_path, command="attnorm lab reproduce toy")
    files = {path.name for path in (tmp_path / "toy").iterdir()}
    pictures, tables = {f"picture.{s}" for s in ("svg", "png", "pdf")}, {"numbers.csv", "numbers.parquet"}
    assert files == {*pictures, *tables, "verdict.md", "outcome.json"}
    assert pq.read_table(tmp_path / "toy" / "numbers.parquet")["head"].to_pylist() == [0, 1]
    record = json.loads((tmp_path / "toy" / "outcome.json").read_text())
    assert record == written.record
    assert record["findings"][0]["verdict"] == "does not"
    assert record["parameters"] == {"missing": None}
    assert record["manifest"]["command"] == "attnorm lab reproduce toy"
    assert record["manifest"]["versions"]["attnorm"]
    assert "a \\| b <i> | 1 of 2 | does not | because |" in (tmp_path / "toy" / "verdict.md").read_text()


def test_figures_are_the_same_bytes_when_drawn_again(toy: Toy, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        toy.runs = 0
        reproduce(["toy"], SUBJECT, tmp_path / folder)
    for suffix in ("svg", "png", "pdf"):
        one, two = ((tmp_path / folder / "toy" / f"picture.{suffix}").read_bytes() for folder in ("one", "two"))
        assert one == two, suffix


def test_what_is_finished_is_not_run_again_unless_asked(toy: Toy, tmp_path: Path) -> None:
    reproduce(["toy"], SUBJECT, tmp_path)
    (again,) = reproduce(["toy", "toy"], SUBJECT, tmp_path)
    assert toy.runs == 1
    assert again.found
    assert [finding["claim"] for finding in again.findings] == ["a | b <i>", "c"]
    (fresh,) = reproduce(["toy"], SUBJECT, tmp_path, fresh=True)
    assert toy.runs == 2
    assert not fresh.found


def test_another_version_of_attnorm_runs_it_again(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reproduce(["toy"], SUBJECT, tmp_path)
    monkeypatch.setattr(run, "versions", lambda: {"attnorm": "99"})
    reproduce(["toy"], SUBJECT, tmp_path)
    assert toy.runs == 2


@pytest.mark.parametrize(
    ("change", "difference"),
    [({"quick": False}, "quick is False here and True there"), ({"seed": 3}, "seed is 3 here and 0 there"),
     ({"only": ("softmax",)}, "only is softmax here and none there")],
)  # fmt: skip
def test_results_of_other_settings_are_never_overwritten_silently(
    toy: Toy, tmp_path: Path, change: dict[str, object], difference: str
) -> None:
    reproduce(["toy"], SUBJECT, tmp_path)
    with pytest.raises(ValueError, match=r"--out.*--fresh") as refused:
        reproduce(["toy"], replace(SUBJECT, **change), tmp_path)
    assert difference in str(refused.value)
    assert toy.runs == 1
    reproduce(["toy"], replace(SUBJECT, **change), tmp_path, fresh=True)
    assert toy.runs == 2


def test_a_change_of_the_text_is_seen(toy: Toy, tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("one two three")
    subject = replace(SUBJECT, texts=(text,))
    reproduce(["toy"], subject, tmp_path / "out")
    text.write_text("one two four")
    from attnorm_lab.experiments import experiment as module

    module._passages.cache_clear()
    with pytest.raises(ValueError, match=r"book\.txt.*content"):
        reproduce(["toy"], subject, tmp_path / "out")


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_experiment_that_fails_leaves_nothing_half_written(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Toy("good").enter(monkeypatch)
    Toy("bad", fails=error).enter(monkeypatch)
    with pytest.raises(type(error)):
        reproduce(["good", "bad"], SUBJECT, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "index.html"]


def test_temporary_folders_of_killed_processes_are_removed(toy: Toy, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    killed, at_work = tmp_path / f".fig1.{ended.pid}.tmp", tmp_path / f".fig1.{os.getppid()}.tmp"
    for draft in (killed, at_work):
        draft.mkdir()
        (draft / "picture.svg").touch()
    reproduce(["toy"], SUBJECT, tmp_path)
    assert not killed.exists()
    assert at_work.is_dir()


def test_parts_have_a_folder_by_what_decides_them_and_fresh_clears_it(toy: Toy, tmp_path: Path) -> None:
    reproduce(["toy"], SUBJECT, tmp_path)
    first = toy.parts[-1]
    assert first.parent == tmp_path / "parts"
    first.mkdir(parents=True)
    (first / "half").write_text("done")
    reproduce(["toy"], replace(SUBJECT, only=("softmax",)), tmp_path, fresh=True)
    assert toy.parts[-1] == first  # a choice among the parts shares them
    assert not first.exists()
    reproduce(["toy"], replace(SUBJECT, seed=1), tmp_path, fresh=True)
    assert toy.parts[-1] != first


def test_the_index_page_shows_everything_in_the_folder_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        Toy(name).enter(monkeypatch)
        reproduce([name], SUBJECT, tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert page.index('id="one"') < page.index('id="two"')
    for link in ("one/picture.svg", "two/picture.pdf", "one/numbers.csv", "two/numbers.parquet", "one/verdict.md"):
        assert f'"{link}"' in page
        assert (tmp_path / link).is_file()
    assert "It &lt;b&gt;is&lt;/b&gt; so." in page
    assert "2 does not" in page
    assert "2 reproduces" in page
    assert "<script" not in page
    assert "default-src &#39;none&#39;" in page


def test_the_policy_of_the_index_page_lets_its_own_style_in() -> None:
    page = render_index([])
    style = page.split("<style>")[1].split("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"sha256-{digest}" in html.unescape(page)


def test_a_folder_that_cannot_be_written_is_told_before_anything_runs(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--out"):
        reproduce(["toy"], SUBJECT, tmp_path / "file" / "below")
    assert toy.runs == 0


def test_a_damaged_record_is_named_and_replaced_by_fresh(toy: Toy, tmp_path: Path) -> None:
    reproduce(["toy"], SUBJECT, tmp_path)
    for content in ("{", "[]", "{}"):
        (tmp_path / "toy" / "outcome.json").write_text(content)
        with pytest.raises(ValueError, match=r"outcome\.json.*--fresh"):
            reproduce(["toy"], SUBJECT, tmp_path)
    reproduce(["toy"], SUBJECT, tmp_path, fresh=True)
    assert toy.runs == 2


@pytest.mark.parametrize("name", ["notes.txt", "mine.png", "more"])
@pytest.mark.parametrize("change", [{}, {"seed": 1}], ids=str)
def test_files_of_someone_else_among_the_results_are_kept(
    name: str, change: dict[str, int], toy: Toy, tmp_path: Path
) -> None:
    reproduce(["toy"], SUBJECT, tmp_path)
    foreign = tmp_path / "toy" / name
    foreign.mkdir() if name == "more" else foreign.write_text("mine")
    with pytest.raises(ValueError, match=rf"{foreign.name}.*--out"):
        reproduce(["toy"], replace(SUBJECT, **change), tmp_path, fresh=True)
    assert foreign.exists()
    assert toy.runs == 1


def test_a_folder_of_someone_else_is_not_taken(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=str(tmp_path / "toy")):
        reproduce(["toy"], SUBJECT, tmp_path)
    with pytest.raises(ValueError, match=r"thesis\.txt"):
        reproduce(["toy"], SUBJECT, tmp_path, fresh=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=str(tmp_path / "file")):
        reproduce(["toy"], SUBJECT, tmp_path / "file")
    assert toy.runs == 0


def test_all_means_the_papers_and_leaves_out_what_trains() -> None:
    assert {"fig1", "fig2", "fig3", "fig4", "dispersion", "guidelines"} <= set(catalogue.PAPERS)
    assert not set(catalogue.PAPERS) & set(catalogue.TRAINED)


def test_names_are_checked_before_anything_runs(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"'fig22'.*'fig2'"):
        reproduce(["toy", "fig22"], SUBJECT, tmp_path)
    monkeypatch.setitem(catalogue.EXPERIMENTS, "gone", catalogue.ExperimentEntry("attnorm_lab.experiments.gone", ""))
    with pytest.raises(ValueError, match="'gone'"):
        reproduce(["toy", "gone"], SUBJECT, tmp_path)
    with pytest.raises(ValueError, match="expected an experiment, got none"):
        reproduce([], SUBJECT, tmp_path)
    assert toy.runs == 0


def test_several_models_are_refused_by_what_takes_one(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        Toy(name, needs_model=True).enter(monkeypatch)
    both = replace(SUBJECT, others=("somewhere/else",))
    with pytest.raises(ValueError, match=r"first, second.*bundled, somewhere/else") as error:
        reproduce(["first", "second", "spread"], both, tmp_path / "out")
    assert "spread" in str(error.value)
    assert not (tmp_path / "out").exists()
    assert toy.runs == 0


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["all"], {"only": ("softmax",)}, "--only .*gradients, guidelines.*softmax"),
        (["fig2"], {"valid": (Path("v.txt"),)}, r"--valid .*fig2.*v\.txt"),
        (["fig2"], {"longest": 16_384}, "--longest .*fig2.*16,384.*dispersion"),
        (["fig2", "dispersion"], {"longest": 16_384}, "--longest .*fig2"),
        (["dispersion"], {"longest": 4096}, "--quick.*--longest 4096"),
        (["retrieval"], {"texts": (Path("a.txt"),)}, r"--text .*retrieval.*a\.txt"),
        (["spread"], {"texts": (Path("a.txt"), Path("b.txt"))}, r"one text .*spread.*a\.txt, b\.txt"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused_before_anything_is_written(
    names: list[str], options: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        reproduce(names, replace(SUBJECT, **options), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_experiment_that_is_too_long_for_the_text_is_named_before_the_first_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.txt").write_text("It was the best of times, it was the worst of times. " * 4)
    subject = ExperimentSubject(texts=(tmp_path / "t.txt",))
    tokens = subject.tokens(10_000)
    short = Toy("short", needs_model=True, tokens=10).enter(monkeypatch)
    for name, fewest in (("long", 3000), ("longer", 4000)):
        Toy(name, needs_model=True, tokens=fewest).enter(monkeypatch)
    message = rf"long .*3,000 .*longer .*4,000 .*'t\.txt' .*{tokens} .*bundled.*--text.*short"
    with pytest.raises(ValueError, match=message):
        reproduce(["short", "long", "longer"], subject, tmp_path / "out")
    assert short.runs == 0
    assert not (tmp_path / "out").exists()
    Toy("little", needs_model=True, tokens=tokens + 1).enter(monkeypatch)
    with pytest.raises(ValueError, match="--quick"):
        reproduce(["little"], subject, tmp_path / "out")
    reproduce(["little"], replace(subject, quick=True), tmp_path / "out")


def test_the_error_of_a_short_model_has_its_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.txt").write_text("It was the best of times, it was the worst of times. " * 400)
    Toy("long", needs_model=True, tokens=2000).enter(monkeypatch)
    with pytest.raises(ValueError, match=r"bundled.*1,024"):
        reproduce(["long"], ExperimentSubject(texts=(tmp_path / "t.txt",)), tmp_path / "out")


def test_fig2_needs_three_lengths() -> None:
    assert catalogue.experiment("fig2").tokens == (128, 128)


def test_parts_that_nothing_needs_are_gone_after_success_and_what_is_finished_is_still_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = Toy(removes_parts=True).enter(monkeypatch)
    reproduce(["toy"], SUBJECT, tmp_path)
    assert not (tmp_path / "parts").exists()
    (again,) = reproduce(["toy"], SUBJECT, tmp_path)
    assert again.found
    assert toy.runs == 1
    (tmp_path / "parts" / "other").mkdir(parents=True)
    reproduce(["toy"], SUBJECT, tmp_path, fresh=True)
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["other"]


def test_another_second_model_is_another_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ExperimentSubject, "described", lambda self: {"name": self.model, "fingerprint": f"weights of {self.model}"}
    )
    one, two, alone = (ExperimentSubject(others=others).identity(with_model=True) for others in (("a",), ("b",), ()))
    assert one != two
    assert one["others"][0][:2] == ["a", "weights of a"]
    assert "others" not in alone


def test_one_model_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnorm_lab.experiments import experiment as module

    held_when_read = []
    monkeypatch.setattr(module, "_held", {("before", None): None})
    monkeypatch.setattr("attnorm.models.dispatch.check_observable", lambda model: None)
    monkeypatch.setattr("attnorm.models.load.load", lambda name, device: held_when_read.append(dict(module._held)))
    with contextlib.suppress(AttributeError):  # nothing was loaded, so there is nothing to observe
        ExperimentSubject(model="next").loaded()
    assert held_when_read == [{}]


def test_every_experiment_of_the_table_that_is_there_goes_by_its_own_name() -> None:
    for name in ("fig1", "fig2", "fig3"):
        found = catalogue.experiment(name)
        assert found.name == name
        assert found.question.endswith("?")


def test_the_error_of_a_short_text_has_its_length(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("It was the best of times.")
    with pytest.raises(ValueError, match=r"'short\.txt' has \d+ tokens .* at least 32.*--text"):
        ExperimentSubject(texts=(text,)).lengths((32, 64))


def test_lengths_stop_where_text_or_model_end() -> None:
    assert ExperimentSubject().lengths((4096, 64, 32, 1024, 2048)) == (32, 64, 1024)


def test_two_texts_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "t.txt").write_text("words")
    with pytest.raises(ValueError, match=r"'t\.txt'"):
        ExperimentSubject(texts=(tmp_path / "a" / "t.txt", tmp_path / "b" / "t.txt")).passages()


def test_a_text_that_is_not_utf8_is_told_where(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ValueError, match=r"UTF-8.*byte 3"):
        ExperimentSubject(texts=(tmp_path / "t.txt",)).passages()


def test_parameters_that_are_no_plain_values_are_refused() -> None:
    assert run._to_json(Path("/somewhere/book.txt")) == "book.txt"
    assert run._to_json(__import__("numpy").array([1.0, math.nan])) == [1.0, None]
    with pytest.raises(TypeError, match="plain values"):
        run._to_json(object())
