"""Models distributed over processes: the scores and texts of eval, generate, chat and serve.

Each layout is compared with a single process. The gauntlet has all kinds of tasks, and two of three
rows, so that some of four ranks have none.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import yaml

from llmfoundry.builders import model_layout
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.recipe.after_training import ChatRecipe, EvalRecipe, GenerateRecipe
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.parallel import ParallelConfig
from tests.tiny import ENV, command, finetune_recipe, run, write_recipe
from tests.warm_scripts import on_ranks

ROWS = {
    "times": [
        {"query": f"{i} times 3 is", "choices": [str(3 * i), str(2 * i)], "gold": 0}
        for i in range(1, 12)
    ],
    "lines": [{"context": f"line {i} of", "continuation": "document"} for i in range(3)],
    "say": [{"context": f"say {i}:", "answer": str(i)} for i in range(3)],
}
TYPES = {
    "times": "multiple_choice",
    "lines": "language_modeling",
    "say": "generation_task_with_answers",
}
BENCHMARKS = [{"name": label, "num_fewshot": int(label == "times")} for label in TYPES]
GAUNTLET = {
    "icl_tasks": [
        {
            "label": label,
            "icl_task_type": kind,
            "num_fewshot": [int(label == "times")],
            "dataset_uri": f"{label}.jsonl",
        }
        | ({"max_new_tokens": 5} if label == "say" else {})
        for label, kind in TYPES.items()
    ],
    "eval_gauntlet": {"categories": [{"name": "all", "benchmarks": BENCHMARKS}]},
}
EXPERTS = (
    "model.ffn_config={ffn_type: dmoe, mlp_type: glu, ffn_act_fn: silu, ffn_hidden_size: 16,"
    " moe_num_experts: 4, moe_top_k: 2}"
)
MODELS = {
    "dense": ("model.n_heads=4", "model.vocab_size=300"),
    "experts": ("model.n_heads=4", "model.vocab_size=300", EXPERTS),
}
DEGREES = "data_parallel_shard", "tensor_parallel", "expert_parallel", "data_parallel_replicate"


def degrees(shard: int = 1, tensor: int = 1, expert: int = 1, replicate: int = 1) -> list[str]:
    """Return the overrides of a layout."""
    sizes = zip(DEGREES, (shard, tensor, expert, replicate), strict=True)
    return [f"parallel.{name}_degree={size}" for name, size in sizes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of small models, and a gauntlet."""
    folder = tmp_path_factory.mktemp("sharded")
    write_recipe(folder)
    (folder / "gauntlet.yaml").write_text(yaml.safe_dump(GAUNTLET))
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, words in MODELS.items():
        run("train.py", "tiny.yaml", f"run_name={name}", "max_duration=2ba", *words, cwd=folder)
    return folder


_meetings = itertools.count()
Job = tuple[str, list[str]]
"""A command (eval, generate or chat) with its words."""


@pytest.fixture(scope="module")
def others(folder: Path) -> Path:
    """The folder, with Hugging Face exports, adapters' runs and an adapter in peft's format."""
    for name in MODELS:
        words = ["architecture=llmfoundry"] if name == "experts" else []
        run("convert.py", f"runs/{name}", "to=hf", f"output=hf-{name}", *words, cwd=folder)
    for name, pretrained in {"lora": "runs/dense", "lora-experts": "runs/experts"}.items():
        adapter = {"name": "lora", "r": 4}
        recipe = finetune_recipe(folder, model={"pretrained": pretrained}, adapter=adapter)
        words = (f"run_name={name}", "max_duration=2ba", "optimizer.lr=0.05")
        run("finetune.py", recipe.name, *words, cwd=folder)
    run("convert.py", "runs/lora", "to=peft", "output=peft", cwd=folder)
    config = json.loads((folder / "peft/adapter_config.json").read_text())
    config["base_model_name_or_path"] = "hf-dense"
    (folder / "peft/adapter_config.json").write_text(json.dumps(config))
    return folder


def commands(rank: int, size: int, folder: Path, meeting_place: str, jobs: Sequence[Job]) -> None:
    """Run commands one after another on a rank; write what each printed, or its error."""
    os.chdir(folder)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    torch.set_num_threads(1)
    if size > 1:
        meeting = f"file://{meeting_place}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)

    @contextmanager
    def joined(config: ParallelConfig, **_: bool) -> Iterator[World]:
        yield World(rank, size, rank, torch.device("cpu"))

    model_layout.join = joined  # type: ignore[assignment]
    printed = [_printed(command, words) for command, words in jobs]
    (folder / f"printed-{size}-{rank}.json").write_text(json.dumps(printed))
    if size > 1:
        dist.barrier()  # a rank that leaves early breaks connections that others still open
        dist.destroy_process_group()


def _printed(command: str, words: list[str]) -> str:
    from llmfoundry.cli.commands.chat import chat
    from llmfoundry.cli.commands.evaluate import evaluate
    from llmfoundry.cli.commands.generate import generate

    actions: dict[str, tuple[Any, Any]] = {
        "eval": (EvalRecipe, evaluate),
        "generate": (GenerateRecipe, generate),
        "chat": (ChatRecipe, chat),
    }
    recipe_type, action = actions[command]
    sys.stdin = io.StringIO("hi\n/reset\nyo\n")
    out = io.StringIO()
    try:
        with redirect_stdout(out):
            action(checked(recipe_type, None, words))
    except UserError as error:
        return str(error)
    return out.getvalue()


def run_jobs(folder: Path, size: int, jobs: Sequence[Job]) -> list[list[str]]:
    """Run commands on so many ranks; return what each rank printed."""
    meeting_place = str(folder / f"meeting-{next(_meetings)}")
    on_ranks(commands, (size, folder, meeting_place, jobs), size)
    files = [folder / f"printed-{size}-{rank}.json" for rank in range(size)]
    return [json.loads(file.read_text()) for file in files]


def place(name: str) -> str:
    """Return the path of a run by its name, or of another folder."""
    return name if name.startswith(("hf", "peft")) else f"runs/{name}"


def evaluation(name: str, output: str, *words: str) -> Job:
    """Return the job that evaluates a run."""
    common = ["eval.gauntlet=gauntlet.yaml", f"output={output}", "precision=fp32"]
    return "eval", [f"checkpoint={place(name)}", *common, *words]


def results(output: Path) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the metrics and the rows of an evaluation."""
    metrics = json.loads((output / "results.json").read_text())["metrics"]
    rows = [json.loads(line) for line in (output / "rows.jsonl").read_text().splitlines()]
    return metrics, rows


def assert_same_scores(output: Path, expected: Path) -> None:
    """Compare all numbers to 1e-5, and everything else exactly."""
    metrics, rows = results(output)
    expected_metrics, expected_rows = results(expected)
    assert metrics == pytest.approx(expected_metrics, rel=1e-6, abs=1e-5)
    assert len(rows) == len(expected_rows)
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert row == pytest.approx(expected_row, abs=1e-5)


GENERATE = ["prompt=line 3", "max_new_tokens=12", "temperature=1.0", "precision=fp32"]
CHAT = ["chat_template=zephyr", "max_new_tokens=6", "temperature=0", "precision=fp32"]


def texts(name: str, *words: str) -> list[Job]:
    """Return the jobs that generate with a run: with and without a KV cache, and a conversation."""
    checkpoint = f"checkpoint={place(name)}"
    return [
        ("generate", [checkpoint, *GENERATE, *words]),
        ("generate", [checkpoint, *GENERATE, "kv_cache=false", *words]),
        ("chat", [checkpoint, *CHAT, *words]),
    ]


def check(folder: Path, size: int, layouts: Sequence[tuple[str, list[str]]], *prompts: str) -> None:
    """Compare evaluation and generation in each layout (run, overrides) with one process."""
    names = sorted({name for name, _ in layouts})
    alone: list[Job] = []
    for name in names:
        alone += [
            evaluation(name, f"one/{name}/{way}", f"eval.icl_prompts={way}") for way in prompts
        ]
        alone += texts(name)
    (printed_alone,) = run_jobs(folder, 1, alone)
    per_model = len(prompts) + 3
    expected = {
        name: printed_alone[i * per_model + len(prompts) : (i + 1) * per_model]
        for i, name in enumerate(names)
    }
    jobs: list[Job] = []
    for number, (name, words) in enumerate(layouts):
        for way in prompts:
            output = f"ranks/{size}/{number}/{way}"
            jobs.append(evaluation(name, output, f"eval.icl_prompts={way}", *words))
        jobs += texts(name, *words)
    first, *others = run_jobs(folder, size, jobs)
    for number, (name, words) in enumerate(layouts):
        for way in prompts:
            assert_same_scores(
                folder / f"ranks/{size}/{number}/{way}", folder / f"one/{name}/{way}"
            )
        mine = slice(number * per_model + len(prompts), (number + 1) * per_model)
        assert first[mine] == expected[name], words
        assert all(not any(printed[mine]) for printed in others), "rank 0 alone prints"
        if place(name) != name:
            assert "on each of" in first[number * per_model], "the start names the layout"


def test_two_ranks_give_the_scores_and_texts_of_one_process(folder: Path) -> None:
    layouts = [("dense", degrees(shard=2)), ("experts", degrees(shard=2, expert=2))]
    check(folder, 2, layouts, "native")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_layout_gives_the_scores_and_texts_of_one_process(folder: Path, size: int) -> None:
    layouts = {
        2: [
            ("dense", degrees(shard=2)),
            ("dense", degrees(tensor=2)),
            ("experts", degrees(shard=2)),
            ("experts", degrees(shard=2, expert=2)),
            ("experts", degrees(tensor=2)),
            ("experts", degrees(tensor=2, expert=2)),
        ],
        3: [("dense", degrees(shard=3)), ("experts", degrees(shard=3))],
        4: [
            ("dense", degrees(shard=4)),
            ("dense", degrees(tensor=4)),
            ("dense", degrees(shard=2, tensor=2)),
            ("dense", degrees(shard=2, replicate=2)),
            ("experts", degrees(shard=4, expert=4)),
            ("experts", degrees(shard=4, expert=2)),
            ("experts", degrees(shard=2, tensor=2, expert=2)),
        ],
    }[size]
    check(folder, size, layouts, "native", "harness", "foundry")


@pytest.mark.slow
def test_folders_and_adapters_are_sharded_too(others: Path) -> None:
    layouts = [
        ("hf-dense", degrees(shard=2)),
        ("hf-dense", degrees(tensor=2)),
        ("hf-experts", degrees(shard=2, expert=2)),
        ("lora", degrees(shard=2)),
        ("lora-experts", degrees(shard=2, expert=2)),
        ("peft", degrees(shard=2)),
        ("peft", degrees(tensor=2)),
    ]
    check(others, 2, layouts, "native")


@pytest.mark.parametrize(
    ("name", "words", "line"),
    [
        ("dense", degrees(tensor=3), "parallel.tensor_parallel_degree: 3 does not fit 2 processes"),
    ],
)
def test_a_layout_that_does_not_fit_is_one_line(
    folder: Path, name: str, words: list[str], line: str
) -> None:
    printed = run_jobs(folder, 2, [evaluation(name, "refused", *words)])
    assert all(line in lines for (lines,) in printed)


PEAK = """
import os, re
from llmfoundry.models import decoder
from llmfoundry.builders import checkpoint, model_layout

def peak():
    text = open("/proc/self/status").read()
    return int(re.search(r"VmHWM:\\s+(\\d+)", text)[1])

def fill(loaded, world, note):
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins here
    before = peak()
    filled(loaded, world, note)
    decoder.Root.peak = lambda: peak() - before

filled, checkpoint._fill_loaded = checkpoint._fill_loaded, fill
run, decoder.Decoder.run = decoder.Decoder.run, lambda self, *a, **k: noted(run(self, *a, **k))

def noted(result):
    open(f"peak-{os.environ.get('RANK', '0')}", "w").write(str(decoder.Root.peak()))
    return result
"""


@pytest.mark.slow
def test_the_peak_memory_of_a_rank_shrinks_with_the_number_of_ranks(folder: Path) -> None:
    """Of 50M parameters in 16 blocks; each rank also gathers up to three blocks at a time."""
    (folder / "peak.py").write_text(PEAK)
    wide = ("model.d_model=512", "model.n_heads=8", "model.n_layers=16", "max_duration=1ba")
    run("train.py", "tiny.yaml", "run_name=wide", *wide, cwd=folder)
    weights = 16 * 12 * 512**2 * 4 / 1024  # KiB
    for size in (1, 2, 4):
        words = ("eval=off", "eval.validation=true", "eval.validation_rows=4", "precision=fp32")
        layout = degrees(shard=size) if size > 1 else []
        plugin = "plugins=[./peak.py]"
        run("eval.py", "runs/wide", *words, plugin, *layout, cwd=folder, processes=size)
        peaks = [int((folder / f"peak-{rank}").read_text()) for rank in range(size)]
        most = weights / size + (3 * weights / 16 if size > 1 else 0) + 2**16
        assert max(peaks) < most, (size, peaks, weights)


def answers(folder: Path, name: str, *words: str) -> list[str]:
    """Return the texts of a server for prompts that are sent at the same time."""
    pipe, common = subprocess.PIPE, [f"runs/{name}", "port=0", "slots=2", "precision=fp32"]
    start = command("serve.py", *common, *words)
    server = subprocess.Popen(start, cwd=folder, env=ENV, stderr=pipe, stdout=pipe, text=True)
    assert server.stderr is not None
    address = next(m[0] for line in server.stderr if (m := re.search(r"http://\S+/v1", line)))

    def ask(number: int) -> str:
        body = {"prompt": f"line {number} of" * number, "max_tokens": 9, "seed": number}
        body |= {"temperature": number % 2}
        request = urllib.request.Request(f"{address}/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=120) as reply:
            text: str = json.load(reply)["choices"][0]["text"]
            return text

    with ThreadPoolExecutor(5) as pool:
        texts = list(pool.map(ask, range(1, 6)))
    server.send_signal(signal.SIGINT)
    assert server.wait(60) == 0
    return texts


@pytest.mark.slow
def test_a_server_of_several_ranks_answers_as_one_process_does(folder: Path) -> None:
    layouts = {
        "dense": [degrees(shard=2), degrees(tensor=2)],
        "experts": [degrees(shard=2, expert=2)],
    }
    for name, sharded in layouts.items():
        expected = answers(folder, name)
        for words in sharded:
            assert answers(folder, name, *words, "parallel.nproc_per_node=2") == expected, words


@pytest.mark.slow
def test_sixteen_bits_are_sharded_too(folder: Path) -> None:
    """Of the logits the texts only: two tokens may be almost equally likely."""
    for name, layout in {"dense": degrees(tensor=2), "experts": degrees(shard=2, expert=2)}.items():
        jobs: list[Job] = []
        for precision in ("bf16", "fp16"):
            words = [f"checkpoint=runs/{name}", *GENERATE, *layout, f"precision={precision}"]
            jobs.append(("generate", words))
        first, _ = run_jobs(folder, 2, jobs)
        assert all(text.startswith("line 3") and len(text) > 10 for text in first), first


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_ends_a_server_with_one_line(folder: Path, killed: int) -> None:
    words = ["runs/dense", "port=0", "parallel=fsdp", "parallel.nproc_per_node=2"]
    pipe = subprocess.PIPE
    server = subprocess.Popen(
        command("serve.py", *words), cwd=folder, env=ENV, stderr=pipe, stdout=pipe, text=True
    )
    assert server.stderr is not None
    address = next(m[0] for line in server.stderr if (m := re.search(r"http://\S+/v1", line)))
    body = json.dumps({"prompt": "line", "max_tokens": 4, "temperature": 0}).encode()
    request = urllib.request.Request(f"{address}/completions", body)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert json.load(reply)["usage"]["completion_tokens"] == 4
    (child,) = psutil.Process(server.pid).children()
    (server if killed == 0 else child).kill()
    status = server.wait(60)
    lines = server.stderr.read().splitlines()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running()
    expected = ["rank 1 was killed by SIGKILL; all ranks end"] if killed else []
    assert (status, [line for line in lines if "rank" in line]) == (1 if killed else -9, expected)
