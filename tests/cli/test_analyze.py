"""attnorm analyze: a summary, files and an exit code for everything a run can come to."""

import errno
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

import attnorm
from attnorm.analysis import analyze as analysis_module
from attnorm.analysis import store
from attnorm.analysis.result import Analysis
from attnorm.cli import app
from attnorm.cli.analysis_options import texts_of
from attnorm.cli.output import duration, memory_words
from tests.cli.saved_model import save_model, save_text

runner = CliRunner()
QUICK = ["--lengths", "32", "--metrics", "core,gradient", "--threads", "1"]


def flat(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny-gpt")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text(tmp_path_factory.mktemp("texts") / "words.txt")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without --out writes its report to the current folder."""
    monkeypatch.chdir(tmp_path)


def run(model: Path, text: Path, *arguments: str) -> Result:
    return runner.invoke(app, ["analyze", str(model), "--text", str(text), *QUICK, *arguments])


def test_a_run_prints_its_verdict_and_leaves_tables_and_report(model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = runner.invoke(
        app,
        [
            "analyze", str(model), "--text", str(text), "--lengths", "24,32", "--normalizers", "model,entmax15",
            "--rows", "4", "--top-n", "1,5", "--vectors", "inputs", "--seed", "3", "--out", str(out),
        ],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "of 4 heads" in result.stdout
    assert "layer 1" in result.stdout
    assert f"report: {out / 'report.html'}" in result.stderr
    assert "<html" in (out / "report.html").read_text(encoding="utf-8")
    saved = Analysis.load(out)
    assert set(saved.heads["normalizer"].to_pylist()) == {"model", "entmax15"}
    assert set(saved.heads["length"].to_pylist()) == {24, 32}
    settings = saved.manifest["settings"]
    assert (settings["rows"], settings["top_n"], settings["vectors"], settings["seed"]) == (4, [1, 5], "inputs", 3)


def test_without_out_only_the_report_is_written_beside_the_user(model: Path, text: Path, tmp_path: Path) -> None:
    assert run(model, text).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["attnorm-tiny-gpt.html"]


def test_without_html_nothing_is_written(model: Path, text: Path, tmp_path: Path) -> None:
    assert run(model, text, "--no-html").exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_json_has_every_head_and_no_nan(model: Path, text: Path, tmp_path: Path) -> None:
    result = run(model, text, "--json")
    assert result.exit_code == 0, result.output

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads(result.stdout, parse_constant=refuse)
    assert len(found["heads"]) == 4
    assert sum(found["verdict"]["counts"].values()) == 4
    assert found["heads"][0]["evidence"]
    assert found["heads"][0]["mean_cosine"] is None, "a group that was not asked for"
    assert (found["folder"], found["report"]) == (None, None)
    assert list(tmp_path.iterdir()) == []


def test_without_arguments_the_bundled_model_and_the_default_text_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def stand_in(model: str, **options: Any) -> None:
        asked.update(options, model=model)
        raise ValueError("seen enough")

    monkeypatch.setattr(analysis_module, "analyze", stand_in)
    assert runner.invoke(app, ["analyze"]).exit_code == 2
    assert (asked["model"], asked.get("inputs"), asked.get("lengths"), asked["normalizers"]) == (
        "bundled",
        None,
        None,
        ["model"],
    )
    assert asked["trust_remote_code"] is False


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--lengths", "32,many"], "--lengths: .*'32,many'"),
        (["--lengths", "4"], "8 tokens, got 4"),
        (["--lengths", "65"], "64 tokens, got 65"),
        (["--rows", "some"], "--rows: .*'some'"),
        (["--rows", "0"], "rows: .*got 0"),
        (["--metrics", "vector"], "'vectors'"),
        (["--normalizers", "entmx15"], "entmax15"),
        (["--normalizers", "linear"], "'linear'"),
        (["--normalizers", "model,model"], "'model'"),
        (["--vectors", "keys"], "'keys'"),
        (["--top-n", "0"], r"top_n: .*got \(0,\)"),
        (["--threshold", "dispersed_entrop=0.9"], "'dispersed_entrop'.*'dispersed_entropy'"),
        (["--threshold", "dispersed_entropy=7"], "dispersed_entropy.*7"),
        (["--threads", "0"], "--threads"),
        (["--dtype", "float12"], "'float12'.*'float32'"),
        (["--dtype", "int8"], "'int8'.*'float32'"),
        (["--tokenizer", "./nowhere"], r"tokenizer.*'\./nowhere'"),
        (["--text", "no-such.txt"], r"no-such\.txt"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(
    model: Path, text: Path, arguments: list[str], complaint: str, tmp_path: Path
) -> None:
    result = run(model, text, *arguments, "--out", str(tmp_path / "run"))
    assert result.exit_code == 2, result.output
    assert re.search(complaint, flat(result.output))
    assert not (tmp_path / "run").exists()


def test_a_model_that_runs_a_mechanism_is_rejected(text: Path, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    attnorm.patch(model, "linear")
    attnorm.save_pretrained(model, folder)
    result = run(folder, text, "--out", str(tmp_path / "run"))
    assert result.exit_code == 2, result.output
    assert "'linear'" in flat(result.output)


def test_a_file_name_that_is_no_text_still_names_its_text(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/w\xffar.txt"))
    path.write_text("w1 w2")
    ((name, text),) = (texts_of([path]) or {}).items()
    assert name.encode().endswith(b"/w\\xffar.txt")
    assert text.file


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"", "empty"), (b"w1 w2", "got 2"), (b"w1 " * 20, "got 20"), (b"\xff\xfe\x00", "UTF-8")],
)
def test_a_text_that_cannot_serve_is_refused(model: Path, content: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    result = run(model, path)
    assert result.exit_code == 2, result.output
    assert complaint in flat(result.output)


@pytest.mark.parametrize("name", ["./no-such-folder", "a/b/c"])
def test_an_unknown_model_is_refused(name: str, text: Path) -> None:
    result = runner.invoke(app, ["analyze", name, "--text", str(text), *QUICK])
    assert result.exit_code == 2
    assert "there is no folder" in flat(result.output)


def test_a_folder_with_another_run_is_left_alone(model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(model, text, "--out", str(out)).exit_code == 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    result = run(model, text, "--out", str(out), "--seed", "9")
    assert result.exit_code == 2
    assert "another run (seed: 0 there, 9 here)" in flat(result.output)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_folder_that_cannot_be_made_is_named_with_the_reason(model: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = run(model, text, "--out", str(tmp_path / "file" / "run"))
    assert result.exit_code == 2
    assert "the output folder" in flat(result.output)
    assert "Not a directory" in flat(result.output)


def test_a_wrong_name_is_refused_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from attnorm.cli import app\n"
        "for wrong in (['--metrics', 'nonsense'], ['--normalizers', 'nonsense'], ['bundeled']):\n"
        "    result = CliRunner().invoke(app, ['analyze', *wrong])\n"
        "    heavy = {'transformers', 'pyarrow', 'scipy'} & {*sys.modules}\n"
        "    print(result.exit_code, heavy, *result.stderr.split())"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    for line, said in zip(done.stdout.splitlines(), ("nonsense", "nonsense", "'bundled'"), strict=True):
        assert line.startswith("2 set()")
        assert said in flat(line)


def test_the_version_and_an_example_are_found() -> None:
    found = runner.invoke(app, ["--version"])
    assert (found.exit_code, found.stdout) == (0, f"attnorm {version('attnorm')}\n")
    assert "Example: attnorm analyze" in flat(runner.invoke(app, ["analyze", "--help"]).output)


@pytest.mark.parametrize("verb", ["analyze", "compare", "report", "doctor", "lab"])
def test_no_word_of_the_help_is_cut_at_80_columns(verb: str) -> None:
    assert "…" not in runner.invoke(app, [verb, "--help"], env={"COLUMNS": "80"}, terminal_width=80).output


def test_a_packed_text_is_measured_as_what_is_in_it(model: Path, text: Path, tmp_path: Path) -> None:
    packed = tmp_path / "words.txt.xz"
    packed.write_bytes(lzma.compress(text.read_bytes()))
    assert run(model, text, "--out", str(tmp_path / "plain")).exit_code == 0
    assert run(model, packed, "--out", str(tmp_path / "packed")).exit_code == 0
    plain, unpacked = (Analysis.load(tmp_path / name).manifest["texts"][0] for name in ("plain", "packed"))
    assert plain["sha256"] == unpacked["sha256"]


def test_a_model_saved_without_its_tokenizer_takes_another(model: Path, text: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model / name, bare / name)
    refused = run(bare, text)
    assert refused.exit_code == 2
    assert "tokenizer" in flat(refused.stderr)
    assert "--tokenizer" in flat(refused.stderr)
    out = tmp_path / "run"
    given = run(bare, text, "--tokenizer", str(model), "--out", str(out))
    assert given.exit_code == 0, given.output
    assert Analysis.load(out).manifest["model"]["tokenizer"] == str(model)
    shutil.copytree(model, tmp_path / "other")
    another = run(bare, text, "--tokenizer", str(tmp_path / "other"), "--out", str(out))
    assert another.exit_code == 2, "the tables of one tokenizer are not those of another"


def test_a_finished_run_is_not_measured_again(model: Path, text: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    first = run(model, text, "--out", out)
    again = run(model, text, "--out", out)
    assert again.exit_code == 0
    assert "already contains this run" in again.stderr
    assert again.stdout == first.stdout


def test_thresholds_are_those_asked_for_and_may_change_later(model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ("--lengths", "32", "--metrics", "core", "--out", str(out), "--no-html")
    asked = ("--threshold", "sink_dominated=0", "--threshold", "near_floor=0")
    first = run(model, text, *options, *asked)
    assert first.exit_code == 0, first.output
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["thresholds"]["sink_dominated"], manifest["thresholds"]["near_floor"]) == (0, 0)
    assert set(Analysis.load(out).heads["verdict"].to_pylist()) == {"sink-dominated"}
    assert "near_floor 0 (default 0.1), sink_dominated 0 (default 0.5)" in flat(first.output)
    again = run(model, text, *options)
    assert "Nothing was measured again" in flat(again.output)
    assert "sink_dominated was 0" in flat(again.output)
    assert set(Analysis.load(out).heads["verdict"].to_pylist()) != {"sink-dominated"}


def test_ctrl_c_exits_with_130_and_the_next_run_goes_on(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = analysis_module.run, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return forward(*arguments)

    out = tmp_path / "run"
    command = [str(model), "--text", str(text), *QUICK, "--lengths", "16,32", "--windows", "1", "--out", str(out)]
    with monkeypatch.context() as patched:
        patched.setattr(analysis_module, "run", interrupted)
        stopped = runner.invoke(app, ["analyze", *command])
    assert stopped.exit_code == 130
    assert "1 of 2 parts" in flat(stopped.stderr)
    assert str(out) in flat(stopped.stderr)
    assert stopped.stdout == ""
    resumed = runner.invoke(app, ["analyze", *command])
    assert resumed.exit_code == 0, resumed.output
    assert "part 1 of 2" in resumed.stderr
    assert "found finished" in resumed.stderr
    assert set(Analysis.load(out).heads["length"].to_pylist()) == {16, 32}


def test_ctrl_c_without_a_folder_says_that_nothing_is_kept(
    model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(analysis_module, "run", interrupted)
    result = run(model, text)
    assert result.exit_code == 130
    assert "No results are kept" in result.stderr


def test_a_broken_checkpoint_is_flagged_and_exits_with_1(text: Path, tmp_path: Path) -> None:
    result = run(save_model(tmp_path / "nan", broken=True), text)
    assert result.exit_code == 1, result.output
    assert "2 of 4 heads are broken; " in result.stdout
    assert "Repair the checkpoint" in result.stdout
    assert (tmp_path / "attnorm-nan.html").is_file()


def test_a_full_disk_exits_with_1_and_says_what_is_safe(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "write_part", full)
    result = run(model, text, "--out", str(tmp_path / "run"))
    assert result.exit_code == 1
    assert "the disk is full" in result.stderr
    assert "Errno" not in result.stderr


def test_out_of_memory_exits_with_1_and_says_what_helps(
    model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def greedy(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(analysis_module, "run", greedy)
    result = run(model, text)
    assert result.exit_code == 1
    assert "--metrics core" in result.stderr


def test_durations_and_memory_are_short() -> None:
    assert [duration(seconds) for seconds in (3.2, 150, 9000)] == ["3 s", "2 min", "2.5 h"]
    assert memory_words().endswith(" GB")
