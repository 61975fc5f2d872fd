"""`compile: auto` of a run: decided once, when it begins, and kept when it resumes.

Entry point: `settle_compile`, which `builders/trainer.py` calls before it builds the model.
"""

from __future__ import annotations

from collections.abc import Callable

from llmfoundry.builders.resume import StartPoint
from llmfoundry.checkpoint.load import read_state
from llmfoundry.distributed.activation_checkpoint import check_compiler
from llmfoundry.distributed.collectives import all_gather_object, on_rank0
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.models.counts import gpu_here
from llmfoundry.plan.compile_choice import CompileChoice, choose_compile, with_compile
from llmfoundry.recipe.train import AUTO, ResolvedTrainRecipe


def settle_compile(
    recipe: ResolvedTrainRecipe,
    world: World,
    start: StartPoint,
    *,
    steps: int,
    microbatch: int,
    note: Callable[[str], None],
) -> None:
    """Set the recipe's `compile: auto` to true or false, the same on all ranks.

    A broken compiler is not an error: the run is then not compiled. Runs on a CPU are not, without
    a line.

    Args:
        recipe: resolved recipe, changed in place.
        world: this process.
        start: checkpoint that the run resumes from.
        steps: steps of the run.
        microbatch: sequences of a rank's microbatch.
        note: reports the choice.
    """
    if recipe.compile != AUTO:
        return
    if world.device.type != "cuda":
        recipe.compile = False
        return
    choice = _as_it_began(world, start) or choose_compile(
        recipe,
        device=world.device,
        world_size=world.size,
        steps=steps,
        microbatch=microbatch,
        gpu=on_rank0(world, lambda: gpu_here(world.device)),
    )
    if choice.is_on:
        choice = _refused(world) or choice
    note(choice.line())
    recipe.compile = choice.is_on
    if choice.is_on:
        recipe.compile_mode = with_compile(recipe).compile_mode


def _as_it_began(world: World, start: StartPoint) -> CompileChoice | None:
    """Return the choice of the run that is resumed; None: a new run.

    Checkpoints of before `auto` was the default have no choice: these runs were not compiled.
    """
    saved = start.checkpoint
    if saved is None or start.weights_only:
        return None
    state = on_rank0(world, lambda: read_state(saved))
    return CompileChoice(bool(state.get("compile", False)), "as the run began")


def _refused(world: World) -> CompileChoice | None:
    """Return why the compiler does not work on some rank; None: it works on all."""
    reason = ""
    try:
        check_compiler("default", world.device)
    except UserError as error:
        reason = error.problems[0]
    reasons = [line for line in all_gather_object(world, reason) if line]
    return CompileChoice(False, f"as {reasons[0]}") if reasons else None
