"""What the README of a patched model has to tell its readers."""

from torch import nn

from attnorm.models.attach import normalizer_of, patched_modules, recipe_of
from attnorm.normalizers.registry import entries

CARD = """\
---
library_name: transformers
tags:
- attnorm
---

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
    modules = patched_modules(model)
    counts: dict[str, int] = {}
    for module in modules.values():
        described = _described(module)
        counts[described] = counts.get(described, 0) + 1
    return CARD.format(lines="\n".join(f"- {text}, in {count} attention modules" for text, count in counts.items()))


def _described(module: nn.Module) -> str:
    recipe = recipe_of(module)
    name = recipe.name or normalizer_of(module).name
    entry = entries().get(name)
    paper = f" ([{entry.paper}]({entry.url}))" if entry is not None and entry.url.startswith("https://") else ""
    return f"`{name}`{paper}" + ("" if recipe.heads is None else " on some of the heads")
