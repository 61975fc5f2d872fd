"""A step that runs out of memory: the run goes on with half the microbatch, and loses nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmfoundry.builders.microbatch import memory_facts
from llmfoundry.distributed.process_group import ALONE
from llmfoundry.errors import RestartNeeded, UserError, is_out_of_memory
from llmfoundry.events import read_events
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.train.out_of_memory import KIND, NAME, MicrobatchLimit, remembered
from tests.tiny import losses, run, write_recipe
from tests.train.here import train_here
from tests.warm_scripts import run_script

PLUGIN = '''
"""Rows at a time that do not fit: from a step on (from 1), on one process."""
import torch
from llmfoundry.recipe.logger import CALLBACKS, CallbackType
from llmfoundry.train.trainer import Callback

class Full(Callback):
    def __init__(self, job, *, rank, step, most, where):
        self.is_here, self.step, self.most = job.world.rank == rank, step, most
        self.where, self.seen = where, 0

    def on_start(self, trainer):
        if not self.is_here:
            return

        def request(module, inputs):
            if trainer.batch + 1 >= self.step and len(inputs[0]) > self.most and module.training:
                torch.empty(2**45)

        def request_back(module, grads, made):
            request(module, grads)

        block = trainer.root.model.blocks[0]
        if self.where == "forward":
            block.register_forward_pre_hook(request)
        else:
            block.register_full_backward_hook(request_back)

CALLBACKS["full"] = CallbackType(Full, keys={"rank": 0, "step": 3, "most": 1, "where": "forward"})
'''
MOE = (
    "model.ffn_config={ffn_type: dmoe, mlp_type: glu, ffn_act_fn: silu, ffn_hidden_size: 16,"
    " moe_num_experts: 4, moe_top_k: 2, moe_balancing: bias, moe_bias_update_rate: 0.1,"
    " moe_loss_weight: null}"
)
SHORT = ("max_duration=6ba", "eval=off", "global_train_batch_size=8", "save_interval=2ba")
FULL = ("plugins=[full.py]", "device_train_microbatch_size=4")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with tiny.yaml and full.py."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("memory")
        write_recipe(folder)
        (folder / "full.py").write_text(PLUGIN)
        patch.chdir(folder)
        yield folder


def full(**keys: Any) -> str:
    return f"callbacks.plugins.full={{{', '.join(f'{k}: {v}' for k, v in keys.items())}}}"


def shortages(folder: Path) -> list[tuple[int, str, int]]:
    """Step, action and microbatch of each event."""
    found = [e for e in read_events(folder) if e["kind"] == KIND]
    return [(e["step"], e["action"], e["microbatch"]) for e in found]


def ended(place: Path) -> list[dict[str, Any]]:
    """What processes recorded at their ends."""
    return [json.loads(path.read_text()) for path in sorted((place / "ends").glob("rank-*"))]


@pytest.mark.parametrize(
    ("where", "model"),
    [("forward", ("model.resid_pdrop=0.2",)), ("backward", (MOE, "model.resid_pdrop=0.1"))],
)
def test_losses_are_those_of_the_smaller_size_from_that_step_on(
    place: Path, where: str, model: tuple[str, ...]
) -> None:
    """As of a run that is stopped before it and resumed with the smaller size: bit for bit."""
    short = train_here(where, *SHORT, *FULL, *model, full(step=3, where=where))
    rows = "device_train_microbatch_size={}".format
    stopped = train_here(f"{where}-stopped", *SHORT, *model, rows(4))
    for later in ("ba0000004", "ba0000006"):
        shutil.rmtree(stopped / "checkpoints" / later)
    resumed = train_here(stopped.name, *SHORT, *model, rows(1))
    assert losses(short) == losses(resumed)
    assert shortages(short) == [(3, "redo", 2), (3, "redo", 1)]


def test_a_step_that_fits_at_no_size_ends_with_a_line(place: Path) -> None:
    line = r"^device_train_microbatch_size: step 3 ran out of memory at 1; write a smaller model"
    with pytest.raises(UserError, match=line):
        train_here("none", *SHORT, *FULL, full(most=0))


def test_what_is_no_shortage_is_raised_as_it_is(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr("llmfoundry.train.objective.CrossEntropy.of", fail)
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes"):
        train_here("defect", *SHORT)
    assert shortages(Path("runs/defect")) == []


def test_an_update_that_does_not_fit_is_not_done_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the weights may have moved."""
    monkeypatch.setattr("torch.optim.AdamW.step", lambda *_, **__: torch.empty(2**45))
    line = r"^optimizer.name: the update of step 1 ran out of memory \(tried to allocate"
    with pytest.raises(UserError, match=line):
        train_here("update", *SHORT, "optimizer={name: adamw, lr: 1e-3}")


def test_replicas_do_the_step_again_together(place: Path) -> None:
    """In the midst of reductions that the other has begun too; the same as with the size fixed."""
    again = ("parallel=ddp", full(rank=1, step=3, where="backward"))
    run("train.py", "tiny.yaml", "run_name=ddp", *SHORT, *FULL, *again, cwd=place, processes=2)
    fixed = train_here("ddp-fixed", *SHORT, "device_train_microbatch_size=1")
    assert losses(Path("runs/ddp")) == pytest.approx(losses(fixed), rel=2e-5)
    assert shortages(Path("runs/ddp")) == [(3, "redo", 2), (3, "redo", 1)]
    for event in read_events(Path("runs/ddp")):
        assert event["ranks"] == [1] and "on rank 1" in event["what"]


def test_shards_start_again_with_half_which_the_folder_remembers(place: Path) -> None:
    """All end at once, and the next start of the same command goes on from the last checkpoint."""
    words = ["tiny.yaml", "run_name=fsdp", *SHORT, *FULL, "parallel=fsdp", full(rank=1, most=2)]
    (place / "ends").mkdir()
    ends = {"LLMFOUNDRY_ENDS": str(place / "ends")}
    failed = run_script("train.py", words, cwd=place, processes=2, variables=ends)
    assert failed.returncode == 1
    assert [(end["kind"], end["status"]) for end in ended(place)] == [("lost", 1), ("memory", 75)]
    assert "[rank 1] device_train_microbatch_size: step 3 ran out of memory" in failed.stderr
    assert shortages(Path("runs/fsdp")) == [(3, "start_again", 2)]
    assert json.loads(Path("runs/fsdp", NAME).read_text())["microbatch"] == 2
    done = run("train.py", *words, cwd=place, processes=2)
    assert "2 in place of 4, as an earlier start ran out of memory" in done.stdout
    assert "resuming from runs/fsdp/checkpoints/ba0000002" in done.stdout
    fixed = train_here("fsdp-fixed", *SHORT, "device_train_microbatch_size=2")
    assert losses(Path("runs/fsdp")) == pytest.approx(losses(fixed), rel=2e-5)


def test_a_record_counts_for_what_it_was_made_of(tmp_path: Path) -> None:
    limit = MicrobatchLimit(tmp_path, {"max_seq_len": 64, "parallel": {"shard": 2}}, rows=8)
    assert remembered(tmp_path, limit.facts) == (None, [])
    with pytest.raises(
        RestartNeeded, match="start again with 4: a step has 2 microbatches in place"
    ):
        limit.start_again(8, MemoryError(), step=5)
    assert remembered(tmp_path, limit.facts) == (4, [])
    changed = {"max_seq_len": 32, "parallel": {"shard": 2}, "precision": "fp32"}
    assert remembered(tmp_path, changed) == (None, ["max_seq_len", "precision"])
    for damaged in ("", "[]", '{"microbatch": 0, "for": {}}', '{"microbatch": "4", "for": {}}'):
        (tmp_path / NAME).write_text(damaged)
        assert remembered(tmp_path, limit.facts) == (None, [])


@pytest.mark.parametrize(
    "override",
    [
        "parallel.activation_compression=int8",
        "parallel.activation_checkpointing=whole",
        "parallel.activation_checkpointing_target=attention",
        "parallel.activation_memory_budget=0.5",
        "parallel.reshard_after_forward=true",
        "optimizer.moments=bf16",
        "max_seq_len=32",
    ],
)
def test_what_saves_memory_makes_an_earlier_shortage_void(place: Path, override: str) -> None:
    """Else whoever asks for it after a shortage gets nothing of what it was to give."""
    key, value = override.split("=")
    recipe = checked(TrainRecipe, "tiny.yaml", [])
    before = memory_facts(recipe, ALONE)
    section, _, name = key.rpartition(".")
    setattr(getattr(recipe, section) if section else recipe, name, value)
    after = memory_facts(recipe, ALONE)
    assert [k for k in after if after[k] != before[k]] == [key]


def test_a_size_that_no_folder_can_remember_is_no_reason_to_start_again(tmp_path: Path) -> None:
    """Or the next start would run out of memory in the same way, and so on."""
    (tmp_path / "file").write_text("")
    fixed = MicrobatchLimit(tmp_path, is_fixed=True)
    for limit, advice in (
        (MicrobatchLimit(tmp_path / "file"), "4"),
        (fixed, "a compile_mode that"),
    ):
        with pytest.raises(UserError, match=f"step 5 ran out of memory at 8; write {advice}"):
            limit.start_again(8, MemoryError(), step=5)


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (dist.DistBackendError("NCCL error: unhandled cuda error, 'out of memory'"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("could not create a primitive"), True),  # of oneDNN under RLIMIT_AS
        (RuntimeError("could not create a primitive descriptor for a matmul"), False),
        (RuntimeError("out of resource: shared memory, Required: 262144"), False),
        (OSError(12, "Cannot allocate memory"), False),
        (RuntimeError("Connection closed by peer"), False),
    ],
)
def test_memory_is_told_from_other_errors(error: Exception, short: bool) -> None:
    assert is_out_of_memory(error) == short
