"""Which engines take an exported folder: what the model card says of each architecture.

Measured with transformers 5.23, vLLM 0.32 and llama.cpp 0.5; `tests/hf/test_engines.py` asks
transformers again. An engine that answers wrongly without an error is named first.
"""

from __future__ import annotations

from llmfoundry.hf.architectures import ARCHITECTURES, OWN
from llmfoundry.hf.gguf.architectures import SHAPES
from llmfoundry.recipe.architecture.model import ModelConfig

BATCHING = "transformers' continuous batching (`generate_batch`, `transformers serve`)"
BATCHES_WRONGLY = {"MptForCausalLM"}
BATCHES = {
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Starcoder2ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "DbrxForCausalLM",
}
VLLM = {
    "MptForCausalLM": "vLLM: up to 0.28, the last release with MPT",
    "Starcoder2ForCausalLM": "vLLM, through its Transformers backend",
}


def engines(config: ModelConfig, architecture: str) -> list[str]:
    """A line for each engine.

    Args:
        config: filled.
        architecture: transformers' class, or `llmfoundry`.
    """
    is_own = architecture == OWN
    lines = ["transformers: `generate`" + (", after `import llmfoundry.hf`" if is_own else "")]
    if architecture in BATCHES_WRONGLY:
        lines.append(f"**not** {BATCHING}: wrong tokens without an error, as it leaves ALiBi out")
    elif architecture in BATCHES:
        lines.append(BATCHING)
    elif is_own and config.attn_config.alibi:
        lines.append(f"not {BATCHING}, which cannot attend with ALiBi and is refused")
    elif is_own:
        lines.append(f"{BATCHING}, or an error where it cannot attend as the model does")
    if architecture in ARCHITECTURES and architecture != "GPTNeoForCausalLM":
        lines.append(VLLM.get(architecture, "vLLM"))
    if architecture in SHAPES:
        lines.append("llama.cpp, and what is built on it: `scripts/convert.py to=gguf`")
    return [*lines, "`llmfoundry serve`"]
