"""Layout of a loaded model: how eval, generate, chat and serve distribute it over processes.

Entry point: `join_layout`, which commands call after `with_local_ranks`. The layout is the recipe's
`parallel` section, as in training. By default every process holds the full model. With FSDP, tensor
or expert parallelism, `ModelLayout.place` shards a model that is still on the meta device, so that
no process ever holds all weights. Every rank must then enter every forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from llmfoundry.distributed.apply import parallelize
from llmfoundry.distributed.mesh import Meshes, build_mesh, with_mesh
from llmfoundry.distributed.process_group import World, join
from llmfoundry.errors import UserError
from llmfoundry.loggers.console import format_gib
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.plan.memory import count_weight_bytes
from llmfoundry.recipe.model import ResolvedModelConfig
from llmfoundry.recipe.parallel import (
    AXES,
    EXPERT,
    Degrees,
    ParallelConfig,
    ResolvedParallelConfig,
    limits,
)


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

    def describe(self, model: Decoder, precision: str) -> str:
        """Return a line about the weights that each rank holds, from a model on the meta device."""
        degrees = Degrees() if self.meshes is None else self.meshes.degrees
        held = count_weight_bytes(model, torch.device("meta"), degrees)
        line = f"weights in {precision}, {format_gib((held.frozen + held.trained.shard) / 2**30)}"
        if self.meshes is None:
            return line
        return f"{line} on each of {degrees.world} processes ({layout_text(degrees)})"

    def place(self, root: Root, world: World, *, precision: str) -> None:
        """Shard a model on the meta device and allocate this rank's shards, without values."""
        parallelize(root, world, self.meshes, self.config, precision=precision)


def layout_text(degrees: Degrees) -> str:
    """Return the degrees above 1 in words: data_parallel_shard 4, expert_parallel 2."""
    parts = [f"{key.removesuffix('_degree')} {n}" for key, n in _by_key(degrees).items() if n > 1]
    return ", ".join(parts)


def _by_key(degrees: Degrees) -> dict[str, int]:
    values = (degrees.replicate, degrees.shard, degrees.context, degrees.tensor, degrees.expert)
    return dict(zip((*AXES, EXPERT), values, strict=True))


def full_model() -> ModelLayout:
    """Return the layout in which this process holds the full model."""
    return ModelLayout(ParallelConfig().resolve())


@contextmanager
def join_layout(config: ParallelConfig) -> Iterator[tuple[World, ModelLayout]]:
    """Join the processes of a command, and build the device mesh of its layout.

    Yields:
        This process, with the data-parallel groups of the mesh, and the layout.
    """
    with join(config, keeps_memory=config.keeps_whole) as world:
        meshes = build_mesh(config, world)
        layout = ModelLayout(without_activations(config).resolve(), meshes)
        yield with_mesh(world, meshes), layout


def without_activations(config: ParallelConfig) -> ParallelConfig:
    """Return the section without its settings of training: inference saves no activations."""
    return replace(
        config,
        activation_checkpointing="none",
        activation_checkpointing_target=None,
        activation_compression="none",
        activation_memory_budget=None,
        expert_capacity=None,
        expert_halves=False,
    )
