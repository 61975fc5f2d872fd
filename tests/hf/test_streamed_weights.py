"""Weights stream from files: memory is that of a tensor, shards get their rows, files are safe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmfoundry.errors import UserError
from llmfoundry.hf.read_folder import from_hf, open_hf, open_weights
from tests.hf.random_models import written

FILE = "model.safetensors"


def shard(folder: Path, state: dict[str, Tensor], count: int) -> list[str]:
    """The folder's weights in several files with an index, as transformers writes them."""
    names = sorted(state)
    index: dict[str, str] = {}
    files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for i, file in enumerate(files):
        part = {name: state[name] for name in names[i::count]}
        save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / FILE).unlink()
    (folder / f"{FILE}.index.json").write_text(json.dumps({"weight_map": index}))
    return files


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM"])
def test_shards_and_files_of_torch_save_give_what_one_file_gives(name: str, tmp_path: Path) -> None:
    folder, _ = written(name, tmp_path)
    state = {k: v.clone() for k, v in load_file(folder / FILE).items()}
    expected = {k: v.clone() for k, v in from_hf(str(folder))[1].items()}
    files = shard(folder, state, 3)
    sharded = from_hf(str(folder))[1]
    assert all(torch.equal(sharded[k], v) for k, v in expected.items()), "shards"
    for file in (*files, f"{FILE}.index.json"):
        (folder / file).unlink()
    torch.save(state, folder / "pytorch_model.bin")
    pickled = from_hf(str(folder))[1]
    assert all(torch.equal(pickled[k], v) for k, v in expected.items()), "torch.save"
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    old = from_hf(str(folder))[1]
    assert all(torch.equal(old[k], v) for k, v in expected.items()), "before PyTorch 1.6"


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    folder, _ = written("LlamaForCausalLM", tmp_path)
    state = {k: v.clone() for k, v in load_file(folder / FILE).items()}
    _, second, third = shard(folder, state, 3)
    whole = (folder / third).read_bytes()
    (folder / third).write_bytes(whole[:-8])
    with pytest.raises(UserError, match=f"{third}: cannot be read"):
        from_hf(str(folder))
    (folder / third).write_bytes(whole)
    (folder / second).unlink()
    with pytest.raises(UserError, match=f"{second}: is missing, but .*index.json names it"):
        from_hf(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: is not JSON"):
        from_hf(str(folder))


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def test_a_pickle_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = written("LlamaForCausalLM", tmp_path)
    monkeypatch.chdir(tmp_path)
    (folder / FILE).unlink()
    for new in (True, False):
        torch.save({"a": Bomb()}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=new)
        with pytest.raises(UserError, match=r"pytorch_model\.bin: holds more than tensors"):
            from_hf(str(folder))
    torch.save([torch.ones(2)], folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="is not a list of tensors"):
        from_hf(str(folder))
    assert not (tmp_path / "ran").exists()


def test_nothing_is_read_before_all_shapes_are_known_to_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last matrix has another shape: no matrix is read before that is said."""
    folder, _ = written("LlamaForCausalLM", tmp_path)
    state = {k: v.clone() for k, v in load_file(folder / FILE).items()}
    last = "model.layers.1.mlp.down_proj.weight"
    save_file(state | {last: torch.zeros(3, 3)}, folder / FILE)
    read: list[str] = []
    with open_weights(folder) as weights:
        original = type(weights).get

    def get(self: Any, name: str) -> Tensor:
        read.append(name)
        return original(self, name)

    monkeypatch.setattr("llmfoundry.hf.read_folder.WeightFiles.get", get)
    with pytest.raises(UserError, match="down_proj"), open_hf(folder):
        pass
    assert all(state[name].ndim == 1 or "embed" in name or "lm_head" in name for name in read)


MEASURE = """
import json, sys, torch
from pathlib import Path
from llmfoundry.builders.pretrained import fill_model
from llmfoundry.hf.read_folder import open_hf
from llmfoundry.models.decoder import Decoder

def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) << 10

with open_hf(Path(sys.argv[1])) as opened:
    with torch.device("meta"):
        model = Decoder(opened.config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    for p in model.parameters():
        p.data.zero_()  # its memory is there before anything is read
    before = peak()
    fill_model(model, opened.state())
    print(json.dumps([before, peak(), sum(p.numel() * 2 for p in model.parameters())]))
"""


def peak_of_loading(folder: Path) -> tuple[int, int]:
    """Bytes that reading took above the model's own memory, and the model's, in a new process."""
    code = [sys.executable, "-c", MEASURE, str(folder)]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    before, after, model = json.loads(done.stdout.splitlines()[-1])
    return after - before, model


def write_llama(folder: Path, *, width: int, layers: int, vocabulary: int) -> int:
    """A Llama of random bf16 numbers in several files; bytes of its largest tensor."""
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary},
        **{"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers},
        **{"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": True},
        **{"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    index: dict[str, str] = {}

    def save(file: str, **shapes: tuple[int, ...]) -> None:
        part = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
        save_file(part, folder / file)
        index.update(dict.fromkeys(part, file))

    save(
        "model-0.safetensors",
        **{"model.embed_tokens.weight": (vocabulary, width), "model.norm.weight": (width,)},
    )
    for i in range(layers):
        at, square, tall = f"model.layers.{i}.", (width, width), (4 * width, width)
        shapes = {f"{at}self_attn.{part}_proj.weight": square for part in "qkvo"}
        shapes |= {f"{at}mlp.{part}_proj.weight": tall for part in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (width, 4 * width)}
        shapes |= {f"{at}{norm}_layernorm.weight": (width,) for norm in NORMS}
        save(f"model-{i + 1}.safetensors", **shapes)
    (folder / f"{FILE}.index.json").write_text(json.dumps({"weight_map": index}))
    return 2 * width * max(vocabulary, 4 * width)


NORMS = ("input", "post_attention")


@pytest.mark.slow
def test_loading_takes_the_memory_of_one_tensor(tmp_path: Path) -> None:
    """1.2 GB of bf16 weights: beside the model itself less than a quarter of a file's budget."""
    largest = write_llama(tmp_path / "big", width=2048, layers=10, vocabulary=32000)
    above, model = peak_of_loading(tmp_path / "big")
    print(f"model {model / 1e9:.2f} GB, largest tensor {largest / 1e6:.0f} MB, above it {above}")
    assert model > 1.1e9
    assert above < largest + (1 << 28) + (64 << 20)  # REOPEN_BYTES, and what Python takes
