"""Find induction, previous-token and retrieval heads of a causal model, and the weight on their key at any length.

Each probe is a sequence in which the right key of a row is known:

    induction       random tokens, repeated once. The query's token occurred before; the key is the token after that
                    occurrence (Olsson et al. 2022, https://arxiv.org/abs/2209.11895).
    previous_token  the same sequence; the key is the token before the query, the other half of an induction circuit.
    retrieval       a needle, "cue + code", inside a text, and the cue again at the end. The query predicts the next
                    token of the code; the key is that token in the needle (Wu et al. 2024,
                    https://arxiv.org/abs/2404.15574, who count how often it is the heaviest key: `heaviest` here).

A score is the mean weight on the right key. Rows of the last quarter of the sequence are used, so a score belongs to
nearly as many keys as the sequence has tokens. Only these rows are computed: there is no attention matrix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from attnorm.analysis.settings import default_text
from attnorm.analysis.verdicts.reach import circuit_of, reach
from attnorm.arithmetic import ceil_div
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.reads import measure_targets
from attnorm.metrics.sampling import evenly_spaced
from attnorm.models.describe import longest_context
from attnorm.models.forward_pass import run
from attnorm.models.load import BUNDLED, LoadedModel
from attnorm.models.observe import observe
from attnorm.normalizers.contract import Normalizer

SHORTEST = 64  # tokens; a needle and its question need about 30
SEQUENCES = 2
ROWS = 32  # of each sequence
CODE = 8  # tokens of the needle to copy
CUE = " The secret code of the old harbour is"
COLUMNS = ("induction", "previous_token", "retrieval", "circuit_reach", "circuit_probed")  # of the table `heads`


@dataclass(frozen=True)
class CircuitProbe:
    """Sequences of one length, and the right key of each row for one or two circuits."""

    input_ids: Tensor  # (B, L)
    rows: Tensor  # (R,)
    targets: Mapping[str, Tensor]  # circuit -> key indices, (B, R)


def probe_lengths(longest: int) -> list[int]:
    """Return octaves from SHORTEST to the longest, which is included."""
    if longest < SHORTEST:
        raise ValueError(f"circuits: expected a length of at least {SHORTEST} tokens, got {longest}. Use a longer one.")
    octaves = [SHORTEST << power for power in range(longest.bit_length()) if SHORTEST << power < longest]
    return [*octaves, longest]


def repeated_tokens(
    ordinary: Tensor, before: Sequence[int], length: int, sequences: int, generator: torch.Generator
) -> CircuitProbe:
    """Random tokens, repeated once. All are different, unless the vocabulary has fewer than half the length."""
    period = (length - len(before)) // 2
    blocks = []
    for _ in range(sequences):
        drawn = [torch.randperm(len(ordinary), generator=generator) for _ in range(ceil_div(period, len(ordinary)))]
        blocks.append(ordinary[torch.cat(drawn)[:period]])
    block = torch.stack(blocks)
    start = torch.tensor(before, dtype=torch.long).expand(sequences, -1)
    ids = torch.cat([start, block, block], dim=1)
    last = ids.shape[1]
    # The token after the last one of the first copy is in the second copy: that row has another right key.
    rows = evenly_spaced(torch.arange(max(last - last // 4, last - period), last), ROWS)
    targets = {"induction": rows - period + 1, "previous_token": rows - 1}
    return CircuitProbe(ids, rows, {name: keys.expand(sequences, -1) for name, keys in targets.items()})


def needles(
    hay: Tensor,
    cue: Tensor,
    ordinary: Tensor,
    before: Sequence[int],
    length: int,
    sequences: int,
    generator: torch.Generator,
) -> CircuitProbe:
    """A needle at another depth of the text in each sequence, and its cue with the code at the end."""
    body = length - len(before) - 2 * len(cue) - 2 * CODE + 1
    if body < 1:
        raise ValueError(
            f"circuits: expected at least {length - body + 1} tokens to hide a needle in, got a length of {length}. "
            "Use a longer one."
        )
    ids, targets = [], []
    start = torch.tensor(before, dtype=torch.long)
    for index in range(sequences):
        code = ordinary[torch.randperm(len(ordinary), generator=generator)[:CODE]]
        offset = int(torch.randint(len(hay), (1,), generator=generator))
        text = hay.roll(-offset).repeat(ceil_div(body, len(hay)))[:body]
        depth = round(body * (index + 0.5) / sequences)
        ids.append(torch.cat([start, text[:depth], cue, code, text[depth:], cue, code[:-1]]))
        first = len(start) + depth + len(cue)
        targets.append(torch.arange(first, first + CODE))
    rows = torch.arange(length - CODE, length)
    return CircuitProbe(torch.stack(ids), rows, {"retrieval": torch.stack(targets)})


def measure_circuits(
    loaded: LoadedModel,
    normalizers: Mapping[str, Normalizer | None],
    lengths: Sequence[int],
    *,
    seed: int = 0,
    text: str | None = None,
) -> pa.Table:
    """Return one row per normalizer, layer, head, circuit and length, see SCHEMA. Only causal heads are measured.

    normalizers: name -> normalizer; None is what the model runs. The others are applied to the same logits.
    text: around the needles (default: the built-in text).
    """
    probes = [(length, probe) for length in lengths for probe in _probes(loaded, length, seed, text)]
    pieces: list[dict[str, Any]] = []
    for number, (length, probe) in enumerate(probes):
        pieces += _measure_probe(loaded, normalizers, length, probe, check=number == 0)
    if not pieces:
        raise ValueError(
            f"circuits: expected a model with causal attention, got {loaded.name}. Circuits are defined for causal "
            "heads only."
        )
    return pa.Table.from_pylist(pieces, schema=SCHEMA)


SCHEMA = pa.schema(
    [
        ("normalizer", pa.string()),
        ("layer", pa.int64()),
        ("head", pa.int64()),
        ("circuit", pa.string()),
        ("length", pa.int64()),  # tokens of the sequence
        ("n", pa.float64()),  # mean visible keys of the rows
        ("rows", pa.int64()),
        ("weight", pa.float64()),  # mean weight on the right key: the score
        ("gap", pa.float64()),  # median of the log of its weight over the mean of the others, nats
        ("heaviest", pa.float64()),  # share of rows whose heaviest key is the right one
    ]
)


def circuit_columns(table: pa.Table) -> dict[tuple[str, int, int], dict[str, float]]:
    """Return (normalizer, layer, head) -> numbers for the table `heads`.

    A score is that of the length at which it is largest: a head that disperses stays the head it is. `circuit_reach` is
    about the circuit with the largest score of the model itself, where that was measured.
    """
    curves: dict[tuple[str, int, int], dict[str, list[tuple[float, float]]]] = {}
    for row in sorted(table.to_pylist(), key=lambda row: row["n"]):
        key = row["normalizer"], row["layer"], row["head"]
        curves.setdefault(key, {}).setdefault(row["circuit"], []).append((row["n"], row["weight"]))
    columns: dict[tuple[str, int, int], dict[str, float]] = {}
    for key, by_circuit in curves.items():
        scores = {name: max(weight for _, weight in points) for name, points in by_circuit.items()}
        columns[key] = {**scores, "circuit_probed": max(n for points in by_circuit.values() for n, _ in points)}
    for key, by_circuit in curves.items():
        model_scores = columns.get(("model", *key[1:]), columns[key])
        circuit = circuit_of(model_scores)
        if circuit is not None:
            n, weights = zip(*by_circuit[circuit], strict=True)
            columns[key] |= {"circuit_reach": reach(n, weights), "circuit_probed": n[-1]}
    return columns


def with_circuits(heads: pa.Table, table: pa.Table) -> pa.Table:
    """Return the table `heads` with the columns of the circuits filled for its causal heads."""
    columns_by_head = circuit_columns(table)
    keys = zip(*(heads[name].to_pylist() for name in ("kind", "normalizer", "layer", "head")), strict=True)
    rows = [
        columns_by_head.get((name, layer, head), {}) if kind == "decoder" else {} for kind, name, layer, head in keys
    ]
    for column in COLUMNS:
        values = pa.array([row.get(column, np.nan) for row in rows], pa.float64())
        heads = heads.set_column(heads.schema.get_field_index(column), column, values)
    return heads


def _probes(loaded: LoadedModel, length: int, seed: int, text: str | None) -> tuple[CircuitProbe, CircuitProbe]:
    limit, hard = longest_context(loaded.model)
    if hard and limit is not None and length > limit:
        raise ValueError(
            f"{loaded.name}: expected lengths of at most {limit} tokens, got {length}. Use a smaller length."
        )
    generator = torch.Generator().manual_seed(seed)
    tokenizer: Any = loaded.tokenizer
    vocabulary = int(loaded.model.config.get_text_config(decoder=True).vocab_size)
    special: set[int] = set() if tokenizer is None else set(tokenizer.all_special_ids)
    size = vocabulary if tokenizer is None else min(vocabulary, len(tokenizer))
    ordinary = torch.tensor([token for token in range(size) if token not in special])
    if tokenizer is None:
        hay, cue = ordinary[torch.randperm(len(ordinary), generator=generator)], ordinary[: len(CUE.split())]
        return (
            repeated_tokens(ordinary, (), length, SEQUENCES, generator),
            needles(hay, cue, ordinary, (), length, SEQUENCES, generator),
        )
    words = text or next(iter(default_text(bundled=loaded.requested_name == BUNDLED).values()))
    hay, cue = (_ids(tokenizer, string) for string in (words[: 16 * length], CUE))
    empty = tokenizer("", verbose=False)["input_ids"]
    before = [token for token in empty if token != tokenizer.eos_token_id or token == tokenizer.bos_token_id]
    return (
        repeated_tokens(ordinary, before[:1], length, SEQUENCES, generator),
        needles(hay, cue, ordinary, before[:1], length, SEQUENCES, generator),
    )


def _ids(tokenizer: Any, words: str) -> Tensor:
    return torch.tensor(tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"])


def _measure_probe(
    loaded: LoadedModel,
    normalizers: Mapping[str, Normalizer | None],
    length: int,
    probe: CircuitProbe,
    *,
    check: bool,
) -> list[dict[str, Any]]:
    """Run the model on the sequences of a probe and summarize the right keys of every head."""
    pieces: list[dict[str, Any]] = []
    heads_before: dict[int, int] = {}  # heads of a layer's earlier calls (differential attention)

    def on_call(call: AttentionCall) -> None:
        if call.kind != "decoder":
            return
        first = heads_before.get(call.layer, 0)
        heads = call.query_BHQD.shape[1]
        heads_before[call.layer] = first + heads
        for circuit, targets in probe.targets.items():
            for name, numbers in measure_targets(call, list(normalizers.values()), probe.rows, targets).items():
                weight, share, n = (
                    values.double().mean((0, 2)).tolist() for values in (numbers.weight, numbers.heaviest, numbers.n)
                )
                gap = numbers.gap.transpose(0, 1).flatten(1).median(-1).values.tolist()
                pieces.extend(
                    {
                        "normalizer": name, "layer": call.layer, "head": first + head, "circuit": circuit,
                        "length": length, "n": n[head], "rows": targets.numel(), "weight": weight[head],
                        "gap": gap[head], "heaviest": share[head],
                    }
                    for head in range(heads)
                )  # fmt: skip

    ids = probe.input_ids.to(loaded.model.device)
    with observe(loaded.model, on_call, check=check):
        run(loaded, {"input_ids": ids})
    return pieces
