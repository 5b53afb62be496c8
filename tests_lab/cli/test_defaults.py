"""Help of `attnorm lab train` repeats the defaults of the settings that the trainers use."""

from dataclasses import MISSING, fields
from typing import Any

import pytest
import typer

from attnorm_lab.cli import app
from attnorm_lab.cli.train_tasks import given
from attnorm_lab.training.clrs.train import ClrsRecipe
from attnorm_lab.training.lm.model import LMSettings
from attnorm_lab.training.needle import NeedleTask
from attnorm_lab.training.retrieval.data import RetrievalRecipe
from attnorm_lab.training.retrieval.evaluate import SIZES
from attnorm_lab.training.vision.model import VisionSettings

SETTINGS = {
    "lm": LMSettings, "needle": NeedleTask, "vision": VisionSettings, "retrieval": RetrievalRecipe, "clrs": ClrsRecipe,
}  # fmt: skip
FIELD = {"lr": "learning_rate"}
BY_DEVICE_OR_MODEL = {"dtype", "longer", "normalizer_options"}  # help describes the default in words


def options_of(command: str) -> list[Any]:
    group: Any = typer.main.get_command(app)
    found = group.commands["train"].commands[command]
    return [parameter for parameter in found.params if parameter.param_type_name == "option"]


@pytest.mark.parametrize("command", SETTINGS)
def test_the_defaults_in_help_are_those_of_the_settings(command: str) -> None:
    defaults = {field.name: field.default for field in fields(SETTINGS[command]) if field.default is not MISSING}
    compared = []
    for option in options_of(command):
        name = FIELD.get(option.name, option.name)
        if name not in defaults or name in BY_DEVICE_OR_MODEL:
            continue
        if option.default is None:  # "that of --recipe, else 0.001", "3; pyramid: 4"
            shown = option.show_default.partition(";")[0].rpartition("else ")[2]
            assert shown == str(defaults[name]), option.name
        else:
            assert option.default == defaults[name], option.name
        compared.append(name)
    assert {"batch", "learning_rate"} < {*compared}


def test_the_sizes_of_the_retrieval_tests_in_help_are_those_of_the_trials() -> None:
    (sizes,) = (option for option in options_of("retrieval") if option.name == "sizes")
    assert sizes.show_default == ",".join(map(str, SIZES))


def test_an_option_replaces_a_default_and_zero_is_an_option() -> None:
    assert given({"steps": 3, "batch": 2}, steps=None, batch=0, width=5) == {"steps": 3, "batch": 0, "width": 5}
