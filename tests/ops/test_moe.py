"""Every backend of the mixture of experts against the float64 reference, and it against a loop."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from llmfoundry.ops.activations import from_text
from llmfoundry.ops.moe import cpu as moe_cpu
from llmfoundry.ops.moe import gpu as moe_device
from llmfoundry.ops.moe import mixture as moe_grouped
from llmfoundry.ops.moe.experts import combine_backward, glu_backward, route
from llmfoundry.ops.moe.mixture import mixture, refusal
from tests.ops.moe_layers import LAYERS, Layer, choices, distances, gradients, inputs, run

each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
each_path = pytest.mark.parametrize("path", [moe_cpu, moe_device], ids=["cpu", "device"])


def take(monkeypatch: pytest.MonkeyPatch, path: ModuleType) -> None:
    """Serve grouped_mm by this path on this CPU."""
    monkeypatch.setattr(moe_grouped, "_path", lambda device: path)


@each_layer
def test_reference_is_the_formula_token_by_token(layer: Layer) -> None:
    x, weights, w = inputs(layer, torch.float64)
    expected = torch.zeros_like(x)
    for t, experts in enumerate(choices(layer).tolist()):
        for choice, e in enumerate(experts):
            h = w.w1[e] @ x[t] + (0 if w.b1 is None else w.b1[e])
            h = w.act.function(h)
            if w.v1 is not None:
                up = w.v1[e] @ x[t] + (0 if w.bv is None else w.bv[e])
                limit = w.act.limit
                h = h * (up if limit is None else up.clamp(-limit, limit) + 1)
            y = h @ w.w2[e] + (0 if w.b2 is None else w.b2[e])
            expected = expected.index_add(0, torch.tensor([t]), (weights[t, choice] * y)[None])
    mine = run(layer, "torch", torch.float64)
    exact = {"y": expected.detach(), **gradients(expected, x, weights, w)}
    assert max(distances(mine, exact).values()) < 1e-13


@each_layer
@each_path
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1.5e-2)], ids=["fp32", "bf16"]
)
def test_gradients_are_the_references(
    monkeypatch: pytest.MonkeyPatch,
    layer: Layer,
    path: ModuleType,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    take(monkeypatch, path)
    # the same rounded inputs in float64
    x, weights, w = inputs(layer, dtype)
    mine = run(layer, "grouped_mm", dtype)
    leaves = [t if t is None else t.detach().double().requires_grad_() for t in w.tensors()]
    wide_x, wide_weights = (t.detach().double().requires_grad_() for t in (x, weights))
    wide = type(w)(*leaves, activation=w.activation)
    y = mixture(wide_x, wide_weights, choices(layer), wide, impl="torch")
    exact = {"y": y.detach(), **gradients(y, wide_x, wide_weights, wide)}
    assert max(distances(mine, exact).values()) < tolerance


@each_layer
@pytest.mark.parametrize("padding", [0, 5])
def test_cpu_path_is_exact_in_float64(
    monkeypatch: pytest.MonkeyPatch, layer: Layer, padding: int
) -> None:
    monkeypatch.setattr(moe_cpu, "_padded", lambda count, dtype: count + padding)
    monkeypatch.setattr(moe_cpu, "kept_rows", lambda n_rows, dtype: n_rows + padding)
    mine = run(layer, "grouped_mm", torch.float64)
    assert max(distances(mine, run(layer, "torch", torch.float64)).values()) < 1e-13


def test_compiled_products_have_few_numbers_of_rows() -> None:
    counts = range(1, 4097)
    padded = [moe_cpu._padded(count, torch.bfloat16) for count in counts]
    assert all(
        0 <= p - n < min(moe_cpu.PADDING, n / 16 + 1) for n, p in zip(counts, padded, strict=True)
    )
    assert len(set(padded)) < 200
    assert all(moe_cpu._padded(count, torch.float64) == count for count in counts)


@each_path
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tokens(monkeypatch: pytest.MonkeyPatch, path: ModuleType, dtype: torch.dtype) -> None:
    take(monkeypatch, path)
    layer = Layer(tokens=0, biased=True)
    result = run(layer, "grouped_mm", dtype)
    assert result["y"].shape == (0, layer.d)
    assert not any(result[name].any() for name in ("w1", "v1", "w2", "b1", "bv", "b2"))


@each_path
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, path: ModuleType, dtype: torch.dtype
) -> None:
    take(monkeypatch, path)
    layer = Layer(tokens=300, biased=True, load="skewed")
    first, second = (run(layer, "grouped_mm", dtype) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_order_of_a_tokens_choices_does_not_matter() -> None:
    x, weights, w = inputs(Layer(), torch.float64)
    experts = choices(Layer())
    there = mixture(x, weights, experts, w, impl="grouped_mm")
    back = mixture(x, weights.flip(1), experts.flip(1), w, impl="grouped_mm")
    torch.testing.assert_close(there, back)


def test_equal_experts_are_one_dense_layer() -> None:
    x, weights, w = inputs(Layer(), torch.float64)
    same = [t if t is None else t[:1].expand_as(t) for t in w.tensors()]
    weights = weights / weights.sum(1, keepdim=True)
    y = mixture(x, weights, choices(Layer()), type(w)(*same), impl="grouped_mm")
    dense = (F.silu(x @ w.w1[0].T) * (x @ w.v1[0].T)) @ w.w2[0]
    torch.testing.assert_close(y, dense)


@each_path
def test_an_expanded_gradient_passes(monkeypatch: pytest.MonkeyPatch, path: ModuleType) -> None:
    take(monkeypatch, path)
    x, weights, w = inputs(Layer(), torch.float32)
    mixture(x, weights, choices(Layer()), w, impl="grouped_mm").sum().backward()
    mine = x.grad
    x.grad = None
    mixture(x, weights, choices(Layer()), w, impl="torch").sum().backward()
    torch.testing.assert_close(mine, x.grad)


@pytest.mark.parametrize("impl", ["grouped_mm", "torch"])
def test_autocast_computes_in_its_dtype_and_keeps_gradients_wide(impl: str) -> None:
    layer = Layer(biased=True)
    x, weights, w = inputs(layer, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mixture(x, weights, choices(layer), w, impl=impl)
    assert y.dtype == torch.bfloat16
    result = {"y": y.detach(), **gradients(y, x, weights, w)}
    assert all(grad.dtype == torch.float32 for name, grad in result.items() if name != "y")
    assert max(distances(result, run(layer, "torch", torch.float64)).values()) < 2e-2


def test_frozen_experts_and_router_leave_the_inputs_gradient() -> None:
    x, weights, w = inputs(Layer(), torch.float32)
    y = mixture(x, weights, choices(Layer()), w, impl="grouped_mm")
    expected = gradients(y, x, weights, w)["x"]
    frozen = type(w)(*(t if t is None else t.detach() for t in w.tensors()))
    y = mixture(x, weights.detach(), choices(Layer()), frozen, impl="grouped_mm")
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    assert torch.equal(torch.autograd.grad(y, x, grad)[0], expected)


def test_without_gradients_nothing_is_kept() -> None:
    x, weights, w = inputs(Layer(), torch.float32)
    with torch.no_grad():
        kept = torch.ops.llmfoundry.moe_forward(x, weights, choices(Layer()), *w.flat(), False)
        y = mixture(x, weights, choices(Layer()), w, impl="grouped_mm")
    assert torch.equal(kept[0], y) and not kept[1].numel() and not kept[2].numel()
    assert torch.equal(y, mixture(x, weights, choices(Layer()), w, impl="grouped_mm").detach())


def test_checkpointed_gradients_are_the_same() -> None:
    x, weights, w = inputs(Layer(), torch.float32)

    def block(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return mixture(x, weights, choices(Layer()), w, impl="grouped_mm")

    kept = gradients(block(x, weights), x, weights, w)
    again = checkpoint(block, x, weights, use_reentrant=False)
    again = gradients(again, x, weights, w)
    assert all(torch.equal(again[name], kept[name]) for name in kept)


def test_routing_is_a_stable_sort() -> None:
    experts = torch.tensor([[2, 0], [0, 3], [2, 3]])
    order, inverse, ends = route(experts, 5)
    assert order.tolist() == [1, 2, 0, 4, 3, 5]
    assert inverse[order].tolist() == list(range(6))
    assert ends.tolist() == [2, 2, 4, 6, 6] and ends.dtype == torch.int32


@pytest.mark.parametrize("n_experts", [5, 255, 256, 300, 2**15])
def test_pairs_without_an_expert_are_sorted_last(n_experts: int) -> None:
    experts = torch.tensor([[2, n_experts], [n_experts, n_experts - 1], [2, 0]])
    order, inverse, ends = route(experts, n_experts)
    assert order.tolist() == [5, 0, 4, 3, 1, 2]
    assert inverse[order].tolist() == list(range(6))
    assert ends[[0, 2, -2, -1]].tolist() == [1, 3, 3, 4] and len(ends) == n_experts


@each_path
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layer", [Layer(top_k=1, biased=True), Layer(top_k=1, gated=False)])
def test_rows_without_an_expert_change_no_result(
    monkeypatch: pytest.MonkeyPatch, path: ModuleType, dtype: torch.dtype, layer: Layer
) -> None:
    """NaN in such rows, of tokens and of gradients, reaches no weight and no other token."""
    take(monkeypatch, path)
    x, weights, w = inputs(layer, dtype)
    experts = choices(layer)
    leaves = [t for t in (x, weights, *w.tensors()) if t is not None]
    grad = torch.randn(layer.tokens, layer.d).to(dtype)
    y = mixture(x, weights, experts, w, impl="grouped_mm")
    expected = [y.detach(), *torch.autograd.grad(y, leaves, grad)]

    # the same tokens, and as many between them that have no expert
    def spread(t: torch.Tensor, value: float) -> torch.Tensor:
        return torch.stack([t, torch.full_like(t, value)], 1).flatten(0, 1)

    wide = [spread(t, float("nan")) for t in (x, weights)]
    y = mixture(*wide, spread(experts, layer.experts), w, impl="grouped_mm")
    found = [y[::2].detach(), *torch.autograd.grad(y, leaves, spread(grad, float("nan")))]
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right)


def test_device_path_asks_nothing_of_the_host() -> None:
    """A fake tensor has no values: .item(), .tolist() or nonzero() of one raises."""
    layer = Layer(biased=True)
    x, weights, w = inputs(layer, torch.bfloat16)  # fake grouped_mm knows bf16 alone
    experts = choices(layer)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode, torch.no_grad():
        fake = [t if t is None else mode.from_tensor(t) for t in (x, weights, *w.tensors())]
        routing = route(mode.from_tensor(experts), layer.experts)
        some = type(w)(*fake[2:], activation=w.activation)
        y, kept = moe_device.forward(*fake[:2], routing, some, keep=True)
        back = moe_device.backward(y, *fake[:2], kept, routing, some, frozen=False)
    assert y.shape == x.shape and back.experts[0].shape == w.w1.shape


@pytest.mark.parametrize("gated", [False, True])
def test_flops_are_those_of_the_products(gated: bool) -> None:
    counts = {}
    for impl in ("grouped_mm", "torch"):
        with FlopCounterMode(display=False) as counter:
            run(Layer(gated=gated), impl, torch.float32)
        counts[impl] = counter.get_total_flops()
    assert counts["grouped_mm"] == counts["torch"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_compiles_whole(dtype: torch.dtype) -> None:
    layer = Layer(biased=True)
    x, weights, w = inputs(layer, dtype)
    experts = choices(layer)

    def block(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return mixture(2 * x, weights.exp(), experts, w, impl="grouped_mm") + x

    torch._dynamo.reset()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    mine, exact = (f(x, weights) for f in (compiled, block))
    torch.testing.assert_close(mine, exact)
    grads = [gradients(y, x, weights, w) for y in (mine, exact)]
    for name, grad in grads[1].items():
        torch.testing.assert_close(grads[0][name], grad)


def test_the_operators_keep_pytorchs_rules() -> None:
    """Schema, fake kernels, autograd registration, as torch.library checks them."""
    for layer in (Layer(biased=True), Layer(gated=False)):
        x, weights, w = inputs(layer, torch.float32)
        torch.library.opcheck(
            torch.ops.llmfoundry.moe_forward,
            (x, weights, choices(layer), *w.flat(), True),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


def test_refusals_name_the_nearest_size_and_what_to_write() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    assert refusal("grouped_mm", "cuda", bf16, 512, 1024) is None
    assert refusal("grouped_mm", "cpu", bf16, 513, 1023) is None  # one product an expert
    assert "ffn_hidden_size in multiples of 8" in refusal("grouped_mm", "cuda", bf16, 512, 1022)
    assert refusal("grouped_mm", "cuda", bf16, 512, 1022).endswith("write 1024")
    assert "d_model in multiples of 4" in refusal("grouped_mm", "cuda", fp32, 510, 1024)
    assert "write torch" in refusal("grouped_mm", "cuda", torch.float64, 512, 1024)
    assert "write torch" in refusal("grouped_mm", "mps", fp32, 512, 1024)
    assert "write grouped_mm" in refusal("megablocks", "cpu", bf16, 512, 1024)
    assert "write grouped_mm" in refusal("megablocks", "cuda", fp32, 512, 1024)
    assert "megablocks_ops" in refusal("megablocks", "cuda", bf16, 512, 1024)
    assert refusal("torch", "mps", torch.float64, 513, 1023) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_and_never_waits_for_the_device() -> None:
    layer = Layer(tokens=500, d=64, f=128, biased=True, load="first")
    run(layer, "grouped_mm", torch.bfloat16, device="cuda")  # compiles kernels
    x, weights, w = inputs(layer, torch.bfloat16, "cuda")
    experts = choices(layer).cuda()
    grad = torch.randn(500, 64, device="cuda").to(torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = mixture(x, weights, experts, w, impl="grouped_mm")
        torch.autograd.grad(y, [x, weights, w.w1, w.v1, w.w2], grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    mine = run(layer, "grouped_mm", torch.bfloat16, device="cuda")
    exact = run(layer, "torch", torch.float64)
    found = distances({name: t.cpu() for name, t in mine.items()}, exact)
    assert max(found.values()) < 3e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_router_weights_are_summed_in_fp32(dtype: torch.dtype) -> None:
    """Products of bfloat16 rows that are rounded before the sum are wrong by 1.6e-3."""
    generator = torch.Generator().manual_seed(0)
    tokens, top_k, d, n_experts = 200, 4, 512, 16
    experts = torch.randn(tokens, n_experts, generator=generator).topk(top_k).indices
    order, *_ = route(experts, n_experts)
    weights = torch.rand(tokens, top_k, generator=generator)
    grad = torch.randn(tokens, d, generator=generator).to(dtype)
    rows = torch.randn(tokens * top_k, d, generator=generator).to(dtype)
    sorted_grad = grad.double()[order // top_k]
    exact = torch.empty(tokens * top_k, dtype=torch.double)
    exact[order] = (sorted_grad * rows.double()).sum(-1)

    grad_rows, grad_weights = combine_backward(grad, rows, weights, order)
    _, _, _, of_glu = glu_backward(sorted_grad.to(dtype), rows, None, weights, order, "relu")
    active = torch.empty_like(exact)
    active[order] = (sorted_grad * rows.double().relu()).sum(-1)

    for gradient, right in ((grad_weights, exact), (of_glu, active)):
        assert (gradient.double().flatten() - right).norm() < 2e-7 * right.norm()
    exact_rows = sorted_grad * weights.double().flatten()[order][:, None]
    torch.testing.assert_close(grad_rows, exact_rows.to(dtype))


@pytest.mark.parametrize("gated", [True, False])
def test_the_cpu_path_sums_gradients_of_router_weights_in_fp32(gated: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    dh, a, b = (torch.randn(64, 512, generator=generator).bfloat16() for _ in range(3))
    inner = torch.empty(64)
    act = from_text("relu")
    h = a.relu() * b if gated else a.relu()
    exact = (dh.double() * h.double()).sum(-1)
    moe_cpu._glu_backward(dh, a, b if gated else None, act, inner)
    assert (inner.double() - exact).norm() < 2e-7 * exact.norm()
