"""What this machine's processor can compute fast: what kernels and precisions are chosen by."""

from __future__ import annotations

import torch

# the processor's instructions, by a function that PyTorch does not promise, and a library for them
HAS_BF16 = (
    getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    and torch.backends.mkldnn.is_available()
)
"""Whether matrix products in bfloat16 are instructions of this CPU; emulated they are up to 100
times slower than in fp32."""
