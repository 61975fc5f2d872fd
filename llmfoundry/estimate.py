"""What a run needs, before it is built: memory of weights, optimizer and activations.

`build.py` asks it for the microbatch that `auto` stands for, and refuses a recipe that cannot fit
with what it needs, what there is, and which shipped recipe fits.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from llmfoundry.errors import UserError
from llmfoundry.estimate_trained import ALL, SavedInputs, kept_by_blocks, weigh
from llmfoundry.models.counts import expert_parameter_count, parameter_count
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.quantized import is_quantized, value_count
from llmfoundry.ops.logits import chunk_tokens, logit_bytes
from llmfoundry.ops.moe.steps import packed_width
from llmfoundry.parallel.blocks import check_graphs
from llmfoundry.parallel.launch import World
from llmfoundry.parallel.mesh import degrees
from llmfoundry.recipe.architecture.model import ModelConfig
from llmfoundry.recipe.data import DataConfig
from llmfoundry.recipe.front.load import load
from llmfoundry.recipe.front.paths import YAMLS, recipe_name
from llmfoundry.recipe.optimizer import OPTIMIZERS
from llmfoundry.recipe.scripts.finetune import FinetuneRecipe
from llmfoundry.recipe.scripts.train import TrainRecipe
from llmfoundry.recipe.tokenizer import TokenizerConfig
from llmfoundry.recipe.values.checks import divisors

GIB = 2**30
CPU = torch.device("cpu")
HEAP = 1.5
"""What activations take of a CPU's heap over their own size: tensors of other sizes come and go
between those that stay, and freed memory is kept (`ops/host_memory.py`). Measured by
`benchmarks/finetune/memory.py`: 1.44 to 1.53 with 47M and 154M parameters, LoRA and QLoRA."""
FRAMEWORK = GIB // 2  # PyTorch and all else that is imported, before there is a model
WORKER_BYTES = 200 * 2**20  # of a process that makes batches, once it has imported what it needs
USABLE = 0.9  # of the free memory; the rest is for the allocator's gaps and the libraries
CPU_TOKENS = 1024
"""Tokens that a matrix meets in a microbatch on a CPU: more is not faster there, and takes more
memory. A mixture's microbatch holds more, for each expert meets only its share."""
KNOWN_VOCABULARIES = {"bytes": 257, "tiktoken": 100_277, "huggingface": 50_277}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one process needs.

    Attributes:
        parameters: of the whole model.
        weights: weights, gradients and the optimizer's moments, of this process's shard.
        gathered: weights of one block and of embedding and head, gathered from other shards, and
            of those in 4 bits the matrix that is at work.
        per_row: what the backward pass keeps of one row, and the loss's gradient.
        row_logits: what the loss holds of the logits of one row.
        chunk_logits: the same of a chunk of tokens: it holds no more at once.
        fixed: FRAMEWORK.
        accumulated: what gradients take between microbatches over what `weights` has of them.
        step_rows: rows of a step; with fewer at a time, gradients are accumulated.
    """

    parameters: int
    weights: int
    gathered: int
    per_row: int
    row_logits: int
    chunk_logits: int
    accumulated: int
    step_rows: int
    fixed: int = FRAMEWORK

    def logits(self, rows: int) -> int:
        """Bytes that the loss of a microbatch of `rows` holds of logits."""
        return min(rows * self.row_logits, self.chunk_logits)

    def gradients(self, rows: int) -> int:
        """Bytes of `accumulated` at a microbatch of `rows`: none where that is the whole step."""
        return self.accumulated if rows < self.step_rows else 0

    def total(self, rows: int) -> int:
        """Bytes at a microbatch of `rows`."""
        always = self.weights + self.gathered + self.fixed
        return always + self.gradients(rows) + self.logits(rows) + rows * self.per_row


def estimate(
    recipe: TrainRecipe,
    world_size: int,
    *,
    sketch: Decoder | None = None,
    device: torch.device = CPU,
) -> MemoryEstimate:
    """What a filled recipe needs on each of `world_size` processes.

    Args:
        recipe: filled.
        world_size: processes of the run.
        sketch: of fine-tuning: the model on the meta device, frozen and quantised as it will be;
            None: all parameters train.
        device: where it computes.
    """
    if sketch is not None:
        return _estimate_part(recipe, world_size, sketch, device)
    model = recipe.model
    assert model.vocab_size is not None
    parameters = parameter_count(model)
    width = 2 if recipe.precision == "bf16" else 4
    replicas, shard = degrees(recipe.parallel, world_size)
    embedding = model.vocab_size * model.d_model * (1 if model.tie_word_embeddings else 2)
    block = (parameters - embedding) // model.n_layers
    return MemoryEstimate(
        parameters=parameters,
        weights=width * (2 + OPTIMIZERS[recipe.optimizer.name].moments) * parameters // shard
        + expert_copies(recipe, shard),
        gathered=8 * (embedding + block) if shard > 1 else 4 * embedding,
        per_row=row_bytes(recipe),
        **_logits(recipe, device),
        accumulated=accumulated_bytes(recipe, width * parameters, shard),
        step_rows=recipe.global_train_batch_size // (replicas * shard),
    )


def _logits(recipe: TrainRecipe, device: torch.device) -> dict[str, int]:
    """What the loss holds of logits: of a row, and of a chunk of tokens."""
    model = recipe.model
    assert model.vocab_size is not None
    capped = model.final_logit_softcapping is not None
    token = logit_bytes(device, capped=capped) * model.vocab_size
    chunk = chunk_tokens(model.vocab_size, device, recipe.device_loss_chunk_tokens)
    return {"row_logits": recipe.max_seq_len * token, "chunk_logits": chunk * token}


def _estimate_part(
    recipe: TrainRecipe, world_size: int, sketch: Decoder, device: torch.device
) -> MemoryEstimate:
    """Of a model of which a part trains: gradients and moments of that alone."""
    held = weigh(sketch, device)
    replicas, shard = degrees(recipe.parallel, world_size)
    moments = OPTIMIZERS[recipe.optimizer.name].moments
    low = 4 if recipe.precision == "fp32" else 2
    copies = expert_copies(recipe, shard) if held.trains_experts else 0
    gathered = 2 * (held.ends + held.block) if shard > 1 else held.trained_ends
    per_row = row_bytes(recipe, kept_by_blocks(sketch))
    return MemoryEstimate(
        parameters=held.parameters,
        weights=(held.frozen + (2 + moments) * held.trained) // shard + copies,
        gathered=gathered + low * held.dequantized,
        per_row=round((HEAP if device.type == "cpu" else 1) * per_row),
        **_logits(recipe, device),
        accumulated=accumulated_bytes(recipe, held.trained, shard),
        step_rows=recipe.global_train_batch_size // (replicas * shard),
    )


def accumulated_bytes(recipe: TrainRecipe, trained: int, shard: int) -> int:
    """What gradients take between microbatches over the shard's own; `trained`: bytes of weights.

    FSDP keeps them in fp32 until the last: those of the shard, or, where none are reduce-scattered
    before, of the whole model. DDP adds them up in place.
    """
    if shard == 1:
        return 0
    values = trained // (2 if recipe.precision == "bf16" else 4)
    each = recipe.parallel.reduce_scatter_each_microbatch
    return 4 * values // (shard if each else 1) - trained // shard


def expert_copies(recipe: TrainRecipe, shard: int) -> int:
    """Bytes of the bf16 copies of fp32 experts that autocast makes; FSDP gathers bf16 already."""
    if recipe.precision != "amp_bf16" or shard > 1:
        return 0
    copies = 2 * expert_parameter_count(recipe.model)
    if recipe.parallel.activation_checkpointing:  # of the block that is computed
        return copies // recipe.model.n_layers
    return copies


def row_bytes(recipe: TrainRecipe, kept: Sequence[SavedInputs] | None = None) -> int:
    """Bytes that the backward pass keeps of one row of max_seq_len; all blocks all, or as `kept`.

    Of blocks that are behind the first weight that trains, nothing.
    """
    stream = recipe.model.d_model * (2 if recipe.precision == "bf16" else 4)
    n_layers = recipe.model.n_layers
    if kept is None:
        block = block_bytes(recipe)
        blocks = n_layers * block
    else:
        reached = [one for one in kept if one.anything]
        each = {one: block_bytes(recipe, one) for one in set(reached)}
        n_layers, block = len(reached), max(each.values(), default=0)
        blocks = sum(each[one] for one in reached)
    if recipe.parallel.activation_checkpointing:  # inputs of these blocks, and one computed again
        blocks = n_layers * stream * recipe.max_seq_len + block
    passing = expert_rows(recipe.model, width=stream // recipe.model.d_model)
    return blocks + (5 * 4 * recipe.model.d_model + passing) * recipe.max_seq_len


def block_bytes(recipe: TrainRecipe, kept: SavedInputs = ALL) -> int:
    """Bytes that the backward pass keeps of one row in one block.

    Counted tensor by tensor from the block's forward pass: the inputs of norms and of the
    residual sums in fp32, those of matrix products and of attention in the compute dtype.
    """
    model, low = recipe.model, 4 if recipe.precision == "fp32" else 2
    attn, d, hidden = model.attn_config, model.d_model, model.ffn_config.ffn_hidden_size
    assert model.head_dim and attn.kv_n_heads and hidden, "the recipe was not filled"
    q, kv = model.n_heads * model.head_dim, attn.kv_n_heads * model.head_dim
    cast = 2 if recipe.precision == "amp_bf16" else 0  # a bf16 copy of each product's fp32 input
    inputs = kept.qkv + kept.up
    norms = 2 * d * 4 + inputs * d * (4 + cast)  # input, output (fp32), and the cast copy
    attention = low * (q + 2 * kv) + low * q * (1 + kept.out)
    if attn.rope:
        attention += low * (q + kv) + 4 * model.head_dim
    if attn.clip_qkv is not None:
        attention += low * (q + 2 * kv)
    if attn.qk_ln or attn.qk_gn:
        attention += 2 * 4 * (q + kv)
    if attn.attn_impl == "torch" or attn.attn_logit_softcapping is not None:
        attention += 3 * 4 * model.n_heads * recipe.max_seq_len  # logits, capped and their softmax
    dropped = 2 * d * (4 + 1) if model.resid_pdrop else 0  # what was kept, and which
    gated = model.ffn_config.ffn_type == "mptglu"
    ffn = low * hidden * ((3 if gated else 1) + kept.down)
    if model.ffn_config.ffn_type == "dmoe":
        ffn = expert_bytes(model, low, kept)
    added = low * kept.added
    return (norms + attention + dropped + ffn + added) * recipe.max_seq_len


def expert_bytes(model: ModelConfig, low: int, kept: SavedInputs = ALL) -> int:
    """Bytes that the backward pass of a mixture keeps of one token, in values of `low` bytes."""
    ffn, d, top_k = model.ffn_config, model.d_model, model.ffn_config.moe_top_k
    assert ffn.ffn_hidden_size and ffn.moe_num_experts and top_k, "the recipe was not filled"
    projections = 2 if ffn.mlp_type == "glu" else 1
    router = 4 * 3 * ffn.moe_num_experts + top_k * (3 * 8 + 3 * 4)
    shared = low * (ffn.shared_expert_hidden_size or 0) * 2 * projections
    if ffn.moe_impl == "grouped_mm":  # its input and the pre-activations
        width = low * d * kept.up + top_k * projections * low * ffn.ffn_hidden_size
        if ffn.moe_compress_activations:
            packed = top_k * projections * packed_width(ffn.ffn_hidden_size)
            width = low * d + packed_width(d) + packed  # the router keeps its input as it is
    else:  # the rows of every expert, all that the activation makes of them, and what it gives
        width = top_k * low * (2 * d + 2 * projections * ffn.ffn_hidden_size)
    return router + shared + width


def expert_rows(model: ModelConfig, width: int) -> int:
    """Bytes of a token's rows on their way through the experts of the block at work."""
    ffn = model.ffn_config
    if ffn.ffn_type != "dmoe":
        return 0
    assert ffn.ffn_hidden_size and ffn.moe_top_k, "the recipe was not filled"
    return ffn.moe_top_k * width * (2 * model.d_model + 3 * ffn.ffn_hidden_size)


def check_workers(config: DataConfig, world: World) -> None:
    """Refuse more of data.loader_workers than the machine has memory for.

    Raises:
        UserError: says how many fit.
    """
    free = psutil.virtual_memory().available
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    if config.loader_workers * ranks * WORKER_BYTES > free:
        raise UserError(
            f"data.loader_workers: {config.loader_workers} for each of {ranks} processes take"
            f" {WORKER_BYTES / GIB:.1f} GiB each, but {free / GIB:.1f} GiB are free; write at most"
            f" {free // WORKER_BYTES // ranks}"
        )


def available_memory(device: torch.device) -> int:
    """Bytes that this process may still use on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def guess_vocab_size(config: TokenizerConfig) -> int:
    """The vocabulary's size before the tokenizer exists."""
    return config.vocab_size or KNOWN_VOCABULARIES[config.name]


def choose_microbatch(
    recipe: TrainRecipe,
    *,
    world_size: int,
    available: int,
    device: torch.device,
    sketch: Decoder | None = None,
) -> int:
    """Rows that a process computes at a time.

    `auto` is the largest divisor of the process's rows that the estimate says fits; on a CPU of
    those in which a matrix, or an expert if they are evenly loaded, meets CPU_TOKENS at most.

    Args:
        recipe: filled.
        world_size: processes of the run.
        available: bytes for this process.
        device: where it computes.
        sketch: of fine-tuning, as `estimate` takes it.

    Raises:
        UserError: the recipe cannot fit; says what it needs, what there is and what fits.
    """
    rows = rows_per_process(recipe, math.prod(degrees(recipe.parallel, world_size)))
    need = estimate(recipe, world_size, sketch=sketch, device=device)
    asked = recipe.device_train_microbatch_size
    most = rows
    if device.type == "cpu":
        tokens = CPU_TOKENS / recipe.model.ffn_config.active_share
        most = max(1, int(tokens) // recipe.max_seq_len)
    candidates = [n for n in reversed(divisors(rows)) if n <= most]
    if isinstance(asked, int):
        candidates = [min(asked, rows)]
    for candidate in candidates:
        if need.total(candidate) <= USABLE * available:
            check_graphs(recipe.compile_mode, rows=rows, microbatch=candidate)
            return candidate
    if recipe.parallel.reduce_scatter_each_microbatch is False:
        others = need.total(candidates[-1]) - need.gradients(candidates[-1])
        if others <= USABLE * available:
            raise UserError(_gradients_do_not_fit(need, candidates[-1], available))
    if sketch is not None:
        raise UserError(_does_not_fit_frozen(recipe, need, candidates[-1], available, sketch))
    raise UserError(_does_not_fit(recipe, need, candidates[-1], world_size, available, device))


def rows_per_process(recipe: TrainRecipe, data_size: int) -> int:
    """This process's rows of a global batch; raises UserError where they do not divide."""
    rows, rest = divmod(recipe.global_train_batch_size, data_size)
    if rest or rows == 0:
        below = max(1, rows) * data_size
        raise UserError(
            f"global_train_batch_size: {recipe.global_train_batch_size} rows cannot be shared"
            f" evenly by {data_size} processes; write a multiple, such as {below}"
        )
    return rows


def _gradients_do_not_fit(need: MemoryEstimate, rows: int, available: int) -> str:
    return (
        f"parallel.reduce_scatter_each_microbatch: false needs about {need.total(rows) / GIB:.1f}"
        f" GiB a process at a microbatch of {rows} ({need.accumulated / GIB:.1f} of them for"
        f" gradients of the whole model between microbatches); {available / GIB:.1f} GiB are free;"
        " write true"
    )


def _does_not_fit(
    recipe: TrainRecipe,
    need: MemoryEstimate,
    rows: int,
    world_size: int,
    available: int,
    device: torch.device,
) -> str:
    fits = largest_fitting_recipe(world_size, available, device)
    hint = f"the largest shipped recipe that fits is {fits}" if fits else "no shipped recipe fits"
    return (
        f"model: {recipe.run_name} ({need.parameters / 1e6:,.0f}M parameters) needs about"
        f" {need.total(rows) / GIB:.1f} GiB a process at a microbatch of {rows}"
        f" (weights, gradients and optimizer {need.weights / GIB:.1f}, activations"
        f" {rows * need.per_row / GIB:.1f}); {available / GIB:.1f} GiB are free; {hint}; or"
        " spread it with parallel.data_parallel_shard_degree"
    )


def _does_not_fit_frozen(
    recipe: TrainRecipe, need: MemoryEstimate, rows: int, available: int, sketch: Decoder
) -> str:
    """For fine-tuning: what makes it smaller is an adapter, 4 bits, or more processes."""
    frozen = not all(p.requires_grad for p in sketch.parameters())
    if is_quantized(sketch):
        hint = "write a smaller max_seq_len, parallel.activation_checkpointing: true"
    elif frozen and isinstance(recipe, FinetuneRecipe) and recipe.adapter.name != "none":
        hint = "write model.quantize: nf4"
    else:
        small = value_count(sketch) * 4.2 / 8 + need.fixed + need.logits(rows) + rows * need.per_row
        fits = " and model.quantize: nf4" if small <= USABLE * available else ""
        hint = f"write adapter.name: lora{fits}"
    return (
        f"model.pretrained: {need.parameters / 1e6:,.0f}M parameters need about"
        f" {need.total(rows) / GIB:.1f} GiB a process at a microbatch of {rows} (weights, gradients"
        f" and optimizer {need.weights / GIB:.1f}, activations {rows * need.per_row / GIB:.1f});"
        f" {available / GIB:.1f} GiB are free; {hint}, or spread it with"
        " parallel.data_parallel_shard_degree"
    )


def largest_fitting_recipe(world_size: int, available: int, device: torch.device) -> str | None:
    """The shipped recipe of most parameters that fits at a microbatch of one row."""
    best: tuple[int, Path] | None = None
    for path in sorted(YAMLS.glob("*.yaml")):
        recipe = load(TrainRecipe, path)
        recipe.fill()
        try:
            need = estimate(with_guessed_vocabulary(recipe), world_size, device=device)
        except UserError:  # a mesh that these processes cannot form
            continue
        if need.total(1) <= USABLE * available and (best is None or need.parameters > best[0]):
            best = (need.parameters, path)
    return recipe_name(best[1]) if best else None


def with_guessed_vocabulary(recipe: TrainRecipe) -> TrainRecipe:
    """A filled copy whose vocabulary is guessed, to estimate before any text is read."""
    if recipe.model.vocab_size is not None:
        return recipe
    model = dataclasses.replace(recipe.model)
    model.fill(vocab_size=guess_vocab_size(recipe.tokenizer))
    return dataclasses.replace(recipe, model=model)
