"""What this machine's processor can compute fast: what kernels and precisions are chosen by."""

from __future__ import annotations

import torch

from llmfoundry.ops.torch_private import has_avx512_bf16

HAS_BF16 = has_avx512_bf16() and torch.backends.mkldnn.is_available()
"""Whether matrix products in bfloat16 are instructions of this CPU; emulated they are up to 100
times slower than in fp32."""
