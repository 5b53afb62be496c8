"""The commands that a sweep can run: their parameters, how values are checked, and the rows that a run returns.

Each run writes an ordinary folder, the same as `attnorm analyze --out`, `attnorm lab train lm --out` and so on. A
worker keeps the last model that it loaded, so items of one model load it once per worker.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnorm.normalizers.spec import parse_spec
from attnorm.run_folder import lock

if TYPE_CHECKING:
    from attnorm.models.load import LoadedModel
    from attnorm_lab.training.lm.model import LMSettings
    from attnorm_lab.training.lm.train import LMProgress

Rows = list[dict[str, Any]]
TIMING = ("tokens_per_second", "training_seconds", "peak_memory_bytes")  # columns that differ from run to run
REPORT = "report.html"


@dataclass(frozen=True)
class Task:
    command: str
    parameters: Mapping[str, str]  # name -> kind of its value (sweep.plan.KINDS)
    required: tuple[str, ...]
    check: Callable[[Mapping[str, Any]], None]
    """Raises ValueError before anything runs."""
    run: Callable[..., Rows]
    """(values, run folder, folder that all items share) -> rows"""


# analyze


def _check_analyze(values: Mapping[str, Any]) -> None:
    from attnorm.analysis.settings import groups, named_normalizers

    try:
        named_normalizers(values.get("normalizers", ["model"]))
        if "metrics" in values:
            groups(values["metrics"])
    except TypeError as error:
        raise ValueError(str(error)) from None
    if values.get("length", 1) < 1:
        raise ValueError(f"expected a length of at least 1, got {values['length']}")


def _analyze(values: Mapping[str, Any], out: Path, shared: Path) -> Rows:
    from attnorm.analysis.analyze import analyze
    from attnorm.analysis.compare import sides_of
    from attnorm.files import read_text, text_name
    from attnorm.models.inputs import Text

    options = {**values}
    named = ("model", "dtype", "device", "revision", "trust_remote_code", "tokenizer")
    loaded = _load_cached(tuple((name, options.pop(name)) for name in named if name in options))
    if text := options.pop("text", None):
        path = Path(text)
        options["inputs"] = {text_name(path): Text(text_name(path), read_text(path), file=True)}
    if "length" in options:
        options["lengths"] = options.pop("length")
    analysis = analyze(loaded, out=out, **options)
    if not (out / REPORT).is_file():
        analysis.save_html(out / REPORT)
    rows: Rows = []
    for side in sides_of(analysis):
        row: dict[str, Any] = {"normalizer": side.normalizer, "keys": side.longest, "heads": side.heads}
        row |= {f"{name} heads": count for name, count in side.counts.items()}
        row |= {name: None if quartiles is None else quartiles[1] for name, quartiles in side.quartiles.items()}
        rows.append(row)
    return rows


@lru_cache(maxsize=1)
def _load_cached(options: tuple[tuple[str, Any], ...]) -> "LoadedModel":
    from attnorm.models.load import load

    arguments = dict(options)
    return load(arguments.pop("model"), **arguments)


def models_loaded() -> int:
    """Return how often this process has loaded a model."""
    return _load_cached.cache_info().misses


# train lm


def lm_settings(values: Mapping[str, Any]) -> "LMSettings":
    """Return the settings of a training run from the values of an item."""
    from attnorm_lab.training.lm.model import LMSettings

    known = {field.name for field in fields(LMSettings)}
    settings = {name: value for name, value in values.items() if name in known}
    normalizer = settings.pop("normalizer", "softmax")
    if isinstance(normalizer, dict):
        return LMSettings(**settings, recipe=normalizer)
    name, options = parse_spec(normalizer)
    return LMSettings(**settings, normalizer=name, normalizer_options=options)


def _check_lm(values: Mapping[str, Any]) -> None:
    from attnorm_lab.training.lm.attention import check_attention
    from attnorm_lab.training.lm.evaluate import check_lengths
    from attnorm_lab.training.lm.model import check_normalizer

    settings = lm_settings(values)
    _check_normalizer_once(repr(settings.normalizers), lambda: check_normalizer(settings))
    check_attention("dense" if values.get("dense") else "engine", settings)
    check_lengths(values.get("eval_lengths", ()), settings)
    if "needle" in values:
        needle_task(values)


_checked: set[str] = set()


def _check_normalizer_once(key: str, check: Callable[[], None]) -> None:
    """Check the normalizer, once per process: building a model for thousands of items takes long."""
    if key not in _checked:
        check()
        _checked.add(key)


def needle_task(values: Mapping[str, Any]) -> Any:
    """Return the retrieval test of a trained language model: pass keys hidden in the validation text."""
    from attnorm.text import did_you_mean
    from attnorm_lab.training.needle import NeedleTask

    settings: dict[str, Any] = dict(values["needle"])
    known = {field.name for field in fields(NeedleTask)}
    for name in settings:
        if name not in known:
            raise ValueError(f"needle: unknown key {name!r}; {did_you_mean(name, known)}")
    settings |= {name: tuple(value) for name, value in settings.items() if isinstance(value, list)}
    return NeedleTask(**settings)


def train_lm_item(
    values: Mapping[str, Any], out: Path, shared: Path, report: "Callable[[LMProgress], None]" = lambda progress: None
) -> Rows:
    """Train one language model; with `needle`, also fine-tune a copy to find pass keys."""
    from attnorm_lab.training.lm.data import prepare
    from attnorm_lab.training.lm.train import train_lm

    settings = lm_settings(values)
    texts, valid, data = [Path(text) for text in values["texts"]], Path(values["valid"]), shared / "data"
    with lock(data / ".lock"):  # items share the encoded text
        prepare(texts, valid, data, vocab=settings.vocab, seed=settings.seed)
    record = train_lm(
        texts, valid, out, settings, data=data, device=values.get("device"), compiled=values.get("compile", False),
        attention="dense" if values.get("dense") else "engine", evaluate_every=values.get("eval_every", 250),
        checkpoint_every=values.get("checkpoint_every", 250), lengths=values.get("eval_lengths"), report=report,
    )  # fmt: skip
    result = record["result"]
    row = {"steps_done": result["steps"], "loss": result["validation"]["model"]["nats_per_token"]}
    for entry in result["validation"]["by_length"]:
        row[f"loss at {entry['length']}"] = entry["nats_per_token"]
    row |= {"bits_per_byte": result["validation"]["model"]["bits_per_byte"], "parameters": result["parameters"]}
    if "needle" in values:
        row |= _needle(values, out, valid)
    row |= {name: result.get(name) for name in TIMING}
    return [row]


def _needle(values: Mapping[str, Any], out: Path, valid: Path) -> dict[str, float]:
    from attnorm_lab.training.needle import train_needle

    record = train_needle(out, valid, needle_task(values), device=values.get("device"))
    return {f"keys found at {length}": figures["exact"] for length, figures in record["by_length"].items()}


# train retrieval


def _retrieval_settings(values: Mapping[str, Any]) -> tuple[Any, Any]:
    from attnorm_lab.training.retrieval.data import RetrievalRecipe
    from attnorm_lab.training.retrieval.evaluate import Trials

    known = {field.name for field in fields(RetrievalRecipe)}
    recipe = RetrievalRecipe(**{name: value for name, value in values.items() if name in known})
    others = tuple(values.get("test_with", ()))
    options: dict[str, Any] = {"sets": values["sets"]} if "sets" in values else {}
    if "sizes" in values:
        options["sizes"] = tuple(sorted(values["sizes"]))
    return recipe, Trials(**options, others=others)


def _check_retrieval(values: Mapping[str, Any]) -> None:
    from attnorm_lab.training.retrieval.data import find_task
    from attnorm_lab.training.retrieval.model import normalizer_for
    from attnorm_lab.training.retrieval.train import check_recipe

    recipe, _ = _retrieval_settings(values)
    check_recipe(recipe, find_task(values.get("task", "max")))
    if not isinstance(values["normalizer"], str):
        raise ValueError(
            f"expected one normalizer, got the recipe {values['normalizer']!r}: these models have one layer"
        )
    normalizer_for(values["normalizer"], 1)


def _train_retrieval(values: Mapping[str, Any], out: Path, shared: Path) -> Rows:
    from attnorm_lab.training.retrieval.train import train_retrieval

    recipe, trials = _retrieval_settings(values)
    results = train_retrieval(
        [values["normalizer"]], out, task=values.get("task", "max"), seeds=[values.get("seed", 0)], recipe=recipe,
        trials=trials, device=values.get("device"), compiled=values.get("compile"),
    )  # fmt: skip
    names = ("accuracy", "logits_wrong", "dispersed", "winner_weight", "leak")
    return [
        {"tested_with": record["tested_with"], "size": record["size"], **{name: record.get(name) for name in names}}
        for record in results.records
    ]


# reproduce


def _experiment_subject(values: Mapping[str, Any]) -> Any:
    from attnorm_lab.experiments.experiment import ExperimentSubject, default_model

    quick = values.get("quick", False)
    return ExperimentSubject(
        model=values.get("model") or default_model(quick=quick), texts=tuple(map(Path, values.get("texts", ()))),
        valid=tuple(map(Path, values.get("valid", ()))), quick=quick, seed=values.get("seed", 0),
        device=values.get("device"), only=tuple(values.get("only", ())), longest=values.get("longest"),
    )  # fmt: skip


def _check_reproduce(values: Mapping[str, Any]) -> None:
    from attnorm_lab.experiments.catalogue import check_unused_options, named

    check_unused_options(named([values["experiment"]]), _experiment_subject(values))


def _reproduce(values: Mapping[str, Any], out: Path, shared: Path) -> Rows:
    from attnorm_lab.experiments.run import reproduce

    (written,) = reproduce([values["experiment"]], _experiment_subject(values), out)
    names = ("claim", "ours", "verdict")
    return [{name: finding[name] for name in names} for finding in written.findings] or [{"claim": "no claim"}]


_LM_NUMBERS = ("learning_rate", "weight_decay")
_LM_INTEGERS = ("layers", "heads", "width", "context", "vocab", "steps", "batch", "warmup", "seed")
_RETRIEVAL_NUMBERS = ("learning_rate", "weight_decay", "leak_penalty", "leak_from", "squeezed", "standardized")
_RETRIEVAL_INTEGERS = ("seed", "steps", "batch", "smallest", "largest", "width", "sets")

TASKS: dict[str, Task] = {
    task.command: task
    for task in (
        Task(
            "analyze",
            {
                "model": "model", "text": "file", "length": "integer", "normalizers": "words", "seed": "integer",
                "windows": "integer or word", "budget": "integer", "rows": "integer or word", "metrics": "words",
                "bos": "switch", "top_n": "integers", "vectors": "word", "vector_rows": "integer",
                "read_keys": "integer", "dtype": "word", "device": "word", "revision": "word", "tokenizer": "model",
                "trust_remote_code": "switch",
            },
            ("model",), _check_analyze, _analyze,
        ),
        Task(
            "train lm",
            {
                "texts": "files", "valid": "file", "normalizer": "normalizer", "architecture": "word",
                **dict.fromkeys(_LM_INTEGERS, "integer"), **dict.fromkeys(_LM_NUMBERS, "number"), "dtype": "word",
                "device": "word", "compile": "switch", "dense": "switch", "eval_every": "integer",
                "checkpoint_every": "integer", "eval_lengths": "integers", "needle": "table",
            },
            ("texts", "valid"), _check_lm, train_lm_item,
        ),
        Task(
            "train retrieval",
            {
                "normalizer": "normalizer", "task": "word", "sizes": "integers", "test_with": "words", "dtype": "word",
                **dict.fromkeys(_RETRIEVAL_INTEGERS, "integer"), **dict.fromkeys(_RETRIEVAL_NUMBERS, "number"),
                "cosine": "switch", "device": "word", "compile": "switch",
            },
            ("normalizer",), _check_retrieval, _train_retrieval,
        ),
        Task(
            "reproduce",
            {
                "experiment": "word", "model": "model", "texts": "files", "valid": "files", "quick": "switch",
                "seed": "integer", "only": "words", "longest": "integer", "device": "word",
            },
            ("experiment",), _check_reproduce, _reproduce,
        ),
    )
}  # fmt: skip
