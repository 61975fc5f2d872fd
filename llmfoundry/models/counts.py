"""Parameters and FLOPs of a decoder, from its settings alone.

Convention (PaLM, Chowdhery et al., 2022, appendix B; LLM Foundry's): a multiply-add is two FLOPs,
the backward pass costs twice the forward pass, attention is counted over the whole row (causality
not discounted), recomputation not counted. Embedding look-ups are no matrix products.
"""

from __future__ import annotations

import torch

from llmfoundry.models.decoder import Decoder
from llmfoundry.recipe.model import ModelConfig


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the model, a tied head counted once."""
    with torch.device("meta"):
        return sum(p.numel() for p in Decoder(config).parameters())


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """FLOPs of training on one token of a row of `seq_len`, forward and backward."""
    with torch.device("meta"):
        model = Decoder(config)
    looked_up = {"wte.weight", "wpe.weight"}
    matrices = sum(
        p.numel() for name, p in model.named_parameters() if p.ndim == 2 and name not in looked_up
    )
    if config.tie_word_embeddings:
        matrices += model.head_weight.numel()
    assert config.head_dim is not None
    attention = config.n_layers * 2 * config.n_heads * config.head_dim * seq_len
    return 3 * 2 * (matrices + attention)


PEAK_FLOPS = {  # dense bf16 FLOP/s by a part of torch.cuda.get_device_name(), longest match wins
    "B200": 2250e12,
    "H200": 989.5e12,
    "H100": 989.5e12,
    "H100 PCIe": 756e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "MI300X": 1307e12,
}


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 peak in FLOP/s; None where it is not known, as for every CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [key for key in PEAK_FLOPS if all(word in name for word in key.split())]
    return PEAK_FLOPS[max(known, key=len)] if known else None
