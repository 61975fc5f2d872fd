"""Layout of a loaded model: how eval, generate, chat and serve distribute it over processes.

Entry point: `join_layout`, which commands call after `relaunch`. The layout is the recipe's
`parallel` section, as in training. By default every process holds the full model. With FSDP, tensor
or expert parallelism, `ModelLayout.place` shards a model that is still on the meta device, so that
no process ever holds all weights. Every rank must then enter every forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from llmfoundry.distributed.apply import parallelize
from llmfoundry.distributed.mesh import Meshes, build_mesh, with_mesh
from llmfoundry.distributed.process_group import World, join
from llmfoundry.errors import UserError
from llmfoundry.loggers.console import format_gib
from llmfoundry.models.decoder import Root
from llmfoundry.plan.inference import inference_memory
from llmfoundry.recipe.model import ResolvedModelConfig
from llmfoundry.recipe.parallel import ParallelConfig, ResolvedParallelConfig, limits
from llmfoundry.recipe.train import ResolvedTrainRecipe


@dataclass(frozen=True)
class ModelLayout:
    """The parallel layout of the models that a command loads.

    Attributes:
        config: resolved `parallel` section, without the settings of activations.
        meshes: device meshes of all ranks; None: a single process.
    """

    config: ResolvedParallelConfig
    meshes: Meshes | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether no rank holds the full model."""
        return self.meshes is not None and not self.meshes.degrees.is_replicas

    def check(self, model: ResolvedModelConfig) -> None:
        """Check that a model can be sharded this way.

        Raises:
            UserError: a degree does not divide what it shards.
        """
        if self.meshes is None:
            return
        problems = list(limits(model, self.config, self.meshes.degrees))
        if problems:
            raise UserError(*problems)

    def describe(self, recipe: ResolvedTrainRecipe, root: Root, world: World) -> str:
        """Return a line about the weights that each rank holds, from a model on the meta device."""
        need = inference_memory(recipe, root.model, world.size, world.device)
        line = f"weights in {recipe.precision}, {format_gib(need.weights / 2**30)}"
        if self.meshes is None:
            return line
        degrees = {name: n for name, n in vars(self.meshes.degrees).items() if n > 1}
        layout = ", ".join(f"{name} {n}" for name, n in degrees.items())
        return f"{line} on each of {world.size} processes ({layout})"

    def place(self, root: Root, world: World, *, precision: str) -> None:
        """Shard a model on the meta device and allocate this rank's shards, without values."""
        parallelize(root, world, self.meshes, self.config, precision=precision)


def full_model() -> ModelLayout:
    """Return the layout in which this process holds the full model."""
    return ModelLayout(ParallelConfig().resolve())


@contextmanager
def join_layout(config: ParallelConfig) -> Iterator[tuple[World, ModelLayout]]:
    """Join the processes of a command, and build the device mesh of its layout.

    Yields:
        This process, with the data-parallel groups of the mesh, and the layout.
    """
    with join(config) as world:
        meshes = build_mesh(config, world)
        layout = ModelLayout(without_activations(config).resolve(), meshes)
        yield with_mesh(world, meshes), layout


def without_activations(config: ParallelConfig) -> ParallelConfig:
    """Return the section without its settings of saved activations: inference saves none."""
    return replace(
        config,
        activation_checkpointing="none",
        activation_checkpointing_target=None,
        activation_compression="none",
        activation_memory_budget=None,
    )
