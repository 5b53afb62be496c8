"""The plans in docs/scaling.md are accepted as they are printed."""

import re
from pathlib import Path

import pytest

from attnorm_lab.runs.plan import read_plan
from attnorm_lab.runs.search.plan import read_search_plan
from tests_lab.training.conftest import write_text

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "scaling.md").read_text()
PLANS = re.findall(r"^```toml\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", PLANS)
def test_a_plan_of_the_page_is_accepted(text: str, tmp_path: Path) -> None:
    for number, name in enumerate(("book", "other")):
        write_text(tmp_path / f"{name}.txt", 20, seed=number)
    (tmp_path / "my-model").mkdir()
    (tmp_path / "recipe.toml").write_text('[layers]\n"0" = "ssmax"\n')
    (tmp_path / "plan.toml").write_text(text)
    if "[space]" in text:
        assert read_search_plan(tmp_path / "plan.toml").trials == 60
    else:
        assert len(read_plan(tmp_path / "plan.toml").items) in (2, 8, 24)


def test_the_page_has_a_plan_for_each_engine() -> None:
    assert len(PLANS) == 4
