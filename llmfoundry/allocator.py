"""How PyTorch takes a GPU's memory: in segments that grow, unless the environment says otherwise.

Every script asks for it before PyTorch is imported, and `make gpu-check` for its items. Rows of
experts and of packed documents are of another length in each step; in segments of fixed sizes the
gaps between them add up, and a step that fits runs out of memory.
"""

from __future__ import annotations

from collections.abc import Mapping

NAME = "PYTORCH_ALLOC_CONF"
NAMES = (NAME, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # the older ones still count


def allocator_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to an environment: nothing where it has settings of the allocator."""
    is_set = any(name in environment for name in NAMES)
    return {} if is_set else {NAME: "expandable_segments:True"}
