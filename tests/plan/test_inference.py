"""The memory of a forward pass: the estimate, and a pass of one rank of eight on fake tensors."""

from __future__ import annotations

import pytest
import torch

from benchmarks.memory import built
from llmfoundry.builders.model import build_root
from llmfoundry.builders.model_layout import without_activations
from llmfoundry.ops.shard_layout import local_shard
from llmfoundry.plan.fit import with_guessed_vocabulary
from llmfoundry.plan.inference import inference_memory
from llmfoundry.plan.meter import LiveBytes
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.paths import YAMLS
from llmfoundry.recipe.train import TrainRecipe


@pytest.mark.parametrize("name", ["mpt-70b", "dbrx"])
def test_a_forward_pass_takes_the_estimated_memory(name: str) -> None:
    words = ["precision=bf16", "model.n_layers=3"]
    recipe = checked(TrainRecipe, str(YAMLS / f"{name}.yaml"), words).resolve()
    recipe = with_guessed_vocabulary(recipe)
    recipe.parallel = without_activations(recipe.parallel).resolve()
    need = inference_memory(
        build_root(recipe).model,
        recipe.model,
        recipe.parallel.degrees(8),
        precision="bf16",
        seq_len=recipe.max_seq_len,
        device=torch.device("cuda"),
    )
    live, length = LiveBytes(are_fake=True), recipe.max_seq_len
    with built(recipe, 8, live) as (root, _), torch.no_grad():
        root.eval()
        held = sum(local_shard(parameter).nbytes for parameter in root.parameters())
        live.most = 0
        tokens = torch.zeros(1, length, dtype=torch.long)
        root(tokens, None, lambda model, hidden: model.head(hidden[:, -1:]))
    assert need.weights == held
    counted = live.most - held
    estimated = need.gathered + length * need.activations
    assert counted <= estimated <= 1.5 * counted
