"""Errors are split without a remainder, in bounded memory, and summed up with honest intervals."""

import json
from typing import Any

import pytest
import torch

from attnorm_lab.training.retrieval import evaluate as evaluation
from attnorm_lab.training.retrieval.data import Sets
from attnorm_lab.training.retrieval.evaluate import sets_at, summarize
from attnorm_lab.training.retrieval.model import Retrievers
from tests_lab.training.retrieval_stack import learned, outcomes, trained


@pytest.fixture(scope="module")
def models() -> Retrievers:
    return learned().models


@pytest.mark.parametrize("size", [2, 16, 300])
def test_right_answers_wrong_logits_and_dispersion_add_up_to_one(models: Retrievers, size: int) -> None:
    for record in outcomes(models, (0, 1), size, others=("hard", "sigmoid")):
        assert record["accuracy"] + record["logits_wrong"] + record["dispersed"] == pytest.approx(1, abs=1e-12)
        assert record["dispersed"] <= record["logits_right"]


def test_hard_attention_is_never_dispersed_and_puts_all_weight_on_what_it_finds(models: Retrievers) -> None:
    own, hard = (
        [record for record in outcomes(models, (0, 1), 512, others=("hard",)) if record["tested_with"] == name]
        for name in ("own", "hard")
    )
    assert all(record["dispersed"] == 0 for record in hard)
    assert any(record["dispersed"] > 0 for record in own)
    assert all(record["winner_weight"] == record["logits_right"] for record in hard)
    assert [record["margin"] for record in own] == [record["margin"] for record in hard]


def test_the_split_by_hand() -> None:
    """Four sets of two items: right, lucky, wrong logits, dispersed."""
    logits = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [3.0, 0.0]]])
    right = torch.tensor([[True, True, False, False]])
    label = torch.zeros(1, 4, dtype=torch.long)
    drawn = Sets(torch.zeros(1, 4, 2, 11), torch.zeros(1, 4, 1), torch.ones(1, 4, 2, dtype=torch.bool), label, label)
    found = evaluation._outcomes(drawn, logits, torch.full((1, 4, 2), 0.5), right)
    assert found["logits_wrong"].tolist() == [[False, False, True, False]]
    assert found["dispersed"].tolist() == [[False, False, False, True]]
    assert found["margin"].tolist() == [[1.0, -1.0, -1.0, 3.0]]
    assert found["spread"].tolist() == [[1.0, 1.0, 1.0, 3.0]]


def test_slices_change_nothing_but_memory(models: Retrievers, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = outcomes(models, (0, 1), 100, sets=20, others=("entmax15",))
    monkeypatch.setitem(evaluation.SLICE_BYTES, "cpu", 2 * 20 * 32 * 16 * 7)  # seven items at a time
    sliced = outcomes(models, (0, 1), 100, sets=20, others=("entmax15",))
    for one, other in zip(whole, sliced, strict=True):
        assert one.pop("tested_with") == other.pop("tested_with")
        assert one == pytest.approx(other, rel=1e-4)


def test_very_large_sets_are_fewer() -> None:
    assert [sets_at(size, 1024) for size in (2, 16_384, 131_072, 2**30)] == [1024, 1024, 128, 1]


def test_131072_items(models: Retrievers) -> None:
    records = outcomes(models, (0, 1), 131_072, sets=1)
    assert [record["size"] for record in records] == [131_072, 131_072]


def test_a_model_that_broke_down_leaves_json_behind() -> None:
    broken = trained(steps=1).models
    with torch.no_grad():
        broken.to_key.bias_S1O.fill_(torch.nan)
    (record,) = outcomes(broken, (0,), 16, sets=8)
    assert record["margin"] is None
    json.dumps(record, allow_nan=False)


def record(seed: int, accuracy: float, **more: Any) -> dict[str, Any]:
    return {
        "normalizer": "softmax",
        "tested_with": "own",
        "size": 16,
        "sets": 9,
        "seed": seed,
        "accuracy": accuracy,
        **more,
    }


def test_means_come_with_the_interval_of_students_t() -> None:
    (row,) = summarize([record(0, 0.7), record(1, 0.8), record(2, 0.9)])
    assert row.accuracy.value == pytest.approx(0.8)
    assert row.accuracy.half_width == pytest.approx(4.302653 * 0.1 / 3**0.5)  # t of 2 degrees of freedom
    assert (row.seeds, row.logits_wrong, row.leak) == (3, None, None)


def test_one_seed_has_no_interval_and_a_missing_number_no_mean() -> None:
    (row,) = summarize([record(0, 0.7)])
    assert row.accuracy.half_width is None
    (row,) = summarize([record(0, 0.7, leak=0.1), record(1, 0.7, leak=None)])
    assert row.leak is None
