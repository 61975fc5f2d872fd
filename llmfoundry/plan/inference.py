"""Memory estimate of a forward pass: evaluation and generation, in any parallel layout.

Entry point: `inference_memory`. `builders/evaluation.py` chooses with it how many sequences are
evaluated at a time; the plan of an evaluation and `--dry-run` print it. No activation is saved for
a backward pass. A rank needs its shard of the weights, the weights that FSDP has gathered at a
time, the activations of one block, some logits, and the keys and values of all blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmfoundry.models.decoder import Decoder
from llmfoundry.ops.loss import chunk_tokens
from llmfoundry.plan.memory import count_weight_bytes
from llmfoundry.recipe.model import ResolvedModelConfig
from llmfoundry.recipe.parallel import Degrees

FP32 = 4  # bytes of an attention score
GATHERED_BLOCKS = 3  # the block at work, the buffer of the next all-gather, and its copy
LOGIT_BYTES = 12  # of a logit: in fp32, its exponential, and a copy


@dataclass(frozen=True)
class InferenceMemory:
    """Bytes that one rank needs for forward passes.

    Attributes:
        weights: the rank's shard of the weights.
        gathered: weights of other ranks that FSDP gathers at a time; 0 without FSDP.
        cache: keys and values of one token, over all blocks.
        activations: activations of one token, in the widest layer.
        logits: logits of the tokens that the head processes at a time.
    """

    weights: int
    gathered: int
    cache: int
    activations: int
    logits: int

    @property
    def fixed(self) -> int:
        """Bytes of weights and logits, for any number of tokens."""
        return self.weights + self.gathered + self.logits

    def total(self, tokens: int) -> int:
        """Return the bytes for a forward pass over `tokens` tokens and their KV cache."""
        return self.fixed + tokens * (self.cache + self.activations)


def inference_memory(
    model: Decoder,
    config: ResolvedModelConfig,
    degrees: Degrees,
    *,
    precision: str,
    seq_len: int,
    device: torch.device,
) -> InferenceMemory:
    """Estimate the memory of each rank.

    Args:
        model: the model, on the meta device.
        config: its settings.
        degrees: sizes of the mesh's dimensions.
        precision: precision of the loaded weights.
        seq_len: longest sequence in tokens.
        device: device type of the ranks.
    """
    held, ffn = count_weight_bytes(model, device, degrees), config.ffn_config
    assert config.attn_config.kv_n_heads and ffn.ffn_hidden_size and config.vocab_size, "resolved"

    # weights that FSDP gathers: in 16 bits under autocast
    narrow = 2 if precision == "amp_bf16" else 1
    blocks = GATHERED_BLOCKS * (held.block + held.apart)
    gathered = 0 if degrees.is_replicas else (held.ends + blocks) // narrow

    # of a token: keys and values, and the activations of the widest layer
    heads, key_width, value_width = config.cache_row
    heads = heads if config.attn_config.is_latent else heads // degrees.tensor
    cached = config.n_layers * heads * (key_width + value_width)
    hidden = 4 * ffn.ffn_hidden_size * (ffn.moe_top_k or 1) // degrees.tensor
    # on a CPU, attention over a prefix tree materializes its scores
    scores = config.n_heads // degrees.tensor * seq_len if device.type == "cpu" else 0
    width = 4 if precision in ("fp32", "amp_bf16") else 2
    return InferenceMemory(
        weights=held.frozen + held.trained.shard,
        gathered=gathered,
        cache=(4 if precision == "fp32" else 2) * cached,
        activations=width * (8 * config.d_model + hidden) + FP32 * scores,
        logits=LOGIT_BYTES * config.vocab_size * chunk_tokens(config.vocab_size, device),
    )
