"""An Analysis can be saved, read again, merged, exported and shown, and loses nothing on the way."""

import inspect
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attnorm.analysis import store
from attnorm.analysis.analyze import analyze
from attnorm.analysis.result import Analysis
from attnorm.analysis.tables import SCHEMAS, TABLES, VERDICT_COLUMNS, merge_runs
from attnorm.analysis.verdicts import Thresholds
from attnorm.report_data import VERDICTS
from tests.analysis.tables_of import table as one_table
from tests.analysis.tables_of import tables
from tests.analysis.tiny_models import gpt2, ids

HOSTILE = "<img src=x onerror=alert(1)>\"'&<script>alert(2)</script>"


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    options: dict[str, Any] = {"vector_rows": 2, "top_n": (1, 5), "temperatures": (0.5, 1.0)}
    texts = {"a": ids(64), "b": ids(64, seed=1)}
    return analyze(
        gpt2(), texts, lengths=(24, 48), normalizers=("model", "ssmax"), **{"metrics": "all", "rows": "all", **options}
    )


def equal(here: pa.Table, there: pa.Table) -> bool:
    """NaN equals NaN, and every bit counts."""
    return here.schema.equals(there.schema) and all(
        a.to_numpy().tobytes() == b.to_numpy().tobytes() if a.type == pa.float64() else a.equals(b)
        for a, b in zip(here.columns, there.columns, strict=True)
    )


def test_what_is_saved_is_read_bit_for_bit(analysis: Analysis, tmp_path: Path) -> None:
    folder = analysis.save(tmp_path / "new" / "run")
    again = Analysis.load(folder)
    for name, table in analysis.tables.items():
        assert equal(again.tables[name], table), name
    assert again.manifest == analysis.manifest
    assert again.verdict == analysis.verdict
    assert again.summary() == analysis.summary()
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [*(f"{name}.parquet" for name in TABLES), "manifest.json"]
    )
    analysis.save(folder)  # the same run once more


def test_every_head_of_every_text_length_and_normalizer_has_its_row(analysis: Analysis) -> None:
    assert analysis.heads.num_rows == 2 * 2 * 2 * 2 * 2
    assert analysis.heads.column_names == [*SCHEMAS["heads"].names, *(name for name, _ in VERDICT_COLUMNS)]
    assert set(analysis.heads["verdict"].to_pylist()) <= set(VERDICTS)
    assert analysis.top_n.num_rows == 2 * analysis.heads.num_rows
    assert analysis.sensitivity.num_rows == 2 * analysis.heads.num_rows
    assert analysis.coverage.num_rows == analysis.heads.num_rows
    for name, schema in SCHEMAS.items():
        assert analysis.tables[name].column_names[: len(schema)] == schema.names
        assert sum(column.null_count for column in analysis.tables[name].select(schema.names).columns) == 0


def test_the_manifest_is_json_and_says_what_was_done(analysis: Analysis) -> None:
    manifest = json.loads(json.dumps(analysis.manifest, allow_nan=False))
    assert manifest == analysis.manifest
    assert manifest["finished"] is True
    assert manifest["model"]["name"] == "GPT2LMHeadModel"
    assert len(manifest["model"]["fingerprint"]) == 64
    assert [text["name"] for text in manifest["texts"]] == ["a", "b"]
    assert [(part["text"], part["length"]) for part in manifest["parts"]] == [
        ("a", 24), ("a", 48), ("b", 24), ("b", 48),
    ]  # fmt: skip
    assert manifest["settings"]["lengths"] == [24, 48]
    assert manifest["settings"]["seed"] == 0
    assert {"python", "attnorm", "torch", "transformers", "pyarrow"} <= set(manifest["versions"])
    assert manifest["thresholds"] == Thresholds().as_dict()
    assert any("at most 2 of the longest rows" in note for note in manifest["notes"])


def test_runs_on_one_model_merge_into_what_one_run_would_have_given() -> None:
    model, texts = gpt2(layers=1), {"a": ids(64), "b": ids(64, seed=1)}
    options: dict[str, Any] = {"metrics": "coverage", "top_n": (1, 5), "lengths": (24, 48)}
    together = analyze(model, texts, **options)
    a, b = (analyze(model, {name: text}, **options) for name, text in texts.items())
    merged = Analysis.merged([a, b])
    for name, table in together.tables.items():
        assert equal(merged.tables[name], table), name
    assert merged.verdict == together.verdict
    assert merged.manifest["texts"] == together.manifest["texts"]
    assert merged.manifest["settings"] == together.manifest["settings"]
    assert [part["key"] for part in merged.manifest["parts"]] == [part["key"] for part in together.manifest["parts"]]
    assert merged.manifest["merged"] == [a.manifest, b.manifest]
    assert equal(Analysis.merged([merged, a]).heads, merged.heads)


def test_a_merged_analysis_can_be_saved_and_read(analysis: Analysis, tmp_path: Path) -> None:
    merged = Analysis.merged([analysis, analysis])
    again = Analysis.load(merged.save(tmp_path))
    assert again.manifest == merged.manifest
    with pytest.raises(FileExistsError, match="another run"):
        analysis.save(tmp_path)


def test_a_folder_that_cannot_be_created_is_named(analysis: Analysis, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"file/run: .*another folder"):
        analysis.save(tmp_path / "file" / "run")


def test_a_manifest_of_another_program_is_named_in_few_words(analysis: Analysis, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "app", "icons": []}')
    with pytest.raises(FileExistsError, match=r"manifest\.json.*another folder") as refused:
        analysis.save(tmp_path)
    assert len(str(refused.value)) < len(str(tmp_path)) + 100


def test_a_run_that_measured_less_is_named_by_what_it_lacks() -> None:
    core, full = (analyze(gpt2(layers=1), ids(16), metrics=groups) for groups in ("core", ("core", "vectors")))
    with pytest.raises(ValueError, match="vectors"):
        Analysis.merged([core, full])


def test_what_cannot_be_merged_is_refused() -> None:
    with pytest.raises(ValueError, match="got none"):
        Analysis.merged([])
    options: dict[str, Any] = {"metrics": "core", "top_n": (1,)}
    here = analyze(gpt2(layers=1), ids(16), **options)
    with pytest.raises(ValueError, match="attnorm compare"):
        Analysis.merged([here, analyze(gpt2(layers=1, seed=1), ids(16), **options)])
    with pytest.raises(ValueError, match=r"float32, bfloat16.*attnorm compare"):
        Analysis.merged([here, analyze(gpt2(layers=1).bfloat16(), ids(16), **options)])
    with pytest.raises(ValueError, match="names"):
        Analysis.merged([here, analyze(gpt2(layers=1), ids(16, seed=1), **options)])


def test_pandas_and_polars_get_every_table(analysis: Analysis, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("polars")
    for name, table in analysis.tables.items():
        frame, other = analysis.to_pandas(name), analysis.to_polars(name)
        assert list(frame.columns) == list(other.columns) == table.column_names
        assert len(frame) == len(other) == table.num_rows
        path = analysis.to_parquet(tmp_path / f"{name}.parquet", name)
        assert equal(pq.read_table(path), table)
    assert analysis.to_pandas()["entropy_nats"].tolist() == analysis.heads["entropy_nats"].to_pylist()


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_without_pandas_or_polars_the_error_says_what_to_do(
    analysis: Analysis, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"pip install {package}"):
        getattr(analysis, f"to_{package}")()


def test_an_unknown_table_is_named(analysis: Analysis) -> None:
    with pytest.raises(ValueError, match=r"'head'.*'heads'"):
        analysis.to_pandas("head")


def test_one_head_can_be_looked_at(analysis: Analysis) -> None:
    head = analysis.head(1, 0)
    key = {name: head.numbers[name] for name in ("text", "length", "normalizer", "kind", "layer", "head")}
    assert key == {"text": "a", "length": 48, "normalizer": "model", "kind": "decoder", "layer": 1, "head": 0}
    for table in (head.by_length, head.top_n, head.sensitivity):
        assert table.num_rows
        assert all(row.items() >= key.items() for row in table.to_pylist())
    other = analysis.head(1, 0, text="b", length=24, normalizer="ssmax")
    assert (other.numbers["text"], other.numbers["length"], other.numbers["normalizer"]) == ("b", 24, "ssmax")
    with pytest.raises(KeyError, match=r"layer 7, head 0.*layer 0, 1"):
        analysis.head(7, 0)


def test_thresholds_can_be_changed_without_measuring(analysis: Analysis) -> None:
    judged = analysis.judged(Thresholds(sink_dominated=0.0))
    assert set(judged.heads["verdict"].to_pylist()) == {"sink-dominated"}
    assert judged.thresholds.sink_dominated == 0.0
    assert judged.manifest["thresholds"]["sink_dominated"] == 0.0
    assert judged.manifest["first_thresholds"] == Thresholds().as_dict()
    assert any("recomputed from the saved numbers" in one for one in judged.verdict.sentences)
    twice = judged.judged(Thresholds(sink_dominated=1.0))
    assert twice.manifest["first_thresholds"] == Thresholds().as_dict(), (
        "those of the measurement, not of the last time"
    )
    assert twice.judged(Thresholds()).manifest == analysis.manifest
    assert equal(judged.by_length, analysis.by_length)


def test_the_summary_has_the_verdict_the_model_and_the_notes(analysis: Analysis) -> None:
    text = analysis.summary()
    assert text.startswith(analysis.verdict.headline)
    assert "GPT2LMHeadModel" in text
    assert "a, b; 24, 48 tokens; normalizers: model, ssmax" in text
    assert analysis.verdict.advice
    assert all(f"- {advice.heading}. {advice.text}" in text for advice in analysis.verdict.advice)
    assert "Note: distances" in text


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, Any]] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, attrs))


def test_a_notebook_shows_a_small_table_in_which_hostile_names_do_nothing() -> None:
    model = gpt2(layers=1)
    model.config._name_or_path = HOSTILE
    analysis = analyze(model, {HOSTILE: ids(64)}, metrics="core", top_n=(1,)).judged(Thresholds(sink_dominated=0.0))
    html = analysis._repr_html_()
    parser = Tags()
    parser.feed(html)
    assert {tag for tag, _ in parser.tags} <= {"div", "p", "b", "br", "table", "thead", "tbody", "tr", "th", "td"}
    assert not any(attributes for _, attributes in parser.tags)
    assert "&lt;script&gt;" in html
    assert "sink-dominated" in html
    assert len(html) < 20_000
    assert "GPT2" in repr(analysis) or HOSTILE in repr(analysis)


@pytest.mark.parametrize(
    ("source", "remedy"), [(None, r"attnorm\.analyze\(model, out="), ("my model", r"attnorm analyze 'my model' --out")]
)
def test_a_run_of_another_version_is_refused_with_the_command_that_measures_again(
    source: str | None, remedy: str, analysis: Analysis, tmp_path: Path
) -> None:
    manifest = {**analysis.manifest, "model": {**analysis.manifest["model"], "source": source}}
    store.write_run(tmp_path, analysis.tables, {**manifest, "schema": 2})
    with pytest.raises(ValueError, match=rf"expected tables of version 3, got 2\..*{remedy}"):
        Analysis.load(tmp_path)
    for name, column in (("heads", "max_weight_mean"), ("windows", "row_sum")):  # as before a metric was added
        tables = {**analysis.tables, name: analysis.tables[name].drop_columns([column])}
        store.write_run(tmp_path, tables, manifest)
        with pytest.raises(ValueError, match=rf"{name}\.parquet.* {column}\..*{remedy}"):
            Analysis.load(tmp_path)


def test_a_folder_without_an_analysis_and_one_of_another_version_are_refused(
    analysis: Analysis, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        Analysis.load(tmp_path)
    folder = analysis.save(tmp_path / "run")
    (folder / "heads.parquet").unlink()
    with pytest.raises(FileNotFoundError, match=r"heads\.parquet is missing"):
        Analysis.load(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    store.write_json(folder / "manifest.json", manifest | {"schema": 99})
    with pytest.raises(ValueError, match="got 99"):
        Analysis.load(folder)


def test_reading_an_analysis_needs_no_transformers(analysis: Analysis, tmp_path: Path) -> None:
    folder = analysis.save(tmp_path)
    code = (
        "import sys, attnorm; a = attnorm.Analysis.load(sys.argv[1]); a.summary(); a._repr_html_(); "
        "assert 'transformers' not in sys.modules, 'transformers was loaded'"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


@pytest.mark.parametrize("name", ["heads", "by_length", "top_n", "sensitivity", "coverage"])
def test_different_rows_are_put_together_and_equal_rows_are_kept_once(name: str) -> None:
    here, there = tables(text="a")[name], tables(text="b")[name]
    both = merge_runs(name, [here, there, here])
    assert both.num_rows == here.num_rows + there.num_rows
    assert both.slice(0, here.num_rows).drop_columns([]).schema.equals(here.schema)
    assert both["text"].to_pylist() == [*here["text"].to_pylist(), *there["text"].to_pylist()]


def test_nan_equals_nan_but_not_a_number() -> None:
    here = one_table("heads", [{"head": 3, "entropy_nats": math.nan}])
    assert merge_runs("heads", [here, here]).num_rows == 1
    with pytest.raises(ValueError, match=r"head 3.*entropy_nats nan .* 0\.0"):
        merge_runs("heads", [here, one_table("heads", [{"head": 3}])])


def test_a_head_has_one_row_even_if_the_bins_differ() -> None:
    here, there = (one_table("heads", [{"n_low": low}]) for low in (4, 5))
    with pytest.raises(ValueError, match="n_low"):
        merge_runs("heads", [here, there])


def test_bins_of_one_head_are_different_rows() -> None:
    here, there = (one_table("by_length", [{"n_low": low, "n_high": 9}]) for low in (4, 5))
    assert merge_runs("by_length", [here, there]).num_rows == 2


def test_every_parameter_is_explained() -> None:
    told = inspect.getdoc(analyze) or ""
    for name in inspect.signature(analyze).parameters:
        assert re.search(rf"\b{name}[:=]", told), name
