"""Chunks of the loss: how many a GPU gets, what they hold and what they are computed in."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from llmfoundry.ops.loss import (
    chunk_tokens,
    linear_cross_entropy,
    logit_bytes,
    reference_cross_entropy,
)
from llmfoundry.ops.packed_layout import IGNORE
from tests.fake_cuda import run_on_fake_cuda

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
WIDTH = 64
CASES: dict[str, tuple[int, int, dict[str, float]]] = {  # tokens, vocabulary, settings
    "small": (16_484, 2_048, {}),
    "gpt2": (16_484, 50_304, {}),
    "dbrx": (10_596, 100_352, {}),
    "llama": (8_292, 131_072, {}),
    "asked": (2_500, 50_304, {"chunk": 1000}),
    "one chunk": (8_192, 50_304, {}),
    "scaled": (8_192, 50_304, {"scale": 0.5}),
    "capped": (8_192, 50_304, {"softcap": 30.0}),
}
NO_TRITON = (8_192, 50_304, {"triton": False})
SCRIPT = """
import collections, json, weakref
from torch.utils._python_dispatch import TorchDispatchMode
from llmfoundry.ops import loss
from llmfoundry.ops.loss import linear_cross_entropy

class Watched(TorchDispatchMode):
    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary = vocabulary
        self.products, self.live, self.peak, self.seen = [], 0, 0, set()
        self.touched = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        wide = [t for t in (*args, out) if isinstance(t, torch.Tensor) and self.is_wide(t)]
        if wide and not func.is_view and func is not torch.ops.prim.device.default:
            self.touched[str(func)] += 1
        if isinstance(out, torch.Tensor):
            self.hold(out.untyped_storage())
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
                self.products.append((str(func), list(out.shape), str(out.dtype)))
        return out

    def is_wide(self, t):
        return t.ndim == 2 and self.vocabulary in t.shape and WIDTH not in t.shape

    def hold(self, storage):
        if storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())

    def free(self, key, size):
        self.seen.discard(key)
        self.live -= size

def watch(tokens, vocab, settings):
    has_triton = settings.pop("triton", True)
    loss._has_triton = lambda: has_triton
    hidden = torch.empty(tokens, WIDTH, device="cuda", requires_grad=True)
    weight = torch.empty(vocab, WIDTH, device="cuda", requires_grad=True)
    labels = torch.empty(tokens, dtype=torch.int64, device="cuda")
    with Watched(vocab) as watched:
        total = linear_cross_entropy(hidden, weight, labels, **settings)
    total.backward()
    assert hidden.grad.shape == hidden.shape and weight.grad.shape == weight.shape
    return {"peak": watched.peak, "products": watched.products, "touched": watched.touched}

torch.set_autocast_dtype("cuda", torch.bfloat16)
torch.set_autocast_enabled("cuda", True)  # `torch.autocast` asks the device whether it can
with FakeTensorMode():
    print(json.dumps({name: watch(*case) for name, case in CASES.items()}))
"""


@functools.cache
def watched() -> dict[str, Any]:
    """Of each case, what its forward pass computes and the most bytes that it holds."""
    cases = CASES | {"no Triton": NO_TRITON}
    script = f"WIDTH, CASES = {WIDTH}, {cases!r}\n{SCRIPT}"
    return json.loads(run_on_fake_cuda(script).splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("small", [8192, 8192, 100]),
        ("gpt2", [8192, 8192, 100]),
        ("dbrx", [5248, 5248, 100]),
        ("llama", [4096, 4096, 100]),
        ("asked", [1000, 1000, 500]),
    ],
)
def test_a_gpu_gets_four_to_eight_thousand_tokens_a_chunk(name: str, chunks: list[int]) -> None:
    products = watched()[name]["products"]
    assert [shape[0] for _, shape, _ in products if shape[1] == CASES[name][1]] == chunks


def test_chunks_follow_the_device_the_bound_and_what_is_asked() -> None:
    assert all(chunk_tokens(v, CUDA) * v * 4 <= 2 << 30 for v in range(512, 200_000, 997))
    assert [chunk_tokens(v, CPU) for v in (512, 16_384, 50_304)] == [8192, 256, 256]
    assert chunk_tokens(4_000_000, CUDA) == 256
    assert chunk_tokens(50_304, CUDA, 1000) == chunk_tokens(50_304, CPU, 1000) == 1000


def test_a_gpus_products_sum_in_fp32() -> None:
    assert {(name, dtype) for name, _, dtype in watched()["gpt2"]["products"]} == {
        ("aten.mm.dtype", "torch.float32"),  # logits
        ("aten.addmm.dtype_out", "torch.float32"),  # added to the head's gradient
        ("aten.mm.default", "torch.bfloat16"),  # gradients of hidden states, in autocast's dtype
    }


@pytest.mark.parametrize("name", ["one chunk", "scaled", "capped"])
def test_a_chunk_holds_the_bytes_that_the_estimate_counts(name: str) -> None:
    tokens, vocab, settings = CASES[name]
    counted = logit_bytes(CUDA, capped="softcap" in settings) * tokens * vocab
    ends = (4 + 2) * (vocab + tokens) * WIDTH  # gradients, and what the products read, in bf16
    assert watched()[name]["peak"] == pytest.approx(counted + ends, rel=0.01)


@pytest.mark.parametrize("name", CASES)
def test_only_matmuls_and_the_kernel_touch_logits(name: str) -> None:
    chunks = sum(name == "aten.mm.dtype" for name, *_ in watched()[name]["products"])
    assert watched()[name]["touched"] == {
        "aten.mm.dtype": chunks,
        "llmfoundry.logit_pass.default": chunks,
        "aten.mm.default": chunks,  # gradients of hidden states
        "aten.addmm.dtype_out": chunks,  # gradient of the head
    }


def test_without_triton_pytorch_holds_twice_the_logits() -> None:
    """The largest tensors are logits and softmax; the gradient's bf16 copy follows later."""
    tokens, vocab, _ = NO_TRITON
    ends = (4 + 2) * (vocab + tokens) * WIDTH
    assert watched()["no Triton"]["peak"] == pytest.approx(8 * tokens * vocab + ends, rel=0.01)
    assert "llmfoundry.logit_pass.default" not in watched()["no Triton"]["touched"]


def test_more_chunks_hold_no_more_logits() -> None:
    more, one = watched()["gpt2"]["peak"], watched()["one chunk"]["peak"]
    assert 0 < more - one < 0.01 * one  # the gradient of more hidden states


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 64, 299, 300, 5000])
def test_every_chunk_gives_the_plain_loss(chunk: int, tied: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(50, 16, generator=generator, dtype=torch.float64).requires_grad_()
    hidden = torch.randn(3, 100, 16, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(0, 50, (3, 100), generator=generator)
    labels[torch.rand(3, 100, generator=generator) < 0.3] = IGNORE
    weights = torch.rand(3, 100, generator=generator, dtype=torch.float64)

    def gradients(loss: Callable[..., Tensor], **how: Any) -> list[Tensor]:
        x = hidden + weight[labels.clamp(min=0)] if tied else hidden  # the embedding is the head
        found = loss(x, weight, labels, scale=0.7, softcap=5.0, weights=weights, **how)
        return [found, *torch.autograd.grad(found, (hidden, weight))]

    torch.testing.assert_close(
        gradients(linear_cross_entropy, chunk=chunk), gradients(reference_cross_entropy)
    )
