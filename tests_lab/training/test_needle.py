"""Pass keys: the key that is asked for is the one that is hidden, and what is counted is what was right."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from attnorm.cli import app
from attnorm.evaluation.pass_keys import ALPHABET, Wording, keys_that_fit, puzzles_at, shortest_window, training_puzzles
from attnorm_lab.training.lm.data import train_tokenizer
from attnorm_lab.training.lm.model import build_model
from attnorm_lab.training.needle import (
    NeedleTask,
    among_many,
    answer_loss,
    find_keys,
    fine_tune,
    settings_of,
    split_filler,
    summary,
    train_needle,
    usual_longer,
)
from tests_lab.training.conftest import tiny
from tests_lab.training.test_normalizers_in_training import Train

WORDING = Wording(before=(1, 2), after=(3,), alphabet=tuple(range(60, 80)))
FILLER: Any = np.arange(2000).astype(np.uint16) % 200 + 100
CPU = torch.device("cpu")


def sentences(window: list[int], characters: int) -> list[tuple[int, bool, list[int]]]:
    """Every sentence of a window: where it starts, whether it is a question, and its key."""
    starts = [index for index, token in enumerate(window) if token == 1]
    ends = [start + 3 + characters for start in starts]
    assert all(window[start + 1] == 2 and window[start + 2] in WORDING.alphabet for start in starts)
    return [
        (start, window[end : end + 1] != [3], window[start + 2 : end]) for start, end in zip(starts, ends, strict=True)
    ]


def test_every_question_comes_after_the_key_it_asks_for() -> None:
    puzzles = training_puzzles(FILLER, WORDING, characters=3, keys=3, seed=1, step=2, batch=100, length=80)
    assert puzzles.windows.shape == (100, 80)
    assert puzzles.answers.shape == (100, 3, 3)
    seen = set()
    for window, answers, targets in zip(
        puzzles.windows.tolist(), puzzles.answers.tolist(), puzzles.targets.tolist(), strict=True
    ):
        found = sentences(window, 3)
        keys = {tuple(key): start for start, asked, key in found if not asked}
        questions = [(start, key) for start, asked, key in found if asked]
        assert len(keys) == len(questions) == 3
        assert len({character for key in keys for character in key}) == 12
        assert all(keys[tuple(key)] < start for start, key in questions)
        assert answers == [list(range(start + 3, start + 6)) for start, _ in questions]
        assert targets == [key[1:] for _, key in questions]
        assert sum(token >= 100 for token in window) == 80 - 3 * WORDING.size(3)  # of the filler nothing is doubled
        seen |= keys.keys()
    assert len(seen) > 250


@pytest.mark.parametrize(("reach", "longest"), [(0.05, 3), (1.0, 65)])
def test_the_reach_bounds_the_filler_between_a_key_and_its_question(reach: float, longest: int) -> None:
    puzzles = training_puzzles(FILLER, WORDING, characters=3, keys=1, seed=1, step=2, batch=200, length=78, reach=reach)
    distances = []
    for window in puzzles.windows.tolist():
        (key, _, _), (question, _, _) = sentences(window, 3)
        distances.append(question - key - 7)
    room = 78 - WORDING.size(3)
    assert min(distances) == 1
    assert max(distances) <= round(reach * room)
    assert max(distances) >= 0.9 * longest


def test_as_many_keys_as_fit_and_as_there_are_characters_for() -> None:
    assert keys_that_fit(WORDING, 3, length=1000, wanted=12) == 5
    assert keys_that_fit(WORDING, 3, length=1000, wanted=2) == 2
    assert keys_that_fit(WORDING, 3, length=41, wanted=12) == 2
    assert keys_that_fit(WORDING, 3, length=16, wanted=12) == 1


def test_keys_are_made_of_single_letters_and_digits(texts: tuple[Path, Path]) -> None:
    tokenizer = train_tokenizer([texts[0]], 300, 0)
    wording = Wording.of(tokenizer)
    assert [tokenizer.decode([token]) for token in wording.alphabet] == list(ALPHABET)
    assert tokenizer.decode(wording.statement(wording.alphabet[:3])) == f"\n\nThe pass key is{ALPHABET[:3]}.\n\n"
    with pytest.raises(ValueError, match="'Q'"):
        Wording.of(SimpleNamespace(token_to_id=lambda character: None if character == "Q" else 1))


def test_distances_grow_to_the_whole_window_and_stay_there() -> None:
    task = NeedleTask(steps=100, nearest=0.01, near_share=0.5)
    assert task.reach(0) == pytest.approx(0.01)
    assert task.reach(25) == pytest.approx(0.1)
    assert task.reach(50) == task.reach(99) == 1.0
    assert NeedleTask(near_share=0).reach(0) == 1.0


def test_a_step_has_its_own_puzzles_and_always_the_same() -> None:
    def made(step: int) -> torch.Tensor:
        return training_puzzles(FILLER, WORDING, characters=3, keys=2, seed=1, step=step, batch=8, length=60).windows

    assert torch.equal(made(3), made(3))
    assert not torch.equal(made(3), made(4))


@pytest.mark.parametrize(("depth", "index"), [(0.0, 0), (0.5, 23), (1.0, 46)])
def test_questions_end_the_window_and_keys_lie_at_their_depth(depth: float, index: int) -> None:
    puzzles = puzzles_at(FILLER, WORDING, characters=3, seed=1, count=5, length=59, depth=depth)
    room = 59 - WORDING.size(3)
    assert [window.tolist().index(1) for window in puzzles.windows] == [round(depth * (room - 1))] * 5
    assert puzzles.windows[0].tolist().index(1) == pytest.approx(index, abs=1)
    assert puzzles.answers.tolist() == [[[56, 57, 58]]] * 5
    assert torch.equal(puzzles.targets[:, 0], puzzles.windows[:, -3:])


class Oracle(torch.nn.Module):
    """Knows the next token of every window, but not the last one of keys that are before this index."""

    def __init__(self, wrong_from: int) -> None:
        super().__init__()
        self.wrong_from = wrong_from
        self.base_model = self._run
        self.model = SimpleNamespace(layers=[])

    def _run(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        following = torch.roll(input_ids, -1, 1)
        # The last character is not among the inputs: it stands in the hidden key.
        for row, window in enumerate(input_ids.tolist()):
            start = window.index(1) + 3
            following[row, -1] = window[start + 2]
            if start < self.wrong_from:
                following[row, -1] = 0
        return SimpleNamespace(last_hidden_state=torch.nn.functional.one_hot(following, 300).float())

    def get_output_embeddings(self) -> Any:
        return torch.nn.Identity()


def test_what_is_counted_is_what_was_right() -> None:
    task = NeedleTask(characters=3, questions=4, longer=(1, 2), depths=(0.0, 1.0))
    settings = tiny(architecture="llama", context=60)
    found = find_keys(Oracle(wrong_from=0), settings, FILLER, WORDING, task, CPU)
    assert [(each.length, each.depth, each.exact, each.characters) for each in found] == [
        (60, 0.0, 1.0, 1.0), (60, 1.0, 1.0, 1.0), (120, 0.0, 1.0, 1.0), (120, 1.0, 1.0, 1.0),
    ]  # fmt: skip
    found = find_keys(Oracle(wrong_from=20), settings, FILLER, WORDING, task, CPU)
    assert [each.exact for each in found] == [0.0, 1.0, 0.0, 1.0]
    assert found[0].characters == pytest.approx(2 / 3, abs=1e-5)
    assert summary(found)["60"] == {"questions": 8, "exact": 0.5, "characters": pytest.approx(5 / 6, abs=1e-5)}


def test_among_many_keys_all_questions_count() -> None:
    settings = tiny(architecture="llama", context=80)
    task = NeedleTask(characters=3, keys=3, questions=10)
    found = among_many(Oracle(wrong_from=0), settings, FILLER, WORDING, task, CPU)
    assert found["keys"] == 3
    assert found["questions"] == 30
    assert (found["exact"], found["characters"]) == (1.0, 1.0)


@pytest.mark.parametrize("name", ["softmax", "entmax15"])
def test_fine_tuning_teaches_what_is_asked(name: str) -> None:
    """A few steps are enough to learn what answers are made of: from log 300 nats to about log 20."""
    settings = tiny(architecture="llama", normalizer=name, context=32)
    task = NeedleTask(characters=2, steps=30, batch=8, learning_rate=1e-2, warmup=2)
    model = build_model(settings, vocabulary=300, end_of_text=0)
    puzzles = training_puzzles(FILLER, WORDING, characters=2, keys=1, seed=9, step=0, batch=64, length=33)
    before = answer_loss(model, puzzles).item()
    course = fine_tune(model, settings, FILLER, WORDING, task, CPU)
    after = answer_loss(model, puzzles).item()
    assert before == pytest.approx(np.log(300), abs=0.3)
    assert after < np.log(20) + 0.4
    assert [entry["step"] for entry in course] == [20, 30]
    assert not model.training


def test_no_question_is_asked_in_text_that_was_practised_in() -> None:
    task = NeedleTask(longer=(1, 2))
    practised, tested = split_filler(FILLER, task, WORDING, 60)
    assert len(practised) + len(tested) == len(FILLER)
    assert len(tested) == 500
    with pytest.raises(ValueError, match=r"2000.*400.*3200"):
        split_filler(FILLER, task, WORDING, 200)
    least = shortest_window(WORDING, 5)
    with pytest.raises(ValueError, match=f"{least} .*12"):
        split_filler(FILLER, task, WORDING, 12)


def test_a_run_that_is_not_finished_has_no_model_to_ask(train: Train, texts: tuple[Path, Path], tmp_path: Path) -> None:
    train(tmp_path / "run", steps=2)
    (tmp_path / "run" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="not finished"):
        train_needle(tmp_path / "run", texts[0], NeedleTask(longer=(1,)))


def test_learned_positions_are_asked_at_the_training_length_only(train: Train, tmp_path: Path) -> None:
    train(tmp_path / "learned", steps=1)
    train(tmp_path / "rotary", steps=1, architecture="llama")
    assert usual_longer("bundled") == usual_longer(tmp_path / "learned") == (1,)
    assert usual_longer(tmp_path / "rotary") == (1, 2, 4)


def test_the_command_tells_how_many_keys_were_found(train: Train, texts: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(out, architecture="llama", normalizer="ssmax", steps=2, context=64)
    assert settings_of(out).normalizer == "ssmax"
    weights = (out / "model.safetensors").read_bytes()
    arguments = ["lab", "train", "needle", str(out), "--text", str(texts[0]), "--steps", "2", "--batch", "2"]
    done = CliRunner().invoke(app, [*arguments, "--longer", "1,2", "--questions", "1", "--device", "cpu", "--json"])
    assert done.exit_code == 0, done.output
    assert '"by_length"' in done.stdout
    assert weights == (out / "model.safetensors").read_bytes()
    refused = CliRunner().invoke(app, ["lab", "train", "needle", str(tmp_path), "--text", str(texts[0])])
    assert refused.exit_code == 2
    assert "expected a folder that `attnorm lab train lm` wrote" in refused.output.replace("\n", " ")
