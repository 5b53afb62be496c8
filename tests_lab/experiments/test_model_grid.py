"""Grids of small models: what is trained, what is not trained again, and how records become findings."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.collections import PathCollection

from attnorm.files import append_jsonl, read_jsonl
from attnorm_lab.experiments.catalogue import experiment
from attnorm_lab.experiments.experiment import RECORDS, ExperimentSubject, UnfinishedError, no_progress
from attnorm_lab.experiments.model_grid import grid, heads, positions, temperature
from attnorm_lab.experiments.model_grid.grid import loss_at, share_beyond_horizon, variance_shares
from attnorm_lab.experiments.run import reproduce
from attnorm_lab.experiments.trained_models import Workspace, read_texts
from attnorm_lab.training.lm.model import LMSettings, build_model

SUBJECT = ExperimentSubject(quick=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[grid.Record]]:
    parts = tmp_path_factory.mktemp("out") / "parts" / "temperature"
    plan = replace(temperature.QUICK, models=temperature.QUICK.models[1:])
    return parts, grid.records_of(plan, SUBJECT, no_progress, parts)


def test_a_model_is_trained_watched_and_measured(trained: tuple[Path, list[grid.Record]]) -> None:
    _, records = trained
    assert [record["label"] for record in records] == [
        "map softmax, temperature 1.0", "map softmax, temperature learned",
    ]  # fmt: skip
    for record in records:
        assert record["looks"][-1]["step"] == record["settings"]["steps"]
        assert 0 < record["looks"][-1]["jacobian_norm"] <= 0.5
        assert math.isfinite(loss_at(record, 1))
        assert len(record["heads"]["jacobian_norm"]) == 2
        rows, all_means = record["heads"], record["looks"][-1]
        assert sum(rows["jacobian_norm_mean"]) / 2 == pytest.approx(all_means["jacobian_norm"], rel=1e-3)
        assert rows["jacobian_norm_mean"] != rows["jacobian_norm"], "the median row"
        assert len(rows["effective_keys_mean"]) == len(rows["max_weight_mean"]) == len(rows["entropy_ratio_mean"]) == 2
    assert not records[0]["learned"]
    assert len(records[1]["learned"]) == 1


def test_models_that_were_finished_here_or_elsewhere_are_not_trained_again(
    trained: tuple[Path, list[grid.Record]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, records = trained
    append_jsonl(tmp_path / RECORDS, records)
    monkeypatch.setattr(grid, "train_and_measure", lambda *_: pytest.fail("trained again"))
    plan = replace(temperature.QUICK, models=temperature.QUICK.models[1:])
    for folder in (parts, tmp_path / "parts" / "temperature"):
        assert grid.records_of(plan, SUBJECT, no_progress, folder) == records
    assert read_jsonl(tmp_path / RECORDS) == records


def test_records_of_another_plan_are_not_used(trained: tuple[Path, list[grid.Record]], tmp_path: Path) -> None:
    """The quick and the full plan have models of the same name."""
    _, records = trained
    append_jsonl(tmp_path / RECORDS, records)
    plan = replace(temperature.QUICK, models=temperature.QUICK.models[1:2], tokens=256)
    (found,) = grid.records_of(plan, SUBJECT, no_progress, tmp_path / "parts" / "temperature")
    assert found["settings"]["steps"] == 2 != records[0]["settings"]["steps"]


def test_models_of_another_text_are_not_mixed_with_those_of_this_one(
    trained: tuple[Path, list[grid.Record]], tmp_path: Path
) -> None:
    parts, records = trained
    (texts,) = [line for line in read_jsonl(parts / "results.jsonl") if line["stage"] == "texts"]
    append_jsonl(tmp_path / RECORDS, [texts | {"training_tokens": 7}, records[0]])
    plan = replace(temperature.QUICK, models=temperature.QUICK.models[1:])
    with pytest.raises(ValueError, match="7 tokens"):
        grid.records_of(plan, SUBJECT, no_progress, tmp_path / "parts" / "temperature")


def test_what_another_process_finished_meanwhile_is_not_trained_again(
    trained: tuple[Path, list[grid.Record]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, records = trained
    plan = replace(temperature.QUICK, models=temperature.QUICK.models[1:])

    def finish_elsewhere(what: str, done: int, total: int) -> None:
        if what.startswith("training"):
            append_jsonl(tmp_path / "parts" / "temperature" / "results.jsonl", [records[done]])

    monkeypatch.setattr(grid, "train_and_measure", lambda *_: pytest.fail("trained again"))
    found = grid.records_of(plan, SUBJECT, finish_elsewhere, tmp_path / "parts" / "temperature")
    assert [record["label"] for record in found] == [record["label"] for record in records]


def test_a_time_limit_starts_no_model_that_would_not_finish(
    trained: tuple[Path, list[grid.Record]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, records = trained
    plan = replace(temperature.QUICK, models=temperature.QUICK.models[1:])
    parts = tmp_path / "parts" / "temperature"
    with pytest.raises(UnfinishedError, match="0 of 2"):
        grid.records_of(plan, replace(SUBJECT, minutes=0.0), no_progress, parts)
    assert (parts / "data" / "texts.json").exists(), "the texts are encoded"
    assert all(record["wall_seconds"] > 0 for record in records)
    append_jsonl(tmp_path / RECORDS, [records[0] | {"wall_seconds": 120.0}])
    with pytest.raises(UnfinishedError, match="1 of 2"):
        grid.records_of(plan, replace(SUBJECT, minutes=1.9), no_progress, parts)
    monkeypatch.setattr(grid, "train_and_measure", lambda *_: records[1])
    assert len(grid.records_of(plan, replace(SUBJECT, minutes=2.5), no_progress, parts)) == 2


def test_a_model_that_the_time_limit_stops_has_no_record(trained: tuple[Path, list[grid.Record]]) -> None:
    parts, _ = trained
    plan = replace(temperature.QUICK, models=temperature.QUICK.models[1:], tokens=4096)
    texts = read_texts(Workspace(parts, plan))
    with pytest.raises(UnfinishedError, match="1 of 32"):
        grid.train_and_measure(plan, plan.models[0], 5, texts, parts, torch.device("cpu"), deadline=0.0)


QUICK_TABLES = {  # claims, figures, and rows of each table
    "temperature": (2, ["temperature"], {"models": 3, "temperatures": 3, "lengths": 3 * 3 * 2}),
    "positions": (2, ["positions"], {"models": 4, "lengths": (3 * 2 + 1) * 2}),  # learned positions end
    "heads": (1, ["heads"], {"models": 2, "top-n": 2 * 5, "lengths": 2 * 2}),
}


def test_the_quick_experiments_run_to_their_end_and_write_everything(tmp_path: Path) -> None:
    """Every model of the three quick plans is trained, in one process."""
    for finished in reproduce(list(QUICK_TABLES), replace(SUBJECT, device="cpu"), tmp_path):
        claims, figures, tables = QUICK_TABLES[finished.name]
        assert [finding["verdict"] for finding in finished.record["findings"]] == ["not tested"] * claims
        assert (finished.record["figures"], finished.record["tables"]) == (figures, tables)
        files = {path.name for path in finished.folder.iterdir()}
        assert files >= {f"{name}.{form}" for name in figures for form in ("svg", "png", "pdf")}
        assert files >= {f"{name}.{form}" for name in tables for form in ("csv", "parquet")}
    assert {path.name for path in tmp_path.iterdir()} >= {*QUICK_TABLES, "index.html"}


def tempered(map_: str, T: float | str, loss: float | None, seed: int = 0) -> grid.Record:
    return {
        "map": map_, "temperature": str(T), "seed": seed, "valid_loss": loss,
        "settings": {"warmup": 1, "context": 32, "learning_rate": 0.001},
        "course": [[1, 5.0, None, 90.0], [20, 4.0, loss, 2.0]],
        "heads": {"jacobian_norm": [0.0, 10.0, 0.0]}, "unigram_loss": 6.0,
        "looks": [{"step": 10, "jacobian_norm": 8.0}, {"step": 20, "jacobian_norm": 3.4}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "unstable", "worse"),
    [
        ({0.05: None, 0.1: 4.3, 0.5: 4.0, 1.0: 4.01}, "partly", "reproduces"),
        ({0.05: None, 0.1: None, 0.5: 4.0, 1.0: 4.01}, "reproduces", "reproduces"),
        ({0.05: None, 0.1: None, 0.5: 4.0, 1.0: None}, "partly", "partly"),
        ({0.05: 4.0, 0.1: 4.02, 0.5: 4.0, 1.0: 4.01}, "does not", "does not"),
        ({0.05: 4.9, 0.1: 4.3, 0.5: 4.0, 1.0: 4.01}, "does not", "reproduces"),
        ({0.05: None, 0.1: 4.02, 0.5: 4.0, 1.0: 4.01}, "partly", "partly"),
        ({0.05: None, 0.1: 4.3, 0.5: 4.0, 1.0: 4.5}, "partly", "partly"),
    ],
)
def test_the_guideline_is_judged_by_runs_that_break_and_by_the_loss(
    losses: dict[float, float | None], unstable: str, worse: str
) -> None:
    """Three seeds each: what they have in common is 0.04 apart, what they have not at most 0.02."""
    own = {0.05: (0, 0.02, -0.02), 0.1: (0.02, 0, -0.02), 1.0: (-0.02, 0.02, 0)}
    records = [
        tempered("softmax", T, loss and loss + 0.04 * seed + own.get(T, (0, 0, 0))[seed], seed)
        for T, loss in losses.items()
        for seed in range(3)
    ]
    assert [finding.verdict for finding in temperature.findings(records)] == [unstable, worse]


def test_a_difference_that_seeds_share_costs_loss_although_their_ranges_overlap() -> None:
    losses = {0.25: (4.02, 4.071, 4.122), 0.5: (3.95, 4.12, 4.1), 1.0: (4.0, 4.05, 4.1)}
    records = [tempered("softmax", T, loss, seed) for T, group in losses.items() for seed, loss in enumerate(group)]
    assert temperature.costly_temperatures(records, "softmax") == [0.25]
    first_two = [record for record in records if record["seed"] < 2 and record["temperature"] != "0.25"]
    assert temperature.costly_temperatures(first_two, "softmax") == []


def test_one_seed_shows_no_cost_except_by_a_run_that_diverges() -> None:
    losses = {0.05: None, 0.1: 4.3, 0.5: 4.0}
    records = [tempered("softmax", T, loss) for T, loss in losses.items()]
    assert temperature.costly_temperatures(records, "softmax") == [0.05]
    assert temperature.findings(records[1:])[1].verdict == "not decided"


def test_the_median_row_of_heads_and_the_mean_over_rows_have_their_own_names() -> None:
    record = tempered("softmax", 0.05, 4.0)
    broken = tempered("softmax", 0.05, None)
    assert temperature.median_jacobian_norm(record) == pytest.approx(10 / 3)
    assert temperature.mean_jacobian_norm(record) == 3.4, "of the trained model, not of the first look"
    assert math.isnan(temperature.mean_jacobian_norm(broken)), "no model at the end"
    made = temperature.outcome([record], temperature.FULL)
    (row,) = made.tables["temperatures"].to_pylist()
    assert (row["jacobian_norm_median_row"], row["jacobian_norm_mean_row"]) == pytest.approx((10 / 3, 3.4))
    (drawn,) = [line for line in made.figures["temperature"].axes[2].lines if line.get_label() == "softmax"]
    assert list(drawn.get_ydata()) == pytest.approx([10 / 3])
    assert made.figures["temperature"].axes[2].get_ylabel() == "median row, mean over heads"


def test_means_over_rows_are_in_the_tables_if_records_have_them() -> None:
    old = {"heads": {"max_weight": [0.5, 0.7]}}
    new = {"heads": {"max_weight": [0.5, 0.7], "max_weight_mean": [0.2, 0.4]}}
    assert [*grid.row_numbers([old], ["max_weight"])] == ["max_weight_median_row"]
    numbers = grid.row_numbers([old, new], ["max_weight"])
    assert {name: number(new) for name, number in numbers.items()} == pytest.approx(
        {"max_weight_median_row": 0.6, "max_weight_mean_row": 0.3}
    )


def crosses(records: list[grid.Record]) -> list[float]:
    """Return the temperatures that figure (a) marks."""
    drawn = temperature.figure(records).axes[0].collections
    return [float(x) for marks in drawn if isinstance(marks, PathCollection) for x, _ in marks.get_offsets()]


def test_a_run_that_ends_above_the_loss_of_word_counts_did_not_diverge() -> None:
    records = [tempered("softmax", 0.05, 6.5), tempered("softmax", 0.1, None), tempered("softmax", 1.0, 4.0)]
    assert [grid.diverged(record) for record in records] == [False, True, False]
    assert [grid.ended_above_word_counts(record) for record in records] == [True, False, False]
    stability, _ = temperature.findings(records)
    assert (
        "1 of 2 runs diverged and 1 ended above the loss of word counts, at higher temperatures 0 and 0 of 1"
        in stability.ours
    )
    assert stability.verdict == "reproduces", "both broke, in different ways"
    assert crosses(records) == [0.1]
    assert crosses(records[::2]) == []
    assert temperature.costly_temperatures(records, "softmax") == [0.1]


def test_runs_of_which_none_diverges_test_no_bound() -> None:
    records = [tempered("softmax", T, 4.0) for T in (0.05, 1.0)]
    text = temperature.summary(records)
    assert "gradients clipped at 1 and a learning rate of 0.001, 0 of 2 runs diverged" in text
    assert "does not test whether the bound predicts" in text
    assert "does not test" not in temperature.summary([*records, tempered("softmax", 0.1, None)])


def test_the_largest_gradient_is_not_cut_by_the_edge_of_its_panel() -> None:
    records = [tempered("softmax", T, 4.0) for T in (0.05, 1.0)]
    for record, norm in zip(records, (1.05, 1.055), strict=True):
        record["course"] = [[1, 5.0, None, norm]]
    low, high = temperature.figure(records).axes[1].get_ylim()
    assert low == 0
    assert high >= 1.02 * 1.055


def test_ticks_are_not_differences_from_an_offset() -> None:
    """Losses that differ in the fourth decimal would be written as differences from an offset."""
    close = [tempered("softmax", T, 5.288 + T / 1e3) for T in (0.25, 0.5)]
    for record in close:
        record["course"] = [[step, 5.288 + step / 1e5, None, 1.0] for step in (20, 40)]
    made = [temperature.figure(close)]
    rows = [{"heads_per_layer": n, "map": "softmax", "losses": {"t": {"32": 5.288 + n / 1e4}}} for n in (2, 4)]
    made.append(heads.figure([row | {"settings": {"context": 32}} for row in rows]))
    made.append(positions.figure([placed("rotary", "softmax", 1e-4, [None])], (1, 2)))
    for figure in made:
        figure.canvas.draw()
        assert {axis.get_offset_text().get_text() for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)} == {""}


def test_heads_without_a_null_do_not_count_as_not_above_it() -> None:
    found = {"top_n": [5] * 4, "separability": [0.5, 0.5, math.nan, 0.5]}
    record = {"top_n": {**found, "separability_null_high": [0.4, 0.6, 0.4, math.nan]}}
    assert heads.share_above_null(record, 5) == 0.5


def test_the_largest_gradient_is_that_of_the_whole_training_and_after_the_warmup() -> None:
    records = [tempered("softmax", 0.05, 4.0, seed) for seed in (0, 1)]
    records[1]["course"] = [[1, 5.0, None, 40.0], [20, 4.0, None, 3.0]]
    assert temperature.largest_gradient(records[0]) == 90.0
    assert temperature.largest_gradient_after_warmup(records[0]) == 2.0
    numbers = {"largest": temperature.largest_gradient, "later": temperature.largest_gradient_after_warmup}
    (row,) = temperature.temperatures_table(records, numbers).to_pylist()
    assert (row["largest_low"], row["largest"], row["largest_high"], row["later"]) == (40.0, 65.0, 90.0, 2.5)
    stability, _ = temperature.findings(records)
    assert "norm of the gradient 90" in stability.ours
    gradients = temperature.figure(records).axes[1]
    assert gradients.get_yscale() == "linear"


@pytest.mark.parametrize(("module", "count"), [(temperature, 72), (positions, 12), (heads, 12)])
def test_the_published_records_are_those_of_the_plan(tmp_path: Path, module: Any, count: int) -> None:
    published = Path(__file__).parents[2] / "docs" / "results" / f"{module.EXPERIMENT.name}.jsonl.xz"
    shutil.copy(published, tmp_path / "records.jsonl.xz")
    texts = (tmp_path / "missing.txt",)  # nothing is left to train, so no text is read
    subject = ExperimentSubject(texts=texts, valid=texts)
    found = grid.records_of(module.FULL, subject, no_progress, tmp_path / "parts" / "x")
    assert len(found) == len(module.FULL.models) * len(module.FULL.seeds) == count
    NUMBERS_OF_PAGES[module.EXPERIMENT.name](found)


def _check_temperature(records: list[grid.Record]) -> None:
    norms = {
        (map_, T): tuple(
            grid.mean(grid.select_records(records, map=map_, temperature=T), number)
            for number in (temperature.mean_jacobian_norm, temperature.median_jacobian_norm)
        )
        for map_ in temperature.MAPS
        for T in ("0.05", "0.1")
    }
    expected = {
        ("softmax", "0.05"): (2.80, 1.41), ("softmax", "0.1"): (1.71, 1.48), ("entmax15", "0.05"): (3.59, 2.73),
        ("entmax15", "0.1"): (3.39, 2.21), ("kneemax", "0.05"): (3.40, 2.50), ("kneemax", "0.1"): (3.27, 3.24),
    }  # fmt: skip
    assert {key: tuple(round(norm, 2) for norm in pair) for key, pair in norms.items()} == expected
    assert ["0 of 6 runs diverged and 0 ended" in finding.ours for finding in temperature.findings(records)[::2]] == [
        True
    ] * 3
    assert [finding.verdict for finding in temperature.findings(records)] == ["does not", "partly"] * 3
    costly = {map_: temperature.costly_temperatures(records, map_) for map_ in temperature.MAPS}
    assert costly == {
        "softmax": [0.05, 0.1, 0.25], "entmax15": [0.05, 0.1, 0.25, 0.5, 1.0, 2.0],
        "kneemax": [0.05, 0.1, 0.25, 1.0],
    }  # fmt: skip
    cold = grid.select_records(records, temperature="0.05")
    largest = {map_: max(map(temperature.largest_gradient, grid.select_records(cold, map=map_))) for map_ in costly}
    assert largest == pytest.approx({"softmax": 1.54, "entmax15": 3.47, "kneemax": 4.45}, abs=0.005)
    (longest,) = (
        row for row in grid.lengths_table(records, ("map", "temperature")).to_pylist()
        if (row["map"], row["temperature"], row["text"], row["tokens"]) == ("softmax", "4.0", "gutenberg-valid", 2048)
    )  # fmt: skip
    assert (longest["seeds"], longest["loss"]) == (3, pytest.approx(4.838, abs=5e-4))


def _check_positions(records: list[grid.Record]) -> None:
    rise, slope, horizon = positions.findings(records, positions.effects(8))
    assert [finding.verdict for finding in (rise, slope, horizon)] == ["does not", "partly", "not decided"]
    assert "between 6 models: positions 46%, normalizer 7%, the rest 46%" in horizon.ours
    assert "with positions" not in horizon.ours, "of these four models, three have the same share"
    assert "positions 64%, normalizer 11%, the rest 25%" in rise.ours
    assert "between the 6 with positions: positions 99%" in rise.ours
    (nope,) = grid.select_records(records, positions="none", map="entmax15")
    assert (positions.slope_deviation(nope), positions.slope_error(nope)) == pytest.approx((0.570, 0.073), abs=5e-4)


def _check_heads(records: list[grid.Record]) -> None:
    rows = heads.top_n_table(records).to_pylist()
    of = {(row["heads_per_layer"], row["map"], row["top_n"]): row for row in rows}
    assert len(of) == 12 * 5
    assert of[8, "softmax", 20]["union"] == pytest.approx(0.114, abs=5e-4)
    assert of[8, "softmax", 20]["excess"] == pytest.approx(0.038, abs=5e-4)
    assert of[32, "softmax", 5]["share_above_null"] == pytest.approx(0.39, abs=5e-3)
    drawn = heads.figure(records).axes[0].lines[0].get_ydata()
    assert list(drawn) == pytest.approx([3.622, 3.637, 3.694, 3.804], abs=5e-4), "the losses of the table"


NUMBERS_OF_PAGES = {"temperature": _check_temperature, "positions": _check_positions, "heads": _check_heads}


def placed(way: str, map_: str, rise: float, horizon: list[float | None]) -> grid.Record:
    return {
        "positions": way, "map": map_, "valid_loss": 4.0, "settings": {"context": 32},
        "losses": {"text": {"32": 4.0, "64": 4.0 + rise}},
        "heads": {"gap_slope": [0.1, 0.2], "horizon": horizon, "n_high": [32.0, 32.0]},
    }  # fmt: skip


def test_the_variance_is_divided_between_positions_and_normalizers() -> None:
    records = [
        placed(way, name, 0.5 * (way == "none") + 0.1 * (name == "ssmax"), [10.0, None])
        for way in ("rotary", "none")
        for name in ("softmax", "ssmax")
    ]
    (finding,) = positions.findings(records, {"rise": lambda r: loss_at(r, 2) - loss_at(r, 1)})
    shares = variance_shares(records, ("positions", "map"), lambda r: loss_at(r, 2))
    assert shares == pytest.approx({"positions": 0.25 / 0.26, "map": 0.01 / 0.26, "the rest": 0.0}, abs=1e-9)
    assert finding.verdict == "does not"
    assert share_beyond_horizon(records[0]) == 0.5  # a head with an infinite horizon is not beyond it
    assert math.isnan(share_beyond_horizon(placed("ALiBi", "softmax", 0.0, [None, None]))), "no head has a horizon"
    assert "4 of 4 models" in finding.why
    assert math.isnan(loss_at(records[0], 4))


def test_a_share_of_the_variance_needs_two_normalizers_and_two_kinds_of_positions() -> None:
    records = [placed(way, "softmax", 0.5 * (way == "none"), [10.0, None]) for way in ("rotary", "none")]
    rise = {"rise": lambda r: loss_at(r, 2) - loss_at(r, 1)}
    (finding,) = positions.findings(records, rise)
    assert finding.verdict == "not tested"
    assert "needs two normalizers" in finding.ours
    assert "softmax" in finding.ours
    assert "%" not in finding.ours
    (finding,) = positions.findings([placed("none", name, 0.1, []) for name in ("softmax", "ssmax")], rise)
    assert "needs two kinds of positions" in finding.ours
    same = [placed(way, name, 0.0, []) for way in ("rotary", "none") for name in ("softmax", "ssmax")]
    (finding,) = positions.findings(same, rise)
    assert (finding.verdict, finding.ours) == ("not tested", "the models do not differ")
    assert positions.findings([placed("learned", "softmax", math.nan, [])], rise) == ()


@pytest.mark.parametrize(
    ("odd", "verdict", "with_positions"),
    [(0.0, "does not", True), (1.0, "not decided", True), (0.0, "does not", False)],
)
def test_no_share_is_decided_if_the_rest_is_as_large(odd: float, verdict: str, with_positions: bool) -> None:
    """One combination that differs is no effect of either factor."""
    ways = ("rotary", "ALiBi", "none") if with_positions else ("rotary", "none")
    records = [
        placed(way, name, 0.5 * (way == "rotary") + odd * (way == "none") * (name == "ssmax"), [])
        for way in ways
        for name in ("softmax", "ssmax", "entmax15")
    ]
    (finding,) = positions.findings(records, {"rise": lambda r: loss_at(r, 2) - loss_at(r, 1)})
    assert finding.verdict == verdict
    assert ("with positions" in finding.ours) == with_positions


def test_a_panel_without_slopes_says_why() -> None:
    record = placed("rotary", "softmax", 0.1, [])
    assert not positions.figure([record], (1, 2)).axes[-1].texts
    empty = positions.figure([record | {"heads": {"gap_slope": [None, None]}}], (1, 2)).axes[-1]
    assert "no head has a finite gap" in empty.texts[0].get_text()
    assert not empty.get_yticks().size


@pytest.mark.parametrize(
    ("separability", "null", "verdict"),
    [(0.7, 0.5, "reproduces"), (0.7, 0.7, "partly"), (0.5, 0.3, "partly"), (0.56, 0.5, "does not")],
)
def test_heads_are_compared_by_separability_and_above_its_null(separability: float, null: float, verdict: str) -> None:
    def of(count: int, separability: float, null: float) -> grid.Record:
        rows: dict[str, Any] = {
            "top_n": [1, 5], "separability": [0.0, separability], "separability_null": [0.0, null],
        }  # fmt: skip
        return {"heads_per_layer": count, "map": "softmax", "valid_loss": 4.0, "top_n": rows}

    (finding,) = heads.findings([of(4, 0.55, 0.5), of(32, separability, null)])
    assert finding.verdict == verdict
    for number in ("0.550", f"{separability:.3f}", "+0.050", f"{separability - null:+.3f}"):
        assert number in finding.ours


@pytest.mark.parametrize("name", ["temperature", "positions", "heads"])
def test_the_full_plan_has_models_that_can_be_built(name: str) -> None:
    plan: grid.GridPlan = {"temperature": temperature, "positions": positions, "heads": heads}[name].FULL
    assert experiment(name).name == name
    assert len({model.label for model in plan.models}) == len(plan.models)
    sizes = set()
    for model in plan.models:
        few = {"layers": 1, "width": 64, "context": 16, "vocab": 300, **(model.settings or {})}
        settings = plan.model_settings(model.normalizer, rate=1e-3, tokens=16, seed=0, **few)
        built = build_model(settings, 300, 0)
        sizes.add((settings.architecture == "gpt2", sum(p.numel() for p in built.parameters() if p.dim() > 1)))
    assert len(sizes) == (2 if name == "positions" else 1)  # equal parameters


def test_without_positions_a_single_layer_does_not_see_the_order() -> None:
    settings = LMSettings(architecture="nope", layers=1, heads=2, width=16, context=8, vocab=300)
    first, second = torch.tensor([[3, 4, 5, 6]]), torch.tensor([[5, 3, 4, 6]])
    for normalizer, sees in (("softmax", False), ("alibi", True)):
        model = build_model(replace(settings, normalizer=normalizer), 300, 0).eval()
        with torch.no_grad():
            one, other = (model(ids).logits[0, -1] for ids in (first, second))
        assert torch.allclose(one, other, atol=1e-6) == (not sees)
