"""One request's tokens as they are drawn; `stream_tokens` needs no cache for it.

`scripts/generate.py`, `scripts/chat.py` and samples during training read what `engine` draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from llmfoundry.errors import UserError
from llmfoundry.inference.decoder_rows import decoder_of, first_process
from llmfoundry.inference.requests import Engine, Request
from llmfoundry.inference.sampling import Sampler
from llmfoundry.models.attention import longest_document
from llmfoundry.models.decoder import Decoder


def stream(engine: Engine, request: Request) -> Iterator[int]:
    """The tokens of a request as an engine draws them, which nobody else asks meanwhile.

    Raises:
        UserError: it can never run, or logits were not finite, so that nothing can be drawn.
    """
    number = engine.add(request)
    try:
        while engine.busy:
            for one in engine.step():
                if one.finish == "error":
                    raise UserError(
                        "checkpoint: its model's logits are not finite numbers; write another"
                    )
                if one.token is not None:
                    yield one.token
    finally:
        engine.cancel(number)


def draw_all(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """The tokens of many requests, in their order; none come after logits that are not finite."""
    drawn: dict[int, list[int]] = {engine.add(request): [] for request in requests}
    while engine.busy:
        for one in engine.step():
            if one.token is not None:
                drawn[one.request].append(one.token)
    return list(drawn.values())


def stream_tokens(
    root: nn.Module,
    request: Request,
    *,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[None]],
    n_tokens: int | None = None,
) -> Iterator[int]:
    """The same without a cache: every token is drawn after reading all before it anew.

    It is slow, and what the engine is compared with.

    Where several processes hold the model, every one calls this with the same arguments, and
    process 0's draw counts for all.

    Args:
        root: the model's Root, as FSDP or DDP wrapped it or bare.
        request: what is asked.
        device: where the model is.
        autocast: gives the context of the forward pass.
        n_tokens: the tokenizer's size; rows of the embedding beyond it are never drawn.

    Raises:
        UserError: prompt and continuation are longer than the model's learned positions.
    """
    longest = longest_document(decoder_of(root).config)
    check_length(longest, len(request.prompt), request.max_new_tokens)
    sampler, agree = Sampler(request.sampling), first_process(device)
    tokens = torch.tensor([request.prompt], device=device)
    for _ in range(request.max_new_tokens):
        token = sampler.draw(_next_logits(root, tokens, autocast)[:n_tokens])
        if agree is not None:
            (token,) = agree([token])
        if token in request.stop_ids:
            return
        yield token
        sampler.count(token)
        tokens = torch.cat([tokens, torch.tensor([[token]], device=device)], dim=1)


@torch.no_grad()  # here and not around the loop, which would turn gradients off for its reader
def _next_logits(
    root: nn.Module, tokens: Tensor, autocast: Callable[[], AbstractContextManager[None]]
) -> Tensor:
    """Logits (V,) after tokens (1, T), in fp32 on the CPU."""
    with autocast():
        return root(tokens, None, _last_logits).float().cpu()


def _last_logits(model: Decoder, hidden: Tensor) -> Tensor:
    return model.head(hidden[0, -1])


def check_length(longest: int | None, prompt: int, max_new_tokens: int) -> None:
    """ALiBi and rotary positions continue beyond max_seq_len, others end at `longest`.

    Raises:
        UserError: naming the key and the longest that is possible.
    """
    if prompt == 0:
        raise UserError("prompt: is empty; begin it with the end-of-text token")
    if longest is None or prompt + max_new_tokens - 1 <= longest:
        return
    learned = f"the model's positions end at {longest} tokens (its max_seq_len)"
    if prompt > longest:
        raise UserError(f"prompt: has {prompt} tokens, but {learned}; write at most {longest}")
    raise UserError(
        f"max_new_tokens: {max_new_tokens} after a prompt of {prompt} tokens, but {learned};"
        f" write at most {longest - prompt + 1}"
    )
