"""Export a trained model: a Hugging Face folder with a model card, a text sample and the numbers behind the card.

The card says what the model is, what it was trained on, and its loss next to baselines.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnorm.files import write_json, write_text
from attnorm.models.layer_normalizer import SOFTMAX
from attnorm.normalizers.contract import Mechanism
from attnorm.normalizers.registry import entries
from attnorm.text import markdown_table
from attnorm_lab.training.checkpoints import METRICS, loss_rise, speed_and_memory
from attnorm_lab.training.device import device_name, training_versions
from attnorm_lab.training.lm.data import Corpus, as_transformers, token_bytes
from attnorm_lab.training.lm.evaluate import baselines, losses_by_length
from attnorm_lab.training.lm.model import ARCHITECTURES, LMSettings, count_parameters, softmax_of_equal_size
from attnorm_lab.training.run import RECORD

SAMPLE = "sample.txt"
TEMPERATURE = 0.9
START = "\n\n"  # a paragraph break: the models were trained on windows from anywhere in the text


def export(
    out: Path,
    model: Any,
    corpus: Corpus,
    settings: LMSettings,
    record: dict[str, Any],
    *,
    steps: int,
    seconds: float,
    device: torch.device,
    lengths: Sequence[int],
    sample_tokens: int = 0,
    note: str = "",
    command: str = "",
) -> dict[str, Any]:
    """Write weights, tokenizer, card and record; training.json comes last, so its result means that all files exist.

    The losses are those of the saved weights: float16, loaded again and run in float32.
    """
    from transformers import AutoModelForCausalLM

    from attnorm.models.saving import from_pretrained

    needs_attnorm = settings.patched or settings.output != SOFTMAX
    read_back: Any = from_pretrained if needs_attnorm else AutoModelForCausalLM.from_pretrained
    tokenizer = as_transformers(corpus.tokenizer, settings.context)
    with _without_progress_bars():
        _save_pretrained(out, model, tokenizer)
        saved: Any = read_back(out, dtype=torch.float32, local_files_only=True)
    saved = saved.to(device).eval()
    parameters = count_parameters(saved)
    result = {
        "steps": steps,
        "tokens": steps * settings.tokens_per_step,
        "training_tokens_in_text": len(corpus.train),
        "vocabulary": corpus.vocabulary,
        "parameters": parameters,
        "training_seconds": round(seconds, 1),
        "device": device_name(device),
        **speed_and_memory(out / METRICS),
        "validation": _validation(saved, corpus, settings, device, lengths),
        "rise": loss_rise(out / METRICS),
        "versions": training_versions(),
        "command": command,
        "note": note,
    }
    if settings.output != SOFTMAX:
        result["softmax_of_equal_size"] = softmax_of_equal_size(settings, corpus.vocabulary, parameters)
    sample = ""
    if sample_tokens:
        cached = not any(isinstance(part, Mechanism) and part.needs_every_query for part in saved.modules())
        sample = sample_text(saved, tokenizer, tokens=sample_tokens, seed=settings.seed, cached=cached)
        write_text(out / SAMPLE, sample)
    record = {**record, "result": result}
    write_text(out / "README.md", model_card(record, sample))
    write_json(out / RECORD, record)
    return record


def _save_pretrained(out: Path, model: Any, tokenizer: Any) -> None:
    """Save through a temporary folder: each file is replaced atomically."""
    from attnorm.models.saving import save_pretrained

    half = rounded(model, torch.float16)
    draft = out / ".export"
    draft.mkdir(parents=True, exist_ok=True)
    save_pretrained(half, draft)
    tokenizer.save_pretrained(draft)
    for path in sorted(draft.iterdir()):
        path.replace(out / path.name)
    draft.rmdir()


def rounded(model: Any, dtype: torch.dtype) -> Any:
    """Return a copy in half precision on the CPU; the normalizers' parameters stay float32."""
    from attnorm.models.patch_state import normalizer_of, patched_modules

    half = copy.deepcopy(model).to("cpu", dtype).eval()
    for half_module, module in zip(patched_modules(half).values(), patched_modules(model).values(), strict=True):
        normalizer_of(half_module).float().load_state_dict(normalizer_of(module).state_dict())
    return half


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Disable the progress bars of transformers, which would overwrite ours."""
    from transformers import utils

    logging: Any = utils.logging  # not annotated
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _validation(
    model: Any, corpus: Corpus, settings: LMSettings, device: torch.device, lengths: Sequence[int]
) -> dict[str, Any]:
    """Return losses over the validation text except its first token: of the model and of the baselines."""
    losses = losses_by_length(model, corpus.valid, lengths, settings, device)
    counted = baselines(corpus.train, corpus.valid, corpus.vocabulary)
    size = int(token_bytes(corpus.tokenizer)[np.asarray(corpus.valid[1:])].sum())
    tokens = len(corpus.valid) - 1

    def figures(nats: float) -> dict[str, float]:
        return {
            "nats_per_token": round(nats, 5),
            "perplexity": round(math.exp(nats), 3),
            "bits_per_byte": round(nats * tokens / size / math.log(2), 5),
        }

    return {
        "tokens": tokens,
        "bytes": size,
        "model": figures(losses[settings.context]),
        "by_length": [{"length": length, **figures(loss)} for length, loss in losses.items()],
        "bigram": {**figures(counted.bigram), "strength": asdict(counted)["bigram_strength"]},
        "unigram": figures(counted.unigram),
    }


@torch.inference_mode()
def sample_text(model: Any, tokenizer: Any, *, tokens: int, seed: int = 0, cached: bool = True) -> str:
    """Generate `tokens` tokens; beyond the model's context, the model sees the last half of it.

    The end-of-text token is never drawn, so the text does not end early. cached: use the key-value cache.
    """
    context = int(model.config.max_position_embeddings)
    written = tokenizer(START, return_tensors="pt").input_ids.to(model.device)
    opening = written.shape[1]
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        while (missing := tokens - (written.shape[1] - opening)) > 0:
            seen = written[:, -max(1, context // 2) :] if written.shape[1] >= context else written
            longer = model.generate(
                seen,
                attention_mask=torch.ones_like(seen),
                max_new_tokens=min(missing, max(1, context - seen.shape[1])),  # the last one drawn needs no position
                do_sample=True,
                temperature=TEMPERATURE,
                top_k=0,
                use_cache=cached,
                suppress_tokens=[tokenizer.eos_token_id],
                pad_token_id=tokenizer.eos_token_id,
            )
            written = torch.cat([written, longer[:, seen.shape[1] :]], dim=1)
    text: str = tokenizer.decode(written[0, opening:])
    return text


QUOTED = 600  # characters of generated text

_FRONT_MATTER = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- attnorm\n---"

_LOADING = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (kind.from_pretrained("path/to/this/folder") for kind in (AutoModelForCausalLM, AutoTokenizer))
```"""

_LOADING_PATCHED = """\
```python
import attnorm
from transformers import AutoTokenizer
model = attnorm.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

`transformers` alone would load the same weights and run them with plain softmaxes, which is not the trained model."""


def model_card(record: dict[str, Any], sample: str = "") -> str:
    """Return README.md for the record of a finished run."""
    run, result = record["run"], record["result"]
    parts = [_FRONT_MATTER, _introduction(run, result), _figures(result), _data(run, result), _recipe(run, result)]
    if sample:
        parts.append(_quote(sample))
    parts.append(_limits())
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _introduction(run: dict[str, Any], result: dict[str, Any]) -> str:
    needs_attnorm = any(setting in run for setting in ("normalizer", "recipe", "output"))
    loading = _LOADING_PATCHED if needs_attnorm else _LOADING
    return f"""
# A language model of {result["parameters"] / 1e6:.2f} million parameters

{ARCHITECTURES[run["architecture"]].description}. {_attention_sentence(run)}{_output_sentences(run, result)}\
{run["layers"]} layers \
of {run["heads"]} heads, width {run["width"]}, {run["context"]} positions, a byte-level BPE vocabulary of \
{result["vocabulary"]}. Trained with `attnorm lab train lm`; weights in float16.

{loading}"""


def _attention_sentence(run: dict[str, Any]) -> str:
    """Return a sentence about the normalizers; empty for softmax."""
    if "recipe" in run:
        groups = ", ".join(f"`{spec}` in layers {layers}" for layers, spec in run["recipe"].items())
        return f"Attention differs by layer: {groups}. "
    if "normalizer" not in run:
        return ""
    name, options = run["normalizer"], run["normalizer_options"]
    entry = entries().get(name)
    paper = f" ([{entry.paper}]({entry.url}))" if entry is not None and entry.url.startswith("https://") else ""
    listed_options = ", ".join(f"{option}={value}" for option, value in options.items())
    return f"Attention uses `{name}`{f' with {listed_options}' if listed_options else ''}{paper} instead of softmax. "


def _output_sentences(run: dict[str, Any], result: dict[str, Any]) -> str:
    """Return sentences about a mixture at the output; empty for one softmax."""
    if "output" not in run:
        return ""
    kind, _, components = run["output"].partition(":")
    what = "softmaxes" if kind == "mos" else "contexts in front of one softmax"
    equal = result["softmax_of_equal_size"]
    return (
        f"The output layer is a mixture of {components} {what} ([Yang et al. "
        f"2018](https://arxiv.org/abs/1711.03953)); the model has {result['parameters']:,} parameters. With a "
        f"plain output layer it would have at least as many from width {equal['width']} on "
        f"({equal['parameters']:,}). "
    )


def _figures(result: dict[str, Any]) -> str:
    validation = result["validation"]
    names = {"model": "this model", "bigram": "bigram counts", "unigram": "unigram counts"}
    table = markdown_table(
        ("", "nats per token", "perplexity", "bits per byte"),
        [
            (label, f"{losses['nats_per_token']:.3f}", f"{losses['perplexity']:.1f}", f"{losses['bits_per_byte']:.3f}")
            for label, losses in ((label, validation[name]) for name, label in names.items())
        ],
    )
    rise = f"\n\n**The loss rose while training:** {rise_in_words(result['rise'])}." if result["rise"] else ""
    return f"""
## Validation loss

{table}

Every token except the first of a held-out text ({validation["tokens"]:,} tokens, \
{validation["bytes"]:,} bytes), in adjacent windows: on average half a window is visible. Weights as saved, \
computed in float32. The counts come from the training text; the bigram is interpolated with the unigram, with the \
strength ({validation["bigram"]["strength"]:g}) that does best on the validation text itself, so the comparison \
favors it.{_length_table(validation)}{rise}"""


def _length_table(validation: dict[str, Any]) -> str:
    """Return the table of losses in windows of other lengths, if they were measured."""
    measured = validation.get("by_length", ())
    if len(measured) < 2:
        return ""
    rows = [(f"{entry['length']:,}", f"{entry['nats_per_token']:.3f}") for entry in measured]
    table = markdown_table(("window", "nats per token"), rows, left=0)
    return f"\n\nThe same tokens in windows of other lengths:\n\n{table}"


def rise_in_words(rise: dict[str, float]) -> str:
    return (
        f"on part of the validation text it was {rise['lowest']:.3f} at step {rise['at_step']:,} and "
        f"{rise['last']:.3f} at the end; a lower learning rate, fewer steps or more text may do better"
    )


def _data(run: dict[str, Any], result: dict[str, Any]) -> str:
    lines = [f"- {kind}: `{text['name']}`, SHA-256 `{text['sha256']}`" for kind, text in _texts(run)]
    passes = result["tokens"] / result["training_tokens_in_text"]
    note = result["note"] or "Source and license of the text were not stated when the model was trained."
    return f"""
## Data

{note}

{chr(10).join(lines)}

The training text has {result["training_tokens_in_text"]:,} tokens; {result["tokens"]:,} were read, {passes:.1f} times \
the text, in windows at random positions."""


def _texts(run: dict[str, Any]) -> list[tuple[str, dict[str, str]]]:
    return [*(("training", text) for text in run["train"]), ("validation", run["valid"])]


def _recipe(run: dict[str, Any], result: dict[str, Any]) -> str:
    done = result["steps"]
    early = "" if done == run["steps"] else f" of {run['steps']:,} planned (stopped by its time limit)"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    command = f"\n```\n{result['command']}\n```\n" if result["command"] else ""
    return f"""
## Recipe
{command}
{done:,} steps{early} of {run["batch"]} windows, AdamW, learning rate {run["learning_rate"]:g} after \
{run["warmup"]} steps of warmup and then along a cosine to 0, weight decay {run["weight_decay"]:g}, {run["dtype"]}, \
seed {run["seed"]}; {result["training_seconds"] / 60:.1f} minutes on {result["device"]}{_speed(result)}. \
Versions: {versions}. `metrics.jsonl` has the logged losses, `training.json` has everything above as data."""


def _speed(result: dict[str, Any]) -> str:
    speed, peak = result["tokens_per_second"], result["peak_memory_bytes"]
    memory = "" if peak is None else f", at most {peak / 2**30:.2f} GiB of memory"
    return ("" if speed is None else f", {speed:,.0f} tokens/s") + memory


def _quote(sample: str) -> str:
    lines = sample[:QUOTED].strip().splitlines()
    return "## What it writes\n\n" + "\n".join(f"> {line}".rstrip() for line in lines) + " ..."


def _limits() -> str:
    return """
## Limits

This model is meant for measurements, not for use: its text has no meaning and may repeat views of its training text."""
