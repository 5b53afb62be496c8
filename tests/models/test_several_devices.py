"""Models on several devices: layers apart are measured as usual; heads or keys apart are refused."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import attnorm
from attnorm.models.dispatch import UnsupportedModel
from tests.models.tiny import llama, tokens

TWO_PROCESSES = """
import sys, torch
from torch import distributed
from transformers import LlamaForCausalLM
import attnorm

folder, how = sys.argv[1:]
distributed.init_process_group("gloo")
ids = torch.arange(3, 35)
try:
    if how == "tensor":
        model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto")
        attnorm.analyze(model, ids, lengths=32, windows=1)
    else:
        from torch.distributed.tensor.experimental import context_parallel
        model = LlamaForCausalLM.from_pretrained(folder)
        mesh = distributed.init_device_mesh("cpu", (2,))
        with context_parallel(mesh, buffers=[torch.zeros(1, 32)], buffer_seq_dims=[1]):
            attnorm.analyze(model, ids, lengths=32, windows=1)
except ValueError as error:
    print(f"refused: {error}", flush=True)
distributed.destroy_process_group()
"""


def test_layers_on_another_device_give_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    llama(num_hidden_layers=2).save_pretrained(tmp_path / "model")
    ids = tokens(1, 32)[0]
    plain = attnorm.analyze(LlamaForCausalLM.from_pretrained(tmp_path / "model"), ids, lengths=32, windows=1)
    apart = LlamaForCausalLM.from_pretrained(
        tmp_path / "model",
        device_map={"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
                    "model.rotary_emb": "cpu", "lm_head": "cpu"},
        offload_folder=tmp_path / "offload",
    )  # fmt: skip
    assert next(apart.model.layers[1].parameters()).device.type == "meta"  # its weights come when it runs
    found = attnorm.analyze(apart, ids, lengths=32, windows=1)
    assert repr(found.heads.to_pylist()) == repr(plain.heads.to_pylist())  # NaN is no other NaN


def test_device_auto_gives_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    if torch.cuda.is_available():
        pytest.skip("compares with the CPU")
    options: dict[str, Any] = {"lengths": 32, "windows": 1, "rows": 4, "dtype": "float32"}
    heads = [attnorm.analyze("bundled", device=device, **options).heads for device in (None, "auto")]
    assert repr(heads[0].to_pylist()) == repr(heads[1].to_pylist())


@pytest.mark.nightly
@pytest.mark.parametrize(("how", "named"), [("tensor", "tp_plan"), ("context", "context_parallel")])
def test_two_processes_with_parts_of_a_model_are_refused(how: str, named: str, tmp_path: Path) -> None:
    llama(num_hidden_layers=2).save_pretrained(tmp_path / "model")
    (tmp_path / "two.py").write_text(TWO_PROCESSES)
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*call, str(tmp_path / "two.py"), str(tmp_path / "model"), how], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300,
    )  # fmt: skip
    assert done.stdout.count("refused") == 2, done.stdout + done.stderr
    assert named in done.stdout


def test_tensor_and_context_parallel_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = llama(), tokens(1, 16)[0]

    def replaced() -> None: ...

    replaced.__module__ = "torch.distributed.tensor.experimental._context_parallel._attention"
    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "scaled_dot_product_attention", replaced)
        with pytest.raises(UnsupportedModel, match="context_parallel"):
            attnorm.analyze(model, ids)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(model, "_tp_size", 2, raising=False)
    with pytest.raises(UnsupportedModel, match="tp_plan"):
        attnorm.patch(model, "ssmax")
