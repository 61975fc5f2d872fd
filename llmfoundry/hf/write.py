"""To Hugging Face folders; `scripts/convert.py` calls `to_hf`. The other way is `read.py`.

A folder is written beside its final name and renamed when whole. config.json is written by hand
with the keys that matter, so that every transformers from 5.0 reads the same model from it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.files import atomic_path, open_to_all, write_json
from llmfoundry.gauntlet.prompts.settings import DOCUMENT_START
from llmfoundry.hf.architectures import ARCHITECTURES, remarks
from llmfoundry.hf.card import CardInfo, write_card
from llmfoundry.hf.causal_lm import HFCausalLM
from llmfoundry.hf.config_json import OWN, choose_architecture, unkept, write_settings
from llmfoundry.hf.read import FLOATS as DTYPES
from llmfoundry.hf.tensor_names import MAPS
from llmfoundry.hf.weight_map import to_theirs
from llmfoundry.models.adapter import MergedState
from llmfoundry.models.decoder import Decoder

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
    name = choose_architecture(model.config, architecture)
    with whole_or_nothing(output) as folder:
        ids = copy_tokenizer(tokenizer_folder, folder)
        settings = write_settings(model.config, name)
        if name == OWN:
            settings = {"architectures": ["LlmfoundryForCausalLM"], **settings}
        kind = str(DTYPES[dtype]).removeprefix("torch.")
        settings |= {"dtype": kind, "torch_dtype": kind, **ids}  # the latter: before version 5
        settings |= {} if start is None else {DOCUMENT_START: list(start)}
        write_json(folder / "config.json", settings, indent=2)
        pad = ids["eos_token_id"] if ids["pad_token_id"] is None else ids["pad_token_id"]
        stops = {"eos_token_id": stop_ids(tokenizer_folder), "pad_token_id": pad}
        write_json(folder / "generation_config.json", ids | stops, indent=2)
        _write_weights(folder, partial(_tensors, model, name), DTYPES[dtype], shard_bytes)
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


def _tensors(
    model: Decoder, architecture: str, *, shapes: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors as they are written, each made when its turn comes; or their shapes."""
    state: Mapping[str, Tensor] = MergedState(model)
    if shapes:
        with torch.device("meta"):
            state = Decoder(model.config).state_dict()
    if architecture == OWN:
        return ((f"model.{name}", tensor) for name, tensor in state.items())
    return to_theirs(MAPS[architecture], model.config, state)


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


def copy_tokenizer(source: Path, folder: Path) -> dict[str, int | None]:
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


def stop_ids(tokenizer_folder: Path) -> int | list[int]:
    """What a generation stops at: the end of text, and of a turn where a special token ends it."""
    tokenizer = Tokenizer.load(tokenizer_folder)
    try:
        end = tokenizer.chat.end_of_turn
    except UserError:  # it has no template, or one that nothing ends a turn in
        end = tokenizer.eos
    is_other = end != tokenizer.eos and end in tokenizer.special_tokens
    return [tokenizer.eos_id, *tokenizer.encode_chat(end)] if is_other else tokenizer.eos_id


class _Tensors(Protocol):
    def __call__(self, *, shapes: bool = False) -> Iterator[tuple[str, Tensor]]: ...


def _write_weights(folder: Path, tensors: _Tensors, dtype: torch.dtype, shard_bytes: int) -> None:
    """One safetensors file, or several with an index; one file's tensors are held at a time."""
    from safetensors.torch import save_file

    shards: list[int] = [0]  # tensors of each file
    room, total = shard_bytes, 0
    for _, tensor in tensors(shapes=True):
        size = tensor.numel() * dtype.itemsize
        if shards[-1] and size > room:
            shards.append(0)
            room = shard_bytes
        shards[-1] += 1
        room -= size
        total += size
    index: dict[str, str] = {}
    stream = tensors()
    for number, count in enumerate(shards, start=1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard = islice(stream, count)
        converted = {name: _convert(name, tensor, dtype) for name, tensor in shard}
        save_file(converted, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(converted, file)
    if len(shards) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": index}
        write_json(folder / "model.safetensors.index.json", content, indent=2)


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
    model: HFCausalLM,
    tokenizer_folder: Path,
    output: Path,
    *,
    dtype: str,
    card: CardInfo,
    shard_bytes: int = SHARD_BYTES,
) -> str:
    """Write a folder that transformers loads; experts as the class's published files have them.

    Args:
        model: with its weights, whole on this process; it is cast in place.
        tokenizer_folder: tokenizer.json and what belongs to it.
        output: must not exist, or be empty.
        dtype: of the written weights: fp32, bf16 or fp16.
        card: what the model card says.
        shard_bytes: size of a weight file, at most.

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
        _stop_at(getattr(hf, "generation_config", None), stop_ids(tokenizer_folder))
        hf.save_pretrained(folder, max_shard_size=shard_bytes)
        copy_tokenizer(tokenizer_folder, folder)
        write_card(folder / "README.md", card, cast(Decoder, model), architecture=name, dtype=dtype)
    return name


def _stop_at(config: Any, ids: int | list[int]) -> None:
    """Have generations end at these too; a class that generates nothing has no configuration."""
    if config is not None:
        known, more = (n if isinstance(n, list) else [n] for n in (config.eos_token_id, ids))
        stops = [*dict.fromkeys(n for n in (*known, *more) if n is not None)]
        config.eos_token_id = stops if len(stops) > 1 else stops[0]
