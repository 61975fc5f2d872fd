"""A checkpoint of any layout of processes resumes on any other, with the losses of one process.

Each number of processes is started once and runs its layouts in turn: all save after two steps,
and each loads what others saved and takes a third. What they are compared with is a plain loop that
never stops. By default one process loads what all saved and each other layout what it saved itself
and what the one before it did; behind `slow` each loads everything. Bytes that leave
the disk, opened files and written files are counted: of replicas the first alone writes and reads.
"""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from llmfoundry.checkpoint.load import load_training_state, load_weights
from llmfoundry.checkpoint.save import Checkpointer, Contents, Reports, SavePolicy
from llmfoundry.checkpoint.storage import Checkpoint, Storage
from llmfoundry.distributed.apply import parallelize
from llmfoundry.distributed.context import token_sharding
from llmfoundry.distributed.fsdp import apply_ddp
from llmfoundry.distributed.mesh import build_mesh, with_mesh
from llmfoundry.distributed.process_group import World
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.models.tensor_parallel import all_stacked_rows
from llmfoundry.ops.packed_layout import IGNORE, Batch
from llmfoundry.ops.packed_layout import PackedLayout as Rows
from llmfoundry.recipe.optimizer import GradientClippingConfig, OptimizerConfig
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.train.average import AveragedWeights
from llmfoundry.train.optim.optimizers import build_optimizer
from llmfoundry.train.step import Guard, StepSettings, train_step
from tests.models.test_decoder import make_config
from tests.tiny import run, write_recipe
from tests.warm_scripts import on_ranks

CPU = torch.device("cpu")
ROWS, LENGTH, CLIP, SAVED, DECAY = 24, 16, 0.5, 2, 0.2
"""Rows of a batch, which 8 and 3 processes share; steps before a save; of the weights' average.
The last is between (1 + n) / (10 + n) of the first step and of the second."""
DENSE: dict[str, Any] = {
    "vocab_size": 61,
    "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 2, "rope": True},
}
EXPERTS: dict[str, Any] = {  # as DBRX has them
    "no_bias": True,
    "ffn_config": {
        "ffn_type": "dmoe",
        "mlp_type": "glu",
        "ffn_act_fn": "silu",
        "ffn_hidden_size": 16,
        "moe_num_experts": 8,
        "moe_top_k": 2,
        "moe_loss_weight": 0.05,
    },
}
MODELS = {"dense": DENSE, "experts": DENSE | EXPERTS}
"""61 rows for tokens are cut unevenly by every layout, 8 experts by 3 processes."""


@dataclass(frozen=True)
class Layout:
    """Degrees by the middle of their keys; a layout of experts alone has `only`."""

    processes: int
    degrees: dict[str, int] = field(default_factory=dict)
    only: str = ""
    routine: bool = True
    """Runs by default; else behind `slow`."""

    def models(self) -> list[str]:
        return [self.only] if self.only else [*MODELS]


REPLICATE, SHARD = "data_parallel_replicate", "data_parallel_shard"
CONTEXT, TENSOR, EXPERT = "context_parallel", "tensor_parallel", "expert_parallel"
LAYOUTS = {
    "one": Layout(1),
    "ddp-2": Layout(2, {REPLICATE: 2}),
    "fsdp-3": Layout(3, {SHARD: 3}),
    "hsdp-2x2": Layout(4, {REPLICATE: 2, SHARD: 2}),
    "fsdp-4": Layout(4, {SHARD: 4}, routine=False),
    "fsdp-8": Layout(8, {SHARD: 8}, routine=False),
    "hsdp-2x4": Layout(8, {REPLICATE: 2, SHARD: 4}, routine=False),
    "tensor-2": Layout(2, {TENSOR: 2}, "dense", routine=False),
    "tensor-2x2": Layout(4, {SHARD: 2, TENSOR: 2}, "dense"),
    "tensor-hsdp-2x2x2": Layout(8, {REPLICATE: 2, SHARD: 2, TENSOR: 2}, "dense", routine=False),
    "expert-4": Layout(4, {SHARD: 4, EXPERT: 4}, "experts", routine=False),
    "expert-2x2": Layout(4, {SHARD: 4, EXPERT: 2}, "experts"),
    "expert-hsdp-2x2x2": Layout(8, {REPLICATE: 2, SHARD: 4, EXPERT: 2}, "experts", routine=False),
    "expert-context-2x2x2": Layout(8, {SHARD: 4, CONTEXT: 2, EXPERT: 4}, "experts", routine=False),
    "context-2x2": Layout(4, {SHARD: 2, CONTEXT: 2}, routine=False),
    "context-tensor-2x2x2": Layout(8, {SHARD: 2, CONTEXT: 2, TENSOR: 2}, "dense", routine=False),
}


def global_batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 61, (ROWS, LENGTH), generator=generator)
    labels = tokens.roll(-1, 1)
    for row in range(ROWS):
        labels[row, 1 + (7 * row) % LENGTH :] = IGNORE
    cuts = [1 + row % (LENGTH - 2) for row in range(ROWS)]
    return Batch(tokens, labels, Rows.from_lengths([[cut, LENGTH - cut] for cut in cuts]))


class Job:
    """A model on a layout, its optimizer, and how it steps, saves and loads."""

    def __init__(self, layout: Layout, model: str, rank: int) -> None:
        degrees = {f"{name}_degree": size for name, size in layout.degrees.items()}
        config = ParallelConfig(**{"data_parallel_replicate_degree": 1} | degrees)
        config.fill()
        world = World(rank, layout.processes, rank, CPU)
        meshes = build_mesh(config, world)
        self.world = with_mesh(world, meshes)
        with torch.device("meta"):
            self.root = Root(Decoder(make_config(n_layers=2, **MODELS[model])))
        parallelize(self.root, self.world, meshes, config, precision="fp32")
        self.root.model.init_weights(5)
        self.module = apply_ddp(self.root, meshes)
        self.optimizer = build_optimizer(self.root.model, optimizer_config())
        self.average = AveragedWeights(self.root, DECAY)
        self.average.restart()

    def step(self, number: int) -> float:
        batch, world = global_batch(number), self.world
        result = train_step(
            self.module,
            self.optimizer,
            list(batch.split(ROWS // world.data_size))[world.data_rank],
            StepSettings(
                microbatch=4,
                autocast=nullcontext,
                clipping=GradientClippingConfig("norm", CLIP),
                data_group=world.data_group,
                token_group=world.token_group,
                shard_tokens=token_sharding(self.root),
            ),
            number=number,
            guard=Guard(CPU),
        )
        self.average.update(number + 1)
        return result.loss.item()

    def save(self, folder: Path, batch: int) -> Path:
        """In the background, with the weights changed as soon as that may be."""
        saver = Checkpointer(
            Storage(folder),
            self.world,
            Contents({"recipe.yaml": ""}, all_stacked_rows(self.root.model)),
            SavePolicy(keep=-1, background=True, max_failures=1),
            Reports(print),
        )
        averages = self.average.tensors
        state = {"batch": batch}
        place = saver.save(batch, self.root.model, self.optimizer, state, averages=averages)
        saver.before_update()
        with torch.no_grad():
            for parameter in self.root.parameters():
                parameter.zero_()
            for average in averages.values():
                average.zero_()
        saver.wait()
        saver.check()
        return place

    def load(self, folder: Path) -> None:
        saved = Checkpoint.at(folder)
        averages = self.average.tensors
        assert load_training_state(
            saved, self.root.model, self.optimizer, averages, world=self.world
        )


def optimizer_config() -> OptimizerConfig:
    config = OptimizerConfig(name="adamw", lr=0.01, weight_decay=0.1)
    config.fill()
    return config


@contextmanager
def disk() -> Iterator[Counter[str]]:
    """How often this process opens each file meanwhile, and the bytes of tensors that it reads."""
    seen: Counter[str] = Counter()
    opened, read = Path.open, torch.load

    def open_(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        seen[self.name] += 1
        return opened(self, mode, *args, **kwargs)

    def load(*args: Any, **kwargs: Any) -> Any:
        tensor = read(*args, **kwargs)
        seen["bytes"] += tensor.nbytes
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", open_)
        patch.setattr(torch, "load", load)
        yield seen


def here(names: list[str], processes: int) -> list[str]:
    return [name for name in names if LAYOUTS[name].processes == processes]


def sources(model: str, name: str, names: list[str]) -> list[str]:
    """Whose checkpoints a layout loads."""
    able = [other for other in names if model in LAYOUTS[other].models()]
    if LAYOUTS[name].processes == 1 or len(names) == len(LAYOUTS):
        return able
    place = able.index(name)
    return [able[place - 1], name]


def work(rank: int, processes: int, parts: str, names: list[str], folder: Path) -> None:
    """What so many processes do while they are there: `save`, `load`, or one after the other."""
    join(rank, processes, folder / f"{parts}{processes}")
    for part in parts.split():
        {"save": save_all, "load": load_all}[part](rank, processes, names, folder)
        if processes > 1:
            dist.barrier()
    if processes > 1:
        dist.destroy_process_group()


def save_all(rank: int, processes: int, names: list[str], folder: Path) -> None:
    """Two steps on each of these layouts, and a checkpoint."""
    for name in here(names, processes):
        for model in LAYOUTS[name].models():
            job = Job(LAYOUTS[name], model, rank)
            for number in range(SAVED):
                job.step(number)
            with disk() as seen:
                job.save(folder / model / name, SAVED)
            (folder / f"saved-{model}-{name}-{rank}.json").write_text(json.dumps(seen))


def load_all(rank: int, processes: int, names: list[str], folder: Path) -> None:
    """On each layout of so many processes: the next loss after each checkpoint."""
    found: dict[str, dict[str, float]] = {}
    for name in here(names, processes):
        for model in LAYOUTS[name].models():
            job = Job(LAYOUTS[name], model, rank)
            for other in sources(model, name, names):
                place = folder / model / other / f"checkpoints/ba{SAVED:07d}"
                with disk() as seen:
                    job.load(place)
                key = f"{model}-{other}-{name}"
                with job.average.in_place():
                    average = evaluated(job)
                found[key] = {"loss": job.step(SAVED), "average": average}
                (folder / f"loaded-{key}-{rank}.json").write_text(json.dumps(seen))
                spoil(job.root)
                load_weights(Checkpoint.at(place), job.root.model, world=job.world)
                found[key]["weights"] = evaluated(job)
    if rank == 0:
        (folder / f"{processes}.json").write_text(json.dumps(found))


@torch.no_grad()
def spoil(root: Root) -> None:
    for parameter in root.parameters():
        parameter.fill_(0.1)


@torch.no_grad()
def evaluated(job: Job) -> float:
    """The sum of all logits, of rows that are whole on every process."""
    job.root.eval()
    batch = global_batch(7)
    found = job.root(batch.tokens, batch.layout, lambda model, hidden: model.head(hidden))
    job.root.train()
    return float(found.double().square().sum())


def join(rank: int, processes: int, meeting: Path) -> None:
    torch.set_num_threads(1)
    if processes > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=processes
        )


def leave(processes: int) -> None:
    if processes > 1:
        dist.barrier()
        dist.destroy_process_group()


def start(task: Any, processes: int, *arguments: Any) -> None:
    if processes == 1:
        task(0, 1, *arguments)
    else:
        on_ranks(task, (processes, *arguments), processes)


def matrix(folder: Path, names: list[str]) -> dict[str, dict[str, float]]:
    """What each layout finds after each checkpoint."""
    sizes = sorted({LAYOUTS[name].processes for name in names})
    found: dict[str, dict[str, float]] = {}
    if len(names) == len(LAYOUTS):
        turns = [(part, size) for part in ("save", "load") for size in sizes]
    else:  # what is loaded was saved by no more processes, but for one
        turns = [("save", 1), *(("save load", size) for size in sizes[1:]), ("load", 1)]
    for parts, processes in turns:
        start(work, processes, parts, names, folder)
    for processes in sizes:
        found |= json.loads((folder / f"{processes}.json").read_text())
    return found


@pytest.fixture(scope="module")
def routine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, float]]]:
    folder = tmp_path_factory.mktemp("layouts")
    return folder, matrix(folder, [name for name, layout in LAYOUTS.items() if layout.routine])


@cache
def plain(model: str) -> tuple[list[float], float, float]:
    """Losses of a loop as one would write it; and what `evaluated` gives after the save.

    That is of the weights, and of their average.
    """
    decoder = Decoder(make_config(n_layers=2, **MODELS[model]))
    decoder.init_weights(5)
    optimizer = torch.optim.AdamW(
        decoder.parameters(), lr=0.01, weight_decay=0.1, betas=(0.9, 0.95), foreach=False
    )
    losses, logits, average_logits = [], 0.0, 0.0
    average = {name: weight.double() for name, weight in decoder.state_dict().items()}
    for step in range(SAVED + 3):
        if step == SAVED:
            batch = global_batch(7)
            weights = decoder.state_dict()
            averaged = {name: value.to(weights[name].dtype) for name, value in average.items()}
            with torch.no_grad():
                found = decoder.head(decoder(batch.tokens, batch.layout))
                other = copy.deepcopy(decoder)
                other.load_state_dict(averaged)
                found_average = other.head(other(batch.tokens, batch.layout))
            logits = float(found.double().square().sum())
            average_logits = float(found_average.double().square().sum())
        batch = global_batch(step)
        hidden, routing = decoder.run(batch.tokens, batch.layout)
        scores = decoder.head(hidden)
        loss = F.cross_entropy(scores.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE)
        if routing is not None:
            loss = loss + sum(routing.losses.values()) / ROWS
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        keep = min(DECAY, (step + 2) / (step + 11))
        for name, weight in decoder.state_dict().items():
            average[name] = keep * average[name] + (1 - keep) * weight.double()
    return losses, logits, average_logits


def check(found: dict[str, dict[str, float]], names: list[str]) -> None:
    wanted = {
        f"{model}-{other}-{name}"
        for name in names
        for model in LAYOUTS[name].models()
        for other in sources(model, name, names)
    }
    assert found.keys() == wanted
    for key, values in found.items():
        losses, logits, average = plain(key.split("-")[0])
        assert values["loss"] == pytest.approx(losses[SAVED], rel=1e-6), key
        assert values["weights"] == pytest.approx(logits, rel=1e-5), key
        assert values["average"] == pytest.approx(average, rel=1e-5), key
        assert abs(average / logits - 1) > 1e-3


def test_any_layout_resumes_from_any_other(routine: Any) -> None:
    check(routine[1], [name for name, layout in LAYOUTS.items() if layout.routine])


def tensor_bytes(place: Path) -> int:
    """Of all tensors of a checkpoint, each once."""
    table = FileSystemReader(str(place)).read_metadata().state_dict_metadata
    tensors = [item for item in table.values() if isinstance(item, TensorStorageMetadata)]
    return sum(math.prod(t.size) * t.properties.dtype.itemsize for t in tensors)


@pytest.mark.parametrize("name", ["ddp-2", "fsdp-3", "hsdp-2x2", "tensor-2x2"])
def test_each_byte_is_read_by_one_process_and_the_table_by_the_first(
    routine: Any, name: str
) -> None:
    """On the layout that wrote them; each of several processes reads a part."""
    folder = routine[0]
    whole = tensor_bytes(folder / "dense" / name / f"checkpoints/ba{SAVED:07d}")
    seen = [
        json.loads((folder / f"loaded-dense-{name}-{name}-{rank}.json").read_text())
        for rank in range(LAYOUTS[name].processes)
    ]
    assert [one.get(".metadata", 0) for one in seen] == [1] + [0] * (len(seen) - 1)
    read = [one.get("bytes", 0) for one in seen]
    assert sum(read) == whole
    readers = 2 if name == "hsdp-2x2" else len(seen)
    assert min(read[:readers]) > 0.6 * whole / readers and not any(read[readers:])


def test_only_the_first_replica_writes(routine: Any) -> None:
    folder = routine[0]
    for name, writers in (("ddp-2", 2), ("fsdp-3", 3), ("hsdp-2x2", 2), ("tensor-2x2", 4)):
        for rank in range(LAYOUTS[name].processes):
            seen = json.loads((folder / f"saved-dense-{name}-{rank}.json").read_text())
            own = {file for file in seen if file.endswith(".distcp")}
            files = {f"{kind}__{rank}_0.distcp" for kind in ("", "ema", "optimizer")}
            assert own == (files if rank < writers else set()), (name, rank)
            assert rank == 0 or seen.keys() == own


@pytest.mark.slow
def test_every_layout_resumes_from_every_other(tmp_path: Path) -> None:
    check(matrix(tmp_path, [*LAYOUTS]), [*LAYOUTS])


CHAIN = ("expert-hsdp-2x2x2", "fsdp-3", "one", "fsdp-8")


def link(rank: int, processes: int, number: int, folder: Path) -> None:
    """A link of the chain: load what the one before saved, one step, save."""
    join(rank, processes, folder / f"link{number}")
    job = Job(LAYOUTS[CHAIN[number]], "experts", rank)
    if number:
        job.load(folder / f"checkpoints/ba{number:07d}")
    loss = job.step(number)
    job.save(folder, number + 1)
    if rank == 0:
        (folder / f"{number}.json").write_text(json.dumps(loss))
    leave(processes)


@pytest.mark.slow
def test_a_run_resumes_from_eight_to_three_to_one_to_eight_processes(tmp_path: Path) -> None:
    for number, name in enumerate(CHAIN):
        start(link, LAYOUTS[name].processes, number, tmp_path)
    found = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(4)]
    assert found == pytest.approx(plain("experts")[0][:4], rel=1e-6)


SCRIPTS = {
    "tensor": (
        "parallel.tensor_parallel_degree=2",
        "model.attn_config={attn_type: grouped_query_attention, kv_n_heads: 2, rope: true}",
        "model.n_heads=4",
    ),
    "expert": (
        "parallel.data_parallel_shard_degree=2",
        "parallel.expert_parallel_degree=2",
        "model.ffn_config={ffn_type: dmoe, mlp_type: glu, ffn_act_fn: silu, ffn_hidden_size: 16,"
        " moe_num_experts: 4, moe_top_k: 2}",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", SCRIPTS)
def test_eval_convert_and_generate_take_the_weights_of_any_layout(
    tmp_path: Path, layout: str
) -> None:
    """Of two processes, beside those of the same steps on one."""
    write_recipe(tmp_path)
    # The gradient of keys' biases is rounding alone, which Adam makes as large as any.
    brief = ("tiny.yaml", "max_duration=3ba", "schedule.t_warmup=1ba", "model.no_bias=true")
    one = [words for words in SCRIPTS[layout] if not words.startswith("parallel.")]
    run("train.py", *brief, "run_name=one", *one, cwd=tmp_path)
    degrees = ("parallel.data_parallel_replicate_degree=1", *SCRIPTS[layout])
    run("train.py", *brief, "run_name=two", *degrees, cwd=tmp_path, processes=2)
    texts, scores, tensors = [], [], []
    for name in ("one", "two"):
        place = f"checkpoint=runs/{name}"
        words = ("prompt=line 7 of", "max_new_tokens=12", "temperature=0")
        texts.append(run("generate.py", place, *words, cwd=tmp_path).stdout)
        run("eval.py", place, f"output=scores-{name}", cwd=tmp_path)
        results = json.loads((tmp_path / f"scores-{name}/results.json").read_text())
        scores.append({k: v for k, v in results["metrics"].items() if k.startswith("metrics/")})
        run(
            "convert.py",
            place,
            "to=hf",
            "architecture=llmfoundry",
            f"output=hf-{name}",
            cwd=tmp_path,
        )
        tensors.append(load_file(tmp_path / f"hf-{name}/model.safetensors"))
    assert texts[0] == texts[1]
    assert scores[0] and scores[1] == pytest.approx(scores[0], rel=1e-5)
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        torch.testing.assert_close(tensors[1][name], tensor, rtol=0, atol=2e-5)
