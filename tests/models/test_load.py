"""load(): a model from a folder, from memory or from the package; plain words where there is none."""

import json
import os
import pickle
import shlex
import shutil
import socket
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PreTrainedModel, ViTConfig, modeling_utils

from attnorm.models import source
from attnorm.models.forward_pass import run
from attnorm.models.load import CannotLoad, _explain_error, _model_class, load
from attnorm.models.patch import patch
from attnorm.models.patch_state import patched_modules
from attnorm.models.source import commit_of, hub_answers
from tests.analysis.tiny_models import VOCABULARY, llama
from tests.models.families import ids, tiny, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "my-model"
    tiny("llama").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network")

    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "create_connection", refuse)


@pytest.mark.parametrize("as_text", [True, False])
def test_a_folder(folder: Path, as_text: bool) -> None:
    loaded = load(str(folder) if as_text else folder, device="cpu")
    assert loaded.name == "my-model"
    assert loaded.revision is None
    assert loaded.tokenizer is not None
    assert type(loaded.model).__name__ == "LlamaForCausalLM"
    assert not loaded.model.training
    with torch.no_grad():
        assert torch.equal(loaded.model(ids()).logits, tiny("llama")(ids()).logits)


@pytest.mark.parametrize("name", ["bert", "t5", "vit", "albert"])
def test_every_kind_of_model_is_read_with_all_its_weights(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    model.save_pretrained(tmp_path / name)
    loaded = load(tmp_path / name, device="cpu")
    assert type(loaded.model) is type(model)
    read = dict(loaded.model.named_parameters())
    assert all(torch.equal(read[key], parameter) for key, parameter in model.named_parameters())
    assert loaded.tokenizer is None
    assert loaded.tokenizer_problem


def test_a_half_precision_checkpoint_runs_in_float32_on_a_cpu(tmp_path: Path) -> None:
    tiny("llama").to(torch.float16).save_pretrained(tmp_path)
    assert load(tmp_path, device="cpu").model.dtype == torch.float32
    assert load(tmp_path, device="cpu", dtype="auto").model.dtype == torch.float16
    assert load(tmp_path, device="cpu", dtype="bfloat16").model.dtype == torch.bfloat16
    assert load(tmp_path, device="cpu", dtype=torch.float64).model.dtype == torch.float64
    with pytest.raises(CannotLoad, match="float23"):
        load(tmp_path, device="cpu", dtype="float23")


def test_only_devices_of_this_machine_are_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu, expected in ((None, "use 'cpu' or 'auto'"), (torch.device("mps"), "use 'cpu', 'mps' or 'auto'")):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available, gpu=gpu: gpu)
        with pytest.raises(CannotLoad, match=expected):
            load("bundled", device="cuda:99")


def test_a_device_without_a_meaning_is_not_answered_with_a_list_of_all_there_are() -> None:
    with pytest.raises(CannotLoad) as told:
        load("bundled", device="abacus")
    assert len(str(told.value)) < 200


def test_a_model_in_memory_is_taken_as_it_is() -> None:
    model = tiny("llama").train()
    loaded = load(model, tokenizer=tiny_tokenizer())
    assert loaded.model is model
    assert loaded.name == "LlamaForCausalLM"
    assert loaded.model.training
    run(loaded, {"input_ids": ids()})
    assert all(module.training for module in model.modules())
    with pytest.raises(ValueError, match="dtype and device"):
        load(model, dtype="float16", device="cpu")


def test_wrappers_are_taken_off() -> None:
    model = tiny("llama")

    class Compiled(torch.nn.Module):
        _orig_mod = model

    assert load(Compiled()).model is model

    class Adapted(torch.nn.Module):
        def get_base_model(self) -> PreTrainedModel:
            return model

    assert load(Adapted()).model is model
    with pytest.raises(ValueError, match="Linear"):
        load(torch.nn.Linear(2, 2))


def test_a_tokenizer_of_its_own(folder: Path, tmp_path: Path) -> None:
    tiny_tokenizer(begins=True).save_pretrained(tmp_path / "other")
    assert load(folder, tokenizer=tmp_path / "other", device="cpu").tokenizer("w1").input_ids == [1, 6]
    with pytest.raises(CannotLoad, match="tokenizer"):
        load(folder, tokenizer=tmp_path / "nowhere" / "else", device="cpu")


def test_the_bundled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(source, "files", lambda package: tmp_path)
    with pytest.raises(CannotLoad, match="no bundled model"):
        load("bundled")
    shutil.copytree(folder, tmp_path / "bundled")
    loaded = load("bundled", device="cpu")
    assert loaded.name == "bundled"
    assert loaded.tokenizer is not None


def test_the_bundled_model_learns_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers has no loss for classes of GPT-2's name, and would say so at the first step."""
    told: list[str] = []
    monkeypatch.setattr(modeling_utils.logger, "warning_once", told.append)
    model = load("bundled", device="cpu").model
    given = torch.arange(12)[None]
    loss = model(input_ids=given, labels=given).loss
    expected = torch.nn.functional.cross_entropy(model(input_ids=given).logits[0, :-1], given[0, 1:])
    torch.testing.assert_close(loss, expected)
    assert not told


def test_a_file_instead_of_its_folder(folder: Path) -> None:
    with pytest.raises(CannotLoad, match="got the file"):
        load(folder / "model.safetensors")


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(
        CannotLoad, match=r"without config\.json\. Give a folder .*, a hub name .*, or 'bundled'"
    ) as told:
        load(tmp_path)
    assert str(told.value).count(tmp_path.name) == 1


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CannotLoad, match=r"expected weights .*got none"):
        load(folder)


class Touch:
    """A pickle of this object creates a file when it is read without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def pickle_weights(folder: Path, weights: object) -> Path:
    """Replace the safetensors of a folder by a pickle."""
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def test_a_pickle_of_tensors_is_loaded_and_the_printed_command_converts_it(folder: Path, tmp_path: Path) -> None:
    pickle_weights(folder, load_file(folder / "model.safetensors"))
    with pytest.warns(UserWarning, match=r"weights_only=True\).*python -c ") as told:
        loaded = load(folder, device="cpu")
    with torch.no_grad():
        assert torch.equal(loaded.model(ids()).logits, tiny("llama")(ids()).logits)
    _, option, code = shlex.split(str(told[0].message).partition(" once: ")[2])
    assert option == "-c"
    with pytest.warns(UserWarning, match="python -c"):
        exec(code, {})
    with warnings.catch_warnings(action="error"):
        converted = load(folder, device="cpu").model
    assert all(map(torch.equal, loaded.model.parameters(), converted.parameters()))


def test_normalizers_in_a_pickle_are_restored(folder: Path) -> None:
    model = tiny("llama")
    patch(model, "ssmax")
    pickle_weights(folder, model.state_dict())
    with pytest.warns(UserWarning, match=r"pytorch_model\.bin"):
        loaded = load(folder, device="cpu")
    assert len(patched_modules(loaded.model)) == 2


def test_safetensors_have_priority_over_a_pickle(folder: Path) -> None:
    torch.save({"x": Touch(folder / "ran")}, folder / "pytorch_model.bin")
    with warnings.catch_warnings(action="error"):
        load(folder, device="cpu")
    assert not (folder / "ran").exists()


@pytest.mark.filterwarnings("ignore:.*pytorch_model.bin")
@pytest.mark.parametrize("archive", [True, False])
def test_code_in_a_pickle_is_not_run(folder: Path, archive: bool) -> None:
    file = pickle_weights(folder, {"model.embed_tokens.weight": Touch(folder / "ran")})
    if not archive:
        file.write_bytes(pickle.dumps({"a": Touch(folder / "ran")}, protocol=2))
    with pytest.raises(CannotLoad, match=r"expected tensors only.*author") as refused:
        load(folder)
    assert "weights_only" not in str(refused.value)  # torch suggests to turn it off
    assert not (folder / "ran").exists()


def test_a_repository_of_pickles_is_loaded_without_asking_the_hub_to_convert_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in the cache, as from_pretrained finds it without a network."""
    monkeypatch.setenv("DISABLE_SAFETENSORS_CONVERSION", "")  # so that it is restored after the test
    monkeypatch.delenv("DISABLE_SAFETENSORS_CONVERSION")
    pickle_weights(folder, load_file(folder / "model.safetensors"))
    commit = "0" * 40
    cache = folder.parent / "cache" / "models--someone--old-model"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(commit)
    shutil.copytree(folder, cache / "snapshots" / commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache.parent))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.warns(UserWarning, match=r"save_pretrained\(.*old-model"):
        assert type(load("someone/old-model", device="cpu").model).__name__ == "LlamaForCausalLM"
    assert os.environ["DISABLE_SAFETENSORS_CONVERSION"] == "1"


@pytest.mark.parametrize("count", range(1, 6))
def test_up_to_three_files_of_other_kinds_are_named(folder: Path, count: int) -> None:
    names = ["a.bin", "b.pt", "c.pth", "d.ckpt", "e.gguf"]
    (folder / "model.safetensors").unlink()
    for name in names[:count]:
        (folder / name).touch()
    with pytest.raises(CannotLoad) as refused:
        load(folder)
    assert [name in str(refused.value) for name in names] == [at < min(count, 3) for at in range(5)]


def test_files_of_a_trainer_are_not_taken_for_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    for name in ("training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "rng_state_0.pth"):
        torch.save(Touch(folder / "ran"), folder / name)
    with pytest.raises(CannotLoad, match=r"expected weights .*got none"):
        load(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("keep", [0, 5, 100, 5000])
def test_weights_that_are_cut_short(folder: Path, keep: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(CannotLoad, match="my-model"):
        load(folder)


def test_a_weight_that_is_missing_is_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CannotLoad, match=r"1 weights .*'model\.norm\.weight'"):
        load(folder)


def test_weights_of_another_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(CannotLoad, match=r"\b\d+ weights"):
        load(folder)
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    with pytest.raises(CannotLoad, match="my-model"):
        load(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model_type": "no-such-architecture"}'])
def test_a_config_that_makes_no_sense(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(CannotLoad, match="my-model"):
        load(folder)


def test_code_of_a_repository_is_not_run_unless_asked(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    mapped = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "evil", "auto_map": mapped}))
    marker = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(CannotLoad, match="trust_remote_code=True"):
        load(folder)
    assert not marker.exists()


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["attnorm-no-such-model", "nobody/attnorm-no-such-model"])
def test_without_a_network_a_hub_name_is_refused_at_once(name: str) -> None:
    with pytest.raises(CannotLoad, match=r"hub.*bundled"):
        load(name)


@pytest.mark.usefixtures("offline")
def test_a_name_that_is_nearly_right_is_answered_with_what_is_at_hand(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "models--someone--mistle-7b").mkdir(parents=True)
    for given, meant in {
        "bundeled": "'bundled'",
        "bundle-of": "'bundled'",  # three quarters of the letters agree, which is just enough
        "my-modle": "'my-model'",
        "./my-modle": "'my-model'",
        "someone/mistel-7b": "'someone/mistle-7b'",
    }.items():
        with pytest.raises(CannotLoad, match=rf"did you mean {meant}\?"):
            load(given)
    with pytest.raises(CannotLoad) as raised:
        load("zebra")
    assert "did you mean" not in str(raised.value)


def test_a_dtype_that_no_model_runs_in_is_refused_before_anything_is_read() -> None:
    for dtype in ("int8", "zebra", "Tensor", torch.int64):
        with pytest.raises(CannotLoad, match=r"dtype .*'float32', 'bfloat16', 'float16', 'float64' or 'auto'"):
            load("no-such-model", dtype=dtype)


def test_transformers_stays_as_talkative_as_it_was(folder: Path) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load(folder, device="cpu")
    with pytest.raises(CannotLoad):
        load(folder.parent)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (
            "a/name does not appear to have a file named model.safetensors",
            "neither model.safetensors nor pytorch_model.bin",
        ),
        ("a/name does not appear to have a file named config.json", "a file named config.json"),
        ("model.safetensors is cut off", "model.safetensors is cut off"),
        ("to execute it, set trust_remote_code=True", "--trust-remote-code"),
        ("trust_remote_code is deprecated", "trust_remote_code is deprecated"),
        ("a/name is not a local folder", "neither a folder here nor a model"),
    ],
)
def test_the_reason_says_what_the_error_is_about(says: str, reason: str) -> None:
    assert reason in _explain_error(OSError(says), "a/name", local_only=False)


gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp keeps the two halves of a rotary pair side by side."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def write_llama(path: Path) -> torch.nn.Module:
    model = llama()
    config, weights = model.config, model.state_dict()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    tensors = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for layer in range(config.num_hidden_layers):
        tensors |= {f"blk.{layer}.{theirs}": f"model.layers.{layer}.{ours}" for theirs, ours in NAMES.items()}
    for theirs, ours in tensors.items():
        weight = weights[f"{ours}.weight"]
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(theirs.split(".")[-1])
        weight = weight if heads is None else interleaved(weight, heads)
        writer.add_tensor(f"{theirs}.weight", np.ascontiguousarray(weight.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_the_model_in_the_file_is_the_model_that_was_written(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny.gguf")
    loaded = load(tmp_path / "tiny.gguf")
    assert loaded.name == "tiny"
    ids = torch.arange(1, 33)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_file_that_only_has_the_name_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "fake.gguf").write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(CannotLoad, match="GGUF"):
        load(tmp_path / "fake.gguf")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:100])
    with pytest.raises(CannotLoad, match="cut"):
        load(tmp_path / "cut.gguf")


def test_a_folder_with_a_gguf_file_names_the_file(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf")
    with pytest.raises(CannotLoad, match=r"tiny\.gguf"):
        load(tmp_path)


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnorm.models.source.NEEDED", ("gguf", "no_such_package"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(CannotLoad, match="pip install no_such_package"):
        load(tmp_path / "x.gguf")


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def proxies(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    return monkeypatch


@pytest.mark.parametrize("spelling", ["http://localhost:{}", "localhost:{}"])
def test_a_proxy_that_listens_is_trusted_and_one_that_does_not_is_no_network(
    proxies: pytest.MonkeyPatch, spelling: str
) -> None:
    with socket.create_server(("localhost", 0)) as server:
        proxies.setenv("https_proxy", spelling.format(server.getsockname()[1]))
        assert hub_answers()
    assert not hub_answers()


@pytest.mark.parametrize("proxy", ["http://localhost:notaport", "://", "http://"])
def test_a_proxy_that_makes_no_sense_is_no_network(proxies: pytest.MonkeyPatch, proxy: str) -> None:
    proxies.setenv("https_proxy", proxy)
    assert not hub_answers()


def test_the_commit_is_that_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert commit_of("someone/model", None) is None
    snapshot = tmp_path / "models--someone--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    assert commit_of("someone/model", None) == COMMIT
    assert commit_of("someone/model", COMMIT) == COMMIT
    assert commit_of("someone/model", "v2") is None


def test_the_class_of_a_file_that_names_none() -> None:
    assert _model_class(LlamaConfig(), False, as_gguf=True).__name__ == "AutoModelForCausalLM"
    assert _model_class(LlamaConfig(), False, as_gguf=False).__name__ == "AutoModel"
    assert _model_class(ViTConfig(), False, as_gguf=True).__name__ == "AutoModel"
