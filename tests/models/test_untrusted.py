"""Files from elsewhere: no kernel is fetched that a config names, and absurd sizes are rejected at once."""

import json
import socket
import struct
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CLIPConfig, CLIPModel

import attnorm
from attnorm.models.load import CannotLoad, load
from attnorm.models.patch import patch
from tests.models.families import ids, tiny
from tests.models.test_load import write_llama

EVIL = "someone/kernel"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that transformers asks for. The package `kernels` seems to be installed, and the network is cut."""
    from transformers.integrations import hub_kernels

    names: list[str] = []

    def get_kernel(name: str, **_: Any) -> types.ModuleType:
        names.append(name)
        kernel = types.ModuleType("kernel")
        for function in ("flash_attn_varlen_func", "flash_attn_func", "flash_attn_with_kvcache"):
            setattr(kernel, function, None)
        return kernel

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(hub_kernels, "get_kernel_hub", get_kernel, raising=False)
    for module in (
        hub_kernels,
        transformers.utils,
        transformers.utils.import_utils,
        transformers.modeling_utils,
        transformers.modeling_flash_attention_utils,
    ):
        monkeypatch.setattr(module, "is_kernels_available", lambda *_, **__: True, raising=False)
    return names


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "_experts_implementation"])
@pytest.mark.parametrize("value", [EVIL, "flash_attention_2", {"": EVIL}])
def test_a_kernel_in_a_config_is_ignored_with_a_warning(
    folder: Path, fetched: list[str], key: str, value: object
) -> None:
    change_config(folder, **{key: value})
    with pytest.warns(UserWarning, match=f"names the kernel '({EVIL}|flash_attention_2)'.*ignores it") as told:
        loaded = load(folder, device="cpu")
    assert len(told) == 1
    assert fetched == []
    with torch.no_grad():
        assert torch.equal(loaded.model(ids()).logits, tiny("llama")(ids()).logits)


def test_a_kernel_of_one_part_of_a_model_is_ignored(tmp_path: Path, fetched: list[str]) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 20}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config={**sizes, "image_size": 8, "patch_size": 4}))
    model.save_pretrained(tmp_path)
    change_config(tmp_path, attn_implementation={"text_config": EVIL})
    with pytest.warns(UserWarning, match=EVIL):
        load(tmp_path, device="cpu")
    assert fetched == []


def test_kernels_of_transformers_are_kept(folder: Path, recwarn: pytest.WarningsRecorder) -> None:
    change_config(folder, _attn_implementation="eager")
    assert load(folder, device="cpu").model.config._attn_implementation == "eager"
    assert not [one for one in recwarn if "kernel" in str(one.message)]


@pytest.mark.parametrize("auto", [True, False])
def test_a_patched_model_is_loaded_without_the_kernel_that_its_config_names(
    tmp_path: Path, fetched: list[str], auto: bool
) -> None:
    model = tiny("llama")
    patch(model, "ssmax")
    attnorm.save_pretrained(model, tmp_path)
    change_config(tmp_path, _attn_implementation=EVIL)
    with pytest.warns(UserWarning, match=EVIL):
        attnorm.from_pretrained(tmp_path, model_class=transformers.AutoModelForCausalLM if auto else None)
    assert fetched == []


def test_kernels_for_packed_weights_are_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.23 fetches them for some architectures, unless it is asked to unpack the weights."""
    quantizer = pytest.importorskip("transformers.quantizers.quantizer_gguf").GgufHfQuantizer
    unpacked: list[bool] = []
    monkeypatch.setattr(
        quantizer, "validate_environment", lambda self, *_, **__: unpacked.append(self.quantization_config.dequantize)
    )
    write_llama(tmp_path / "tiny.gguf")
    load(tmp_path / "tiny.gguf", device="cpu")
    assert unpacked == [True]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers of at most 1,000 for weights of 21 tensors, got 1000000000"),
        ({"text_config": {"n_layer": 10**9}}, "n_layer of at most"),
        ({"num_local_experts": 1e9}, "num_local_experts of at most"),
        ({"num_labels": 10**9}, "num_labels of at most"),
    ],
)
def test_more_modules_than_the_weights_can_fill_are_rejected_before_anything_is_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], message: str
) -> None:
    change_config(folder, **changed)
    monkeypatch.setattr("attnorm.models.load.AutoConfig", None)  # its classes already make one entry per layer
    with pytest.raises(CannotLoad, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_attention_heads": 0}, "config.json is missing or impossible"),
        ({"head_dim": 0}, "config.json is missing or impossible"),
        ({"hidden_size": None}, r"hidden_size.*int"),
        ({"hidden_size": 10**9}, "other shapes than config.json"),
        ({"vocab_size": 10**12}, "other shapes than config.json"),
        ({"num_key_value_heads": 3}, "other shapes than config.json"),
        ({"hidden_act": "no-such-function"}, "no-such-function.* config.json is missing or impossible"),
        ({"dtype": "no-such-dtype"}, "no-such-dtype.* config.json is missing or impossible"),
    ],
)
def test_values_of_a_config_that_no_model_can_have(folder: Path, changed: dict[str, Any], message: str) -> None:
    change_config(folder, **changed)
    with pytest.raises(CannotLoad, match=f"model: .*{message}"):
        load(folder)


def test_a_config_of_many_megabytes_is_not_parsed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnorm.models.load.AutoConfig", None)
    change_config(folder, comment="a" * (17 << 20))
    with pytest.raises(CannotLoad, match=r"at most 16,777,216 bytes, got 17,.*config"):
        load(folder)


def test_as_many_layers_as_tensors_are_accepted(tmp_path: Path) -> None:
    tiny("llama", num_hidden_layers=3).save_pretrained(tmp_path)
    load(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("at", "value"), [(8, 2**63 - 1), (8, 2**40), (16, 2**63 - 1), (16, 2**40), (24, 2**63 - 1), (24, 2**32)]
)
def test_a_gguf_header_that_claims_more_than_the_file_holds(tmp_path: Path, at: int, value: int) -> None:
    """The number of tensors, of entries, and the length of the first key."""
    file = tmp_path / "damaged.gguf"
    write_llama(file)
    content = bytearray(file.read_bytes())
    content[at : at + 8] = struct.pack("<Q", value)
    file.write_bytes(content)
    with pytest.raises(CannotLoad, match=r"header of .*damaged\.gguf is damaged or cut short.*Download"):
        load(file)


def test_a_gguf_file_that_lacks_its_last_tensor(tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    write_llama(file)
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(CannotLoad, match=r"expected [\d,]+ bytes, got [\d,]+"):
        load(file)


def test_a_gguf_file_with_more_layers_than_tensors(tmp_path: Path) -> None:
    file = tmp_path / "deep.gguf"
    write_llama(file)
    content = file.read_bytes()
    key = b"llama.block_count" + struct.pack("<I", 4)
    start = content.index(key) + len(key)
    file.write_bytes(content[:start] + struct.pack("<I", 2**31) + content[start + 4 :])
    with pytest.raises(CannotLoad, match=r"block_count of at most 1,000 .*got 2147483648"):
        load(file)
