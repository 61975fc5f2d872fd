"""MXFP4 weights next to transformers' conversion, and a gpt-oss folder that has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from llmfoundry.errors import UserError
from llmfoundry.hf.mxfp4 import dequantize
from llmfoundry.hf.read_folder import from_hf
from tests.hf.random_models import ROWS, logits
from tests.hf.test_hf_import import GPT_OSS, make, read

WIDE = GPT_OSS | {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 3}


def packed(shape: tuple[int, ...], seed: int = 3) -> tuple[Tensor, Tensor]:
    """Random blocks (E, out, G, 16) of all bytes, and scales (E, out, G) around one."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 124, shape, generator=generator, dtype=torch.uint8)
    return blocks, scales


def test_values_are_those_of_transformers_bit_for_bit() -> None:
    blocks, scales = packed((2, 70, 40))
    scales[0, 0, :4] = torch.tensor([0, 1, 250, 254], dtype=torch.uint8)  # the smallest and largest
    theirs = convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(dequantize(blocks, scales), theirs)


def write_packed(folder: Path) -> dict[str, Tensor]:
    """Write a gpt-oss folder with MXFP4 experts; return the tensors of the same model in bf16."""
    make("GptOss", WIDE).bfloat16().save_pretrained(folder)
    file = folder / "model.safetensors"
    whole = load_file(file)
    stored = dict(whole)
    for name in [name for name in whole if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, rows = stored.pop(name).shape
        blocks, scales = packed((experts, rows, width // 32), seed=len(name) + rows)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        whole[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return whole


def test_a_folder_with_packed_experts_is_the_model_in_bf16(tmp_path: Path) -> None:
    whole = write_packed(tmp_path)
    ours = read(tmp_path)
    theirs = make("GptOss", WIDE)
    theirs.load_state_dict(whole)
    tokens = torch.randint(0, ROWS, (2, 24))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(logits(ours.float(), tokens), expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.05


def test_blocks_and_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_packed(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.down_proj"
    stored = load_file(file)
    lost = torch.full_like(stored[f"{name}_scales"], 255)  # NaN
    save_file(stored | {f"{name}_scales": lost}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"^{name}: has values that are not finite"):
        from_hf(str(tmp_path))
    stored[f"{name}_scales"] = stored[f"{name}_scales"][:, :-1].contiguous()
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"^{name}_blocks: is \(3, 64, 1, 16\), with scales"):
        from_hf(str(tmp_path))
    del stored[f"{name}_scales"]
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"^{name}: the tensor is missing"):
        from_hf(str(tmp_path))
