import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    """torch.compile keeps 8 variants of a function, and a partial of any function counts as the same one."""
    yield
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
