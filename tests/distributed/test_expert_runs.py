"""A run whose processes share the experts: trained, resumed elsewhere, evaluated, converted."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.model import FFNConfig, ModelConfig
from llmfoundry.recipe.parallel import ParallelConfig, limits
from llmfoundry.recipe.train import TrainRecipe
from tests.tiny import losses, run, write_recipe

DBRX = (
    "model.no_bias=true",
    "model.ffn_config={ffn_type: dmoe, mlp_type: glu, ffn_act_fn: silu, ffn_hidden_size: 32,"
    " moe_num_experts: 4, moe_top_k: 2, moe_normalize_expert_weights: 1}",
    "model.attn_config.attn_type=grouped_query_attention",
    "model.attn_config.kv_n_heads=1",
    "model.attn_config.clip_qkv=8",
    "model.tie_word_embeddings=false",
)


def shared(shard: int, expert: int) -> tuple[str, ...]:
    return (
        "parallel.data_parallel_replicate_degree=1",
        f"parallel.data_parallel_shard_degree={shard}",
        f"parallel.expert_parallel_degree={expert}",
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}


@pytest.mark.slow
def test_train_resume_eval_convert_are_those_of_one_process(tmp_path: Path) -> None:
    write_recipe(tmp_path)

    def train(name: str, *changes: str, processes: int) -> dict[int, float]:
        line = ("tiny.yaml", *DBRX, f"run_name={name}", *changes)
        run("train.py", *line, cwd=tmp_path, processes=processes)
        return losses(tmp_path / "runs" / name)

    alone = train("one", processes=1)
    assert train("two", *shared(2, 2), processes=2) == pytest.approx(alone, rel=1e-6)
    for name, layout, processes in (("on-four", shared(4, 2), 4), ("on-one", (), 1)):
        begun = tmp_path / "runs" / name / "checkpoints" / "ba0000004"
        shutil.copytree(tmp_path / "runs/two/checkpoints/ba0000004", begun)
        resumed = train(name, *layout, processes=processes)
        assert min(resumed) == 5
        assert resumed == pytest.approx({b: alone[b] for b in resumed}, rel=1e-6)
    reported, converted = [], []
    for name in ("one", "two"):
        out = run("eval.py", f"runs/{name}", cwd=tmp_path).stdout
        reported.append([float(x) for x in re.findall(r"LanguageCrossEntropy +([\d.]+)", out)])
        run("convert.py", f"runs/{name}", "to=hf", f"output=hf-{name}", cwd=tmp_path)
        converted.append(weights(tmp_path / f"hf-{name}"))
    assert reported[0] and reported[0] == pytest.approx(reported[1], abs=2e-4)
    assert converted[0].keys() == converted[1].keys() and converted[0]
    for key, tensor in converted[0].items():
        torch.testing.assert_close(converted[1][key], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_steps_whose_rows_have_no_room_are_repeated_and_recorded(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    for name, capacity in (("exact", "null"), ("bounded", "1")):
        words = (*DBRX, *shared(2, 2), f"run_name={name}", f"parallel.expert_capacity={capacity}")
        run("train.py", "tiny.yaml", *words, cwd=tmp_path, processes=2)
    expected = losses(tmp_path / "runs" / "exact")
    assert losses(tmp_path / "runs" / "bounded") == pytest.approx(expected, rel=1e-6)
    lines = (tmp_path / "runs" / "bounded" / "events.jsonl").read_text().splitlines()
    events = [e for e in map(json.loads, lines) if e["kind"] == "expert_overflow"]
    assert [e["repeated"] for e in events] == [2**n for n in range(len(events))] != []
    assert all(e["rows"] > 0 and e["action"] == "redo" for e in events)


MIXTURE: dict[str, Any] = {"ffn_type": "dmoe", "moe_num_experts": 6}
REFUSED = {
    (3, 4): (MIXTURE, "parallel.expert_parallel_degree: 4 does not divide"),
    (4, 2): ({}, "parallel.expert_parallel_degree: 2, but the model has no experts; write 1"),
    (2, 2): (MIXTURE | {"moe_impl": "megablocks"}, "model.ffn_config.moe_impl: megablocks"),
}


@pytest.mark.parametrize(("shard", "expert"), REFUSED)
def test_what_cannot_be_shared_is_refused(shard: int, expert: int) -> None:
    settings, expected = REFUSED[shard, expert]
    model = ModelConfig(no_bias=True, ffn_config=FFNConfig(**settings))
    config = ParallelConfig(data_parallel_shard_degree=shard, expert_parallel_degree=expert)
    (line,) = limits(model, config, config.written_degrees)
    assert line.startswith(expected) and "\n" not in line


def refusals(impl: str, **settings: Any) -> list[str]:
    """Error lines of a mixture whose experts two processes share."""
    model = ModelConfig(no_bias=True, ffn_config=FFNConfig(**MIXTURE, moe_impl=impl))
    degrees = {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2}
    config = ParallelConfig(**degrees, **settings)
    return [*config.check(), *limits(model, config, config.written_degrees)]


def test_what_a_capacity_and_halves_cannot_do_is_refused() -> None:
    assert not refusals("grouped_mm", expert_capacity=1.5, expert_halves=True)
    (line,) = refusals("torch", expert_capacity=1.5)
    assert line.startswith("parallel.expert_capacity: the host reads")
    recomputed = {"activation_checkpointing": True, "activation_checkpointing_target": "experts"}
    (line,) = refusals("grouped_mm", expert_halves=True, **recomputed)
    assert line.startswith("parallel.expert_halves: ") and "write feed_forward" in line
    (line,) = refusals("grouped_mm", expert_capacity=0.9)
    assert line.startswith("parallel.expert_capacity: 0.9 is too small")
    for settings in ({"expert_capacity": 2.0}, {"expert_halves": True}):
        (line,) = ParallelConfig(**settings).check()
        assert "has no effect with parallel.expert_parallel_degree: 1" in line


@pytest.mark.parametrize("degree", ["expert_parallel_degree", "tensor_parallel_degree"])
def test_selective_checkpointing_within_blocks_is_not_compiled(degree: str) -> None:
    recipe = TrainRecipe(compile=True)
    recipe.parallel.activation_checkpointing = "selective"
    recipe.model.ffn_config = FFNConfig(**MIXTURE)
    assert not any("selective" in line for line in recipe.check())
    recipe.parallel.data_parallel_shard_degree = 2
    setattr(recipe.parallel, degree, 2)
    (line,) = (line for line in recipe.check() if "selective is not compiled" in line)
    assert f"parallel.{degree}: 2" in line
    recipe = FinetuneRecipe(compile=True)
    recipe.parallel.activation_checkpointing = "selective"
    setattr(recipe.parallel, degree, 2)
    reported = [line for line in recipe.check() if "selective is not compiled" in line]
    assert len(reported) == (degree == "expert_parallel_degree")
