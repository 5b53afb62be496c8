"""attnorm lab reproduce: verdicts on stdout, files in the folder, exit codes that mean what they say."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2Model
from typer.testing import CliRunner

from attnorm.cli import app
from attnorm_lab.experiments import atom_mapping, experiment
from attnorm_lab.experiments.experiment import ExperimentSubject, UnfinishedError
from tests.analysis.tiny_models import gpt2
from tests.cli.saved_model import save_model, save_text
from tests_lab.experiments.toy_experiments import Toy

runner = CliRunner()
HERE = os.path.relpath(__file__)  # a short text, which messages do not wrap


def test_verdicts_go_to_stdout_and_the_place_of_the_page_to_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Toy().enter(monkeypatch)
    result = runner.invoke(app, ["lab", "reproduce", "toy", "--out", str(tmp_path / "out"), "--quick"])
    assert result.exit_code == 0, result.output
    for word in ("The toy", "It <b>is</b> so.", "a | b <i>", "1 of 2", "does not", "reproduces"):
        assert word in result.stdout
    assert "index.html" in result.stderr
    assert "toy: playing: 1 of 2" in result.stderr
    assert (tmp_path / "out" / "index.html").is_file()
    again = runner.invoke(app, ["lab", "reproduce", "toy", "--out", str(tmp_path / "out"), "--quick"])
    assert "found finished" in again.stdout


def test_json_holds_findings_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Toy().enter(monkeypatch)
    result = runner.invoke(app, ["lab", "reproduce", "toy", "--out", str(tmp_path), "--json", "--seed", "4"])
    told = json.loads(result.stdout)
    (one,) = told["experiments"]
    assert one["findings"][0]["verdict"] == "does not"
    assert one["found_finished"] is False
    assert Path(told["index"]).is_file()
    assert Path(one["folder"]).is_dir()


def test_without_a_name_the_experiments_are_listed() -> None:
    listed = json.loads(runner.invoke(app, ["lab", "reproduce", "--json"]).stdout)
    in_all = {one["name"]: one["in_all"] for one in listed}
    assert in_all["fig2"]
    assert not in_all["retrieval"]
    assert all(one["what"] for one in listed)
    assert "critical N" in runner.invoke(app, ["lab", "reproduce"]).stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["fig9"], "unknown experiment 'fig9'"),
        (["toy", "--model", "./nowhere"], "there is no folder './nowhere'"),
        (["toy", "--quick", "--text", "./nowhere.txt"], "cannot read the text nowhere.txt"),
        (["toy", "--model", "bundled", "--model", "x/y"], "expected one model with toy, got bundled, x/y"),
        (["toy", "--seed", "-1"], "Invalid value for '--seed'"),
        (["toy", "--quick", "--only", "softmax"], "expected no --only with toy, got softmax"),
        (["toy", "--quick", "--valid", "v.txt"], "expected no --valid with toy, got v.txt"),
        (["toy", "--quick", "--text", "a.txt", "--text", "b.txt"], "expected one text with toy, got a.txt, b.txt"),
        (["toy", "--quick", "--longest", "4096"], "expected no --longest with toy, got 4,096"),
        (["retrieval", "--quick", "--model", "bundled"], "expected no --model with retrieval, got bundled"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(
    arguments: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Toy(needs_model=True).enter(monkeypatch)
    result = runner.invoke(app, ["lab", "reproduce", *arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_an_unknown_experiment_is_named_before_a_text_is_chosen(tmp_path: Path) -> None:
    result = runner.invoke(app, ["lab", "reproduce", "fig9", "--model", "gpt2", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "--text" not in result.output


def _cpu_memory_error() -> RuntimeError:
    """Return what torch itself raises: a later version may word it differently."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8, device="cpu")
    return raised.value


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "Interrupted"),
        (MemoryError(), 1, "out of memory. Use --quick"),
        (torch.OutOfMemoryError("CUDA"), 1, "out of memory. Use --quick"),
        (_cpu_memory_error(), 1, "out of memory. Use --quick"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (ValueError("the text ends"), 2, "the text ends"),
    ],
)
def test_an_error_is_one_sentence_and_an_exit_code(
    error: BaseException, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Toy(fails=error).enter(monkeypatch)
    result = runner.invoke(app, ["lab", "reproduce", "toy", "--out", str(tmp_path)])
    assert result.exit_code == code, result.output
    assert words in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output


QUICK = {  # verdict of the first claim, and the rows of each table
    "vision": ("not tested", {"models": 6}),
    "circuits": ("partly", {"curves": 2 * 3 * 36 * 5, "heads": 2}),  # lengths, circuits, heads, normalizers
    "text-max": ("not decided", {"sizes": 3, "heads": 3 * 36}),
    "atom-mapping": ("reproduces", {"heads": 96}),  # the authors' head maps atoms
}


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_experiment_writes_every_table_figure_and_verdict(name: str, tmp_path: Path) -> None:
    if name == "atom-mapping" and not all(
        (atom_mapping.cache_folder() / file).is_file() for file in atom_mapping.FILES
    ):
        pytest.skip("RXNMapper's model is not in the cache; `attnorm lab reproduce atom-mapping` fetches it")
    printed = _run("lab", "reproduce", name, "--quick", "--device", "cpu", "--out", str(tmp_path), "--json")
    (experiment,) = json.loads(printed)["experiments"]
    record = json.loads((tmp_path / name / "outcome.json").read_text())
    assert (record["findings"][0]["verdict"], record["tables"]) == QUICK[name]
    assert experiment["findings"] == record["findings"]
    written = {path.name for path in (tmp_path / name).iterdir()}
    assert written >= {f"{figure}.{form}" for figure in record["figures"] for form in ("svg", "png", "pdf")}
    assert written >= {f"{table}.{form}" for table in record["tables"] for form in ("csv", "parquet")}
    assert (tmp_path / "index.html").is_file()


def test_a_quick_image_model_is_trained_and_its_heads_are_drawn_on_an_image(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, image, out = tmp_path / "textures", tmp_path / "photo.png", tmp_path / "heads"
    command = ["lab", "train", "vision", "--quick", "--normalizer", "entmax15", "--out", str(model)]
    done = runner.invoke(app, command)
    assert done.exit_code == 0, done.output
    notices = [line for line in (done.stderr + capfd.readouterr().err).splitlines() if line]
    assert {line.split()[0] for line in notices} <= {"training:", "wrote"}, "none of transformers"
    assert json.loads((model / "vision.json").read_text())["settings"]["normalizer"] == "entmax15"
    assert json.loads((model / "config.json").read_text())["id2label"]["3"] == "rings"
    assert (model / "preprocessor_config.json").exists()
    assert runner.invoke(app, command).exit_code == 2  # the folder exists
    Image.fromarray(np.arange(40 * 40 * 3, dtype=np.uint8).reshape(40, 40, 3)).save(image)
    _run("analyze", str(model), "--image", str(image), "--metrics", "core", "--out", str(out))
    assert "photo.png" in (out / "report.html").read_text()


def test_a_quick_benchmark_of_linear_cost_has_every_curve_and_error() -> None:
    lines = _run("lab", "bench", "linear", "--quick", "--threads", "1", "--markdown").splitlines()
    first_cells = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    for curve in ("softmax (SDPA)", "soft (49 landmarks)", "linear"):
        assert first_cells.count(curve) == 2  # forward, and with backward
    assert sum("Newton" in cell for cell in first_cells) == 10


def test_a_mixture_of_softmaxes_is_trained_and_its_rank_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = "quick-lm", tmp_path / "heads"
    monkeypatch.chdir(tmp_path)
    trained = runner.invoke(app, ["lab", "train", "lm", "--quick", "--output", "mos:3", "--width", "8", "--steps", "4"])
    assert (trained.exit_code, trained.stderr.splitlines()[-1]) == (0, f"wrote {model}"), trained.output
    _run("analyze", model, "--windows", "1", "--metrics", "output", "--larger", model, "--out", str(out))
    output = json.loads((out / "manifest.json").read_text())["output"]
    assert output["width"] == 8 < output["own"]["rank"] == output["larger"]["rank"]  # --width overrides --quick
    assert 'id="output"' in (out / "report.html").read_text()
    for texts in ([__file__, "--quick"], [__file__], ["--valid", __file__], []):
        assert runner.invoke(app, ["lab", "train", "lm", *texts, "--out", str(tmp_path / "none")]).exit_code == 2
    assert not (tmp_path / "none").exists()


def _run(*words: str) -> str:
    """Run a command as a user does; return what it printed."""
    result = runner.invoke(app, words)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.timeout(3600)  # catches a hang: minutes of training
@pytest.mark.parametrize(
    "name",
    ["language-models", "clrs-text", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("all", "retrieval"))],
)
def test_every_quick_experiment_runs_to_its_end(name: str, tmp_path: Path) -> None:
    result = runner.invoke(
        app, ["lab", "reproduce", name, "--quick", "--device", "cpu", "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "index.html").is_file()


def test_a_time_limit_that_leaves_models_untrained_is_exit_code_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def records_of(plan: Any, subject: ExperimentSubject, *_: Any) -> None:
        raise UnfinishedError(f"{subject.minutes} minutes")

    monkeypatch.setattr("attnorm_lab.experiments.model_grid.grid.records_of", records_of)
    stopped = runner.invoke(app, ["lab", "reproduce", "heads", "--quick", "--minutes", "0.25", "--out", str(tmp_path)])
    assert stopped.exit_code == 3, stopped.output
    assert "0.25 minutes" in stopped.stderr
    assert not (tmp_path / "heads").exists()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["fig1", "--minutes", "5"], "--minutes"),
        (["language-models", "--quick", "--whole"], "--whole: expected --stage too, got none"),
        (["language-models", "--size", "124M"], "--size: expected --stage too, got none. Run --stage prepare"),
        (["language-models", "--size", "125M"], "--size: expected 30M or 124M, got '125M'. --size: expected --stage"),
        (["language-models", "--quick", "--stage", "everything", "--whole"], "--minutes"),
        (["language-models", "--quick", "--stage", "main", "--whole", "--minutes", "5"], "second-seed"),
        (["clrs-text", "--quick", "--stage", "train", "--whole"], "--whole"),
        (["heads", "--quick", "--minutes", "nan"], "got nan"),
        (["clrs-text", "--quick", "--stage", "train", "--minutes", "-1"], "got -1"),
    ],
)
def test_limits_that_nothing_uses_are_refused(flags: list[str], named: str, tmp_path: Path) -> None:
    result = runner.invoke(app, ["lab", "reproduce", *flags, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2, result.output
    assert named in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--stage", "prepare", "--text", "absent.txt", "--valid", "absent.txt"], "absent.txt"),
        (["--stage", "prepare", "--text", HERE, "--valid", HERE, "--valid", HERE], "'test_reproduce.py'"),
        (["--stage", "prepare", "--text", HERE, "--valid", HERE, "--tokenizer", "absent"], "absent"),
        (["--stage", "prepare", "--text", HERE, "--valid", HERE, "--tokenizer", HERE], "of a tokenizer"),
        (["--stage", "everything"], "prepare"),
        (["--stage", "try", "--device", "abacus"], "abacus"),
        (["--stage", "try", "--only", "nonsense"], "nonsense"),
        (["--stage", "try", "--set", "batch=-3"], "got -3"),
        (["--stage", "try", "--set", "layers=1.5"], "got 1.5"),
        (["--stage", "try", "--set", 'rates=["fast"]'], '"fast"'),
        (["--stage", "try", "--set", "rates=[]"], "rates"),
        (["--stage", "try", "--set", 'normalizers=["nonsense"]'], "nonsense"),
    ],
)
def test_a_stage_that_cannot_work_binds_no_folder_to_its_plan(flags: list[str], named: str, tmp_path: Path) -> None:
    result = runner.invoke(
        app, ["lab", "reproduce", "language-models", "--quick", *flags, "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 2, result.output
    assert named in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


COMMIT = "607a30d783dfa663caf39e06633721c8d4cfcd7e"
OPENING = "“Well, Prince, so Genoa and Lucca are now just family estates of the Buonapartes. "


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of the hub, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(experiment, "_held", {})
    experiment._described.cache_clear()
    yield tmp_path / "hub"
    experiment._described.cache_clear()


def put_gpt2(cache: Path, tokenizer: Path) -> None:
    """As the hub has it - names of weights without a prefix, the class of the language model - but 8 wide per head."""
    folder = cache / "models--gpt2" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (cache / "models--gpt2" / "refs").mkdir()
    (cache / "models--gpt2" / "refs" / "main").write_text(COMMIT)
    config = GPT2Config(n_embd=96)
    torch.manual_seed(0)
    weights = {name: weight.contiguous() for name, weight in GPT2Model(config).state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": ["GPT2LMHeadModel"]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 1024}))
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(tokenizer / name, folder / name)


def plain(output: str) -> str:
    return " ".join(output.replace("│", " ").split())


def test_gpt2_runs_out_of_the_cache_and_the_record_says_what_is_not_the_papers(
    cache: Path, shared: Path, tmp_path: Path
) -> None:
    tokenizer = shared / "tokenizers" / "gpt2"
    if not tokenizer.is_dir():
        pytest.skip(f"no tokenizer of GPT-2 at {tokenizer}")
    put_gpt2(cache, tokenizer)
    novel = tmp_path / "novel.txt"
    novel.write_text(OPENING * 20, encoding="utf-8")
    command = ["lab", "reproduce", "fig1", "--text", str(novel), "--out", str(tmp_path / "out"), "--json"]
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    (one,) = json.loads(result.stdout)["experiments"]
    record = json.loads((tmp_path / "out" / "fig1" / "outcome.json").read_text(encoding="utf-8"))
    model = record["manifest"]["model"]
    assert (model["name"], model["layers"], model["heads"]) == ("gpt2", 12, 12)
    assert model["max_positions"] == 1024
    assert model["revision"] == COMMIT
    assert one["paper_setting"] == record["manifest"]["paper_setting"]
    assert one["paper_setting"]["same"] is False
    assert "what is called gpt2 here has another shape (head_dim 8)." in one["paper_setting"]["sentence"]
    for page in ("index.html", "fig1/verdict.md"):
        assert "has another shape (head_dim 8)" in (tmp_path / "out" / page).read_text(encoding="utf-8")
    assert "War and Peace: give it" not in result.stderr
    again = json.loads(runner.invoke(app, command).stdout)
    assert again["experiments"][0]["found_finished"] is True


def test_without_gpt2_the_error_names_what_was_tried_and_what_runs_here(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = Toy(needs_model=True).enter(monkeypatch)
    result = runner.invoke(app, ["lab", "reproduce", "toy", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    said = plain(result.output)
    assert "gpt2: no folder of this name, not in the Hugging Face cache, and the hub cannot be reached" in said
    assert "--model bundled" in said
    assert "gpt2 on pydoc_data.topics" in said
    assert "the paper's text is War and Peace: give it with --text FILE" in said
    assert toy.runs == 0
    assert not (tmp_path / "out").exists()
    named = plain(
        runner.invoke(app, ["lab", "reproduce", "toy", "--model", "no/such", "--out", str(tmp_path / "out")]).output
    )
    assert "no/such: no folder of this name" in named
    assert "Without --model" not in named


@pytest.mark.parametrize("arguments", [["--quick"], ["--model", "bundled"]])
def test_the_bundled_model_needs_no_hub(
    arguments: list[str], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Toy(needs_model=True).enter(monkeypatch)
    result = runner.invoke(app, ["lab", "reproduce", "toy", "--out", str(tmp_path), *arguments])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "toy" / "outcome.json").read_text(encoding="utf-8"))
    assert record["manifest"]["model"]["name"] == "bundled"
    assert "War and Peace" not in result.stderr


@pytest.mark.parametrize("name", ["retrieval", "language-models"])
def test_what_trains_its_own_models_looks_for_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subjects = []
    monkeypatch.setattr(
        "attnorm_lab.experiments.run.reproduce", lambda names, subject, out, **options: subjects.append(subject) or []
    )
    monkeypatch.setattr("attnorm_lab.experiments.experiment.PAPER_MODEL", "must-not-be-asked-for")
    result = runner.invoke(app, ["lab", "reproduce", name])
    assert result.exit_code == 0, result.output
    assert subjects[0].model == "bundled"
    assert "War and Peace" not in result.output


def test_several_models_in_one_table_are_found_finished_again(cache: Path, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny")
    gpt2(layers=2, heads=2, positions=512, seed=0).save_pretrained(folder)
    text = save_text(tmp_path / "words.txt", words=600)
    command = ["lab", "reproduce", "spread", "--quick", "--model", "bundled", "--model", str(folder),
        "--text", str(text),
        "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "out" / "spread" / "spread.csv").read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == ['"Gemma 2B"', '"Gemma 7B"', '"bundled"', '"tiny"']
    record = json.loads((tmp_path / "out" / "spread" / "outcome.json").read_text(encoding="utf-8"))
    assert [model["name"] for model in (record["manifest"]["model"], *record["manifest"]["others"])] == [
        "bundled",
        "tiny",
    ]
    assert "Model bundled, tiny;" in plain((tmp_path / "out" / "index.html").read_text(encoding="utf-8"))
    assert "found finished" in runner.invoke(app, command).stdout
    swapped = runner.invoke(app, [*command[:4], "--model", "bundled", *command[8:]])
    assert swapped.exit_code == 2
    assert "others is none here and tiny there" in plain(swapped.output)
