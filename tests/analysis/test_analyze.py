"""analyze(): the numbers are those of the dense matrix, whatever the model, the batch and the other parts."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import attnorm
from attnorm.analysis.analyze import AnalysisProgress, analyze
from attnorm.analysis.collect import Collector
from attnorm.analysis.result import Analysis
from attnorm.analysis.settings import settings_of
from attnorm.metrics.call import AttentionCall
from attnorm.models.dispatch import UnsupportedModel
from attnorm.models.forward_pass import run
from attnorm.models.inputs import prepared, texts_from
from attnorm.models.load import load
from attnorm.models.observe import observe
from attnorm.models.patch import patch
from tests.analysis.tiny_models import diffllama, gpt2, ids, llama, t5, vit
from tests.metrics.as_on_gpu import as_on_gpu
from tests.metrics.calls import make_call
from tests.metrics.reference import dense_logits, dense_visible, dense_weights, row_limits, row_statistics

CORE: dict[str, Any] = {"metrics": "core", "top_n": (1, 5)}


def calls_of(model: PreTrainedModel, inputs: Any) -> list[AttentionCall]:
    loaded, calls = load(model), []
    with observe(model, calls.append):
        run(loaded, prepared(texts_from(inputs)[0], loaded, None))
    return calls


def numbers(table: pa.Table, drop: tuple[str, ...] = ("text", "length")) -> dict[str, Any]:
    """Columns as bytes, so that NaN equals NaN and every bit counts."""
    return {
        name: column.to_numpy().tobytes() if column.type == pa.float64() else column.to_pylist()
        for name, column in zip(table.column_names, table.columns, strict=True)
        if name not in drop
    }


def same(here: Analysis, there: Analysis) -> bool:
    return all(numbers(here.tables[name]) == numbers(there.tables[name]) for name in here.tables)


@pytest.mark.parametrize(
    ("make", "padding"),
    [
        (gpt2, False), (llama, True),
        *(
            pytest.param(*one, marks=pytest.mark.nightly)
            for one in ((gpt2, True), (llama, False), (diffllama, False), (diffllama, True))
        ),
    ],
)  # fmt: skip
def test_layers_measured_together_have_the_numbers_of_layers_measured_alone(
    make: Any, padding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; padding makes each sequence of the batch one of its own."""
    tokens = torch.stack([ids(26), ids(26, seed=1)])
    padded = {"input_ids": tokens, "attention_mask": (torch.arange(26) < torch.tensor([[26], [19]])).long()}
    options: dict[str, Any] = {"normalizers": ("model", "ssmax"), "metrics": "all", "top_n": (1, 5)}
    inputs = padded if padding else tokens[0]
    alone = analyze(make(), inputs, **options)
    with monkeypatch.context() as patched:
        as_on_gpu(patched)
        together = analyze(make(), inputs, **options)
    for name, table in alone.tables.items():
        assert table.column_names == together.tables[name].column_names
        for column in table.column_names:
            here, there = (one.tables[name][column].to_pylist() for one in (alone, together))
            if table[column].type == pa.float64():
                assert here == pytest.approx(there, rel=1e-5, abs=1e-6, nan_ok=True), (name, column)
            else:
                assert here == there, (name, column)


class Operators(TorchDispatchMode):
    """Counts every operator of torch."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_layers_that_wait_keep_the_tokens_they_came_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """observe() replaces the tokens with every call."""
    call = make_call(20, batch=2)
    tokens = torch.arange(20) < torch.tensor([[20], [13]])
    settings = settings_of(
        normalizers={"model": None}, top_n=(1,), rows="all", vectors="values", vector_rows=None, metrics="core",
        temperatures=(1.0,), seed=0,
    )  # fmt: skip

    def heads() -> list[dict[str, Any]]:
        collector = Collector(settings, {"model": None}, {"encoder": tokens}, lambda done: None)
        for layer in (0, 1):
            collector(replace(call, layer=layer, kind="encoder", causal=False))
        collector.tokens = {}
        collector(replace(call, layer=0, kind="decoder"))
        collector.finish()
        found: list[dict[str, Any]] = collector.tables("text", 20)["heads"].to_pylist()
        return found

    alone = heads()
    as_on_gpu(monkeypatch)
    together = heads()
    assert [row["rows"] for row in alone] == [33] * 8 + [12] * 4  # the last: n from 15 to 20
    assert [row["rows"] for row in together] == [row["rows"] for row in alone]
    assert [row["entropy_nats"] for row in together] == pytest.approx([row["entropy_nats"] for row in alone])


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("normalizer", ["model", "entmax15"])
def test_the_tables_are_those_of_the_dense_matrix(make: Any, normalizer: str) -> None:
    model, tokens = make(), ids(48)
    analysis = analyze(model, tokens, normalizers=(normalizer,), **CORE)
    chosen = None if normalizer == "model" else attnorm.get(normalizer)
    assert isinstance(chosen, attnorm.Normalizer | None)
    heads = analysis.heads.to_pylist()
    assert len(heads) == 2 * model.config.num_attention_heads
    for call in calls_of(model, tokens):
        logits, weights, visible = dense_logits(call)[0], dense_weights(call, chosen)[0], dense_visible(call)[0]
        for head in range(logits.shape[0]):
            rows = [row_statistics(logits[head, q], weights[head, q], visible[head, q], (1, 5)) for q in range(48)]
            limits = [row_limits(logits[head, q][visible[head, q]]) for q in range(48)]
            rows = [row | limit for row, limit in zip(rows, limits, strict=True)] if chosen is None else rows
            longest = rows[33:]  # 48 / sqrt 2 = 33.9: n = 34 ... 48
            [found] = [row for row in heads if (row["layer"], row["head"]) == (call.layer, head)]
            assert (found["n_low"], found["n_high"], found["rows"], found["broken_rows"]) == (34, 48, 15, 0)
            for name in ("entropy_nats", "effective_keys", "max_weight", "logit_spread", "sink_mass", "entropy_floor"):
                values = [row.get(name, np.nan) for row in longest]
                if np.isnan(values).all():  # no limit is known for another map
                    assert chosen is not None
                    assert np.isnan(found[name]), name
                    continue
                assert found[name] == pytest.approx(np.median(values), rel=1e-4, abs=1e-6), name
                assert found[f"{name}_mean"] == pytest.approx(np.mean(values), rel=1e-4, abs=1e-6), name
                assert found[f"{name}_q25"] == pytest.approx(np.quantile(values, 0.25), rel=1e-4, abs=1e-6), name
            if chosen is None:
                horizons = [row["horizon"] for row in longest]
                beyond = [n > horizon for n, horizon in enumerate(horizons, start=34)]
                assert found["forced_share"] == pytest.approx(np.mean(beyond))
                assert found["horizon"] == pytest.approx(np.median(horizons), rel=1e-4), (
                    "as verdicts and report read it"
                )
            where = {"layer": call.layer, "head": head}
            for N in (1, 5):
                [mass] = [
                    row["mass"] for row in analysis.top_n.to_pylist() if row.items() >= {**where, "top_n": N}.items()
                ]
                assert mass == pytest.approx(np.mean([row[f"top_mass_{N}"] for row in longest]), rel=1e-4)
            curve = [row for row in analysis.by_length.to_pylist() if row.items() >= where.items()]
            assert [(row["n_low"], row["n_high"]) for row in curve] == [
                (8, 8), (9, 12), (13, 16), (17, 24), (25, 33), (34, 48),
            ]  # fmt: skip
            for row in curve:
                values = [rows[n - 1]["entropy_nats"] for n in range(row["n_low"], row["n_high"] + 1)]
                assert row["entropy_nats"] == pytest.approx(np.median(values), rel=1e-4)
                assert row["entropy_nats_mean"] == pytest.approx(np.mean(values), rel=1e-4)
                assert row["n"] == pytest.approx((row["n_low"] + row["n_high"]) / 2)
                assert row["rows"] == len(values)
            if normalizer == "model":
                _check_slope(found, curve, rows)


def _check_slope(found: Mapping[str, Any], curve: list[dict[str, Any]], rows: list[dict[str, float]]) -> None:
    """Of the medians on log n, from the bins whose mean n is 16 or more."""
    bins = [row for row in curve if row["n"] >= 16]
    assert len(bins) == 3
    gaps = [np.median([rows[n - 1]["effective_gap"] for n in range(b["n_low"], b["n_high"] + 1)]) for b in bins]
    assert found["gap_slope"] == pytest.approx(
        np.polyfit(np.log([b["n"] for b in bins]), gaps, 1)[0], rel=1e-3, abs=1e-4
    )


def test_too_few_lengths_give_no_slope() -> None:
    analysis = analyze(gpt2(), ids(24), **CORE)
    assert np.isnan(analysis.heads["gap_slope"].to_numpy()).all()
    assert np.isnan(analysis.heads["gap_slope_error"].to_numpy()).all()


def test_the_same_seed_gives_the_same_bits_and_another_seed_others() -> None:
    model, tokens = gpt2(layers=1), ids(40)
    options: dict[str, Any] = {"metrics": "all", "top_n": (5,), "vector_rows": 4, "temperatures": (1.0,)}
    first, again, other = (analyze(model, tokens, seed=seed, **options) for seed in (0, 0, 1))
    assert same(first, again)
    assert not same(first, other)
    assert numbers(first.by_length) == numbers(other.by_length)


def test_a_part_does_not_depend_on_the_others() -> None:
    model, texts = gpt2(layers=1), {"a": ids(64), "b": ids(64, seed=1)}
    options: dict[str, Any] = {"metrics": "all", "top_n": (5,), "vector_rows": 4, "temperatures": (1.0,)}
    alone = analyze(model, {"b": texts["b"]}, lengths=(32,), **options)
    together = analyze(model, texts, lengths=(16, 32), **options)
    for name, table in alone.tables.items():
        rows = table.to_pylist()
        found = [row for row in together.tables[name].to_pylist() if (row["text"], row["length"]) == ("b", 32)]
        assert repr(found) == repr(rows), name
    assert alone.manifest["parts"][0]["key"] == together.manifest["parts"][6]["key"]


def test_normalizers_share_the_logits_and_do_not_change_each_other() -> None:
    model, tokens = gpt2(layers=1), ids(40)
    both = analyze(model, tokens, normalizers=("model", "sparsemax"), **CORE)
    alone = analyze(model, tokens, normalizers=("sparsemax",), **CORE)
    assert alone.verdict.headline.startswith("With sparsemax in place of softmax: ")
    assert "in place of" not in both.verdict.headline
    rows = [row for row in both.heads.to_pylist() if row["normalizer"] == "sparsemax"]
    spread = {row["head"]: row["logit_spread"] for row in both.heads.to_pylist() if row["normalizer"] == "model"}
    assert [row["entropy_nats"] for row in rows] == alone.heads["entropy_nats"].to_pylist()
    assert [row["logit_spread"] for row in rows] == pytest.approx(list(spread.values()))


def padded(side: str) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Two sequences of 40 and 25 tokens in one batch."""
    long, short = ids(40), ids(25, seed=1)
    fill, mask = torch.zeros(15, dtype=torch.long), torch.ones(2, 40, dtype=torch.long)
    mask[1, 25:] = 0
    if side == "left":
        mask[1] = mask[1].flip(0)
    second = torch.cat([short, fill] if side == "right" else [fill, short])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": torch.stack([long, second]), "attention_mask": mask, "position_ids": positions}, [long, short]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("rows", ["all", "last", 6])
def test_a_padded_batch_is_the_sum_of_its_sequences(side: str, rows: Any) -> None:
    model = llama()
    batch, alone = padded(side)
    together = analyze(model, batch, rows=rows, **CORE)
    assert together.heads["length"].unique().to_pylist() == [40]
    pool: dict[tuple[int, int, int], tuple[float, int]] = {}
    parts = [analyze(model, tokens, rows=rows, **CORE) for tokens in alone]
    measured = sum(sum(part.by_length["rows"].to_pylist()) for part in parts)
    short_rows = [row for part in parts for row in part.by_length.to_pylist() if row["n_high"] <= 40]
    assert sum(together.by_length["rows"].to_pylist()) == measured
    # Bins are anchored at the longest sequence, so compare what no bin boundary touches: sums over all rows of a head.
    for row in short_rows:
        at = (row["layer"], row["head"], 0)
        total, count = pool.get(at, (0.0, 0))
        pool[at] = total + row["rows"] * row["entropy_nats_mean"], count + row["rows"]
    found: dict[tuple[int, int, int], float] = {}
    for row in together.by_length.to_pylist():
        at = (row["layer"], row["head"], 0)
        found[at] = found.get(at, 0.0) + row["rows"] * row["entropy_nats_mean"]
    assert found == pytest.approx({at: total for at, (total, _) in pool.items()}, rel=1e-4)


def test_two_copies_of_a_sequence_are_the_sequence_twice() -> None:
    model, tokens = gpt2(layers=1), ids(40)
    once, twice = analyze(model, tokens, **CORE), analyze(model, tokens.expand(2, -1), **CORE)
    assert twice.heads["rows"].to_pylist() == [2 * rows for rows in once.heads["rows"].to_pylist()]
    assert twice.heads["entropy_nats_q50"].to_numpy() == pytest.approx(
        once.heads["entropy_nats_q50"].to_numpy(), rel=1e-5
    )


def test_the_costly_numbers_of_a_padded_batch_come_from_its_tokens_only() -> None:
    model = gpt2(layers=1)
    batch, [long, _] = padded("right")
    options: dict[str, Any] = {"metrics": ("vectors", "coverage"), "top_n": (1, 5), "rows": "last"}
    together, alone = analyze(model, batch, **options), analyze(model, long, **options)
    # Only the longer sequence has rows in the longest bin.
    for name in ("d_tilde", "separability", "separability_null", "random_upper"):
        assert together.top_n[name].to_numpy() == pytest.approx(alone.top_n[name].to_numpy(), rel=1e-4), name
    assert together.coverage["union"].to_numpy() == pytest.approx(alone.coverage["union"].to_numpy())
    assert together.coverage["rows"].to_pylist() == alone.coverage["rows"].to_pylist() == [1, 1]


def test_an_encoder_decoder_has_three_kinds_of_attention() -> None:
    analysis = analyze(t5(), {"input_ids": ids(24, batch=1), "decoder_input_ids": ids(10, batch=1, seed=1)}, **CORE)
    rows = analysis.heads.to_pylist()
    found = {
        kind: {(row["layer"], row["head"]) for row in rows if row["kind"] == kind}
        for kind in ("encoder", "decoder", "cross")
    }
    assert all(at == {(layer, head) for layer in range(2) for head in range(4)} for at in found.values())
    reach = {(row["kind"], row["n_high"], row["rows"]) for row in rows}
    assert reach == {("encoder", 24, 24), ("decoder", 10, 3), ("cross", 24, 10)}
    assert {row["length"] for row in rows} == {24}


def test_padding_of_an_encoder_decoder_is_no_row_of_either() -> None:
    tokens = torch.ones(2, 24, dtype=torch.long), torch.ones(2, 10, dtype=torch.long)
    tokens[0][1, 15:] = 0
    tokens[1][0, 8:] = 0
    batch = {"input_ids": ids(24, batch=2), "decoder_input_ids": ids(10, batch=2, seed=1)}
    batch |= {"attention_mask": tokens[0], "decoder_attention_mask": tokens[1]}
    analysis = analyze(t5(), batch, **CORE)
    found = {
        (row["kind"], row["n"], row["rows"])
        for row in analysis.by_length.to_pylist()
        if (row["layer"], row["head"]) == (0, 0)
    }
    # Tokens of an encoder see all 24 or 15 of its tokens, those of a decoder the ones before; below 8 keys is no bin.
    encoder, cross = {("encoder", 24.0, 24), ("encoder", 15.0, 15)}, {("cross", 24.0, 8), ("cross", 15.0, 10)}
    assert found == encoder | cross | {("decoder", (8 + 8 + 9 + 10) / 4, 4)}


def test_an_image_model_is_measured_on_its_patches() -> None:
    analysis = analyze(
        vit(),
        {"pixel_values": torch.randn(3, 3, 16, 16)},
        top_n=(1, 5),
        temperatures=(1.0,),
        vector_rows=2,
        metrics="all",
    )
    assert analysis.heads["kind"].unique().to_pylist() == ["encoder"]
    assert analysis.heads["n_high"].unique().to_pylist() == [17]
    assert analysis.heads["rows"].unique().to_pylist() == [3 * 17]
    assert analysis.top_n["rows"].unique().to_pylist() == [3 * 2]
    assert not np.isnan(analysis.top_n["separability"].to_numpy()).any()
    assert not np.isnan(analysis.heads["effective_rank"].to_numpy()).any()


def test_a_patched_model_is_measured_as_it_runs() -> None:
    model, tokens = gpt2(layers=2), ids(40)
    what_if = analyze(model, tokens, normalizers=("entmax15",), **CORE)
    plain_key = what_if.manifest["parts"][0]["key"]
    handle = patch(model, "entmax15")
    analysis = analyze(model, tokens, **CORE)
    assert analysis.heads["normalizer"].unique().to_pylist() == ["model"]
    assert analysis.manifest["model"]["runs"] == "entmax15"
    assert analysis.manifest["parts"][0]["key"] != plain_key
    layer0 = [row["entropy_nats"] for row in analysis.heads.to_pylist() if row["layer"] == 0]
    expected = [row["entropy_nats"] for row in what_if.heads.to_pylist() if row["layer"] == 0]
    assert layer0 == pytest.approx(expected, rel=1e-4)  # the first layer gets the same input either way
    handle.remove()
    assert analyze(model, tokens, **CORE).manifest["model"]["runs"] == "softmax"


def test_a_model_with_a_mechanism_is_rejected_before_any_work(tmp_path: Path) -> None:
    model, inputs = llama(), ids(24)
    patch(model, "linear", layers=1)
    progress: list[AnalysisProgress] = []
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.self_attn.*'linear'.*--normalizers softmax"):
        analyze(model, inputs, normalizers=("softmax", "model"), out=tmp_path / "run", progress=progress.append)
    assert not progress
    assert not (tmp_path / "run").exists()
    assert analyze(model, inputs, normalizers="softmax", **CORE).heads.num_rows == 8


def test_broken_weights_are_flagged_and_never_averaged() -> None:
    model, tokens = gpt2(layers=3), ids(40)
    sound = analyze(model, tokens, **CORE)
    with torch.no_grad():
        attention = model.transformer.h[1].attn.c_attn
        attention.weight[:, 0] = torch.nan  # a query weight of the first head of the second layer
    analysis = analyze(model, tokens, **CORE)
    broken = {(row["layer"], row["head"]): row for row in analysis.heads.to_pylist()}
    for head in range(2):
        assert broken[0, head]["broken_rows"] == 0
        assert broken[0, head]["entropy_nats"] == sound.head(0, head).numbers["entropy_nats"]
        assert broken[2, head]["broken_rows"] == 40  # NaN has spread through the residual stream
    assert (broken[1, 0]["broken_rows"], broken[1, 1]["broken_rows"]) == (40, 0)
    assert broken[1, 0]["verdict"] == "broken"
    assert broken[1, 0]["rows"] == 0
    assert np.isnan(broken[1, 0]["entropy_nats"])
    assert broken[1, 1]["entropy_nats"] == sound.head(1, 1).numbers["entropy_nats"]
    [note] = [note for note in analysis.manifest["notes"] if "not finite" in note]
    assert note.startswith("3 of 6 heads")
    several = analyze(model, tokens, lengths=(10, 20), windows=2, normalizers=("model", "sparsemax"), **CORE)
    assert [note[:12] for note in several.manifest["notes"] if "not finite" in note] == ["3 of 6 heads"]
    assert note in analysis.summary()
    assert analysis.verdict.counts["broken"] == 3


def test_a_row_that_is_broken_leaves_the_others_alone() -> None:
    model, tokens = gpt2(layers=1), ids(40)
    with torch.no_grad():
        model.transformer.wpe.weight[39] = torch.inf
    analysis = analyze(model, tokens, **CORE)
    assert analysis.heads["broken_rows"].to_pylist() == [1, 1]
    assert analysis.heads["rows"].to_pylist() == [11, 11]
    assert np.isfinite(analysis.heads["entropy_nats"].to_numpy()).all()


def test_groups_that_were_not_asked_for_stay_empty() -> None:
    analysis = analyze(gpt2(layers=1), ids(20), **CORE)
    assert analysis.sensitivity.num_rows == analysis.coverage.num_rows == 0
    assert np.isnan(analysis.top_n["separability"].to_numpy()).all()
    assert np.isnan(analysis.heads["mean_cosine"].to_numpy()).all()
    assert not np.isnan(analysis.heads["jacobian_norm"].to_numpy()).any()
    assert not [note for note in analysis.manifest["notes"] if "at most" in note]


def test_layer_inputs_can_take_the_place_of_values() -> None:
    model, tokens = llama(), ids(20)
    options: dict[str, Any] = {"metrics": "vectors", "top_n": (2,), "vector_rows": 2}
    values, inputs = (analyze(model, tokens, vectors=vectors, **options) for vectors in ("values", "inputs"))
    assert values.heads["effective_rank"].to_pylist() != inputs.heads["effective_rank"].to_pylist()
    # All heads of a layer mix the same inputs; of values, each key/value head has its own.
    assert len(set(inputs.heads["effective_rank"].to_pylist())) == 2
    assert len(set(values.heads["effective_rank"].to_pylist())) == 4
    assert values.heads["kv_head"].to_pylist() == [0, 0, 1, 1] * 2


def test_progress_tells_layers_tokens_and_parts() -> None:
    seen: list[AnalysisProgress] = []
    analyze(gpt2(layers=2), ids(64), lengths=(16, 32), windows=1, progress=seen.append, **CORE)
    assert [(p.parts_done, p.layers_done) for p in seen] == [
        (0, 0), (0, 1), (0, 2), (1, 2), (1, 0), (1, 1), (1, 2), (2, 2),
    ]  # fmt: skip
    assert {(p.parts_total, p.tokens_total, p.layers_total) for p in seen} == {(2, 48, 2)}
    assert [p.tokens_done for p in seen] == [0, 0, 0, 16, 16, 16, 16, 48]
    assert [p.length for p in seen] == [16] * 4 + [32] * 4


def test_the_model_is_left_as_it_was() -> None:
    model = gpt2(layers=1).train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    analyze(model, ids(20), **CORE)
    assert model.training
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    with pytest.raises(ZeroDivisionError):
        analyze(model, ids(20), progress=lambda p: 1 // 0, **CORE)
    analyze(model, ids(20), **CORE)  # not "observed already"


def test_thresholds_of_another_type_are_rejected_before_the_model_runs() -> None:
    model: Any = gpt2(layers=1)
    wrong: Any = {"dispersed_entropy": 0.5}
    measured = analyze(model, ids(20), **CORE)
    model.forward = None  # it must not run
    with pytest.raises(TypeError, match=r"attnorm\.Thresholds, got dict"):
        analyze(model, ids(20), thresholds=wrong, **CORE)
    with pytest.raises(TypeError, match="got dict"), attnorm.observe(thresholds=wrong):
        pass
    with pytest.raises(TypeError, match="got dict"):
        measured.judged(wrong)


def test_without_arguments_the_bundled_model_reads_its_own_passage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnorm.analysis.plan.MAX_WINDOWS", 2)
    analysis = analyze(rows="last", metrics="core")
    assert analysis.manifest["model"]["name"] == analysis.manifest["model"]["source"] == "bundled"
    assert [text["name"] for text in analysis.manifest["texts"]] == ["the bundled model's own passage"]
    (longest,) = analysis.heads["n_high"].unique().to_pylist()
    assert longest == analysis.manifest["parts"][0]["length"] <= 1024
    assert analysis.heads["rows"].unique().to_pylist() == [len(analysis.manifest["parts"])], "the last row of each"
    assert np.isfinite(analysis.heads["entropy_nats"].to_numpy()).all()


def test_the_heads_of_a_layer_that_attends_twice_are_numbered_on() -> None:
    model = diffllama()
    calls = calls_of(model, ids(48))
    assert [call.layer for call in calls] == [0, 0, 1, 1], "two calls of each layer"
    analysis = analyze(model, ids(48), top_n=(1, 5), vector_rows=4, metrics="all")
    heads = analysis.heads.to_pylist()
    assert [(row["layer"], row["head"]) for row in heads] == [(layer, head) for layer in (0, 1) for head in range(8)]
    assert [row["kv_head"] for row in heads[:8]] == [0, 0, 1, 1, 2, 2, 3, 3]
    for name, key in (("by_length", ("n_low",)), ("top_n", ("top_n",)), ("sensitivity", ("temperature",))):
        keys = [(row["layer"], row["head"], *(row[one] for one in key)) for row in analysis.tables[name].to_pylist()]
        assert len(set(keys)) == len(keys), name
        assert {head for _, head, *_ in keys} == set(range(8)), name
    covered = [(row["layer"], row["top_n"]) for row in analysis.coverage.to_pylist()]
    assert len(set(covered)) == len(covered) == 4
    for first, second in zip(heads[:4], heads[4:8], strict=True):
        assert first["entropy_nats"] == second["entropy_nats"], "the same queries and keys"
    values = [row["d_tilde"] for row in analysis.top_n.to_pylist() if row["layer"] == 0 and row["top_n"] == 5]
    assert values[:4] != values[4:], "other values"
    assert any("attend more than once" in note for note in analysis.manifest["notes"])
    assert Analysis.merged([analysis, analysis]).heads.num_rows == 16
    assert not any("attend more" in note for note in analyze(llama(), ids(16), **CORE).manifest["notes"])


def untrained() -> PreTrainedModel:
    """Logits that hardly differ."""
    model = gpt2()
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight *= 0.2
    return model


def test_flat_logits_are_forced_under_softmax_however_it_is_rescaled() -> None:
    """No factor that a row of 96 keys gets at the start makes up for logits that hardly differ."""
    steep = attnorm.get("ssmax", s=1e4)
    steep.name = "steep"
    found = analyze(untrained(), ids(96), normalizers=("model", "ssmax", steep, "entmax15"), **CORE)
    verdicts: dict[str, set[str]] = {}
    for row in found.heads.to_pylist():
        verdicts.setdefault(row["normalizer"], set()).add(row["verdict"])
        assert np.isnan(row["horizon"]) == (row["normalizer"] == "entmax15")
        assert row["normalizer"] == "entmax15" or row["max_weight_q95"] <= row["weight_ceiling_q95"] * (1 + 1e-6)
    assert verdicts["model"] == verdicts["ssmax"] == {"dispersed-forced"}
    assert "dispersed-forced" not in verdicts["steep"]
    assert verdicts["entmax15"] == {"dispersed"}


def test_a_ceiling_that_not_all_heads_have_is_not_told_of_all() -> None:
    model = untrained()
    with attnorm.swap(model, "entmax15", layers=1):
        found = analyze(model, ids(160), rows=32, **CORE)
    with_one = sum(not np.isnan(horizon) for horizon in found.heads["horizon"].to_pylist())
    assert 0 < with_one < found.heads.num_rows
    assert f"all {with_one} heads with a horizon are beyond it" in found.verdict.headline


def test_a_patched_model_is_judged_by_what_it_runs() -> None:
    model = untrained()
    with attnorm.swap(model, "ssmax"):
        found = analyze(model, ids(160), rows=32, **CORE)
    assert set(found.heads["verdict"].to_pylist()) == {"dispersed-forced"}
    assert "all are beyond their horizon, where ssmax" in found.verdict.headline
    advice = next(one for one in found.verdict.advice if "normalizer" in one.title)
    assert "ssmax" not in advice.title + (advice.command or "")
    assert "would allow" not in advice.text
