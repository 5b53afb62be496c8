"""Models of many families, random and tiny, made from their configurations: nothing is fetched."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

LENGTH = 12
WINDOW = 5  # shorter than LENGTH, so that sliding windows show
VOCABULARY = 99

LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
VIT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
OPT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "word_embed_proj_dim": 32, "pad_token_id": 1,
}  # fmt: skip
MLA = {
    "num_key_value_heads": 4, "head_dim": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 6, "first_k_dense_replace": 2, "n_routed_experts": 4, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 1,
}  # fmt: skip
CHOSEN = {"index_topk": 4, "index_n_heads": 8, "index_head_dim": 8}  # keys per query; heads enough to leave no ties
T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3,
    "num_heads": 4, "decoder_start_token_id": 0,
}  # fmt: skip
BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 32}
CAPPED = {"attn_logit_softcapping": 0.5}  # near the random logits, so that leaving it out shows
ALL_KINDS = ("encoder", "decoder", "cross")


def ids(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(5, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def text() -> dict[str, Tensor]:
    return {"input_ids": ids()}


def source_and_target() -> dict[str, Tensor]:
    return {"input_ids": ids(), "decoder_input_ids": ids()[:, :7]}


def image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))}


@dataclass(frozen=True)
class Family:
    model: str  # name of the class in transformers
    config: str
    options: dict[str, Any]
    inputs: Callable[[], dict[str, Tensor]] = text
    kernels: tuple[str, ...] = ("sdpa", "eager")
    kinds: tuple[str, ...] = ("decoder",)


FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "llama": Family("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "mistral": Family("MistralForCausalLM", "MistralConfig", LLAMA | {"sliding_window": WINDOW}),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", LLAMA),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        LLAMA | WINDOWED | CAPPED | {"query_pre_attn_scalar": 3},
        kernels=("eager",),
    ),
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", LLAMA | WINDOWED | {"query_pre_attn_scalar": 3}),
    "gpt_oss": Family("GptOssForCausalLM", "GptOssConfig", LLAMA | WINDOWED | EXPERTS, kernels=("eager",)),
    "cohere2": Family("Cohere2ForCausalLM", "Cohere2Config", LLAMA | WINDOWED),
    "granite": Family("GraniteForCausalLM", "GraniteConfig", LLAMA | {"attention_multiplier": 0.3}),
    "opt": Family("OPTForCausalLM", "OPTConfig", OPT),
    "gpt_neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", BERT),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", "DeepseekV3Config", LLAMA | MLA),
    "glm_moe_dsa": Family("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", LLAMA | MLA | CHOSEN),
    "bert": Family("BertForMaskedLM", "BertConfig", BERT, kinds=("encoder",)),
    "roberta": Family("RobertaForMaskedLM", "RobertaConfig", BERT | {"pad_token_id": 1}, kinds=("encoder",)),
    "modernbert": Family(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        BERT | {"local_attention": WINDOW - 1, "global_attn_every_n_layers": 2, "num_hidden_layers": 3},
        kinds=("encoder",),
    ),
    "albert": Family(
        "AlbertModel", "AlbertConfig", BERT | {"embedding_size": 16, "num_hidden_layers": 3}, kinds=("encoder",)
    ),
    "t5": Family("T5ForConditionalGeneration", "T5Config", T5, source_and_target, kinds=ALL_KINDS),
    "bart": Family("BartForConditionalGeneration", "BartConfig", BART, source_and_target, kinds=ALL_KINDS),
    "vit": Family("ViTModel", "ViTConfig", VIT, image, kinds=("encoder",)),
    "dinov3_vit": Family("DINOv3ViTModel", "DINOv3ViTConfig", VIT, image, kinds=("encoder",)),
    "siglip": Family("SiglipVisionModel", "SiglipVisionConfig", VIT, image, kinds=("encoder",)),
}

CASES = [(name, kernel) for name, family in FAMILIES.items() for kernel in family.kernels]


def tiny(name: str, kernel: str = "sdpa", **options: Any) -> PreTrainedModel:
    """A model of the family with weights large enough for attention that is far from uniform."""
    family = FAMILIES[name]
    torch.default_generator.manual_seed(0)  # without the stack trace that torch keeps for absent GPUs: 4 ms
    config = getattr(transformers, family.config)(**family.options | options)
    model = getattr(transformers, family.model)._from_config(config, attn_implementation=kernel).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
            elif "sinks" in parameter_name:
                parameter.copy_(torch.randn_like(parameter))
    return model


def tiny_inputs(name: str) -> dict[str, Tensor]:
    return FAMILIES[name].inputs()


WORDS = [f"w{number}" for number in range(VOCABULARY - 5)]


def tiny_tokenizer(*, begins: bool = False, ends: bool = False) -> PreTrainedTokenizerFast:
    """One token per word; with <s> in front and </s> at the end where asked for."""
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    template = " ".join([*["<s>"] * begins, "$A", *["</s>"] * ends])
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def words(count: int) -> str:
    return " ".join(WORDS[number % len(WORDS)] for number in range(count))
