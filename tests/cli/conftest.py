"""The command line is built once: each call of CliRunner would read the signatures of all commands again."""

from collections.abc import Iterator
from functools import cache

import pytest
from typer import testing


@pytest.fixture(scope="session", autouse=True)
def _built_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "_get_command", cache(testing._get_command))
        yield
