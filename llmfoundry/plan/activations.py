"""What the backward pass keeps of a row, whatever of it is computed again.

`memory.py` asks it. Counted tensor by tensor from a block's forward pass, each storage once:
`benchmarks/memory.py` counts the same on fake tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from llmfoundry.models.decoder import Decoder
from llmfoundry.models.low_rank import LowRank
from llmfoundry.recipe.architecture.model import ModelConfig
from llmfoundry.recipe.parallel import Degrees, recomputation
from llmfoundry.recipe.parallel_limits import context_method
from llmfoundry.recipe.scripts.train import TrainRecipe

CPU = torch.device("cpu")
ALONE = Degrees()
LOG_SUM = 4  # bytes of what attention keeps of each query's softmax


@dataclass(frozen=True)
class SavedInputs:
    """Which inputs of its matrices one block keeps for the backward pass: those that train.

    Attributes:
        anything: whether a gradient reaches the block at all.
        qkv: the input of the projection to queries, keys and values.
        out: of the projection of what attention gives.
        up: of the feed-forward layer, or of the experts.
        down: of its second half; experts make theirs again.
        added: values a token that adapters keep: between their factors, and DoRA's and dropout's.
    """

    anything: bool = True
    qkv: bool = True
    out: bool = True
    up: bool = True
    down: bool = True
    added: int = 0


ALL = SavedInputs()


class RowBytes(NamedTuple):
    """Bytes of one row of max_seq_len.

    Attributes:
        kept: by all blocks, from the forward pass to the backward pass.
        head: beside that while the loss and the head's gradient are computed.
        block: beside that in the backward pass of a block: what is computed again of it, and
            gradients of what it kept.
        load_kept: what `kept` grows by for each unit of load, where processes share experts: one
            whose experts have a times the mean load has a times as many rows of tokens.
        load_block: the same of `block`.
    """

    kept: int
    head: int
    block: int
    load_kept: int
    load_block: int


def row_bytes(
    recipe: TrainRecipe,
    kept: Sequence[SavedInputs] | None = None,
    *,
    degrees: Degrees = ALONE,
    device: torch.device = CPU,
) -> RowBytes:
    """What a row takes; all blocks keep all, or as `kept` says.

    Blocks that are behind the first weight that trains keep nothing.
    """
    model, tensor = recipe.model, degrees.tensor
    stream = model.d_model * (2 if recipe.precision == "bf16" else 4)
    low = _low(recipe)
    reached = [ALL] * model.n_layers if kept is None else [one for one in kept if one.anything]
    again = recomputation(recipe.parallel.activation_checkpointing)
    if recipe.parallel.activation_checkpointing_target is not None:
        again = "none"  # an upper bound, as compression's is
    each = {one: _kept(recipe, one, again, degrees, device) for one in set(reached)}
    whole = max((block_bytes(recipe, one, degrees, device) for one in each), default=0)
    most = max(each.values(), default=0)
    tokens = tokens_of_row(recipe, degrees)
    gradients = tokens * (2 * stream + low * _inner(model)) // tensor
    passing = tokens * expert_rows(model, low, travel=degrees.expert > 1) // tensor
    gathered = 3 * low * model.d_model if tensor > 1 else 0  # the head's input, its gradient
    load_kept, load_block = _loads(recipe, again, degrees) if reached else (0, 0)
    return RowBytes(
        kept=sum(each[one] for one in reached),
        head=tokens * ((3 * 4 * model.d_model + stream) // tensor + gathered),
        block=whole - most + gradients + passing if reached else 0,
        load_kept=len(reached) * load_kept,
        load_block=load_block - load_kept + passing if load_block else 0,
    )


def _loads(recipe: TrainRecipe, again: str, degrees: Degrees) -> tuple[int, int]:
    """Bytes of a row that grow with the load of a process's experts: in a block, kept and whole."""
    model, low = recipe.model, _low(recipe)
    if model.ffn_config.ffn_type != "dmoe" or degrees.expert == 1:
        return 0, 0
    top_k = model.ffn_config.moe_top_k
    assert top_k, "the recipe was not filled"
    results = 2 * low * model.d_model * top_k  # of selective checkpointing: what came and what went
    kept = whole = _routed_bytes(model, low, ALL, degrees)
    if again == "selective":
        kept = _routed_bytes(model, low, SavedInputs(up=False), degrees) + results
    elif again == "whole":
        kept = 0
    tokens = tokens_of_row(recipe, degrees)
    return tokens * kept // degrees.tensor, tokens * max(kept, whole) // degrees.tensor


def tokens_of_row(recipe: TrainRecipe, degrees: Degrees) -> int:
    """A process's tokens of a row that context parallelism divides; padded where it does not."""
    if degrees.context == 1:
        return recipe.max_seq_len
    gathered = context_method(recipe.model, recipe.parallel, degrees) == "all_gather"
    pieces = 2 if gathered else 1  # from both ends of the row
    return -(-recipe.max_seq_len // (pieces * degrees.context)) * pieces


def _kept(
    recipe: TrainRecipe, kept: SavedInputs, again: str, degrees: Degrees, device: torch.device
) -> int:
    """Bytes that one block keeps of one row where `again` is computed again."""
    if again == "selective":
        return selective_bytes(recipe, kept, degrees)
    if again == "whole":
        stream = recipe.model.d_model * (2 if recipe.precision == "bf16" else 4)
        return stream * tokens_of_row(recipe, degrees) // degrees.tensor
    return block_bytes(recipe, kept, degrees, device)


def _low(recipe: TrainRecipe) -> int:
    """Bytes of a value in matrix products."""
    return 4 if recipe.precision == "fp32" else 2


def _inner(model: ModelConfig) -> int:
    """Values of the widest gradient of a token within a block; experts' are in `expert_rows`."""
    ffn = model.ffn_config
    if ffn.ffn_type == "dmoe" or ffn.ffn_hidden_size is None:
        return 0
    return ffn.ffn_hidden_size * (2 if ffn.ffn_type == "mptglu" else 1)


def block_bytes(
    recipe: TrainRecipe,
    kept: SavedInputs = ALL,
    degrees: Degrees = ALONE,
    device: torch.device = CPU,
) -> int:
    """Bytes that the backward pass keeps of one row in one block, nothing computed again.

    The inputs of norms in fp32, those of matrix products and of attention in the compute dtype.
    Tensor parallelism divides all but the inputs of products, which are gathered from the tokens
    that its processes share; its experts see these tokens alone.
    """
    model, low = recipe.model, _low(recipe)
    d, hidden = model.d_model, model.ffn_config.ffn_hidden_size
    assert hidden, "the recipe was not filled"
    experts = model.ffn_config.ffn_type == "dmoe"
    normed = low if model.norm_type.startswith("low_precision") else 4
    gated = model.ffn_config.ffn_type == "mptglu"
    # autocast casts what a gate and its twin read for each of them
    reads = 2 if gated and recipe.precision == "amp_bf16" else not experts
    norms, inputs = 2 * d * normed, low * d * (kept.qkv + kept.up * reads)
    if device.type == "cpu" and model.norm_type.endswith("rmsnorm"):
        norms += 2 * d * normed  # it has no kernel there, and keeps what it made as well
    dropped = 2 * d * (4 + 1) if model.resid_pdrop else 0  # what was kept, and which
    ffn = low * hidden * ((3 if gated else 1) + kept.down)
    if experts:
        ffn = expert_bytes(model, low, kept, degrees)
    divided = norms + _attention_bytes(recipe, kept, degrees, device) + dropped + ffn
    token = inputs + low * kept.added + -(-divided // degrees.tensor)
    return token * tokens_of_row(recipe, degrees)


def _attention_bytes(
    recipe: TrainRecipe, kept: SavedInputs, degrees: Degrees, device: torch.device
) -> int:
    """Bytes of a token that the backward pass of attention keeps, of all heads."""
    model, low = recipe.model, _low(recipe)
    attn = model.attn_config
    assert model.head_dim and attn.kv_n_heads, "the recipe was not filled"
    q, kv = model.n_heads * model.head_dim, attn.kv_n_heads * model.head_dim
    wide = 4 if device.type == "cpu" else low  # a CPU's attention computes short rows in fp32
    attention = wide * (2 * q + 2 * kv * seen_keys(recipe, degrees)) + LOG_SUM * model.n_heads
    if wide > low:  # copies, which the products' own results do not wait for
        attention += low * q * kept.out
    elif attn.rope:
        attention += low * (q + kv)
    if attn.clip_qkv is not None:
        attention += low * (q + 2 * kv)
    if attn.qk_ln or attn.qk_gn:
        attention += 2 * 4 * (q + kv)
    if attn.attn_impl == "torch" or attn.attn_logit_softcapping is not None:
        attention += 3 * 4 * model.n_heads * recipe.max_seq_len  # logits, capped and their softmax
    return attention


def seen_keys(recipe: TrainRecipe, degrees: Degrees) -> int:
    """How many times its own keys and values a process attends to under context parallelism.

    Gathered ones are those of the whole row. Ulysses has as many of fewer heads, unless there are
    fewer heads of keys than processes, which then repeat them.
    """
    heads = recipe.model.attn_config.kv_n_heads
    assert heads, "the recipe was not filled"
    method = context_method(recipe.model, recipe.parallel, degrees)
    if degrees.context > 1 and method == "all_gather":
        return degrees.context
    heads = max(1, heads // degrees.tensor)
    return math.lcm(heads, degrees.context) // heads


def selective_bytes(recipe: TrainRecipe, kept: SavedInputs = ALL, degrees: Degrees = ALONE) -> int:
    """The same where selective checkpointing keeps results of products, attention and experts.

    And a block's input; not the result of the feed-forward layer's last product
    (`distributed/activation_checkpoint.py`). Adapters' products are kept as well.
    """
    model, low = recipe.model, _low(recipe)
    attn, d, ffn = model.attn_config, model.d_model, model.ffn_config
    assert model.head_dim and attn.kv_n_heads and ffn.ffn_hidden_size, "the recipe was not filled"
    q, kv = model.n_heads * model.head_dim, attn.kv_n_heads * model.head_dim
    stream = d * (2 if recipe.precision == "bf16" else 4)
    products = q + 2 * kv + ffn.ffn_hidden_size * (2 if ffn.ffn_type == "mptglu" else 1)
    experts = 0
    if ffn.ffn_type == "dmoe":
        shared = (ffn.shared_expert_hidden_size or 0) * (2 if ffn.mlp_type == "glu" else 1)
        products = q + 2 * kv + shared + (d if shared else 0)
        routed = expert_bytes(model, low, SavedInputs(up=False), degrees)
        top_k = (ffn.moe_top_k or 1) if degrees.expert > 1 else 1
        experts = routed - low * 2 * shared + low * d * top_k  # the operator's result too
        if degrees.expert > 1:
            experts += low * d * top_k  # and what came to it
    adapters = low * (products + d if kept.added else 0) + low * kept.added
    attention = low * q + LOG_SUM * model.n_heads
    divided = stream + low * products + attention + experts + adapters
    scattered = low * d if degrees.tensor > 1 else 0  # attention's product, and what is left of it
    token = low * d + -(-(divided + scattered) // degrees.tensor)
    return token * tokens_of_row(recipe, degrees)


def expert_bytes(
    model: ModelConfig, low: int, kept: SavedInputs = ALL, degrees: Degrees = ALONE
) -> int:
    """Bytes that the backward pass of a mixture keeps of one token, in values of `low` bytes.

    Of evenly loaded experts: where processes share them, one whose experts have a times the mean
    load keeps a times as many rows.
    """
    ffn, d, top_k = model.ffn_config, model.d_model, model.ffn_config.moe_top_k
    assert ffn.ffn_hidden_size and ffn.moe_num_experts and top_k, "the recipe was not filled"
    gated = ffn.mlp_type == "glu"
    router = 4 * 3 * ffn.moe_num_experts + top_k * (3 * 8 + 3 * 4)
    shared = low * (ffn.shared_expert_hidden_size or 0) * (4 if gated else 2)
    inputs = 0
    if ffn.moe_impl == "grouped_mm":
        inputs = low * d * kept.up
    return router + shared + inputs + _routed_bytes(model, low, kept, degrees)


def _routed_bytes(model: ModelConfig, low: int, kept: SavedInputs, degrees: Degrees) -> int:
    """The part of `expert_bytes` that is of rows, top_k of each token: it follows their load."""
    ffn, top_k = model.ffn_config, model.ffn_config.moe_top_k
    assert ffn.ffn_hidden_size and top_k, "the recipe was not filled"
    projections = 2 if ffn.mlp_type == "glu" else 1
    if ffn.moe_impl != "grouped_mm":  # all that the activation makes of them, and what it gives
        row = low * (2 * model.d_model + 2 * projections * ffn.ffn_hidden_size)
    else:  # the pre-activations
        row = low * projections * ffn.ffn_hidden_size
    return top_k * row + _travelling(model, low, kept, degrees)


def _travelling(model: ModelConfig, low: int, kept: SavedInputs, degrees: Degrees) -> int:
    """Of a token what waits of its rows' travel (`ops/moe/dispatch.py`): those that came, and back.

    Those that came are the experts' input, beside the tokens themselves, which the router keeps.
    """
    top_k = model.ffn_config.moe_top_k
    assert top_k, "the recipe was not filled"
    if degrees.expert == 1:
        return 0
    came = kept.up and model.ffn_config.moe_impl == "grouped_mm"  # another's rows are counted
    return top_k * low * model.d_model * (came + 1)


def expert_rows(model: ModelConfig, width: int, *, travel: bool = False) -> int:
    """Bytes of a token's rows on their way back through the experts of the block at work.

    Gradients and inputs of the rows, (d) each, the gradient of the activation, what it gave, and
    the gradients of both projections, (f) each: `ops/moe/gpu.py`. Where they `travel`, also what
    came of their gradients, and what goes back.
    """
    ffn = model.ffn_config
    if ffn.ffn_type != "dmoe":
        return 0
    assert ffn.ffn_hidden_size and ffn.moe_top_k, "the recipe was not filled"
    return ffn.moe_top_k * width * ((5 if travel else 3) * model.d_model + 3 * ffn.ffn_hidden_size)


def kept_by_blocks(model: nn.Module) -> list[SavedInputs]:
    """What each block keeps, in order."""
    if not isinstance(model, Decoder):
        return _kept_by_others(model)
    ends = [p for n, p in model.named_parameters() if n.startswith(("wte.", "wpe."))]
    reached, found = _trains(ends), list[SavedInputs]()
    for block in model.blocks:
        named = list(block.named_parameters())
        reached |= _trains([p for _, p in named])

        def input_of(*parts: str, named: Sequence[tuple[str, Tensor]] = named) -> bool:
            mine = [p for n, p in named if any(part in n for part in parts) and p.ndim > 1]
            return _trains(mine)

        found.append(
            SavedInputs(
                anything=reached,
                qkv=input_of("attn.W"),
                out=input_of("attn.out_proj"),
                up=input_of("up_proj", "gate_proj", "experts."),
                down=input_of("down_proj"),
                added=_added(block),
            )
        )
    return found


def _kept_by_others(model: nn.Module) -> list[SavedInputs]:
    """Of a class of transformers: all inputs of a block in which anything trains."""
    in_blocks = {id(p) for block in model.blocks for p in block.parameters()}  # type: ignore[union-attr]
    reached, found = _trains([p for p in model.parameters() if id(p) not in in_blocks]), []
    for block in model.blocks:  # type: ignore[union-attr]
        trains = _trains(list(block.parameters()))
        reached |= trains
        found.append(SavedInputs(reached, trains, trains, trains, trains))
    return found


def _trains(parameters: Sequence[Tensor]) -> bool:
    return any(parameter.requires_grad for parameter in parameters)


def _added(block: nn.Module) -> int:
    """Values a token between the factors of the adapters on dense layers, and beside them."""
    values = 0
    for module in block.modules():
        lora = getattr(module, "lora", None)
        if isinstance(lora, LowRank):
            inner, inputs = module.get_parameter("lora_A").shape
            values += inner + (2 * lora.rows if lora.dora else 0) + (inputs if lora.dropout else 0)
    return values
