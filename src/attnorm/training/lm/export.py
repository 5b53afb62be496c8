"""Export a trained model: a Hugging Face folder with a model card, a text sample and the numbers behind the card."""

import copy
import errno
import math
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnorm.files import write_json, write_text
from attnorm.models.layer_recipe import SOFTMAX
from attnorm.provenance import package_versions
from attnorm.training.lm.card import model_card
from attnorm.training.lm.data import Corpus, as_transformers, token_bytes
from attnorm.training.lm.evaluate import baselines, losses_by_length
from attnorm.training.lm.model import RECORD, LMSettings, count_parameters, softmax_of_equal_size
from attnorm.training.lm.train import METRICS, loss_rise, speed_and_memory

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
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
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
        # Selective attention depends on the choices of all earlier queries, which no cache keeps.
        cached = all(name != "selective" for name, _ in settings.normalizers)
        sample = sample_text(saved, tokenizer, tokens=sample_tokens, seed=settings.seed, cached=cached)
        write_text(out / SAMPLE, sample)
    record = {**record, "result": result}
    write_text(out / "README.md", model_card(record, sample))
    write_json(out / RECORD, record)
    return record


def training_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide the weights."""
    return {"python": platform.python_version(), **package_versions("torch", "transformers", "tokenizers")}


def _save_pretrained(out: Path, model: Any, tokenizer: Any) -> None:
    """Save through a temporary folder: each file is replaced atomically."""
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
        path.chmod(0o644)  # safetensors makes them readable by their owner only
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
