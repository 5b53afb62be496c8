"""The tables `reads` and `tokens`: the heaviest keys of some listed rows of each head, and the text of each position.

Rows come from the first sequence of a batch. Positions are token indices of the model's input, from 0.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnorm.analysis.settings import AnalysisSettings
from attnorm.analysis.tables import Columns
from attnorm.engines.execution import sent_to_cpu
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.reads import NO_KEY, measure_reads
from attnorm.metrics.sampling import evenly_spaced, one_sequence
from attnorm.normalizers.contract import Normalizer
from attnorm.report_data import INPUT, SIDES

LONGEST_TOKEN = 256  # characters that are stored; a vocabulary file may hold anything

Tokens = Mapping[str, Sequence[tuple[int, str]]]  # side -> (id, text) of each position


def token_texts(model_inputs: Mapping[str, Tensor], tokenizer: Any, *, encoder_decoder: bool) -> Tokens:
    """Return ids and texts of each side; sides whose inputs are not token ids (images, audio) are left out."""
    names = {"encoder": "input_ids", "decoder": "decoder_input_ids"} if encoder_decoder else {INPUT: "input_ids"}
    ids = {side: model_inputs[name] for side, name in names.items() if name in model_inputs}
    tokens_by_side: dict[str, list[tuple[int, str]]] = {}
    for side, side_ids in ids.items():
        if side_ids.dim() == 2 and len(side_ids) and not side_ids.is_floating_point():
            tokens = side_ids[0].tolist()
            texts = {token: token_text(tokenizer, token) for token in set(tokens)}  # a long text has few different ones
            tokens_by_side[side] = [(token, texts[token]) for token in tokens]
    return tokens_by_side


def token_text(tokenizer: Any, token: int) -> str:
    """Return the text that a token adds, with its leading space; "#17" if the tokenizer does not know it."""
    if tokenizer is None:
        return f"#{token}"
    try:
        piece = tokenizer.convert_ids_to_tokens(token)
        text = tokenizer.convert_tokens_to_string([piece])
    except Exception:  # the user may pass any object as tokenizer; a missing text must not stop the run
        return f"#{token}"
    if not isinstance(piece, str) or not isinstance(text, str):
        return f"#{token}"
    if piece.startswith("\u2581") and not text.startswith(" "):  # SentencePiece drops the space of a first token
        text = f" {text}"
    return (text or piece).encode("utf-8", "replace").decode()[:LONGEST_TOKEN]


def listed_rows(wanted: int | Sequence[int], queries: int, tokens_Q: Tensor | None) -> Tensor:
    """Return sorted query indices: `wanted` rows spread over the sequence including the last, or the given rows.

    Given rows count tokens without padding, from the end if negative; rows beyond the sequence are ignored.
    """
    present = torch.arange(queries) if tokens_Q is None else tokens_Q.cpu().nonzero().squeeze(-1)
    if isinstance(wanted, int):
        return evenly_spaced(present, wanted)
    count = len(present)
    inside = sorted({row % count for row in wanted if -count <= row < count}) if count else []
    return present[torch.tensor(inside, dtype=torch.long)]


def listed_reads(
    call: AttentionCall,
    tokens_BQ: Tensor | None,
    normalizers: Mapping[str, Normalizer | None],
    settings: AnalysisSettings,
    tokens: Tokens,
) -> Callable[[], dict[str, Columns]]:
    """Measure the listed rows of a call. The result returns what they add to the table `reads`, by normalizer.

    It may be called once the numbers have arrived from a GPU: see execution.arrival.
    """
    batch, queries = call.query_BHQD.shape[0], call.query_BHQD.shape[-2]
    tokens_Q = tokens_BQ[0] if tokens_BQ is not None and tokens_BQ.shape == (batch, queries) else None
    rows = listed_rows(settings.read_rows, queries, tokens_Q)
    if not settings.read_keys or not len(rows):
        return dict
    measured = measure_reads(one_sequence(call, 0), list(normalizers.values()), rows, settings.read_keys)
    keys_and_weights = {
        name: tuple(sent_to_cpu(t[0]).numpy() for t in (reads.keys, reads.weights)) for name, reads in measured.items()
    }
    sides = zip(SIDES[call.kind], (queries, call.key_BGKD.shape[-2]), strict=True)
    query_texts, key_texts = (_texts(tokens, side, positions) for side, positions in sides)
    return lambda: {
        name: _read_columns(rows, keys, weights, query_texts, key_texts)
        for name, (keys, weights) in keys_and_weights.items()
        if (keys != NO_KEY).any()
    }


def _read_columns(
    rows: Tensor, keys: np.ndarray, weights: np.ndarray, query_texts: np.ndarray, key_texts: np.ndarray
) -> Columns:
    heads, indices, ranks = np.nonzero(keys != NO_KEY)
    row, key = rows.numpy()[indices], keys[heads, indices, ranks]
    return {
        "head": heads,
        "row": row,
        "rank": ranks + 1,
        "key": key,
        "weight": weights[heads, indices, ranks],
        "row_token": query_texts[row],
        "key_token": key_texts[key],
    }


def token_columns(tokens: Tokens) -> list[Columns]:
    """Return the rows of the table `tokens`, one entry per side."""
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
    """Return one text per position; None if positions are not tokens (patches of an image, frames of audio)."""
    pairs = tokens.get(side, tokens.get(INPUT))
    if pairs is None or len(pairs) != positions:
        return np.full(positions, None, dtype=object)
    return np.array([text for _, text in pairs], dtype=object)
