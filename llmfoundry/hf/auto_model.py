"""transformers' own classes for the decoder: `import llmfoundry.hf`, then `AutoModelForCausalLM`.

For models that no architecture of transformers expresses; `write_folder.py` writes their folders.
The import registers model_type `llmfoundry`, so that `from_pretrained`, `generate`, the Trainer and
evaluation harnesses work with them. Engines that batch continuously bring their own keys, values
and attention (transformers' attention interface); what they cannot attend with is refused, since
they would leave it out without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llmfoundry.errors import UserError
from llmfoundry.models.attention import KeysValues
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.kv_cache import SlottedCache
from llmfoundry.models.moe import ExpertWeights
from llmfoundry.models.router import Router, Routing
from llmfoundry.ops.attention.base import AttentionSpec
from llmfoundry.ops.attention.select import AttentionKernels
from llmfoundry.ops.packed_layout import PackedLayout
from llmfoundry.recipe.model import ModelConfig
from llmfoundry.recipe.typed import Problem, build, to_dict

OURS = (None, "eager", "sdpa")  # attention that is the decoder's own, by its own kernels
LOADED = {"missing_keys": "is not in the file", "unexpected_keys": "has no place in the model"}


class LlmfoundryConfig(PreTrainedConfig):
    """config.json of an exported decoder.

    Attributes:
        settings: the recipe's `model` section, filled. The names that transformers asks for
            (hidden_size, vocab_size …) are read from it.
    """

    model_type = "llmfoundry"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(self, settings: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Build from a `model` section; an absent one stands for the recipe's defaults."""
        problems: list[Problem] = []
        section = build(ModelConfig, settings or {}, problems, "settings.")
        if problems:
            raise UserError(*(problem.line for problem in problems))
        config = section.resolve()
        self.settings = to_dict(config)
        self.use_cache = kwargs.pop("use_cache", True)
        kwargs["tie_word_embeddings"] = config.tie_word_embeddings
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.settings["vocab_size"]

    @vocab_size.setter
    def vocab_size(self, rows: int) -> None:
        self.settings["vocab_size"] = rows  # transformers sets it when it resizes embeddings

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.settings["d_model"]

    @property
    def num_hidden_layers(self) -> int:
        """Blocks."""
        return self.settings["n_layers"]

    @property
    def num_attention_heads(self) -> int:
        """Query heads."""
        return self.settings["n_heads"]

    @property
    def num_key_value_heads(self) -> int:
        """Key-value heads."""
        return self.settings["attn_config"]["kv_n_heads"]

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.settings["head_dim"]

    @property
    def max_position_embeddings(self) -> int:
        """Longest row."""
        return self.settings["max_seq_len"]


class LlmfoundryForCausalLM(PreTrainedModel, GenerationMixin):
    """The decoder as transformers calls models."""

    config_class = LlmfoundryConfig
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: LlmfoundryConfig) -> None:
        super().__init__(config)
        self.model = Decoder(build(ModelConfig, config.settings, []).resolve())
        for index, block in enumerate(self.model.blocks):  # what attention functions ask for
            attn = cast(Any, block).attn
            attn.layer_idx, attn.config, attn.is_causal = index, config, True
            attn.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        if self._attends_elsewhere({}):
            self.check_engine()
        self.post_init()

    def check_engine(self) -> None:
        """See that an engine's attention can be this model's.

        Raises:
            ValueError: it has positions, windows or caps that engines leave out.
        """
        attn, layers = self.model.config.attn_config, self.model.layers
        reasons = {
            "alibi": attn.alibi,
            "sliding_window_size": any(layer.window >= 0 for layer in layers),
            "reuse_kv_layer_idx": any(layer.kv_from != i for i, layer in enumerate(layers)),
            "attn_logit_softcapping": attn.attn_logit_softcapping is not None,
            "rope_hf_config.type: dynamic": attn.rope_hf_config.type == "dynamic",
        }
        for name, is_there in reasons.items():
            if is_there:
                raise ValueError(
                    f"attn_config.{name}: engines that batch continuously cannot attend so, and"
                    " would answer wrongly; use generate, or llmfoundry's own serve"
                )

    def _attends_elsewhere(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether an engine calls: it chose another attention, or hands over a paged cache."""
        return self.config._attn_implementation not in OURS or kwargs.get("cache") is not None

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Transformers' continuous batching, which `generate_batch` uses, where it is right."""
        self.check_engine()
        return cast(Any, super()).init_continuous_batching(*args, **kwargs)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Transformers' `from_pretrained`; weights that are missing or find no place are an error.

        Raises:
            UserError: names such a tensor, where transformers draws it at random or leaves it out.
        """
        asked = kwargs.pop("output_loading_info", False)
        model, info = cast(Any, super()).from_pretrained(*args, output_loading_info=True, **kwargs)
        for kind, why in LOADED.items():
            for name in sorted(info[kind]):
                raise UserError(f"{name}: {why}; config.json and the weights disagree")
        return (model, info) if asked else model

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits, and the loss where labels are given.

        While training, a mixture's loss has the router's losses in it, weighted as the settings
        say. Biases that balance experts stay what they are: only the project's trainer moves them.

        Args:
            input_ids: (B, T).
            attention_mask: (B, past + T), 0 before or after a row's text. Such rows have no cache.
            position_ids: what attention_mask implies; or of packed rows, each document's from 0.
            past_key_values: earlier tokens of the rows.
            labels: (B, T), not shifted; -100 counts nothing.
            use_cache: keep keys and values; the config's wish where unset.
            logits_to_keep: last positions to compute logits of; 0: all.
            return_dict: false: a tuple.
            kwargs: of the loss; or of an engine's attention.

        Raises:
            ValueError: what the decoder cannot do: padded rows with a cache, other positions; or
                an engine cannot.
        """
        if kwargs.pop("inputs_embeds", None) is not None:
            raise ValueError("inputs_embeds: the decoder takes input_ids only")
        if self._attends_elsewhere(kwargs):
            self.check_engine()
            engine = _EngineCache(self, position_ids, attention_mask, kwargs)
            hidden, routing = self.model.run(input_ids, cache=engine)
        else:
            wants_cache = self.config.use_cache if use_cache is None else use_cache
            if past_key_values is None and wants_cache and not self.training:
                past_key_values = _new_cache(attention_mask, position_ids)
            cache = None if past_key_values is None else _Cache(past_key_values)
            layout = _layout(attention_mask, position_ids, cache)
            hidden, routing = self.model.run(input_ids, layout, cast(Any, cache))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.head(hidden[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **kwargs)
            if routing is not None:
                loss = loss + _router_losses(routing, labels, kwargs.get("num_items_in_batch"))
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
        return output if return_dict is not False else output.to_tuple()

    def _init_weights(self, module: nn.Module) -> None:
        """Transformers' start of what it does not find in a file."""
        super()._init_weights(module)
        if isinstance(module, ExpertWeights):
            for name, parameter in module.named_parameters():
                std = 0.0 if name.endswith("bias") else 0.02
                nn.init.normal_(parameter, std=std)
        if isinstance(module, Router) and hasattr(module, "bias_steps"):
            nn.init.zeros_(module.bias_steps)

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Transformers' `generate`; padded batches do without a cache."""
        mask = kwargs.get("attention_mask")
        if mask is not None and not bool(mask.all()):
            kwargs["use_cache"] = False
        return cast(Any, super()).generate(inputs, *args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""
        return self.model.wte

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding; a tied head follows it."""
        self.model.wte = cast(nn.Embedding, value)
        self.model.config.vocab_size = self.model.wte.num_embeddings

    def get_output_embeddings(self) -> nn.Module | None:
        """The head; None where the embedding serves as it."""
        return getattr(self.model, "lm_head", None)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head."""
        self.model.lm_head = new_embeddings


class _Cache:
    """transformers' cache under the interface of `models.attention.KVCache`."""

    def __init__(self, cache: Cache) -> None:
        if not isinstance(cache, DynamicCache):
            raise ValueError(f"cache: {type(cache).__name__}; the decoder works with DynamicCache")
        self._cache, self.length = cache, int(cache.get_seq_length())

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (B, T, KV, hd) of one layer; all of its keys and values so far."""
        k, v = self._cache.update(k.transpose(1, 2), v.transpose(1, 2), layer)
        return k.transpose(1, 2), v.transpose(1, 2)


def _router_losses(routing: Routing, labels: Tensor, whole: Tensor | int | None) -> Tensor | float:
    """Balancing losses, a mean over rows; of `whole` targets in a batch, the share that is here."""
    mean = sum(routing.losses.values()) / len(labels)
    return mean if whole is None else mean * (labels[:, 1:] != -100).sum() / whole


def _new_cache(mask: Tensor | None, positions: Tensor | None) -> Cache | None:
    """A cache for rows that are one text each."""
    return DynamicCache() if _layout(mask, positions, None) is None else None


def _layout(
    mask: Tensor | None, positions: Tensor | None, cache: _Cache | None
) -> PackedLayout | None:
    """The documents of rows: text and padding, or where positions begin again; None: one each."""
    if mask is not None and not bool(mask.all()):
        lengths, device = _padded(mask), mask.device
    elif positions is None or _is_one(positions, past := cache.length if cache else 0):
        return None
    elif past:
        raise ValueError("position_ids: the decoder counts positions itself; leave them out")
    else:
        lengths, device = _packed(positions), positions.device
    if cache is not None:
        raise ValueError("padded or packed rows have no key-value cache; pass use_cache=False")
    return PackedLayout.from_lengths(lengths).to(device)


def _padded(mask: Tensor) -> list[list[int]]:
    lengths = []
    for row in mask.bool().cpu():
        kinds, counts = torch.unique_consecutive(row, return_counts=True)
        if int(kinds.sum()) > 1:
            raise ValueError("attention_mask: a row's text is in pieces; it must be one")
        lengths.append(counts.tolist())
    return lengths


def _is_one(positions: Tensor, past: int) -> bool:
    own = torch.arange(past, past + positions.shape[-1], device=positions.device)
    return bool((positions == own).all())


def _packed(positions: Tensor) -> list[list[int]]:
    """Lengths of the documents, whose positions count from 0 each."""
    lengths = []
    for row in positions.cpu():
        starts = [*torch.where(row == 0)[0].tolist(), len(row)]
        counts = [end - start for start, end in pairwise(starts)]
        counted = [place for count in counts for place in range(count)]
        if row.tolist() != counted:
            raise ValueError(
                "position_ids: the decoder counts positions itself, from 0 in each document; leave"
                " them out"
            )
        lengths.append(counts)
    return lengths


class _EngineCache(SlottedCache):
    """An engine's keys, values and attention, called as transformers' models call them."""

    def __init__(
        self,
        model: LlmfoundryForCausalLM,
        positions: Tensor | None,
        mask: Any,
        kwargs: dict[str, Any],
    ) -> None:
        if positions is None:
            raise ValueError("position_ids: are required by an engine's attention")
        self.positions = positions
        self._blocks, self._mask, self._kwargs = model.model.blocks, mask, kwargs
        self._function = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
        self._layer, self._scale = 0, 1.0

    def append(self, layer: int, k: Tensor, v: Tensor) -> KeysValues:
        """Leave storing them to the engine's attention, which follows."""
        self._layer = layer
        return k, v

    def plan(self, kernels: AttentionKernels, spec: AttentionSpec, dtype: torch.dtype) -> Any:
        """All layers attend alike."""
        self._scale = spec.scale
        return self

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, rotary: bool) -> Tensor:
        """(1, N, H, hd) of q (1, N, H, hd) and the new tokens' k and v (1, N, KV, hd)."""
        module = cast(Any, self._blocks[self._layer]).attn
        heads = (x.transpose(1, 2) for x in (q, k, v))
        mixed, _ = self._function(module, *heads, self._mask, scaling=self._scale, **self._kwargs)
        return mixed.reshape(q.shape)


AutoConfig.register("llmfoundry", LlmfoundryConfig, exist_ok=True)
AutoModelForCausalLM.register(LlmfoundryConfig, LlmfoundryForCausalLM, exist_ok=True)
