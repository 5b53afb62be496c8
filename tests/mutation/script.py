"""tools/mutate.py as a module."""

import importlib.util
import sys
from pathlib import Path

_path = Path(__file__).resolve().parents[2] / "tools" / "mutate.py"
_spec = importlib.util.spec_from_file_location("mutate", _path)
assert _spec is not None
assert _spec.loader is not None
mutate = importlib.util.module_from_spec(_spec)
sys.modules["mutate"] = mutate  # dataclasses look their module up there
_spec.loader.exec_module(mutate)
