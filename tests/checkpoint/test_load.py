"""Untrusted files: a pickle is planted in each kind that is opened, and nothing runs."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from llmfoundry.builders.checkpoint import load_checkpoint
from llmfoundry.checkpoint.load import parse_metadata
from llmfoundry.data.preparation.build_tokenizer import build_tokenizer
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.gauntlet.gauntlet_file import read_gauntlet
from llmfoundry.gauntlet.prompts.question_cache import load_questions
from llmfoundry.gauntlet.questions import TaskConfig
from llmfoundry.gauntlet.task_rows import read_source
from llmfoundry.hf.read_folder import from_hf
from llmfoundry.recipe.data import DataConfig, TokenizerConfig
from tests.gauntlet.hugging_face_models import load_hugging_face, save_model
from tests.tiny import write_recipe
from tests.train.here import train_here

ALONE = World(0, 1, 0, torch.device("cpu"))
RAN = "it_ran"
WEIGHT = "model.wte.weight"


class Bomb:
    """Makes the folder `it_ran` in the working directory when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (RAN,)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with runs/whole, saved after its second and last batch."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("untrusted")
        write_recipe(folder)
        patch.chdir(folder)
        train_here("whole", "max_duration=2ba", "eval=off")
        yield folder


@pytest.fixture(autouse=True)
def no_trace(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing may have run when a test ends."""
    yield
    assert not Path(RAN).exists()


def goes_off(load: Callable[[], Any]) -> bool:
    """Whether a careless reader runs what was planted."""
    with suppress(BaseException):  # what the reader says of it does not matter
        load()
    ran = Path(RAN).exists()
    shutil.rmtree(RAN, ignore_errors=True)
    return ran


def commit(folder: Path) -> None:
    """Sign a checkpoint as its writer would."""
    files = [f for f in folder.rglob("*") if f.is_file() and f.name != "COMMIT"]
    sums = {
        str(f.relative_to(folder)): {"bytes": f.stat().st_size, "crc32": zlib.crc32(f.read_bytes())}
        for f in files
    }
    (folder / "COMMIT").write_text(json.dumps({"version": 1, "files": sums}))


def untrusted(name: str) -> Path:
    """A copy of the whole run's checkpoint, to be spoilt."""
    run = Path("runs") / name
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree("runs/whole", run)
    return run / "checkpoints" / "ba0000002"


def with_attribute(table: Any) -> bytes:
    table.planner_data = Bomb()
    return pickle.dumps(table)


def dotted(table: Any) -> bytes:
    r"""GLOBAL by two texts, `torch.serialization` and `os.mkdir`, as protocol 4 allows."""
    texts = b"".join(b"\x8c" + bytes([len(t)]) + t for t in (b"torch.serialization", b"os.mkdir"))
    return b"\x80\x04" + texts + b"\x93\x8c" + bytes([len(RAN)]) + RAN.encode() + b"\x85R."


TABLES: dict[str, Callable[[Any], bytes]] = {
    "alone": lambda table: pickle.dumps(Bomb()),
    "old protocol": lambda table: pickle.dumps(Bomb(), protocol=0),
    "inside": with_attribute,
    "after the table": lambda table: pickle.dumps((table, Bomb())),
    "dotted name": dotted,
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_planted_table_of_contents_runs_nothing(place: Path, kind: str) -> None:
    folder = untrusted("table")
    table = folder / ".metadata"
    table.write_bytes(TABLES[kind](pickle.loads(table.read_bytes())))
    commit(folder)
    assert goes_off(lambda: pickle.loads(table.read_bytes()))
    with pytest.raises(UserError, match=r"table/.* cannot be read: .metadata is not a table"):
        load_checkpoint("runs/table", ALONE, note=print)
    with pytest.raises(UserError, match=r"cannot be read: .metadata is not a table"):
        train_here("table", "max_duration=4ba", "eval=off")


def replant(folder: Path, value: Any, *, as_bytes: bool) -> None:
    """Put `value` where the embedding was."""
    table, data = folder / ".metadata", folder / "__0_0.distcp"
    metadata = pickle.loads(table.read_bytes())
    buffer = io.BytesIO()
    torch.save(value, buffer)
    at = next(index for index in metadata.storage_data if index.fqn == WEIGHT)
    where = metadata.storage_data.pop(at)
    where.offset, where.length = data.stat().st_size, buffer.getbuffer().nbytes
    if as_bytes:
        metadata.state_dict_metadata[WEIGHT] = BytesStorageMetadata()
        at = MetadataIndex(WEIGHT)
    metadata.storage_data[at] = where
    table.write_bytes(pickle.dumps(metadata))
    with data.open("ab") as file:
        file.write(buffer.getvalue())
    commit(folder)


def test_a_value_in_place_of_a_tensor_runs_nothing(place: Path) -> None:
    folder = untrusted("value")
    replant(folder, Bomb(), as_bytes=True)
    careless = {"model": {"wte.weight": torch.zeros(1)}}
    assert goes_off(lambda: dcp.load(careless, checkpoint_id=str(folder), no_dist=True))
    with pytest.raises(UserError, match=f"{WEIGHT} is not a tensor"):
        load_checkpoint("runs/value", ALONE, note=print)


def test_a_tensor_that_is_none_runs_nothing(place: Path) -> None:
    folder = untrusted("tensor")
    replant(folder, Bomb(), as_bytes=False)
    with pytest.raises(
        UserError, match=r"tensor/.* cannot be read: a file of tensors is damaged, or holds"
    ):
        load_checkpoint("runs/tensor", ALONE, note=print)


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("n_layers", 10**9, r"recipe.yaml: model.n_layers: 1000000000 is too large; write 4096"),
        ("n_layers", 400, r"model.blocks.2.*weight is missing there, but \[32"),
        ("vocab_size", 2 * 10**9, r"model.wte.weight is \[320, 32\] there, but \[2000000000, 32\]"),
    ],
)
def test_a_recipe_of_another_model_than_its_tensors_takes_no_memory(
    place: Path, key: str, value: int, line: str
) -> None:
    """Sizes that would take minutes, or terabytes, before the first tensor is read."""
    folder = untrusted("sizes")
    recipe, state = folder / "recipe.yaml", json.loads((folder / "state.json").read_text())
    recipe.write_text(re.sub(rf"(?m)^  {key}: .*$", f"  {key}: {value}", recipe.read_text()))
    state["identity"][f"model.{key}"] = value
    (folder / "state.json").write_text(json.dumps(state))
    commit(folder)
    with pytest.raises(UserError, match=line):
        load_checkpoint("runs/sizes", ALONE, note=print)


@pytest.mark.parametrize("text", ["[" * 10**6, '{"batch": ' + "9" * 10**4 + "}", "\0"])
def test_a_state_that_is_none_is_a_line_of_our_own(place: Path, text: str) -> None:
    folder = untrusted("state")
    (folder / "state.json").write_text(text)
    commit(folder)
    with pytest.raises(UserError, match=r"state.json: is not a run's state \(.*choose") as refused:
        load_checkpoint("runs/state", ALONE, note=print)
    assert "sys." not in str(refused.value)


@pytest.mark.parametrize("name", ["../../../../secret", "/etc/hostname", "COMMIT"])
def test_tensors_are_read_from_the_checkpoints_own_files_alone(place: Path, name: str) -> None:
    folder = untrusted("path")
    table = folder / ".metadata"
    metadata = pickle.loads(table.read_bytes())
    for where in metadata.storage_data.values():
        where.relative_path = name
    table.write_bytes(pickle.dumps(metadata))
    commit(folder)
    with pytest.raises(UserError, match=f"'{name}' is not a file of a checkpoint"):
        load_checkpoint("runs/path", ALONE, note=print)


def test_the_table_is_read_as_pytorch_reads_it(place: Path) -> None:
    folder = Path("runs/whole/checkpoints/ba0000002")
    theirs = FileSystemReader(str(folder)).read_metadata()
    ours = parse_metadata((folder / ".metadata").read_bytes())
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data and len(theirs.storage_data) > 20


@pytest.mark.parametrize("file", ["recipe.yaml", "tasks.yaml"])
def test_yaml_that_names_python_objects_runs_nothing(place: Path, file: str) -> None:
    text = f"run_name: !!python/object/apply:os.mkdir [{RAN}]\n"
    if file == "tasks.yaml":
        Path(file).write_text(text)
        with pytest.raises(UserError, match="python/object/apply:os"):
            read_gauntlet(Path(file))
        return
    folder = untrusted("yaml")
    (folder / file).write_text(text)
    commit(folder)
    with pytest.raises(UserError, match="python/object/apply:os"):
        load_checkpoint("runs/yaml", ALONE, note=print)


def test_prompts_in_the_cache_run_nothing(place: Path) -> None:
    np.savez("prompts.npz", texts=np.array([Bomb()], object), n_requests=np.zeros(1, np.int32))
    assert goes_off(lambda: np.load("prompts.npz", allow_pickle=True)["texts"])
    with pytest.raises(ValueError, match="allow_pickle=False"):
        load_questions(Path("prompts.npz"), [])


def test_a_hugging_face_folder_runs_nothing(place: Path) -> None:
    """Neither weights as a pickle, nor the Python files that it brings."""
    folder = Path("hf")
    save_model(folder, "gpt2")
    (folder / "model.safetensors").unlink()
    torch.save({"transformer.wte.weight": Bomb()}, folder / "pytorch_model.bin")
    assert goes_off(lambda: torch.load(folder / "pytorch_model.bin", weights_only=False))
    arguments: dict[str, Any] = {"device": ALONE.device, "precision": "fp32", "batch_tokens": 256}
    with pytest.raises(UserError, match="cannot load its weights"):
        load_hugging_face("hf", **arguments)
    with pytest.raises(UserError, match=r"pytorch_model\.bin: holds more than tensors"):
        from_hf("hf")
    (folder / "tokenizer.json").unlink()
    (folder / "own_decoder.py").write_text(f"import os\nos.mkdir({RAN!r})\nclass Own: pass\n")
    config = {"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"tokenizer\.path: cannot load"):
        build_tokenizer(TokenizerConfig("huggingface", path="hf"), DataConfig(), progress=False)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/hostname", "", ["a"]])
def test_an_index_of_weights_names_files_of_its_own_folder(place: Path, name: Any) -> None:
    folder = Path("sharded")
    save_model(folder, "gpt2")
    shutil.move(folder / "model.safetensors", "outside.safetensors")
    index = {"weight_map": {"transformer.wte.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="is not a file of this folder"):
        from_hf(str(folder))


def test_rows_as_pickles_or_with_a_script_run_nothing(place: Path) -> None:
    Path("rows.pkl").write_bytes(pickle.dumps(Bomb()))
    Path("scripted").mkdir()
    Path("scripted/scripted.py").write_text(f"import os\nos.mkdir({RAN!r})\n")
    tasks = {
        "hf://pandas": {"data_files": "rows.pkl", "split": "train"},
        "hf://scripted": {"split": "train", "trust_remote_code": True},
    }
    for uri, arguments in tasks.items():
        task = TaskConfig("rows", uri, "multiple_choice", [0], hf_loading_vars=arguments)
        with pytest.raises(UserError, match=uri):
            list(read_source(task, gauntlet_path=Path("tasks.yaml")))
