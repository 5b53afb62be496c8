"""Output gates: measured in models that have them, absent in others, and a sink behind a closed gate is none."""

import importlib
import math
from typing import Any

import pyarrow as pa
import pytest
import torch
import transformers
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, PreTrainedModel, Qwen3NextConfig, Qwen3NextForCausalLM

import attnorm
from attnorm.analysis.verdicts.judge import judge_all
from attnorm.metrics.call import AttentionCall
from attnorm.models.observe import observe
from attnorm.models.output_gates import _gates, output_gates
from tests.analysis.synthetic import synthetic_tables
from tests.metrics.calls import HEADS, make_call, window
from tests.models.tiny import _GROUPED, tiny, tokens


def gated(logit: float = 0.0) -> PreTrainedModel:
    """Two full-attention layers; the logits of all gates are moved by `logit`."""
    torch.manual_seed(0)
    experts = {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    config = Qwen3NextConfig(**_GROUPED, **experts, layer_types=["full_attention"] * 2, attention_bias=True)
    model = Qwen3NextForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.q_proj.bias.view(config.num_attention_heads, 2, config.head_dim)
            bias[:, 1] += logit  # each head: queries, then gates
    return model


def found(model: PreTrainedModel, length: int = 24) -> Any:
    with torch.no_grad(), output_gates(model) as gates:
        model(input_ids=tokens(2, length))
    return gates.layers


def test_models_without_gates_have_none() -> None:
    for family in ("llama", "gpt2", "gpt_oss", "gemma2"):
        assert not found(tiny(family)), family
    torch.manual_seed(0)
    assert not found(DiffLlamaForCausalLM(DiffLlamaConfig(**_GROUPED)).eval())  # a difference and a norm, no gate


@pytest.mark.parametrize("logit", [-4.0, 0.0, 4.0])
def test_the_gate_of_a_head_is_the_share_of_its_output_that_passes(logit: float) -> None:
    layers = found(gated(logit))
    assert [*layers] == [("decoder", 0), ("decoder", 1)]
    for gates in layers.values():
        assert gates.gate.shape == (4,)
        torch.testing.assert_close(gates.gate, torch.full((4,), 1 / (1 + math.exp(-logit))), rtol=0.1, atol=0.0)


EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
FULL = {"layer_types": ["full_attention"] * 2}
DENSE = {"mlp_layer_types": ["dense"] * 2}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Afmoe": {**EXPERTS, "num_dense_layers": 1},
    "Qwen3_5": FULL,
    "Qwen3_5Moe": {**FULL, **EXPERTS, "shared_expert_intermediate_size": 16},
    "Laguna": {},
    "HYV4": {},
    "BailingHybrid": {
        **FULL, **DENSE, **LATENT, "moe_intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 1,
        "n_group": 1, "topk_group": 1, "num_mtp_layers": 0, "first_k_dense_replace": 2,
    },
    "Beam": {**DENSE, **EXPERTS, "n_group": 1, "topk_group": 1},
    "HrmText": {"H_cycles": 1, "L_cycles": 1, "num_hidden_layers": 2},
    "MuseSpark": {
        **DENSE, "moe_intermediate_size": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_hidden_size": 16,
    },
    "MuseGlimmer": {},
    "Qwen4Exp": {
        **FULL, **EXPERTS, "shared_expert_intermediate_size": 16, "hc_lowrank": 8, "indexer_n_heads": 2,
        "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 64, "indexer_compress_ratio": 1,
    },
    "Step3p7": {
        **FULL, **DENSE, "sliding_window": 8, "n_routed_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1,
        "moe_intermediate_size": 16, "share_expert_dim": 16,
    },
    "AXK2": {
        **DENSE, **LATENT, "head_dim": 4, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4,
        "num_experts_per_tok": 1, "index_topk": 64, "index_head_dim": 8, "index_n_heads": 2, "gated_norm_rank": 4,
    },
    "NeoMME": {"embedding_rank": 8, "head_dim": 16},
}  # fmt: skip


def family_model(family: str) -> PreTrainedModel:
    """The text model of a family with random weights; skips the test where transformers does not have it."""
    config = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config", None)
    if config is None:
        pytest.skip(f"this version of transformers has no {family}")
    code = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    names = (f"{family}{kind}" for kind in ("ForCausalLM", "TextModel", "ForMaskedLM"))
    model = next(getattr(code, name) for name in names if hasattr(code, name))
    torch.manual_seed(0)
    return model(config(**{**_GROUPED, **FAMILIES[family]})).eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.every_second("family")
def test_gates_of_other_families_are_found(family: str) -> None:
    layers = found(family_model(family))
    assert [layer for _, layer in layers] == [*range(4 if family == "HrmText" else 2)]  # its stacks run in turn
    for gates in layers.values():
        assert bool(((gates.gate > 0.4) & (gates.gate < 0.8)).all())  # random weights: sigmoid or softplus near 0


@pytest.mark.parametrize(("family", "part"), [("MuseSpark", "o_norm"), ("NeoMME", "exclusive_self_attention")])
def test_a_gate_behind_another_change_of_the_output_is_measured_from_there(family: str, part: str) -> None:
    """The norm of MuseSpark enlarges the output, and NeoMME subtracts the direction of the own value."""
    model, changed, gated_inputs = family_model(family), [], []
    attention = [module for module in model.modules() if hasattr(module, part)]
    for module in attention:
        if family == "NeoMME":
            torch.nn.init.constant_(getattr(module, part).alpha, 1.0)
        getattr(module, part).register_forward_hook(lambda _, args, result: changed.append(result))
        projection = module.o_proj if hasattr(module, "o_proj") else module.output_projection.o_proj
        projection.register_forward_pre_hook(lambda _, args: gated_inputs.append(args[0]))
    layers = found(model)
    assert len(layers) == len(attention) == 2
    for gates, before, after in zip(layers.values(), changed, gated_inputs, strict=True):
        size = [x.reshape(before.shape)[0, 12:].norm(dim=-1) for x in (after, before)]
        torch.testing.assert_close(gates.gate, (size[0] / size[1]).mean(0), rtol=1e-4, atol=1e-5)


def test_a_gate_by_softplus_may_be_above_one() -> None:
    model = family_model("Laguna")
    for module in model.modules():
        if hasattr(module, "g_proj"):
            module.g_proj.register_forward_hook(lambda _, args, result: torch.full_like(result, 2.0))
    for gates in found(model).values():
        torch.testing.assert_close(gates.gate, torch.full((4,), math.log(1 + math.e**2)), rtol=1e-4, atol=0.0)


def test_gated_sink_mass_is_the_mean_of_mass_times_gate_by_definition() -> None:
    model, calls = gated(1.0), []
    with torch.no_grad():
        for layer in model.model.layers:  # gates and rows that differ from token to token
            torch.nn.init.normal_(layer.self_attn.q_proj.weight, std=0.5)
    layers = found(model)
    with torch.no_grad(), observe(model, calls.append, inputs=True):
        model(input_ids=tokens(2, 24))
    for number, call in enumerate(calls):
        assert isinstance(call, AttentionCall)
        attention = model.model.layers[number].self_attn
        gate = attention.q_proj(call.inputs_BKC[0]).view(24, 4, 16)[..., 8:].sigmoid().transpose(0, 1)
        output, weights = attnorm.attention(
            call.query_BHQD, call.key_BGKD, call.value_BGKE, causal=True, scale=call.scale, return_weights=True
        )
        share = ((output[0] * gate).norm(dim=-1) / output[0].norm(dim=-1))[:, 12:]
        expected = (share * weights[0, :, 12:, 0]).mean(-1)
        torch.testing.assert_close(layers["decoder", number].gated_sink_mass, expected, rtol=1e-4, atol=1e-5)


def test_analyze_reports_gates_and_leaves_them_out_of_what_ifs() -> None:
    ids = tokens(1, 24)
    analysis = attnorm.analyze(gated(-3.0), ids, metrics="core", normalizers=["model", "ssmax"])
    heads = analysis.heads.to_pylist()
    own, other = ([head for head in heads if head["normalizer"] == name] for name in ("model", "ssmax"))
    assert own
    assert all(0.02 <= head["output_gate"] <= 0.1 and head["gated_sink_mass"] < 0.1 for head in own)
    assert all(head["output_gate"] is None or math.isnan(head["output_gate"]) for head in other)


def test_a_sink_behind_a_closed_gate_is_none() -> None:
    tables = synthetic_tables(cast=[["parked"]], lengths=(512,), normalizers=("model",))
    column = tables["heads"].column_names.index("gated_sink_mass")
    for gated_mass, expected in ((math.nan, "sink-dominated"), (0.9, "sink-dominated"), (0.02, "dispersed-forced")):
        heads = tables["heads"].set_column(column, "gated_sink_mass", pa.array([gated_mass]))
        judged, _ = judge_all(heads, tables["by_length"], tables["top_n"])
        assert judged["verdict"].to_pylist() == [expected]


@pytest.mark.parametrize("copies", [1, 2])
def test_the_sink_of_a_gated_head_is_that_of_its_visible_keys(copies: int) -> None:
    """copies: one mask and one bias for the batch, or one for each of its items."""
    rows = 24
    bias = torch.randn(1, HEADS, rows, rows, generator=torch.Generator().manual_seed(1))
    visible = window(rows, 5)
    mask = visible.expand(copies, -1, -1, -1)
    call = make_call(rows, mask=mask, bias=bias.expand(copies, -1, -1, -1), causal=False)
    output = torch.randn(2, rows, HEADS, 8, generator=torch.Generator().manual_seed(2))
    gates = _gates(call, output, 0.5 * output)
    keys = call.key_BGKD.repeat_interleave(2, 1)
    logits = call.scale * call.query_BHQD @ keys.mT + bias
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)[0]
    first = visible[0, 0].int().argmax(-1)  # of the window
    sinks = weights.gather(-1, first.expand(HEADS, -1)[..., None])[..., 0]
    assert gates is not None
    torch.testing.assert_close(gates.gated_sink_mass, 0.5 * sinks[:, rows // 2 :].mean(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_what_counts_as_a_gate_does_not_depend_on_the_size_of_the_output(size: float) -> None:
    """Differences of 1e-4 of the largest output are none; a gate makes nothing larger than by 1 % and turns no sign."""
    call = make_call(6, batch=1)
    output = torch.full((1, 6, HEADS, 8), 0.5 * size)
    output[..., 0] = size

    def gate_of(change: Any) -> Any:
        after = output.clone()
        change(after)
        return _gates(call, output, after.flatten(2))

    def moved(index: int, to: float) -> Any:
        return lambda after: after[0, 5, 1, index].fill_(to * size)

    assert gate_of(lambda after: None) is None
    assert gate_of(moved(0, 1 - 0.98e-4)) is None
    assert gate_of(moved(0, 1 - 1.02e-4)) is not None
    assert gate_of(moved(1, 0.5 * 1.01 + 0.9e-4)) is not None
    assert gate_of(moved(1, 0.5 * 1.01 + 1.1e-4)) is None  # grown
    assert gate_of(moved(1, -0.9e-4)) is not None
    assert gate_of(moved(1, -1.1e-4)) is None  # turned
    halved = gate_of(lambda after: after.mul_(0.5))
    assert halved.gate.tolist() == pytest.approx([0.5] * HEADS)
