"""The model card: what the model is, what it was trained on, and its loss next to baselines."""

from typing import Any

from attnorm.normalizers.registry import entries
from attnorm.training.lm.model import ARCHITECTURES

QUOTED = 600  # characters of generated text

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
    parts = [_front_matter(), _introduction(run, result), _figures(result), _data(run, result), _recipe(run, result)]
    if sample:
        parts.append(_quote(sample))
    parts.append(_limits())
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _front_matter() -> str:
    return "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- attnorm\n---"


def _introduction(run: dict[str, Any], result: dict[str, Any]) -> str:
    needs_attnorm = any(setting in run for setting in ("normalizer", "recipe", "output"))
    loading = _LOADING_PATCHED if needs_attnorm else _LOADING
    return f"""
# A language model of {result["parameters"] / 1e6:.2f} million parameters

{ARCHITECTURES[run["architecture"]].description}. {_attention_sentence(run)}{_output_sentences(run, result)}\
{run["layers"]} layers \
of {run["heads"]} heads, width {run["width"]}, {run["context"]} positions, a byte-level BPE vocabulary of \
{result["vocabulary"]}. Trained with `attnorm train lm`; weights in float16.

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
        f"The output layer is a mixture of {components} {what} "
        f"([Yang et al. 2018](https://arxiv.org/abs/1711.03953)); all weights together are {result['parameters']:,} "
        f"numbers. A plain output layer has at least as many from width {equal['width']} on ({equal['parameters']:,}). "
    )


def _figures(result: dict[str, Any]) -> str:
    validation = result["validation"]
    names = {"model": "this model", "bigram": "bigram counts", "unigram": "unigram counts"}
    rows = "\n".join(
        f"| {label} | {figures['nats_per_token']:.3f} | {figures['perplexity']:.1f} | {figures['bits_per_byte']:.3f} |"
        for label, figures in ((label, validation[name]) for name, label in names.items())
    )
    rise = f"\n\n**The loss rose while training:** {rise_in_words(result['rise'])}." if result["rise"] else ""
    return f"""
## Validation loss

| | nats per token | perplexity | bits per byte |
|---|---|---|---|
{rows}

Every token except the first of a held-out text ({validation["tokens"]:,} tokens, \
{validation["bytes"]:,} bytes), in adjacent windows: on average half a window is visible. Weights as saved, \
computed in float32. The counts come from the training text; the bigram is interpolated with the unigram, with the \
strength ({validation["bigram"]["strength"]:g}) that does best on the validation text itself, so the comparison \
favours it.{_length_table(validation)}{rise}"""


def _length_table(validation: dict[str, Any]) -> str:
    """Return the table of losses in windows of other lengths, if they were measured."""
    measured = validation.get("by_length", ())
    if len(measured) < 2:
        return ""
    rows = "\n".join(f"| {entry['length']:,} | {entry['nats_per_token']:.3f} |" for entry in measured)
    return f"\n\nThe same tokens in windows of other lengths:\n\n| window | nats per token |\n|---|---|\n{rows}"


def rise_in_words(rise: dict[str, float]) -> str:
    return (
        f"on part of the validation text it was {rise['lowest']:.3f} at step {rise['at_step']:,} and "
        f"{rise['last']:.3f} at the end; a lower learning rate, fewer steps or more text may do better"
    )


def _data(run: dict[str, Any], result: dict[str, Any]) -> str:
    lines = [f"- {kind}: `{text['name']}`, SHA-256 `{text['sha256']}`" for kind, text in _texts(run)]
    passes = result["tokens"] / result["training_tokens_in_text"]
    note = result["note"] or "Source and licence of the text were not stated when the model was trained."
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
    """Return speed and memory; empty for records of earlier versions."""
    speed, peak = (result.get(name) for name in ("tokens_per_second", "peak_memory_bytes"))
    memory = "" if peak is None else f", at most {peak / 2**30:.2f} GiB of memory"
    return ("" if speed is None else f", {speed:,.0f} tokens/s") + memory


def _quote(sample: str) -> str:
    lines = sample[:QUOTED].strip().splitlines()
    return "## What it writes\n\n" + "\n".join(f"> {line}".rstrip() for line in lines) + " ..."


def _limits() -> str:
    return """
## Limits

This model is meant for measurements, not for use: its text has no meaning and may repeat views of its training text."""
