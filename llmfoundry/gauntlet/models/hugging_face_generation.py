"""`Continuer`: greedy continuations by transformers' own `generate`.

`HuggingFaceSubject.generate` calls it. Prompts of a batch are padded on the left and masked, which
a few classes do not honour: that is tried out, and if need be only prompts of one length are
continued together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from llmfoundry.gauntlet.grading.metrics import cut
from llmfoundry.gauntlet.questions import Prompt

if TYPE_CHECKING:
    from llmfoundry.data.text.tokenizer import Tokenizer

T = TypeVar("T")


class Continuer:
    """Continues prompts with a causal LM of transformers.

    Attributes:
        note: what its class cannot do, and what is done instead; None: nothing of that kind.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        batch_tokens: int,
        autocast: bool,
        tolerance: float,
    ) -> None:
        """Take over the model, and try padding on a few random tokens.

        The model's own settings of `generate` are replaced, all but the tokens that end a text:
        they may ask for sampling, or for penalties on repetition, which would not be greedy.

        Args:
            model: transformers' object, in evaluation mode.
            tokenizer: the model's.
            seq_len: tokens that the model reads at most.
            batch_tokens: rows times the longest row, its continuation with it; one row always goes.
            autocast: compute matrix products in bf16.
            tolerance: nats by which padding may change a token's log-probability.
        """
        from transformers import GenerationConfig

        ids = getattr(model.generation_config, "eos_token_id", None)
        model.generation_config = GenerationConfig()
        own = ids if isinstance(ids, list) else [] if ids is None else [ids]
        self._eos_ids = {*own, tokenizer.eos_id}
        self._model, self._tokenizer = model, tokenizer
        self._seq_len, self._batch_tokens = seq_len, batch_tokens
        self._device = next(model.parameters()).device
        self._autocast = autocast
        self.note = self._try_padding(tolerance)

    def generate(self, prompts: Sequence[Prompt]) -> list[str]:
        """The greedy continuation of each prompt, cut before its first stop; all on every rank.

        A text that reaches seq_len ends there.

        Raises:
            FloatingPointError: logits were not finite, so that nothing is the likeliest.
        """
        assert all(0 < len(p.tokens) <= self._seq_len for p in prompts), "prompts are cut before"
        rooms = [min(p.max_new_tokens, self._seq_len - len(p.tokens)) for p in prompts]
        found: dict[int, str | None] = {}
        for batch in dealt(self._batches(prompts, rooms)):
            texts = self._continue([prompts[i] for i in batch], [rooms[i] for i in batch])
            found |= dict(zip(batch, texts, strict=True))
        found = gathered(found)
        if broken := sum(text is None for text in found.values()):
            raise FloatingPointError(
                f"the logits after {broken} of {len(prompts)} prompts, or after others in their"
                " batches, are not finite numbers"
            )
        return [found.get(i) or "" for i in range(len(prompts))]

    def _batches(self, prompts: Sequence[Prompt], rooms: Sequence[int]) -> list[list[int]]:
        """Prompts with room to be continued, the longest first."""
        batches: list[list[int]] = []
        length = room = 0
        for i in sorted(range(len(prompts)), key=lambda i: (-len(prompts[i].tokens), i)):
            if rooms[i] <= 0:
                continue
            own, most = len(prompts[i].tokens), max(room, rooms[i])
            is_full = not batches or (len(batches[-1]) + 1) * (length + most) > self._batch_tokens
            if is_full or (own != length and self.note is not None):
                batches.append([])
                length, most = own, rooms[i]
            batches[-1].append(i)
            room = most
        return batches

    def _continue(self, prompts: Sequence[Prompt], rooms: Sequence[int]) -> list[str | None]:
        """What follows each prompt; None for all where logits were not finite."""
        from transformers import LogitsProcessorList, StoppingCriteriaList

        inputs = self._inputs([prompt.tokens for prompt in prompts])
        start = inputs["input_ids"].shape[1]
        watch = _Watch(prompts, rooms, start, self._tokenizer)
        autocast = torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._autocast)
        with torch.no_grad(), autocast:
            output = self._model.generate(
                **inputs,
                generation_config=self._config(max(rooms), eos_token_id=sorted(self._eos_ids)),
                stopping_criteria=StoppingCriteriaList([watch]),
                logits_processor=LogitsProcessorList([watch.look]),
            )
        if watch.is_broken:
            return [None] * len(prompts)
        texts: list[str | None] = []
        for row, prompt, room in zip(output[:, start:].tolist(), prompts, rooms, strict=True):
            end = next((n for n, t in enumerate(row[:room]) if t in self._eos_ids), room)
            texts.append(cut(self._tokenizer.decode(row[:end]), prompt.stops))
        return texts

    def _inputs(self, prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """A batch of prompts that end in the same column, and where they are."""
        width = max(len(tokens) for tokens in prompts)
        ids = torch.full((len(prompts), width), self._tokenizer.eos_id)
        mask = torch.zeros_like(ids)
        for b, tokens in enumerate(prompts):
            ids[b, width - len(tokens) :] = torch.tensor(tokens)
            mask[b, width - len(tokens) :] = 1
        return {"input_ids": ids.to(self._device), "attention_mask": mask.to(self._device)}

    def _config(self, max_new_tokens: int, **other: Any) -> Any:
        from transformers import GenerationConfig

        pad_id = self._tokenizer.eos_id
        greedy = {"do_sample": False, "num_beams": 1, "pad_token_id": pad_id}
        return GenerationConfig(max_new_tokens=max_new_tokens, **greedy, **other)

    def _try_padding(self, tolerance: float) -> str | None:
        """A note if masked tokens to the left of a prompt change what follows it."""
        a = random_tokens(self._model, self._tokenizer, 20)
        try:
            alone = self._first_logits([a[:6]])[0]
            together = self._first_logits([a[:6], a[6:]])[0]
            error = float((together.log_softmax(-1) - alone.log_softmax(-1)).abs().max())
        except Exception as failure:  # a class that refuses padding says so as it likes
            error, why = math.inf, f"it refuses them ({' '.join(str(failure).split())[:100]})"
        else:
            why = f"it reads padding (off by {error:.1g} nats)"
        if error <= tolerance or math.isnan(error):  # a broken model is told of when it generates
            return None
        return (
            f"{type(self._model).__name__} takes no padded prompts: {why}; only prompts of the same"
            " length are continued together, which is slower"
        )

    def _first_logits(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """(B, 2, V) the logits of two tokens after each prompt, the second of them from a cache."""
        config = self._config(2, output_logits=True, return_dict_in_generate=True)
        with torch.no_grad():
            output = self._model.generate(**self._inputs(prompts), generation_config=config)
        return torch.stack(output.logits, dim=1).float()


class _Watch:
    """Tells transformers' `generate` which rows are done: by a stop, or by their length."""

    def __init__(
        self, prompts: Sequence[Prompt], rooms: Sequence[int], start: int, tokenizer: Tokenizer
    ) -> None:
        self._stops, self._rooms, self._start = [p.stops for p in prompts], rooms, start
        self._tokenizer = tokenizer
        self._done = [False] * len(prompts)
        self.is_broken = False

    def look(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """A logits processor that changes nothing."""
        self.is_broken |= not bool(logits.amax(-1).isfinite().all())
        return logits

    def __call__(self, tokens: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Which rows are done, (B,)."""
        for b, row in enumerate(tokens[:, self._start :].tolist()):
            if not self._done[b]:
                is_long = len(row) >= self._rooms[b]
                self._done[b] = self.is_broken or is_long or self._stopped(b, row)
        return torch.tensor(self._done, device=tokens.device)

    def _stopped(self, b: int, row: list[int]) -> bool:
        """Whether the newest token completed a stop; only as much is decoded as it can span.

        A token is a byte or more; a few more tokens, because some decoders drop the first space
        and characters may be in pieces.
        """
        if not self._stops[b]:
            return False
        span = max(len(stop.encode()) for stop in self._stops[b]) + 4
        tail = self._tokenizer.decode(row[-span:])
        return any(stop in tail for stop in self._stops[b])


def random_tokens(model: Any, tokenizer: Tokenizer, n: int) -> list[int]:
    """Always the same n token ids that both know."""
    vocab = min(tokenizer.vocab_size, model.get_input_embeddings().num_embeddings)
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(0)).tolist()


def dealt(batches: Sequence[T]) -> Sequence[T]:
    """This rank's part: with batches sorted by cost, every rank has about as much to do."""
    if not dist.is_initialized():
        return batches
    return batches[dist.get_rank() :: dist.get_world_size()]


def gathered(found: dict[int, T]) -> dict[int, T]:
    """What all ranks found."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return found
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, found)
    return {number: value for part in parts for number, value in part.items()}
