"""Compiled blocks on a GPU: how many graphs packed sequences need, and what eager blocks launch.

Blocks run on fake CUDA tensors, with the attention that a H100 gets, and without inductor.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fake_cuda import run_on_fake_cuda

SCRIPT = """
import json
import torch._dynamo
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from llmfoundry.distributed.activation_checkpoint import wrap_blocks
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.packed_layout import PackedLayout
from llmfoundry.plan.count import fill
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import TrainRecipe

CUDA = torch.device("cuda")
LENGTHS = [[[200, 312], [512]], [[100, 412], [256, 256]], [[13] * 39 + [5], [511, 1]]]
LAYOUTS = [PackedLayout.from_lengths(lengths) for lengths in LENGTHS]
NONE = {  # operators that launch nothing
    "_unsafe_view", "alias", "as_strided", "detach", "device", "empty", "empty_like", "expand",
    "new_empty", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unsqueeze", "view",
}
Decoder.init_weights = lambda self, seed: None  # there is no generator of random numbers
torch.cuda.get_device_capability = lambda *device: (9, 0)
torch.Tensor.pin_memory = lambda self, *device: self
graphs, compile = [], torch.compile

def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward

def replaced(function=None, **options):
    "Blocks are compiled by our backend; FlexAttention compiles itself."
    return compile(function, backend=backend) if "mode" in options else compile(function, **options)

class Launches(TorchDispatchMode):
    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += func.overloadpacket.__name__ not in NONE
        return func(*args, **(kwargs or {}))

def passes(name, overrides, n_layers, mode):
    off = [f"parallel.activation_{what}=none" for what in ("checkpointing", "compression")]
    words = [*overrides, "max_seq_len=512", *off]
    recipe = checked(TrainRecipe, f"yamls/{name}.yaml", words).resolve()
    recipe.model.vocab_size, recipe.model.n_layers = 512, n_layers
    with torch.device("meta"):
        root = Root(Decoder(recipe.model))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fill(root, torch.bfloat16, device=CUDA)
        wrap_blocks(root, recipe.parallel.activation_memory(n_layers), compile_mode=mode)
        for layout in (layout.to(CUDA) for layout in LAYOUTS):
            hidden = root(torch.zeros(2, 512, dtype=torch.int64, device=CUDA), layout,
                          lambda model, hidden: hidden)
            hidden.sum().backward()

def launches(name, overrides, n_layers):
    with Launches() as counted:
        passes(name, overrides, n_layers, None)
    return counted.n / len(LAYOUTS)

name, *overrides = NAMES
per_block = launches(name, overrides, 3) - launches(name, overrides, 2)
torch.compile = replaced
passes(name, [word for word in overrides if "alibi" not in word], 3, "default")
print(json.dumps([per_block, len(graphs), dict(counters["graph_break"])]))
"""


@pytest.mark.parametrize(
    ("names", "launches"),
    [
        # FlexAttention, which ALiBi needs, is not eager
        pytest.param(("mpt-125m", "model.attn_config.alibi=false"), 58, marks=pytest.mark.slow),
        pytest.param(("llama-1b",), 123, marks=pytest.mark.slow),
        (("dbrx-mini",), 133),
    ],
)
def test_packed_sequences_need_two_graphs_without_breaks(
    names: tuple[str, ...], launches: int
) -> None:
    """The first batch is compiled for its longest document, the second for any length.

    `launches`: operators of the forward and backward pass of an eager block that are not views.
    """
    printed = run_on_fake_cuda(SCRIPT.replace("NAMES", repr(names))).splitlines()[-1]
    found: list[Any] = json.loads(printed)
    assert found[1:] == [2, {}]
    assert found[0] <= launches
