"""transformers' own classes behind the decoder's contract, compared with the classes themselves."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from llmfoundry.builders.pretrained import fill_class
from llmfoundry.distributed.activation_checkpoint import wrap_blocks
from llmfoundry.errors import UserError
from llmfoundry.hf.causal_lm import HFCausalLM
from llmfoundry.hf.class_masks import visible
from llmfoundry.hf.class_weights import check_class, class_config
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.distillation import DistillationWeights
from llmfoundry.ops.packed_layout import Batch, PackedLayout, TeacherTokens
from tests.tiny import activations

ROWS = 128
PLAIN = {
    **{"vocab_size": ROWS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 64, "max_position_embeddings": 64},
}
FEW = {"num_key_value_heads": 2, "head_dim": 8}
WINDOW = {**FEW, "sliding_window": 4}
GPT2 = {"vocab_size": ROWS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MPT = {"vocab_size": ROWS, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}
MAMBA = {"vocab_size": ROWS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
KINDS: dict[str, dict[str, Any]] = {  # and what the class does that is its own
    "llama": {**PLAIN, "num_key_value_heads": 2},
    "gpt_neox": PLAIN,  # attention and feed-forward layer side by side
    "qwen3": {**PLAIN, **FEW},  # norms of heads
    "gemma2": {**PLAIN, **WINDOW},  # windows in every other layer, softcaps
    "gemma3_text": {**PLAIN, **WINDOW, "sliding_window_pattern": 2},
    "mistral": {**PLAIN, **WINDOW},  # one window for all
    "phi": PLAIN,  # a bias in the head
    "gpt2": GPT2,  # learned positions
    "mpt": MPT,  # ALiBi, and no argument for positions
    "granite": {**PLAIN, "num_key_value_heads": 2, "logits_scaling": 3.0},
    "mixtral": {**PLAIN, "num_key_value_heads": 2, "num_local_experts": 4},
    "mamba": MAMBA,  # a state in place of attention
    "phi3": {**PLAIN, "num_key_value_heads": 2, "pad_token_id": 0,  # other angles beyond 10 tokens
             "original_max_position_embeddings": 10, "rope_parameters": {
                 "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
                 "long_factor": [8.0, 6.0, 4.0, 2.0]}},
}  # fmt: skip
LAYOUT = [[7, 13], [13, 7]]


def save_class(kind: str, folder: Path, **changes: Any) -> Any:
    """The class in evaluation, its weights random and large, also in `folder`."""
    config = AutoConfig.for_model(kind, **{**KINDS[kind], **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2, generator=generator)
            if parameter.ndim == 1:
                parameter += 1
    model.save_pretrained(folder)
    return model


def held(folder: Path, **changes: Any) -> HFCausalLM:
    """The folder's model as a run holds it."""
    written = {**AutoConfig.from_pretrained(folder).to_dict(), **changes}
    config = class_config(written, attn_impl=None, code=None)
    assert not check_class(config, folder)
    model = HFCausalLM(config)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    fill_class(model, folder)
    return model.eval()


def tokens() -> Tensor:
    return torch.randint(0, ROWS, (2, 20), generator=torch.Generator().manual_seed(5))


def test_an_expert_of_another_shape_is_one_line(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3}
    config = AutoConfig.for_model("mixtral", vocab_size=ROWS, **shape, **heads)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "experts.1.w1" in name)
    save_file(tensors | {name: tensors[name][1:].clone()}, file)
    with pytest.raises(UserError, match=r"experts\.0\.w1\.weight: cannot become .*gate_up_proj"):
        held(tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_a_row_are_apart(kind: str, tmp_path: Path) -> None:
    """Each document's logits are the class's own of it alone, whatever the others say."""
    theirs = save_class(kind, tmp_path)
    ours, x, layout = held(tmp_path), tokens(), PackedLayout.from_lengths(LAYOUT)
    torch.testing.assert_close(ours.head(ours(x)), theirs(x).logits, rtol=1e-4, atol=1e-4)
    packed = ours.head(ours(x, layout))
    for row, lengths in enumerate(LAYOUT):
        for part, logits in zip(x[row].split(lengths), packed[row].split(lengths), strict=True):
            torch.testing.assert_close(logits, theirs(part[None]).logits[0], rtol=1e-4, atol=1e-4)
    changed = x.clone()
    changed[:, :7] = (x[:, :7] + 1) % ROWS
    others = ours.head(ours(changed, layout))
    for row, start in ((0, 7), (1, 13)):
        # to rounding: a mixture multiplies each expert's tokens together, whosever they are
        torch.testing.assert_close(others[row, start:], packed[row, start:], rtol=1e-5, atol=1e-5)
    assert not torch.equal(others[:, :7], packed[:, :7])


DYNAMIC = {"max_position_embeddings": 10, "rope_parameters": {
    "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(("kind", "changes"), [("phi3", {}), ("llama", DYNAMIC)])
def test_angles_are_those_of_each_documents_own_length(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Not of the longest document, nor of the padding; the class itself takes the longest's."""
    theirs = save_class(kind, tmp_path, **changes)
    ours, x = held(tmp_path), tokens()

    def alone(ids: Tensor) -> Tensor:
        theirs(ids[None, :1])  # dynamic angles stay those of a longer text until a short one
        return theirs(ids[None]).logits[0]

    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    lengths, padding = [[4, 12, 4], [3, 17]], (4, 5)
    found = ours.head(ours(x, PackedLayout.from_lengths(lengths, padding)))
    for row, parts in enumerate(lengths):
        ends = np.cumsum(parts).clip(max=20 - padding[row])
        for begin, end in pairwise([0, *ends]):
            if end > begin:
                close(found[row, begin:end], alone(x[row, begin:end]))
    found = ours.head(ours(x, PackedLayout.from_lengths([[20], [20]], (13, 0))))
    close(found[0, :7], alone(x[0, :7]))
    assert (theirs(x).logits[0, :7] - found[0, :7]).abs().max() > 0.01
    paths = PackedLayout.from_ends([[8] * 4 + [6] * 2 + [8] * 2 + [20] * 12])
    branches = ours.head(ours(x[:1], paths))[0]
    close(branches[8:], alone(x[0, 8:]))
    close(branches[6:8], alone(x[0, [0, 1, 2, 3, 6, 7]])[4:])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gemma2", "mpt", "mamba"])
def test_branches_of_a_tree_are_apart(kind: str, tmp_path: Path) -> None:
    """As the gauntlet packs texts that begin alike: each token is computed on its path alone."""
    theirs = save_class(kind, tmp_path)
    ours, x = held(tmp_path), tokens()[:1]
    ends = [[15] * 4 + [10] * 6 + [15] * 5 + [20] * 5]
    layout = PackedLayout.from_ends(ends)
    found = ours.head(ours(x, layout))[0]
    for token in (3, 9, 14, 19):
        path = visible(layout)[0, token].nonzero()[:, 0]
        expected = theirs(x[:, path]).logits[0]
        torch.testing.assert_close(found[path], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "phi", "gemma2", "granite"])
def test_the_chunked_loss_is_the_class_s(kind: str, tmp_path: Path) -> None:
    """With the z-loss and all gradients; heads with a bias, a factor and a cap among them."""
    theirs = save_class(kind, tmp_path)
    ours, x = held(tmp_path), tokens()
    labels = torch.where(torch.rand(x.shape) < 0.3, -100, x.roll(-1, 1))
    logits = theirs(x).logits
    z_loss = 0.01 * logits[labels != -100].logsumexp(-1).square().sum()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") + z_loss

    def losses(model: Decoder, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return model.losses(hidden, labels, z_loss_weight=0.01)

    loss, z_part = Root(ours)(x, None, losses)  # type: ignore
    torch.testing.assert_close((loss, z_part), (expected, z_loss), rtol=1e-5, atol=1e-5)
    expected.backward()
    loss.backward()
    for (name, p), q in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("kind", ["llama", "phi", "gemma2", "granite"])
def test_a_class_learns_from_a_teacher(kind: str, tmp_path: Path) -> None:
    """By PyTorch's divergence of all tokens; heads with a bias, a factor and a cap among them."""
    theirs = save_class(kind, tmp_path)
    ours, x = held(tmp_path), tokens()
    labels = torch.where(torch.rand(x.shape) < 0.3, -100, x.roll(-1, 1))
    log_probs = torch.randn(*x.shape, ROWS).log_softmax(-1)
    logits, keep = theirs(x).logits, labels != -100
    student = logits[keep].log_softmax(-1)
    kl = F.kl_div(student, log_probs[keep], reduction="sum", log_target=True)
    nats = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    top = log_probs.topk(ROWS)
    batch = Batch(x, labels, None, teacher=TeacherTokens(top.indices.int(), top.values))
    by = DistillationWeights(0.3, 0.7, 0.0)

    def distilled(model: Decoder, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(model.distillation(hidden, batch, by))

    total, cross_entropy, divergence, _ = Root(ours)(x, None, distilled)  # type: ignore
    torch.testing.assert_close((cross_entropy, divergence), (nats, 0.7 * kl), rtol=1e-4, atol=1e-3)
    (0.3 * nats + 0.7 * kl).backward()
    total.backward()
    for (name, p), q in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-3, msg=name)


def test_checkpointing_wraps_the_class_s_blocks(tmp_path: Path) -> None:
    save_class("gpt_neox", tmp_path)
    gradients = []
    for checkpointing in (False, True):
        model = held(tmp_path)
        root = Root(model).train()  # type: ignore[arg-type]
        wrap_blocks(root, activations(root, checkpointing), compile_mode=None)
        hidden = root(tokens(), PackedLayout.from_lengths(LAYOUT), lambda _, hidden: hidden)
        hidden.square().sum().backward()
        gradients.append([p.grad for p in model.hf.gpt_neox.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_routers_losses_are_the_class_s(tmp_path: Path) -> None:
    """Where config.json has output_router_logits, as transformers adds them."""
    on = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    theirs = save_class("mixtral", tmp_path, **on)
    ours, x = held(tmp_path).train(), tokens()
    both = theirs.train()(x, labels=x)
    _, routing = ours.run(x)
    assert routing is not None
    torch.testing.assert_close(routing.losses["lbl"], 0.5 * both.aux_loss * len(x))
    assert routing.load.sum().item() == 2 * 2 * x.numel()
    assert held(tmp_path, output_router_logits=False).train().run(x)[1] is None


@torch.no_grad()
def test_experts_apart_in_the_file_are_held_together(tmp_path: Path) -> None:
    """What transformers writes has a tensor for each expert; its class holds them in one."""
    theirs = save_class("mixtral", tmp_path)
    ours = held(tmp_path)
    for (name, p), q in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(p, q), name


@torch.no_grad()
def test_new_rows_are_the_mean_of_the_others(tmp_path: Path) -> None:
    for tied in (True, False):
        folder = tmp_path / str(tied)
        theirs = save_class("gpt_neox", folder, tie_word_embeddings=tied)
        written = {**theirs.config.to_dict(), "vocab_size": ROWS + 64}
        model = HFCausalLM(class_config(written, attn_impl=None, code=None))
        model.to_empty(device="cpu")
        fill_class(model, folder)
        for ours, old in (
            (model.hf.gpt_neox.embed_in.weight, theirs.gpt_neox.embed_in.weight),
            (model.hf.lm_head.weight, theirs.lm_head.weight),
        ):
            assert torch.equal(ours[:ROWS], old)
            expected = old.double().mean(0).float().expand(64, -1)
            torch.testing.assert_close(ours[ROWS:], expected)
        assert (model.hf.lm_head.weight is model.hf.gpt_neox.embed_in.weight) == tied


def test_weights_that_do_not_fit_the_class_are_refused_by_name(tmp_path: Path) -> None:
    theirs = save_class("gpt_neox", tmp_path)
    state = {name: p.detach().clone() for name, p in theirs.state_dict().items()}
    bias = "gpt_neox.layers.1.attention.dense.bias"
    check = partial(theirs.save_pretrained, tmp_path)
    check(state_dict={k: v for k, v in state.items() if k != bias})
    with pytest.raises(UserError, match=f"^{bias}: the tensor is missing"):
        held(tmp_path)
    check(state_dict={**state, "gpt_neox.router": torch.ones(3)})
    with pytest.raises(UserError, match=r"gpt_neox\.router: GPTNeoXForCausalLM has no such"):
        held(tmp_path)
    check(state_dict={**state, bias: torch.ones(3)})
    with pytest.raises(UserError, match=f"{bias} .*different models"):
        held(tmp_path)
