"""The project's decoder as a model of the generation engine, bare or wrapped by DDP or FSDP.

Entry points: `DecoderSlots` implements `engine.SlotModel`; `stream_tokens` generates for one
request without a KV cache. All tokens of a step form one sequence of the Root's forward pass. Keys
and values are in a `models.kv_cache.SlotCache`. A transformers class in training has no such cache;
its sequences are recomputed in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmfoundry.inference.engine import Agree, check_length
from llmfoundry.inference.requests import Sampler, SequenceRequest
from llmfoundry.models.attention import longest_document
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.models.kv_cache import TokenChunk
from llmfoundry.ops.attention.base import autocast_dtype

Autocast = Callable[[], AbstractContextManager[Any]]


class DecoderSlots:
    """`SlotModel` of a Root.

    Attributes:
        slots: see SlotModel.
        length: see SlotModel.
        n_tokens: see SlotModel.
        keeps_ended: True.
        in_one_piece: see SlotModel; True for `rope_hf_config.type: dynamic` beyond max_seq_len.
    """

    keeps_ended = True

    def __init__(
        self,
        root: nn.Module,
        *,
        slots: int,
        length: int,
        n_tokens: int | None,
        device: torch.device,
        autocast: Autocast,
    ) -> None:
        """Allocate a KV cache for slots x length tokens.

        Args:
            root: `Root`, bare or wrapped by DDP or FSDP. It is in evaluation mode during a step.
            slots: see SlotModel.
            length: see SlotModel.
            n_tokens: see SlotModel; None: the vocabulary size of the model.
            device: device of the model.
            autocast: returns the autocast context of the forward pass.
        """
        model = decoder_of(root)
        config = model.config
        self._root, self._autocast = root, autocast
        self.slots, self.length, self.n_tokens = slots, length, n_tokens or config.vocab_size
        is_dynamic = config.attn_config.rope_hf_config.type == "dynamic"
        self.in_one_piece = is_dynamic and length > config.max_seq_len
        with autocast():
            dtype = autocast_dtype(device.type, next(root.parameters()).dtype)
        self._cache = model.new_slots(slots=slots, length=length, device=device, dtype=dtype)

    @torch.no_grad()
    def read(self, pieces: Sequence[TokenChunk]) -> Tensor:
        """See SlotModel."""
        # positions in the concatenation of all chunks whose logits are needed
        ends = torch.tensor([len(piece.tokens) for piece in pieces]).cumsum(0).tolist()
        wanted: list[int] = []
        for piece, end in zip(pieces, ends, strict=True):
            wanted += range(end - piece.wanted, end)

        def wanted_logits(model: Decoder, hidden: Tensor) -> Tensor:
            return model.head(hidden[0, wanted])

        was_training = self._root.training
        if was_training:
            self._root.eval()
        tokens = self._cache.begin(pieces)
        with self._autocast():
            logits = self._root(tokens, None, wanted_logits, cache=self._cache)
        if was_training:
            self._root.train()
        return logits[:, : self.n_tokens].float()

    def copy(self, source: int, target: int, length: int) -> None:
        """See SlotModel."""
        self._cache.copy(source, target, length)

    def clear(self, slot: int) -> None:
        """See SlotModel."""
        self._cache.clear(slot)


def decoder_of(root: nn.Module) -> Decoder:
    """Return the model of a Root, bare or wrapped by DDP or FSDP."""
    return cast(Root, getattr(root, "module", root)).model


def first_process(device: torch.device) -> Agree | None:
    """Return a function that broadcasts rank 0's tokens to all ranks; None with one process."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return None

    def agree(tokens: list[int]) -> list[int]:
        shared = torch.tensor(tokens, device=device)
        dist.broadcast(shared, src=0)
        return shared.tolist()

    return agree


def stream_tokens(
    root: nn.Module,
    request: SequenceRequest,
    *,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[None]],
    n_tokens: int | None = None,
    run_pass: Callable[[Sequence[int]], Tensor] | None = None,
) -> Iterator[int]:
    """Yield the tokens of one request, generated without a KV cache.

    Each token needs a forward pass over the full sequence. It is slow, and the reference that the
    engine is compared with. With several ranks, either all ranks call it with the same arguments,
    and rank 0's sampled token is used on all of them; or rank 0 alone calls it, with a `run_pass`
    that includes the other ranks.

    Args:
        root: the model's Root, bare or wrapped by DDP or FSDP.
        request: the prompt and how to continue it.
        device: device of the model.
        autocast: returns the autocast context of the forward pass.
        n_tokens: size of the tokenizer's vocabulary; ids beyond it are never sampled.
        run_pass: returns the logits (V,) after a sequence; None: `next_logits` on this rank.

    Raises:
        UserError: prompt and continuation are longer than the model's learned positions.
    """
    longest = longest_document(decoder_of(root).config)
    check_length(longest, len(request.prompt), request.max_new_tokens)
    sampler = Sampler(request.sampling)
    agree = first_process(device) if run_pass is None else None
    run_pass = run_pass or partial(next_logits, root, device=device, autocast=autocast)
    tokens = list(request.prompt)
    for _ in range(request.max_new_tokens):
        token = sampler.draw(run_pass(tokens)[:n_tokens])
        if agree is not None:
            (token,) = agree([token])
        if token in request.stop_ids:
            return
        yield token
        sampler.count(token)
        tokens.append(token)


@torch.no_grad()  # not around the generator's loop: that would disable gradients in its caller
def next_logits(
    root: nn.Module,
    tokens: Sequence[int],
    *,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[None]],
) -> Tensor:
    """Return the logits (V,) after a sequence of tokens, in fp32 on the CPU."""
    with autocast():
        return root(torch.tensor([tokens], device=device), None, _last_logits).float().cpu()


def _last_logits(model: Decoder, hidden: Tensor) -> Tensor:
    return model.head(hidden[0, -1])
