"""Texts are known by their hash, runs by what they measured."""

from typing import Any

import pytest
import torch

from attnorm.analysis import manifest


def run(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "schema": manifest.SCHEMA,
        "finished": True,
        "created": "2026-01-01T00:00:00+00:00",
        "model": {"name": "m", "revision": None, "fingerprint": "f", "dtype": "float32", "device": "cpu"},
        "texts": [{"name": "t", "sha256": "a" * 64, "size": ""}],
        "parts": [{"text": "t", "length": 64, "key": "k", "tokens": 64, "seconds": 1.0}],
        "settings": {"lengths": [64], "rows": "all", "normalizers": ["model"], "normalizer_details": {"model": "x"}},
        "versions": {},
        "notes": ["a"],
    }
    return made | changes


def test_a_hash_tells_texts_ids_and_inputs_apart() -> None:
    ids = torch.tensor([[1, 2, 3, 4]])
    contents: list[Any] = [
        "1234",
        "123 4",
        "\ud800",  # a lone surrogate has no UTF-8
        ids,
        ids.T,
        ids.int(),
        ids + 1,
        {"input_ids": ids},
        {"decoder_input_ids": ids},
        {"input_ids": ids, "attention_mask": ids > 1},
        {"pixel_values": torch.tensor(1.0, dtype=torch.bfloat16)},
    ]
    hashes = [manifest.content_hash(content) for content in contents]
    assert len(set(hashes)) == len(hashes)
    assert manifest.content_hash({"a": ids, "b": ids}) == manifest.content_hash({"b": ids, "a": ids})


def test_differences_name_what_is_there_and_what_is_asked_for() -> None:
    here = run()
    there = run(settings=here["settings"] | {"lengths": [64, 128]}, model=here["model"] | {"fingerprint": "g"})
    assert manifest.differences(there, here) == ["other weights", "lengths: 64, 128 there, 64 here"]


def test_differences_are_told_in_words_without_hashes_or_what_follows_from_others() -> None:
    here = run()
    other = run(
        texts=[{"name": "book.txt", "sha256": "b" * 64, "size": ""}],
        model=here["model"] | {"name": "gpt2", "fingerprint": "g", "revision": "0123"},
        settings=here["settings"] | {"normalizers": ["ssmax"], "normalizer_details": {"ssmax": "SSMax() 12ab"}},
    )
    assert manifest.differences(other, here) == [
        "model: gpt2 there, m here", "texts: book.txt there, t here", "normalizers: ssmax there, model here",
    ]  # fmt: skip
    rewritten = run(texts=[{"name": "t", "sha256": "b" * 64, "size": ""}])
    assert manifest.differences(rewritten, here) == ["texts: other content under the name t"]


@pytest.mark.parametrize(
    "change", [{"created": "x"}, {"notes": []}, {"thresholds": {}}, {"finished": False}, {"versions": {"a": "1"}}]
)
def test_what_changes_no_number_makes_no_other_run(change: dict[str, Any]) -> None:
    assert manifest.differences(run(**change), run()) == []


def test_one_folder_reached_by_two_paths_is_one_model() -> None:
    here, there = (run(model=run()["model"] | {"source": source}) for source in ("./m", "/models/m"))
    assert manifest.differences(there, here) == []


def test_a_foreign_manifest_differs_but_does_not_crash() -> None:
    assert manifest.differences({"name": "some web app", "short_name": "app"}, run())


def test_merging_joins_lists_and_keeps_the_originals() -> None:
    here = run()
    there = run(
        settings=here["settings"] | {"lengths": [32, 64], "rows": 5, "normalizers": ["model", "ssmax"]},
        parts=[{"text": "t", "length": 32, "key": "l", "tokens": 32, "seconds": 1.0}],
    )
    both = manifest.merge_manifests([here, there])
    assert both["settings"]["lengths"] == [32, 64]
    assert both["settings"]["normalizers"] == ["model", "ssmax"]
    assert both["settings"]["rows"] is None
    assert [part["key"] for part in both["parts"]] == ["k", "l"]
    assert both["texts"] == here["texts"]
    assert both["merged"] == [here, there]
    again = manifest.merge_manifests([both, here])
    assert again["merged"] == [here, there, here]
