"""Batched continuations against one prompt at a time, and against transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer as Backend
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from llmfoundry.data.preparation.build_tokenizer import build_tokenizer
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.fsdp import apply_ddp, materialize
from llmfoundry.distributed.mesh import build_mesh
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.gauntlet.models import own_decoder
from llmfoundry.gauntlet.models.own_decoder import OwnModel, RankGroup, generate_texts
from llmfoundry.gauntlet.questions import GenerationPrompt
from llmfoundry.inference.decoder_slots import DecoderSlots, stream_tokens
from llmfoundry.inference.engine import SlotEngine
from llmfoundry.inference.requests import SequenceRequest
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.recipe.data import DataConfig, TokenizerConfig
from llmfoundry.recipe.parallel import ParallelConfig
from tests.gauntlet.prompt_tokenizers import marking_tokenizer
from tests.hf import random_models
from tests.hf.random_models import to_hf
from tests.models.test_decoder import SETTINGS, make_config, make_model
from tests.selection import slow_but
from tests.warm_scripts import on_ranks

CPU = torch.device("cpu")


class Letters:
    """Token i is a character of its own; fewer tokens than the embedding has rows."""

    vocab_size = 60
    eos_id = 0
    end_ids = (0,)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(0x21 + i) for i in ids)


LETTERS: Any = Letters()


def model(name: str, **settings: Any) -> Root:
    """A model that does not write the same token again and again.

    The head's weights are not the embedding's, norms keep what they get, and blocks weigh more.
    """
    free = {"max_seq_len": 64, "tie_word_embeddings": False}
    decoder = make_model(make_config(**(free | SETTINGS[name] | settings)))
    with torch.no_grad():
        for parameter in decoder.blocks.parameters():
            parameter *= 2
        for part, parameter in decoder.named_parameters():
            if "norm" in part:
                parameter.fill_(1.0 if part.endswith("weight") else 0.0)
    return Root(decoder)


def one_by_one(
    root: Root, prompts: Sequence[GenerationPrompt], tokenizer: Any = LETTERS
) -> list[str]:
    """What stream_tokens draws after each prompt on its own, all of it, then cut by hand."""
    texts = []
    root.eval()
    for prompt in prompts:
        request = SequenceRequest(
            prompt.tokens, prompt.max_new_tokens, stop_ids=frozenset({tokenizer.eos_id})
        )
        tokens = stream_tokens(
            root, request, device=CPU, autocast=nullcontext, n_tokens=tokenizer.vocab_size
        )
        text = tokenizer.decode(list(tokens))
        for stop in prompt.stops:
            text = text.split(stop)[0]
        texts.append(text)
    return texts


def generated(
    root: nn.Module,
    prompts: Sequence[GenerationPrompt],
    *,
    tokenizer: Any = LETTERS,
    **options: Any,
) -> list[str]:
    defaults = {"seq_len": 64, "device": CPU, "batch_tokens": 150, "autocast": nullcontext}
    return OwnModel(root, tokenizer, **(defaults | options)).generate(prompts)


def random_prompt(generator: torch.Generator, length: int, new: int) -> GenerationPrompt:
    tokens = torch.randint(1, 60, (length,), generator=generator).tolist()
    return GenerationPrompt(tuple(tokens), "", (), new)


def mixed_prompts() -> list[GenerationPrompt]:
    """25 of 1 to 20 tokens, most of which begin alike, with 1 to 12 new ones."""
    generator = torch.Generator().manual_seed(6)
    beginning = random_prompt(generator, 10, 1).tokens
    prompts = []
    for i in range(25):
        prompt = random_prompt(generator, 1 + i * 7 % 20, 1 + i * 5 % 12)
        if i % 3:
            prompt = GenerationPrompt(beginning + prompt.tokens[:10], "", (), prompt.max_new_tokens)
        prompts.append(prompt)
    return prompts


def with_stops(prompts: Sequence[GenerationPrompt], texts: Sequence[str]) -> list[GenerationPrompt]:
    """Every other prompt stops before two characters that it would write."""
    changed = []
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        stops = ("never", text[3:5], "\x00") if i % 2 and len(text) > 5 else ()
        changed.append(GenerationPrompt(prompt.tokens, "", stops, prompt.max_new_tokens))
    return changed


KINDS = (
    *("learned", "alibi", "alibi-gqa-window", "rope-gqa-theta", "rope-llama3", "temperature"),
    *("qk-gn", "window", "softcap", "dmoe-dbrx", "overrides", "overrides-chain"),
)


@pytest.mark.parametrize(
    "name", slow_but(["alibi-gqa-window", "temperature", "dmoe-dbrx", "overrides-chain"], KINDS)
)
def test_texts_are_those_of_one_prompt_at_a_time(name: str) -> None:
    root = model(name)
    prompts = mixed_prompts()
    prompts = with_stops(prompts, one_by_one(root, prompts))
    expected = one_by_one(root, prompts)
    assert len(set("".join(expected))) > 5
    assert any(len(text) == 3 for text in expected), "a stop shows"
    assert generated(root, prompts) == expected


@pytest.mark.parametrize("batch_tokens", slow_but([60], [1, 60, 10_000]))
def test_batch_size_changes_no_text(batch_tokens: int) -> None:
    root = model("rope")
    prompts = with_stops(mixed_prompts(), one_by_one(root, mixed_prompts()))
    prompts.reverse()
    assert generated(root, prompts, batch_tokens=batch_tokens) == one_by_one(root, prompts)


def calls(root: Root, prompts: Sequence[GenerationPrompt], **options: Any) -> list[int]:
    """Tokens of each forward pass."""
    seen = []
    handle = root.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    generated(root, prompts, **options)
    handle.remove()
    return seen


def test_finished_rows_leave_the_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = [random_prompt(generator, 5, new) for new in (2, 9, 4, 9, 1)]
    assert [len(text) for text in one_by_one(model("rope"), prompts)] == [2, 9, 4, 9, 1]
    shapes = calls(model("rope"), prompts)
    assert shapes == [15, *[3] * 3, *[2] * 5, 10, 1]  # two that are short have shorter slots


def test_a_beginning_that_most_prompts_share_is_read_once() -> None:
    generator = torch.Generator().manual_seed(1)
    shots = random_prompt(generator, 30, 1).tokens
    ends = [random_prompt(generator, 6, 3) for _ in range(12)]
    alone = random_prompt(generator, 36, 3)  # a worked example's own question has other examples
    prompts = [*(GenerationPrompt(shots + end.tokens, "", (), 3) for end in ends), alone]
    read = 36 + 30 + 12 * 6  # and what any two of the ends begin with
    assert (
        read + 13 * 2 - 12
        <= sum(calls(model("rope"), prompts, batch_tokens=6 * 39))
        <= (read + 13 * 2)
    )
    assert generated(model("rope"), prompts) == one_by_one(model("rope"), prompts)


def test_equal_prompts_and_one_that_others_begin_with_have_tokens_left_to_read() -> None:
    shots = random_prompt(torch.Generator().manual_seed(1), 20, 4)
    longer = GenerationPrompt((*shots.tokens, 7, 8), "", (), 4)
    prompts = [shots] * 10 + [longer] * 3
    assert generated(model("rope"), prompts) == one_by_one(model("rope"), prompts)


@pytest.mark.parametrize("size", [1, 3])
def test_slots_hold_no_more_tokens_than_asked_for(size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = [random_prompt(generator, 5, 40 if i % 6 == 5 else 1) for i in range(40)]
    root, made = model("rope"), list[tuple[int, int]]()

    alive = WeakSet[SlotEngine]()

    def make_engine(slots: int, length: int) -> SlotEngine:
        assert not alive, "the last one's memory is free"
        made.append((slots, length))
        rows = DecoderSlots(
            root, slots=slots, length=length, n_tokens=60, device=CPU, autocast=nullcontext
        )
        alive.add(engine := SlotEngine(rows))
        return engine

    ranks = RankGroup(0, size)
    how: dict[str, Any] = {"tokenizer": LETTERS, "end_ids": {0}, "batch_tokens": 100}
    if size == 1:
        generate_texts(prompts, make_engine, ranks=ranks, **how)
        assert made == [(2, 45), (16, 6)]
    classes = list(own_decoder._classes(prompts))
    assert sorted(i for members, _ in classes for i in members) == list(range(40))
    for members, length in classes:
        ends = [len(prompts[i].tokens) + prompts[i].max_new_tokens for i in members]
        assert max(ends) == length < 2 * min(ends)


def test_special_tokens_are_not_in_the_text_but_may_end_it() -> None:
    tokenizer = marking_tokenizer("ours", "<s>")
    theirs = PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(tokenizer._backend.to_str()))
    ids = tokenizer.encode_chat("the<s> author</s> of<sep> this<sep>")
    answer = own_decoder._Answer(
        GenerationPrompt((0,), "", ("of<sep>", "<sep>", "x"), 9), tokenizer
    )
    ends = [answer.take(token) for token in ids]
    assert ends.index(True) == ids.index(tokenizer._backend.token_to_id("<sep>"))
    assert answer.text == theirs.decode(ids, skip_special_tokens=True) == "the author of this"


def test_a_stop_may_end_within_a_character_of_many_bytes_and_span_tokens() -> None:
    """A byte tokenizer, and a model that writes a text whatever it is asked."""
    config = DataConfig()
    tokenizer = build_tokenizer(TokenizerConfig(name="bytes"), config, progress=False)
    text = "ab — né\n\nQuestion"
    root = recites(tokenizer, tokenizer.encode(text))
    prompt = (tokenizer.eos_id,)
    stops: list[tuple[str, ...]] = [(), ("\n\n",), ("é",), ("—", "\n"), ("stop", "\n\nQ"), ("Q",)]
    prompts = [GenerationPrompt(prompt, "", each, 40) for each in stops]
    expected = [text, "ab — né", "ab — n", "ab ", "ab — né", "ab — né\n\n"]
    assert generated(root, prompts, tokenizer=tokenizer) == expected
    stopped = [GenerationPrompt(prompt, "", ("né\n",), 40)]  # five tokens of text.encode()
    assert len(calls(root, stopped, tokenizer=tokenizer)) == len("ab — né\n".encode())
    cut_short = generated(root, [GenerationPrompt(prompt, "", (), 5)], tokenizer=tokenizer)
    assert cut_short == ["ab \ufffd"]  # two of a dash's three bytes


def recites(tokenizer: Tokenizer, tokens: list[int]) -> Root:
    """At position i of a row it writes tokens[i], and at the end the end of text."""
    width = len(tokens) + 1
    sizes = {"d_model": width + width % 2, "n_heads": 1, "n_layers": 1, "max_seq_len": 64}
    config = make_config(**sizes, vocab_size=tokenizer.vocab_size, tie_word_embeddings=False)
    decoder = Decoder(config)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.zero_()
        decoder.norm_f.weight.fill_(1)
        decoder.wpe.weight[:width, :width] = torch.eye(width)
        for place, token in enumerate([*tokens, tokenizer.eos_id]):
            decoder.lm_head.weight[token, place] = 1
    return Root(decoder)


def test_greedy_texts_are_those_of_transformers(tmp_path: Path) -> None:
    case = random_models.CASES["LlamaForCausalLM"][1]
    decoder = random_models.decoder(random_models.settings(**case))
    folder = random_models.write_tokenizer(tmp_path / "tokenizer")
    to_hf(decoder, folder, tmp_path / "out", dtype="fp32", card=random_models.CARD)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs.generation_config.eos_token_id = None
    tokenizer = Tokenizer.load(folder)
    generator = torch.Generator().manual_seed(3)
    prompts = [random_prompt(generator, length, 8) for length in (3, 9, 6, 9)]
    expected = []
    for prompt in prompts:
        row = torch.tensor([prompt.tokens])
        out = theirs.generate(
            row,
            attention_mask=torch.ones_like(row),
            max_new_tokens=8,
            do_sample=False,
            suppress_tokens=list(range(tokenizer.eos_id, random_models.ROWS)),
        )
        expected.append(tokenizer.decode(out[0, row.shape[1] :].tolist()))
    tokenizer.vocab_size = tokenizer.eos_id  # as there: neither end of text nor padding
    assert generated(Root(decoder), prompts, tokenizer=tokenizer) == expected


@pytest.mark.slow
def test_under_autocast_each_text_is_what_one_prompt_gives() -> None:
    root, prompts = model("rope"), mixed_prompts()
    options: dict[str, Any] = {"autocast": lambda: torch.autocast("cpu", torch.bfloat16)}
    alone = [generated(root, [prompt], **options)[0] for prompt in prompts]
    together = generated(root, prompts, **options)
    same = sum(a == b for a, b in zip(alone, together, strict=True))
    assert same >= 20  # bf16 rounds otherwise in other shapes; near ties may fall elsewhere


def test_a_model_of_nan_is_an_error_and_not_a_text() -> None:
    root = model("rope")
    with torch.no_grad():
        root.model.norm_f.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="after 25 of 25 prompts are not finite"):
        generated(root, mixed_prompts())


def test_rows_longer_than_learned_positions_are_refused() -> None:
    generator = torch.Generator().manual_seed(1)
    fits, too_long = (random_prompt(generator, length, 5) for length in (60, 61))
    assert len(generated(model("learned"), [fits])[0]) == 5
    with pytest.raises(UserError, match=r"5 after a prompt of 61 tokens \(1 of 2 prompts"):
        generated(model("learned"), [fits, too_long])


def test_no_prompts_give_no_texts() -> None:
    assert generated(model("rope"), []) == []


def test_the_mode_of_the_model_comes_back() -> None:
    root = model("rope").train()
    generated(root, mixed_prompts()[:3])
    assert root.training and root.model.training


def _generate_on(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    found = []
    for shard in (1, 2):
        config = ParallelConfig(data_parallel_shard_degree=shard)
        config.fill()
        world = World(rank, 2, rank, CPU)
        mesh = build_mesh(config, world)
        with torch.device("meta"):
            root = Root(Decoder(make_config(max_seq_len=64, **SETTINGS["rope"])))
        materialize(root, world, mesh, config, precision="fp32")
        root.model.init_weights(2)
        module = apply_ddp(root, mesh)
        ranks = {"data_rank": rank, "data_size": 2}
        found.append([generated(module, prompts, **ranks) for prompts in work_for_ranks()])
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def work_for_ranks() -> list[list[GenerationPrompt]]:
    """Many; fewer than ranks; one that writes 12 tokens beside ones that write a single one."""
    prompts = mixed_prompts()
    uneven = [
        GenerationPrompt((1, 2, 3), "", (), 12),
        *[GenerationPrompt((4, 5, i), "", (), 1) for i in range(1, 6)],
    ]
    return [prompts, prompts[:1], uneven]


def test_every_rank_gets_the_texts_of_one_process(tmp_path: Path) -> None:
    decoder = Decoder(make_config(max_seq_len=64, **SETTINGS["rope"]))
    decoder.init_weights(2)
    expected = [one_by_one(Root(decoder), prompts) for prompts in work_for_ranks()]
    assert [generated(Root(decoder), prompts) for prompts in work_for_ranks()] == expected
    on_ranks(_generate_on, (tmp_path,), 2)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == [expected, expected]
