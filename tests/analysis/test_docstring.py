"""What help(attnorm.analyze) tells."""

import inspect
import re

from attnorm.analysis.analyze import analyze


def test_every_parameter_is_explained() -> None:
    told = inspect.getdoc(analyze) or ""
    for name in inspect.signature(analyze).parameters:
        assert re.search(rf"\b{name}[:=]", told), name
