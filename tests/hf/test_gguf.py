"""GGUF files: what the `gguf` package and transformers read of them; what is refused.

llama.cpp itself is asked in `test_llama_cpp.py`.
"""

from __future__ import annotations

import math
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmfoundry.api.conversion import convert
from llmfoundry.data.text.bpe import END_OF_TEXT
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.hf.gguf.tokenizer import read_vocabulary, unnamed_ends
from llmfoundry.hf.gguf.write import GGUFModel, to_gguf
from llmfoundry.models.adapter import MergedState
from llmfoundry.models.decoder import Decoder
from llmfoundry.recipe.after_training import ConvertRecipe
from tests.hf.gguf_models import (
    GGUF_CASES,
    ROWS,
    SHAPE,
    TEXTS,
    byte_level,
    save,
    tokenizers,
    trained,
    write_file,
)
from tests.hf.random_models import (
    ALIBI,
    CARD,
    GLU,
    LLAMA,
    MLP,
    ROPE,
    WINDOW,
    YARN,
    decoder,
    logits,
    settings,
    to_hf,
    write_tokenizer,
)


def model_of(case: str) -> Decoder:
    return decoder(settings(**{**SHAPE, **GGUF_CASES[case][1]}))


def numbers(file: Path) -> dict[str, np.ndarray]:
    """The tensors of a file in fp32, by name."""
    return {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(file).tensors}


@pytest.mark.parametrize("case", ["llama", "qwen2"])
def test_transformers_reads_the_same_model_and_tokenizer(case: str, tmp_path: Path) -> None:
    model, tokenizer = model_of(case), trained()
    write_file(model, tokenizer, tmp_path / "model.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").eval()
    row = torch.tensor([tokenizer.encode_prompt(TEXTS[0])])
    with torch.no_grad():
        assert (theirs(row).logits - logits(model, row)).abs().max() < 2e-5
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert read.encode(TEXTS[0], add_special_tokens=False) == tokenizer.encode(TEXTS[0])


def test_rows_of_queries_and_keys_hold_rotary_pairs_side_by_side(tmp_path: Path) -> None:
    model = model_of("llama")
    write_file(model, trained(), tmp_path / "model.gguf")
    q = model.state_dict()["blocks.1.attn.Wqkv.weight"][:64].numpy()
    pairs = q.reshape(4, 2, 8, 64).swapaxes(1, 2).reshape(64, 64)  # as llama.cpp's converter does
    assert np.array_equal(numbers(tmp_path / "model.gguf")["blk.1.attn_q.weight"], pairs)


@pytest.mark.parametrize("case", ["dbrx", "mixtral", "qwen3-moe"])
def test_experts_are_stacked(case: str, tmp_path: Path) -> None:
    model = model_of(case)
    write_file(model, trained(), tmp_path / "model.gguf", architecture=GGUF_CASES[case][0])
    ours, read = model.state_dict(), numbers(tmp_path / "model.gguf")
    at = "blocks.2.ffn.experts."
    gate, up, down = (ours[at + name].numpy().reshape(5, 64, 64) for name in ("w1", "v1", "w2"))
    assert np.array_equal(read["blk.2.ffn_gate_exps.weight"], gate)
    assert np.array_equal(read["blk.2.ffn_up_exps.weight"], up)
    assert np.array_equal(read["blk.2.ffn_down_exps.weight"], down.swapaxes(1, 2))


def test_yarn_is_in_the_settings_that_llama_cpp_multiplies(tmp_path: Path) -> None:
    """It multiplies cosine and sine by 0.1 ln(factor) + 1, times attn_factor."""
    for case in ("llama-yarn", "qwen2-yarn"):
        file = tmp_path / f"{case}.gguf"
        write_file(model_of(case), trained(), file, architecture=GGUF_CASES[case][0])
        fields = GGUFReader(file).fields
        scaling = {
            name.partition(".rope.scaling.")[2]: field.contents()
            for name, field in fields.items()
            if ".rope.scaling." in name
        }
        ratio = {  # of DeepSeek's mscale, or what is set
            "llama-yarn": (0.07 * math.log(8) + 1) / (0.13 * math.log(8) + 1),
            "qwen2-yarn": 1.6,
        }[case]
        attn_factor = pytest.approx(ratio / (0.1 * math.log(8) + 1), rel=1e-6)
        assert scaling == {
            "type": "yarn",
            "factor": 8.0,
            "original_context_length": 100,
            "attn_factor": attn_factor,
        }


@pytest.mark.parametrize("case", GGUF_CASES)
def test_every_number_of_the_model_is_in_the_file(case: str, tmp_path: Path) -> None:
    model = model_of(case)
    write_file(model, trained(), tmp_path / "model.gguf", architecture=GGUF_CASES[case][0])
    read = [np.sort(values.ravel()) for values in numbers(tmp_path / "model.gguf").values()]
    kept = np.sort(np.concatenate(read))
    parameters = dict(model.named_parameters())  # balancing biases are computed of two buffers
    ours = torch.cat([value.detach().flatten() for value in parameters.values()]).numpy()
    extra = len(kept) - len(ours)
    assert np.isin(ours, kept).all()
    # zeros for biases that llama.cpp asks for, a copy of the embedding, frequencies' divisors
    assert 0 <= extra <= ROWS * 64 or case == "starcoder2"


def test_numbers_are_rounded_as_the_format_says(tmp_path: Path) -> None:
    model = model_of("llama")
    ours = model.state_dict()["wte.weight"]
    read = {}
    for dtype in ("fp16", "bf16", "q8_0"):
        write_file(model, trained(), tmp_path / f"{dtype}.gguf", dtype=dtype)
        read[dtype] = torch.tensor(numbers(tmp_path / f"{dtype}.gguf")["token_embd.weight"])
    assert torch.equal(read["fp16"], ours.half().float())
    assert torch.equal(read["bf16"], ours.bfloat16().float())
    steps = ours.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
    error = (read["q8_0"] - ours).abs().unflatten(1, (-1, 32))
    assert (error <= 0.57 * steps).all()  # 0.5, and a scale's own rounding to fp16
    assert (error > 0).any()


def test_each_tensor_is_read_once_its_turn_has_come(tmp_path: Path) -> None:
    model, tokenizer = model_of("dbrx"), trained()
    state = MergedState(model)
    given: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def read(name: str) -> torch.Tensor:
        alive.append(sum(ref() is not None for ref in given))
        copy = state[name].detach().clone()
        given.append(weakref.ref(copy))
        return copy

    parts = GGUFModel("small", model.config, state.shapes(), read, tokenizer, True, [0])
    to_gguf(parts, tmp_path / "model.gguf", dtype="fp32")
    assert max(alive) <= 1
    assert len(alive) <= len(state) + 2  # the tied embedding is written twice


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    model = model_of("llama")
    with torch.no_grad():
        model.blocks[2].attn.out_proj.weight[3, 4] = 1e6
    with pytest.raises(UserError, match=r"^blk\.2\.attn_output\.weight: .*dtype=bf16"):
        write_file(model, trained(), tmp_path / "model.gguf", dtype="fp16")
    with torch.no_grad():
        model.blocks[2].attn.out_proj.weight[3, 4] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        write_file(model, trained(), tmp_path / "model.gguf")
    assert not [*tmp_path.iterdir()]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "there.gguf").touch()
    write_file(model_of("llama"), trained(), tmp_path / "done.gguf")
    for place, line in {
        "file/model.gguf": "is not a folder",
        "there.gguf": "exists, a file of 0.0 MB; write another name",
        "done.gguf": r"exists, a complete GGUF file of 0\.\d MB; write another name",
        "model.bin": r"must end in \.gguf",
    }.items():
        with pytest.raises(UserError, match=f"^output: .*{line}"):
            write_file(model_of("llama"), trained(), tmp_path / place)


@pytest.mark.parametrize("written", [17, {"a": "b"}, "{{ '\ud83d' }}"], ids=str)
def test_a_chat_template_that_is_none_is_one_line(written: Any, tmp_path: Path) -> None:
    backend = Backend.from_str(trained()._backend.to_str())
    tokenizer = Tokenizer(backend, END_OF_TEXT, {"chat_template": written})
    with pytest.raises(UserError, match=r"^tokenizer\.chat_template: "):
        write_file(model_of("llama"), tokenizer, tmp_path / "model.gguf")


def test_ends_of_a_text_that_a_file_cannot_name_are_reported() -> None:
    tokenizer = trained()
    assert unnamed_ends(tokenizer, [3, 4, 5]) == []
    (line,) = unnamed_ends(tokenizer, [3, 4, 5, 6, 7])
    assert all(repr(tokenizer.decode([left])) in line for left in (6, 7))


def test_a_folder_of_hugging_face_gives_the_same_tensors(tmp_path: Path) -> None:
    model, tokenizer = model_of("mixtral"), trained()
    write_file(model, tokenizer, tmp_path / "one.gguf")
    folder = save(tokenizer, tmp_path / "tokenizer")
    to_hf(model, folder, tmp_path / "hf", dtype="fp32", card=CARD)
    recipe = ConvertRecipe(
        from_="hf", checkpoint=str(tmp_path / "hf"), to="gguf", output=str(tmp_path / "two.gguf")
    )
    assert not [*recipe.check()]
    convert(recipe)
    one, two = numbers(tmp_path / "one.gguf"), numbers(tmp_path / "two.gguf")
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("name", tokenizers())
def test_a_known_tokenizer_has_llama_cpps_name(name: str) -> None:
    found = read_vocabulary(tokenizers()[name], ROWS)
    assert found.pre == name.split(",")[0]
    assert len(found.tokens) == len(set(found.tokens)) == ROWS


def words(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
UNKNOWN = {
    r"a pre-tokenizer that splits by \w+|\W": lambda: byte_level(words(r"\w+|\W"), BYTES),
    "ByteLevel with add_prefix_space": lambda: byte_level(
        pre_tokenizers.ByteLevel(add_prefix_space=True)
    ),
    "without ByteLevel as its last": lambda: byte_level(pre_tokenizers.Whitespace()),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_an_unknown_pre_tokenizer_is_refused_by_name_with_what_to_do(what: str) -> None:
    with pytest.raises(UserError) as raised:
        read_vocabulary(UNKNOWN[what](), ROWS)
    (line,) = raised.value.problems
    assert line.startswith("tokenizer: llama.cpp does not know") and what in line
    assert "to=hf" in line and "tokenizer.name: train" in line


def test_other_models_and_normalizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a WordLevel model"):
        read_vocabulary(Tokenizer.load(write_tokenizer(tmp_path)), 128)
    backend = Backend.from_str(byte_level(pre_tokenizers.ByteLevel(False))._backend.to_str())
    backend.normalizer = normalizers.Lowercase()
    with pytest.raises(UserError, match="the normalizer Lowercase"):
        read_vocabulary(Tokenizer(backend, END_OF_TEXT), ROWS)
    pieces = Backend(models.Unigram([("<unk>", 0.0), (END_OF_TEXT, 0.0), ("a", -1.0)], unk_id=0))
    with pytest.raises(UserError, match="a Unigram model"):
        read_vocabulary(Tokenizer(pieces, END_OF_TEXT), ROWS)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("gpt-oss", {"block_overrides": None, "n_layers": 2}, "windows of one size in the layers"),
        ("gpt-oss", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("deepseek-v2-lite", {"n_layers": 3}, "q_lora_rank"),
    ],
)
def test_shapes_that_llama_cpp_takes_for_granted_are_required(
    case: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    name, values = GGUF_CASES[case]
    model = decoder(settings(**{**SHAPE, **values, **change}))
    with pytest.raises(UserError, match=message):
        write_file(model, trained(), tmp_path / "model.gguf", architecture=name)


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ({"attn": ROPE | WINDOW, "ffn": GLU, "norm_type": "rmsnorm"}, "sliding_window_size"),
        ({"attn": ALIBI | {"qk_ln": True}, "learned_pos_emb": False, "ffn": MLP}, "qk_ln"),
        (
            {
                **{"attn": ALIBI | {"softmax_scale": 0.1}, "learned_pos_emb": False},
                **{"ffn": {"ffn_type": "mptmlp", "ffn_act_fn": "gelu"}, "norm_type": "layernorm"},
                **{"no_bias": True, "attention_bias": False},
            },
            "softmax_scale",
        ),
        ({**LLAMA, "attn": YARN}, "rope_hf_config.beta_fast"),
        ({**LLAMA, "attn": YARN}, "rope_hf_config.beta_slow"),
        ({**LLAMA, "attn": YARN}, "rope_hf_config.truncate"),
        ({**LLAMA, "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({**LLAMA, "ffn": {**GLU, "ffn_act_fn": "relu"}}, "ffn_act_fn"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused_by_key(
    case: dict[str, Any], key: str, tmp_path: Path
) -> None:
    model = decoder(settings(**{**SHAPE, **case}))
    with pytest.raises(UserError) as raised:
        write_file(model, trained(), tmp_path / "model.gguf")
    assert "llama.cpp" in raised.value.problems[0]
    assert any(key in line for line in raised.value.problems[1:])
