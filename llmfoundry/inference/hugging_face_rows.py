"""`HuggingFaceRows`: any causal language model of transformers as `engine` calls models.

Sequences that draw are rows of one of transformers' own caches, aligned at their ends: what is
missing to the longest is padding on the left, which the mask hides, as in `generate`. What a class
makes of masks, positions and caches is not believed but tried: the first pass compares each way, on
a few tokens, with what the class says of the same texts read anew, and takes the first that agrees.
A prompt is read in one piece, by itself.
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
"""All in one pass; each in its own, with a cache, as of classes without attention; or without."""
PROBE = (5, 9)  # tokens of the texts that ways are tried on
DRAWN = 3  # and so many one by one after them


@dataclass(eq=False)
class _Text:
    """A sequence that is in a slot.

    Attributes:
        tokens: all of it that was read.
        cache: its own, of one row; None: it is in the cache of all, or there is none.
    """

    tokens: list[int] = field(default_factory=list)
    cache: Any = None


def angles_by_length(config: Any) -> bool:
    """Whether rotary angles of a text depend on the longest of those that share its pass."""
    return any(rope.get("rope_type") in ("dynamic", "longrope") for rope in _ropes(config))


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Rotary settings, those of kinds of layers too."""
    ropes = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))]


class HuggingFaceRows:
    """`Rows` of a model of transformers.

    Attributes:
        slots: see Rows.
        length: see Rows.
        n_tokens: see Rows.
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
        """Empty slots; their caches take memory as sequences grow.

        Args:
            model: transformers' object, on its device; in evaluation mode from now on.
            slots: see Rows.
            length: see Rows.
            n_tokens: see Rows; None: all that the head has.
            autocast: compute matrix products in bf16.
            way: one of WAYS; None: what is found to agree.
        """
        self._model, self._autocast = model.eval(), autocast
        self.slots, self.length = slots, length
        self.n_tokens = n_tokens or int(model.config.get_text_config().vocab_size)
        self._device = next(model.parameters()).device
        takes = inspect.signature(model.forward).parameters
        self._takes = {name for name in ("position_ids", "logits_to_keep") if name in takes}
        self._cache_name = next((n for n in ("past_key_values", "cache_params") if n in takes), "")
        self._turns = {  # lengths beyond which all angles are others (LongRoPE)
            rope.get("original_max_position_embeddings")
            for rope in _ropes(model.config)
            if rope.get("rope_type") == "longrope"
        }
        self._texts: list[_Text] = [_Text() for _ in range(slots)]
        self._together: Any = None
        self._rows: list[_Text] = []  # of the cache of all
        self.way = way or self._tried()

    @torch.no_grad()
    def read(self, pieces: Sequence[TokenChunk]) -> Tensor:
        """See Rows."""
        drawing = [piece for piece in pieces if piece.past]
        texts = [self._texts[piece.slot] for piece in drawing]
        for piece, text in zip(drawing, texts, strict=True):
            text.tokens += piece.tokens
        found = [self._draw(texts)] if drawing else []
        for piece in pieces:
            if not piece.past:
                self._texts[piece.slot] = _Text([*piece.tokens])
                found.append(self._read_prompt(self._texts[piece.slot], piece.wanted))
        return torch.cat(found)[:, : self.n_tokens].float()

    def copy(self, source: int, target: int, length: int) -> None:
        """See Rows; the whole of it."""
        self._texts[target] = self._texts[source]

    def clear(self, slot: int) -> None:
        """See Rows: a text that is gone is not looked at again."""

    def _read_prompt(self, text: _Text, wanted: int) -> Tensor:
        """Logits (wanted, V) after a text that was not read before."""
        from transformers import DynamicCache

        # without the config: layers with a window keep what is before it too, under their mask
        cache = DynamicCache() if self.way == "together" else None
        ids = [text.tokens]
        if self.way == "anew":
            return self._call(ids, wanted).logits[0, -wanted:]
        out = self._call(ids, wanted, cache=cache)
        text.cache = getattr(out, self._cache_name)
        return out.logits[0, -wanted:]

    def _draw(self, texts: list[_Text]) -> Tensor:
        """Logits (n, V) after texts whose last token is new."""
        if self.way == "anew":
            return torch.cat([self._call([text.tokens], 1).logits[:, -1] for text in texts])
        if self.way == "apart":
            parts = []
            for text in texts:
                turned = (
                    len(text.tokens) - 1 in self._turns
                )  # those in the cache are of other angles
                new, cache = (text.tokens, None) if turned else (text.tokens[-1:], text.cache)
                out = self._call([new], 1, cache=cache)
                text.cache = getattr(out, self._cache_name)
                parts.append(out.logits[:, -1])
            return torch.cat(parts)
        if texts != self._rows:
            self._together, self._rows = self._merged(texts), texts
            for text in texts:
                text.cache = None
        lengths = torch.tensor([len(text.tokens) for text in texts], device=self._device)
        places = torch.arange(int(lengths.max()), device=self._device)
        mask = (places >= lengths.max() - lengths[:, None]).long()
        given: dict[str, Any] = {"attention_mask": mask}
        if "position_ids" in self._takes:
            given["position_ids"] = lengths[:, None] - 1
        last = [text.tokens[-1:] for text in texts]
        return self._call(last, 1, cache=self._together, **given).logits[:, -1]

    def _merged(self, texts: Sequence[_Text]) -> Any:
        """A cache of these rows, from the cache of all before and those of single texts."""
        from transformers import DynamicCache

        width = max(len(text.tokens) for text in texts) - 1
        places = {id(text): row for row, text in enumerate(self._rows)}
        whole = DynamicCache()
        for i in range(len((texts[0].cache or self._together).layers)):
            rows: list[list[Tensor]] = [[], []]
            for text in texts:
                source = (self._together if text.cache is None else text.cache).layers[i]
                row = places[id(text)] if text.cache is None else 0
                held = len(text.tokens) - 1
                for kind, tensor in zip(rows, (source.keys, source.values), strict=True):
                    kept = tensor[row, :, tensor.shape[-2] - held :]
                    kind.append(pad(kept, (0, 0, width - held, 0)))
            whole.update(torch.stack(rows[0]), torch.stack(rows[1]), i)
        return whole

    def _call(self, ids: list[list[int]], wanted: int, *, cache: Any = None, **given: Any) -> Any:
        """The class's forward pass; without a cache where none is to be made."""
        if "logits_to_keep" in self._takes:
            given["logits_to_keep"] = wanted
        if cache is not None:
            given[self._cache_name] = cache
        tokens = torch.tensor(ids, device=self._device)
        keep = self.way != "anew"
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._autocast):
            return self._model(input_ids=tokens, use_cache=keep, return_dict=True, **given)

    def _tried(self) -> str:
        """The first way that gives what the class gives of each text read anew."""
        generator = torch.Generator().manual_seed(0)
        known = (min(self.n_tokens, 1000), (sum(PROBE) + 2 * DRAWN,))
        tokens = torch.randint(*known, generator=generator).tolist()
        texts = [tokens[: PROBE[0] + DRAWN], tokens[PROBE[0] + DRAWN :]]
        expected = self._logits("anew", texts)
        first = 1 if angles_by_length(self._model.config) else 0
        for way in WAYS[first:-1]:
            try:
                found = self._logits(way, texts)
            except Exception:  # a class that takes no such mask or cache: the next way
                continue
            exact = expected.dtype == torch.float32 and not self._autocast
            exact = exact and next(self._model.parameters()).dtype == torch.float32
            if (found - expected).abs().max() <= (1e-3 if exact else 0.2) * expected.abs().mean():
                return way
        return WAYS[-1]

    def _logits(self, way: str, texts: Sequence[Sequence[int]]) -> Tensor:
        """What a way gives of texts of two lengths, whose last tokens are drawn."""
        rows = HuggingFaceRows(
            self._model, slots=2, length=self.length, autocast=self._autocast, way=way
        )
        first = [TokenChunk(i, 0, tuple(text[:-DRAWN]), 1) for i, text in enumerate(texts)]
        found = [rows.read(first)]
        for n in range(DRAWN, 0, -1):
            new = [TokenChunk(i, len(t) - n, (t[len(t) - n],), 1) for i, t in enumerate(texts)]
            found.append(rows.read(new))
        return torch.cat(found)


def end_ids(ids: Any, tokenizer: Tokenizer) -> set[int]:
    """The tokens that end a text: `eos_token_id` as transformers has it, and the tokenizer's."""
    own = ids if isinstance(ids, list) else [] if ids is None else [ids]
    return {*own, tokenizer.eos_id}
