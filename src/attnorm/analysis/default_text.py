"""The text that is measured when none is given: offline, and one that the model can read.

The bundled model is measured on a passage that it wrote itself. Three books it had not seen (3.3 to 3.7 nats per token)
find the same 13 heads dispersed as the passage does; Python's own text, which it cannot read (5.07), differs in two.
"""

from importlib.resources import files

PASSAGE = "the bundled model's own passage"
TOPICS = "pydoc_data.topics"
NAMES = (PASSAGE, TOPICS)


def default_text(*, bundled: bool) -> dict[str, str]:
    """Under its name."""
    return {PASSAGE: passage()} if bundled else {TOPICS: topics()}


def passage() -> str:
    """3,000 tokens that the bundled model wrote, from a fixed seed."""
    return (files("attnorm.models") / "bundled" / "passage.txt").read_text(encoding="utf-8")


def topics() -> str:
    """The topics of Python's own help(), in alphabetical order: technical English prose, about 65,000 words."""
    from pydoc_data.topics import topics  # half a megabyte that only this needs

    return "\n\n".join(topics[name] for name in sorted(topics))
