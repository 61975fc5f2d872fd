"""To GGUF, llama.cpp's one file; `scripts/convert.py to=gguf` calls `to_gguf`.

The `gguf` package writes the file and quantizes; names of tensors are its too. The file is written
beside its final name and renamed when whole; one tensor is held at a time.
"""

from __future__ import annotations

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
    """What goes into a file.

    Attributes:
        name: the model's, for its users.
        config: filled.
        shapes: of the decoder's state, all of it; on any device.
        read: gives one of its tensors.
        tokenizer: its own.
        starts: texts begin with the tokenizer's `document_start`.
        stops: what a generation stops at: the end of text, then that of a turn.
    """

    name: str
    config: ResolvedModelConfig
    shapes: Mapping[str, Tensor]
    read: Read
    tokenizer: Tokenizer
    starts: bool
    stops: Sequence[int]


def check_output(output: Path) -> None:
    """Raise a UserError unless `output` names a file to be made."""
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
    """A file takes its name once it is whole, so that one of GGUF's is a conversion's result."""
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
    """Write a file that llama.cpp loads.

    Args:
        model: what to write.
        output: the file.
        dtype: of matrices: fp32, fp16, bf16 or q8_0 (blocks of 32 numbers in 8 bits).
        architecture: transformers' class whose tensors are written; None: one that fits.
        note: gets a line for each way in which llama.cpp differs.

    Returns:
        llama.cpp's name of the architecture.

    Raises:
        UserError: llama.cpp has nothing like the model or its tokenizer, the file exists, or
            weights do not fit the dtype.
    """
    gguf = import_optional("gguf", "to: gguf", extra="gguf")
    check_output(output)
    config = model.config
    name = choose(config, architecture)
    vocabulary = read_vocabulary(model.tokenizer, config.vocab_size)
    tensors = to_theirs(MAPS[name], settings_of(config, name), model.shapes, model.read)
    planned = plan(tensors, config, name)
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
    ends = unnamed_ends(model.tokenizer, model.stops)
    for line in (*vocabulary.notes, *ends, *remarks(config, name)):
        note(line)
    return SHAPES[name].name


def _write(gguf: Any, writer: Any, planned: list[GGUFTensor], path: Path, dtype: str) -> None:
    """The head of the file, then each tensor's bytes, at offsets that are multiples of 32."""
    kinds = [tensor_type(tensor, dtype) for tensor in planned]
    for tensor, kind in zip(planned, kinds, strict=True):
        quantized = gguf.GGMLQuantizationType[kind]
        block, size = gguf.GGML_QUANT_SIZES[quantized]
        numbers = 1
        for length in tensor.shape:
            numbers *= length
        writer.add_tensor_info(
            tensor.name, tensor.shape, None, numbers // block * size, raw_dtype=quantized
        )
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    for tensor, kind in zip(planned, kinds, strict=True):
        begin = file.tell()
        for piece in pieces(tensor, kind):
            file.write(piece.data.cast("B"))  # of numpy's own an error has no reason
        writer.write_padding(file, file.tell() - begin)
