"""Export to GGUF, llama.cpp's single-file format; `scripts/convert.py to=gguf` calls `to_gguf`.

The `gguf` package writes the file, quantizes tensors and defines their names. The file is written
under a temporary name and renamed when it is complete. One tensor is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError, import_optional
from llmfoundry.files import atomic_path
from llmfoundry.hf.gguf.architectures import SHAPES, add_settings, choose, remarks, settings_of
from llmfoundry.hf.gguf.tensors import GGUFTensor, pieces, plan, tensor_type
from llmfoundry.hf.gguf.tokenizer import add_tokenizer, read_vocabulary, unnamed_ends
from llmfoundry.hf.tensor_names import MAPS, to_theirs
from llmfoundry.models.lazy_tensors import Read
from llmfoundry.recipe.model import ResolvedModelConfig

FILE_TYPES = {"fp32": "ALL_F32", "fp16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
SUFFIX = ".gguf"


@dataclass(frozen=True)
class GGUFModel:
    """A model to be exported.

    Attributes:
        name: name of the model for its users.
        config: resolved model configuration.
        shapes: all tensors of the decoder by name, on any device; only their shapes are used.
        read: returns a tensor by name.
        tokenizer: tokenizer of the model.
        starts: texts begin with the tokenizer's `document_start`.
        stops: ids that end a generation: end of text, then end of turn.
    """

    name: str
    config: ResolvedModelConfig
    shapes: Mapping[str, Tensor]
    read: Read
    tokenizer: Tokenizer
    starts: bool
    stops: Sequence[int]


def check_output(output: Path) -> None:
    """Raise a UserError unless `output` is a path where a file can be created."""
    if output.suffix != SUFFIX:
        raise UserError(f"output: {output} is one file, and must end in {SUFFIX}")
    if output.exists():
        raise UserError(
            f"output: {output} exists{_what_is(output)}; write another name, or delete it"
        )
    above = next(folder for folder in output.absolute().parents if folder.exists())
    if not above.is_dir():
        raise UserError(f"output: {above} is not a folder; write another place")


def _what_is(output: Path) -> str:
    """Describe an existing file; a GGUF file is always complete, because it is renamed last."""
    if not output.is_file():
        return ""
    with output.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    size = f"{output.stat().st_size / 1e6:,.1f} MB"
    return f", a complete GGUF file of {size}" if is_gguf else f", a file of {size}"


def to_gguf(
    model: GGUFModel,
    output: Path,
    *,
    dtype: str,
    architecture: str | None = None,
    note: Callable[[str], None] = print,
) -> str:
    """Write a GGUF file.

    Args:
        model: the model.
        output: path of the file.
        dtype: number format of matrices: fp32, fp16, bf16 or q8_0 (8 bits, in blocks of 32).
        architecture: transformers class whose tensors are written; None: one that fits.
        note: called with a line for each difference between llama.cpp and the model.

    Returns:
        llama.cpp's name of the architecture.

    Raises:
        UserError: llama.cpp does not support the model or its tokenizer, the file exists, or
            weights do not fit the number format.
    """
    # convert the settings, the tokenizer and the names
    gguf = import_optional("gguf", "to: gguf", extra="gguf")
    check_output(output)
    config = model.config
    name = choose(config, architecture)
    vocabulary = read_vocabulary(model.tokenizer, config.vocab_size)
    tensors = to_theirs(MAPS[name], settings_of(config, name), model.shapes, model.read)
    planned = plan(tensors, config, name)

    # write the file
    writer = gguf.GGUFWriter(None, SHAPES[name].name)
    writer.add_type("model")
    writer.add_name(model.name)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[dtype]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_settings(writer, config, name)
    add_tokenizer(writer, model.tokenizer, vocabulary, starts=model.starts, stops=model.stops)
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(output) as partial:
        try:
            _write(gguf, writer, planned, partial, dtype)
        finally:
            writer.close()

    # report differences
    ends = unnamed_ends(model.tokenizer, model.stops)
    for line in (*vocabulary.notes, *ends, *remarks(config, name)):
        note(line)
    return SHAPES[name].name


def _write(gguf: Any, writer: Any, planned: list[GGUFTensor], path: Path, dtype: str) -> None:
    """Write the header, then the bytes of each tensor, aligned to multiples of 32."""
    # header: names, shapes and sizes of all tensors
    kinds = [tensor_type(tensor, dtype) for tensor in planned]
    for tensor, kind in zip(planned, kinds, strict=True):
        quantization = gguf.GGMLQuantizationType[kind]
        block, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
        n_bytes = math.prod(tensor.shape) // block * block_bytes
        writer.add_tensor_info(tensor.name, tensor.shape, None, n_bytes, raw_dtype=quantization)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()

    # tensors
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    for tensor, kind in zip(planned, kinds, strict=True):
        begin = file.tell()
        for piece in pieces(tensor, kind):
            file.write(piece.data.cast("B"))  # errors of numpy's tofile lack the reason
        writer.write_padding(file, file.tell() - begin)
