"""Dispersion against length: slopes, for how many heads the ceiling binds, rotation and key/value groups."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from attnorm_lab.experiments.dispersion.experiment import EXPERIMENT, judge_claims
from attnorm_lab.experiments.dispersion.measure import (
    RUNS,
    PassLengths,
    bound_shares,
    choose_pass_lengths,
    head_table,
    kv_effect,
    main_lengths,
    measure,
)
from attnorm_lab.experiments.experiment import ExperimentSubject, Outcome, no_progress

QUICK = ExperimentSubject(quick=True)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return EXPERIMENT.run(QUICK, no_progress, tmp_path_factory.mktemp("parts"))


def test_every_head_has_a_slope_and_the_shares_of_bound_heads_never_fall_with_length(outcome: Outcome) -> None:
    heads = outcome.tables["heads"]
    assert heads.num_rows == 36
    assert np.isfinite(heads["gap_slope"].to_numpy()).all()
    for keys in ("all keys", "without the sink"):
        rows = [row for row in outcome.tables["ceiling"].to_pylist() if row["keys"] == keys]
        assert [row["at"] for row in rows] == ["1k", "8k", "128k", "1M"]
        for reading in ("as_measured", "growing"):
            shares = [row[reading] for row in rows]
            assert shares == sorted(shares)
        assert all(row["growing"] <= row["as_measured"] for row in rows)


def test_a_model_without_rotation_and_without_groups_says_so(outcome: Outcome) -> None:
    sentence = [finding.ours for finding in outcome.findings if finding.ours.startswith("not applicable")]
    assert len(sentence) == 2
    assert outcome.findings[-1].ours == "not measured: bundled has a context of 1,024: --quick uses small sizes only"
    assert "(bundled has a context of 1,024: --quick uses small sizes only)" in outcome.summary
    assert outcome.parameters["rotation"].startswith("not applicable")
    assert set(outcome.figures) == {"dispersion"}


def test_a_pass_that_was_made_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = measure(QUICK, no_progress, 64, 16, tmp_path)
    monkeypatch.setattr(
        "attnorm_lab.experiments.dispersion.measure.run_forward_pass", None
    )  # a second pass would call it
    again = measure(QUICK, no_progress, 64, 16, tmp_path)
    names = ["layer", "head", "rows", "entropy_nats", "logit_spread"]  # without NaN, which equals nothing
    assert again.variants[RUNS]["heads"].select(names).equals(first.variants[RUNS]["heads"].select(names))
    with pytest.raises(TypeError):
        measure(QUICK, no_progress, 64, 17, tmp_path)


def curve(spread: float, gap_of: float = 0.0, ns: tuple[int, ...] = (16, 64, 256, 1024)) -> list[dict[str, float]]:
    return [
        {
            "layer": 0, "head": 0, "n": float(n), "n_low": n // 2 + 1, "n_high": n, "entropy_nats": math.log(n),
            "max_weight": 1 / n, "logit_spread": spread, "logit_spread_q50": spread, "effective_gap": gap_of,
            "logit_spread_without_sink": spread / 2, "logit_spread_without_sink_q50": spread / 2,
        }
        for n in ns
    ]  # fmt: skip


def one_head(spread: float) -> dict[str, pa.Table]:
    rows = curve(spread)
    names = (
        "kv_head", "rows", "gap_slope", "gap_slope_error", "gap_slope_without_sink", "sink_mass_q50",
        "entropy_nats_q50", "entropy_ratio_q50", "entropy_ratio_without_sink_q50", "max_weight_q50", "horizon_q50",
    )  # fmt: skip
    head = {**rows[-1], **dict.fromkeys(names, 0.0), "length": 1024}
    return {"heads": pa.Table.from_pylist([head]), "by_length": pa.Table.from_pylist(rows)}


def test_uniform_attention_has_entropy_slope_one_and_weight_slope_minus_one() -> None:
    (row,) = head_table(one_head(3.0)).to_pylist()
    assert row["entropy_slope"] == pytest.approx(1)
    assert row["weight_slope"] == pytest.approx(-1)
    assert row["horizon"] == pytest.approx(1 + math.exp(3))
    assert row["horizon_without_sink"] == pytest.approx(1 + math.exp(1.5))


@pytest.mark.parametrize(("spread", "expected"), [(3.0, [1, 1, 1, 1]), (8.0, [0, 1, 1, 1]), (12.0, [0, 0, 0, 1])])
def test_a_head_is_bound_from_its_horizon_on(spread: float, expected: list[float]) -> None:
    tables = one_head(spread)
    key = (1024, RUNS)
    rows = bound_shares({key: head_table(tables)}, {key: tables["by_length"]}).to_pylist()[:4]
    assert [row["as_measured"] for row in rows] == expected
    assert rows[0]["measured"] == float(1 + math.exp(spread) < 1024)
    assert math.isnan(rows[1]["measured"])  # no row of 8k keys was measured


def grouped(slopes: np.ndarray) -> pa.Table:
    layer, head = np.divmod(np.arange(slopes.size), 6)
    return pa.table({"layer": layer, "head": head, "kv_head": head // 3, "gap_slope": slopes.ravel()})


def test_heads_that_share_keys_are_found_alike_only_where_they_are() -> None:
    generator = np.random.default_rng(0)
    noise = generator.normal(size=(10, 6))
    alike = np.repeat(generator.normal(size=(10, 2)), 3, axis=1) + 0.1 * noise
    found = kv_effect(grouped(alike), np.random.default_rng(1), draws=199)
    assert found["within_groups_over_within_layers"] < 0.2
    assert found["p_value"] < 0.01
    other = kv_effect(grouped(noise), np.random.default_rng(1), draws=199)
    assert other["p_value"] > 0.05
    alone = pa.table({"layer": [0, 0], "head": [0, 1], "kv_head": [0, 1], "gap_slope": [0.1, 0.9]})
    assert not kv_effect(alone, np.random.default_rng(1))["applies"]


def test_slopes_of_one_are_no_confirmation_of_the_theory(outcome: Outcome) -> None:
    heads = outcome.tables["heads"]
    flat, steep = (
        heads.set_column(heads.column_names.index("gap_slope"), "gap_slope", pa.array([slope] * 36))
        for slope in (0.0, 1.0)
    )
    curves = {(512, RUNS): outcome.tables["by-length"]}
    groups = {"applies": False}
    verdicts = [
        judge_claims({(512, RUNS): table}, curves, outcome.tables["ceiling"], groups, PassLengths(512, None))[1].verdict
        for table in (flat, steep)
    ]
    assert verdicts == ["reproduces", "does not"]


def far(
    main: int, limit: int | None, *, hard: bool = False, tokens: int = 10**6, longest: int | None = None
) -> PassLengths:
    return choose_pass_lengths(main, limit, hard=hard, tokens=tokens, quick=False, longest=longest, model="m")


def test_the_main_pass_goes_to_the_models_limit_up_to_8192_or_as_far_as_asked() -> None:
    assert main_lengths(8192, quick=False, longest=None)[-1] == 8192
    assert main_lengths(131_072, quick=False, longest=None)[-1] == 8192
    assert main_lengths(131_072, quick=False, longest=32_768)[-2:] == (8192, 32_768)
    assert main_lengths(2048, quick=False, longest=32_768)[-1] == 2048
    assert main_lengths(None, quick=False, longest=5000)[-2:] == (4096, 5000)
    assert main_lengths(131_072, quick=True, longest=None)[-1] == 512


def test_beyond_its_limit_a_model_is_taken_to_twice_or_as_far_as_asked() -> None:
    assert far(8192, 8192) == PassLengths(8192, 16_384)
    assert far(8192, 8192, longest=65_536).beyond == 65_536
    assert far(8192, 8192).sentence == "Measured on 8,192 tokens, and 16,384 beyond the model's context."


@pytest.mark.parametrize(
    ("reached", "why"),
    [
        (far(8192, 131_072), "m has a context of 131,072: use --longest 262144"),
        (far(8192, 131_072, tokens=9000, longest=262_144), "m has a context of 131,072, and the text ends at 9,000"),
        (far(1024, 1024, hard=True), "m has no positions beyond 1,024"),
        (far(8192, 32_768, hard=True), "m has a context of 32,768: use --longest 32768"),
        (far(8192, 8192, tokens=9000), "the text ends at 9,000 tokens, and 16,384 are needed"),
        (far(4096, 4096, longest=4096), "--longest 4096 does not exceed the model's context"),
        (far(8192, None), "m has no fixed context length; use --longest TOKENS for more"),
    ],
)
def test_where_it_does_not_go_further_it_says_why(reached: PassLengths, why: str) -> None:
    assert reached.beyond is None
    assert reached.why_not_beyond == why
    assert reached.sentence == f"Measured on {reached.main:,} tokens ({why})."
