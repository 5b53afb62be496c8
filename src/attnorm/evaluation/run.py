"""evaluate(): run every task at every length with every normalizer; a stopped run resumes at the next missing part."""

import hashlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnorm.analysis.settings import default_text
from attnorm.evaluation.result import AS_LOADED, PAGE, PARTS, RECORD, Evaluation, EvaluationPart, Scores
from attnorm.evaluation.tasks import (
    PERPLEXITY,
    Harness,
    Item,
    all_tasks,
    check_model,
    check_text,
    items_of,
    needs_lm_eval,
    require_lm_eval,
    score_pass_keys,
    score_perplexity,
    token_ids,
)
from attnorm.files import read_text, text_name, write_json
from attnorm.models.describe import longest_context
from attnorm.models.layer_normalizer import is_recipe, measured_length, read_recipe_file, starts_by_length
from attnorm.models.load import BUNDLED, LoadedModel, load
from attnorm.models.patch import check_replacement, swap
from attnorm.models.threads import exclusive
from attnorm.normalizers.spec import parse_spec
from attnorm.provenance import now, package_versions, recorded_command, settings_hash, versions
from attnorm.run_folder import make_writable, only_process, read_record, require_only, require_same_run

EvaluationProgress = Callable[[str, int, int], None]
"""Called with what is evaluated now, the finished parts and all parts."""


def evaluate(
    model: "str | Path | nn.Module | LoadedModel",
    tokenizer: Any = None,
    *,
    normalizers: str | Path | Sequence[str | Path] = (),
    tasks: str | Sequence[str] = ("perplexity", "pass-key"),
    lengths: int | Sequence[int] = (1024,),
    limit: int = 100,
    text: str | Path | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: EvaluationProgress = lambda what, done, total: None,
) -> Evaluation:
    """Evaluate a model as it is, then with each normalizer instead of softmax, on the same documents.

    Args:
        model: Hub name, folder, "bundled", or a model in memory.
        tokenizer: Tokenizer, or its hub name or folder (default: the tokenizer of the model).
        normalizers: Specifications such as "ssmax" or "entmax:alpha=1.3", or recipe files (.toml).
        tasks: "perplexity", "pass-key", "ruler" (the six tasks that need no download), or names of lm-eval's tasks.
        lengths: Tokens per document of perplexity, pass keys and RULER.
        limit: Maximum number of documents per task and length.
        text: A text file, plain or .xz, for perplexity and pass keys (default: a built-in text).
        out: Folder for the results. The same call resumes an interrupted run; new tasks, lengths or normalizers are
            added.
        seed: Random seed for the documents of pass keys and RULER.

    Raises:
        ValueError: Unknown tasks or normalizers, a text that is too short, data that cannot be downloaded.
        ImportError: A task of lm-eval without `attnorm[eval]`.

    >>> evaluate("gpt2", normalizers=["ssmax"], tasks=["perplexity", "niah_single_1"], lengths=[512], out="run")
    """
    if limit < 1:
        raise ValueError(f"limit: expected an integer of at least 1, got {limit}.")
    specs = [normalizers] if isinstance(normalizers, str | Path) else normalizers
    sides = [AS_LOADED, *dict.fromkeys(map(str, specs))]
    for side in sides[1:]:
        check_side(side)
    items = items_of(
        [tasks] if isinstance(tasks, str) else tasks, [lengths] if isinstance(lengths, int) else lengths, all_tasks
    )
    for item in items:
        if needs_lm_eval(item.task):
            require_lm_eval(item.task)
    content = read_text(Path(text)) if text is not None else None
    loaded = load(
        model, tokenizer=tokenizer, dtype=dtype, device=device, revision=revision, trust_remote_code=trust_remote_code
    )
    check_model(loaded)
    for side in sides[1:]:
        with _with_normalizer(loaded, side, None):
            pass  # one that does not fit this model raises now, not after the parts before it
    warn_of_lengths(loaded, items)
    if content is None:
        ((name, content),) = default_text(bundled=loaded.requested_name == BUNDLED).items()
    else:
        name = text_name(Path(str(text)))
    # Held over all parts: between two of them another thread could change the model that is compared.
    with exclusive(loaded.model):
        return _evaluate(loaded, name, content, items, sides, limit, seed, out, progress)


def _evaluate(
    loaded: LoadedModel, name: str, content: str, items: Sequence[Item], sides: Sequence[str], limit: int, seed: int,
    out: str | Path | None, progress: EvaluationProgress,
) -> Evaluation:  # fmt: skip
    identity = {
        "model": loaded.name,
        "weights": _digest(loaded.model),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "text": {"name": name, "sha256": hashlib.sha256(content.encode()).hexdigest()},
        "limit": limit,
        "seed": seed,
    }
    work = _Work(loaded, content, limit, seed)
    for item in items:
        check_text(loaded, work.tokens, item)
    with ExitStack() as stack:
        folder = None if out is None else Path(out)
        record = _record(identity, sides, items)
        if folder is not None:
            make_writable(folder)
            stack.enter_context(only_process(folder))
            record = _merge_record(folder, record)
        work.harness = stack.enter_context(Harness(loaded, seed))
        parts = _run_all(work, folder, sides, items, progress)
    result = Evaluation(record, tuple(parts))
    if folder is None:
        return result
    result = Evaluation.load(folder)  # with parts of earlier calls
    result.save_html(folder / PAGE)
    return result


def check_side(side: str) -> None:
    """Raise ValueError for a normalizer that no trained model can use, before a model is loaded."""
    if side == AS_LOADED:
        raise ValueError(f"{AS_LOADED!r} is always evaluated first. Remove it from normalizers.")
    if is_recipe(side):
        if not Path(side).is_file():
            raise ValueError(f"expected a recipe file, got {side}, which does not exist. Check the path.")
        specs = [*read_recipe_file(Path(side)).layers.values()]
    else:
        specs = [side]
    try:
        for spec in specs:
            check_replacement(spec)
    except TypeError as error:
        raise ValueError(str(error)) from None


def warn_of_lengths(loaded: LoadedModel, items: Sequence[Item]) -> None:
    """Warn about lengths that the model was not made for.

    Raises:
        ValueError: The model has no positions beyond its limit at all.
    """
    limit, impossible = longest_context(loaded.model)
    beyond = sorted({item.length for item in items if item.length is not None and limit and item.length > limit})
    if not beyond:
        return
    named = ", ".join(map(str, beyond))
    if impossible:
        raise ValueError(f"expected lengths up to {limit}, the positions of {loaded.name}, got {named}. Shorten them.")
    warnings.warn(
        f"{loaded.name} has {limit} positions in its config, got lengths {named}. Low scores at such lengths may come "
        "from the model and not from the normalizer.",
        stacklevel=3,
    )


class _Work:
    """Data that all parts share: the model, the tokens of the text, the documents of lm-eval."""

    harness: Harness

    def __init__(self, loaded: LoadedModel, text: str, limit: int, seed: int) -> None:
        self.loaded, self.limit, self.seed = loaded, limit, seed
        self.tokens = token_ids(loaded, text)

    def score(self, item: Item) -> Scores:
        if needs_lm_eval(item.task):
            return self.harness.score(item, self.limit)
        assert item.length is not None
        if item.task == PERPLEXITY:
            return score_perplexity(self.loaded, self.tokens, item.length, self.limit)
        return score_pass_keys(self.loaded, self.tokens, item.length, self.limit, self.seed)


def _run_all(
    work: _Work, folder: Path | None, sides: Sequence[str], items: Sequence[Item], progress: EvaluationProgress
) -> list[EvaluationPart]:
    """All sides of a task before the next task: an interrupted run has comparisons, not one side of all tasks."""
    parts: list[EvaluationPart] = []
    total = len(items) * len(sides)
    for item in items:
        for side in sides:
            progress(f"{item}, {side}", len(parts), total)
            path = None if folder is None else folder / PARTS / f"{_part_key(side, item)}.json"
            saved = None if path is None else read_record(path, ("scores", "seconds", "train_length"), "Remove it.")
            if saved is not None:
                parts.append(EvaluationPart.of(saved))
                continue
            began = time.monotonic()
            with _with_normalizer(work.loaded, side, item.length, alone=needs_lm_eval(item.task)):
                scores = work.score(item)
            seconds = round(time.monotonic() - began, 2)
            part = EvaluationPart(side, item.task, item.length, scores, seconds, _start(work.loaded, side, item.length))
            if path is not None:
                write_json(path, part.as_dict())
            parts.append(part)
    progress("finished", total, total)
    return parts


@contextmanager
def _with_normalizer(loaded: LoadedModel, side: str, length: int | None, *, alone: bool = False) -> Iterator[None]:
    """The model with the normalizer, for texts of that length. None: of the length that the model was made for.

    A length rule is meant for texts as long as those in training. Compared on shorter ones it would flatten them.
    alone: let all other threads wait; lm-eval replaces sys.stdout and seeds the global random generators.
    """
    with exclusive(loaded.model, alone=alone):
        if side == AS_LOADED:
            yield
            return
        train_length = None if length is None else measured_length(loaded.model, length)
        name, options = (Path(side), {}) if is_recipe(side) else parse_spec(side)
        with swap(loaded.model, name, **{"train_length": train_length, **options}):
            yield


def _start(loaded: LoadedModel, side: str, length: int | None) -> int | None:
    """The train_length that `_with_normalizer` sets; None where it does not change the normalizer."""
    if side == AS_LOADED or length is None:
        return None
    specs = [*read_recipe_file(Path(side)).layers.values()] if is_recipe(side) else [side]
    return measured_length(loaded.model, length) if any(map(starts_by_length, specs)) else None


def _part_key(side: str, item: Item) -> str:
    """A file name: readable, and different for every part."""
    plain = "".join(letter if letter.isalnum() else "-" for letter in f"{item.task}-{item.length}-{side}")[:60]
    return f"{plain}-{settings_hash([side, item.task, item.length])[:8]}"


def _record(identity: dict[str, Any], sides: Sequence[str], items: Sequence[Item]) -> dict[str, Any]:
    return {
        "run": identity,
        "sides": list(sides),
        "items": [[item.task, item.length] for item in items],
        "command": recorded_command(),
        "versions": {**versions(), **package_versions("lm-eval")},
        "created": now(),
    }


def _merge_record(folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    """The record with the sides and items of earlier calls; raises ValueError for a folder of another run."""
    recorded = read_record(folder / RECORD, ("run", "sides", "items"), "Choose a new folder with --out.")
    if recorded is None:
        require_only(folder, (), "files, but no evaluation")
    else:
        require_same_run(
            record["run"],
            recorded["run"],
            f"{folder} contains another evaluation",
            "Choose a new folder with --out.",
            _format_setting,
        )
        for name in ("sides", "items"):
            record[name] = recorded[name] + [entry for entry in record[name] if entry not in recorded[name]]
    write_json(folder / RECORD, record)
    return record


def _format_setting(setting: Any) -> str:
    return str(setting["name"]) if isinstance(setting, dict) else str(setting)


def _digest(model: nn.Module) -> str:
    """Identifies the weights by the first values of every parameter."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().flatten()[:64].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
