"""callbacks.generate: samples against a loop that computes every token anew."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from llmfoundry.builders.callbacks import build_samples, draw_seed
from llmfoundry.data.held_out import Chain
from llmfoundry.data.supervised.packed_examples import HeldOutPrompt, SupervisedHeldOut
from llmfoundry.errors import UserError
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.recipe.logger import GenerateConfig
from tests.models.test_decoder import make_config, make_model
from tests.shards import bytes_tokenizer

TOKENIZER = bytes_tokenizer()
ROPE = {"attn_config": {"rope": True}, "max_seq_len": 64}


class Prompts(SupervisedHeldOut):
    """Held-out examples of which only the prompts are asked."""

    def __init__(self, *pairs: tuple[str, str]) -> None:
        self._pairs = pairs

    def prompts(self, n: int) -> list[HeldOutPrompt]:
        encode = TOKENIZER.encode
        return [
            HeldOutPrompt(np.array(encode(prompt)), np.array([*encode(answer), TOKENIZER.eos_id]))
            for prompt, answer in self._pairs[:n]
        ]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return make_model(make_config(vocab_size=TOKENIZER.vocab_size, **ROPE)).eval()


def job(model: Decoder, held_out: Any = None, **config: Any) -> Any:
    generate = GenerateConfig(max_new_tokens=6, **config)
    generate.fill()
    callbacks = SimpleNamespace(generate=generate)
    return SimpleNamespace(
        recipe=SimpleNamespace(callbacks=callbacks, seed=17, max_seq_len=64),
        microbatch=2,
        tokenizer=TOKENIZER,
        root=Root(model),
        world=SimpleNamespace(device=torch.device("cpu")),
        autocast=nullcontext,
        prepared=SimpleNamespace(validation=held_out),
    )


@torch.no_grad()
def likeliest(model: Decoder, ids: list[int], n: int = 6) -> list[int]:
    """What follows `ids`, each token by a forward pass over all before it."""
    written: list[int] = []
    for _ in range(n):
        logits = model.head(model(torch.tensor([[*ids, *written]])))[0, -1]
        token = int(logits[: TOKENIZER.vocab_size].argmax())
        if token == TOKENIZER.eos_id:
            break
        written.append(token)
    return written


def test_prompts_are_continued_by_the_likeliest_tokens(model: Decoder) -> None:
    prompts = ["line 1 of", "", "é"]
    found = build_samples(job(model, prompts=prompts, temperature=0))(3)
    for (prompt, text), given in zip(found, prompts, strict=True):
        assert prompt == given
        expected = likeliest(model, [TOKENIZER.eos_id, *given.encode()])
        assert text == bytes(expected).decode(errors="replace")


def test_validation_prompts_are_answered_beside_what_was_expected(model: Decoder) -> None:
    held_out = Prompts(("two and two? ", "four"), ("and three? ", "seven \n"), ("more? ", "no"))
    chained = Chain([held_out])
    asked = build_samples(job(model, chained, from_validation=2, temperature=0))(1)
    assert [(prompt, expected) for prompt, _, expected in asked] == [
        ("two and two? ", "four"),
        ("and three? ", "seven"),
    ]
    for prompt, text, _ in asked:
        assert text == bytes(likeliest(model, [*prompt.encode()])).decode(errors="replace")


def test_without_supervised_rows_there_is_nothing_to_answer(model: Decoder) -> None:
    with pytest.raises(
        UserError, match=r"callbacks.generate.from_validation: 2, but no supervised"
    ):
        build_samples(job(model, Chain([]), from_validation=2))


def test_draws_are_the_same_after_a_resume_and_differ_by_batch_and_place(model: Decoder) -> None:
    drawing = {"prompts": ["a", "a", "a"], "temperature": 1.5, "top_p": 1.0}
    first = build_samples(job(model, **drawing))
    again = build_samples(job(model, **drawing))
    assert first(5) == again(5)
    assert len({text for batch in (1, 2) for _, text in first(batch)}) == 6
    seeds = {draw_seed(s, b, p) for s in (0, 1, 11) for b in (0, 1, 11, 111) for p in range(12)}
    assert len(seeds) == 3 * 4 * 12  # such as 1/11/1 and 11/1/1
    assert all(0 <= seed < 2**63 for seed in seeds)  # what torch's generators take
