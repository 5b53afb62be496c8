"""QK-clip: exact largest logits, exact factors in every layout of weights, and a run that would blow up without it."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import attnorm
from attnorm.metrics.call import AttentionCall
from attnorm.models.dispatch import UnsupportedModel
from attnorm.models.observe import observe
from attnorm.monitor.monitor import AttentionMonitor
from attnorm.monitor.qk_clip import QKClip, largest_logits
from tests.models.tiny import _GROUPED, _SIZES, llama, tiny, tokens
from tests.monitor.test_lightning import Logger, _trainer, stand_in  # noqa: F401
from tests.monitor.training import Reporter, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore::attnorm.monitor.alerts.AttentionAlert")


def _random(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:  # biases too, which start at 0
                nn.init.normal_(parameter, std=0.25)
    return model


_LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 2, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LAYOUTS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama: two matrices, groups": lambda: tiny("llama"),
    "gpt2: one transposed matrix with biases": lambda: _random(lambda: tiny("gpt2")),
    "phi3: one matrix in blocks, groups": lambda: _random(lambda: Phi3ForCausalLM(Phi3Config(**_GROUPED))),
    "gpt_neox: one matrix head by head": lambda: _random(lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**_SIZES))),
    "qwen2: biases and groups": lambda: _random(lambda: Qwen2ForCausalLM(Qwen2Config(**_GROUPED))),
    "deepseek: latent": lambda: _random(lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**_SIZES, **_LATENT))),
}


def calls_of(model: PreTrainedModel, ids: Tensor) -> list[AttentionCall]:
    found: list[AttentionCall] = []
    with torch.no_grad(), observe(model, found.append):
        model(input_ids=ids)
    return found


def by_definition(call: AttentionCall) -> Tensor:
    """(H,), from the whole matrix of logits."""
    keys = call.key_BGKD.repeat_interleave(call.query_BHQD.shape[1] // call.key_BGKD.shape[1], dim=1)
    logits = call.scale * call.query_BHQD.double() @ keys.double().transpose(-1, -2)
    queries, width = logits.shape[-2:]
    visible = torch.ones(queries, width, dtype=torch.bool).tril(width - queries)
    if call.mask is not None:
        visible = visible & call.mask
    return logits.masked_fill(~visible, -math.inf).amax((0, 2, 3))


def clip_once(model: PreTrainedModel, clip: QKClip, ids: Tensor) -> None:
    with clip.step(model):
        model(input_ids=ids)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_weights_scales_the_logits_of_its_heads_by_gamma(layout: str) -> None:
    model, ids = LAYOUTS[layout](), tokens(2, 12)
    before = calls_of(model, ids)[0]
    largest = by_definition(before)
    groups, heads = before.key_BGKD.shape[1], len(largest)
    if "latent" in layout:
        groups = heads
    tau = float(largest.sort().values[heads // 2]) * 0.9
    assert tau > 0
    clip = QKClip(tau=tau)
    clip_once(model, clip, ids)
    after = by_definition(calls_of(model, ids)[0])
    gamma = (tau / largest).clamp(max=1).reshape(groups, -1).amin(1, keepdim=True).expand(-1, heads // groups)
    torch.testing.assert_close(after, largest * gamma.flatten(), rtol=1e-4, atol=1e-4)
    first = [one for one in clip.clips if one.layer == "layer_00"]
    assert [one.head for one in first] == (gamma.flatten() < 1).nonzero()[:, 0].tolist()
    assert all(one.step == 1 for one in first)


def test_values_and_other_weights_stay_as_they_are() -> None:
    model = LAYOUTS["gpt2: one transposed matrix with biases"]()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    clip_once(model, QKClip(tau=0.01), tokens(2, 12))
    for name, parameter in model.named_parameters():
        if "c_attn" not in name:
            assert torch.equal(parameter, before[name]), name
        else:
            assert torch.equal(parameter[..., 64:], before[name][..., 64:]), name
            assert not torch.equal(parameter[..., :64], before[name][..., :64]), name


@pytest.mark.parametrize("padding", [False, True])
def test_largest_logits_are_those_of_all_visible_pairs(padding: bool) -> None:
    model, ids = llama(), tokens(3, 20)
    found: list[AttentionCall] = []
    mask = torch.ones_like(ids)
    if padding:
        mask[0, :7] = 0
    with torch.no_grad(), observe(model, found.append):
        model(input_ids=ids, attention_mask=mask)
    for call in found:
        torch.testing.assert_close(largest_logits(call, 1e-9).double(), by_definition(call), rtol=1e-5, atol=1e-6)
        assert (largest_logits(call, 1e9) == -math.inf).all()


def test_the_norm_of_a_key_head_counts_for_the_query_heads_that_read_it() -> None:
    """Heads 2 and 3 read key head 1: the logit of head 2 is 1,000, and no other is above 10."""
    query, key = torch.tensor([1.0, 1.0, 100.0, 1.0]), torch.tensor([1.0, 10.0])
    call = AttentionCall(
        0, "decoder", query.reshape(1, 4, 1, 1), key.reshape(1, 2, 1, 1), torch.ones(1, 2, 1, 1), 1.0, True
    )
    assert largest_logits(call, 200.0).tolist() == [1.0, 1.0, 1000.0, 10.0]
    assert (largest_logits(call, 1000.0) == -math.inf).all()


def test_nothing_happens_below_tau() -> None:
    model = llama()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    clip = QKClip(tau=1e4)
    clip_once(model, clip, tokens(2, 12))
    assert not clip.clips
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def trained(clip: QKClip | None) -> tuple[list[float], float]:
    """Forty steps of Adam, whose learning rate is too high: largest logit before each step, and the last loss."""
    model, ids, found, loss = llama(), tokens(8, 16), [], torch.tensor(math.nan)
    optimizer = torch.optim.Adam(model.train().parameters(), lr=0.1)
    for _ in range(40):
        found.append(max(float(by_definition(call).max()) for call in calls_of(model, ids)))
        optimizer.zero_grad()
        with nullcontext() if clip is None else clip.step(model):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
    return found, loss.item()


@pytest.mark.nightly  # 3 s; the other tests compare single steps
def test_a_run_whose_logits_would_blow_up_stays_near_tau_and_learns_better() -> None:
    clip = QKClip(tau=30.0)
    free, free_loss = trained(None)
    clipped, clipped_loss = trained(clip)
    assert max(free) > 200  # 362 here, and growing
    assert max(clipped) < 60  # 41 here: measured before a clip, after one step of Adam
    assert clipped_loss < 0.5 * free_loss  # 0.16 and 0.76
    assert len(clip.clips) > 100


def test_in_a_trainer_reporters_hear_what_was_clipped(tmp_path: Path) -> None:
    reporter, model = Reporter(), llama()
    trainer = trainer_of(model, tmp_path, reporter, gradient_accumulation_steps=2, max_steps=3, logging_steps=1)
    clip = attnorm.QKClip(tau=0.5).attach(trainer)
    trainer.train()
    logs = [entry for entry in reporter.heard if "attn/qk_clip/clipped_heads" in entry]
    assert [entry["step"] for entry in logs] == [1, 2, 3]
    assert sum(entry["attn/qk_clip/clipped_heads"] for entry in logs) == len(clip.clips) > 0
    assert min(entry["attn/qk_clip/gamma_min"] for entry in logs) == min(one.gamma for one in clip.clips)
    assert logs[0]["attn/qk_clip/largest_logit"] > 0.5


def test_the_monitor_logs_it_and_observes_the_same_forward(tmp_path: Path) -> None:
    reporter, model = Reporter(), llama()
    trainer = trainer_of(model, tmp_path, reporter)
    monitor = AttentionMonitor().attach(trainer)
    clip = QKClip(tau=0.5, monitor=monitor).attach(trainer)
    trainer.train()
    assert reporter.steps == [3, 6]
    (last,) = (entry for entry in reporter.heard if entry["step"] == 6 and "attn/layer_00/entropy_mean" in entry)
    assert last["attn/qk_clip/clipped_heads"] == sum(one.step > 3 for one in clip.clips)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_monitor_logs_the_clips_of_the_logged_step(tmp_path: Path, accumulated: int) -> None:
    """Also where it measures before the clip: a checkpoint of that step has no place for what is not logged yet."""
    reporter, monitor = Reporter(), AttentionMonitor()
    trainer = trainer_of(llama(), tmp_path, reporter, gradient_accumulation_steps=accumulated)
    clip = QKClip(tau=0.5, monitor=monitor).attach(trainer)
    monitor.attach(trainer)
    trainer.train()
    logged = [entry["attn/qk_clip/clipped_heads"] for entry in reporter.heard if "attn/layer_00/entropy_mean" in entry]
    assert logged == [sum(one.step <= 3 for one in clip.clips), sum(one.step > 3 for one in clip.clips)]
    assert logged[0] > 0
    assert monitor.numbers["attn/qk_clip/clipped_heads"] == logged[1]


def test_on_alert_it_waits_for_the_monitors_exploding_logits() -> None:
    model, ids = llama(), tokens(2, 32)
    monitor = AttentionMonitor(every=1)
    clip = QKClip(tau=0.5, monitor=monitor, on_alert=True)

    def step() -> None:
        with monitor.step(model), clip.step(model):
            model(input_ids=ids).logits.mean().backward()

    step()
    assert not clip.clips
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter *= 1e4
    step()  # alerts
    assert not clip.clips
    step()
    assert clip.clips
    largest = [float(by_definition(calls_of(model, ids)[0]).max())]
    assert largest[0] < 0.51


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("accumulated", [1, 2])
def test_in_lightning_weights_are_scaled_after_optimizer_steps(accumulated: int) -> None:
    module, logger = nn.ModuleDict({"inner": llama()}), Logger()
    trainer = _trainer(1, logger)
    clip = QKClip(tau=0.5)
    callback = clip.lightning()
    for batch in range(2 * accumulated):
        callback.on_train_batch_start(trainer, module, None, batch)
        module["inner"](input_ids=tokens(2, 32)).logits.mean().backward()
        trainer.global_step += (batch + 1) % accumulated == 0
        callback.on_train_batch_end(trainer, module, None, None, batch)
        trainer.fit_loop.epoch_loop._batches_that_stepped += (batch + 1) % accumulated == 0
        assert bool(clip.clips) == (batch + 1 >= accumulated)
    assert [*logger.heard] == [0, 1]
    assert logger.heard[0]["attn/qk_clip/clipped_heads"] > 0


def test_a_model_with_qk_norm_is_refused_since_no_projection_decides_its_logits() -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**_GROUPED))
    with pytest.raises(UnsupportedModel, match="Qwen3Attention"):
        clip_once(model, QKClip(tau=0.5), tokens(2, 12))
    clip_once(llama(), QKClip(tau=0.5), tokens(2, 12))  # nothing is left behind


def test_logits_that_are_not_finite_are_reported_and_not_clipped() -> None:
    model, clip = llama(), QKClip(tau=0.5)
    clip_once(model, clip, tokens(2, 12))
    clip.clips.clear()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight *= 4
        model.model.layers[1].self_attn.q_proj.weight.fill_(3e38)
    with pytest.warns(UserWarning, match="layer_01"):
        clip_once(model, clip, tokens(2, 12))
    assert {one.layer for one in clip.clips} == {"layer_00"}


def test_half_precision_weights_are_scaled_in_float32_and_rounded_once() -> None:
    model = llama().bfloat16()
    weight = model.model.layers[0].self_attn.k_proj.weight.detach().clone()
    clip = QKClip(tau=0.5)
    clip_once(model, clip, tokens(2, 12))
    (gamma,) = {one.gamma for one in clip.clips if one.layer == "layer_00" and one.head == 0}
    found = model.model.layers[0].self_attn.k_proj.weight
    assert found.dtype == torch.bfloat16
    assert torch.equal(found[:8], (weight[:8].float() * math.sqrt(gamma)).bfloat16())


def test_attach_takes_a_trainer_of_one_gpu_per_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"int.*clip\.step\(model\)"):
        QKClip().attach(3)
    trainer = trainer_of(llama(), tmp_path, Reporter())
    monkeypatch.setattr(type(trainer.args), "n_gpu", 2)
    with pytest.raises(ValueError, match="2 GPUs"):
        QKClip().attach(trainer)


def test_a_step_that_an_exception_ended_does_not_count_in_the_next_training() -> None:
    model, ids = llama(), tokens(2, 12)
    clip = QKClip(tau=0.01)

    def interrupted_step() -> None:
        with clip.step(model):
            model(input_ids=ids)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_step()
    with observe(model, lambda call: None):  # the model is released
        model(input_ids=ids)
    clip.on_train_begin(None, None, None)  # type: ignore[arg-type]
    clip.finish(1)
    assert not clip.clips
