"""A two-layer attention-only model whose circuit is built by hand, so that every weight is known exactly.

The residual stream has three parts: the token, the position, and the token before. Each is a one-hot vector and its
negative, so that the layer norm is a multiplication by a constant.

    L0H0  logit BETA at the position before the query, 0 elsewhere; it writes that token into the third part
    L1H1  logit GAMMA where the third part of the key is the query's token, 0 elsewhere: an induction head
    L0H1, L1H0  logits 0: uniform attention
"""

import math

import torch
from transformers import GPT2Config, GPT2LMHeadModel

TOKENS, POSITIONS = 80, 128
BETA = 40.0  # so sharp that the third part is a single token


def planted(gamma: float) -> GPT2LMHeadModel:
    half = 2 * TOKENS + POSITIONS
    width = 2 * half
    config = GPT2Config(
        vocab_size=TOKENS, n_positions=POSITIONS, n_embd=width, n_layer=2, n_head=2, n_inner=4,
        tie_word_embeddings=False, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    token, position, before = slice(0, TOKENS), slice(TOKENS, half - TOKENS), slice(half - TOKENS, half)
    with torch.no_grad():
        for parameter in model.transformer.h.parameters():
            parameter.zero_()
        model.transformer.wte.weight.copy_(_mirrored(torch.eye(TOKENS, half)))
        model.transformer.wpe.weight.copy_(_mirrored(torch.roll(torch.eye(POSITIONS, half), TOKENS, 1)))
        for index, block in enumerate(model.transformer.h):
            block.ln_1.weight.fill_(1.0)
            block.ln_2.weight.fill_(1.0)
            ones = 2 + index  # one-hot vectors in the stream: each adds 2 to its squared norm
            scale = 1 / math.sqrt(2 * ones / width + config.layer_norm_epsilon)
            logit = (BETA, gamma)[index] * math.sqrt(half) / scale**2
            read = block.attn.c_attn.weight  # (width, 3 width): queries, keys and values of head 0, then of head 1
            first = index * half  # head `index` is the planted one
            size = POSITIONS if index == 0 else TOKENS
            query, key = (position, position) if index == 0 else (token, before)
            read[query, first : first + size] = logit * torch.eye(size)
            # The key of position s carries s + 1, which the query at s + 1 looks for.
            read[key, width + first : width + first + size] = torch.eye(size).roll(1 - index, 1)
            if index == 0:
                read[token, 2 * width : 2 * width + TOKENS] = torch.eye(TOKENS) / scale
                written = torch.roll(torch.eye(TOKENS, half), half - TOKENS, 1)
                block.attn.c_proj.weight[:TOKENS] = _mirrored(written)
    return model


def _mirrored(vectors: torch.Tensor) -> torch.Tensor:
    return torch.cat([vectors, -vectors], dim=1)
