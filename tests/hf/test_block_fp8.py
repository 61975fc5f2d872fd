"""FP8 weights next to transformers' conversion and DeepSeek's formula, and folders of them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from llmfoundry.builders.pretrained import open_pretrained
from llmfoundry.distributed.process_group import ALONE
from llmfoundry.errors import UserError
from llmfoundry.hf.block_fp8 import dequantize
from llmfoundry.hf.causal_lm import HFCausalLM
from llmfoundry.hf.open_class import open_hugging_face
from llmfoundry.hf.read_folder import from_hf
from llmfoundry.recipe.adapter import PretrainedConfig
from tests.hf.random_models import ROWS, logits, write_tokenizer
from tests.hf.test_hf_import import DEEPSEEK, LLAMA_SHAPE, make, read

TOKENS = torch.randint(0, ROWS, (2, 24), generator=torch.Generator().manual_seed(1))
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
GROUPS = {"n_group": 3, "topk_group": 2, "first_k_dense_replace": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen": ("Qwen3", {**LLAMA_SHAPE, "head_dim": 16}),
    "deepseek": (
        "DeepseekV3",
        {**DEEPSEEK, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1},
    ),
}


def packed(weight: Tensor, block: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """A weight in e4m3 and the factors of its blocks, by the largest value of each."""
    rows, columns = weight.shape
    height, width = block or (rows, columns)
    scale = torch.zeros(math.ceil(rows / height), math.ceil(columns / width))
    low = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
            scale[i, j] = weight[at].float().abs().max() / 448
            low[at] = (weight[at].float() / scale[i, j]).to(torch.float8_e4m3fn)
    return low, scale if block else scale.reshape(())


def by_formula(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """DeepSeek's fp8_cast_bf16.py: x in fp32 times the factor of its block, in bf16."""
    rows, columns = torch.meshgrid(*(torch.arange(n) for n in weight.shape), indexing="ij")
    return (weight.float() * scale[rows // block[0], columns // block[1]]).to(torch.bfloat16)


@pytest.mark.parametrize("shape", [(256, 384), (128, 128), (576, 200), (1, 5)])
def test_values_are_those_of_the_formula_and_of_transformers(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator)
    low, scale = packed(weight, (128, 128))
    found = dequantize(low, scale, (128, 128))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, by_formula(low, scale, (128, 128)))
    torch.testing.assert_close(found.float(), weight, rtol=0.08, atol=0.02)
    if not shape[0] % 128 and not shape[1] % 128:  # transformers reads whole blocks alone
        theirs = Fp8Dequantize(SimpleNamespace())._dequantize_one(low, scale, torch.bfloat16)
        assert torch.equal(found, theirs)
    assert torch.equal(
        dequantize(low, torch.tensor(0.3), None), (low.float() * 0.3).to(torch.bfloat16)
    )


def write_both(folder: Path, name: str, block: tuple[int, int] | None, *, files: int = 1) -> None:
    """Write `fp8`, with FP8 projections, and `bf16`, the same values by the formula."""
    make(*MODELS[name]).bfloat16().save_pretrained(folder / "bf16")
    shutil.copytree(folder / "bf16", folder / "fp8")
    plain, stored = load_file(folder / "bf16/model.safetensors"), {}
    for key, weight in list(plain.items()):
        stored[key] = weight
        if not key.endswith("_proj.weight") and "kv_a_proj" not in key:
            continue
        stored[key], factors = packed(weight, block)
        stored[f"{key}_scale_inv"] = factors
        blocks = factors.reshape(-1, 1) if block is None else factors
        plain[key] = by_formula(stored[key], blocks, block or tuple(weight.shape))
    save_file(plain, folder / "bf16/model.safetensors", metadata={"format": "pt"})
    write_files(folder / "fp8", stored, files)
    change(folder / "fp8", quantization_config=FP8 | {"weight_block_size": block and [*block]})


def write_files(folder: Path, stored: dict[str, Tensor], files: int) -> None:
    """Write tensors in one file; or in two, each weight in one and its factors in the other."""
    (folder / "model.safetensors").unlink()
    if files == 1:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = {key: f"model-{1 + key.endswith('_inv'):05}-of-00002.safetensors" for key in stored}
    for name in {*names.values()}:
        save_file({key: stored[key] for key in stored if names[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def change(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("block", [(8, 16), (128, 128), None])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("files", [1, 2])
def test_a_folder_is_the_model_in_bf16(
    name: str, block: tuple[int, int] | None, files: int, tmp_path: Path
) -> None:
    write_both(tmp_path, name, block, files=files)
    _, ours = from_hf(str(tmp_path / "fp8"))
    _, expected = from_hf(str(tmp_path / "bf16"))
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        assert ours[key].dtype == value.dtype and torch.equal(ours[key], value), key
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "bf16", dtype=torch.float32
    )
    with torch.no_grad():
        found = logits(read(tmp_path / "fp8").float(), TOKENS)
        torch.testing.assert_close(found, theirs(TOKENS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_class_reads_it_too(name: str, tmp_path: Path) -> None:
    write_both(tmp_path, name, (8, 16))
    for kind in ("fp8", "bf16"):
        write_tokenizer(tmp_path / kind)
    states = []
    for kind in ("fp8", "bf16"):
        asked = PretrainedConfig(name="hf_causal_lm", pretrained=str(tmp_path / kind))
        pretrained = open_pretrained(asked, ALONE, note=print)
        model = HFCausalLM(pretrained.config).to_empty(device="cpu")
        pretrained.fill(model)
        states.append(model.state_dict())
    for key, value in states[1].items():
        assert torch.equal(states[0][key], value), key
    # and as eval.py, generate.py and serve.py load it
    found, expected = (
        open_hugging_face(str(tmp_path / kind)).load(device=torch.device("cpu"), precision="fp32")
        for kind in ("fp8", "bf16")
    )
    with torch.no_grad():
        assert torch.equal(found(TOKENS).logits, expected(TOKENS).logits)


def test_a_layer_that_predicts_one_more_token_is_left_out_with_a_line(tmp_path: Path) -> None:
    write_both(tmp_path, "deepseek", (8, 16))
    stored = load_file(tmp_path / "fp8/model.safetensors")
    more = {"eh_proj.weight": torch.ones(2, 2), "mlp.gate.weight": torch.ones(2, 2)}
    stored |= {f"model.layers.2.{key}": value for key, value in more.items()}
    save_file(stored, tmp_path / "fp8/model.safetensors", metadata={"format": "pt"})
    change(tmp_path / "fp8", num_nextn_predict_layers=0)
    with pytest.raises(UserError, match=r"model\.layers\.2\..* 1 more: the decoder has no such"):
        from_hf(str(tmp_path / "fp8"))
    change(tmp_path / "fp8", num_nextn_predict_layers=1)
    lines: list[str] = []
    _, ours = from_hf(str(tmp_path / "fp8"), note=lines.append)
    assert [line for line in lines if "num_nextn_predict_layers" in line] == [
        "config.json: num_nextn_predict_layers 1: model.layers.2 predicts a later token, which is"
        " not supported; its 2 tensors are left out"
    ]
    _, expected = from_hf(str(tmp_path / "bf16"))
    assert all(torch.equal(ours[key], value) for key, value in expected.items())


def test_a_block_larger_than_a_matrix_takes_no_memory_of_its_size() -> None:
    low = torch.ones(3, 5).to(torch.float8_e4m3fn)
    found = dequantize(low, torch.full((1, 1), 0.5), (2**40, 2**40))
    assert torch.equal(found, torch.full((3, 5), 0.5, dtype=torch.bfloat16))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    write_both(tmp_path, "qwen", (8, 16))
    file, name = tmp_path / "fp8/model.safetensors", "model.layers.0.mlp.up_proj.weight"
    stored = load_file(file)

    def refused(match: str, tensors: dict[str, Tensor | None]) -> None:
        changed = {k: v for k, v in {**stored, **tensors}.items() if v is not None}
        save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(UserError, match=match) as caught:
            from_hf(str(file.parent))
        assert len(caught.value.problems) == 1

    scale = stored[f"{name}_scale_inv"]
    refused(rf"^{name}: is .*, and its factors .* are missing", {f"{name}_scale_inv": None})
    refused(rf"^{name}_scale_inv: is .*, but a weight", {f"{name}_scale_inv": scale[:-1].clone()})
    refused(rf"^{name}: is torch.int8 with", {name: stored[name].view(torch.int8)})
    for value in (torch.nan, 3e38):
        lost = torch.full_like(scale, value)
        refused(rf"^{name}: has values that are not finite", {f"{name}_scale_inv": lost})
    code = torch.full_like(stored[name].view(torch.uint8), 0x7F).view(torch.float8_e4m3fn)
    refused(rf"^{name}: has values that are not finite", {name: code})
    vector, norm = stored[name][0].clone(), "model.norm.weight"
    one = {norm: vector, f"{norm}_scale_inv": torch.ones(())}
    refused(rf"^{norm}_scale_inv: is \(\), but a weight", one)
    for block, match in {"128": "is not two sizes", None: "one factor"}.items():
        change(file.parent, quantization_config=FP8 | {"weight_block_size": block})
        refused(match, {})
    change(file.parent, quantization_config=None)
    write_tokenizer(file.parent)
    with pytest.raises(UserError, match=r": is torch.float8_e4m3fn, but config.json: quant"):
        open_hugging_face(str(file.parent)).load(device=torch.device("cpu"), precision="fp32")
    refused(r": is torch.float8_e4m3fn, but config.json: quantization_config.quant_method", {})
    change(file.parent, quantization_config=FP8 | {"quant_method": "awq"})
    refused(r"quant_method: .?awq.?; only mxfp4 and fp8 are read", {})
