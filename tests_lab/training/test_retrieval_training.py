"""Stacks learn, seeds stand alone, penalties do what they are for."""

from collections.abc import Iterator

import pytest
import torch

from attnorm.normalizers.spec import parse_spec
from attnorm_lab.training.retrieval.data import TASKS, find_task, training_batches
from attnorm_lab.training.retrieval.evaluate import class_leak, leak_at_top, leaked_share
from attnorm_lab.training.retrieval.model import Retrievers, normalizer_for
from attnorm_lab.training.retrieval.train import Trained
from tests_lab.training.retrieval_stack import CPU, learned, outcomes, small, trained


@pytest.fixture(scope="module")
def stack() -> Trained:
    return learned()


@pytest.fixture
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def test_the_loss_falls_and_16_items_are_mostly_right(stack: Trained) -> None:
    first = trained(seeds=(0, 1), steps=1)
    assert max(stack.losses) < 0.5 * min(first.losses)
    assert all(record["accuracy"] > 0.75 for record in outcomes(stack.models, (0, 1), 16))


@pytest.mark.parametrize("task", ["recall", pytest.param("majority", marks=pytest.mark.nightly)])
def test_the_other_tasks_can_be_learned(task: str) -> None:
    record = outcomes(trained(task=task, steps=150).models, (0,), 16, task)[0]
    assert record["accuracy"] > 0.3, "chance is 0.1"
    assert ("dispersed" in record) == (task == "recall")


@pytest.mark.parametrize("normalizer", ["softmax", "ssmax", "asentmax"])
def test_a_stack_equals_separate_trainings(normalizer: str, in_float64: None) -> None:
    """In float64: the key's bias shifts all logits, so its gradient is rounding, which Adam blows up to full steps."""
    options = {"steps": 6, "batch": 16, "width": 16, "leak_penalty": 0.3, "squeezed": 0.5, "cosine": True}
    together = trained(normalizer, (0, 1, 2), **options)
    records = outcomes(together.models, (0, 1, 2), 50, sets=300)
    for copy, seed in enumerate((0, 1, 2)):
        alone = trained(normalizer, (seed,), **options)
        ours, theirs = together.models.state_dict(), alone.models.state_dict()
        for name, weight in theirs.items():
            torch.testing.assert_close(ours[name][copy], weight[0], rtol=1e-6, atol=1e-7, msg=f"{name} of seed {seed}")
        torch.testing.assert_close(together.losses[copy], alone.losses[0], rtol=1e-7, atol=1e-9)
        (record,) = outcomes(alone.models, (seed,), 50, sets=300)
        assert records[copy]["seed"] == seed
        assert records[copy]["spread"] == pytest.approx(record["spread"], rel=1e-6)
        assert records[copy]["accuracy"] == pytest.approx(record["accuracy"], abs=0.004)  # one set


def test_starting_weights_do_not_depend_on_normalizer_or_neighbors() -> None:
    first, second = (
        Retrievers(find_task("max"), normalizer_for(name, len(seeds)), seeds, 16)
        for name, seeds in (("softmax", [3, 7]), ("ssmax", [7]))
    )
    assert torch.equal(first.to_key.weight_SIO[1], second.to_key.weight_SIO[0])
    assert not torch.equal(first.to_key.weight_SIO[0], first.to_key.weight_SIO[1])
    assert first.to_key.weight_SIO.abs().max() <= 16**-0.5


def test_what_a_normalizer_learns_it_learns_for_each_seed() -> None:
    models = trained("ssmax", (0, 1), steps=20).models
    parameters = dict(models.normalizer.named_parameters())
    assert parameters
    assert all(len(set(value.flatten().tolist())) == 2 for value in parameters.values())


@pytest.mark.parametrize(("steps", "loss"), [(60, 2.3), pytest.param(160, 1.0, marks=pytest.mark.nightly)])
def test_the_penalty_lowers_what_the_class_adds_to_the_logits(steps: int, loss: float) -> None:
    """On fresh sets, to a fraction; and the models still learn, which takes more steps."""
    fresh = small(steps=1, batch=256, leak_penalty=1.0, leak_from=0.0)
    batch = next(training_batches(find_task("max"), (8, 9), fresh, CPU))
    shares = []
    for penalty in (0.0, 300.0):
        stack = trained(seeds=(0, 1), steps=steps, leak_penalty=penalty, leak_from=0.5, cosine=True)
        assert max(stack.losses) < loss, "a guess costs log 10 = 2.303"
        with torch.no_grad():
            logits = stack.models.logits(stack.models.read(batch.items_SBNF), batch.query_SBF)
            shares.append(leaked_share(stack.models, batch, logits))
    assert (shares[1] < 0.3 * shares[0]).all()


def test_the_leak_is_in_units_of_priority() -> None:
    """A logit 3 p + b with b = -1 or 1 by class: two items 2/3 apart in priority are level."""
    models = Retrievers(find_task("max"), normalizer_for("softmax", 1), [0], 8)

    def logits(read: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        items = read.unflatten(1, (query.shape[1], -1))
        return 3 * items[..., 0] + torch.where(items[..., 1:].argmax(-1) % 2 == 0, 1.0, -1.0)

    models.read = lambda items: items.flatten(1, 2)  # type: ignore[method-assign]
    models.logits = logits  # type: ignore[method-assign]
    (found,) = class_leak(models)
    assert found == pytest.approx({"slope": 3.0, "leak": 1 / 3}, rel=1e-4)


def test_the_leak_at_the_top_is_that_among_the_best_of_a_set() -> None:
    """A logit 2 p + (1 - p) b with b = -1 or 1 by class: the leak goes to 0 at the top."""
    models = Retrievers(find_task("max"), normalizer_for("softmax", 1), [0], 8)

    def logits(read: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        items = read.unflatten(1, (query.shape[1], -1)).double()
        sign = torch.where(items[..., 1:].argmax(-1) % 2 == 0, 1.0, -1.0)
        return 2 * items[..., 0] + (1 - items[..., 0]) * sign

    models.read = lambda items: items.flatten(1, 2)  # type: ignore[method-assign]
    models.logits = logits  # type: ignore[method-assign]
    for size in (4, 99, 9999):
        (found,) = leak_at_top(models, size)
        window = min(10, size) / (size + 1)
        assert found == pytest.approx({"slope_at_top": 2.0, "leak_at_top": window / 4}, rel=1e-2)


def test_a_logit_that_falls_with_the_priority_has_no_leak() -> None:
    models = Retrievers(find_task("max"), normalizer_for("softmax", 2), [0, 1], 8)
    with torch.no_grad():
        models.to_key.weight_SIO.zero_()
    assert [entry["leak"] for entry in class_leak(models)] == [None, None]


def test_the_cosine_ends_near_zero_and_the_rate_is_kept_without_it() -> None:
    falling, kept = small(steps=100, cosine=True), small(steps=100)
    assert falling.rate_at(0) == kept.rate_at(0) == kept.rate_at(99) == 5e-3
    assert falling.rate_at(50) == pytest.approx(2.5e-3)
    assert 0 < falling.rate_at(99) < 1e-5
    assert trained(steps=10, cosine=True).losses != trained(steps=10).losses


@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if not task.has_priority])
def test_there_is_nothing_to_squeeze_without_priorities(task: str) -> None:
    with pytest.raises(ValueError, match=r"squeezed.*0"):
        trained(task=task, squeezed=0.5, steps=1)


def test_options_stand_behind_the_name() -> None:
    assert parse_spec("entmax:alpha=1.3:learned=true") == ("entmax", {"alpha": 1.3, "learned": True})
    assert parse_spec("topk:k=sqrt") == ("topk", {"k": "sqrt"})
    row = torch.tensor([[[[3.0, 2.0, 1.0]]]])
    assert int((normalizer_for("topk:k=2", 1)(row) > 0).sum()) == 2
    learned = normalizer_for("entmax:learned=true", 3)
    assert all(len(value) == 3 for value in learned.parameters())
