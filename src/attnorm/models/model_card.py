"""What the README of a patched model has to tell its readers."""

from pathlib import Path

from torch import nn

from attnorm.models.normalizer_files import replace_file
from attnorm.models.patch_state import normalizer_of, patched_modules, recipe_of
from attnorm.normalizers.registry import entries

FRONT_MATTER = """\
---
library_name: transformers
tags:
- attnorm
---

"""
# Between these lines a README is ours: what an earlier normalizer left there is replaced.
BEGIN, END = "<!-- attnorm: written by save_pretrained -->", "<!-- /attnorm -->"
SECTION = """\
## Attention

This model does not use softmax in its attention:

{lines}

Load it with [attnorm](https://pypi.org/project/attnorm/), which reads `attnorm.json`:

```python
import attnorm

model = attnorm.from_pretrained("path or repository")
```

`transformers` alone would load the same weights and run them with softmax: another model than the one that was trained.
"""


def model_card(model: nn.Module) -> str:
    """Markdown that names the model's normalizers and papers, and how to load it."""
    return f"{FRONT_MATTER}{_section(model)}\n"


def write_card(folder: Path, model: nn.Module) -> None:
    """Into a folder that has no README."""
    if not (folder / "README.md").exists():
        replace_file(folder / "README.md", model_card(model).encode())


def correct_card(folder: Path, model: nn.Module) -> None:
    """Our part of a README says what the model is now, or goes; the rest of it stays as it is."""
    path = folder / "README.md"
    content = path.read_bytes() if path.is_file() else b""
    before, begin, rest = content.partition(BEGIN.encode())
    _, end, after = rest.partition(END.encode())
    if not begin or not end:
        return
    section = _section(model).encode() if patched_modules(model) else b""
    if not section and not after.strip() and before == FRONT_MATTER.encode():
        path.unlink()
    elif before + section + after != content:
        replace_file(path, before + section + after)


def _section(model: nn.Module) -> str:
    counts: dict[str, int] = {}
    for module in patched_modules(model).values():
        described = _described(module)
        counts[described] = counts.get(described, 0) + 1
    lines = [f"- {text}, in {count} attention module{'' if count == 1 else 's'}" for text, count in counts.items()]
    return f"{BEGIN}\n{SECTION}{END}".format(lines="\n".join(lines))


def _described(module: nn.Module) -> str:
    recipe = recipe_of(module)
    name = recipe.name or normalizer_of(module).name
    entry = entries().get(name)
    paper = f" ([{entry.paper}]({entry.url}))" if entry is not None and entry.url.startswith("https://") else ""
    return f"`{name}`{paper}" + ("" if recipe.heads is None else " on some of the heads")
