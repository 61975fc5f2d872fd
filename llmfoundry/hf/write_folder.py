"""Writer of Hugging Face folders; `read_folder.py` is the reader.

Entry points: `to_hf` exports the project's decoder (`scripts/convert.py` calls it), `save_class`
exports a transformers class. A folder is written under a temporary name and renamed when it is
complete (`files.py`). Weight files are first created with their header and full size. Tensors are
then written at their offsets, in an order that reads each tensor of the decoder once. At most one
source tensor and one converted tensor are in memory. config.json is not written by transformers,
so that every version from 5.0 reads the same model from it.
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
from llmfoundry.hf.architecture import DOCUMENT_START, OWN
from llmfoundry.hf.card import CardInfo, write_card
from llmfoundry.hf.causal_lm import HFCausalLM
from llmfoundry.hf.choose_architecture import choose_architecture, remarks, unkept
from llmfoundry.hf.config_keys import write_settings
from llmfoundry.hf.expert_names import BALANCE
from llmfoundry.hf.read_folder import FLOATS as DTYPES
from llmfoundry.hf.read_folder import SAFETENSORS
from llmfoundry.hf.safetensors_file import FileLayout, write_tensor
from llmfoundry.hf.tensor_names import MAPS, to_theirs
from llmfoundry.models.adapter import MergedState
from llmfoundry.models.lazy_tensors import LazyTensor, Read, by_source, lazy, same
from llmfoundry.recipe.model import ResolvedModelConfig

NOTED_BYTES = 1 << 28  # 256 MiB between journal entries; resuming repeats at most this much
SHARD_BYTES = 5 * 10**9  # maximum size of a weight file (a single tensor may be larger)
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
    """The tokenizer of an exported folder.

    Attributes:
        folder: folder of tokenizer.json and its companion files.
        ids: special token ids by their config.json keys. bos_token_id is the token at the start of
            every training document. If the tokenizer adds no token before a text, it is the
            end-of-text token, even if the tokenizer names another one.
        end_ids: tokens that end a generated text.
        document_start: tokens at the start of each training document.
        generation: other entries of generation_config.json.
    """

    folder: Path
    ids: Mapping[str, int | None]
    end_ids: tuple[int, ...]
    document_start: tuple[int, ...]
    generation: Mapping[str, Any]

    @classmethod
    def load(cls, folder: Path) -> TokenizerFiles:
        """Load the tokenizer of a folder."""
        return cls.of(Tokenizer.load(folder), folder)

    @classmethod
    def of(cls, tokenizer: Tokenizer, folder: Path) -> TokenizerFiles:
        """Return the files of a tokenizer that was loaded from `folder`."""
        start = tokenizer.document_start
        ids = {
            "bos_token_id": start[-1],
            "eos_token_id": tokenizer.eos_id,
            "pad_token_id": tokenizer.pad_id,
        }
        return cls(folder, ids, tokenizer.end_ids, start, tokenizer.generation)

    def copy(self, output: Path) -> None:
        """Copy the files to a folder."""
        for name in TOKENIZER_FILES:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, output / name)


@dataclass(frozen=True)
class Export:
    """Options of an export.

    Attributes:
        dtype: dtype of the written weights: fp32, bf16 or fp16.
        card: content of the model card.
        architecture: class of transformers; None: the first class that expresses the model
            exactly; `llmfoundry`: `LlmfoundryForCausalLM`.
        is_trained: record the training documents' start tokens, for evaluations of the folder.
        shard_bytes: maximum size of a weight file (a single tensor may be larger); None:
            SHARD_BYTES.
        source: identity of the weights. An interrupted export resumes only from the same source.
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
    """Write a folder that transformers loads. One tensor of `state` is in memory at a time.

    Args:
        config: the resolved `model` section.
        state: the decoder's weights, read one by one.
        tokenizer: tokenizer of the model.
        output: output folder; must be empty or not exist.
        export: options of the export.
        note: logs a line for each setting that only affects training and is not exported; the
            model card lists these settings too.

    Returns:
        The architecture's name.

    Raises:
        UserError: no architecture expresses the model, the output is not empty, or weights do not
            fit the dtype.
    """
    # plan all files before any weight is read
    name = choose_architecture(config, export.architecture)
    lines = unkept(config, name)
    weights = _Weights.plan(name, config, state, export)
    # the identity decides whether an interrupted export may be resumed
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
    """Write config.json and generation_config.json.

    If the model was trained here, the tokenizer's ids override those of `tokenizer.generation`.
    """
    # config.json
    ids = tokenizer.ids
    settings = write_settings(config, name)
    dtype_name = str(DTYPES[dtype]).removeprefix("torch.")
    # transformers before version 5 reads torch_dtype
    settings |= {"dtype": dtype_name, "torch_dtype": dtype_name, **ids}
    if is_trained:
        settings[DOCUMENT_START] = list(tokenizer.document_start)
    write_json(folder / "config.json", settings, indent=2)

    # generation_config.json; without a padding token, sequences are padded with the end token
    pad = ids["eos_token_id"] if ids["pad_token_id"] is None else ids["pad_token_id"]
    ids, inherited = {**ids, "pad_token_id": pad}, tokenizer.generation
    generation = {**inherited, **ids} if is_trained else {**ids, **inherited}
    generation["eos_token_id"] = _one_or_list(tokenizer.end_ids)
    write_json(folder / GENERATION, generation, indent=2)


def _one_or_list(ids: Sequence[int]) -> int | list[int]:
    """Return a single id as a number, several ids as a list."""
    return list(ids) if len(ids) > 1 else ids[0]


@contextmanager
def whole_or_nothing(output: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `output` at the end, or removed on an error.

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
    """The weight files of a folder, planned before any weight is read.

    Attributes:
        dtype: dtype of the written weights.
        tensors: tensors by name, in the order of the index.
        files: file name of each tensor.
        layouts: layout of each file, by file name.
    """

    dtype: torch.dtype
    tensors: dict[str, LazyTensor]
    files: dict[str, str]
    layouts: dict[str, FileLayout]

    @classmethod
    def plan(
        cls, name: str, config: ResolvedModelConfig, state: MergedState, export: Export
    ) -> _Weights:
        """Distribute the tensors over one file, or over several files with an index."""
        dtype, limit = DTYPES[export.dtype], export.shard_bytes or SHARD_BYTES
        tensors = list(export_tensors(name, config, state.shapes(), state.__getitem__))
        # fill each file up to the limit
        shards: list[list[LazyTensor]] = [[]]
        left = limit
        for tensor in tensors:
            size = tensor.shape.numel() * dtype.itemsize
            if shards[-1] and size > left:
                shards.append([])
                left = limit
            shards[-1].append(tensor)
            left -= size
        # file names and offsets
        files, layouts = dict[str, str](), dict[str, FileLayout]()
        for number, shard in enumerate(shards, start=1):
            file = SAFETENSORS
            if len(shards) > 1:
                file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            files |= {tensor.name: file for tensor in shard}
            kept = ((t.name, _kept(t.name, t.dtype, dtype), t.shape) for t in shard)
            layouts[file] = FileLayout.of(kept)
        return cls(dtype, {tensor.name: tensor for tensor in tensors}, files, layouts)

    def write(self, folder: Path, journal: Journal) -> None:
        """Write all tensors that are not in the journal. A resumed export has the same bytes."""
        # index, and files of full size with their headers
        if len(self.layouts) > 1:
            sizes = (t.shape.numel() * self.dtype.itemsize for t in self.tensors.values())
            content = {"metadata": {"total_size": sum(sizes)}, "weight_map": self.files}
            write_json(folder / f"{SAFETENSORS}.index.json", content, indent=2)
        for file, layout in self.layouts.items():
            if file not in journal.done:
                layout.create(folder / file)
                sync(folder / file)
                journal.add({file: None})
        # tensors at their offsets, grouped by source tensor
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
        """Flush the files of some tensors to disk, then add the tensors to the journal."""
        for file in {self.files[name] for name in written}:
            sync(folder / file)
        journal.add(dict.fromkeys(sorted(written)))


def _kept(name: str, held: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a tensor is written in: integers and balancing biases keep theirs."""
    is_kept = not held.is_floating_point or name.endswith(BALANCE)
    return held if is_kept else dtype


def export_tensors(
    architecture: str, config: ResolvedModelConfig, shapes: Mapping[str, Tensor], read: Read
) -> Iterator[LazyTensor]:
    """Yield the tensors of an architecture's folder, in order, converted from the decoder's.

    Args:
        architecture: class of transformers, or `llmfoundry`.
        config: the resolved `model` section.
        shapes: tensors of the full decoder state, on any device.
        read: returns a tensor of the decoder by name.

    Raises:
        UserError: with the name of a decoder tensor that the architecture cannot express.
    """
    if architecture != OWN:
        return to_theirs(MAPS[architecture], config, shapes, read)
    sketch = shapes.__getitem__
    return (lazy(f"model.{name}", partial(same, name), sketch, read) for name in shapes)


def _convert(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor and check that it is finite. Integer tensors keep their dtype."""
    converted = tensor.detach().to("cpu", _kept(name, tensor.dtype, dtype)).contiguous()
    if not torch.isfinite(converted).all():
        dtype_name = str(dtype).removeprefix("torch.")
        reason = f"has values that {dtype_name} cannot hold; write dtype=bf16 or dtype=fp32"
        if not torch.isfinite(tensor).all():
            reason = "has values that are not finite; choose an earlier checkpoint"
        raise UserError(f"{name}: {reason}")
    return converted


def save_class(
    model: HFCausalLM, tokenizer: TokenizerFiles, output: Path, *, dtype: str, card: CardInfo
) -> str:
    """Write a transformers class as a folder, with experts as in the class's published files.

    Args:
        model: the model with unsharded weights; it is cast in place.
        tokenizer: tokenizer of the model.
        output: output folder; must be empty or not exist.
        dtype: dtype of the written weights: fp32, bf16 or fp16.
        card: content of the model card.

    Returns:
        The class's name.

    Raises:
        UserError: the output is not empty.
    """
    hf = model.hf.to(DTYPES[dtype])
    hf.config.dtype = DTYPES[dtype]
    hf.config.use_cache = True  # training disabled it
    name = type(hf).__name__
    with whole_or_nothing(output) as folder:
        hf.save_pretrained(folder, max_shard_size=SHARD_BYTES)
        _add_generation(folder / GENERATION, tokenizer)
        tokenizer.copy(folder)
        write_card(folder / "README.md", card, model.config, name, dtype)
    return name


def _add_generation(file: Path, tokenizer: TokenizerFiles) -> None:
    """Add the tokenizer's entries to generation_config.json, if the class has written one."""
    if file.exists():
        settings = read_object(file)
        eos = settings.get("eos_token_id")
        class_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        end_ids = tuple(dict.fromkeys((*class_ids, *tokenizer.end_ids)))
        merged = {**settings, **tokenizer.generation, "eos_token_id": _one_or_list(end_ids)}
        write_json(file, merged, indent=2)
