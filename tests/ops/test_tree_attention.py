"""Attention in trees: every backend that runs on a CPU against a loop over paths; who serves."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from llmfoundry.errors import UserError
from llmfoundry.models.decoder import Decoder
from llmfoundry.ops.attention import base as attention_tree
from llmfoundry.ops.attention import flex as attention_flex
from llmfoundry.ops.attention.base import AttentionSpec, alibi_slopes
from llmfoundry.ops.attention.select import PLANS, attend, choose
from llmfoundry.ops.packed_layout import PackedLayout
from tests.models.test_decoder import make_config
from tests.ops.plain_attention import distance, plan
from tests.ops.plain_tree import Forest, plain_tree_attention, random_forest, visible

CPU = torch.device("cpu")
HEADS = {"mha": (4, 4), "gqa": (6, 2), "mqa": (3, 1)}
GRID = [
    (impl, *options)
    for *options, impl in product(
        HEADS, (False, True), (-1, 0, 5), (None, 2.0), ("torch", "sdpa", "flex")
    )
    if impl != "sdpa" or options[-1] is None  # it has no softcap
]
DOUBLE = torch.float64


def forests(width: int, seed: int, rows: int = 2) -> list[Forest]:
    rng = random.Random(seed)
    return [random_forest(width, rng, rng.choice([0.05, 0.2, 0.6])) for _ in range(rows)]


def tensors(rows: int, width: int, heads: int, kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(width + heads)
    sizes = [(rows, width, n, 8) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(size, generator=generator, dtype=DOUBLE) for size in sizes]


def layout_of(grown: list[Forest]) -> PackedLayout:
    layout = PackedLayout.from_ends([forest.ends for forest in grown])
    assert layout.ends is not None, "the seed has no branch"
    return layout


def rules_of(heads: int, alibi: bool, window: int, softcap: float | None) -> AttentionSpec:
    slopes = alibi_slopes(heads, 8, CPU).double() if alibi else None
    return AttentionSpec(0.3, softcap, slopes, window)


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's own uncompiled form: the same mask and score functions, run as they are."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(attention_flex, "_compiled", lambda: flex_attention.flex_attention)


@pytest.mark.parametrize(("impl", "heads", "alibi", "window", "softcap"), GRID)
def test_a_token_sees_its_path_and_nothing_else(
    impl: str,
    heads: str,
    alibi: bool,
    window: int,
    softcap: float | None,
    eager_flex: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_tree, "PIECE", 7)  # several pieces, whose borders cut branches
    spec = rules_of(HEADS[heads][0], alibi, window, softcap)
    grown = forests(40, seed=len(heads) + window)
    q, k, v = tensors(2, 40, *HEADS[heads])
    chosen = PLANS[impl](layout_of(grown), spec, queries=40, past=0, device=CPU)
    expected = plain_tree_attention(
        q, k, v, grown, scale=0.3, alibi=alibi, window=window, softcap=softcap
    )
    assert distance([attend(q, k, v, chosen)], [expected]) < (1e-6 if impl == "flex" else 1e-13)


@pytest.mark.parametrize("impl", ["torch", "sdpa"])
@pytest.mark.parametrize("seed", range(12))
def test_any_forest_is_attended_to_as_path_by_path(seed: int, impl: str) -> None:
    rng = random.Random(seed)
    width = rng.choice([17, 128, 150, 300])
    grown = forests(width, seed)
    window, alibi = rng.choice([-1, 3, 100]), bool(seed % 2)
    q, k, v = tensors(2, width, 2, 1)
    spec = rules_of(2, alibi, window, None)
    chosen = plan(layout_of(grown), spec, queries=width, past=0, device=CPU, impl=impl)
    expected = plain_tree_attention(q, k, v, grown, scale=0.3, alibi=alibi, window=window)
    assert distance([attend(q, k, v, chosen)], [expected]) < 1e-13


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_lower_precisions_are_as_near_as_they_are_in_documents(kind: str) -> None:
    dtype, tolerance = {"fp32": (torch.float32, 2e-6), "bf16": (torch.bfloat16, 6e-3)}[kind]
    grown = forests(200, seed=1)
    q, k, v = (x.bfloat16().double() for x in tensors(2, 200, 2, 2))
    chosen = plan(
        layout_of(grown), AttentionSpec(0.3), queries=200, past=0, device=CPU, impl="auto"
    )
    out = attend(q.to(dtype), k.to(dtype), v.to(dtype), chosen)
    assert out.dtype == dtype
    assert distance([out], [plain_tree_attention(q, k, v, grown, scale=0.3)]) < tolerance


def wide_forest(width: int, rng: random.Random) -> list[int]:
    """Where parts end, in a forest of long runs, so that whole blocks are seen, and hidden."""
    ends = [0] * width

    def fill(at: int, stop: int) -> None:
        """A part that takes places at..stop: a run of tokens, then what branches from its last."""
        run = min(stop - at, rng.choice([1, 40, 150]))
        ends[at : at + run] = [stop] * run
        at += run
        while at < stop:
            part = min(stop, at + rng.choice([1, 9, 70, 260]))
            fill(at, part)
            at = part

    at = 0
    while at < width:
        stop = min(width, at + rng.choice([3, 200, width]))
        fill(at, stop)
        at = stop
    return ends


@pytest.mark.parametrize("window", [-1, 0, 60, 127, 128, 400])
@pytest.mark.parametrize("width", [128, 500, 700, 896, 131, 384])
def test_blocks_of_trees_are_those_that_pytorch_finds_by_looking_at_every_pair(
    width: int, window: int
) -> None:
    ends = torch.tensor([wide_forest(width, random.Random(width + n)) for n in range(2)])
    positions = PackedLayout.from_ends(ends).positions
    ours = attention_flex.tree_mask(ends.int(), positions, window)
    theirs = flex_attention.create_block_mask(ours.mask_mod, 2, None, width, width, device="cpu")
    assert bool((ours.to_dense() >= theirs.to_dense()).all()), "all that is seen is looked at"
    if window < 0:
        for part in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
            torch.testing.assert_close(getattr(ours, part), getattr(theirs, part))
        return
    for row, query in product(range(2), range(ours.full_kv_num_blocks.shape[2])):
        full = [
            set(m.full_kv_indices[row, 0, query, : m.full_kv_num_blocks[row, 0, query]].tolist())
            for m in (ours, theirs)
        ]
        assert full[0] <= full[1], "only what is seen wholly goes without the mask"


@pytest.mark.parametrize("impl", ["torch", "sdpa", "flex"])
def test_a_plan_for_trees_asks_the_device_for_no_number(impl: str) -> None:
    meta = torch.device("meta")
    layout = layout_of(forests(300, seed=3)).to(meta)
    spec = AttentionSpec(0.3, None, torch.ones(4, device=meta), window=40)
    chosen = PLANS[impl](layout, spec, queries=300, past=0, device=meta)
    assert chosen.impl == impl


def test_kernels_that_know_documents_alone_give_trees_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    cuda, bf16 = torch.device("cuda"), torch.bfloat16
    assert choose(AttentionSpec(0.1), True, cuda, bf16, 64) == "varlen"
    assert choose(AttentionSpec(0.1), True, cuda, bf16, 64, trees=True) == "flex"
    assert choose(AttentionSpec(0.1, dropout=0.1), True, cuda, bf16, 64, trees=True) == "sdpa"
    assert choose(AttentionSpec(0.1, softcap=2.0), True, CPU, bf16, 64, trees=True) == "torch"
    layout = layout_of(forests(40, seed=2))
    for impl in ("varlen", "flash"):
        chosen = plan(layout, AttentionSpec(0.1), queries=40, past=0, device=CPU, impl=impl)
        assert chosen.impl == "sdpa"
        with pytest.raises(AssertionError, match="other backends"):
            PLANS[impl](layout, AttentionSpec(0.1), queries=40, past=0, device=CPU)


MODELS = {
    "learned": {"learned_pos_emb": True},
    "alibi": {"learned_pos_emb": False, "attn_config": {"alibi": True}},
    "rope": {"learned_pos_emb": False, "attn_config": {"rope": True}},
    "rope and window": {
        "learned_pos_emb": False,
        "attn_config": {"rope": True, "sliding_window_size": 4},
    },
    "temperature": {
        "learned_pos_emb": False,
        "attn_config": {
            "nope": True,
            "attn_temperature_tuning": {"floor_scale": 3, "attn_scale": 0.3},
        },
    },
    "gqa and softcap": {
        "learned_pos_emb": False,
        "attn_config": {
            "rope": True,
            "attn_type": "grouped_query_attention",
            "kv_n_heads": 2,
            "attn_logit_softcapping": 3.0,
        },
    },
    "dynamic": {
        "learned_pos_emb": False,
        "attn_config": {"rope": True, "rope_hf_config": {"type": "dynamic", "factor": 2.0}},
    },
}


def decoder(**settings: object) -> Decoder:
    model = Decoder(make_config(max_seq_len=64, **settings)).double()
    model.init_weights(seed=1)
    return model


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_hidden_states_in_a_tree_are_those_of_each_path_alone(name: str) -> None:
    model = decoder(**MODELS[name])
    grown = forests(30, seed=5)
    tokens = torch.randint(0, model.config.vocab_size, (2, 30))
    found = model(tokens, layout_of(grown))
    for row, forest in enumerate(grown):
        for i in {i for i in range(30) if i not in forest.parents}:  # leaves
            path = visible(forest.parents, i)
            torch.testing.assert_close(found[row, path], model(tokens[row, path][None])[0])


def test_frequencies_that_depend_on_a_paths_length_refuse_longer_trees() -> None:
    model = decoder(**MODELS["dynamic"])
    tokens = torch.zeros(1, 70, dtype=torch.int64)
    chain = [[70] * 69 + [70]]
    model(tokens, PackedLayout.from_ends(chain))  # a document
    branching = [[70] * 68 + [69, 70]]
    with pytest.raises(UserError, match=r"max_seq_len: a prompt has 69 tokens.*dynamic"):
        model(tokens, PackedLayout.from_ends(branching))
