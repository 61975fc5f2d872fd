"""To Hugging Face folders; `scripts/convert.py` calls `to_hf`. The other way is `read.py`.

A folder is written beside its final name and renamed when whole. config.json is written by hand
with the keys that matter, so that every transformers from 5.0 reads the same model from it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.files import atomic_path, open_to_all, write_json
from llmfoundry.gauntlet.prompts.settings import DOCUMENT_START
from llmfoundry.hf.architectures import OWN
from llmfoundry.hf.card import CardInfo, write_card
from llmfoundry.hf.causal_lm import HFCausalLM
from llmfoundry.hf.lazy import LazyTensor, Read, lazy, same
from llmfoundry.hf.read import FLOATS as DTYPES
from llmfoundry.hf.tensor_names import MAPS, to_theirs
from llmfoundry.hf.write_config import choose_architecture, remarks, unkept, write_settings
from llmfoundry.models.adapter import MergedState
from llmfoundry.models.decoder import Decoder
from llmfoundry.recipe.architecture.model import ModelConfig

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
        stops: what a generation stops at: the end of text, and of a turn where a special token
            ends it.
        document_start: ids that documents begin with.
    """

    folder: Path
    ids: Mapping[str, int | None]
    stops: int | list[int]
    document_start: tuple[int, ...]

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
        return cls(folder, ids, _stops(tokenizer), start)

    def copy(self, output: Path) -> None:
        """Put the files into a folder."""
        for name in TOKENIZER_FILES:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, output / name)


def _stops(tokenizer: Tokenizer) -> int | list[int]:
    try:
        end = tokenizer.chat.end_of_turn
    except UserError:  # it has no template, or one that nothing ends a turn in
        end = tokenizer.eos
    is_other = end != tokenizer.eos and end in tokenizer.special_tokens
    return [tokenizer.eos_id, *tokenizer.encode_chat(end)] if is_other else tokenizer.eos_id


def to_hf(
    model: Decoder,
    tokenizer: TokenizerFiles,
    output: Path,
    *,
    dtype: str,
    card: CardInfo,
    architecture: str | None = None,
    is_trained: bool = False,
    note: Callable[[str], None] = print,
) -> str:
    """Write a folder that transformers loads.

    Args:
        model: with its weights, in full on this process.
        tokenizer: its own.
        output: must not exist, or be empty.
        dtype: of the written weights: fp32, bf16 or fp16.
        card: the content of the model card.
        architecture: transformers' class; None: the first to express the model exactly;
            `llmfoundry`: our own class.
        is_trained: evaluations are to begin texts as documents began in its training.
        note: gets a line for each setting that is left out because it affects training alone; the
            model card has them too.

    Returns:
        The architecture's name.

    Raises:
        UserError: no architecture expresses the model, the output is not empty, or weights do not
            fit the dtype.
    """
    name = choose_architecture(model.config, architecture)
    lines = unkept(model.config, name)
    with whole_or_nothing(output) as folder:
        _write_configs(folder, model.config, name, dtype, tokenizer, is_trained)
        _write_weights(folder, model, name, DTYPES[dtype])
        tokenizer.copy(folder)
        notes = remarks(model.config, name)
        write_card(folder / "README.md", card, model.config, name, dtype, lines, notes)
    for line in lines:
        note(line)
    return name


def _write_configs(
    folder: Path,
    config: ModelConfig,
    name: str,
    dtype: str,
    tokenizer: TokenizerFiles,
    is_trained: bool,
) -> None:
    """config.json and generation_config.json."""
    ids = tokenizer.ids
    settings = write_settings(config, name)
    kind = str(DTYPES[dtype]).removeprefix("torch.")
    settings |= {"dtype": kind, "torch_dtype": kind, **ids}  # the latter: before version 5
    settings |= {DOCUMENT_START: list(tokenizer.document_start)} if is_trained else {}
    write_json(folder / "config.json", settings, indent=2)
    pad = ids["eos_token_id"] if ids["pad_token_id"] is None else ids["pad_token_id"]
    stops = {"eos_token_id": tokenizer.stops, "pad_token_id": pad}
    write_json(folder / "generation_config.json", {**ids, **stops}, indent=2)


@contextmanager
def whole_or_nothing(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its name at the end, or is removed on an error.

    Raises:
        UserError: the output exists and is not empty.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"output: {output} exists and is not empty; write another folder")
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(output) as folder:
        folder.mkdir()
        yield folder
        open_to_all(folder)


def _write_weights(folder: Path, model: Decoder, name: str, dtype: torch.dtype) -> None:
    """One safetensors file, or several with an index; one file's tensors are held at a time."""
    from safetensors.torch import save_file

    state = MergedState(model)
    shards: list[int] = [0]  # tensors of each file
    left, total = SHARD_BYTES, 0
    tensors = list(export_tensors(name, model.config, state.shapes(), state.__getitem__))
    for tensor in tensors:
        size = tensor.shape.numel() * dtype.itemsize
        if shards[-1] and size > left:
            shards.append(0)
            left = SHARD_BYTES
        shards[-1] += 1
        left -= size
        total += size
    index: dict[str, str] = {}
    stream = iter(tensors)
    for number, count in enumerate(shards, start=1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard = islice(stream, count)
        converted = {t.name: _convert(t.name, t.read(), dtype) for t in shard}
        save_file(converted, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(converted, file)
    if len(shards) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": index}
        write_json(folder / "model.safetensors.index.json", content, indent=2)


def export_tensors(
    architecture: str, config: ModelConfig, shapes: Mapping[str, Tensor], read: Read
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
    """A copy in `dtype`, or whole numbers as they are, that shares memory with nothing."""
    kept = dtype if tensor.is_floating_point() else tensor.dtype
    converted = tensor.detach().to("cpu", kept, copy=True).contiguous()
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
        _stop_at(getattr(hf, "generation_config", None), tokenizer.stops)
        hf.save_pretrained(folder, max_shard_size=SHARD_BYTES)
        tokenizer.copy(folder)
        write_card(folder / "README.md", card, model.config, name, dtype)
    return name


def _stop_at(config: Any, ids: int | list[int]) -> None:
    """Have generations end at these too; a class that generates nothing has no configuration."""
    if config is not None:
        known, more = (n if isinstance(n, list) else [n] for n in (config.eos_token_id, ids))
        stops = [*dict.fromkeys(n for n in (*known, *more) if n is not None)]
        config.eos_token_id = stops if len(stops) > 1 else stops[0]
