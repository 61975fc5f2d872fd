"""One step: the loss is the global mean whatever the microbatches, and a NaN never lands."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.packed_layout import IGNORE, Batch, PackedLayout
from llmfoundry.ops.shard_layout import total_norm
from llmfoundry.recipe.optimizer import OPTIMIZERS, GradientClippingConfig, OptimizerConfig
from llmfoundry.train.objective import CrossEntropy, Look
from llmfoundry.train.optim.optimizers import new_optimizer
from llmfoundry.train.step import Guard, StepResult, StepSettings, train_step
from tests.models.test_decoder import make_config

CPU = torch.device("cpu")


def make_root() -> Root:
    model = Decoder(make_config())
    model.init_weights(3)
    return Root(model)


def make_batch() -> Batch:
    """Six rows whose counts of labels differ much: one has none at all."""
    tokens = torch.randint(0, 64, (6, 16), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    for row, kept in enumerate([16, 1, 0, 7, 16, 3]):
        labels[row, kept:] = IGNORE
    return Batch(
        tokens, labels, PackedLayout.from_lengths([[16], [5, 11], [16], [8, 8], [1, 15], [16]])
    )


def make_optimizer(root: Root, name: str = "adamw") -> torch.optim.Optimizer:
    config = OptimizerConfig(name=name, lr=0.01, weight_decay=0.1)
    config.fill()
    return new_optimizer(root.parameters(), config)


def one_step(
    root: Root, batch: Batch, microbatch: int, *, kind: str = "norm", threshold: float = 1e9
) -> StepResult:
    optimizer = make_optimizer(root)
    return train_step(
        root,
        optimizer,
        batch,
        StepSettings(
            microbatch=microbatch,
            autocast=nullcontext,
            clipping=GradientClippingConfig(kind, threshold),
        ),
        number=0,
        guard=Guard(CPU),
    )


def plain_loss(root: Root, batch: Batch) -> torch.Tensor:
    logits = root.model.head(root.model(batch.tokens, batch.layout))
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE
    )


@pytest.mark.parametrize("microbatch", [1, 2, 4, 6])
def test_loss_norm_and_update_do_not_depend_on_the_microbatch(microbatch: int) -> None:
    root, batch = make_root(), make_batch()
    loss = plain_loss(root, batch)
    grads = torch.autograd.grad(loss, list(root.parameters()))
    norm = torch.cat([g.flatten() for g in grads]).norm()
    result = one_step(root, batch, microbatch)
    torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.grad_norm, norm, rtol=1e-5, atol=1e-6)
    assert result.count == 43
    whole = make_root()
    one_step(whole, batch, 6)
    pairs = zip(root.named_parameters(), whole.parameters(), grads, strict=True)
    for (name, ours), theirs, grad in pairs:
        felt = torch.ones_like(grad, dtype=torch.bool)
        if name.endswith("Wqkv.bias"):  # keys' have no gradient but rounding: Adam makes it a step
            felt = grad.abs() > 1e-6
        torch.testing.assert_close(ours[felt], theirs[felt], rtol=1e-4, atol=1e-5)


def test_a_step_without_a_labelled_token_decays_weights_and_ends_nothing() -> None:
    root, batch = make_root(), make_batch()
    before = [p.detach().clone() for p in root.parameters()]
    result = one_step(root, replace(batch, labels=torch.full_like(batch.labels, IGNORE)), 4)
    assert (result.loss, result.grad_norm, result.count) == (0, 0, 0)
    for parameter, was in zip(root.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), was * (1 - 0.01 * 0.1))
    assert one_step(root, batch, 4).count == 43


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_many_gradients_is_exact(dtype: torch.dtype) -> None:
    """Beside fp64; added up one by one in fp32 that of 4M values is 8e-5 wrong."""
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(n, generator=generator).to(dtype) for n in (4_000_001, 7, 65_536)]
    expected = torch.cat(tensors).double().norm().item()
    assert total_norm(tensors).item() == pytest.approx(expected, rel=5e-6)


@pytest.mark.parametrize("kind", ["norm", "value"])
def test_a_gradient_is_clipped_to_the_bound(kind: str) -> None:
    root, batch = make_root(), make_batch()
    seen = {}
    root.model.wte.weight.register_post_accumulate_grad_hook(lambda p: seen.update(grad=p.grad))
    result = one_step(root, batch, 6, kind=kind, threshold=0.01)
    loose = make_root()
    grad = torch.autograd.grad(plain_loss(loose, batch), loose.model.wte.weight)[0]
    expected = {"norm": grad * 0.01 / result.grad_norm, "value": grad.clamp(-0.01, 0.01)}[kind]
    assert grad.abs().max() > 0.01, "the bound must bind"
    torch.testing.assert_close(seen["grad"], expected, rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_is_not_finite_changes_neither_weights_nor_optimizer(name: str) -> None:
    root, batch = make_root(), make_batch()
    optimizer = make_optimizer(root, name)
    guard = Guard(CPU)

    def step(number: int) -> None:
        train_step(
            root,
            optimizer,
            batch,
            StepSettings(microbatch=3, autocast=nullcontext, clipping=GradientClippingConfig()),
            number=number,
            guard=guard,
        )

    step(0)
    assert guard.first_bad() is None
    weights = [p.detach().clone() for p in root.parameters()]
    moments = [optimizer.state[p]["exp_avg"].clone() for p in root.parameters()]
    norm = root.model.blocks[0].norm_1
    handle = norm.register_forward_hook(lambda m, i, out: out * float("nan"))
    step(1)
    handle.remove()
    step(2)  # a sound step after it is not taken either: the run has ended there
    assert guard.first_bad() == 1
    assert all(torch.equal(p, w) for p, w in zip(root.parameters(), weights, strict=True))
    after = [optimizer.state[p]["exp_avg"] for p in root.parameters()]
    assert all(torch.equal(a, m) for a, m in zip(after, moments, strict=True))
    if name != "decoupled_lionw":  # which counts no steps
        assert {optimizer.state[p]["step"].item() for p in root.parameters()} == {1.0}


class LooksFirst(CrossEntropy):
    """Asks for a forward pass before the step, which does not fit."""

    def prepare(self, batch: Batch, look: Look, data_group: dist.ProcessGroup | None) -> Batch:
        def fail(model: Decoder, hidden: torch.Tensor) -> torch.Tensor:
            raise MemoryError

        look(batch, lambda part: fail)
        return batch


def test_a_pass_before_the_step_that_does_not_fit_leaves_dropout_on() -> None:
    """The step is done again, with fewer rows at a time."""
    root = make_root()
    settings = StepSettings(2, nullcontext, GradientClippingConfig(), objective=LooksFirst())
    with pytest.raises(MemoryError):
        train_step(root, make_optimizer(root), make_batch(), settings, number=0, guard=Guard(CPU))
    assert all(part.training for part in root.modules())
