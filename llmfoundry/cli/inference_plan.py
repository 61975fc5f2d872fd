"""What fits of an evaluation, a conversation or a server: weights, KV cache and sequences.

Entry points: `memory_lines`, which `plan.py eval` prints for a recipe, and `run_memory_lines`,
which `--dry-run` prints for a run. Nothing is loaded; the model is built on the meta device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import torch

from llmfoundry.builders.model import build_root, loaded_precision
from llmfoundry.builders.model_layout import layout_text, without_activations
from llmfoundry.builders.open_model import is_adapter, is_hugging_face
from llmfoundry.checkpoint.object_storage import is_url
from llmfoundry.checkpoint.open_run import find_place
from llmfoundry.checkpoint.verify import find_checkpoint
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.local_ranks import local_ranks
from llmfoundry.distributed.process_group import ALONE, World
from llmfoundry.errors import UserError
from llmfoundry.loggers.console import format_gib
from llmfoundry.models.decoder import Decoder
from llmfoundry.plan.inference import InferenceMemory, inference_memory
from llmfoundry.plan.memory import GIB
from llmfoundry.plan.microbatch_sizes import USABLE, memory_of_gpu, memory_of_process
from llmfoundry.recipe.after_training import EvalRecipe, SamplingRecipe, ServeRecipe
from llmfoundry.recipe.checks import divisors
from llmfoundry.recipe.finetune import FinetuneRecipe, load_run
from llmfoundry.recipe.hardware import Hardware
from llmfoundry.recipe.parallel import Degrees, limits
from llmfoundry.recipe.train import ResolvedTrainRecipe
from llmfoundry.terminal import ignore_line

MOST_GPUS = 4096  # of the smallest number that fits


def memory_lines(
    recipe: ResolvedTrainRecipe,
    processes: int,
    room: int,
    device: torch.device,
    *,
    slots: int | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield lines about the memory of each process, by label.

    Args:
        recipe: resolved, with the vocabulary, the layout and the precision of the loaded weights.
        processes: number of processes.
        room: bytes that each may use.
        device: device type of the processes.
        slots: number of sequences that a server answers at the same time; None: not a server.

    Raises:
        UserError: the layout does not suit the model, or the model does not fit.
    """
    degrees = recipe.parallel.degrees(processes)
    problems = list(limits(recipe.model, recipe.parallel, degrees))
    if problems:
        raise UserError(*problems)
    model = build_root(recipe).model
    need = _need(recipe, model, degrees, device)
    length = recipe.max_seq_len
    yield "layout", layout_text(degrees) or "one process with the full model"
    yield "weights", _weights(recipe, model, need)
    each = format_gib(need.cache * length / GIB)
    yield "KV cache", f"{need.cache / 1024:,.0f} KiB a token, {each} for {length:,} tokens"
    if need.fixed + need.cache + need.activations > room:
        raise UserError(_does_not_fit(recipe, model, degrees, need, room, device))
    if slots is not None:
        yield "slots", _slots(need, slots, length, room)
    tokens = (room - need.fixed) // (need.cache + need.activations)
    free = f"{format_gib(room / GIB)} may be used"
    if tokens < length:
        yield "fits", f"sequences of {tokens:,} tokens, one at a time; {free}"
    else:
        rows = f"{tokens // length:,} sequences of {length:,} tokens at a time"
        total = format_gib(need.total(tokens // length * length) / GIB)
        yield "fits", f"{rows} on each data rank, {total}; {free}"


def run_memory_lines(
    name: str,
    command: EvalRecipe | SamplingRecipe | ServeRecipe,
    hardware: Hardware | None,
    *,
    replicas: bool = False,
    slots: int | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield `memory_lines` of a run on this machine, or on other hardware.

    Nothing is estimated for other models, adapters and runs in an object store.

    Args:
        name: the run or checkpoint.
        command: the recipe of the command, with layout and precision.
        hardware: GPUs that are not here; None: this machine.
        replicas: whether ranks with full models share the work.
        slots: see `memory_lines`.
    """
    if is_hugging_face(name) or is_adapter(name) or is_url(name):
        return
    checkpoint = find_checkpoint(find_place(name, "checkpoint", ALONE), note=ignore_line)
    assert checkpoint is not None, "found before"
    user_recipe = load_run(checkpoint.folder / "recipe.yaml")
    if isinstance(user_recipe, FinetuneRecipe):
        return  # the shape of its model is that of the base

    # the run's model in the layout of the command
    recipe = user_recipe.resolve()
    recipe.model.fill(vocab_size=Tokenizer.load(checkpoint.folder / "tokenizer").vocab_size)
    recipe.parallel = without_activations(command.parallel).resolve()
    if isinstance(command, ServeRecipe) and command.max_seq_len is not None:
        recipe.max_seq_len = command.max_seq_len

    # processes, memory and precision, here or on the other hardware
    if hardware is not None:
        world = World(0, hardware.gpus, 0, torch.device("cuda"))
        room = int(USABLE * memory_of_gpu(hardware))
    else:
        default = local_ranks(command.parallel, replicas=replicas)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        world = World(0, int(os.environ.get("WORLD_SIZE", default)), 0, device)
        room = int(USABLE * memory_of_process(world))
    recipe.precision = loaded_precision(command.precision, recipe.precision, world, ignore_line)
    yield from memory_lines(recipe, world.size, room, world.device, slots=slots)


def _need(
    recipe: ResolvedTrainRecipe, model: Decoder, degrees: Degrees, device: torch.device
) -> InferenceMemory:
    return inference_memory(
        model,
        recipe.model,
        degrees,
        precision=recipe.precision,
        seq_len=recipe.max_seq_len,
        device=device,
    )


def _weights(recipe: ResolvedTrainRecipe, model: Decoder, need: InferenceMemory) -> str:
    full = sum(p.nbytes for p in model.parameters())
    line = f"{recipe.precision}: {format_gib(need.weights / GIB)} a process"
    line += f" of {format_gib(full / GIB)}" if need.weights < full else ""
    if need.gathered:
        line += f", and {format_gib(need.gathered / GIB)} that FSDP gathers at a time"
    return f"{line}; logits {format_gib(need.logits / GIB)}"


def _slots(need: InferenceMemory, slots: int, length: int, room: int) -> str:
    cache = slots * length * need.cache
    line = f"{slots} x {length:,} tokens: {format_gib(cache / GIB)} of keys and values"
    fitting = max(0, room - need.fixed) // (length * need.cache)
    return line if slots <= fitting else f"{line}, which do not fit; {fitting} slots do"


def _does_not_fit(
    recipe: ResolvedTrainRecipe,
    model: Decoder,
    degrees: Degrees,
    need: InferenceMemory,
    room: int,
    device: torch.device,
) -> str:
    """Return the error line, with the smallest number of fully sharded processes that fits."""
    line = (
        f"checkpoint: weights and logits take {format_gib(need.fixed / GIB)} a process"
        f" ({layout_text(degrees) or 'the full model'}), and {format_gib(room / GIB)} may be used"
    )
    experts = recipe.model.ffn_config.moe_num_experts or 1
    for count in _powers_of_two(MOST_GPUS):
        expert = max(n for n in divisors(experts) if count % n == 0) if experts > 1 else 1
        sharded = replace(Degrees(), shard=count, expert=expert)
        if _need(recipe, model, sharded, device).total(recipe.max_seq_len) <= room:
            spread = f"parallel.data_parallel_shard_degree={count}"
            spread += f" parallel.expert_parallel_degree={expert}" if expert > 1 else ""
            return f"{line}; {count} such processes suffice: {spread}"
    return f"{line}; no number of processes suffices"


def _powers_of_two(most: int) -> Iterator[int]:
    count = 1
    while count <= most:
        yield count
        count *= 2
