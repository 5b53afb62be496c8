"""Questions about the largest number: where the list is, what heads read of it, and how claims are judged."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attnorm.metrics.call import AttentionCall
from attnorm.models.observe import observe
from attnorm_lab.experiments.experiment import ExperimentSubject
from attnorm_lab.experiments.text_max import TextMax, judge_claims, measure, question, row_reads, summary


@pytest.fixture(scope="module")
def subject() -> ExperimentSubject:
    return ExperimentSubject(quick=True)


def test_the_positions_of_list_largest_number_and_answer_are_known(subject: ExperimentSubject) -> None:
    tokenizer = subject.loaded().tokenizer
    assert tokenizer is not None
    for size in (2, 7):
        one = question(tokenizer, size, np.random.default_rng(size))
        listed = tokenizer.decode(one.ids[slice(*one.listed)]).strip().rstrip(".").split(", ")
        assert len(listed) == size
        largest = max(map(int, listed))
        assert tokenizer.decode(one.ids[slice(*one.largest)]).strip(" ,.") == str(largest)
        assert tokenizer.decode(one.ids[one.prompt :]).strip() == str(largest)


class Characters:
    """A vocabulary in which the space before a number is a token, as in SmolLM2's."""

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_the_answer_starts_with_a_digit() -> None:
    one = question(Characters(), 4, np.random.default_rng(0))
    text = Characters().decode(one.ids)
    assert text[: one.prompt].endswith("The largest number is ")
    assert text[one.prompt :].isdigit()


def test_what_a_row_reads_is_a_sum_of_its_softmax_weights(subject: ExperimentSubject) -> None:
    loaded = subject.loaded()
    one = question(loaded.tokenizer, 4, np.random.default_rng(0))

    def look(call: AttentionCall) -> None:
        q, k = call.query_BHQD[0, :, one.prompt - 1].double(), call.key_BGKD[0, :, : one.prompt].double()
        weights = torch.softmax(torch.einsum("hd,hkd->hk", q, k) * call.scale, -1)
        mass, entropy, share = row_reads(call, one)
        inside = weights[:, slice(*one.listed)]
        np.testing.assert_allclose(mass, inside.sum(-1), rtol=1e-4)
        p = inside / inside.sum(-1, keepdim=True)
        np.testing.assert_allclose(entropy, -(p * p.log()).sum(-1), rtol=1e-3)
        largest = weights[:, slice(*one.largest)].sum(-1) / inside.sum(-1)
        np.testing.assert_allclose(share, largest, rtol=1e-4)

    with torch.no_grad(), observe(loaded.model, look):
        loaded.model(input_ids=torch.tensor([one.ids]))


def test_a_list_beyond_the_models_positions_ends_the_sizes(subject: ExperimentSubject) -> None:
    found = measure(subject, lambda *_: None, (2, 400), 1)
    assert found.sizes == [2]
    assert found.mass.shape == (1, 36)


def test_claims_need_a_model_that_can_do_the_task() -> None:
    heads = np.array([[0.9, 0.1], [0.9, 0.1]])
    entropy = np.array([[1.0, 0.1], [2.0, 0.1]])
    sizes = np.array([8.0, 400.0])
    found = TextMax(
        sizes=[2, 100], tokens=sizes, right=np.array([0.9, 0.1]), first_right=np.array([0.9, 0.2]),
        head_names=["L0H0", "L0H1"], mass=heads, entropy=entropy, keys=sizes, on_largest=heads,
    )  # fmt: skip
    assert [one.verdict for one in judge_claims(found, 32)] == ["reproduces", "partly"]
    assert judge_claims(replace(found, right=np.array([0.4, 0.1])), 32)[0].verdict == "not decided"
    assert judge_claims(replace(found, right=np.array([0.9, 0.9])), 32)[0].verdict == "does not"
    assert judge_claims(replace(found, mass=heads / 3), 32)[1].verdict == "not decided"
    assert "1 of 2 heads read the list" in summary(found)
