"""Text written by a trained model, as long as one likes."""

from typing import Any

import torch

TEMPERATURE = 0.9
START = "\n\n"  # as after a paragraph: models read texts from anywhere, so no other opening is more natural


@torch.inference_mode()
def sample_text(model: Any, tokenizer: Any, *, tokens: int, seed: int = 0, cached: bool = True) -> str:
    """`tokens` tokens drawn one by one; beyond the model's context, the last half of it is what the model still sees.

    The text never ends early: the end-of-text token is not drawn. cached: keep keys and values from token to token.
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
