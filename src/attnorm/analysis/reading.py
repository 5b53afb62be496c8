"""Which tokens a head reads: the rows that are chosen, their heaviest keys, and the text of each position.

Rows come from the first sequence of a batch. Positions count tokens of the model's input, from 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnorm.analysis.columns import Columns
from attnorm.analysis.sequences import one_sequence
from attnorm.analysis.settings import AnalysisSettings
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.reads import NO_KEY, measure_reads
from attnorm.metrics.sampling import spread
from attnorm.normalizers.contract import Normalizer

LONGEST_TOKEN = 256  # characters that are kept: a vocabulary is a file that anybody may write

INPUT = "input"  # the side of a model with one stack; with two of them: encoder, decoder
SIDES = {"decoder": ("decoder", "decoder"), "encoder": ("encoder", "encoder"), "cross": ("decoder", "encoder")}

Tokens = Mapping[str, Sequence[tuple[int, str]]]  # side -> (id, text) of each position


def token_texts(model_inputs: Mapping[str, Tensor], tokenizer: Any, *, encoder_decoder: bool) -> Tokens:
    """The ids and texts of each side; without a side whose inputs are no token ids (images, audio)."""
    names = {"encoder": "input_ids", "decoder": "decoder_input_ids"} if encoder_decoder else {INPUT: "input_ids"}
    ids = {side: model_inputs[name] for side, name in names.items() if name in model_inputs}
    return {
        side: [(one, token_text(tokenizer, one)) for one in some[0].tolist()]
        for side, some in ids.items()
        if some.dim() == 2 and len(some) and not some.is_floating_point()
    }


def token_text(tokenizer: Any, token: int) -> str:
    """What a token adds to a text, its leading space included; "#17" where no tokenizer knows it."""
    try:
        piece = tokenizer.convert_ids_to_tokens(token)
        text = tokenizer.convert_tokens_to_string([piece])
    except Exception:  # a tokenizer is any object that a user gives; a missing name stops no measurement
        return f"#{token}"
    if not isinstance(piece, str) or not isinstance(text, str):
        return f"#{token}"
    if piece.startswith("\u2581") and not text.startswith(" "):  # SentencePiece drops the space of a first token
        text = f" {text}"
    return (text or piece).encode("utf-8", "replace").decode()[:LONGEST_TOKEN]


def chosen_rows(wanted: int | Sequence[int], queries: int, tokens_Q: Tensor | None) -> Tensor:
    """Query positions, sorted: that many spread over the sequence, the last among them; or the listed ones.

    A listed row counts tokens without padding, from the end where it is negative; rows beyond the sequence are left
    out.
    """
    present = torch.arange(queries) if tokens_Q is None else tokens_Q.cpu().nonzero().squeeze(-1)
    if isinstance(wanted, int):
        return spread(present, wanted)
    count = len(present)
    inside = sorted({row % count for row in wanted if -count <= row < count}) if count else []
    return present[torch.tensor(inside, dtype=torch.long)]


def read_columns(
    call: AttentionCall,
    tokens_BQ: Tensor | None,
    normalizers: Mapping[str, Normalizer | None],
    settings: AnalysisSettings,
    tokens: Tokens,
) -> dict[str, Columns]:
    """By normalizer, what a call adds to the table `reads`; empty where nothing is asked for."""
    shape = (call.query_BHQD.shape[0], call.query_BHQD.shape[-2])
    padded = tokens_BQ is not None and tokens_BQ.shape == shape
    rows = chosen_rows(settings.read_rows, shape[1], tokens_BQ[0] if padded and tokens_BQ is not None else None)
    if not settings.read_keys or not len(rows):
        return {}
    found = measure_reads(one_sequence(call, 0), list(normalizers.values()), rows, settings.read_keys)
    query_side, key_side = SIDES[call.kind]
    query_texts = _texts(tokens, query_side, shape[1])
    key_texts = _texts(tokens, key_side, call.key_BGKD.shape[-2])
    columns: dict[str, Columns] = {}
    for name, reads in found.items():
        keys, weights = reads.keys[0].cpu().numpy(), reads.weights[0].cpu().numpy()
        heads, places, ranks = np.nonzero(keys != NO_KEY)
        if not len(heads):
            continue
        row, key = rows.numpy()[places], keys[heads, places, ranks]
        columns[name] = {
            "head": heads,
            "row": row,
            "rank": ranks + 1,
            "key": key,
            "weight": weights[heads, places, ranks],
            "row_token": query_texts[row],
            "key_token": key_texts[key],
        }
    return columns


def token_columns(tokens: Tokens) -> list[Columns]:
    """The table `tokens`, side by side."""
    return [
        {
            "side": side,
            "position": np.arange(len(pairs)),
            "token_id": np.array([token for token, _ in pairs]),
            "token": np.array([text for _, text in pairs], dtype=object),
        }
        for side, pairs in tokens.items()
        if pairs
    ]


def _texts(tokens: Tokens, side: str, positions: int) -> np.ndarray:
    """One text for each position; None where positions are no tokens: patches of an image, frames of audio."""
    pairs = tokens.get(side, tokens.get(INPUT))
    if pairs is None or len(pairs) != positions:
        return np.full(positions, None, dtype=object)
    return np.array([text for _, text in pairs], dtype=object)
