"""The paper's setting: what runs by default, and when a run may say that it is in it."""

from pathlib import Path

import huggingface_hub
import pytest

from attnorm_lab.experiments.experiment import PAPER_EXPERIMENTS, ExperimentSubject, default_model, paper_setting
from attnorm_lab.experiments.fig2 import experiment as fig2
from attnorm_lab.experiments.fig2 import measure

GPT2 = {"name": "gpt2", "layers": 12, "heads": 12, "head_dim": 64, "max_positions": 1024, "kv_heads": 12}
NOVEL = "CONTENTS\n\nCHAPTER I\n\n“Well, Prince, so Genoa and\nLucca are now just family estates of the Buonapartes."


def setting_of(
    *, experiment: str = "fig2", text: str = NOVEL, quick: bool = False, **model: object
) -> dict[str, object]:
    return paper_setting(experiment, {**GPT2, **model}, "book.txt", text, quick=quick)["paper_setting"]


@pytest.mark.parametrize("name", ["gpt2", "openai-community/gpt2"])
def test_gpt2_on_war_and_peace_is_the_papers_setting(name: str) -> None:
    for experiment in PAPER_EXPERIMENTS:
        found = setting_of(experiment=experiment, name=name)
        assert found["same"] is True
        assert "The paper's setting: gpt2 (12 layers of 12 heads) on War and Peace." in str(found["sentence"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "distilgpt2", "layers": 6}, "the model is distilgpt2"),
        ({"name": "gpt2-medium"}, "the model is gpt2-medium"),
        ({"layers": 24, "head_dim": None}, "what is called gpt2 here has another shape (layers 24, head_dim None)"),
        ({"text": "Happy families are all alike"}, "the text is book.txt"),
        ({"quick": True}, "sizes are small (--quick)"),
    ],
)
def test_any_difference_is_told(changes: dict[str, object], reason: str) -> None:
    found = setting_of(**changes)  # type: ignore[arg-type]
    assert found["same"] is False
    assert found["sentence"] == f"Not the paper's setting, gpt2 (12 layers of 12 heads) on War and Peace: {reason}."


def test_experiments_of_the_other_paper_make_no_such_claim() -> None:
    assert paper_setting("spread", GPT2, "book.txt", NOVEL, quick=False) == {}


@pytest.mark.parametrize(
    ("cached", "name"),
    [((), "gpt2"), (("gpt2", "openai-community/gpt2"), "gpt2"), (("openai-community/gpt2",), "openai-community/gpt2")],
)
def test_the_default_is_gpt2_under_the_name_that_is_on_the_disk(
    cached: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda repository, file: "path" if repository in cached else None
    )
    assert default_model(quick=False) == name
    assert default_model(quick=True) == "bundled"


def test_later_windows_of_the_text_need_tokens_not_positions() -> None:
    """GPT-2's 1,024 positions are one window long; the novel goes on."""
    sizes = fig2.Fig2Sizes(lengths=(1024,), ratio=8.0, resamples=2, draws=2, windows=9, heaviest=1)
    choices = fig2._choices(ExperimentSubject(quick=True), 1024, sizes, lambda what, done, total: None)
    assert [choice["what"] for choice in choices] == ["values, tokens 1025 to 2048"]  # its passage has 3,000 tokens


def test_the_lengths_of_figure_2_are_the_papers() -> None:
    assert set(fig2.FULL.lengths) >= {32, 64, 128, 256, 512, 1024}
    assert (fig2.PANEL_N, fig2.PANEL_LENGTH, fig2.PANEL_NS) == (5, 1024, (1, 5, 10, 20, 100))
    assert (measure.PAPER_HEADS, fig2.LEVEL) == (144, 0.01)


def test_the_shared_novel_is_recognized(shared: Path) -> None:
    text = shared / "data" / "war-and-peace.txt"
    if not text.is_file():
        pytest.skip(f"no novel at {text}")
    assert setting_of(text=ExperimentSubject(texts=(text,)).passages()[0].content)["same"] is True  # type: ignore[arg-type]
