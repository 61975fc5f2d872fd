"""Files that all processes need alike are opened by one of them, at the start and at a resume."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import ROOT, write_recipe
from tests.train.here import train_here
from tests.warm_scripts import on_ranks

SIZE = 2
SETTINGS = (
    "tokenizer={name: train, vocab_size: 300, chat_template: zephyr}",
    "eval.gauntlet=eval/gauntlets/generated_easy.yaml",
    "eval.icl_rows=2",
    "eval_interval=2ba",
    "save_interval=2ba",
    "data.validation_fraction=0.5",
    "max_seq_len=256",
)
SHARED = re.compile(
    r"(manifest|index|facts|counts|state|tokenizer|base_model)\.json|COMMIT|questions\.npz"
    r"|.*\.(txt|jinja|jsonl)|generated_easy\.yaml"
)
"""Files, by name, that no two processes read anything else of."""
WRITTEN = re.compile(r"/checkpoints/")  # read by its share of the processes, for checksums


def start(rank: int, folder: str, port: str, length: str) -> None:
    """A start of the run, which notes what this rank opens."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.chdir(folder)
    opened: list[str] = []

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.scandir", "os.listdir"):
            opened.append(f"{event} {arguments[0]}")

    sys.addaudithook(hear)
    train_here("run", *SETTINGS, f"max_duration={length}")
    Path(f"opened.{length}.{rank}").write_text("\n".join(opened))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run was begun and resumed."""
    folder = tmp_path_factory.mktemp("reads")
    write_recipe(folder)
    for length in ("2ba", "4ba"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        on_ranks(start, (str(folder), port, length), SIZE)
    return folder


def shared(folder: Path, length: str, rank: int) -> Counter[str]:
    """Names of the files that a rank opened and another needs too; and listings of the corpus."""
    found = (folder / f"opened.{length}.{rank}").read_text().splitlines()
    files = [folder / line.split(" ", 1)[1] for line in found if line.startswith("open ")]
    own = [
        file.name
        for file in files
        if (
            file.is_relative_to(ROOT / "eval")
            or file.is_relative_to(folder)
            or file.suffix == ".jinja"
        )
        and SHARED.fullmatch(file.name)
        and not (rank and WRITTEN.search(str(file)))
    ]
    own += ["corpus/"] * sum(line.endswith("/corpus") for line in found)
    return Counter(own)


@pytest.mark.parametrize("length", ["2ba", "4ba"])
def test_only_one_rank_opens_what_all_need(folder: Path, length: str) -> None:
    """Corpus, tokenizer, manifest and indices, validation texts, gauntlet, prompts, state."""
    first = shared(folder, length, 0)
    needed = {"corpus/", "manifest.json", "index.json", "generated_easy.yaml", "texts.jsonl"}
    needed |= {"brackets.jsonl", "questions.npz", "zephyr.jinja"}
    needed |= {"state.json"} if length == "4ba" else {"00.txt"}
    assert needed <= first.keys()
    for rank in range(1, SIZE):
        assert shared(folder, length, rank) == {}
