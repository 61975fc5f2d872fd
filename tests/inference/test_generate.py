"""Tokens that `stream_tokens` draws, against transformers and formulas; text that streams."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from llmfoundry.errors import UserError
from llmfoundry.inference.decoder_slots import DecoderSlots, stream_tokens
from llmfoundry.inference.engine import SlotEngine, stream
from llmfoundry.inference.requests import Sampling, SequenceRequest, draw_probabilities
from llmfoundry.inference.text import stream_text
from llmfoundry.models.decoder import Decoder, Root
from tests.hf.random_models import (
    ALIBI,
    CARD,
    EOS,
    HEADS,
    LENGTH,
    ROPE,
    ROWS,
    decoder,
    settings,
    to_hf,
    write_tokenizer,
)

CPU = torch.device("cpu")
NEVER = -1  # an end-of-text that no draw can be
PROMPT = [EOS, 3, 4, 5]
KINDS: dict[str, dict[str, Any]] = {"learned": {}, "alibi": ALIBI, "rope": ROPE}
KV_HEADS = (HEADS, 2, 1)


def continued(
    model: Decoder,
    prompt: Sequence[int] = PROMPT,
    *,
    kv_cache: bool = True,
    eos: int = NEVER,
    max_new_tokens: int = 20,
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
    n_tokens: int | None = None,
    **how: Any,
) -> list[int]:
    """What the engine draws, or without a cache `stream_tokens`."""
    sampling = Sampling(**({"seed": 1} | how))
    request = SequenceRequest(tuple(prompt), max_new_tokens, sampling, frozenset({eos}))
    root, given = Root(model), {"device": CPU, "autocast": autocast, "n_tokens": n_tokens}
    if not kv_cache:
        return list(stream_tokens(root, request, **given))
    length = len(prompt) + max_new_tokens
    return list(stream(SlotEngine(DecoderSlots(root, slots=1, length=length, **given)), request))


def make(kind: str, kv_heads: int = HEADS, **top: Any) -> Decoder:
    return decoder(settings(attn={**KINDS[kind], "kv_n_heads": kv_heads}, **top))


@pytest.mark.parametrize("kv_heads", KV_HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_changes_no_token(kind: str, kv_heads: int) -> None:
    model = make(kind, kv_heads, tie_word_embeddings=False)
    for options in ({}, {"temperature": 1.0}):
        cached = continued(model, **options)
        assert len(cached) == 20 and len(set(cached)) > 2
        assert cached == continued(model, kv_cache=False, **options)


TRANSFORMERS: list[tuple[str, dict[str, Any]]] = [
    ("MptForCausalLM", {"attn": ALIBI, "no_bias": True}),
    ("GPT2LMHeadModel", {}),
    ("GPTBigCodeForCausalLM", {"attn": {"kv_n_heads": 1}}),
    ("Starcoder2ForCausalLM", {"attn": ROPE | {"kv_n_heads": 2}}),
    (
        "LlamaForCausalLM",
        {"attn": ROPE | {"kv_n_heads": 2}, "norm_type": "rmsnorm", "ffn": {"ffn_type": "mptglu"}},
    ),
]


@pytest.mark.parametrize(("name", "case"), TRANSFORMERS)
def test_greedy_tokens_are_those_of_transformers(
    name: str, case: dict[str, Any], tmp_path: Path
) -> None:
    model = decoder(settings(tie_word_embeddings=False, **case))
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    assert to_hf(model, tokenizer, tmp_path / "out", dtype="fp32", card=CARD) == name
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs.generation_config.eos_token_id = None
    prompt = torch.tensor([PROMPT])
    mask = torch.ones_like(prompt)
    row = theirs.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=20)
    expected = row[0, len(PROMPT) :].tolist()
    assert len(expected) == 20 and len(set(expected)) > 2
    assert continued(model) == expected


def test_top_k_of_one_is_greedy() -> None:
    model = make("rope", tie_word_embeddings=False)
    assert continued(model, temperature=2.0, top_k=1) == continued(model)


def test_a_seed_gives_the_same_draws_and_another_seed_others() -> None:
    model = make("alibi")
    once, twice = (continued(model, temperature=1.0, seed=8) for _ in range(2))
    assert once == twice
    assert once != continued(model, temperature=1.0, seed=9)


def test_draws_touch_no_other_random_state() -> None:
    model = make("rope")
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    continued(model, temperature=1.0)
    assert torch.equal(torch.rand(1), expected)


def test_generation_ends_before_end_of_text() -> None:
    model = make("rope", tie_word_embeddings=False)
    whole = continued(model)
    at = next(i for i, token in enumerate(whole) if i > 3 and token not in whole[:i])
    assert continued(model, eos=whole[at]) == whole[:at]


def formula(
    logits: Sequence[float], temperature: float, top_k: int | None, top_p: float | None
) -> list[float]:
    """The distribution in plain float64, token by token in the order of likelihood."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    order = order[: top_k or len(order)]
    weights = {i: math.exp((logits[i] - max(logits)) / temperature) for i in order}
    total = sum(weights.values())
    kept, reached = [], 0.0
    for i in order:
        kept.append(i)
        reached += weights[i] / total
        if top_p is not None and reached >= top_p:
            break
    norm = sum(weights[i] for i in kept)
    return [weights[i] / norm if i in kept else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [None, 0.01, 0.6, 0.95, 1.0])
def test_probabilities_follow_the_formula(
    temperature: float, top_k: int | None, top_p: float | None
) -> None:
    logits = 3 * torch.randn(50, generator=torch.Generator().manual_seed(2))
    found = draw_probabilities(logits, temperature, top_k, top_p)
    expected = formula(logits.tolist(), temperature, top_k, top_p)
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), atol=1e-12)


def test_draws_are_as_frequent_as_their_probabilities() -> None:
    """Chi-square of 3000 first tokens against the model's own softmax."""
    model = make("rope")
    with torch.no_grad():
        logits = model.head(model(torch.tensor([PROMPT])))[0, -1]
    expected = 3000 * torch.tensor(formula(logits.tolist(), 1.5, 6, None))
    counts = torch.zeros(ROWS)
    for seed in range(3000):
        counts[_first(logits, seed)] += 1
    assert counts[expected == 0].sum() == 0
    likely = expected > 0
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi_square < 20.5, "a chance of 1 in 1000 with five degrees of freedom"
    for seed in range(5):  # the same draws as through the model
        options: dict[str, Any] = {"temperature": 1.5, "top_k": 6, "seed": seed}
        assert continued(model, max_new_tokens=1, **options) == [_first(logits, seed)]


def _first(logits: torch.Tensor, seed: int) -> int:
    generator = torch.Generator().manual_seed(seed)
    return int(torch.multinomial(draw_probabilities(logits, 1.5, 6, None), 1, generator=generator))


def test_padded_rows_of_the_embedding_are_never_drawn() -> None:
    model = make("rope")
    hot = continued(model, temperature=50.0, max_new_tokens=200)
    assert max(hot) > EOS, "without the limit they are"
    assert max(continued(model, temperature=50.0, max_new_tokens=200, n_tokens=EOS + 1)) <= EOS


@pytest.mark.parametrize("kind", ["alibi", "rope"])
def test_relative_positions_continue_beyond_max_seq_len(kind: str) -> None:
    model = make(kind, tie_word_embeddings=False)
    tokens = continued(model, max_new_tokens=2 * LENGTH)
    assert len(tokens) == 2 * LENGTH
    assert tokens == continued(model, max_new_tokens=2 * LENGTH, kv_cache=False)


def test_learned_positions_end_where_they_end() -> None:
    model = make("learned")
    most = LENGTH - len(PROMPT) + 1
    for kv_cache in (True, False):
        assert len(continued(model, max_new_tokens=most, kv_cache=kv_cache)) == most
    refusal = f"^max_new_tokens: {most + 1} .*at {LENGTH} tokens.* at most {most}$"
    with pytest.raises(UserError, match=refusal):
        continued(model, max_new_tokens=most + 1, kv_cache=False)
    with pytest.raises(UserError, match=f"^prompt: has {LENGTH + 1} tokens.* at most {LENGTH}$"):
        continued(model, [1] * (LENGTH + 1), kv_cache=False)


def test_an_empty_prompt_is_refused() -> None:
    for kv_cache in (True, False):
        with pytest.raises(UserError, match=r"^prompt: is empty"):
            continued(make("rope"), [], kv_cache=kv_cache)


def test_under_autocast_the_cache_changes_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 roundings differ, so logits are compared along one row, not the row itself."""
    model, seen = make("rope", kv_heads=2, tie_word_embeddings=False), []
    row = [EOS, *range(20)]

    def recorded(logits: torch.Tensor, *_: Any) -> int:
        seen.append(logits)
        return row[len(seen) % 20]

    monkeypatch.setattr("llmfoundry.inference.requests.sample_token", recorded)
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    for kv_cache in (True, False):
        continued(model, row[:1], autocast=autocast, kv_cache=kv_cache, temperature=1.0)
    cached, anew = torch.stack(seen[:20]), torch.stack(seen[20:])
    assert cached.dtype == torch.float32
    assert (cached - anew).abs().max() < 0.05 * anew.std()


@pytest.mark.parametrize("kv_cache", [True, False])
def test_gradients_stay_on_for_whoever_reads_the_stream(kv_cache: bool) -> None:
    root, request = Root(make("rope")), SequenceRequest(tuple(PROMPT), 3)
    rows = DecoderSlots(root, slots=1, length=9, n_tokens=None, device=CPU, autocast=nullcontext)
    cached = stream(SlotEngine(rows), request)
    for _ in cached if kv_cache else stream_tokens(root, request, device=CPU, autocast=nullcontext):
        assert torch.is_grad_enabled()


def test_a_stream_that_is_left_frees_its_slot() -> None:
    rows = DecoderSlots(
        Root(make("rope")), slots=1, length=30, n_tokens=None, device=CPU, autocast=nullcontext
    )
    engine = SlotEngine(rows)
    tokens = stream(engine, SequenceRequest(tuple(PROMPT), 20))
    next(tokens)
    assert engine.running == 1
    tokens.close()  # type: ignore[attr-defined]
    assert not engine.busy


def byte_tokenizer() -> Tokenizer:
    """One token a byte, as byte-level tokenizers fall back to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TEXTS = ["plain words", "naïve — 日本語 🦜🦜 e\u0301", " leading", "a\ufffdb\ufffd", "\ufffd", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_are_whole_characters_and_make_the_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    pieces = list(stream_text(tokenizer.encode(text).ids, tokenizer.decode))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert pieces == list(text), "each character as soon as its last byte is there"


def test_bytes_that_are_no_character_are_shown_once_they_are_certain() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("é日x").ids
    broken = [ids[0], *ids[2:4], ids[5]]  # half of é, two thirds of 日, x
    pieces = list(stream_text(broken, tokenizer.decode))
    assert "".join(pieces) == tokenizer.decode(broken)
    assert list(stream_text(ids[:1], tokenizer.decode)) == ["\ufffd"]


def test_spaces_between_words_survive_a_decoder_that_drops_the_first() -> None:
    tokenizer = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "▁three": 2}, unk_token="▁one"))
    tokenizer.decoder = decoders.Metaspace()
    assert tokenizer.decode([1]) == "two"
    assert list(stream_text([0, 1, 2], tokenizer.decode)) == ["one", " two", " three"]
    assert list(stream_text([1, 2], tokenizer.decode, prompt=[0])) == [" two", " three"]


@pytest.mark.parametrize("temperature", [1e-320, 1e-30])
def test_a_temperature_near_0_takes_the_likeliest(temperature: float) -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -1e4])
    assert draw_probabilities(logits, temperature, None, None).tolist() == [0, 1, 0, 0]
