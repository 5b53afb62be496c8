"""Patched models leave Python: torch.export and ONNX give eager's numbers, at other lengths than the traced one too."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import attnorm
from attnorm.normalizers import threshold
from attnorm.normalizers.block import is_exporting
from attnorm.normalizers.contract import Normalizer

TRACED, LONGER = 9, 70


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def patched(normalizer: str, dtype: torch.dtype) -> Logits:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=50, initializer_range=0.5,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype).eval()
    attnorm.patch(model, normalizer, warm_start=False)
    return Logits(model)


def tokens(length: int) -> Tensor:
    return torch.randint(0, 50, (1, length), generator=torch.Generator().manual_seed(length))


def exported(model: nn.Module) -> torch.export.ExportedProgram:
    length = {1: torch.export.Dim("length", min=2, max=4096)}
    return torch.export.export(model, (tokens(TRACED),), dynamic_shapes=(length,))


@pytest.mark.slow
@torch.no_grad()
def test_an_exported_threshold_map_is_as_exact_as_eager_at_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threshold, "FIXED_STEPS", 12)  # enough for these rows; a graph of all 24 takes longer to trace
    model = patched("entmax15", torch.float64)
    program = exported(model).module()
    for length in (TRACED, LONGER):
        torch.testing.assert_close(program(tokens(length)), model(tokens(length)), rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_mechanism_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="gaussian"):
        exported(patched("gaussian", torch.float32))


@pytest.mark.nightly
@torch.no_grad()
def test_onnxruntime_computes_what_torch_computes(tmp_path) -> None:
    pytest.importorskip("onnxscript", reason="pip install attnorm[onnx]")
    runtime = pytest.importorskip("onnxruntime", reason="pip install attnorm[onnx]")
    model = patched("kneemax", torch.float32)
    exact = patched("kneemax", torch.float64)
    torch.onnx.export(exported(model), dynamo=True, verbose=False).save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for length in (TRACED, LONGER):
        given = {session.get_inputs()[0].name: tokens(length).numpy()}
        found = torch.from_numpy(session.run(None, given)[0])
        truth, eager = exact(tokens(length)), model(tokens(length))
        rounding = 8 * torch.finfo(torch.float32).eps * truth.abs().max()  # its sums have another order
        assert (found - truth).abs().max() <= 2 * (eager - truth).abs().max() + rounding


class Attention(nn.Module):
    def __init__(self, normalizers: Sequence[str]) -> None:
        super().__init__()
        self.normalizers = normalizers  # by name: made while it is traced

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [attnorm.attention(q, k, v, name, causal=True) for name in self.normalizers]


ROW_NORMALIZERS = [name for name in attnorm.available() if isinstance(attnorm.get(name), Normalizer)]
EVERY_COMMIT = ("adaptive_temperature", "norm_softmax")  # each went wrong once, in onnxruntime alone


@pytest.mark.parametrize(
    "names", [EVERY_COMMIT, *(pytest.param((name,), marks=pytest.mark.nightly) for name in ROW_NORMALIZERS)], ids=str
)
@torch.no_grad()
def test_every_row_normalizer_in_onnxruntime(names: Sequence[str], tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="pip install attnorm[onnx]")
    runtime = pytest.importorskip("onnxruntime", reason="pip install attnorm[onnx]")
    generator = torch.Generator().manual_seed(0)
    traced, longer = (torch.randn(3, 1, 2, length, 8, generator=generator).unbind() for length in (9, 40))
    module, varies = Attention(names), "topk" not in names  # torch cannot prove that k keys exist
    length = {2: torch.export.Dim("length", min=3, max=4096)}
    program = torch.export.export(module, traced, dynamic_shapes=(length,) * 3 if varies else None)
    torch.onnx.export(program, dynamo=True, verbose=False).save(tmp_path / "attention.onnx")
    session = runtime.InferenceSession(tmp_path / "attention.onnx", providers=["CPUExecutionProvider"])
    given = longer if varies else traced
    inputs = {one.name: tensor.numpy() for one, tensor in zip(session.get_inputs(), given, strict=True)}
    for found, expected in zip(session.run(None, inputs), module(*given), strict=True):
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-5)


class Exporting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if is_exporting() else x - 1


def test_a_compiled_graph_is_not_an_exported_one() -> None:
    x, module = torch.zeros(2), Exporting()
    assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(x), x - 1)
    for strict in (False, True):
        assert torch.equal(torch.export.export(module, (x,), strict=strict).module()(x), x + 1), f"{strict=}"
