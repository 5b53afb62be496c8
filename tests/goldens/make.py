"""Numbers of public functions on small fixed inputs: `TRITON_INTERPRET=1 python -m tests.goldens.make` writes them.

They must not change when code moves or is written anew. A change that is meant is a new file, with the reason in its
commit. Inputs and weights come from numpy, whose random numbers are the same everywhere, and are in float64.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import attnorm

FILE = Path(__file__).with_name("goldens.parquet")
Numbers = dict[tuple[str, str, str], float | str]  # by table, row and column

ROWS = [0, 1, 4, 20, 65]  # that are stored; the first sees no key, the second one
KEYS = ("text", "length", "normalizer", "kind", "layer", "head", "window", "block", "temperature", "top_n", "row",
        "rank", "n_low")  # fmt: skip
WORDS = ("verdict", "leaning", "deciding", "saturation")
MECHANISMS = {"differential": (4, 2), "tda": (4, 2), "differential_v2": (2, 2)}  # key and value heads, if not 4 and 4
ROW_NORMALIZERS = [name for name in attnorm.available() if isinstance(attnorm.get(name), attnorm.Normalizer)]
CALLED = [*ROW_NORMALIZERS, "entmax15 with a sink", "sigmoid with a sink"]


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.from_numpy(np.random.RandomState(seed).standard_normal(shape)).to(dtype)


def qkv(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Two query heads on one key head, more keys than queries, enough queries for every kernel."""
    return 2 * draw(0, 1, 2, 66, 8, dtype=dtype), draw(1, 1, 1, 70, 8, dtype=dtype), draw(2, 1, 1, 70, 8, dtype=dtype)


def options(dtype: torch.dtype) -> dict[str, Any]:
    return {"causal": True, "mask": torch.arange(70) >= 5, "hidden_states": draw(3, 1, 66, 12, dtype=dtype)}


def filled(module: Any, dtype: torch.dtype, spread: float, *, around: bool) -> Any:
    """Fill the parameters with random numbers, around their initial values or without these."""
    with torch.no_grad():
        for seed, (_, parameter) in enumerate(module.named_parameters()):
            start = parameter if around else torch.ones(()) * (parameter.dim() == 1 and float(parameter.mean()) == 1)
            parameter.copy_(start + spread * draw(seed, *parameter.shape))
    return module.to(dtype).eval()


def normalizer(name: str, dtype: torch.dtype = torch.float64, heads: int = 2) -> Any:
    name, _, sink = name.partition(" with ")
    try:
        found = attnorm.compose(name, sink=attnorm.get("sink")) if sink else attnorm.get(name, heads=heads)
    except (TypeError, ValueError):  # it has no parameter of each head
        found = attnorm.get(name)
    return filled(found, dtype, 0.1, around=True)


def statistics(dtype: torch.dtype = torch.float64, names: Sequence[str] = CALLED) -> Numbers:
    """Every statistic of a few rows of one head, for every normalizer of rows."""
    q, k, _ = qkv(dtype)
    found: Numbers = {}
    for name in names:
        every = attnorm.attention_statistics(q[:, :1], k, normalizer(name, dtype, 1), top_n=(1, 5), **options(dtype))
        for column, numbers in every._asdict().items():
            found |= dict(_stored("statistics", f"{name} {column}", numbers[0, :, ROWS].reshape(1, -1)))
    return found


def attention(engine: str = "blocked", dtype: torch.dtype = torch.float64, names: Sequence[str] = CALLED) -> Numbers:
    """Outputs of a few rows and gradients, for every normalizer of rows; the width is summed with weights."""
    found: Numbers = {}
    for name in names:
        tensors = [t.requires_grad_() for t in qkv(dtype)]
        output = attnorm.attention(*tensors, normalizer(name, dtype), engine=engine, **options(dtype))  # type: ignore[call-overload]
        found |= dict(_with_gradients(name, output, tensors))
    return found


def mechanisms() -> Numbers:
    found: Numbers = {}
    for name in sorted({*attnorm.available()} - {*ROW_NORMALIZERS}):
        key_heads, value_heads = MECHANISMS.get(name, (4, 4))
        sizes = (4, key_heads, value_heads)
        tensors = [draw(seed, 1, heads, 66, 8).requires_grad_() for seed, heads in enumerate(sizes)]
        chosen = filled(attnorm.get(name), torch.float64, 0.3, around=False)
        states = {"hidden_states": draw(3, 1, 66, 12)} if chosen.reads_hidden_states else {}
        output = attnorm.attention(*tensors, chosen, causal=name != "soft", **states)
        found |= dict(_with_gradients(name, output, tensors))
    return found


def measured(dtype: torch.dtype = torch.float64) -> Numbers:
    """Every metric of a row, for every normalizer of rows."""
    found = attnorm.measure(*qkv(dtype), causal=True, normalizers=("model", *ROW_NORMALIZERS), metrics="core")
    return tables("measured", found, ["heads"])


def report(name: str) -> Numbers:
    """The tables of an analysis: of a causal model with rotary positions, an encoder, all normalizers compared."""
    ids = torch.from_numpy(np.random.RandomState(9).randint(1, 64, 200))
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    if name == "encoder":
        model: PreTrainedModel = BertModel(BertConfig(**sizes, num_hidden_layers=2, max_position_embeddings=128))
    else:
        layers = 1 if name == "compared" else 2
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=layers, bos_token_id=0))
    given: dict[str, Any] = {
        "causal": {"lengths": (40, 90), "windows": 2, "normalizers": ("model", "entmax15"),
                   "metrics": ("all", "circuits"), "vector_rows": 8},
        "encoder": {"lengths": 80, "windows": 2, "metrics": "all"},
        "compared": {"lengths": 32, "windows": 1, "normalizers": ("model", *ROW_NORMALIZERS), "metrics": "all",
                     "vector_rows": 4, "temperatures": (2.0,)},
    }[name]  # fmt: skip
    found = attnorm.analyze(filled(model, torch.float64, 0.3, around=False), ids, **given)
    some = ["heads", "top_n", "sensitivity", "coverage"]
    return tables(name, found, some if name == "compared" else [*found.tables])


def tables(name: str, analysis: attnorm.Analysis, some: Sequence[str]) -> Numbers:
    found: Numbers = {}
    for table in some:
        for row in analysis.tables[table].to_pylist():
            place = " ".join(f"{key}={row[key]}" for key in KEYS if key in row)
            for column, value in row.items():
                if column in WORDS or (isinstance(value, int | float) and column not in KEYS):
                    found[f"{name} {table}", place, column] = value if isinstance(value, str) else float(value)
    return found


def _with_gradients(name: str, output: Tensor, tensors: list[Tensor]) -> Iterator[tuple[tuple[str, str, str], float]]:
    output.mul(torch.cos(torch.arange(output.numel())).reshape(output.shape).to(output)).sum().backward()
    for column, numbers in zip(("output", "dq", "dk", "dv"), (output, *(t.grad for t in tensors)), strict=True):
        assert numbers is not None
        width = torch.cos(torch.arange(8)).to(numbers)
        yield from _stored("attention", f"{name} {column}", (numbers.detach()[0] @ width)[:, ROWS])


def _stored(table: str, row: str, numbers: Tensor) -> Iterator[tuple[tuple[str, str, str], float]]:
    for head, values in enumerate(numbers.tolist()):
        yield from (((table, row, f"{head} {index}"), float(value)) for index, value in enumerate(values))


def applying(engine: str) -> list[str]:
    """Return the normalizers of rows that an engine of kernels computes."""
    found = []
    for name in CALLED:
        try:
            attnorm.attention(
                *qkv(torch.float32), normalizer(name, torch.float32), engine=engine, **options(torch.float32)
            )  # type: ignore[call-overload]
        except ValueError:
            continue
        found.append(name)
    return found


def main() -> None:
    numbers = {**statistics(), **attention(), **mechanisms(), **measured()}
    for name in ("causal", "encoder", "compared"):
        numbers |= report(name)
    numbers |= {("engines", name, engine): 1.0 for engine in ("triton", "sparse") for name in applying(engine)}
    if not any(table == "engines" for table, _, _ in numbers):
        raise SystemExit("expected kernels, got a machine without. Set TRITON_INTERPRET=1.")
    names = [pa.array(column).dictionary_encode() for column in zip(*numbers, strict=True)]
    values = [value if isinstance(value, float) else None for value in numbers.values()]
    words = [value if isinstance(value, str) else None for value in numbers.values()]
    columns = [*names, pa.array(values, pa.float32()), pa.array(words).dictionary_encode()]
    written = pa.table(columns, names=["table", "row", "column", "value", "word"])
    pq.write_table(written, FILE, compression="zstd", compression_level=19)


if __name__ == "__main__":
    main()
