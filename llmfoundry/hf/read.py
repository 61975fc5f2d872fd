"""A Hugging Face folder as the decoder's settings and weights: one reader for all who import.

`open_hf` reads config.json and goes once through names, shapes and biases, so that what does not
fit is refused before a weight is read; `HFFolder.tensors` then gives the decoder's weights one by
one. Memory is that of the largest, however large the model: `builders/weights/fill.py` writes each
into the shard that this process holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmfoundry.errors import UserError
from llmfoundry.hf.config.architectures import ARCHITECTURES
from llmfoundry.hf.config.settings import OWN, check_layers, read_settings, said_biases, unread
from llmfoundry.hf.llm_foundry import FOUNDRY, foundry_map
from llmfoundry.hf.read_weights import WeightFiles, open_weights, read_json
from llmfoundry.hf.tensor_names import MAPS
from llmfoundry.hf.weight_map import WeightMap, bias_names, check_shape, to_ours
from llmfoundry.models.decoder import Decoder
from llmfoundry.recipe.architecture.model import ModelConfig

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEAD = "lm_head.weight"
UNTIED = (
    "config.json: tie_word_embeddings true, but lm_head.weight is not {embedding}; both are read,"
    " as transformers 5 does"
)
TEXT = ("*.json", "*.txt", "*.model", "*.jinja")
_ROWS = 4096  # of an embedding that are compared at a time

Read = Callable[[str], Tensor]


@dataclass
class HFFolder:
    """A folder whose weights the decoder can take.

    Attributes:
        architecture: a key of `ARCHITECTURES`, or `OWN`, or `FOUNDRY`.
        config: the filled `model` section.
        weights: the open files.
    """

    architecture: str
    config: ModelConfig
    weights: WeightFiles
    _named: _Named | None = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The decoder's state, each tensor read when it is asked for."""
        return self._tensors(self.weights.get)

    def check(self) -> None:
        """Go through all of it by shapes alone.

        Raises:
            UserError: a tensor is missing, has another shape or dtype, or has no place.
        """
        for _ in self._tensors(self.weights.sketch):
            pass

    def _tensors(self, read: Read) -> Iterator[tuple[str, Tensor]]:
        if self._named is None:
            return _own_state(self.config, self.weights.names, read)
        named = self._named
        return to_ours(named.map, self.config, named.where, named.reader(read), biased=named.biased)


@dataclass
class _Named:
    """How the tensors of a file are called.

    Attributes:
        map: their architecture's.
        where: from names as the map has them to those of the file.
        biased: whether rules of each kind of bias have one.
    """

    map: WeightMap
    where: dict[str, str]
    biased: Mapping[str, bool]

    def reader(self, read: Read) -> Read:
        """`read` by the map's names, of numbers that the decoder has."""

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
    """Open a folder whose model the decoder expresses exactly.

    `attention_bias` is false where every bias of queries, keys and values in the file is zero, and
    `no_bias` is true where all others are: beyond that the decoder has all biases or none.

    Args:
        folder: with config.json and weights.
        written: what to take for config.json, where some of it is overridden.
        note: gets a line for each dropout that the decoder has not, and where the file's head is
            not the embedding that config.json ties it to.

    Raises:
        UserError: what the decoder cannot follow exactly, by config.json's key or tensor's name.
    """
    written = read_json(folder / "config.json") if written is None else written
    check_layers(written)
    name, config = read_settings(written)
    for line in unread(written, name):
        note(line)
    with open_weights(folder) as weights:
        opened = HFFolder(name, config, weights)
        if name != OWN:
            _settle_names(opened, written, note)
        opened.check()
        yield opened


def _settle_names(opened: HFFolder, written: dict[str, Any], note: Callable[[str], None]) -> None:
    """Find out, in place, how the file's tensors are called, and what its biases and head are."""
    name, weights = opened.architecture, opened.weights
    names = foundry_map(opened.config, written) if name == FOUNDRY else MAPS[name]
    (embedding,) = names.rules[0].theirs
    base = embedding.split(".")[0] + "."  # `model.` or `transformer.`
    where = {key: key for key in weights.names}
    if not any(key.startswith(base) for key in where):  # saved without a head, as GPT-2 was
        where = {key if key == HEAD else base + key: key for key in where}
    named = _Named(names, where, {})
    read = named.reader(weights.get)
    if opened.config.tie_word_embeddings and HEAD in where:
        if embedding not in where:
            where[embedding] = where.pop(HEAD)
        elif _equal(read(embedding), read(HEAD)):
            del where[HEAD]
        elif name != FOUNDRY:  # whose class has no head then
            note(UNTIED.format(embedding=embedding))
            _, opened.config = read_settings({**written, "tie_word_embeddings": False})
    config = opened.config
    named.biased = said_biases(written, name, config)
    qkv, other = (bias_names(names, config, where, qkv=of_qkv) for of_qkv in (True, False))
    config.attention_bias = any(read(key).any() for key in qkv)
    config.no_bias = not any(read(key).any() for key in other)
    opened._named = named


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether they hold the same numbers, whatever their dtypes."""
    if one.shape != other.shape:
        return False
    parts = zip(one.split(_ROWS), other.split(_ROWS), strict=True)
    return all(bool((a == b).all()) for a, b in parts)


def _own_state(config: ModelConfig, names: set[str], read: Read) -> Iterator[tuple[str, Tensor]]:
    """The state of a folder of our own class, whose names are the decoder's after `model.`."""
    with torch.device("meta"):
        wanted = {f"model.{name}": tensor for name, tensor in Decoder(config).state_dict().items()}
    if names != wanted.keys():
        name = min(names ^ wanted.keys())
        raise UserError(f"{name}: config.json and the weights disagree on whether it exists")
    for name, shaped in wanted.items():
        tensor = read(name)
        check_shape(name.removeprefix("model."), tensor, shaped.shape)
        yield name.removeprefix("model."), tensor


def from_hf(
    path_or_id: str, *, note: Callable[[str], None] = print
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The filled `model` section and the decoder's whole state, for models that fit in memory.

    Raises:
        UserError: see `open_hf`.
    """
    with open_hf(hf_folder(path_or_id), note=note) as opened:
        return opened.config, dict(opened.tensors())


def hf_folder(path_or_id: str, *, revision: str | None = None, key: str = "checkpoint") -> Path:
    """The folder itself, or a hub id's files, downloaded; the tokenizer is there too.

    Args:
        path_or_id: a folder with config.json, or a hub id.
        revision: of a hub id: a branch, tag or commit.
        key: of the recipe, for messages.
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
        place = snapshot_download(path_or_id, revision=revision, allow_patterns=[*patterns])
        return Path(place)

    try:
        found = fetch(*TEXT, "*.safetensors")
        return found if any(found.glob("*.safetensors")) else fetch(*TEXT, "*.bin")
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{key}: {path_or_id} is not a folder, and as a hub id it cannot be fetched: {reason}"
        ) from error


assert set(MAPS) == set(ARCHITECTURES), "an architecture needs both its settings and its weights"
