"""To Hugging Face folders; `scripts/convert.py` calls `to_hf`. The other way is `read_folder.py`.

A folder is written beside its final name and renamed when whole (`files.py`). Weight files get
their size and header first, then each tensor at its place, in the order that reads each of ours
once: no more than one of ours and one of theirs is held, and no shard. config.json is written by
hand with the keys that matter, so that every transformers from 5.0 reads the same model from it.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmfoundry.data.text.tokenizer import GENERATION, Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.files import (
    Journal,
    atomic_path,
    open_to_all,
    place_of,
    read_object,
    refuse_used,
    resumable_folder,
    sync,
    write_json,
)
from llmfoundry.hf.architectures import DOCUMENT_START, OWN
from llmfoundry.hf.card import CardInfo, write_card
from llmfoundry.hf.causal_lm import HFCausalLM
from llmfoundry.hf.choose_architecture import choose_architecture, remarks, unkept
from llmfoundry.hf.config_keys import write_settings
from llmfoundry.hf.read_folder import FLOATS as DTYPES
from llmfoundry.hf.read_folder import SAFETENSORS
from llmfoundry.hf.safetensors_file import Layout, write_tensor
from llmfoundry.hf.tensor_names import MAPS, to_theirs
from llmfoundry.models.adapter import MergedState
from llmfoundry.models.lazy_tensors import LazyTensor, Read, by_source, lazy, same
from llmfoundry.recipe.model import ResolvedModelConfig

NOTED_BYTES = 1 << 28  # written before the journal has it: 256 MiB, which a resumption may repeat
SHARD_BYTES = 5 * 10**9  # a weight file's size, at most (one tensor may be larger)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer that goes into a folder.

    Attributes:
        folder: tokenizer.json and what belongs to it.
        ids: of its special tokens, as config.json names them. The beginning of text is what every
            training document begins with: where the tokenizer puts nothing before a text, that is
            the end of text, whatever it names.
        end_ids: tokens that end a generated text.
        document_start: ids that documents begin with.
        generation: other entries of generation_config.json.
    """

    folder: Path
    ids: Mapping[str, int | None]
    end_ids: tuple[int, ...]
    document_start: tuple[int, ...]
    generation: Mapping[str, Any]

    @classmethod
    def load(cls, folder: Path) -> TokenizerFiles:
        """Of a folder that no one has read yet."""
        return cls.of(Tokenizer.load(folder), folder)

    @classmethod
    def of(cls, tokenizer: Tokenizer, folder: Path) -> TokenizerFiles:
        """Of the tokenizer that was loaded from `folder`."""
        start = tokenizer.document_start
        ids = {
            "bos_token_id": start[-1],
            "eos_token_id": tokenizer.eos_id,
            "pad_token_id": tokenizer.pad_id,
        }
        return cls(folder, ids, tokenizer.end_ids, start, tokenizer.generation)

    def copy(self, output: Path) -> None:
        """Put the files into a folder."""
        for name in TOKENIZER_FILES:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, output / name)


@dataclass(frozen=True)
class Export:
    """What a folder is to be.

    Attributes:
        dtype: of the written weights: fp32, bf16 or fp16.
        card: the content of the model card.
        architecture: transformers' class; None: the first to express the model exactly;
            `llmfoundry`: our own class.
        is_trained: evaluations are to begin texts as documents began in its training.
        shard_bytes: a weight file's size, at most (one tensor may be larger); None: SHARD_BYTES.
        source: what the weights come from, so that an interrupted export is resumed of them alone.
    """

    dtype: str
    card: CardInfo
    architecture: str | None = None
    is_trained: bool = False
    shard_bytes: int | None = None
    source: str = ""


def to_hf(
    config: ResolvedModelConfig,
    state: MergedState,
    tokenizer: TokenizerFiles,
    output: Path,
    export: Export,
    *,
    note: Callable[[str], None] = print,
) -> str:
    """Write a folder that transformers loads; one tensor of `state` is held at a time.

    Args:
        config: the model's, filled.
        state: its weights, read one by one.
        tokenizer: its own.
        output: must not exist, or be empty.
        export: what it is to be.
        note: gets a line for each setting that is left out because it affects training alone; the
            model card has them too.

    Returns:
        The architecture's name.

    Raises:
        UserError: no architecture expresses the model, the output is not empty, or weights do not
            fit the dtype.
    """
    name = choose_architecture(config, export.architecture)
    lines = unkept(config, name)
    weights = _Weights.plan(name, config, state, export)
    identity = hashlib.sha256()
    for part in (export.source, name, export.dtype, *map(str, weights.layouts.items())):
        identity.update(part.encode())
    with resumable_folder(output, identity.hexdigest(), note=note) as (folder, journal):
        weights.write(folder, journal)
        _write_configs(folder, config, name, export.dtype, tokenizer, export.is_trained)
        tokenizer.copy(folder)
        notes = remarks(config, name)
        write_card(folder / "README.md", export.card, config, name, export.dtype, lines, notes)
    for line in lines:
        note(line)
    return name


def _write_configs(
    folder: Path,
    config: ResolvedModelConfig,
    name: str,
    dtype: str,
    tokenizer: TokenizerFiles,
    is_trained: bool,
) -> None:
    """config.json and generation_config.json, in which ids of a model trained here are its own."""
    ids = tokenizer.ids
    settings = write_settings(config, name)
    kind = str(DTYPES[dtype]).removeprefix("torch.")
    settings |= {"dtype": kind, "torch_dtype": kind, **ids}  # the latter: before version 5
    settings |= {DOCUMENT_START: list(tokenizer.document_start)} if is_trained else {}
    write_json(folder / "config.json", settings, indent=2)
    pad = ids["eos_token_id"] if ids["pad_token_id"] is None else ids["pad_token_id"]
    ids, kept = {**ids, "pad_token_id": pad}, tokenizer.generation
    generation = {**kept, **ids} if is_trained else {**ids, **kept}
    generation["eos_token_id"] = _one_or_list(tokenizer.end_ids)
    write_json(folder / GENERATION, generation, indent=2)


def _one_or_list(ids: Sequence[int]) -> int | list[int]:
    return list(ids) if len(ids) > 1 else ids[0]


@contextmanager
def whole_or_nothing(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its name at the end, or is removed on an error.

    Raises:
        UserError: the output exists and is not empty.
    """
    refuse_used(output)
    try:
        with atomic_path(place_of(output)) as folder:
            folder.mkdir()
            yield folder
            open_to_all(folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            refuse_used(output)  # another process was faster
        raise


@dataclass(frozen=True)
class _Weights:
    """The weight files of a folder, all of which is known before a weight is read.

    Attributes:
        dtype: of the written weights.
        tensors: in the index's order, by name.
        files: the file of each, by name.
        layouts: of the files, by name.
    """

    dtype: torch.dtype
    tensors: dict[str, LazyTensor]
    files: dict[str, str]
    layouts: dict[str, Layout]

    @classmethod
    def plan(
        cls, name: str, config: ResolvedModelConfig, state: MergedState, export: Export
    ) -> _Weights:
        """One file, or several with an index."""
        dtype, limit = DTYPES[export.dtype], export.shard_bytes or SHARD_BYTES
        tensors = list(export_tensors(name, config, state.shapes(), state.__getitem__))
        shards: list[list[LazyTensor]] = [[]]
        left = limit
        for tensor in tensors:
            size = tensor.shape.numel() * dtype.itemsize
            if shards[-1] and size > left:
                shards.append([])
                left = limit
            shards[-1].append(tensor)
            left -= size
        files, layouts = dict[str, str](), dict[str, Layout]()
        for number, shard in enumerate(shards, start=1):
            file = SAFETENSORS
            if len(shards) > 1:
                file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            files |= {tensor.name: file for tensor in shard}
            layouts[file] = Layout.of((t.name, _kept(t.dtype, dtype), t.shape) for t in shard)
        return cls(dtype, {tensor.name: tensor for tensor in tensors}, files, layouts)

    def write(self, folder: Path, journal: Journal) -> None:
        """Write what the journal does not have; the same bytes whatever is resumed."""
        if len(self.layouts) > 1:
            sizes = (t.shape.numel() * self.dtype.itemsize for t in self.tensors.values())
            content = {"metadata": {"total_size": sum(sizes)}, "weight_map": self.files}
            write_json(folder / f"{SAFETENSORS}.index.json", content, indent=2)
        for file, layout in self.layouts.items():
            if file not in journal.done:
                layout.create(folder / file)
                sync(folder / file)
                journal.add({file: None})
        written, size = set[str](), 0
        for tensor in by_source(self.tensors.values()):
            if tensor.name in journal.done:
                continue
            file = self.files[tensor.name]
            value = _convert(tensor.name, tensor.read(), self.dtype)
            write_tensor(folder / file, self.layouts[file].places[tensor.name], value)
            written.add(tensor.name)
            size += value.nbytes
            if size > NOTED_BYTES:
                self._note(folder, journal, written)
                written, size = set(), 0
        self._note(folder, journal, written)

    def _note(self, folder: Path, journal: Journal, written: set[str]) -> None:
        for file in {self.files[name] for name in written}:
            sync(folder / file)
        journal.add(dict.fromkeys(sorted(written)))


def _kept(held: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """What a tensor is written in: whole numbers as they are."""
    return dtype if held.is_floating_point else held


def export_tensors(
    architecture: str, config: ResolvedModelConfig, shapes: Mapping[str, Tensor], read: Read
) -> Iterator[LazyTensor]:
    """The tensors of an architecture's folder, in order, made of ours.

    Args:
        architecture: transformers' class, or `llmfoundry`.
        config: filled.
        shapes: of the decoder's state, all of it; on any device.
        read: gives one of the decoder's tensors.

    Raises:
        UserError: one of ours has no place among theirs, by its name.
    """
    if architecture != OWN:
        return to_theirs(MAPS[architecture], config, shapes, read)
    sketch = shapes.__getitem__
    return (lazy(f"model.{name}", partial(same, name), sketch, read) for name in shapes)


def _convert(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In `dtype`, or whole numbers as they are."""
    converted = tensor.detach().to("cpu", _kept(tensor.dtype, dtype)).contiguous()
    if not torch.isfinite(converted).all():
        kind = str(dtype).removeprefix("torch.")
        reason = f"has values that {kind} cannot hold; write dtype=bf16 or dtype=fp32"
        if not torch.isfinite(tensor).all():
            reason = "has values that are not finite; choose an earlier checkpoint"
        raise UserError(f"{name}: {reason}")
    return converted


def save_class(
    model: HFCausalLM, tokenizer: TokenizerFiles, output: Path, *, dtype: str, card: CardInfo
) -> str:
    """Write a folder that transformers loads; experts as the class's published files have them.

    Args:
        model: with its weights, in full on this process; it is cast in place.
        tokenizer: its own.
        output: must not exist, or be empty.
        dtype: of the written weights: fp32, bf16 or fp16.
        card: the content of the model card.

    Returns:
        The class's name.

    Raises:
        UserError: the output is not empty.
    """
    hf = model.hf.to(DTYPES[dtype])
    hf.config.dtype = DTYPES[dtype]
    hf.config.use_cache = True  # which training had turned off
    name = type(hf).__name__
    with whole_or_nothing(output) as folder:
        hf.save_pretrained(folder, max_shard_size=SHARD_BYTES)
        _add_generation(folder / GENERATION, tokenizer)
        tokenizer.copy(folder)
        write_card(folder / "README.md", card, model.config, name, dtype)
    return name


def _add_generation(file: Path, tokenizer: TokenizerFiles) -> None:
    """Put what is kept of a model into its file; a class that generates nothing has none."""
    if file.exists():
        settings = read_object(file)
        own = settings.get("eos_token_id")
        known = own if isinstance(own, list) else [] if own is None else [own]
        ends = tuple(dict.fromkeys((*known, *tokenizer.end_ids)))
        kept = {**settings, **tokenizer.generation, "eos_token_id": _one_or_list(ends)}
        write_json(file, kept, indent=2)
