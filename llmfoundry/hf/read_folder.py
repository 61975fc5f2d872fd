"""Reader of Hugging Face folders: settings and weights of the project's decoder.

Entry point: `open_hf`. It reads config.json and checks all names, shapes and biases, so that a
model that does not fit is rejected before any weight is loaded. `HFFolder.tensors` then yields the
decoder's weights. Each weight is read only when it is needed: peak memory is the size of the
largest tensor. `builders/pretrained.py` copies each tensor into the local shard.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from llmfoundry.errors import UserError, one_line
from llmfoundry.files import AGAIN, MOST_BYTES, read_object, read_object_if_there
from llmfoundry.hf.architecture import OWN
from llmfoundry.hf.architectures import ARCHITECTURES
from llmfoundry.hf.block_fp8 import BlockFp8
from llmfoundry.hf.config_keys import check_layers, read_settings, said_biases, unread
from llmfoundry.hf.llm_foundry_mpt import FOUNDRY, foundry_map
from llmfoundry.hf.mxfp4 import Mxfp4
from llmfoundry.hf.safetensors_file import SafetensorsFile
from llmfoundry.hf.tensor_names import MAPS, WeightMap, bias_names, check_shape, to_ours
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.lazy_tensors import LazyTensor, Read, lazy, same
from llmfoundry.recipe.model import ResolvedModelConfig

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEAD = "lm_head.weight"
SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
UNTIED = (
    "config.json: tie_word_embeddings true, but lm_head.weight is not {embedding}; both are read,"
    " as transformers 5 does"
)
TEXT = ("*.json", "*.txt", "*.model", "*.jinja")
CONFIG = "config.json"
SETTINGS = (  # JSON files that transformers reads in addition to config.json
    *(f"{SAFETENSORS}.index.json", f"{PICKLE}.index.json"),
    *("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "processor_config.json", "preprocessor_config.json"),
    *("adapter_config.json", "chat_template.json"),
)
OF_TOKENIZERS = (
    *("chat_template.jinja", "vocab.json", "vocab.txt", "merges.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_ROWS = 4096  # rows of an embedding that are compared at a time
_NUMBERS = 1 << 24  # of a weight that are examined at a time


@dataclass
class HFFolder:
    """An open folder whose model the decoder can express.

    Attributes:
        architecture: a key of `ARCHITECTURES`, or `OWN`, or `FOUNDRY`.
        config: the resolved `model` section.
        weights: the open weight files.
    """

    architecture: str
    config: ResolvedModelConfig
    weights: WeightFiles
    _named: _Named | None = None

    def tensors(self) -> Iterator[LazyTensor]:
        """Yield the tensors of the decoder's state. All are checked once the last was yielded.

        Raises:
            UserError: a tensor is missing or unknown, or has a wrong shape or dtype.
        """
        sketch, read = self.weights.sketch, self.weights.get
        if self._named is None:
            return _own_state(self.config, self.weights.names, sketch, read)
        named = self._named
        return to_ours(
            named.map,
            self.config,
            named.where,
            named.reader(sketch),
            named.reader(read),
            biased=named.biased,
        )

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of the decoder's state, each tensor read when it is yielded."""
        return ((tensor.name, tensor.read()) for tensor in list(self.tensors()))


@dataclass
class _Named:
    """Tensor names of a folder.

    Attributes:
        map: the weight map of the architecture.
        where: names of the files by names of the map.
        biased: for each kind of bias, whether the model has it.
    """

    map: WeightMap
    where: dict[str, str]
    biased: Mapping[str, bool]

    def reader(self, read: Read) -> Read:
        """Return a reader that takes names of the map and accepts only dtypes of the decoder."""

        def named(key: str) -> Tensor:
            tensor = read(self.where[key])
            if tensor.dtype not in FLOATS.values():
                raise UserError(f"{key}: is {tensor.dtype}; the decoder reads {', '.join(FLOATS)}")
            return tensor

        return named


@contextmanager
def open_hf(
    folder: Path, *, written: dict[str, Any] | None = None, note: Callable[[str], None] = print
) -> Iterator[HFFolder]:
    """Open a folder whose model the decoder can express exactly.

    The decoder has all biases of a kind or none. `attention_bias` is False if all biases of
    queries, keys and values are zero. `no_bias` is True if all other biases are zero.

    Args:
        folder: folder with config.json and weights.
        written: content to use instead of config.json, with overrides applied.
        note: logs a line for each dropout that the decoder does not support, and a line if the
            weights of the head differ from the embedding although config.json ties them.

    Raises:
        UserError: with the key of config.json or the tensor that the decoder cannot express.
    """
    # settings
    written = read_folder_config(folder) if written is None else written
    check_layers(written)
    name, config = read_settings(written)
    for line in unread(written, name):
        note(line)
    # tensors: names and biases, then the shape of each
    with open_weights(folder) as weights:
        for line in weights.notes:
            note(line)
        opened = HFFolder(name, config, weights)
        if name != OWN:
            _resolve_names(opened, written, note)
        for _ in opened.tensors():
            pass
        yield opened


def _resolve_names(opened: HFFolder, written: dict[str, Any], note: Callable[[str], None]) -> None:
    """Set the tensor names, biases and head of an open folder from its weight files."""
    # tensor names
    name, weights = opened.architecture, opened.weights
    names = foundry_map(opened.config, written) if name == FOUNDRY else MAPS[name]
    (embedding,) = names.rules[0].theirs
    base = embedding.split(".")[0] + "."  # `model.` or `transformer.`
    where = {key: key for key in weights.names}
    if not any(key.startswith(base) for key in where):  # saved without a head, as GPT-2 was
        where = {key if key == HEAD else base + key: key for key in where}
    named = _Named(names, where, {})
    read = named.reader(weights.get)
    # tied head: stored once under either name, twice, or untied in spite of config.json
    if opened.config.tie_word_embeddings and HEAD in where:
        if embedding not in where:
            where[embedding] = where.pop(HEAD)
        elif _equal(read(embedding), read(HEAD)):
            del where[HEAD]
        elif name != FOUNDRY:  # LLM Foundry's class has no head if it is tied
            note(UNTIED.format(embedding=embedding))
            _, opened.config = read_settings({**written, "tie_word_embeddings": False})
    # biases: zero biases count as none
    config = opened.config
    named.biased = said_biases(written, name, config)
    qkv_biases = bias_names(names, config, where, qkv=True)
    other_biases = bias_names(names, config, where, qkv=False)
    config.attention_bias = any(read(key).any() for key in qkv_biases)
    config.no_bias = not any(read(key).any() for key in other_biases)
    opened._named = named


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same values. Their dtypes may differ."""
    if one.shape != other.shape:
        return False
    chunks = zip(one.split(_ROWS), other.split(_ROWS), strict=True)
    return all(bool((a == b).all()) for a, b in chunks)


def _own_state(
    config: ResolvedModelConfig, names: set[str], sketch: Read, read: Read
) -> Iterator[LazyTensor]:
    """Yield the state of a `LlmfoundryForCausalLM`: decoder names with prefix `model.`."""
    with torch.device("meta"):
        wanted = {f"model.{name}": tensor for name, tensor in Decoder(config).state_dict().items()}
    if names != wanted.keys():
        name = min(names ^ wanted.keys())
        raise UserError(f"{name}: config.json and the weights disagree on whether it exists")
    for name, shaped in wanted.items():
        check_shape(name.removeprefix("model."), sketch(name).shape, shaped.shape)
        yield lazy(name.removeprefix("model."), partial(same, name), sketch, read)


def read_folder_config(folder: Path) -> dict[str, Any]:
    """Check the text files of an untrusted folder and return its config.json.

    Both readers of folders (for the decoder and for transformers' classes) call it before they
    construct a model.

    Raises:
        UserError: a file is a pipe, too long or not JSON, or config.json has too many layers.
    """
    for file in sorted(path for pattern in TEXT for path in folder.glob(pattern)):
        if file.exists() and not file.is_file() and not file.is_dir():
            raise UserError(f"{file}: is not a file; {AGAIN}")
        if file.name in OF_TOKENIZERS and file.is_file() and file.stat().st_size > MOST_BYTES:
            raise UserError(f"{file}: has more than {MOST_BYTES:,} bytes; {AGAIN}")
    written = read_object(folder / CONFIG, instead="write a folder that transformers saved")
    check_layers(written, f"{folder / CONFIG}: ")
    others = {name: read_object_if_there(folder / name) for name in SETTINGS}
    for name, values in {**others, CONFIG: written}.items():
        ids = values.get("eos_token_id")
        if any(type(i) is not int for i in (ids if isinstance(ids, list) else [ids or 0])):
            raise UserError(f"{folder / name}: eos_token_id: {str(ids)[:80]} is no id; correct it")
    return written


def from_hf(
    path_or_id: str, *, note: Callable[[str], None] = print
) -> tuple[ResolvedModelConfig, dict[str, Tensor]]:
    """Return the resolved `model` section and the full state of the decoder, in memory.

    Raises:
        UserError: see `open_hf`.
    """
    with open_hf(hf_folder(path_or_id), note=note) as opened:
        return opened.config, dict(opened.state())


def hf_folder(path_or_id: str, *, revision: str | None = None, key: str = "checkpoint") -> Path:
    """Return a local folder with the model and its tokenizer; a hub id is downloaded.

    Args:
        path_or_id: a folder with config.json, or a hub id.
        revision: branch, tag or commit of a hub id.
        key: recipe key, for messages.
    """
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise UserError(f"{key}: {path_or_id} is a folder, which has no revision; remove it")
        return folder
    if path_or_id.count("/") > 1 or path_or_id.startswith((".", "/", "~")):
        raise UserError(f"{key}: there is no folder {path_or_id}")
    from huggingface_hub import snapshot_download

    def fetch(*patterns: str) -> Path:
        snapshot = snapshot_download(path_or_id, revision=revision, allow_patterns=[*patterns])
        return Path(snapshot)

    try:
        downloaded = fetch(*TEXT, "*.safetensors")
        return downloaded if any(downloaded.glob("*.safetensors")) else fetch(*TEXT, "*.bin")
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{key}: {path_or_id} is not a folder, and as a hub id it cannot be fetched: {reason}"
        ) from error


assert set(MAPS) == set(ARCHITECTURES), "an architecture needs both its settings and its weights"


class WeightFiles:
    """All tensors of a folder by name.

    Weights in few bits (`mxfp4.py`, `block_fp8.py`) are read as one bf16 tensor each. Layers after
    the last, which predict further tokens, are left out.

    Attributes:
        names: names of all tensors.
        notes: a line for the tensors that are left out.
    """

    def __init__(
        self,
        files: list[Path],
        reader: Callable[[Path], WeightReader],
        config: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Open every file once, for its list of tensors; `config` is config.json's content."""
        self._reader = reader
        self._where: dict[str, Path] = {}
        self._sketches: dict[str, Tensor] = {}
        for file in files:
            sketches = reader(file).sketches()
            self._where |= dict.fromkeys(sketches, file)
            self._sketches |= sketches
        self.notes = self._leave_out(config)
        self._packed: tuple[Mxfp4 | BlockFp8, ...] = (
            Mxfp4.of(self._sketches),
            BlockFp8.of(self._sketches, config),
        )
        for packed in self._packed:
            for part in packed.parts():
                del self._sketches[part]
            self._sketches |= packed.sketches
        self._open: tuple[Path, WeightReader] | None = None

    def _leave_out(self, config: Mapping[str, Any]) -> list[str]:
        """Remove the layers of `num_nextn_predict_layers`; return a line for the user."""
        first, count = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
        if type(first) is not int or type(count) is not int:
            return []
        left_out = set()
        for name in self._sketches:
            layer = _LAYER.match(name)
            if layer and first <= int(layer[1]) < first + count:
                left_out.add(name)
        for name in left_out:
            del self._sketches[name]
        if not left_out:
            return []
        return [
            f"config.json: num_nextn_predict_layers {count}: model.layers.{first} predicts a later"
            f" token, which is not supported; its {len(left_out)} tensors are left out"
        ]

    @property
    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._sketches)

    def get(self, name: str) -> Tensor:
        """Return a tensor on the CPU, memory-mapped: its pages are read when they are used."""
        for packed in self._packed:
            if name in packed.sketches:
                value = packed.get(name, self._stored)
                _check_finite(name, value)
                return value
        return self._stored(name)

    def _stored(self, name: str) -> Tensor:
        file = self._where[name]
        if self._open is None or self._open[0] != file:
            self._open = None  # unmap the previous file first: at most one file is mapped
            self._open = file, self._reader(file)
        _, reader = self._open
        return reader.get(name)

    def sketch(self, name: str) -> Tensor:
        """Return a vector or bias with its values, any other tensor on the meta device."""
        sketch = self._sketches[name]
        return self.get(name) if sketch.ndim < 2 or name.endswith("bias") else sketch

    def numbers_by_dtype(self) -> dict[torch.dtype, int]:
        """Return the number of elements stored in each dtype."""
        counts: dict[torch.dtype, int] = {}
        for sketch in self._sketches.values():
            counts[sketch.dtype] = counts.get(sketch.dtype, 0) + sketch.numel()
        return counts

    def close(self) -> None:
        """Unmap the open file."""
        self._open = None


def _check_finite(name: str, weight: Tensor) -> None:
    """Raise a UserError if a weight that was stored in few bits is damaged."""
    for part in weight.flatten().split(_NUMBERS):
        if not torch.isfinite(part).all():
            raise UserError(
                f"{name}: has values that are not finite, by its numbers of few bits or their"
                " scales; copy or download its file again"
            )


class WeightReader:
    """Reader of one open weight file."""

    def sketches(self) -> dict[str, Tensor]:
        """Return all tensors on the meta device."""
        raise NotImplementedError

    def get(self, name: str) -> Tensor:
        """Return a tensor by name."""
        raise NotImplementedError


class SafeReader(WeightReader):
    """Reader of a safetensors file."""

    def __init__(self, file: Path) -> None:
        try:
            self._file = SafetensorsFile(file)
        except KeyError as error:
            raise UserError(f"{file}: holds {error.args[0]}, which cannot be read") from error
        except Exception as error:
            raise UserError(f"{file}: cannot be read: {one_line(error)}") from error

    def sketches(self) -> dict[str, Tensor]:
        """Return all tensors on the meta device."""
        return self._file.sketches()

    def get(self, name: str) -> Tensor:
        """Return a tensor by name, memory-mapped."""
        return self._file.get(name)


class PickleReader(WeightReader):
    """Reader of a file of torch.save that holds tensors only."""

    def __init__(self, file: Path) -> None:
        try:
            state = _load_tensors_only(file)
        except pickle.UnpicklingError as error:
            raise UserError(
                f"{file}: holds more than tensors, such as code to run, and is not read; save it"
                " as safetensors where you trust it"
            ) from error
        except Exception as error:
            raise UserError(f"{file}: cannot be read: {one_line(error)}") from error
        if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
            raise UserError(f"{file}: is not a list of tensors; save the model as safetensors")
        self._state = state

    def sketches(self) -> dict[str, Tensor]:
        """Return all tensors on the meta device."""
        return {str(name): tensor.to("meta") for name, tensor in self._state.items()}

    def get(self, name: str) -> Tensor:
        """Return a tensor by name, memory-mapped if the file's format allows it."""
        return self._state[name]


def _load_tensors_only(file: Path) -> Any:
    """Load a file of torch.save without running code."""
    import zipfile

    mapped = zipfile.is_zipfile(file)  # older than PyTorch 1.6: no zip file, cannot be mapped
    return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)


@contextmanager
def open_weights(folder: Path) -> Iterator[WeightFiles]:
    """Open the weights of a folder: safetensors files, otherwise files of torch.save.

    Raises:
        UserError: there are no weights, a file of the index is missing, or a file cannot be read.
    """
    files, reader = _find_files(folder)
    weights = WeightFiles(files, reader, read_object_if_there(folder / CONFIG))
    try:
        yield weights
    finally:
        weights.close()


def _find_files(folder: Path) -> tuple[list[Path], Callable[[Path], WeightReader]]:
    """Return the weight files of a folder, and the reader class for them."""
    for file_name, reader in ((SAFETENSORS, SafeReader), (PICKLE, PickleReader)):
        # a single file; it is newer than an index that an earlier save has left
        if (folder / file_name).is_file():
            return [folder / file_name], reader

        # the shards of an index
        index = folder / f"{file_name}.index.json"
        stem, _, suffix = file_name.rpartition(".")
        if index.is_file():
            return _shards(index, suffix), reader

        # shards without an index
        parts = sorted(file for file in folder.glob(f"{stem}*.{suffix}") if file.is_file())
        if parts:
            return parts, reader
    raise UserError(
        f"{folder}: has no model.safetensors and no other weights; copy them there, or save the"
        " model again with transformers"
    )


def _shards(index: Path, suffix: str) -> list[Path]:
    """Return the files that an index names; check that all are in its folder and exist."""
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict):
        raise UserError(f"{index}: has no weight_map; copy or download it again")
    for name in names.values():
        if not isinstance(name, str) or not re.fullmatch(rf"[^/\\\0]+\.{suffix}", name):
            raise UserError(f"{index}: {name!r} is not a file of this folder; correct it")
    files = [index.parent / name for name in sorted({*names.values()})]
    missing = [file for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            f"{missing[0]}{more}: is missing, but {index.name} names it; copy or download it again"
        )
    return files
