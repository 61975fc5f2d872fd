"""Conversions that stream: safetensors' own bytes, killed at any place and resumed."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from llmfoundry import files
from llmfoundry.api.conversion import convert, streamed_state
from llmfoundry.builders.checkpoint import load_checkpoint, open_checkpoint
from llmfoundry.distributed.process_group import ALONE
from llmfoundry.errors import UserError, disk_full, one_line
from llmfoundry.hf.read_folder import SafeReader
from llmfoundry.hf.safetensors_file import DTYPES, FileLayout, SafetensorsFile, write_tensor
from llmfoundry.hf.write_folder import whole_or_nothing
from llmfoundry.models.adapter import MergedState
from llmfoundry.recipe.after_training import ConvertRecipe
from llmfoundry.recipe.load import checked
from tests.hf.random_models import CARD, LLAMA, decoder, settings, to_hf, write_tokenizer


def test_files_are_those_of_safetensors_whatever_the_order_and_are_read_back(
    tmp_path: Path,
) -> None:
    tensors = {f"t.{key}": (torch.randn(3, 5) * 9).to(kind) for key, kind in DTYPES.items()}
    tensors |= {"é": torch.randn(7), "none": torch.zeros(0, 3), "one": torch.tensor(3.0)}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    layout = FileLayout.of((name, t.dtype, t.shape) for name, t in tensors.items())
    layout.create(tmp_path / "ours")
    for name in reversed(tensors):
        write_tensor(tmp_path / "ours", layout.places[name], tensors[name])
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    read = SafetensorsFile(tmp_path / "theirs")
    for name, tensor in tensors.items():
        assert torch.equal(read.get(name).reshape(-1).view(torch.uint8),
                           tensor.reshape(-1).view(torch.uint8)), name  # fmt: skip


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,64]}}',
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}',
        b'{"a":{"dtype":"F32","shape":[4.0],"data_offsets":[0,16]}}',
        b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}',  # 4 bytes are no tensor's
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
        b'"b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}}',  # overlap
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',  # the name stands twice
        b"[]",
        b"\xff",
    ],
)
def test_a_header_that_is_not_of_its_file_is_refused(header: bytes, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(SafetensorError):
        load_file(file)
    with pytest.raises(UserError, match="file: cannot be read: Error while deserializing header"):
        SafeReader(file)
    file.write_bytes((1 << 60).to_bytes(8, "little") + header)
    with pytest.raises(UserError, match=r"file: cannot be read: .*header too large"):
        SafeReader(file)


def run(*words: str) -> None:
    convert(checked(ConvertRecipe, None, list(words)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder `hf`, and `run`, the run that it is imported as."""
    folder = tmp_path_factory.mktemp("streamed")
    tokenizer = write_tokenizer(folder / "tokenizer")
    to_hf(decoder(settings(**LLAMA)), tokenizer, folder / "hf", dtype="fp32", card=CARD)
    run("from=hf", f"checkpoint={folder / 'hf'}", f"output={folder / 'run'}")
    return folder


class Killed(BaseException):
    """Ends a conversion as a signal does: nothing is cleaned up."""


def killed_after(monkeypatch: pytest.MonkeyPatch, notes: int) -> None:
    """The process ends right before it notes the next part as written."""
    real: Callable[..., None] = files.Journal.add
    done: list[object] = []

    def add(self: files.Journal, parts: dict[str, object]) -> None:
        if len(done) == notes:
            raise Killed
        done.append(parts)
        real(self, parts)

    monkeypatch.setattr(files.Journal, "add", add)


def content(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.parametrize("direction", ["to=hf", "from=hf"])
def test_a_killed_conversion_is_resumed_to_the_same_bytes(
    direction: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmfoundry.hf.write_folder.NOTED_BYTES", 5000)
    monkeypatch.setattr("llmfoundry.checkpoint.streamed.FILE_BYTES", 5000)
    source = folder / ("run" if direction == "to=hf" else "hf")
    more = ["max_shard_gb=0.001"] if direction == "to=hf" else []
    out = tmp_path / "out"
    words = [direction, f"checkpoint={source}", f"output={out}", *more]
    run(*words)
    whole = content(out)
    out.rename(tmp_path / "whole")
    for notes in (0, 1, 2, 1):
        with monkeypatch.context() as patch:
            killed_after(patch, notes)
            with pytest.raises(Killed):
                run(*words)
        assert not out.exists(), "half a conversion counts"
    journal = tmp_path / "out.unfinished.journal"
    assert len(journal.read_bytes().splitlines()) == 1 + 4  # its identity, and what was noted
    journal.write_bytes(journal.read_bytes() + b'{"torn')
    run(*words)
    assert content(out) == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_what_was_begun_with_other_settings_is_not_resumed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["to=hf", f"checkpoint={folder / 'run'}", f"output={tmp_path / 'out'}"]
    with monkeypatch.context() as patch:
        killed_after(patch, 1)
        with pytest.raises(Killed):
            run(*words, "dtype=bf16")
    run(*words)
    assert all(t.dtype == torch.float32
               for t in load_file(tmp_path / "out/model.safetensors").values())  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_at_once_and_what_is_in_the_way_are_refused(folder: Path, tmp_path: Path) -> None:
    words = ["to=hf", f"checkpoint={folder / 'run'}", f"output={tmp_path / 'out'}"]
    with (
        files.resumable_folder(tmp_path / "out", "", note=print),
        pytest.raises(UserError, match="another process is writing"),
    ):
        run(*words)
    (tmp_path / "out").rmdir()
    (tmp_path / "out.unfinished").mkdir()
    (tmp_path / "out.unfinished/mine").touch()
    with pytest.raises(UserError, match="is in the way; remove it"):
        run(*words)
    assert (tmp_path / "out.unfinished/mine").is_file()


@pytest.mark.parametrize("way", ["from", "to"])
def test_a_full_disk_is_one_line_that_names_the_output(
    way: str, folder: Path, tmp_path: Path
) -> None:
    """By the size that the system lets a file have; torch.save makes an error of its own of it."""
    words = {
        "from": ["from=hf", f"checkpoint={folder / 'hf'}"],
        "to": ["to=hf", f"checkpoint={folder / 'run'}"],
    }[way]
    output = tmp_path / "out"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, before[1]))
    try:
        with pytest.raises(Exception) as failed:  # torch's own kind, or the system's
            run(*words, f"output={output}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert disk_full(failed.value) and one_line(failed.value).endswith(f"({output})")
    assert not list(tmp_path.iterdir())


def test_an_export_comes_back_as_it_was_and_holds_no_model(folder: Path, tmp_path: Path) -> None:
    run("to=hf", f"checkpoint={folder / 'run'}", f"output={tmp_path / 'hf'}", "dtype=fp32")
    theirs, again = (load_file(at / "model.safetensors") for at in (folder / "hf", tmp_path / "hf"))
    assert theirs.keys() == again.keys() and all(torch.equal(theirs[n], again[n]) for n in theirs)
    loaded, _ = open_checkpoint(str(folder / "run"), ALONE, note=print)
    state = streamed_state(loaded, note=print)
    whole = MergedState(load_checkpoint(str(folder / "run"), ALONE, note=print).root.model)
    assert all(torch.equal(state[name], whole[name]) for name in whole)
    assert all(p.device.type == "meta" for p in loaded.root.model.parameters())
    assert os.path.isdir(folder / "run" / "tokenizer")


@pytest.mark.parametrize("kind", ["export", "copy"])
def test_an_output_may_be_this_folder_and_what_cannot_be_one_is_a_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "here")
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path / "here")

    def write(output: Path) -> None:
        if kind == "export":
            with files.resumable_folder(output, "a", note=print) as (folder, _):
                (folder / "x").touch()
        else:
            with whole_or_nothing(output) as folder:
                (folder / "x").touch()

    write(Path("."))
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["x"]
    (tmp_path / "here" / "x").unlink()
    write(tmp_path / "link")
    assert [path.name for path in (tmp_path / "link").iterdir()] == ["x"]
    wrong = [tmp_path / "file" / "under", Path("/")]
    wrong += [tmp_path / ("y" * 250), Path("/proc/y")] if kind == "export" else []
    for output in wrong:
        with pytest.raises(UserError, match=r"^output: ") as error:
            write(output)
        assert len(error.value.lines()) == 1
