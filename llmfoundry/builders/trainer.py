"""Construction of a `Trainer` from a recipe. Entry point: `build_trainer`, in six stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from llmfoundry.builders.adapter import (
    adapt,
    lora_plus_ratio,
)
from llmfoundry.builders.callbacks import build_callbacks
from llmfoundry.builders.compilation import settle_compile
from llmfoundry.builders.data import RunData, few_rows_lines, open_data
from llmfoundry.builders.evaluation import build_evaluate, build_objective
from llmfoundry.builders.microbatch import build_limit, settle_microbatch
from llmfoundry.builders.model import (
    attention_refusal,
    build_autocast,
    build_root,
    experts_refusal,
    matmul_dtype,
    served_precision,
)
from llmfoundry.builders.preference import open_reference, with_places
from llmfoundry.builders.preflight import check_run
from llmfoundry.builders.pretrained import MODEL, PretrainedModel, model_yaml
from llmfoundry.builders.registry import best_saved, registration
from llmfoundry.builders.resume import (
    StartPoint,
    check_same_recipe,
    check_same_rows,
    fill_weights,
    find_start,
    roll_back,
    run_identity,
)
from llmfoundry.builders.run_context import NOTHING, Additions, RunContext, eval_rows
from llmfoundry.builders.save_adapter import adapter_writer
from llmfoundry.builders.teacher import with_teacher
from llmfoundry.checkpoint.load import read_state
from llmfoundry.checkpoint.save import Checkpointer, Contents, Reports, SavePolicy
from llmfoundry.checkpoint.storage import Checkpoint, Storage, batch_of
from llmfoundry.data.loader import Loader, SequenceFormat
from llmfoundry.data.order import Mixture, Phase
from llmfoundry.data.preparation.build_tokenizer import tokenizer_summary
from llmfoundry.data.sources import tokens_left_out
from llmfoundry.data.text.chat_template import NAMED
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.activation_checkpoint import check_compiler, check_format
from llmfoundry.distributed.apply import parallelize
from llmfoundry.distributed.collectives import (
    check_same_on_all_ranks,
    on_all_ranks,
    on_rank0,
)
from llmfoundry.distributed.context import token_sharding
from llmfoundry.distributed.fsdp import apply_ddp
from llmfoundry.distributed.mesh import Meshes, build_mesh, with_mesh
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError, enough_memory
from llmfoundry.events import CHECKPOINTS, read_events
from llmfoundry.events import NAME as EVENTS
from llmfoundry.gauntlet.gauntlet import Gauntlet, TaskAnswers
from llmfoundry.gauntlet.results import GauntletResult
from llmfoundry.loggers.console import duration, percent
from llmfoundry.loggers.tracker import Tracker
from llmfoundry.models.counts import active_parameter_count, gpu_here
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.models.float8 import float8_refusal, use_float8, use_float8_experts
from llmfoundry.models.init import padded_rows
from llmfoundry.models.quantized import value_count
from llmfoundry.models.tensor_parallel import all_stacked_rows
from llmfoundry.ops.moe.fp8 import method_of
from llmfoundry.plan.communication import spanning
from llmfoundry.plan.fit import (
    check_workers,
    checkpointing_line,
    choose_fit,
    load_line,
    with_guessed_vocabulary,
)
from llmfoundry.plan.microbatch_sizes import memory_of_process
from llmfoundry.plan.search import ActivationChoice, Fit
from llmfoundry.plan.seconds import in_seconds, speeds, step_seconds
from llmfoundry.recipe.checks import Clock, Duration
from llmfoundry.recipe.choice_table import load_code
from llmfoundry.recipe.eval import EMA
from llmfoundry.recipe.finetune import ResolvedFinetuneRecipe
from llmfoundry.recipe.loss import LOSSES
from llmfoundry.recipe.model import HFModelConfig
from llmfoundry.recipe.parallel import EXPERT, compiled_limits, limits, node_size, recomputation
from llmfoundry.recipe.train import ResolvedTrainRecipe
from llmfoundry.recipe.typed import to_yaml
from llmfoundry.train.average import AveragedWeights
from llmfoundry.train.distillation import build_distillation
from llmfoundry.train.objective import CrossEntropy, Objective
from llmfoundry.train.optim.optimizers import build_optimizer, freeze
from llmfoundry.train.out_of_memory import NAME as OUT_OF_MEMORY
from llmfoundry.train.own_loss import OwnLoss
from llmfoundry.train.step import StepSettings
from llmfoundry.train.trainer import Trainer


def build_trainer(
    recipe: ResolvedTrainRecipe,
    world: World,
    tracker: Tracker,
    run: Storage,
    *,
    pretrained: PretrainedModel | None = None,
    additions: Additions = NOTHING,
) -> tuple[Trainer, RunContext]:
    """Build all components of a run; return a trainer ready to `fit`, and the run's context.

    Args:
        recipe: resolved recipe; in fine-tuning with the shape of the pretrained model.
        world: this process.
        tracker: record and console of the run.
        run: storage of the run.
        pretrained: the model that fine-tuning begins with.
        additions: what a program adds to the recipe.

    Raises:
        UserError: the recipe cannot be run; nothing has been trained.
    """
    note = tracker.note
    # 1. Join the mesh, and check this machine, before any text is read.
    world, meshes = _join_mesh(recipe, world, note)
    model = None if pretrained is None else sketch(_with_new_rows(recipe, pretrained.tokenizer))
    fit = _memory_fit(recipe, world, model)
    # 2. Find the checkpoint to resume from, and open the data and its loader.
    start = find_start(recipe, run, world, note)
    tokenizer, gauntlet = check_run(recipe, start, world, note, pretrained)
    data, clock, loader = open_batches(recipe, tokenizer, world, note)
    # 3. Build the model, with a microbatch that fits the memory.
    chosen = _fitted(recipe, fit, start, run, world, note, steps=clock.total)
    root = build_model(recipe, world, meshes, note, checkpoint=start.checkpoint)
    job = RunContext(recipe, world, tokenizer, data, root, chosen.microbatch, note, run)
    # 4. Build the optimizer.
    optimizer = make_optimizer(recipe, root)
    check_same_rows(loader, data.validation, tokenizer, world)
    # 5. Load the weights, and with them the state of the run.
    average = None if recipe.ema.decay is None else AveragedWeights(root, recipe.ema.decay)
    fill = None if pretrained is None else pretrained.fill
    identity, state = _load_weights(job, start, optimizer, loader, clock, fill, average)
    _note_costs(job, loader, clock)
    # 6. Build the loop. The record is opened last, because nothing can be rejected afterwards.
    module = apply_ddp(root, meshes)
    objective = _own_loss(recipe, additions) or build_objective(job)
    trainer = Trainer(
        recipe=recipe,
        world=world,
        root=root,
        module=module,
        optimizer=optimizer,
        loader=loader,
        clock=clock,
        settings=step_settings(recipe, world, root, job.microbatch, objective),
        bytes_per_token=data.bytes_per_token,
        tracker=tracker,
        checkpointer=build_checkpointer(job, tracker, start),
        roll_back=roll_back,
        evaluate=build_measure(job, tracker, gauntlet, average, resumed=state["batch"] > 0),
        identity=identity,
        average=average,
        callbacks=[*build_callbacks(job), *additions.callbacks],
        memory=build_limit(job, module),
        state=state,
    )
    _open_record(trainer, job, tracker)
    return trainer, job


def _load_weights(
    job: RunContext,
    start: StartPoint,
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    clock: Clock,
    fill: Callable[[Decoder], None] | None,
    average: AveragedWeights | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load the weights; return the identity of the run and its state.

    A reference model's log-probabilities are computed before and after.
    """
    identity = run_identity(job)
    reference = open_reference(job, job.prepared, start, fill)
    state = fill_weights(
        job, start, optimizer, identity, loader, total=clock.total, fill=fill, average=average
    )
    return identity | reference.begin(), state


def open_batches(
    recipe: ResolvedTrainRecipe, tokenizer: Tokenizer, world: World, note: Callable[[str], None]
) -> tuple[RunData, Clock, Loader]:
    """Return the data of a run, its length, and the loader of its batches."""
    data = _open_data(recipe, tokenizer, world, note)
    clock = build_clock(recipe, data)
    return data, clock, build_loader(recipe, data, clock, tokenizer, world)


def _own_loss(recipe: ResolvedTrainRecipe, additions: Additions) -> Objective | None:
    """The loss that a program or a plugin has; None: another one of the recipe's."""
    if additions.loss is not None:
        return OwnLoss(additions.loss, recipe.loss.name)
    if not recipe.loss.is_own:
        return None
    function = load_code(LOSSES[recipe.loss.name].make)
    return OwnLoss(partial(function, **recipe.loss.kwargs), recipe.loss.name)


def make_optimizer(recipe: ResolvedTrainRecipe, root: Root) -> Optimizer:
    """Return the recipe's optimizer for the trained parameters of the model."""
    return build_optimizer(
        root.model,
        recipe.optimizer,
        lora_plus_ratio=lora_plus_ratio(recipe),
        matmul_dtype=matmul_dtype(recipe.precision),
    )


def step_settings(
    recipe: ResolvedTrainRecipe,
    world: World,
    root: Root,
    microbatch: int,
    objective: Objective | None = None,
) -> StepSettings:
    """Return the settings that all steps share; `objective` None: the section `loss` has it."""
    return StepSettings(
        microbatch=microbatch,
        autocast=build_autocast(recipe.precision, world.device),
        clipping=recipe.gradient_clipping,
        objective=objective
        or build_distillation(recipe.loss)
        or CrossEntropy(recipe.loss.z_loss_weight),
        data_group=world.data_group,
        token_group=world.token_group,
        shard_tokens=token_sharding(root),
        reduce_scatter_each=recipe.parallel.reduce_scatter_each_microbatch is not False,
    )


def _join_mesh(
    recipe: ResolvedTrainRecipe, world: World, note: Callable[[str], None]
) -> tuple[World, Meshes | None]:
    """Return this process with the groups of its layout, after all ranks agree on the recipe."""
    check_same_recipe(recipe, world)  # first: the collectives below depend on the recipe
    recipe.precision = served_precision(recipe.precision, world, note)
    if recipe.parallel.expert_parallel_degree == -1:
        degrees = {f"parallel.{EXPERT}": str(node_size())}
        check_same_on_all_ranks(
            world, degrees, advice="nodes have other numbers of processes; write a number"
        )
    check_layout(recipe, world)
    meshes = build_mesh(recipe.parallel, world)
    return with_mesh(world, meshes), meshes


def _memory_fit(
    recipe: ResolvedTrainRecipe, world: World, trained: Decoder | None
) -> Callable[..., Fit]:
    """Call `choose_fit` on all ranks, after checking that each machine can run the recipe.

    `trained` is the model of fine-tuning on the meta device.
    """
    gpu = on_rank0(world, lambda: gpu_here(world.device))
    fit = partial(
        choose_fit,
        world_size=world.size,
        available=memory_of_process(world),
        device=world.device,
        meta_model=trained,
        reached=None if gpu is None else speeds(gpu, recipe),
    )
    on_all_ranks(world, partial(_check_machine, recipe, world, fit))
    return fit


def _fitted(
    recipe: ResolvedTrainRecipe,
    fit: Callable[..., Fit],
    start: StartPoint,
    run: Storage,
    world: World,
    note: Callable[[str], None],
    *,
    steps: int,
) -> Fit:
    """Return the fit of a recipe, and set the recipe's `auto` to its choice; `note` reports why.

    The microbatch is the one that the run begins with. `steps` is the length of the run.
    """
    parallel, begun_with, saved = recipe.parallel, None, start.checkpoint
    if saved is not None and not start.weights_only:
        state = on_rank0(world, lambda: read_state(saved))
        begun_with = ActivationChoice.of_keys(
            state.get("activation_checkpointing", "none"),
            state.get("activation_compression", "none"),
            state.get("activation_checkpointing_target"),
        )
    chosen = fit(recipe, begun_with=begun_with)
    if "auto" in (parallel.activation_checkpointing, parallel.activation_compression):
        note(checkpointing_line(recipe, chosen, begun_with))
    if line := load_line(recipe, chosen, world.size):
        note(line)
    for key, value in chosen.choice.settings().items():
        setattr(parallel, key, value)
    # before the microbatch, whose remembered and measured sizes are of a run that compiles or not
    settle_compile(recipe, world, start, steps=steps, microbatch=chosen.microbatch, note=note)
    free = memory_of_process(world)
    return settle_microbatch(recipe, chosen, run, world, available=free, note=note)


def _check_machine(recipe: ResolvedTrainRecipe, world: World, fit: Callable[..., Fit]) -> None:
    """Check what may be missing on this machine, before any text is read."""
    fit(with_guessed_vocabulary(recipe))
    check_workers(recipe.data, world)
    check_kernels(recipe, world.device)


def _open_data(
    recipe: ResolvedTrainRecipe, tokenizer: Tokenizer, world: World, note: Callable[[str], None]
) -> RunData:
    """Open the recipe's data and report its size."""
    data = with_places(open_data(recipe, tokenizer, world), recipe)
    data = with_teacher(data, recipe, tokenizer, world)
    for line in data.summary.splitlines():
        note(line)
    return data


def _note_costs(job: RunContext, loader: Loader, clock: Clock) -> None:
    """Report the cost of communication between nodes, and repetition of small or mixed data."""
    gpu, batches = gpu_here(job.world.device), clock.total
    spans = spanning(job.recipe, job.world.size, job.microbatch, node_size(), gpu)
    passes = chain(mixture_lines(loader, batches), few_rows_lines(job.recipe, job.prepared, clock))
    for line in chain(spans, passes, _predicted(job, batches)):
        job.note(line)


def _predicted(job: RunContext, batches: int) -> Iterator[str]:
    """Yield a line with the estimated step time, if the GPU is known and all weights train."""
    gpu, recipe = gpu_here(job.world.device), job.recipe
    if gpu is None or isinstance(recipe, ResolvedFinetuneRecipe):
        return
    step = step_seconds(recipe, job.world.size, job.microbatch, speeds(gpu, recipe))
    yield (
        f"by the plan: {in_seconds(step.total)} a step, MFU {percent(step.mfu(gpu))};"
        f" {batches:,} steps take {duration(batches * step.total)}"
    )


def _open_record(trainer: Trainer, job: RunContext, tracker: Tracker) -> None:
    """Open the record; an earlier run in the folder is deleted under save_overwrite."""
    if job.recipe.save_overwrite and job.world.is_main:
        job.run.remove_all()
        for name in (EVENTS, OUT_OF_MEMORY):
            (job.run.folder / name).unlink(missing_ok=True)
    first, clock = trainer.first_batch, trainer.clock
    tracker.start(first, total=clock.total, facts=banner(job, trainer.loader, clock, first))
    bad_rows = job.prepared.bad_rows
    if bad_rows and job.world.is_main:
        known = {event["what"] for event in read_events(job.run.folder)}
        for line in bad_rows:
            if line not in known:  # a previous attempt may have written it
                tracker.keep_event("bad_rows", line, "left out", step=None, action="drop")


@enough_memory(
    "model: its weights ran out of memory; write a smaller one, or spread it with"
    " parallel.data_parallel_shard_degree"
)
def build_model(
    recipe: ResolvedTrainRecipe,
    world: World,
    meshes: Meshes | None,
    note: Callable[[str], None],
    *,
    checkpoint: Checkpoint | None = None,
) -> Root:
    """Build the sharded model with allocated, uninitialized weights. The order of steps matters.

    `checkpoint` is the checkpoint that the run resumes from.
    """
    root = build_root(recipe)
    folder = None if checkpoint is None else checkpoint.folder
    adapt(root.model, recipe, note=note, checkpoint=folder)
    freeze(root.model, recipe.optimizer)
    _compute_in_float8(root.model, recipe, world.device, note)
    parallelize(
        root,
        world,
        meshes,
        recipe.parallel,
        precision=recipe.precision,
        compile_mode=recipe.compile_mode,
    )
    return root


def _compute_in_float8(
    model: Decoder,
    recipe: ResolvedTrainRecipe,
    device: torch.device,
    note: Callable[[str], None],
) -> None:
    if recipe.fp8_recipe is None:
        return
    emulate = bool(recipe.fp8_emulate)
    names = use_float8(model, recipe.fp8_recipe, emulate=emulate)
    slow = "" if recipe.compile else "; without compile: true it is slower than amp_bf16"
    layers, rest = f"{len(names)} linear layers of blocks", ""
    if recipe.model.ffn_config.ffn_type == "dmoe":
        reason = use_float8_experts(model, device, emulate=emulate)
        method = method_of(device, emulate=emulate)
        layers += "" if reason is not None else f" and all experts ({method})"
        rest = "" if reason is None else f"; experts stay bf16: {reason}"
    note(
        f"precision: amp_fp8 ({recipe.fp8_recipe}): {layers} in fp8{rest}; MFU is not shown, as its"
        f" peak would be of bf16 alone{slow}"
    )


def _with_new_rows(recipe: ResolvedTrainRecipe, tokenizer: Tokenizer) -> ResolvedTrainRecipe:
    """Return a copy of a recipe with the rows that `fit_vocabulary` will add for its tokens."""
    if not isinstance(recipe, ResolvedFinetuneRecipe) or not recipe.base.resize_embeddings:
        return recipe
    grown = copy(recipe)
    grown.model = copy(recipe.model)
    of_template = NAMED.get(recipe.tokenizer.chat_template or "", ())
    new_tokens = tokenizer.missing([*recipe.tokenizer.add_tokens, *of_template])
    tokens = tokenizer.vocab_size + len(new_tokens)
    if tokens > recipe.model.vocab_size:
        grown.model.vocab_size = padded_rows(tokens)
        if isinstance(grown.model, HFModelConfig):
            rows = {"vocab_size": grown.model.vocab_size}
            grown.model.hf_config = grown.model.hf_config | rows
    return grown


def sketch(recipe: ResolvedTrainRecipe) -> Decoder:
    """Return the model of fine-tuning on the meta device, to count its memory."""
    root = build_root(recipe)
    adapt(root.model, recipe)
    freeze(root.model, recipe.optimizer)
    return root.model


def build_measure(
    job: RunContext,
    tracker: Tracker,
    gauntlet: Gauntlet | None,
    average: AveragedWeights | None,
    *,
    resumed: bool,
) -> Callable[[int], dict[str, float]]:
    """Return `build_evaluate` of a run, whose gauntlet results are logged and recorded.

    With `eval.weights: ema` it evaluates the `average`.
    """

    def record(batch: int, result: GauntletResult, _: list[TaskAnswers]) -> None:
        tracker.gauntlet(batch, result.to_json())
        tracker.console.table(result.table())

    rows = eval_rows(job.recipe, job.microbatch)
    config = job.recipe.eval
    if job.recipe.eval_first and not config.validation and config.gauntlet is None:
        job.note("eval_first: nothing is measured, as eval.validation and eval.gauntlet are off")
    measure = build_evaluate(
        job, config, gauntlet=gauntlet, rows=rows, record=record, resumed=resumed
    )
    if average is None or config.weights != EMA:
        return measure

    def measure_average(batch: int) -> dict[str, float]:
        with average.in_place():
            return measure(batch)

    return measure_average


def check_layout(recipe: ResolvedTrainRecipe, world: World) -> None:
    """Check that the degrees match the number of ranks and the model."""
    degrees = recipe.parallel.degrees(world.size)
    problems = list(limits(recipe.model, recipe.parallel, degrees))
    if recipe.compile is True and not problems:
        problems = list(compiled_limits(recipe.model, recipe.parallel))
    if problems:
        raise UserError(*problems)


def check_kernels(recipe: ResolvedTrainRecipe, device: torch.device) -> None:
    """Check attention, experts and compilation on this device, before any text is read."""
    reason = attention_refusal(recipe, device)
    if reason is not None:
        raise UserError(f"model.attn_config.attn_impl: {reason}")
    reason = experts_refusal(recipe, device)
    if reason is not None:
        raise UserError(f"model.ffn_config.moe_impl: {reason}")
    check_format(recipe.parallel.activation_compression, device)
    check_precision(recipe)
    if recipe.fp8_recipe is not None and not recipe.fp8_emulate:
        reason = float8_refusal(device)
        if reason is not None:
            raise UserError(f"precision: amp_fp8: {reason}")
    if recipe.compile_mode is not None:
        if device.type == "cpu" and recipe.parallel.activation_checkpointing == "selective":
            raise UserError(
                "parallel.activation_checkpointing: selective with compile: true is for GPUs, a"
                " CPU's attention over packed rows is not compiled under it; write whole or none"
            )
        check_compiler(recipe.compile_mode, device)


def check_precision(recipe: ResolvedTrainRecipe) -> None:
    """Check that the model and the adapter have the recipe's precision, on any device."""
    is_foreign = isinstance(recipe.model, HFModelConfig)
    if recipe.residual_dtype == "bf16" and is_foreign:
        raise UserError("residual_dtype: bf16 is for our own decoder; write fp32")
    if recipe.fp8_recipe is None:
        return
    if is_foreign:
        raise UserError("precision: amp_fp8 is for our own decoder; write amp_bf16")
    if isinstance(recipe, ResolvedFinetuneRecipe) and recipe.adapter.name != "none":
        raise UserError(
            "precision: amp_fp8 has no effect on adapters' frozen layers; write amp_bf16"
        )


def build_clock(recipe: ResolvedTrainRecipe, data: RunData) -> Clock:
    """Return the clock, which knows the batches in each unit of time."""
    size = recipe.global_train_batch_size
    return Clock(
        samples_per_batch=size,
        tokens_per_batch=size * recipe.max_seq_len,
        batches_per_epoch=data.epoch_rows / size,
        max_duration=Duration.parse(recipe.max_duration),
    )


def build_phases(recipe: ResolvedTrainRecipe, data: RunData, clock: Clock) -> list[Phase]:
    """Return the initial proportions and each of the recipe's phases with its first step."""
    phases, before = [Phase(0, data.weights)], 0.0
    for n, phase in enumerate(recipe.data.phases):
        at = clock.batches(phase.at)
        if at < before:
            raise UserError(
                f"data.phases[{n}].at: {phase.at} lies before the phase above it; write the phases"
                " in the order in which they begin"
            )
        shares = zip(data.streams, data.units, strict=True)
        weights = tuple(float(phase.proportions.get(s.name, 0)) / unit for s, unit in shares)
        phases.append(Phase(math.ceil(at - 1e-9), weights))
        before = at
    return phases


def build_loader(
    recipe: ResolvedTrainRecipe, data: RunData, clock: Clock, tokenizer: Tokenizer, world: World
) -> Loader:
    """Return the loader of this rank's part of every global batch."""
    mixture = Mixture(
        [stream.name for stream in data.streams],
        build_phases(recipe, data, clock),
        batch_size=recipe.global_train_batch_size,
        per_stream=recipe.data.batching_method == "per_stream",
    )
    return Loader(
        data.streams,
        mixture,
        SequenceFormat(
            seq_len=recipe.max_seq_len,
            eos_id=tokenizer.eos_id,
            vocab_size=tokenizer.vocab_size,
            attend_across_documents=recipe.data.attend_across_documents,
        ),
        data_rank=world.data_rank,
        data_size=world.data_size,
        workers=recipe.data.loader_workers,
        prefetch_factor=recipe.data.prefetch_factor,
        allow_changed=recipe.data.allow_changed,
    )


def mixture_lines(loader: Loader, total: int) -> list[str]:
    """Return a line for each of several streams: its share of `total` batches, and its epochs."""
    streams, samples = loader.streams, loader.mixture.consumed(total)
    if len(streams) == 1:
        return []
    return [
        f"data.streams.{stream.name}: {stream.n_rows:,} rows; {n / sum(samples):.1%} of the run,"
        f" {n / stream.n_rows:.2f} epochs"
        for stream, n in zip(streams, samples, strict=True)
    ]


def build_checkpointer(job: RunContext, tracker: Tracker, start: StartPoint) -> Checkpointer:
    """Return the writer of checkpoints, which contain the user's recipe and the tokenizer."""
    checkpoint = None if job.recipe.save_overwrite else start.checkpoint
    is_own = checkpoint is not None and checkpoint.folder.parent == job.run.folder / CHECKPOINTS

    # contents of each checkpoint, apart from tensors and state
    files = {"recipe.yaml": to_yaml(job.recipe.user_recipe)}
    files |= {f"tokenizer/{name}": text for name, text in job.tokenizer.files().items()}
    if isinstance(job.recipe, ResolvedFinetuneRecipe):
        files[MODEL] = model_yaml(job.recipe.model)
    stacked = all_stacked_rows(job.root.model)

    def failed(batch: int, seen: str, done: str) -> None:
        tracker.event("save_failed", seen, done, step=batch, action="log")

    # registered versions
    best, record = job.recipe.registry.best, job.run.folder / "metrics.jsonl"
    task = registration(job.recipe, job.run)
    return Checkpointer(
        job.run,
        job.world,
        Contents(files, stacked, adapter_writer(job)),
        SavePolicy(
            keep=job.recipe.save_num_checkpoints_to_keep,
            background=job.recipe.save_async,
            max_failures=job.recipe.save_max_failures,
            max_wait=job.recipe.save_max_wait,
            choose_best=partial(best_saved, record, best) if best.metric is not None else None,
        ),
        Reports(
            tracker.console.warn,
            tracker.note,
            failed,
            saved=partial(tracker.registry, task) if task is not None else None,
        ),
        saved=batch_of(checkpoint.folder) if checkpoint is not None and is_own else -1,
    )


def banner(
    job: RunContext, loader: Loader, clock: Clock, first_batch: int
) -> list[tuple[str, str]]:
    """Return the description of a run for the top of its console output."""
    recipe, world = job.recipe, job.world

    # model
    parameters = value_count(job.root)
    size = f"{parameters:,} parameters"
    if recipe.model.ffn_config.ffn_type == "dmoe":
        size += f", {active_parameter_count(recipe.model):,} active"

    # computation
    precision = recipe.precision if recipe.fp8_recipe is None else "amp_fp8"
    how = f"{precision}, microbatch {job.microbatch}"
    again = recomputation(recipe.parallel.activation_checkpointing)
    if again != "none":
        how += f", activation checkpointing: {again}"
        if recipe.parallel.activation_checkpointing_target is not None:
            how += f" of {recipe.parallel.activation_checkpointing_target}"
    if recipe.parallel.activation_compression != "none":
        how += f", activations in {recipe.parallel.activation_compression}"
    if recipe.compile:
        how += f", blocks compiled ({recipe.compile_mode}): the first step takes a minute for it"

    # data and device
    left_out = tokens_left_out(loader.streams)
    rest = f"; the last partial sequence ({left_out:,} tokens) is dropped" if left_out else ""
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    return [
        ("run", str(job.run)),
        ("model", f"{recipe.model.name}, {size}"),
        ("tokenizer", tokenizer_summary(job.tokenizer, recipe.tokenizer)),
        ("data", f"{loader.n_rows:,} sequences of {recipe.max_seq_len:,} tokens{rest}"),
        (
            "length",
            f"{clock.total:,} batches of {clock.tokens_per_batch:,} tokens"
            f" ({clock.total / clock.batches_per_epoch:.2f} epochs)"
            + (f", {first_batch:,} done" if first_batch else ""),
        ),
        ("device", f"{world.size} x {device}, {how}"),
    ]
