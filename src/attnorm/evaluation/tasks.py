"""The tasks: what a name means, at which lengths a task exists, and what it has to download."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from attnorm.suggest import did_you_mean

PERPLEXITY, PASS_KEY = "perplexity", "pass-key"
OWN = (PERPLEXITY, PASS_KEY)

# RULER's tasks in lm-eval with the shortest length at which their documents can be made. Shorter ones: lm-eval's
# generator of ruler_vt never returns, and that of ruler_cwe makes a document without a text.
OFFLINE = {
    "niah_single_1": 256, "niah_multikey_2": 256, "niah_multikey_3": 512, "ruler_vt": 1024, "ruler_cwe": 1024,
    "ruler_fwe": 512,
}  # fmt: skip
DOWNLOADED = dict.fromkeys(
    (
        "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery", "ruler_qa_squad",
        "ruler_qa_hotpot",
    ),
    1024,
)  # fmt: skip
RULER = OFFLINE | DOWNLOADED
ALIASES = {
    "ruler": tuple(OFFLINE), "vt": ("ruler_vt",), "cwe": ("ruler_cwe",), "fwe": ("ruler_fwe",), "passkey": (PASS_KEY,),
    "pass_key": (PASS_KEY,), "niah": ("niah_single_1",),
}  # fmt: skip


@dataclass(frozen=True)
class Item:
    """One task at one length; None for tasks of lm-eval whose documents have lengths of their own."""

    task: str
    length: int | None

    def __str__(self) -> str:
        return self.task if self.length is None else f"{self.task} at {self.length}"


def needs_lm_eval(task: str) -> bool:
    return task not in OWN


def items_of(tasks: Sequence[str], lengths: Sequence[int], all_of_lm_eval: Callable[[], Collection[str]]) -> list[Item]:
    """Every task at every length, each once.

    all_of_lm_eval: the names of all its tasks; called for names that are not known here.

    Raises:
        ValueError: No or unknown tasks, or a length at which a task does not exist.
    """
    names = list(dict.fromkeys(name for given in tasks for name in ALIASES.get(given, (given,))))
    if not names:
        raise ValueError(f"expected at least one task, got none. Choose from {', '.join((*OWN, *OFFLINE))}.")
    unknown = [name for name in names if name not in OWN and name not in RULER]
    if unknown:
        known = all_of_lm_eval()
        for name in unknown:
            if name not in known:
                raise ValueError(f"unknown task {name!r}; {did_you_mean(name, _close(name, known))}")
    if not lengths or min(lengths) < 2:
        raise ValueError(f"expected lengths of at least 2 tokens, got {', '.join(map(str, lengths)) or 'none'}")
    items = []
    for name in names:
        if name in unknown:
            items.append(Item(name, None))
            continue
        for length in dict.fromkeys(lengths):
            if length < RULER.get(name, 0):
                raise ValueError(
                    f"expected a length of at least {RULER[name]} for {name}, got {length}. Its question and example "
                    "take that many tokens: leave the task or the length out."
                )
            items.append(Item(name, length))
    return items


def _close(name: str, known: Collection[str]) -> list[str]:
    """Names to suggest: all where one is close, else those that need no download (lm-eval has thousands)."""
    import difflib

    ours = [*OWN, *RULER, *ALIASES]
    return difflib.get_close_matches(name, [*ours, *known], n=1) or [*OWN, *OFFLINE]
