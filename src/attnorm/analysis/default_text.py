"""The text that is measured if none is given: available offline, and readable for the model.

The bundled model is measured on a passage that it wrote itself. Three books that it had not seen (loss 3.3 to 3.7 nats
per token) give the same 13 dispersed heads as the passage. Python's help topics (loss 5.07), which it cannot read,
differ in two heads.
"""

from importlib.resources import files

PASSAGE = "the bundled model's own passage"
TOPICS = "pydoc_data.topics"
NAMES = (PASSAGE, TOPICS)


def default_text(*, bundled: bool) -> dict[str, str]:
    """Return {name: text}."""
    return {PASSAGE: passage()} if bundled else {TOPICS: topics()}


def passage() -> str:
    """Return 3,000 tokens that the bundled model wrote, from a fixed random seed."""
    return (files("attnorm.models") / "bundled" / "passage.txt").read_text(encoding="utf-8")


def topics() -> str:
    """Return the topics of Python's help() in alphabetical order: about 65,000 words of technical English."""
    from pydoc_data.topics import topics  # half a megabyte, needed here only

    return "\n\n".join(topics[name] for name in sorted(topics))
