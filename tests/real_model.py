"""A pretrained model for the tests that random weights cannot serve: SmolLM2-135M."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2: $ATTNORM_SMOLLM2, or a copy in the user's cache that is made on first use."""
    named = os.environ.get("ATTNORM_SMOLLM2")
    if named:
        if not (Path(named) / "config.json").is_file():
            pytest.fail(f"ATTNORM_SMOLLM2 names {named}, where there is no model")
        return Path(named)
    from attnorm.models.smollm2 import CannotFetch, fetch

    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    try:
        return fetch(cache / "attnorm" / "smollm2")
    except (CannotFetch, OSError) as error:
        pytest.skip(f"no real model here: {error}; set ATTNORM_SMOLLM2 to a folder that has it")
