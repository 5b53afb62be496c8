"""The trained model as others want it: a Hugging Face folder with a model card and the figures behind it."""

import copy
import errno
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnorm.training import atomic
from attnorm.training.baselines import baselines
from attnorm.training.card import model_card
from attnorm.training.evaluation import losses_by_length
from attnorm.training.run_folder import METRICS, RECORD, loss_rise, speed_and_memory
from attnorm.training.sampling import sample_text
from attnorm.training.settings import Settings
from attnorm.training.tokenizer import as_transformers, token_bytes
from attnorm.training.tokens import Corpus
from attnorm.training.versions import versions

SAMPLE = "sample.txt"


def export(
    out: Path,
    model: Any,
    corpus: Corpus,
    settings: Settings,
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
    """Writes weights, tokenizer, card and record; training.json comes last, so its result means that all are there.

    The figures are those of the weights as saved: float16, read back and run in float32.
    """
    from transformers import AutoModelForCausalLM

    from attnorm.models.saving import from_pretrained

    read_back: Any = from_pretrained if settings.patched else AutoModelForCausalLM.from_pretrained
    tokenizer = as_transformers(corpus.tokenizer, settings.context)
    with _without_progress_bars():
        _save_pretrained(out, model, tokenizer)
        saved: Any = read_back(out, dtype=torch.float32, local_files_only=True)
    saved = saved.to(device).eval()
    result = {
        "steps": steps,
        "tokens": steps * settings.tokens_per_step,
        "training_tokens_in_text": len(corpus.train),
        "vocabulary": corpus.vocabulary,
        "parameters": sum(parameter.numel() for parameter in saved.parameters()),
        "training_seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        **speed_and_memory(out / METRICS),
        "validation": _validation(saved, corpus, settings, device, lengths),
        "rise": loss_rise(out / METRICS),
        "versions": versions(),
        "command": command,
        "note": note,
    }
    sample = ""
    if sample_tokens:
        # Selective attention goes by what all earlier queries chose, which no cache keeps.
        cached = settings.normalizer != "selective"
        sample = sample_text(saved, tokenizer, tokens=sample_tokens, seed=settings.seed, cached=cached)
        atomic.write_text(out / SAMPLE, sample)
    record = {**record, "result": result}
    atomic.write_text(out / "README.md", model_card(record, sample))
    atomic.write_json(out / RECORD, record)
    return record


def _save_pretrained(out: Path, model: Any, tokenizer: Any) -> None:
    """Through a folder beside the real one: files that others may be reading change at once or not at all."""
    from safetensors import SafetensorError

    from attnorm.models.saving import save_pretrained

    half = rounded(model, torch.float16)
    draft = out / ".export"
    draft.mkdir(parents=True, exist_ok=True)
    try:
        save_pretrained(half, draft)
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(draft)) from None
    tokenizer.save_pretrained(draft)
    for path in sorted(draft.iterdir()):
        path.chmod(0o644)  # safetensors writes files that only their owner may read
        path.replace(out / path.name)
    draft.rmdir()


def rounded(model: Any, dtype: torch.dtype) -> Any:
    """A copy in half precision on the CPU, but for the few numbers that the normalizers have learned."""
    from attnorm.models.attach import normalizer_of, patched_modules

    half = copy.deepcopy(model).to("cpu", dtype).eval()
    for half_module, module in zip(patched_modules(half).values(), patched_modules(model).values(), strict=True):
        normalizer_of(half_module).float().load_state_dict(normalizer_of(module).state_dict())
    return half


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """transformers draws its own over ours."""
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
    model: Any, corpus: Corpus, settings: Settings, device: torch.device, lengths: Sequence[int]
) -> dict[str, Any]:
    """Losses over the whole validation text but its first token, of the model and of what it must beat."""
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
