"""What the report calls things: verdicts with a two-letter mark each, so that colour is never the only carrier."""

from dataclasses import dataclass

from attnorm.analysis.verdicts.thresholds import MEANING
from attnorm.metrics.catalogue import Group


@dataclass(frozen=True)
class Word:
    name: str  # as in the tables
    mark: str
    label: str
    meaning: str

    @property
    def style(self) -> str:
        """The class that colours it."""
        return f"v-{self.name}" if self.name in MEANING else "v-unknown"


# In the order of legends and of "worst first": what cannot select, what does not, what selects badly, what is well.
VERDICTS: tuple[Word, ...] = tuple(
    Word(name, mark, name, f"{MEANING[name][0].upper()}{MEANING[name][1:]}.")
    for name, mark in (
        ("broken", "Br"),
        ("dispersed-forced", "Df"),
        ("dispersed-by-choice", "Dc"),
        ("dispersed", "Di"),
        ("sink-dominated", "Si"),
        ("frozen", "Fr"),
        ("sensitive", "Se"),
        ("differs", "Dt"),
        ("undecided", "Un"),
        ("healthy", "He"),
    )
)
UNKNOWN = Word("unknown", "?", "not judged", "No verdict was given.")
BY_NAME: dict[str, Word] = {word.name: word for word in VERDICTS}


def verdict_word(name: str | None) -> Word:
    """The entry of a verdict; one that this version does not know keeps its own name."""
    if not name:
        return UNKNOWN
    return BY_NAME.get(name) or Word(name, "?", name, "")


GROUPS: dict[Group, str] = {
    "weights": "Where the weight goes",
    "limits": "What the logits allow",
    "rate": "How it goes with length",
    "sink": "Without the sink",
    "gradient": "What the gradient sees",
    "vectors": "The vectors that are mixed",
}

KINDS: dict[str, str] = {
    "decoder": "decoder (causal)",
    "encoder": "encoder (bidirectional)",
    "cross": "cross-attention",
}

SHARES = ("sink_mass", "forced_share")  # metrics shown as per cent

# The numbers at the top of a head's panel, and the columns of the table of heads.
PANEL_METRICS = (
    "entropy_ratio",
    "effective_keys",
    "max_weight",
    "weight_ceiling",
    "sink_mass",
    "gap_slope",
    "horizon",
    "jacobian_norm",
)
TABLE_METRICS = (
    "entropy_ratio",
    "effective_keys",
    "max_weight",
    "sink_mass",
    "gap_slope",
    "horizon",
    "jacobian_norm",
)
