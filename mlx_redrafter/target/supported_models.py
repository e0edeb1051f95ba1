"""The modules of mlx-lm whose models verify trees or chains, or are refused.

A module in none of the lists verifies chains, if it uses mlx-lm's own cache types.
tests/target/test_conformance.py covers each module.
"""

from __future__ import annotations


def _names(lines: str) -> tuple[str, ...]:
    return tuple(lines.split())


TREES = _names("""
    Klear afm7 afmoe apertus bailing_hybrid bailing_moe bailing_moe_linear bailing_moe_v3 cohere
    cohere2 dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5 ernie4_5_moe exaone
    exaone4 exaone_moe falcon_h1 gear gemma gemma2 gemma3 gemma3_text gemma3n gemma4 gemma4_text glm
    glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt_neox gpt_oss gptj granite granitemoe
    granitemoehybrid helium hunyuan hunyuan_v1_dense iquestloopcoder kimi_k25 kimi_k3 kimi_linear
    kimi_vl laguna lfm2 lfm2-vl lfm2_moe lille-130m llama llama4 llama4_text longcat_flash mamba2
    mellum mimo mimo_v2_flash minicpm minicpm3 minimax ministral3 mistral3 mistral4 mixtral
    muse_glimmer nanbeige nanochat nemotron nemotron-nas nemotron_h olmo2 olmo3 olmo_hybrid olmoe
    openelm phi phi3 phimoe phixtral pixtral plamo plamo2 plamo3 prism_hadamard_qwen35 qwen qwen2
    qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe
    recurrent_gemma seed_oss smollm3 spark2_5 stablelm starcoder2 step3p5 talkie telechat3 youtu_llm
""")
"""Modules that verify trees: several continuations at once."""

LENGTH_BOUND = "its rope depends on the length of the text"

CHAINS = {
    "gpt2": "its learned positions count up from the first one",
    "gpt_bigcode": "its learned positions count up from the first one",
    "internlm2": LENGTH_BOUND,
    "internlm3": LENGTH_BOUND,
    "minimax_m3_vl": "it divides cache rows into blocks, which would mix sibling nodes",
}
"""Modules with a trimmable cache that verify chains only, and why."""

REPLAYED = _names("""
    baichuan_m1 deepseek_v41 jamba longcat_flash_ngram mamba rwkv7
""")
"""Modules with states that cannot be rolled back.

They verify chains, and replay accepted tokens after a rejection.
"""

REFUSED = {
    "olmo": "it cannot read several tokens at once: it adds the name of the mask to the scores",
    "phi3small": "its block-sparse layers let a token see those after it in the same forward",
}
"""Modules whose rounds would differ from plain decoding, and why."""

NO_RINGS = ("afm7",)
"""Modules with a `KVCache` that cannot be replaced by a ring: their last layers read another
layer's rows in order.
"""
