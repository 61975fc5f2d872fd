"""Tensors of a Hugging Face folder as llama.cpp names and lays them out: a plan, then their bytes.

`write.py` calls `plan` and `pieces`. The names are the `gguf` package's. Nothing is read before its
bytes are written, and of a mixture one expert at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from llmfoundry.errors import UserError, import_optional
from llmfoundry.hf.architectures import is_mixture
from llmfoundry.hf.gguf.architectures import SHAPES, computed_tensors
from llmfoundry.hf.tensor_names import MAPS, swap_pairs
from llmfoundry.models.lazy_tensors import LazyTensor
from llmfoundry.recipe.model import ResolvedModelConfig

Make = Callable[[], Tensor]
PIECE = 1 << 24  # numbers that are converted at a time: 64 MB in fp32
TYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
IN_FULL = re.compile(r"position_embd\.weight|rope_freqs\.weight|.*\.ffn_gate_inp\.weight")
LARGEST_SCALE = 65504.0  # of fp16, in which Q8_0 keeps its scales

_ROTATED = re.compile(r"\.attn_[qk]\.(weight|bias)$")
_EXPERT = re.compile(
    r".*\.(?P<block>\d+)\.(?:mlp|block_sparse_moe|ffn)\.experts\.(?:mlp\.)?"
    r"(?:(?P<expert>\d+)\.)?(?P<kind>w1|v1|w2|w3|gate_proj|up_proj|down_proj)(?:\.weight)?"
)
_ROLES = {
    **dict.fromkeys(("w1", "gate_proj"), "FFN_GATE_EXP"),
    **dict.fromkeys(("v1", "w3", "up_proj"), "FFN_UP_EXP"),
    **dict.fromkeys(("w2", "down_proj"), "FFN_DOWN_EXP"),
}


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of the file.

    Attributes:
        shape: as torch has it; the file lists it the other way round.
        reads: of its parts, which follow each other.
    """

    name: str
    shape: tuple[int, ...]
    reads: tuple[Make, ...]


def plan(
    sources: Iterable[LazyTensor], config: ResolvedModelConfig, architecture: str
) -> list[GGUFTensor]:
    """The file's tensors, in its order.

    Args:
        sources: of all tensors of the folder; none is read.
        config: filled.
        architecture: a key of `SHAPES`.

    Raises:
        UserError: one has no place in llama.cpp.
    """
    gguf = import_optional("gguf", "to: gguf", extra="gguf")
    shape = SHAPES[architecture]
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == shape.name)
    names = gguf.get_tensor_name_map(kind, config.n_layers)
    transposed = _transposed(architecture, config)
    planned, experts = [], dict[str, list[LazyTensor]]()
    for source in sources:
        if is_mixture(config) and (match := _EXPERT.fullmatch(source.name)):
            tensor = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR[_ROLES[match["kind"]]]]
            place = experts.setdefault(f"{tensor.format(bid=match['block'])}.weight", [])
            place.append(source)  # in the order of their numbers, as folders have them
            continue
        theirs = names.get_name(source.name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise UserError(f"{source.name}: has no place in llama.cpp's {shape.name}")
        shape_there, read = source.shape, source.read
        if source.name in transposed:
            shape_there, read = shape_there[::-1], _then(read, torch.t)
        if shape.is_interleaved and _ROTATED.search(theirs):
            half = (config.head_dim or 0) // 2
            read = _then(read, partial(swap_pairs, outer=2, inner=half))
        planned.append(GGUFTensor(theirs, tuple(shape_there), (read,)))
    planned += [_stacked(name, found, config) for name, found in experts.items()]
    for name, tensor in computed_tensors(config).items():
        planned.append(GGUFTensor(name, tuple(tensor.shape), (partial(torch.clone, tensor),)))
    return planned


def _transposed(architecture: str, config: ResolvedModelConfig) -> set[str]:
    """Their weights that are (in, out)."""
    return {
        name.format(i=block)
        for rule in MAPS[architecture].rules
        if rule.transposed
        for name in rule.theirs
        for block in range(config.n_layers)
    }


def _then(read: Make, change: Callable[[Tensor], Tensor]) -> Make:
    return lambda: change(read())


def _stacked(name: str, sources: list[LazyTensor], config: ResolvedModelConfig) -> GGUFTensor:
    """Experts (E, f, D), or (E, D, f) of what is multiplied last."""
    count, hidden, width = config.ffn_config.moe_num_experts, _hidden(config), config.d_model
    is_last = ".ffn_down_exps." in name
    shape = (count or 1, width, hidden) if is_last else (count or 1, hidden, width)
    reads = [source.read for source in sources]
    if len(sources) == 1 and count != 1:  # one matrix, as DBRX has them: (E * f, D)

        def stack(rows: Tensor) -> Tensor:
            each = rows.unflatten(0, (-1, hidden))
            return each.transpose(1, 2) if is_last else each

        reads = [_then(reads[0], stack)]
    return GGUFTensor(name, shape, tuple(reads))


def _hidden(config: ResolvedModelConfig) -> int:
    return config.ffn_config.ffn_hidden_size


def tensor_type(tensor: GGUFTensor, dtype: str) -> str:
    """The number format of a tensor, by the name of `gguf.GGMLQuantizationType`.

    As llama.cpp's own converter has it: vectors, routers and positions in F32, and F16 where rows
    are no whole blocks.
    """
    kind = TYPES[dtype]
    if len(tensor.shape) < 2 or IN_FULL.fullmatch(tensor.name):
        return "F32"
    return "F16" if kind == "Q8_0" and tensor.shape[-1] % 32 else kind


def pieces(tensor: GGUFTensor, kind: str) -> Iterator[np.ndarray]:
    """Its bytes, some rows at a time.

    Raises:
        UserError: it has values that the format cannot hold.
    """
    import gguf

    to = gguf.GGMLQuantizationType[kind]
    for read in tensor.reads:
        part = read()
        rows = max(1, PIECE // max(1, part[0].numel()))
        for piece in part.split(rows):
            numbers = piece.detach().to("cpu", torch.float32).contiguous().numpy()
            _check_range(tensor.name, numbers, kind)
            yield gguf.quantize(numbers, to)


def _check_range(name: str, numbers: np.ndarray, kind: str) -> None:
    largest = np.abs(numbers).max(initial=0.0)
    if not np.isfinite(largest):
        raise UserError(f"{name}: has values that are not finite; choose an earlier checkpoint")
    if largest > {"F16": LARGEST_SCALE, "Q8_0": 127 * LARGEST_SCALE}.get(kind, np.inf):
        raise UserError(
            f"{name}: has values that {kind} cannot hold; write dtype=bf16 or dtype=fp32"
        )
