"""`--dry-run` of every script: what the command would do; nothing is written, nothing trained.

`cli/script.py` calls `print_plan` in the command's place, once the recipe is checked. The
idea: what a command refuses before it begins is refused here too, with the same words.
"""

from __future__ import annotations

import copy
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from llmfoundry.builders.data import learning_corpus
from llmfoundry.builders.model import served_precision
from llmfoundry.builders.preflight import check_inputs, check_recipe, not_checked
from llmfoundry.builders.pretrained import PretrainedModel, open_base
from llmfoundry.builders.registry import is_version
from llmfoundry.builders.resume import StartPoint, find_start
from llmfoundry.builders.tokenizer import make_tokenizer, settle_vocabulary
from llmfoundry.builders.trainer import (
    check_kernels,
    check_layout,
    check_precision,
    sketch,
)
from llmfoundry.checkpoint.object_storage import is_url
from llmfoundry.checkpoint.open_run import run_storage
from llmfoundry.cli.commands.compare import page_path, read_runs, refuse_page
from llmfoundry.cli.commands.launch import job_of
from llmfoundry.cli.commands.migrate import prepare
from llmfoundry.cli.commands.plan import check_fp8
from llmfoundry.cli.commands.prepare_data import check_inputs_and_output
from llmfoundry.cli.commands.scaling import print_plan as print_grid
from llmfoundry.cli.commands.scaling_grid import grid
from llmfoundry.cli.commands.scaling_runs import refuse_changed
from llmfoundry.cli.commands.track import run_with_record
from llmfoundry.cli.dry_run_models import (
    CPU,
    Rows,
    plan_averaging,
    plan_conversion,
    plan_drawing,
    plan_evaluation,
    plan_serving,
)
from llmfoundry.data.preparation.build_tokenizer import check_chat_template
from llmfoundry.data.preparation.readers import find_files, left_out
from llmfoundry.distributed.process_group import Machine, World, slurm_environment, wanted_processes
from llmfoundry.errors import UserError
from llmfoundry.gauntlet.fetch import files_of_gauntlet, files_of_tasks, read_table
from llmfoundry.launch.runs import find, list_runs
from llmfoundry.loggers.console import Console, format_gib, short_count
from llmfoundry.migrate.written import report
from llmfoundry.models.counts import active_parameter_count, gpu_here
from llmfoundry.models.decoder import Decoder
from llmfoundry.plan.communication import CollectiveTraffic, communication, spanning
from llmfoundry.plan.compile_choice import choose_compile, planned_steps
from llmfoundry.plan.fit import (
    check_workers,
    checkpointing_line,
    choose_fit,
    load_line,
    parts_text,
    with_guessed_vocabulary,
)
from llmfoundry.plan.memory import GIB, MemoryEstimate
from llmfoundry.plan.microbatch_sizes import memory_of_gpu, memory_of_process
from llmfoundry.plan.search import Fit
from llmfoundry.plan.seconds import speed_line, speeds, step_line, step_seconds
from llmfoundry.recipe.after_training import (
    CompareRecipe,
    RunsRecipe,
    TrackRecipe,
)
from llmfoundry.recipe.before_training import (
    Checked,
    CheckRecipe,
    FetchRecipe,
    InspectRecipe,
    MigrateRecipe,
    PlanRecipe,
    ResolvedPrepareRecipe,
)
from llmfoundry.recipe.checks import Clock, Duration
from llmfoundry.recipe.data import PRETRAINED, DataConfig
from llmfoundry.recipe.finetune import ResolvedFinetuneRecipe, load_run
from llmfoundry.recipe.hardware import Gpu, Hardware
from llmfoundry.recipe.parallel import node_size
from llmfoundry.recipe.paths import find_file, find_shipped, show
from llmfoundry.recipe.scaling import ScalingRecipe
from llmfoundry.recipe.source import SourceConfig, under_key
from llmfoundry.recipe.train import AUTO, ResolvedTrainRecipe, TrainRecipe
from llmfoundry.redaction import public
from llmfoundry.resilience.check.host import recipe_paths
from llmfoundry.scaling.points import read_points

_FILES = ("python_stdlib", "files")
TOKENS = {("allenai/c4", "en"): 156e9}
"""Approximate numbers of tokens of data sets on the hub, by data set and subset.

C4: Dodge et al., 2021 (arXiv 2104.08758), table 1."""


def print_plan(command: str, recipe: Any, hardware: Hardware | None = None) -> None:
    """Print what a command would do with a checked recipe.

    Args:
        command: name of the script's function, a key of PLANS.
        recipe: checked recipe of the command.
        hardware: GPUs to estimate a training run for; None: the devices of this machine.

    Raises:
        UserError: the command would refuse the recipe.
    """
    if hardware is None:
        os.environ.update(slurm_environment())
    plan = PLANS[command]
    if hardware is not None and plan not in ON_OTHER_HARDWARE:
        raise UserError(
            f"--dry-run: {hardware}: only training, evaluation and generation are estimated for"
            " other GPUs"
        )
    rows = list(plan(recipe) if hardware is None else ON_OTHER_HARDWARE[plan](recipe, hardware))
    if int(os.environ.get("RANK", 0)) == 0:
        if all(label != "checked" for label, _ in rows):
            rows.append(("checked", "the recipe, and what is listed above"))
        rows.append(("dry run", "nothing was written or started"))
        Console().banner([(label, public(value)) for label, value in rows])


def plan_training(recipe: ResolvedTrainRecipe, hardware: Hardware | None = None) -> Rows:
    """Yield the plan of scripts/train.py or scripts/finetune.py, here or on other hardware."""
    # the base model of fine-tuning, which must be on this machine to count its parameters
    world, model, pretrained = _world(recipe, hardware), None, None
    check_recipe(recipe, _alone(), n_ranks=world.size)
    if isinstance(recipe, ResolvedFinetuneRecipe):
        if _is_on_hub(recipe):
            yield from _plan_remote_base(recipe)
            return
        pretrained = open_base(recipe, _alone(), note=lambda line: None)
        yield "pretrained", pretrained.summary
        model = sketch(recipe)

    # the checks that a run makes before it allocates memory
    recipe.precision = served_precision(recipe.precision, world, lambda line: None)
    guessed = with_guessed_vocabulary(recipe)
    check_layout(recipe, world)
    if recipe.tokenizer.name == "train":
        learning_corpus(recipe.data)
    if hardware is None:
        check_workers(recipe.data, world)
        check_kernels(recipe, world.device)
    else:
        check_precision(recipe)
        check_fp8(recipe, hardware)

    # the largest microbatch that fits
    free = memory_of_process(world) if hardware is None else memory_of_gpu(hardware)
    gpu = _timed_gpu(world, hardware)
    fit = choose_fit(
        guessed,
        world_size=world.size,
        available=free,
        device=world.device,
        meta_model=model,
        reached=None if gpu is None else speeds(gpu, guessed),
    )
    rows, need = fit.microbatch, fit.need
    start = _start(recipe)

    # model, data, length, memory and layout
    yield "run", f"{recipe.save_folder}, begins {_begins(recipe, start)}"
    yield "model", _size(guessed, need)
    yield from _data(recipe)
    yield "length", _length(recipe)
    yield "device", f"{_device(world, hardware)}, {recipe.precision}, microbatch {rows}"
    yield "memory", _memory(need, rows, free)
    parallel = recipe.parallel
    if "auto" in (parallel.activation_checkpointing, parallel.activation_compression):
        yield "", checkpointing_line(guessed, fit)
    yield from _compilation(guessed, world, fit, gpu)
    if world.size > 1 and model is None:
        if hardware is not None:
            node = hardware.gpu.node
        elif "RANK" in os.environ:  # a launcher has started the processes
            node = node_size()
        else:  # this command would start all processes on this machine
            node = world.size
        yield from _layout(guessed, world, fit, node, gpu)
    if model is None and gpu is not None:
        yield from _time(fit.choice.apply(guessed), world, fit, gpu)

    # checkpoints, evaluation and the checks of inputs
    yield "checkpoints", _checkpoints(recipe, need, model)
    yield "measured", _measured(recipe)
    yield from _inputs(recipe, pretrained, start)


def _plan_remote_base(recipe: ResolvedFinetuneRecipe) -> Rows:
    """Yield the plan of a fine-tuning run whose base model is not downloaded yet."""
    place = "" if is_url(str(recipe.base.pretrained)) else " of the hub"
    yield "model", f"{recipe.base.pretrained}{place}, fetched when the run begins"
    yield from _data(recipe)
    yield "measured", _measured(recipe)
    yield "checked", "recipe, files of the gauntlet, first document of each local corpus"
    yield "not checked", "memory, chat template, rows and prompts: they need the model"


def _inputs(
    recipe: ResolvedTrainRecipe, pretrained: PretrainedModel | None, start: StartPoint | None
) -> Rows:
    """Check the inputs as a run does before it prepares data; yield what was and was not checked.

    Args:
        recipe: resolved recipe; not changed.
        pretrained: base model of fine-tuning.
        start: checkpoint that the run would start from; None: the run is in an object store.
    """
    # local data, which needs no tokenizer
    recipe = copy.deepcopy(recipe)  # settle_vocabulary changes it
    world = _alone()
    checked = ["recipe", "layout", "memory", "first rows or document of each local source"]
    missing = not_checked(recipe)
    if start is None:
        missing.append("the checkpoint in the store")

    # chat template and prompts, which need the tokenizer
    if _is_tokenizer_here(recipe):
        tokenizer = make_tokenizer(recipe, world, pretrained)
        settle_vocabulary(recipe, tokenizer, lambda line: None)
        start = start or StartPoint()
        gauntlet = check_inputs(recipe, tokenizer, start, world, lambda line: None, is_dry_run=True)
        checked += ["tokenizer", "chat template"]
        if gauntlet is not None:
            checked.append("prompts of the gauntlet")
            missing += [f"task {task.label} ({task.dataset_uri})" for task in gauntlet.waiting]
    else:
        if recipe.tokenizer.name == "train":
            check_chat_template(recipe.tokenizer, recipe.data)
            checked.append("chat template")
        learned = "is trained" if recipe.tokenizer.name == "train" else "is fetched"
        missing.append(f"rows and prompts as tokens, for which the tokenizer {learned} first")
    yield "checked", ", ".join(checked)
    yield "not checked", ", ".join([*missing, "later rows and documents"])


def _is_tokenizer_here(recipe: ResolvedTrainRecipe) -> bool:
    """Return whether the tokenizer is available without training or downloading it."""
    config = recipe.tokenizer
    if config.name == "huggingface":
        return Path(str(config.path)).expanduser().exists()
    return config.name in ("bytes", PRETRAINED)


def _compilation(recipe: ResolvedTrainRecipe, world: World, fit: Fit, gpu: Gpu | None) -> Rows:
    """Yield what `compile: auto` chooses on GPUs, and set the recipe to it."""
    if recipe.compile != AUTO or world.device.type != "cuda":
        return
    steps = planned_steps(recipe)
    if steps is None:
        yield "", "compile: auto is decided by the number of steps, which depends on the data"
        return
    choice = choose_compile(
        fit.choice.apply(recipe),
        device=world.device,
        world_size=world.size,
        steps=steps,
        microbatch=fit.microbatch,
        gpu=gpu,
    )
    yield "", choice.line()
    recipe.compile = choice.is_on


def _time(recipe: ResolvedTrainRecipe, world: World, fit: Fit, gpu: Gpu) -> Rows:
    """Yield seconds per step and speed."""
    step = step_seconds(recipe, world.size, fit.microbatch, speeds(gpu, recipe))
    yield "step", step_line(step)
    yield "speed", speed_line(step, recipe, world.size, gpu)


def _timed_gpu(world: World, hardware: Hardware | None) -> Gpu | None:
    """Return the data sheet of the GPUs; None if it has no speeds."""
    if hardware is None:
        return gpu_here(world.device)
    return hardware.gpu if hardware.is_timed else None


def _start(recipe: ResolvedTrainRecipe) -> StartPoint | None:
    """Return the checkpoint that a run would start from; None: the run is in an object store."""
    if is_url(recipe.save_folder):
        return None
    return find_start(recipe, run_storage(recipe), _alone(), lambda line: None)


def _begins(recipe: ResolvedTrainRecipe, start: StartPoint | None) -> str:
    """Return the text about where a run would begin.

    Args:
        recipe: resolved recipe.
        start: checkpoint on this machine; None: the run is in an object store, of which only file
            names are read.
    """
    if start is None:
        run = run_storage(recipe)
        newest = next(filter(run.has_commit, run.checkpoints()), None)
        return "at batch 0" if newest is None else f"from {run.shown(newest)}"
    return "at batch 0" if start.checkpoint is None else f"from {start.checkpoint}"


def _world(recipe: TrainRecipe, hardware: Hardware | None) -> World:
    """Return rank 0 of the processes that would be started, or that a launcher has started."""
    if hardware is not None:
        return World(0, hardware.gpus, 0, torch.device("cuda", 0))
    size = int(os.environ.get("WORLD_SIZE", 0)) or wanted_processes(recipe.parallel)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    # processes per GPU, rounded up; more than 1 only with gloo
    sharing = math.ceil(local_size / max(1, torch.cuda.device_count()))
    if not torch.cuda.is_available():
        return World(0, size, 0, CPU)
    machine = Machine(0, sharing=sharing) if sharing > 1 else None
    return World(0, size, 0, torch.device("cuda", 0), machine=machine)


def _device(world: World, hardware: Hardware | None) -> str:
    if hardware is not None:
        return f"{hardware}, which are not here"
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    sharing = 1 if world.machine is None else world.machine.sharing
    text = f"{math.ceil(world.size / sharing)} x {device}"
    if sharing > 1:
        text += f" ({world.size} processes)"
    return text


def _alone() -> World:
    """Return a world of one process on the CPU, for checks that need no other process."""
    return World(rank=0, size=1, local_rank=0, device=CPU)


def _is_on_hub(recipe: ResolvedFinetuneRecipe) -> bool:
    """Return whether the model would have to be downloaded, which a dry run does not do."""
    name = str(recipe.base.pretrained)
    if name.startswith((".", "/", "~", "runs/")) or is_version(name):
        return False
    try:
        find_file(name, "model.pretrained")
    except UserError:
        return True
    return False


def _size(recipe: ResolvedTrainRecipe, need: MemoryEstimate) -> str:
    model = f"{recipe.model.name}, about {short_count(need.parameters)} parameters"
    if recipe.model.ffn_config.ffn_type == "dmoe":
        model += f", {short_count(active_parameter_count(recipe.model))} active"
    return model


def _data(recipe: TrainRecipe) -> Rows:
    """Yield the source of each stream of text, with the number of files of a local corpus."""
    data = recipe.data
    sources: dict[str, SourceConfig] = {"data": data, **data.streams}
    for name, source in sources.items():
        if source.name == "mixture":
            continue
        where = source.remote or source.local or source.dataset or ", ".join(source.paths)
        text = f"{source.name} {where}".strip()
        if source.name in _FILES and not source.is_supervised:
            if source is data:
                key, corpus = name, data
            else:
                key, corpus = f"data.streams.{name}", data.alone(source)
            with under_key(key):
                text += f": {_files(corpus)}"
        yield name, text


def _files(data: DataConfig) -> str:
    """Return the number of readable files of a corpus, and what is left out."""
    corpus = find_files(data)
    if not corpus.files:
        raise UserError("data.paths: no file that can be read is there; write others")
    lines = left_out(corpus.ignored, corpus.hidden)
    return "; ".join([f"{len(corpus.files):,} files", *lines])


def _length(recipe: ResolvedTrainRecipe) -> str:
    """Return the length of the run, without steps and tokens if it is written in epochs."""
    rows, length = recipe.global_train_batch_size, Duration.parse(recipe.max_duration)
    step_tokens = rows * recipe.max_seq_len
    shape = f"steps of {rows:,} rows of {recipe.max_seq_len:,} tokens ({step_tokens:,})"
    if length.unit == "ep":
        return f"{recipe.max_duration} of the text, in {shape}"
    steps = Clock(rows, step_tokens, 1.0, length).total
    tokens = steps * step_tokens
    text = f"{steps:,} {shape}, {short_count(tokens)} tokens in all"
    passes = passes_over(recipe.data, tokens)
    return f"{text}, {passes}" if passes else text


def passes_over(data: DataConfig, tokens: int) -> str:
    """Return how often a run reads its data set; empty if at most once or the size is unknown."""
    size = TOKENS.get((data.dataset or "", data.subset or ""), math.inf)
    if tokens <= size:
        return ""
    passes = tokens / size
    times = f"{passes:.1f}" if passes < 9.95 else f"{passes:.0f}"
    return f"about {times} passes over the {short_count(size)} of {data.dataset} {data.subset}"


def _memory(need: MemoryEstimate, rows: int, free: int) -> str:
    """Return the memory of a process, its parts, and the free memory.

    Args:
        need: estimate by kind of tensor.
        rows: microbatch size in sequences.
        free: available bytes.
    """
    total = f"about {format_gib(need.total(rows) / GIB)} a process"
    return f"{total}: {parts_text(need, rows)}; {format_gib(free / GIB)} are free"


def _layout(
    guessed: ResolvedTrainRecipe, world: World, fit: Fit, node: int, gpu: Gpu | None
) -> Rows:
    """Yield the expert load that fits, bytes communicated, and parallel degrees that span nodes."""
    recipe = fit.choice.apply(guessed)
    expert_load = load_line(recipe, fit, world.size)
    if expert_load:
        yield "", expert_load  # without a label: it continues the row "memory"
    yield "sends", _sends(communication(recipe, world.size, fit.microbatch, node))
    for line in spanning(recipe, world.size, fit.microbatch, node, gpu):
        yield "layout", line


def _sends(messages: Iterable[CollectiveTraffic]) -> str:
    """Return the bytes that a process sends per step, and by kind of collective, largest first.

    The bytes of a kind that leave the node follow in parentheses.
    """
    sent_bytes, between_nodes = Counter[str](), Counter[str]()
    for message in messages:
        sent_bytes[message.what] += message.sent
        between_nodes[message.what] += message.between

    # bytes by kind of collective
    parts = []
    for kind, sent in sent_bytes.most_common():
        part = f"{kind} {format_gib(sent / GIB)}"
        if between_nodes[kind]:
            part += f" ({format_gib(between_nodes[kind] / GIB)})"
        parts.append(part)

    # total
    text = f"about {format_gib(sent_bytes.total() / GIB)} a process and step"
    if between_nodes.total():
        text += f", {format_gib(between_nodes.total() / GIB)} of it to other nodes"
    return f"{text}: {', '.join(parts)}"


def _checkpoints(recipe: ResolvedTrainRecipe, need: MemoryEstimate, model: Decoder | None) -> str:
    """Return interval, size and retention of checkpoints.

    The size, of weights and optimizer state, is left out for fine-tuning (`model`), where it
    depends on which parameters are trained.
    """
    keep = recipe.save_num_checkpoints_to_keep
    retention = "all are kept" if keep == -1 else f"the newest {keep} are kept"
    weight_bytes = 2 if recipe.precision == "bf16" else 4
    size = ""
    if model is None:
        state_bytes = recipe.state_bytes(weight_bytes)
        checkpoint_bytes = (weight_bytes + state_bytes) * need.parameters
        size = f", about {format_gib(checkpoint_bytes / GIB)} each"
    return f"every {recipe.save_interval} and at the end{size}; {retention}"


def _measured(recipe: TrainRecipe) -> str:
    """Return what is evaluated during training, and how often."""
    evaluations = ["held-out text"] if recipe.eval.validation else []
    if recipe.eval.gauntlet is not None:
        evaluations.append(show(find_shipped(recipe.eval.gauntlet, "eval.gauntlet")))
    if not evaluations:
        return "nothing"
    return f"every {recipe.eval_interval} and at the end: {' and '.join(evaluations)}"


def plan_preparing(recipe: ResolvedPrepareRecipe) -> Rows:
    """Yield the plan of scripts/prepare_data.py."""
    check_inputs_and_output(recipe)
    yield from _data(recipe)
    yield "tokenizer", recipe.tokenizer.name
    output = recipe.prepare.output
    yield "to", f"{output}, as {recipe.prepare.format}" if output else recipe.data.cache_folder


def plan_inspecting(recipe: ResolvedTrainRecipe) -> Rows:
    """Yield the plan of scripts/inspect_data.py."""
    assert isinstance(recipe.user_recipe, InspectRecipe)
    yield from _data(recipe)
    yield "at", recipe.user_recipe.at


def plan_planning(recipe: ResolvedTrainRecipe) -> Rows:
    """Yield the plan of scripts/plan.py."""
    user_recipe = recipe.user_recipe
    assert isinstance(user_recipe, PlanRecipe)
    yield "hardware", str(Hardware.parse(user_recipe.hardware, "hardware"))
    if user_recipe.layouts:
        yield "layouts", f"the {user_recipe.layouts} fastest"
    else:
        yield "layouts", "the recipe's own"
    yield "to", f"the screen, as {user_recipe.format}"


def plan_launching(recipe: ResolvedTrainRecipe) -> Rows:
    """Yield the plan of scripts/launch.py: the target, its machines and the run's folder."""
    job = job_of(recipe)
    machines = "1 machine" if job.nodes == 1 else f"{job.nodes} machines"
    gpus = job.config.gpus_per_node
    if gpus:
        machines += f" of {gpus} GPUs"
    yield "target", f"{job.config.target}, {machines}"
    yield "run", show(job.folder)
    yield "object", "dry_run=true prints it"


def plan_comparing(recipe: CompareRecipe) -> Rows:
    """Yield the plan of scripts/compare.py."""
    refuse_page(page_path(recipe))
    runs, warnings = read_runs(recipe)
    yield "runs", ", ".join(run.name for run in runs)
    yield from (("warning", line) for line in warnings)
    yield "page", str(page_path(recipe))


def plan_runs(recipe: RunsRecipe) -> Rows:
    """Yield the plan of scripts/runs.py."""
    verb, *names = recipe.words
    yield "verb", verb
    for name in names or sorted(run.name for run in list_runs(recipe.folder)):
        yield "run", str(find(name, recipe.folder))


def plan_tracking(recipe: TrackRecipe) -> Rows:
    """Yield the plan of scripts/track.py."""
    run = run_with_record(recipe)
    logger = recipe.logger or load_run(run.folder / "recipe.yaml").logger
    stores = logger.chosen()
    yield "run", str(run)
    yield "to", ", ".join(stores) or "nothing"


def plan_scaling(user_recipe: ScalingRecipe) -> Rows:
    """Yield the plan of scripts/scaling.py."""
    recipe = copy.deepcopy(user_recipe)
    if recipe.fit is not None:
        points = read_points(find_file(recipe.fit, "fit"))
        yield "runs", f"{len(points)} of {recipe.fit}"
    else:
        grid_points = grid(recipe)
        refuse_changed(grid_points)
        print_grid(recipe, grid_points, Console())
        yield "runs", f"{len(grid_points)} of {recipe.base}"
    yield "to", recipe.output


def plan_fetching(recipe: FetchRecipe) -> Rows:
    """Yield the plan of scripts/fetch_eval_data.py."""
    recipe.fill()
    table = read_table(find_shipped(recipe.table, "table"))
    files = files_of_tasks(recipe.tasks)
    if recipe.gauntlet is not None:
        files = files_of_gauntlet(Path(recipe.gauntlet))[0]
    n_unknown = len(files.keys() - table.keys())
    text = f"{len(files):,}"
    if n_unknown:
        text += f", {n_unknown:,} of them unknown"
    yield "files", text
    yield "from", recipe.from_foundry or "the Hugging Face hub"
    yield "to", recipe.output or "eval/local_data"


def plan_migration(recipe: MigrateRecipe) -> Rows:
    """Yield the plan of scripts/migrate.py."""
    result, output = prepare(recipe)
    yield "from", f"{recipe.theirs}, for scripts/{result.source.kind or 'nothing'}.py"
    *_, summary = report(result)  # the last line of the report counts the settings
    yield "settings", summary
    yield "to", show(output)
    for problem in result.problems:
        yield "to do", problem


def plan_check(recipe: CheckRecipe | ResolvedTrainRecipe) -> Rows:
    """Yield the plan of scripts/check.py."""
    check = recipe if isinstance(recipe, CheckRecipe) else recipe.user_recipe
    assert isinstance(check, Checked)
    settings = recipe.health_check
    processes = int(os.environ.get("WORLD_SIZE", 0)) or wanted_processes(recipe.parallel)
    yield "processes", str(processes)
    yield "machines", "GPU counters, kernel log, paths, clocks, limits, versions"
    if check.level == "full":
        yield "burn", f"{settings.burn_seconds:g} s of products, and copies in memory"
        rounds = "all rounds" if settings.pair_rounds is None else f"{settings.pair_rounds} rounds"
        yield "pairs", f"all-reduces between {settings.pairs_of}, {rounds}"
    if not isinstance(recipe, CheckRecipe):
        for path in recipe_paths(recipe):
            yield "path", f"{path.key}: {path.path}, {'written' if path.is_written else 'read'}"
    yield "report", check.output


PLANS: dict[str, Callable[[Any], Iterable[tuple[str, str]]]] = {
    "train": plan_training,
    "prepare_data": plan_preparing,
    "inspect_data": plan_inspecting,
    "evaluate": plan_evaluation,
    "generate": plan_drawing,
    "chat": plan_drawing,
    "serve": plan_serving,
    "convert": plan_conversion,
    "average_checkpoints": plan_averaging,
    "plan": plan_planning,
    "track": plan_tracking,
    "launch": plan_launching,
    "compare": plan_comparing,
    "runs": plan_runs,
    "scaling": plan_scaling,
    "fetch_eval_data": plan_fetching,
    "migrate_file": plan_migration,
    "check": plan_check,
    "supervise": plan_training,
}
ON_OTHER_HARDWARE: dict[Any, Callable[[Any, Hardware], Iterable[tuple[str, str]]]] = {
    plan: plan for plan in (plan_training, plan_evaluation, plan_drawing, plan_serving)
}
"""Plans that `--dry-run=8xh100` estimates for GPUs that are not here."""
