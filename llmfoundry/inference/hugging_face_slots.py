"""Any causal language model of transformers as a model of the generation engine.

Entry point: `HuggingFaceSlots` implements `engine.SlotModel`. Decoding sequences are the batch of
one transformers cache, padded on the left as in transformers' `generate`. Classes differ in their
support of masks, positions and caches. The constructor therefore compares each strategy of `WAYS`
on a few tokens with a forward pass over the full sequences, and uses the first one that agrees.
Each prompt is prefilled in one forward pass by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.models.kv_cache import TokenChunk

WAYS = ("together", "apart", "anew")
"""Strategies: one batched pass with a cache; one pass and one cache for each sequence, as for
classes without attention; one pass for each sequence without a cache."""
PROBE = (5, 9)  # lengths of the prompts that strategies are compared on
DRAWN = 3  # tokens that are decoded one by one after each of them


@dataclass(eq=False)
class _Text:
    """A sequence in a slot.

    Attributes:
        tokens: the tokens that were read.
        cache: transformers cache of this sequence (batch size 1); None: the sequence is in the
            batched cache, or there is no cache.
    """

    tokens: list[int] = field(default_factory=list)
    cache: Any = None


def angles_by_length(config: Any) -> bool:
    """Return whether rotary angles depend on the longest sequence of the batch."""
    return any(rope.get("rope_type") in ("dynamic", "longrope") for rope in _ropes(config))


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return the rotary settings of the model, and those of its layer types."""
    ropes = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))]


class HuggingFaceSlots:
    """`SlotModel` of a model of transformers.

    Attributes:
        slots: see SlotModel.
        length: see SlotModel.
        n_tokens: see SlotModel.
        keeps_ended: False.
        in_one_piece: True.
        way: one of WAYS.
    """

    keeps_ended, in_one_piece = False, True

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        length: int,
        n_tokens: int | None = None,
        autocast: bool = False,
        way: str | None = None,
    ) -> None:
        """Choose a strategy. Caches are allocated as sequences grow.

        Args:
            model: model of transformers, on its device; it is set to evaluation mode.
            slots: see SlotModel.
            length: see SlotModel.
            n_tokens: see SlotModel; None: the vocabulary size of the head.
            autocast: compute matmuls in bf16.
            way: one of WAYS; None: the first one that agrees with the class.
        """
        self._model, self._autocast = model.eval(), autocast
        self.slots, self.length = slots, length
        self.n_tokens = n_tokens or int(model.config.get_text_config().vocab_size)
        self._device = next(model.parameters()).device
        takes = inspect.signature(model.forward).parameters
        self._takes = {name for name in ("position_ids", "logits_to_keep") if name in takes}
        self._cache_name = next((n for n in ("past_key_values", "cache_params") if n in takes), "")
        self._turns = {  # lengths beyond which all rotary angles change (LongRoPE)
            rope.get("original_max_position_embeddings")
            for rope in _ropes(model.config)
            if rope.get("rope_type") == "longrope"
        }
        self._texts: list[_Text] = [_Text() for _ in range(slots)]
        self._together: Any = None
        self._rows: list[_Text] = []  # sequences of the batched cache
        self.way = way or self._choose_way()

    @torch.no_grad()
    def read(self, pieces: Sequence[TokenChunk]) -> Tensor:
        """See SlotModel."""
        # decoding sequences in one batch
        decoding = [piece for piece in pieces if piece.past]
        texts = [self._texts[piece.slot] for piece in decoding]
        for piece, text in zip(decoding, texts, strict=True):
            text.tokens += piece.tokens
        logits = [self._decode(texts)] if decoding else []
        # prompts one by one
        for piece in pieces:
            if not piece.past:
                self._texts[piece.slot] = _Text([*piece.tokens])
                logits.append(self._prefill(self._texts[piece.slot], piece.wanted))
        return torch.cat(logits)[:, : self.n_tokens].float()

    def copy(self, source: int, target: int, length: int) -> None:
        """See SlotModel; the full sequence is shared."""
        self._texts[target] = self._texts[source]

    def clear(self, slot: int) -> None:
        """See SlotModel; nothing to do, because sequences never read another sequence's slot."""

    def _prefill(self, text: _Text, wanted: int) -> Tensor:
        """Return the last logits (wanted, V) of a new prompt."""
        from transformers import DynamicCache

        # without the config, windowed layers keep tokens outside the window; their mask hides them
        cache = DynamicCache() if self.way == "together" else None
        ids = [text.tokens]
        if self.way == "anew":
            return self._call(ids, wanted).logits[0, -wanted:]
        out = self._call(ids, wanted, cache=cache)
        text.cache = getattr(out, self._cache_name)
        return out.logits[0, -wanted:]

    def _decode(self, texts: list[_Text]) -> Tensor:
        """Return logits (n, V) after n sequences, each with one new token at its end."""
        if self.way == "anew":
            return torch.cat([self._call([text.tokens], 1).logits[:, -1] for text in texts])
        if self.way == "apart":
            return torch.cat([self._decode_one(text) for text in texts])
        # the batch changed: rebuild the batched cache
        if texts != self._rows:
            self._together, self._rows = self._merged_cache(texts), texts
            for text in texts:
                text.cache = None
        # left padding
        lengths = torch.tensor([len(text.tokens) for text in texts], device=self._device)
        columns = torch.arange(int(lengths.max()), device=self._device)
        mask = (columns >= lengths.max() - lengths[:, None]).long()
        arguments: dict[str, Any] = {"attention_mask": mask}
        if "position_ids" in self._takes:
            arguments["position_ids"] = lengths[:, None] - 1
        last = [text.tokens[-1:] for text in texts]
        return self._call(last, 1, cache=self._together, **arguments).logits[:, -1]

    def _decode_one(self, text: _Text) -> Tensor:
        """Return logits (1, V) after a sequence with a cache of its own."""
        if len(text.tokens) - 1 in self._turns:  # cached keys have different rotary angles
            out = self._call([text.tokens], 1)
        else:
            out = self._call([text.tokens[-1:]], 1, cache=text.cache)
        text.cache = getattr(out, self._cache_name)
        return out.logits[:, -1]

    def _merged_cache(self, texts: Sequence[_Text]) -> Any:
        """Build a batched cache from the previous batched cache and caches of single sequences."""
        from transformers import DynamicCache

        width = max(len(text.tokens) for text in texts) - 1
        batch_index = {id(text): row for row, text in enumerate(self._rows)}
        merged = DynamicCache()
        for i in range(len((texts[0].cache or self._together).layers)):
            keys: list[Tensor] = []
            values: list[Tensor] = []
            for text in texts:
                source = (self._together if text.cache is None else text.cache).layers[i]
                row = batch_index[id(text)] if text.cache is None else 0
                n_cached = len(text.tokens) - 1
                for padded, tensor in ((keys, source.keys), (values, source.values)):
                    cached = tensor[row, :, tensor.shape[-2] - n_cached :]
                    padded.append(pad(cached, (0, 0, width - n_cached, 0)))
            merged.update(torch.stack(keys), torch.stack(values), i)
        return merged

    def _call(
        self, ids: list[list[int]], wanted: int, *, cache: Any = None, **arguments: Any
    ) -> Any:
        """Run the class's forward pass."""
        if "logits_to_keep" in self._takes:
            arguments["logits_to_keep"] = wanted
        if cache is not None:
            arguments[self._cache_name] = cache
        tokens = torch.tensor(ids, device=self._device)
        use_cache = self.way != "anew"
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._autocast):
            return self._model(input_ids=tokens, use_cache=use_cache, return_dict=True, **arguments)

    def _choose_way(self) -> str:
        """Return the first strategy that agrees with forward passes over the full sequences."""
        generator = torch.Generator().manual_seed(0)
        vocabulary = min(self.n_tokens, 1000)
        n_tokens = sum(PROBE) + 2 * DRAWN
        tokens = torch.randint(vocabulary, (n_tokens,), generator=generator).tolist()
        texts = [tokens[: PROBE[0] + DRAWN], tokens[PROBE[0] + DRAWN :]]
        expected = self._logits("anew", texts)
        first = 1 if angles_by_length(self._model.config) else 0
        for way in WAYS[first:-1]:
            try:
                logits = self._logits(way, texts)
            except Exception:  # the class does not support such a mask or cache: the next strategy
                continue
            exact = expected.dtype == torch.float32 and not self._autocast
            exact = exact and next(self._model.parameters()).dtype == torch.float32
            if (logits - expected).abs().max() <= (1e-3 if exact else 0.2) * expected.abs().mean():
                return way
        return WAYS[-1]

    def _logits(self, way: str, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits of a strategy: the prompts are prefilled, the last tokens decoded."""
        rows = HuggingFaceSlots(
            self._model, slots=2, length=self.length, autocast=self._autocast, way=way
        )
        first = [TokenChunk(i, 0, tuple(text[:-DRAWN]), 1) for i, text in enumerate(texts)]
        logits = [rows.read(first)]
        for n in range(DRAWN, 0, -1):
            new = [TokenChunk(i, len(t) - n, (t[len(t) - n],), 1) for i, t in enumerate(texts)]
            logits.append(rows.read(new))
        return torch.cat(logits)


def end_ids(ids: Any, tokenizer: Tokenizer) -> set[int]:
    """Return the end-of-text tokens: transformers' `eos_token_id` and that of the tokenizer."""
    model_ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    return {*model_ids, tokenizer.eos_id}
