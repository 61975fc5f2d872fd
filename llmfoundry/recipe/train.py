"""`TrainRecipe`: all settings of a training run.

`scripts/train.py` reads one. Each section checks its own keys; `TrainRecipe.check` adds conflicts
between sections.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, TypeVar

from llmfoundry.recipe.checks import check_duration
from llmfoundry.recipe.data import (
    PRETRAINED,
    TOKENIZERS,
    DataConfig,
    ResolvedTokenizerConfig,
    TokenizerConfig,
)
from llmfoundry.recipe.eval import EMA, WEIGHTS, EvalConfig
from llmfoundry.recipe.launch import LaunchConfig
from llmfoundry.recipe.logger import (
    CallbacksConfig,
    LoggerConfig,
    ProfileConfig,
    ResolvedCallbacksConfig,
    ResolvedLoggerConfig,
    ResolvedProfileConfig,
)
from llmfoundry.recipe.loss import LossConfig, ResolvedLossConfig
from llmfoundry.recipe.model import ModelConfig, ResolvedModelConfig
from llmfoundry.recipe.optimizer import (
    EmaConfig,
    GradientClippingConfig,
    OptimizerConfig,
    ResolvedOptimizerConfig,
)
from llmfoundry.recipe.parallel import (
    AXES,
    EXPERT,
    ParallelConfig,
    ResolvedParallelConfig,
    compiled_limits,
    limits,
)
from llmfoundry.recipe.registry import RegistryConfig
from llmfoundry.recipe.resilience import (
    HangConfig,
    HealthCheckConfig,
    ResolvedHangConfig,
    SuperviseConfig,
)
from llmfoundry.recipe.resolve import copy_as
from llmfoundry.recipe.schedule import ResolvedScheduleConfig, ScheduleConfig
from llmfoundry.recipe.schema import (
    AUTO_ROWS,
    LENGTH,
    PATH,
    ROWS,
    RUN_NAME,
    Only,
    Range,
    Unless,
    check_fields,
    choice,
)
from llmfoundry.recipe.source import COMPARED
from llmfoundry.recipe.typed import flat, keep_origin

PRECISIONS = ("fp32", "amp_bf16", "bf16", "amp_fp8")
FP8_RECIPES = ("rowwise", "tensorwise")
FP8 = PRECISIONS[-1]
RESIDUAL_DTYPES = ("fp32", "bf16")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
AUTO = "auto"  # of `compile`
GRAPH_MODES = ("reduce-overhead", "max-autotune")  # modes that record CUDA graphs
GRAPH_ADVICE = "write default or max-autotune-no-cudagraphs"

# Fields and sections that do not influence the result of training: file locations, logging, layout.
# Model and tokenizer may not change at all (builders.resume.run_identity).
NOT_LEARNT = re.compile(
    r"(plugins|run_name|pause_at|save_\w+|load_\w+|autoresume|deterministic|compile|compile_mode|device_\w+"
    r"|auto_probe"
    r"|eval_\w+|log_interval|model|tokenizer|parallel|eval|logger|profile|health_check|hang|supervise"
    r"|launch|registry"
    r"|callbacks(?!\.early_stopper|\.watch\.(loss_spike|gradient_spike|not_finite|spike|roll_back))"
    r"|data\.validation"
    r"|data\.(.*\.)?(paths|remote|local|storage_options|cache_\w+|prefetch|prefetch_factor"
    r"|download_\w+|requests_per_second|validate_hash|allow_changed|num_workers|loader_workers)"
    r")(\..*)?"
)


@dataclass
class TrainRecipe:
    """A training run; the same file serves a laptop and a cluster."""

    run_name: Annotated[str | None, RUN_NAME] = None
    """Name of the run; unset: the recipe file's name."""
    save_folder: Annotated[str, PATH] = "runs/${run_name}"
    """The run's folder: recipe.yaml, metrics.jsonl, report.html, tokenizer, checkpoints. Or a URL,
    s3://bucket/runs/${run_name} (also gs, az, oci): the run then works in save_local_folder, and
    uploads its files. data.storage_options, download_retry and download_timeout apply to the
    store."""
    save_local_folder: Annotated[str | None, PATH] = None
    """Used with a URL as save_folder: the folder on each machine below which the run works before
    files are uploaded; unset: runs/ in data.cache_folder."""
    save_local_copies: Annotated[int, Range(0, 1000)] = 0
    """Used with a URL as save_folder: number of newest checkpoints that also stay on the disks of
    the machines, so that a restart only downloads what lost machines had written."""
    seed: Annotated[int, Range(0)] = 17
    """Seed of the initial weights, the data order and every random number."""
    deterministic: bool = False
    """Use only deterministic kernels, which are slower on a GPU. A CPU is deterministic in any
    case."""
    precision: Annotated[str, choice(PRECISIONS)] = "amp_bf16"
    """amp_bf16: matrix multiplications in bfloat16, weights and sums in fp32; a CPU without
    bfloat16 instructions computes in fp32, which is logged. fp32: all computation in fp32. bf16:
    also weights, gradients and optimizer state in bfloat16, for half the memory, but small updates
    are lost. amp_fp8: as amp_bf16, with the dense linear layers of the blocks in 8-bit floating
    point (torchao, extra lowp), on GPUs that support it and with compile: true. On NVIDIA Hopper
    and Blackwell (compute capability 9 and 10) also experts (moe_impl: grouped_mm), but for the
    gradients of their weights. Their scales are rowwise on Hopper. On Blackwell they are MXFP8, one
    scale for 32 values. A line names why experts stay bf16. Head and routers stay bf16, and so do
    evaluation and export. Memory is estimated as for amp_bf16; a plan counts the time of these
    matmuls at the GPU's rate in 8 bits, and of their casts."""
    fp8_recipe: Annotated[str | None, choice(FP8_RECIPES), Only("precision", FP8)] = None
    """Granularity of the scales. rowwise (the default): one scale per row of an operand, more
    accurate. tensorwise: one scale per operand, faster."""
    fp8_emulate: Annotated[bool | None, Only("precision", FP8)] = None
    """Round to fp8 and compute in a wider dtype, slowly but on any device, to try the numerics.
    Default false."""
    residual_dtype: Annotated[
        str, choice(RESIDUAL_DTYPES), Only("precision", ("amp_bf16", FP8))
    ] = "fp32"
    """Residual stream and the output of its norms in training: fp32, or bf16 for fewer bytes moved
    and kept, as in torchtitan and OLMo-core. Weights, gradients of shards and optimizer state stay
    fp32, and evaluation of a finished run computes in fp32."""
    compile: Annotated[bool | str, choice((AUTO,), "true or false")] = AUTO
    """Compile each block with torch.compile: steps are faster after a first step that takes a
    minute. auto: on a GPU, if the steps of the run save more time than compiling takes; a resumed
    run keeps the choice."""
    compile_mode: Annotated[str | None, choice(COMPILE_MODES), Only("compile", True)] = None
    """Mode of torch.compile; default "default". reduce-overhead and max-autotune record CUDA
    graphs, which require GPUs, no sharding, and one microbatch per step."""
    max_duration: str = "1ep"
    """Length of the run, a duration: 100ba, 2e9tok, 1ep."""
    max_seq_len: Annotated[int, Range(2, 2**24, LENGTH)] = 2048
    """Length of a sequence in tokens."""
    global_train_batch_size: Annotated[int, ROWS] = 256
    """Sequences per optimizer step, over all ranks."""
    device_train_microbatch_size: Annotated[int | str, ROWS, AUTO_ROWS] = "auto"
    """Sequences that a rank processes at a time. auto: as many as fit according to the memory
    estimate. A step that runs out of memory continues with half of it, also if the size is a
    number."""
    auto_probe: Annotated[
        str,
        choice(("off", "on")),
        Only("device_train_microbatch_size", "auto"),
        Unless("compile_mode", GRAPH_MODES, why="whose steps have one microbatch"),
    ] = "off"
    """on: before the run, measure which microbatch fits. Each rank starts a process that takes real
    steps at the estimated size and above. The result is cached in data.cache_folder by recipe, code
    and machine. off: use the estimate, which saves one start of the processes; a microbatch that
    does not fit costs one step."""
    device_eval_batch_size: Annotated[int | str, ROWS, AUTO_ROWS] = "auto"
    """Sequences that a rank evaluates at a time; auto: as many as fit according to the memory
    estimate."""
    device_loss_chunk_tokens: Annotated[int | None, Range(1, 2**24)] = None
    """Number of tokens whose logits the loss holds at a time, at up to 12 bytes per token and
    vocabulary entry. Unset: 2 GiB of fp32 logits and at most 8,192 tokens on a GPU; 256 or more
    tokens on a CPU."""
    eval_interval: str = "500ba"
    """Interval of evaluations; a run is always evaluated at its end. 0ba: only at the end."""
    eval_first: bool = False
    """Also evaluate before the first step."""
    log_interval: str = "1ba"
    """Interval of log lines and metrics; the loss is the mean since the last line."""
    save_interval: str = "1000ba"
    """Interval of checkpoints; a run always saves one at its end. 0ba: only at the end."""
    save_num_checkpoints_to_keep: Annotated[int, Range(-1)] = -1
    """Number of newest checkpoints to keep; -1: all."""
    save_overwrite: bool = False
    """Start over in a folder that contains a run, and delete its checkpoints and metrics."""
    save_async: bool = True
    """Write a checkpoint in the background while training continues."""
    pause_at: str | None = None
    """Evaluate, save and end at this time, with status 0. The same command with a later time, or
    null, continues as if the run had not ended; the schedule is that of max_duration. Unset: run to
    the end."""
    save_max_wait: Annotated[float | None, Range(0), Only("save_async")] = None
    """Seconds that training waits if the previous checkpoint is still being written when the next
    one is due; then the next one is skipped, which is reported. Unset: 30. The end of a run, and a
    signal, wait as long as the write takes."""
    save_max_failures: Annotated[int, Range(1)] = 3
    """Number of failed saves in a row after which the run ends. Each failure is reported at once,
    and the next save tries again; a failure of the last save ends the run, too. With 3, a disk that
    is full for a while costs nothing."""
    autoresume: bool = True
    """Resume from the newest complete checkpoint in save_folder, if there is one."""
    load_path: Annotated[str | None, PATH] = None
    """A checkpoint, a run's folder, a URL of either, or a version in MLflow's registry,
    models:/NAME@best, from which to start if save_folder has no checkpoint."""
    load_weights_only: Annotated[bool | None, Only("load_path")] = None
    """Load only the weights, and start at batch 0 with a new optimizer state and data order."""
    load_weights: Annotated[str | None, choice(WEIGHTS), Only("load_weights_only")] = None
    """Which weights of the checkpoint to load. trained: those that the optimizer updated. ema:
    their average, of a run with ema.decay. Default trained."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The decoder (group model/)."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The tokenizer (group tokenizer/)."""
    data: DataConfig = field(default_factory=DataConfig)
    """The text (group data/)."""
    loss: LossConfig = field(default_factory=LossConfig)
    """What training minimizes."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer (group optimizer/)."""
    gradient_clipping: GradientClippingConfig = field(default_factory=GradientClippingConfig)
    """Gradient clipping."""
    ema: EmaConfig = field(default_factory=EmaConfig)
    """An average of the weights."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate over time (group schedule/)."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The distribution over processes (group parallel/)."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation (group eval/)."""
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    """Where metrics are logged (group logger/)."""
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    """The registered model in MLflow of which checkpoints become versions."""
    callbacks: CallbacksConfig = field(default_factory=CallbacksConfig)
    """Observers of the training loop."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Traces of steps and snapshots of memory."""
    health_check: HealthCheckConfig = field(default_factory=HealthCheckConfig)
    """Checks of machines before the run."""
    hang: HangConfig = field(default_factory=HangConfig)
    """Detection of hung processes."""
    supervise: SuperviseConfig = field(default_factory=SuperviseConfig)
    """Restarts after failures."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    """Where scripts/launch.py starts the run (group launch/)."""
    plugins: list[str] = field(default_factory=list)
    """Python files, my_file.py, or modules, my_package.module, that are imported before anything is
    checked. They add losses, optimizers, schedules, callbacks, loggers, norms, task types and
    file types."""

    def settle(self) -> None:
        """Resolve settings that depend on existing files, before the recipe is checked."""
        self.data.settle()

    def check(self) -> Iterator[str]:
        """Yield an error line for each problem: sections first, then conflicts between them."""
        yield from check_fields("", self)
        yield from check_duration(
            "max_duration", self.max_duration, allow_dur=False, allow_zero=False
        )
        if self.pause_at is not None:
            yield from check_duration("pause_at", self.pause_at, allow_zero=False)
        for key in ("eval_interval", "log_interval", "save_interval"):
            yield from check_duration(key, getattr(self, key))
        yield from self._check_compile()
        yield from self._check_fp8()
        sections = (
            self.model,
            self.tokenizer,
            self.data,
            self.loss,
            self.optimizer,
            self.gradient_clipping,
            self.ema,
            self.schedule,
            self.parallel,
            self.eval,
            self.logger,
            self.registry,
            self.callbacks,
            self.profile,
            self.health_check,
            self.hang,
            self.supervise,
            self.launch,
        )
        for section in sections:
            yield from section.check()
        yield from self._check_across()

    def _check_fp8(self) -> Iterator[str]:
        """Check that fp8 is not combined with tensor parallelism."""
        if self.precision == FP8 and self.parallel.tensor_parallel_degree != 1:
            yield (
                f"precision: {FP8} does not know the sharded matrices of"
                f" parallel.tensor_parallel_degree: {self.parallel.tensor_parallel_degree}; write"
                " amp_bf16, or 1"
            )

    def _check_compile(self) -> Iterator[str]:
        """Check compilation against parallelism and activation checkpointing."""
        # CUDA graphs need weights at fixed addresses
        mode = self.compile_mode
        if self.compile is True and mode in GRAPH_MODES and not self.parallel.keeps_whole:
            key = next(name for name in (*AXES[1:], EXPERT) if getattr(self.parallel, name) != 1)
            yield (
                f"compile_mode: {mode} replays CUDA graphs, whose weights may not move, and shards"
                f" (parallel.{key}: {getattr(self.parallel, key)}) are gathered anew for every"
                f" block; {GRAPH_ADVICE}"
            )

        # activation checkpointing
        level, parallel = self.parallel.activation_checkpointing, "parallel.activation"
        if self.parallel.activation_memory_budget is not None and self.compile is not True:
            yield f"{parallel}_memory_budget: has no effect without compile: true; remove it"
        if mode in GRAPH_MODES and self.parallel.activation_compression != "none":
            yield (
                f"{parallel}_compression: compile_mode: {mode} keeps what its CUDA graphs write in"
                f" memory of their own, compressed or not; {GRAPH_ADVICE}"
            )
        if self.compile is True and level == "selective" and self.cuts_within_blocks:
            key = EXPERT if self.parallel.expert_parallel_degree != 1 else AXES[-1]
            yield (
                "parallel.activation_checkpointing: selective is not compiled where FSDP cuts the"
                f" experts of a block apart (parallel.{key}: {getattr(self.parallel, key)}); write"
                " whole or none, or compile: false"
            )

    def compile_problems(self) -> Iterator[str]:
        """Yield a line for each setting that `compile: true`, which is set, does not support."""
        yield from self._check_compile()
        yield from compiled_limits(self.model, self.parallel)

    @property
    def cuts_within_blocks(self) -> bool:
        """Whether FSDP has units within a block, which prevents the compilation of the block.

        These are experts that are distributed over ranks, and all experts under tensor parallelism.
        The experts of a model whose files are not read yet (fine-tuning) are unknown.
        """
        if self.parallel.expert_parallel_degree != 1:
            return True
        is_known = isinstance(self.model, ModelConfig)
        has_experts = is_known and self.model.ffn_config.ffn_type == "dmoe"
        return has_experts and self.parallel.tensor_parallel_degree != 1

    def _check_model_across(self) -> Iterator[str]:
        """Check the model against the rest of the recipe."""
        # parallelism and compilation
        problems = [*limits(self.model, self.parallel, self.parallel.written_degrees)]
        yield from problems
        if self.compile is True and not problems:
            yield from compiled_limits(self.model, self.parallel)

        # tokenizer and data that only fine-tuning supports
        if self.tokenizer.name == PRETRAINED:
            yield (
                f"tokenizer.name: {PRETRAINED} is for scripts/finetune.py; write one of"
                f" {', '.join(TOKENIZERS)}"
            )
        for key, form in self.data.formats():
            if form in COMPARED:
                yield (
                    f"{key}: {form} has answers to compare, which scripts/finetune.py does with"
                    " preference.name: dpo and others; write prompt_response or chat"
                )

        # sequence length and precision
        longest = self.model.max_seq_len
        if longest is not None and longest < self.max_seq_len:
            yield (
                f"model.max_seq_len: {longest} is shorter than the recipe's rows"
                f" (max_seq_len: {self.max_seq_len}); remove it"
            )
        impl = self.model.attn_config.attn_impl
        if self.precision == "fp32" and impl in ("varlen", "flash", "flash3"):
            yield (
                f"model.attn_config.attn_impl: {impl} computes in bf16 alone, but precision is"
                " fp32; write sdpa, or precision: amp_bf16"
            )

    def _check_across(self) -> Iterator[str]:
        """Yield an error line for each conflict between settings of different sections."""
        yield from self._check_model_across()

        # early stopping, microbatch and probe of the memory
        if self.early_stop_unseen():
            yield (
                f"callbacks.early_stopper.metric: {self.callbacks.early_stopper.metric} is measured"
                " on validation text, but eval.validation is false"
            )
        micro = self.device_train_microbatch_size
        if isinstance(micro, int) and micro > self.global_train_batch_size:
            yield (
                f"device_train_microbatch_size: {micro} rows, but a step has only"
                f" {self.global_train_batch_size} (global_train_batch_size); write at most that"
            )
        if self.auto_probe == "on" and self.loss.is_own:
            name = self.loss.name
            yield f"auto_probe: on measures cross-entropy, and loss.name is {name}; write off"

        # checkpoints and their registry
        if self.save_num_checkpoints_to_keep == 0:
            yield "save_num_checkpoints_to_keep: 0; write -1 (all) or at least 1"
        if self.registry.name is not None and not self.logger.mlflow:
            yield (
                "registry.name: versions are kept where logger.mlflow has the run; write"
                " logger.mlflow: true, or remove it"
            )
        yield from self._check_store()

        # evaluation of averaged weights
        if self.eval.weights == EMA and self.ema.decay is None:
            yield "eval.weights: ema, but no average is kept; write ema.decay: 0.999, or trained"

        # validation needs held-out text
        if not self.data.holds_out() and self.eval.validation:
            yield (
                "eval.validation: true, but nothing is held out; write eval.validation=false, or"
                " set data.validation (shards), or data.validation_fraction (a corpus)"
            )

    def _check_store(self) -> Iterator[str]:
        """Check settings that depend on whether the run's folder is a URL."""
        scheme, separator, place = self.save_folder.partition("://")
        if separator and not place.strip("/"):
            yield f"save_folder: {self.save_folder} names no bucket; write {scheme}://BUCKET/FOLDER"
        if separator:
            return
        if self.save_local_folder is not None:
            yield (
                "save_local_folder: has no effect where save_folder is a folder; remove it, or"
                " write a URL as save_folder"
            )
        if self.save_local_copies:
            yield (
                "save_local_copies: has no effect where save_folder is a folder; remove it, or"
                " write a URL as save_folder"
            )

    def early_stop_unseen(self) -> bool:
        """Return whether the metric of the early stopper is never measured."""
        metric = self.callbacks.early_stopper.metric
        return (
            metric is not None and metric.startswith("metrics/eval/") and not self.eval.validation
        )

    def state_bytes(self, weight: int) -> float:
        """Return the bytes that the optimizer and the average keep per weight of `weight` bytes."""
        return self.optimizer.moment_bytes(weight) + self.ema.weight_bytes

    def training_settings(self) -> dict[str, Any]:
        """Return every setting that influences the result of training, by its dotted key."""
        settings = flat(asdict(self))
        return {key: value for key, value in settings if not NOT_LEARNT.fullmatch(key)}

    def resolve(self) -> ResolvedTrainRecipe:
        """Return a copy with every default resolved; call after `check` found nothing."""
        return resolve_as(ResolvedTrainRecipe, self)

    def fill(self) -> None:
        """Resolve defaults in place; call it after `check` has yielded no line."""
        self._fill_model()
        self.tokenizer.fill()
        self.data.fill()
        self.loss.fill()
        self.optimizer.fill()
        self.schedule.fill()
        self.parallel.fill()
        self.logger.fill()
        self.registry.fill(has_validation=self.eval.validation)
        self.callbacks.fill()
        self.profile.fill()
        self.hang.fill()
        if self.precision == FP8:  # amp_bf16 in all but `use_float8`
            self.precision = "amp_bf16"
            self.fp8_recipe = self.fp8_recipe or FP8_RECIPES[0]
            self.fp8_emulate = bool(self.fp8_emulate)
        if self.compile is True and self.compile_mode is None:
            self.compile_mode = "default"
        if self.save_async and self.save_max_wait is None:
            self.save_max_wait = 30.0
        if self.load_path is not None and self.load_weights_only is None:
            self.load_weights_only = False
        self.eval.weights = self.eval.weights or WEIGHTS[0]
        if self.load_weights_only and self.load_weights is None:
            self.load_weights = WEIGHTS[0]

    def _fill_model(self) -> None:
        self.model.fill(max_seq_len=self.max_seq_len)


class ResolvedTrainRecipe(TrainRecipe):
    """`TrainRecipe` with every default resolved; the runner makes it, and all below it take it."""

    user_recipe: TrainRecipe
    """What the user wrote, which a run folder's recipe.yaml repeats."""
    model: ResolvedModelConfig
    tokenizer: ResolvedTokenizerConfig
    loss: ResolvedLossConfig
    optimizer: ResolvedOptimizerConfig
    schedule: ResolvedScheduleConfig
    parallel: ResolvedParallelConfig
    logger: ResolvedLoggerConfig
    callbacks: ResolvedCallbacksConfig
    profile: ResolvedProfileConfig
    hang: ResolvedHangConfig


Resolved = TypeVar("Resolved", bound=ResolvedTrainRecipe)


def resolve_as(resolved_type: type[Resolved], user_recipe: TrainRecipe) -> Resolved:
    """Return a user's recipe as `resolved_type`, with every default resolved."""
    recipe = copy_as(resolved_type, user_recipe)
    recipe.fill()
    recipe.user_recipe = user_recipe
    keep_origin(user_recipe, recipe)
    return recipe
