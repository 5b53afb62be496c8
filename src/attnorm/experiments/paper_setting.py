"""The setting of Mudarisov et al. 2025, which is the default: GPT-2 (124M) on War and Peace.

Their section 3 has 144 heads in 12 layers, contexts of 32 to 1,024 tokens, and consecutive chapters of the novel. It
does not state which chapters, rows and vectors. The novel is not part of this package; give it as a file.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from attnorm.experiments.subject import BUNDLED

MODEL = "gpt2"
FULL_NAME = "openai-community/gpt2"  # the same repository
TEXT = "War and Peace"
SHAPE = {"layers": 12, "heads": 12, "head_dim": 64, "max_positions": 1024}
# Experiments of that paper; the others test Velickovic et al., who used other models.
EXPERIMENTS = ("fig1", "fig2", "fig3", "fig4", "gradients", "guidelines")
# In the first sentence of the English translations; editions put contents and prefaces before it.
OPENING = "Genoa and Lucca"


def default_model(*, quick: bool) -> str:
    """Return the model of the paper; for small sizes the bundled one."""
    if quick:
        return BUNDLED
    from huggingface_hub import try_to_load_from_cache

    cached = (name for name in (MODEL, FULL_NAME) if isinstance(try_to_load_from_cache(name, "config.json"), str))
    return next(cached, MODEL)


def setting(experiment: str, model: Mapping[str, Any], text: str, content: object, *, quick: bool) -> dict[str, Any]:
    """Return the manifest's entry about the paper's setting: whether it is the same, and the differences.

    model: as `attnorm.models.describe` has it. text: its name.
    """
    if experiment not in EXPERIMENTS:
        return {}
    different = _differences(model, text, content, quick=quick)
    paper = f"{MODEL} ({SHAPE['layers']} layers of {SHAPE['heads']} heads) on {TEXT}"
    sentence = (
        f"Not the paper's setting, {paper}: {'; '.join(different)}."
        if different
        else f"The paper's setting: {paper}. Rows, vectors and chapters it does not state: ours are in the parameters."
    )
    return {"paper_setting": {"same": not different, "told": sentence}}


def _differences(model: Mapping[str, Any], text: str, content: object, *, quick: bool) -> Sequence[str]:
    name = str(model["name"])
    shape = {part: model.get(part) for part in SHAPE}
    different = []
    if name.rsplit("/", 1)[-1] != MODEL:
        different.append(f"the model is {name}")
    elif shape != SHAPE:
        sentence = ", ".join(f"{part} {value}" for part, value in shape.items() if value != SHAPE[part])
        different.append(f"what is called {name} here has another shape ({sentence})")
    if OPENING not in " ".join(str(content)[:200_000].split()):
        different.append(f"the text is {text}")
    if quick:
        different.append("sizes are small (--quick)")
    return different
