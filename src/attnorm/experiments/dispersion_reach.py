"""How far the dispersion experiment goes: to the model's limit and beyond, unless text, positions or patience end."""

from dataclasses import dataclass

LENGTHS, QUICK_LENGTHS = (256, 512, 1024, 2048, 4096, 8192), (256, 512)


@dataclass(frozen=True)
class Reach:
    """Tokens of the main pass, and of one beyond what the model was made for; and why it is not more, in words."""

    main: int
    beyond: int | None
    why_not_limit: str = ""  # empty: the main pass is as long as the model was made for
    why_not_beyond: str = ""

    @property
    def told(self) -> str:
        """A sentence of the verdict."""
        further = f", and {self.beyond:,} beyond what the model was made for" if self.beyond else ""
        reasons = [reason for reason in (self.why_not_limit, self.why_not_beyond) if reason]
        why = f" ({'; '.join(dict.fromkeys(reasons))})" if reasons else ""
        return f"Measured on {self.main:,} tokens{further}{why}."


def wanted(limit: int | None, *, quick: bool, longest: int | None) -> tuple[int, ...]:
    """Lengths to try for the main pass, the last one first choice.

    limit: tokens that the model was made for, None: any number. longest: what the user asks for.
    """
    if quick:
        return QUICK_LENGTHS
    most = LENGTHS[-1] if longest is None else longest
    most = most if limit is None else min(most, limit)
    return (*(length for length in LENGTHS if length < most), most)


def reach(
    main: int, limit: int | None, *, hard: bool, tokens: int, quick: bool, longest: int | None, model: str
) -> Reach:
    """
    main: the length of the main pass. hard: beyond the limit the model cannot go. tokens: of the text, at least.
    """
    if limit is None:
        further = "" if quick or longest is not None else "; --longest TOKENS goes further"
        return Reach(main, None, "", f"{model} has no length that it was made for{further}")
    if main < limit:
        made = f"{model} was made for {limit:,}"
        if quick:
            why = f"{made}: --quick goes no further"
        elif tokens < min(limit, longest or LENGTHS[-1]):
            why = f"{made}, and the text ends at {tokens:,}"
        else:
            why = f"{made}: --longest {limit if hard else 2 * limit} goes there{'' if hard else ' and beyond'}"
        return Reach(main, None, why, why)
    if hard:
        return Reach(main, None, "", f"{model} has no positions beyond {limit:,}")
    if quick:
        return Reach(main, None, "", "--quick does not go beyond the model's length")
    beyond = 2 * limit if longest is None else longest
    if beyond <= limit:
        return Reach(main, None, "", f"--longest {longest} ends at the model's length")
    if tokens < beyond:
        return Reach(main, None, "", f"the text ends at {tokens:,} tokens, and {beyond:,} are needed")
    return Reach(main, beyond)
