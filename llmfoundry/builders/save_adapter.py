"""The adapter of a run in peft's format, in each checkpoint. Entry point: `adapter_writer`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from llmfoundry.builders.adapter import FOLDER, has_adapter
from llmfoundry.builders.run_context import RunContext
from llmfoundry.checkpoint.load import load_tensors
from llmfoundry.checkpoint.storage import Checkpoint
from llmfoundry.files import open_to_all, write_json
from llmfoundry.models.adapter import (
    BASE,
    BASE_ROWS,
    adapted_layers,
    base_sample,
    base_token_rows,
    is_added,
    saved_names,
)
from llmfoundry.recipe.finetune import ResolvedFinetuneRecipe
from llmfoundry.recipe.model import HFModelConfig


def adapter_writer(job: RunContext) -> Callable[[Path], None] | None:
    """Return a function that adds the adapter in peft's format to a checkpoint; None: no adapter.

    It reads the tensors back from the checkpoint that was just written: by then training has
    continued, and no rank has all tensors. All ranks call `adapter_writer`; only the main process
    calls its result.
    """
    recipe, model = job.recipe, job.root.model
    if not isinstance(recipe, ResolvedFinetuneRecipe) or not has_adapter(recipe):
        return None

    # collect now what does not change during training
    sample = base_sample(model, frozen=True)
    plan = {name: lora for name, _, _, lora in adapted_layers(model)}
    base_rows = base_token_rows(model)
    names = set(saved_names(model))
    like = {n: (p.shape, p.dtype) for n, p in model.named_parameters() if n in names}
    experts = model.config.ffn_config.moe_num_experts or 1
    base = recipe.base.pretrained

    def write(folder: Path) -> None:
        # read the adapter back from the checkpoint
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in like.items()}
        load_tensors({"model": tensors}, Checkpoint(job.run, folder))
        (folder / FOLDER).mkdir()
        write_json(folder / FOLDER / BASE, sample)
        if base_rows:
            from safetensors.torch import save_file  # a slow import

            save_file(base_rows, folder / FOLDER / BASE_ROWS)
            open_to_all(folder / FOLDER / BASE_ROWS)
        if isinstance(recipe.model, HFModelConfig):
            from llmfoundry.hf.peft.class_adapter import write_class_adapter

            class_model: Any = model
            write_class_adapter(
                folder / FOLDER,
                class_model,
                tensors,
                base,
                base_rows,
                is_resized=recipe.base.resize_embeddings,
            )
            return

        # the native decoder: convert to the names of Hugging Face
        from llmfoundry.hf.peft.write import target_matrices, write_adapter

        write_adapter(
            folder / FOLDER,
            model.config,
            target_matrices(plan, tensors, experts, base_rows),
            whole={name: t for name, t in tensors.items() if not is_added(name)},
            base=base,
            is_resized=recipe.base.resize_embeddings,
        )

    return write
