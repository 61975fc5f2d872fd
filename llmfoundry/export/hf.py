"""To and from Hugging Face folders; `scripts/convert.py` calls `to_hf` and `from_hf`.

A folder is written beside its final name and renamed when whole. config.json is written by hand
with the keys that matter, so that every transformers from 5.0 reads the same model from it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmfoundry.data.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.export.architectures import ARCHITECTURES
from llmfoundry.export.card import CardInfo, write_card
from llmfoundry.export.foundry import FOUNDRY, foundry_map
from llmfoundry.export.mixture import remarks
from llmfoundry.export.settings import (
    OWN,
    choose,
    read_settings,
    said_biases,
    unkept,
    unread,
    write_settings,
)
from llmfoundry.gauntlet.special_tokens import DOCUMENT_START
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.hf_maps import MAPS, bias_names, check_shapes, to_ours, to_theirs
from llmfoundry.recipe.model import ModelConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEAD = "lm_head.weight"
UNTIED = (
    "config.json: tie_word_embeddings true, but lm_head.weight is not {embedding}; both are read,"
    " as transformers 5 does"
)
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


def to_hf(
    model: Decoder,
    tokenizer_folder: Path,
    output: Path,
    *,
    dtype: str,
    card: CardInfo,
    architecture: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    start: Sequence[int] | None = None,
    note: Callable[[str], None] = print,
) -> str:
    """Write a folder that transformers loads.

    Args:
        model: with its weights, whole on this process.
        tokenizer_folder: tokenizer.json and what belongs to it.
        output: must not exist, or be empty.
        dtype: of the written weights: fp32, bf16 or fp16.
        card: what the model card says.
        architecture: transformers' class; None: the first that expresses the model exactly;
            `llmfoundry`: our own class.
        shard_bytes: size of a weight file, at most.
        start: ids that documents began with in its training, for evaluations to begin texts with.
        note: gets a line for each setting that is left out because only training feels it; the
            model card has them too.

    Returns:
        The architecture's name.

    Raises:
        UserError: no architecture expresses the model, the output is not empty, or weights do not
            fit the dtype.
    """
    name = choose(model.config, architecture)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"output: {output} exists and is not empty; write another folder")
    with _whole_or_nothing(output) as folder:
        ids = _copy_tokenizer(tokenizer_folder, folder)
        settings = write_settings(model.config, name)
        if name == OWN:
            settings = {"architectures": ["LlmfoundryForCausalLM"], **settings}
        kind = str(DTYPES[dtype]).removeprefix("torch.")
        settings |= {"dtype": kind, "torch_dtype": kind, **ids}  # the latter: before version 5
        settings |= {} if start is None else {DOCUMENT_START: list(start)}
        _write_json(folder / "config.json", settings)
        pad = ids["eos_token_id"] if ids["pad_token_id"] is None else ids["pad_token_id"]
        _write_json(folder / "generation_config.json", {**ids, "pad_token_id": pad})
        _write_weights(folder, list(_tensors(model, name)), DTYPES[dtype], shard_bytes)
        lines = unkept(model.config, name)
        more = [] if name == OWN else remarks(model.config, name, ARCHITECTURES[name])
        write_card(
            folder / "README.md",
            card,
            model,
            architecture=name,
            dtype=dtype,
            unkept=lines,
            remarks=more,
        )
    for line in lines:
        note(line)
    return name


def _tensors(model: Decoder, architecture: str) -> Iterator[tuple[str, Tensor]]:
    state = model.state_dict()
    if architecture == OWN:
        return ((f"model.{name}", tensor) for name, tensor in state.items())
    return to_theirs(MAPS[architecture], model.config, state)


@contextmanager
def _whole_or_nothing(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its name at the end, or is removed on an error."""
    folder = output.parent / f".{output.name}.{os.getpid()}.tmp"
    folder.mkdir(parents=True)
    try:
        yield folder
        if output.exists():
            output.rmdir()
        folder.rename(output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _copy_tokenizer(source: Path, folder: Path) -> dict[str, int | None]:
    """Copy the tokenizer's files; ids of its special tokens as config.json names them.

    The beginning of text is what every training document begins with: where the tokenizer puts
    nothing before a text, that is the end of text, whatever it names.
    """
    tokenizer = Tokenizer.load(source)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    return {
        "bos_token_id": tokenizer.document_start[-1],
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _write_weights(
    folder: Path, tensors: list[tuple[str, Tensor]], dtype: torch.dtype, shard_bytes: int
) -> None:
    """One safetensors file, or several with an index; one file's tensors are held at a time."""
    from safetensors.torch import save_file

    shards: list[list[tuple[str, Tensor]]] = [[]]
    room = shard_bytes
    for name, tensor in tensors:
        size = tensor.numel() * dtype.itemsize
        if shards[-1] and size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append((name, tensor))
        room -= size
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        converted = {name: _convert(name, tensor, dtype) for name, tensor in shard}
        save_file(converted, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(converted, file)
    if len(shards) > 1:
        total = sum(tensor.numel() for _, tensor in tensors) * dtype.itemsize
        content = {"metadata": {"total_size": total}, "weight_map": index}
        _write_json(folder / "model.safetensors.index.json", content)


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


def from_hf(
    path_or_id: str, *, note: Callable[[str], None] = print
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The filled `model` section and the decoder's state that a Hugging Face folder holds.

    `attention_bias` is false where every bias of queries, keys and values in the file is zero, and
    `no_bias` is true where all others are: beyond that the decoder has all biases or none.

    Args:
        path_or_id: a folder with config.json and safetensors, or a hub id.
        note: gets a line for each dropout that the decoder has not, and where the file's head is
            not the embedding that config.json ties it to.

    Raises:
        UserError: what the decoder cannot follow exactly, by config.json's key or tensor's name.
    """
    folder = hf_folder(path_or_id)
    written = _read_json(folder / "config.json")
    name, config = read_settings(written)
    for line in unread(written, name):
        note(line)
    with _open_weights(folder) as (names, get):
        if name == OWN:
            return config, _own_state(config, names, get)
        weights = foundry_map(config, written) if name == FOUNDRY else MAPS[name]
        (embedding,) = weights.rules[0].theirs
        base = embedding.split(".")[0] + "."  # `model.` or `transformer.`
        where = {key: key for key in names}
        if not any(key.startswith(base) for key in names):  # saved without a head, as GPT-2 was
            where = {key if key == HEAD else base + key: key for key in names}

        def read(key: str) -> Tensor:
            tensor = get(where[key])
            if tensor.dtype not in DTYPES.values():
                raise UserError(f"{key}: is {tensor.dtype}; the decoder reads {', '.join(DTYPES)}")
            return tensor

        if config.tie_word_embeddings and HEAD in where:
            if embedding not in where:
                where[embedding] = where.pop(HEAD)
            elif _equal(read(embedding), read(HEAD)):
                del where[HEAD]
            elif name != FOUNDRY:  # whose class has no head then
                note(UNTIED.format(embedding=embedding))
                _, config = read_settings({**written, "tie_word_embeddings": False})
        biased = said_biases(written, name, config)
        qkv, other = (bias_names(weights, config, where, qkv=of_qkv) for of_qkv in (True, False))
        config.attention_bias = any(read(key).any() for key in qkv)
        config.no_bias = not any(read(key).any() for key in other)
        return config, to_ours(weights, config, where, read, biased=biased)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether they hold the same numbers, whatever their dtypes."""
    return one.shape == other.shape and bool((one == other).all())


def _own_state(
    config: ModelConfig, names: set[str], get: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """The state of a folder of our own class, whose names are the decoder's after `model.`."""
    with torch.device("meta"):
        wanted = {f"model.{name}": tensor for name, tensor in Decoder(config).state_dict().items()}
    if names != wanted.keys():
        name = min(names ^ wanted.keys())
        raise UserError(f"{name}: config.json and the weights disagree on whether it exists")
    state = {name.removeprefix("model."): get(name) for name in wanted}
    check_shapes(state, {name: wanted[f"model.{name}"].shape for name in state})
    return state


def hf_folder(path_or_id: str) -> Path:
    """The folder itself, or a hub id's files, downloaded; the tokenizer is there too."""
    folder = Path(path_or_id)
    if folder.is_dir():
        return folder
    if path_or_id.count("/") > 1 or path_or_id.startswith((".", "/", "~")):
        raise UserError(f"checkpoint: there is no folder {path_or_id}")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(snapshot_download(path_or_id, allow_patterns=patterns))
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"checkpoint: {path_or_id} is no folder, and as a hub id it cannot be fetched: {reason}"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: is missing; write a folder that transformers saved") from None
    except ValueError as error:
        raise UserError(f"{path}: is not JSON: {error}") from None


@contextmanager
def _open_weights(folder: Path) -> Iterator[tuple[set[str], Callable[[str], Tensor]]]:
    """Names of all tensors and a function that reads one of them from its file."""
    from safetensors import safe_open

    files = sorted(folder.glob("model*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = [folder / name for name in _shards(index)]
    if not files:
        raise UserError(
            f"{folder}: has no model.safetensors; load it with transformers and save it again"
        )
    with ExitStack() as stack:
        where: dict[str, Any] = {}
        for file in files:
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
            except Exception as error:
                raise UserError(f"{file}: cannot be read: {error}") from error
            where |= dict.fromkeys(opened.keys(), opened)
        yield set(where), lambda name: where[name].get_tensor(name)


def _shards(index: Path) -> list[str]:
    """The files that an index names, all beside it."""
    written = _read_json(index)
    names = written.get("weight_map") if isinstance(written, dict) else None
    if not isinstance(names, dict):
        raise UserError(f"{index}: has no weight_map; copy or download it again")
    for name in names.values():
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", name):
            raise UserError(f"{index}: {name!r} is no file of this folder; correct it")
    return sorted({*names.values()})


assert set(MAPS) == set(ARCHITECTURES), "an architecture needs both its settings and its weights"
