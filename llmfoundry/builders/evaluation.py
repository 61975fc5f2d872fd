"""What measures a model in a run's loop and in `scripts/eval.py`.

`EvalBudget` is `eval.icl_max_fraction`: scores of a run are comparable only if the same rows are
asked each time, so the share of the gauntlet's rows that a run can afford is decided once, at the
first evaluation, and kept in the run's folder for those after a resume.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from llmfoundry.builders.run_context import RunContext
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.held_out import validation_batches
from llmfoundry.data.text.chat_template import ChatTemplate
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.collectives import on_rank0
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError, enough_memory
from llmfoundry.files import read_json, write_json
from llmfoundry.gauntlet.gauntlet import Gauntlet, TaskAnswers, check_sources
from llmfoundry.gauntlet.models.own_decoder import OwnModel
from llmfoundry.gauntlet.questions import Chat, EvaluatedModel, PromptSettings
from llmfoundry.gauntlet.results import GauntletResult
from llmfoundry.gauntlet.task_rows import is_held_out, is_remote
from llmfoundry.loggers.console import format_gib
from llmfoundry.models.adapter import switched_off
from llmfoundry.models.attention import longest_document
from llmfoundry.models.decoder import Root
from llmfoundry.plan.inference import inference_memory
from llmfoundry.plan.microbatch_sizes import USABLE, memory_of_process, microbatches
from llmfoundry.recipe.eval import EvalConfig
from llmfoundry.recipe.finetune import ResolvedFinetuneRecipe
from llmfoundry.recipe.model import ResolvedModelConfig
from llmfoundry.recipe.paths import find_shipped
from llmfoundry.recipe.train import ResolvedTrainRecipe
from llmfoundry.train.distillation import build_distillation
from llmfoundry.train.preference_loss import Preference, build_preference
from llmfoundry.train.validation import validate, validate_answers

Record = Callable[[int, GauntletResult, list[TaskAnswers]], None]
MOST_ROWS = 8  # of max_seq_len that are evaluated at a time by themselves: more is not faster


def evaluation_rows(recipe: ResolvedTrainRecipe, root: Root, world: World) -> int:
    """Rows of max_seq_len that a model by itself evaluates at a time; every process calls it.

    The most of those that training would choose from of which a forward pass fits beside the
    weights: of each token the widest layer's activations, attention's logits, and the keys and
    values of all layers, which an answer is generated from.

    Args:
        recipe: filled.
        root: its model, on the meta device, or with its weights.
        world: this process.

    Raises:
        UserError: the weights alone do not fit.
    """
    room = int(USABLE * memory_of_process(world))
    need = inference_memory(
        root.model,
        recipe.model,
        recipe.parallel.degrees(world.size),
        precision=recipe.precision,
        seq_len=recipe.max_seq_len,
        device=world.device,
    )
    held = need.weights + need.gathered
    if not next(root.parameters()).is_meta:  # its weights are no longer free memory
        room += need.weights
    if held > room:
        spread = ", spread it with parallel=fsdp" if recipe.parallel.keeps_whole else ""
        raise UserError(
            f"checkpoint: the weights of {recipe.run_name} take {format_gib(held / 2**30)}, and"
            f" {format_gib(room / 2**30)} are free; write precision=bf16{spread}, or take another"
            " machine"
        )
    sizes = microbatches(recipe, MOST_ROWS, world.device)
    fitting = [n for n in sizes if need.total(n * recipe.max_seq_len) <= room]
    return (fitting or sizes[-1:])[0]


def build_evaluate(
    job: RunContext,
    config: EvalConfig,
    *,
    gauntlet: Gauntlet | None,
    rows: int,
    record: Record,
    resumed: bool = False,
) -> Callable[[int], dict[str, float]]:
    """Return a function of the batch number that measures the model and returns metrics.

    Every process must call this and the returned function.

    Args:
        job: the run.
        config: what is measured.
        gauntlet: the result of `open_gauntlet`; tasks of held-out text are added here.
        rows: rows of max_seq_len evaluated at a time.
        record: given the gauntlet's full result, and what was asked and answered.
        resumed: the run resumes an earlier one, and asks the same rows.
    """
    if gauntlet is not None:
        for problem in gauntlet.add_held_out(job.prepared.validation_texts):
            job.note(problem)
    evaluated, budget = build_evaluated(job, config, rows), None
    if gauntlet is not None and config.icl_max_fraction is not None:
        folder = job.run.folder
        budget = EvalBudget(config.icl_max_fraction, folder, job.world, job.note, resumed=resumed)
    measure_text = build_validation(job, config, rows) if config.validation else dict

    @enough_memory(
        f"device_eval_batch_size: the evaluation ran out of memory at {rows};"
        f" write {rows // 2 or 'a smaller model'}"
    )
    def evaluate(batch: int) -> dict[str, float]:
        metrics: dict[str, float] = measure_text()
        if gauntlet is not None:
            share = 1.0 if budget is None else budget.share(gauntlet, evaluated)
            result, answers = gauntlet.run(evaluated, share=share)
            metrics |= result.metrics()
            record(batch, result, answers)
        if budget is not None:
            budget.restart()
        return metrics

    return torch.no_grad()(evaluate)


def _check_positions(model: ResolvedModelConfig, config: EvalConfig) -> None:
    """ALiBi and rotary positions continue beyond max_seq_len, learned ones do not."""
    longest = longest_document(model)
    if longest is not None and (config.icl_seq_len or 0) > longest:
        raise UserError(
            f"eval.icl_seq_len: {config.icl_seq_len}, but the model's learned positions end at"
            f" {longest} (model.max_seq_len); write {longest} or less, or remove it"
        )


def build_validation(
    job: RunContext, config: EvalConfig, rows: int
) -> Callable[[], dict[str, float]]:
    """A function that measures the loss on the held-out documents."""
    token_bytes = torch.from_numpy(job.tokenizer.token_bytes()).to(job.world.device)
    padding = job.recipe.model.vocab_size or 0
    token_bytes = torch.nn.functional.pad(token_bytes, (0, padding - len(token_bytes)))

    objective, world = build_objective(job), job.world.in_evaluation()

    def measure() -> dict[str, float]:
        batches = validation_batches(
            job.prepared.validation,
            seq_len=job.recipe.max_seq_len,
            eos_id=job.tokenizer.eos_id,
            batch_size=rows,
            data_rank=world.data_rank,
            data_size=world.data_size,
            max_rows=config.validation_rows,
            attend_across_documents=job.recipe.data.attend_across_documents,
        )
        how: dict[str, Any] = {
            "device": job.world.device,
            "autocast": job.autocast,
            "data_group": world.data_group,
        }
        if objective is not None:
            return validate_answers(job.root, batches, token_bytes, objective, **how)
        distillation = build_distillation(job.recipe.loss)
        return validate(job.root, batches, token_bytes, distillation=distillation, **how)

    return measure


def build_evaluated(job: RunContext, config: EvalConfig, rows: int) -> OwnModel:
    """The run's model, to be asked."""
    world = job.world.in_evaluation()
    return OwnModel(
        job.root,
        job.tokenizer,
        seq_len=config.icl_seq_len or job.recipe.max_seq_len,
        device=job.world.device,
        batch_tokens=rows * job.recipe.max_seq_len,
        autocast=job.autocast,
        data_rank=world.data_rank,
        data_size=world.data_size,
        data_group=world.data_group,
    )


def check_gauntlet(config: EvalConfig) -> None:
    """Refuse a gauntlet with mistakes, or without its rows, before anything else is read.

    Raises:
        UserError: a line for each.
    """
    if config.gauntlet is not None:
        path = find_shipped(config.gauntlet, "eval.gauntlet")
        check_sources(path, allow_missing=bool(config.icl_allow_missing))


def open_gauntlet(
    recipe: ResolvedTrainRecipe,
    config: EvalConfig,
    tokenizer: Tokenizer,
    world: World,
    note: Callable[[str], None],
    *,
    generate: bool = False,
    is_trained: bool = True,
    is_dry_run: bool = False,
) -> Gauntlet | None:
    """Read, check and tokenize the tasks of a run, before its data is prepared.

    Tasks of held-out text wait for `Gauntlet.add_held_out`. Every process must call this.

    Args:
        recipe: recipe of the run, with the shape of its model.
        config: what is measured.
        tokenizer: tokenizer of the run.
        world: this process.
        note: logs a line.
        generate: what an unset `icl_generate` means.
        is_trained: the model was trained here, or is about to be.
        is_dry_run: nothing is downloaded or written; tasks with remote rows wait as well.

    Returns:
        The tasks; None if the recipe has no gauntlet.

    Raises:
        UserError: a mistake in the gauntlet, its rows, or their prompts for this tokenizer.
    """
    _check_positions(recipe.model, config)
    start = tokenizer.document_start if is_trained else None
    return read_tasks(
        config,
        PromptSettings.by_training(tokenizer, recipe.max_seq_len, start),
        generate=generate,
        cache_folder=None if is_dry_run else recipe.data.cache_folder,
        note=note,
        fetching=FetchOptions.from_config(recipe.data),
        world=world,
    )


def read_tasks(
    config: EvalConfig,
    settings: PromptSettings,
    *,
    generate: bool,
    cache_folder: str | None,
    note: Callable[[str], None],
    world: World,
    fetching: FetchOptions | None = None,
) -> Gauntlet | None:
    """Return the recipe's gauntlet, with its prompt settings; None without a gauntlet.

    Tasks of held-out text wait for `Gauntlet.add_held_out`.

    Args:
        config: what is measured.
        settings: the model's side of it: tokenizer, longest input, special tokens.
        generate: what an unset `icl_generate` means.
        cache_folder: cache folder of the recipe; None: nothing is written or downloaded, and tasks
            with remote rows wait as well.
        note: reports what a reader must know.
        world: this process; rank 0 reads.
        fetching: how rows at an address are asked for; unset: with the environment's rights.
    """
    if config.gauntlet is None:
        return None
    is_dry_run = cache_folder is None
    gauntlet = Gauntlet(
        find_shipped(config.gauntlet, "eval.gauntlet"),
        dataclasses.replace(
            settings,
            seq_len=config.icl_seq_len or settings.seq_len,
            prompts=config.icl_prompts or settings.prompts,
            rows=config.icl_rows,
            generate=generate if config.icl_generate is None else config.icl_generate,
            allow_missing=bool(config.icl_allow_missing),
            chat=choose_chat(config, settings.tokenizer, settings.chat),
        ),
        validation_texts=None,
        cache_folder=None if cache_folder is None else Path(cache_folder).expanduser() / "prompts",
        say=note,
        fetching=fetching,
        once=partial(on_rank0, world),
        waits=lambda task: is_held_out(task) or (is_dry_run and is_remote(task)),
    )
    for problem in gauntlet.problems:
        note(problem)
    return gauntlet


def choose_chat(config: EvalConfig, tokenizer: Tokenizer, given: Chat | None) -> Chat | None:
    """How questions become conversations; None where none does.

    Args:
        config: what is measured.
        tokenizer: the model's, which may have a template.
        given: a model's own way, of which the recipe changes parts.
    """
    choice = config.icl_chat_template
    if choice == "none":
        return None
    if given is not None and (choice not in (None, "tokenizer") or config.icl_gen_prefix):
        key = "icl_gen_prefix" if config.icl_gen_prefix else "icl_chat_template"
        raise UserError(
            f"eval.{key}: the model's server has a template of its own, and begins answers as it"
            " likes; write icl_chat_template: tokenizer for every question, and no icl_gen_prefix"
        )
    chat = given or _own_chat(choice, tokenizer)
    if chat is None:
        return None
    return dataclasses.replace(
        chat,
        every_task=choice is not None,
        multiturn=config.icl_fewshot_as_multiturn is not False,
        system=config.icl_system_instruction or "",
        prefix=config.icl_gen_prefix or "",
    )


def _own_chat(choice: str | None, tokenizer: Tokenizer) -> Chat | None:
    if choice is not None and choice != "tokenizer":
        return Chat(tokenizer.chat_by(choice, key="eval.icl_chat_template"))
    if choice is None and not tokenizer.has_chat:
        return None
    template: ChatTemplate = tokenizer.chat
    return Chat(template)


PROBE = 0.02  # of the rows; twice, for the first time has much that comes only once
CAUTION = 0.8  # of what the probe allows: it is short
FILE = "icl_share.json"


class EvalBudget:
    """Decides the share, once."""

    def __init__(
        self,
        max_fraction: float,
        run_folder: Path,
        world: World,
        note: Callable[[str], None],
        *,
        resumed: bool,
    ) -> None:
        """Start the clock of the training before the first evaluation.

        Args:
            max_fraction: of the wall time, for the gauntlet.
            run_folder: where the share is kept.
            world: this process.
            note: reports what was decided.
            resumed: what the run decided before holds.
        """
        self._max_fraction, self._file, self._world = max_fraction, run_folder / FILE, world
        kept = on_rank0(world, lambda: self._kept() if resumed else None)
        self._note, self._share = note, kept
        self.restart()

    def restart(self) -> None:
        """Training continues now."""
        self._since = time.perf_counter()

    def share(self, gauntlet: Gauntlet, model: EvaluatedModel) -> float:
        """Share of each task's questions; every process calls it, and gets the same."""
        if self._share is None:
            trained = time.perf_counter() - self._since
            allowed = CAUTION * trained * self._max_fraction / (1 - self._max_fraction)
            whole = _seconds_of_all(gauntlet, model)
            self._share = on_rank0(self._world, lambda: ladder(allowed / whole))
            self._report(self._share, trained, whole)
        return self._share

    def _report(self, share: float, trained: float, whole: float) -> None:
        took = f"all rows would take about {whole:.1f} s after {trained:.1f} s of training"
        self._note(
            f"eval.icl_max_fraction: {self._max_fraction:g}: each evaluation asks"
            f" {100 * share:.2g} % of each task's rows; {took}"
        )
        if self._world.is_main:
            write_json(self._file, {"share": share, "max_fraction": self._max_fraction})

    def _kept(self) -> float | None:
        """What this run decided before, for the same fraction."""
        if not self._file.is_file():
            return None
        kept = read_json(self._file)
        return float(kept["share"]) if kept["max_fraction"] == self._max_fraction else None


def _seconds_of_all(gauntlet: Gauntlet, model: EvaluatedModel) -> float:
    """An estimate, by the tokens of a small part."""
    for _ in range(2):
        cost = gauntlet.run(model, share=PROBE)[0].cost
    assert cost is not None
    probed = gauntlet.tokens(PROBE)  # 0 where every task is lm-evaluation-harness's, or left out
    return cost.seconds * gauntlet.tokens() / probed if probed else cost.seconds


def ladder(share: float) -> float:
    """The next of 1, 1/2, 1/4, … at or below a share: equal runs should ask equal rows."""
    return 1.0 if share >= 1 else 2.0 ** math.floor(math.log2(max(share, 2**-20)))


def build_objective(job: RunContext) -> Preference | None:
    """The recipe's method of preference tuning; None: the cross-entropy."""
    recipe = job.recipe
    if not isinstance(recipe, ResolvedFinetuneRecipe):
        return None
    by_adapter = recipe.preference.reference == "adapter"
    return build_preference(
        recipe.preference, partial(switched_off, job.root.model) if by_adapter else None
    )
