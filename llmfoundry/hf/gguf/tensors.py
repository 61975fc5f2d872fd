"""Names, layout and quantized bytes of a model's tensors in GGUF.

`write.py` calls `plan` and `pieces`. The `gguf` package maps the names. A tensor is read only when
its bytes are written, and experts are read one at a time.
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
from llmfoundry.hf.architecture import is_mixture
from llmfoundry.hf.gguf.architectures import SHAPES, computed_tensors
from llmfoundry.hf.tensor_names import MAPS, swap_pairs
from llmfoundry.models.lazy_tensors import LazyTensor
from llmfoundry.recipe.model import ResolvedModelConfig

Make = Callable[[], Tensor]
PIECE = 1 << 24  # elements that are converted at a time: 64 MB in fp32
TYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
IN_FULL = re.compile(r"position_embd\.weight|rope_freqs\.weight|.*\.ffn_gate_inp\.weight")
LARGEST_SCALE = 65504.0  # maximum of fp16, which is the format of Q8_0's scales

_ROTATED = re.compile(r"\.attn_[qk]\.(weight|bias)$")
_EXPERT = re.compile(
    r".*\.(?P<block>\d+)\.(?:mlp|block_sparse_moe|ffn)\.experts\.(?:mlp\.)?"
    r"(?:(?P<expert>\d+)\.)?(?P<kind>w1|v1|w2|w3|gate_proj|up_proj|down_proj)(?:\.weight)?"
)
_GPT_OSS = re.compile(
    r"model\.layers\.(?P<block>\d+)\.mlp\.experts\.(?P<name>gate_up_proj|down_proj)(?P<bias>_bias)?"
)
_KV_B = re.compile(r"model\.layers\.(?P<block>\d+)\.self_attn\.kv_b_proj\.weight")
_RENAMED = re.compile(r"\.e_score_correction_bias$")
_ROLES = {
    **dict.fromkeys(("w1", "gate_proj"), "FFN_GATE_EXP"),
    **dict.fromkeys(("v1", "w3", "up_proj"), "FFN_UP_EXP"),
    **dict.fromkeys(("w2", "down_proj"), "FFN_DOWN_EXP"),
}


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of the file.

    Attributes:
        name: llama.cpp's name.
        shape: shape in torch's order; the file stores it reversed.
        reads: functions that return its consecutive parts.
    """

    name: str
    shape: tuple[int, ...]
    reads: tuple[Make, ...]


def plan(
    sources: Iterable[LazyTensor], config: ResolvedModelConfig, architecture: str
) -> list[GGUFTensor]:
    """Return the tensors of the file in order.

    Args:
        sources: all tensors of the HF model, not yet read.
        config: resolved model configuration.
        architecture: class name, a key of `SHAPES`.

    Raises:
        UserError: a tensor has no counterpart in llama.cpp.
    """
    gguf = import_optional("gguf", "to: gguf", extra="gguf")
    shape = SHAPES[architecture]
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == shape.name)
    names = gguf.get_tensor_name_map(kind, config.n_layers)
    transposed = _transposed(architecture, config)
    planned, experts = [], dict[str, list[LazyTensor]]()
    for source in sources:
        # joint projections, which llama.cpp has apart
        parts = [*_latent_heads(source, config)]
        parts += _interleaved(source) if architecture == "GptOssForCausalLM" else ()
        if parts:
            planned += parts
            continue

        # collect experts by layer; folders have them in the order of their indices
        match = _EXPERT.fullmatch(source.name) if is_mixture(config) else None
        if match:
            tensor_name = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR[_ROLES[match["kind"]]]]
            layer = f"{tensor_name.format(bid=match['block'])}.weight"
            experts.setdefault(layer, []).append(source)
            continue

        # other tensors: rename, transpose, reorder rotary pairs
        hf_name = _RENAMED.sub(lambda found: found[0].replace("_bias", ".bias"), source.name)
        if hf_name.endswith(".sinks"):
            hf_name += ".weight"
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise UserError(f"{source.name}: has no place in llama.cpp's {shape.name}")
        gguf_shape, read = source.shape, source.read
        if source.name in transposed:
            gguf_shape, read = gguf_shape[::-1], _then(read, torch.t)
        if shape.is_interleaved and _ROTATED.search(gguf_name):
            half = (config.head_dim or 0) // 2
            read = _then(read, partial(swap_pairs, outer=2, inner=half))
        planned.append(GGUFTensor(gguf_name, tuple(gguf_shape), (read,)))

    # stacked experts, and tensors without a source
    planned += [_stacked(name, parts, config) for name, parts in experts.items()]
    for name, tensor in computed_tensors(config).items():
        planned.append(GGUFTensor(name, tuple(tensor.shape), (partial(torch.clone, tensor),)))
    return planned


def _interleaved(source: LazyTensor) -> Iterator[GGUFTensor]:
    """Yield the tensors of gpt-oss's stacked experts: gate and up alternate, (E, in, out)."""
    match = _GPT_OSS.fullmatch(source.name)
    if match is None:
        return
    kind = "bias" if match["bias"] else "weight"
    count, *sizes = source.shape
    roles = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
    names = roles[match["name"]]
    for index, name in enumerate(names):
        step = len(names)

        def part(stack: Tensor, index: int = index, step: int = step) -> Tensor:
            rows = stack[..., index::step]
            return rows if kind == "bias" else rows.transpose(1, 2)

        out = sizes[-1] // step
        shape = (count, out) if kind == "bias" else (count, out, sizes[0])
        gguf_name = f"blk.{match['block']}.{name}.{kind}"
        yield GGUFTensor(gguf_name, shape, (_then(source.read, part),))


def _latent_heads(source: LazyTensor, config: ResolvedModelConfig) -> Iterator[GGUFTensor]:
    """Yield the two parts of kv_b_proj (heads * (nope + value), latent): keys transposed."""
    match = _KV_B.fullmatch(source.name)
    if match is None:
        return
    attn, heads = config.attn_config, config.n_heads
    nope, value, rank = attn.qk_nope_head_dim, config.value_dim, attn.kv_lora_rank

    def keys(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (heads, -1))[:, :nope].transpose(1, 2)

    def values(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (heads, -1))[:, nope:]

    at = f"blk.{match['block']}.attn"
    yield GGUFTensor(f"{at}_k_b.weight", (heads, rank, nope), (_then(source.read, keys),))
    yield GGUFTensor(f"{at}_v_b.weight", (heads, value, rank), (_then(source.read, values),))


def _transposed(architecture: str, config: ResolvedModelConfig) -> set[str]:
    """Return the names of the HF weights with the shape (in, out)."""
    names = set()
    for rule in MAPS[architecture].rules:
        if rule.transposed:
            for block in range(config.n_layers):
                names |= {name.format(i=block) for name in rule.theirs}
    return names


def _then(read: Make, change: Callable[[Tensor], Tensor]) -> Make:
    """Return a function that reads a tensor and changes it."""
    return lambda: change(read())


def _stacked(name: str, sources: list[LazyTensor], config: ResolvedModelConfig) -> GGUFTensor:
    """Return the stacked experts: (E, f, D), or (E, D, f) for the down projection."""
    count, hidden, width = config.ffn_config.moe_num_experts, _hidden(config), config.d_model
    is_last = ".ffn_down_exps." in name
    shape = (count or 1, width, hidden) if is_last else (count or 1, hidden, width)
    reads = [source.read for source in sources]
    if len(sources) == 1 and count != 1:  # DBRX stores one matrix (E * f, D)

        def stack(rows: Tensor) -> Tensor:
            each = rows.unflatten(0, (-1, hidden))
            return each.transpose(1, 2) if is_last else each

        reads = [_then(reads[0], stack)]
    return GGUFTensor(name, shape, tuple(reads))


def _hidden(config: ResolvedModelConfig) -> int:
    return config.ffn_config.ffn_hidden_size


def tensor_type(tensor: GGUFTensor, dtype: str) -> str:
    """Return the number format of a tensor, by its name in `gguf.GGMLQuantizationType`.

    The rules are those of llama.cpp's converter: vectors, routers and positions are F32. A matrix
    whose rows are not a multiple of the Q8_0 block size is F16.
    """
    kind = TYPES[dtype]
    if len(tensor.shape) < 2 or tensor.name.endswith(".bias") or IN_FULL.fullmatch(tensor.name):
        return "F32"
    return "F16" if kind == "Q8_0" and tensor.shape[-1] % 32 else kind


def pieces(tensor: GGUFTensor, kind: str) -> Iterator[np.ndarray]:
    """Yield the bytes of a tensor, a few rows at a time.

    Raises:
        UserError: a value does not fit into the number format.
    """
    import gguf

    quantization = gguf.GGMLQuantizationType[kind]
    for read in tensor.reads:
        part = read()
        n_rows = max(1, PIECE // max(1, part[0].numel()))
        for rows in part.split(n_rows):
            numbers = rows.detach().to("cpu", torch.float32).contiguous().numpy()
            _check_range(tensor.name, numbers, kind)
            yield gguf.quantize(numbers, quantization)


def _check_range(name: str, numbers: np.ndarray, kind: str) -> None:
    """Raise a UserError for values that a number format cannot represent."""
    largest = np.abs(numbers).max(initial=0.0)
    if not np.isfinite(largest):
        raise UserError(f"{name}: has values that are not finite; choose an earlier checkpoint")
    if largest > {"F16": LARGEST_SCALE, "Q8_0": 127 * LARGEST_SCALE}.get(kind, np.inf):
        raise UserError(
            f"{name}: has values that {kind} cannot hold; write dtype=bf16 or dtype=fp32"
        )
