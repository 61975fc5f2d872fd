"""Continue a prompt, token by token; `scripts/generate.py` and samples during training call it.

The logits come from the Root, so that it works under DDP and FSDP too; draws are made on the CPU
from fp32 logits with a generator of their own, so that a seed means the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmfoundry.errors import UserError
from llmfoundry.inference.sampling import sample_token
from llmfoundry.models.attention import KVCache, longest_document
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.attention.base import autocast_dtype

_CUT = "\ufffd"  # what decoders write for an incomplete character


def stream_tokens(
    root: nn.Module,
    eos_id: int,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[None]],
    kv_cache: bool = True,
    n_tokens: int | None = None,
) -> Iterator[int]:
    """The continuation, a token at a time; it ends before end-of-text or after max_new_tokens.

    Where several processes hold the model, every one calls this with the same arguments, and
    process 0's draw counts for all.

    Args:
        root: the model's Root, as FSDP or DDP wrapped it or bare.
        eos_id: end-of-text.
        prompt_ids: at least one token; training documents begin with end-of-text.
        max_new_tokens: tokens to draw at most.
        temperature: 0 takes the likeliest token.
        top_k: draw from the k likeliest only.
        top_p: draw from the likeliest that together reach this probability.
        seed: of the draws.
        device: where the model is.
        autocast: gives the context of the forward pass.
        kv_cache: keep keys and values; False computes them again for every token.
        n_tokens: the tokenizer's size; rows of the embedding beyond it are never drawn.

    Raises:
        UserError: prompt and continuation are longer than the model's learned positions.
    """
    model = cast(Root, getattr(root, "module", root)).model
    check_length(longest_document(model.config), len(prompt_ids), max_new_tokens)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([prompt_ids], device=device)
    fed = len(prompt_ids) + max_new_tokens - 1  # the last token is never read
    cache = _new_cache(root, fed, device, autocast) if kv_cache else None
    for _ in range(max_new_tokens):
        logits = _next_logits(root, tokens, cache, autocast)[:n_tokens]
        token = _agree(sample_token(logits, temperature, top_k, top_p, generator), device)
        if token == eos_id:
            return
        yield token
        new = torch.tensor([[token]], device=device)
        tokens = new if cache is not None else torch.cat([tokens, new], dim=1)


def check_length(longest: int | None, prompt: int, max_new_tokens: int) -> None:
    """ALiBi and rotary positions continue beyond max_seq_len, learned ones end at `longest`.

    Raises:
        UserError: naming the key and the longest that is possible.
    """
    if prompt == 0:
        raise UserError("prompt: is empty; begin it with the end-of-text token")
    if longest is None or prompt + max_new_tokens - 1 <= longest:
        return
    learned = f"the model's learned positions end at {longest} (model.max_seq_len)"
    if prompt > longest:
        raise UserError(f"prompt: has {prompt} tokens, but {learned}; write at most {longest}")
    raise UserError(
        f"max_new_tokens: {max_new_tokens} after a prompt of {prompt} tokens, but {learned};"
        f" write at most {longest - prompt + 1}"
    )


def _new_cache(
    root: nn.Module,
    length: int,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[None]],
) -> KVCache:
    with autocast():
        dtype = autocast_dtype(device.type, next(root.parameters()).dtype)
    model = cast(Root, getattr(root, "module", root)).model
    return model.new_cache(batch=1, max_len=length, device=device, dtype=dtype)


@torch.no_grad()  # here and not around the loop, which would turn gradients off for its reader
def _next_logits(
    root: nn.Module,
    tokens: Tensor,
    cache: KVCache | None,
    autocast: Callable[[], AbstractContextManager[None]],
) -> Tensor:
    """Logits (V,) after tokens (1, T), in fp32 on the CPU."""
    with autocast():
        return root(tokens, None, _last_logits, cache=cache).float().cpu()


def _last_logits(model: Decoder, hidden: Tensor) -> Tensor:
    return model.head(hidden[0, -1])


def _agree(token: int, device: torch.device) -> int:
    """Process 0's token: logits may differ in the last bit, and all must stop together."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return token
    shared = torch.tensor(token, device=device)
    dist.broadcast(shared, src=0)
    return int(shared)


def stream_text(tokens: Iterable[int], decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """Text of `tokens` in pieces of whole characters, as soon as each is certain.

    Args:
        tokens: one at a time.
        decode: the tokenizer's.
    """
    context: list[int] = []  # tokens already shown, so that a piece decodes as it does in the text
    pending: list[int] = []
    shown = 0
    for token in tokens:
        pending.append(token)
        text = decode(context + pending)
        certain = text.rstrip(_CUT)
        if len(certain) > shown:
            yield certain[shown:]
            shown = len(certain)
        if certain == text:
            context, pending = pending, []
            shown = len(decode(context))
    rest = decode(context + pending)[shown:] if pending else ""
    if rest:
        yield rest
