"""The decoder as a class of transformers, for models that no architecture of transformers fits.

`import llmfoundry.hf` registers model_type `llmfoundry`, so that `AutoModelForCausalLM`,
`generate`, the Trainer and evaluation harnesses work with exported folders (`write_folder.py`
writes them). Engines with continuous batching bring their own KV cache and attention (transformers'
attention interface). Settings that such an engine would silently ignore are rejected.
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

OURS = (None, "eager", "sdpa")  # attn_implementation values that use the decoder's kernels
LOADED = {"missing_keys": "is not in the file", "unexpected_keys": "has no place in the model"}


class LlmfoundryConfig(PreTrainedConfig):
    """config.json of an exported decoder.

    Attributes:
        settings: the resolved `model` section of the recipe. Attributes that transformers reads
            (hidden_size, vocab_size …) are derived from it.
    """

    model_type = "llmfoundry"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(self, settings: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Resolve a `model` section; None: the recipe's defaults."""
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
        """Number of rows of the embedding."""
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
        """Number of blocks."""
        return self.settings["n_layers"]

    @property
    def num_attention_heads(self) -> int:
        """Number of query heads."""
        return self.settings["n_heads"]

    @property
    def num_key_value_heads(self) -> int:
        """Number of key-value heads."""
        return self.settings["attn_config"]["kv_n_heads"]

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.settings["head_dim"]

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence, in tokens."""
        return self.settings["max_seq_len"]


class LlmfoundryForCausalLM(PreTrainedModel, GenerationMixin):
    """The decoder with the interface of transformers' causal language models."""

    config_class = LlmfoundryConfig
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: LlmfoundryConfig) -> None:
        super().__init__(config)
        self.model = Decoder(build(ModelConfig, config.settings, []).resolve())
        for index, block in enumerate(
            self.model.blocks
        ):  # attributes that attention functions read
            attn = cast(Any, block).attn
            attn.layer_idx, attn.config, attn.is_causal = index, config, True
            attn.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        if self._attends_elsewhere({}):
            self.check_engine()
        self.post_init()

    def check_engine(self) -> None:
        """Check that the attention of an external engine computes this model correctly.

        Raises:
            ValueError: the model has ALiBi, latent attention, sinks, windows, shared keys and
                values, a soft cap or dynamic rotary positions, which engines ignore.
        """
        attn, layers = self.model.config.attn_config, self.model.layers
        reasons = {
            "alibi": attn.alibi,
            "attn_type: multihead_latent_attention": attn.is_latent,
            "sinks": attn.sinks,
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
        """Return whether an external engine calls, with its own attention or a paged cache."""
        return self.config._attn_implementation not in OURS or kwargs.get("cache") is not None

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Start transformers' continuous batching (`generate_batch`), after `check_engine`."""
        self.check_engine()
        return cast(Any, super()).init_continuous_batching(*args, **kwargs)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Call transformers' `from_pretrained`; missing and unexpected weights are an error.

        Raises:
            UserError: with the name of the tensor. Transformers would initialize a missing tensor
                at random and ignore an unexpected one.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = cast(Any, super()).from_pretrained(*args, output_loading_info=True, **kwargs)
        for kind, why in LOADED.items():
            for name in sorted(info[kind]):
                raise UserError(f"{name}: {why}; config.json and the weights disagree")
        return (model, info) if wants_info else model

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
        """Return logits, and the loss if there are labels.

        In training, the loss of a mixture-of-experts model includes the router's auxiliary losses.
        Biases that balance the expert load are not updated: only the project's trainer updates
        them.

        Args:
            input_ids: (B, T).
            attention_mask: (B, past + T), 0 at padding before or after a text. Padded batches
                cannot have a cache.
            position_ids: positions that attention_mask implies; or positions of packed documents,
                each from 0.
            past_key_values: KV cache of earlier tokens.
            labels: (B, T), not shifted; -100 is ignored.
            use_cache: return a KV cache; None: as the config specifies.
            logits_to_keep: number of last positions to compute logits for; 0: all.
            return_dict: False: return a tuple.
            kwargs: arguments of the loss function or of an engine's attention.

        Raises:
            ValueError: padding with a cache, unsupported positions, or a model that the engine
                does not support.
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
        positions_kept = (
            slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        )
        logits = self.model.head(hidden[:, positions_kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **kwargs)
            if routing is not None:
                loss = loss + _router_losses(routing, labels, kwargs.get("num_items_in_batch"))
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
        return output if return_dict is not False else output.to_tuple()

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize parameters that transformers does not find in a file."""
        super()._init_weights(module)
        if isinstance(module, ExpertWeights):
            for name, parameter in module.named_parameters():
                std = 0.0 if name.endswith("bias") else 0.02
                nn.init.normal_(parameter, std=std)
        if isinstance(module, Router) and hasattr(module, "bias_steps"):
            for buffer in module.buffers(recurse=False):
                nn.init.zeros_(buffer)

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Call transformers' `generate`, without a cache for padded batches."""
        mask = kwargs.get("attention_mask")
        if mask is not None and not bool(mask.all()):
            kwargs["use_cache"] = False
        return cast(Any, super()).generate(inputs, *args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.model.wte

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding, and with it a tied head."""
        self.model.wte = cast(nn.Embedding, value)
        self.model.config.vocab_size = self.model.wte.num_embeddings

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the head; None if it is tied to the embedding."""
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
        """Store k, v (B, T, KV, hd) of one layer; return all keys and values of the layer."""
        k, v = self._cache.update(k.transpose(1, 2), v.transpose(1, 2), layer)
        return k.transpose(1, 2), v.transpose(1, 2)


def _router_losses(routing: Routing, labels: Tensor, whole: Tensor | int | None) -> Tensor | float:
    """Return the auxiliary losses, averaged over sequences.

    `whole` is the number of targets in the full batch: the losses are scaled by this microbatch's
    share of them. None: not scaled.
    """
    mean = sum(routing.losses.values()) / len(labels)
    return mean if whole is None else mean * (labels[:, 1:] != -100).sum() / whole


def _new_cache(mask: Tensor | None, positions: Tensor | None) -> Cache | None:
    """Return a new cache; None for padded or packed sequences, which cannot have one."""
    return DynamicCache() if _layout(mask, positions, None) is None else None


def _layout(
    mask: Tensor | None, positions: Tensor | None, cache: _Cache | None
) -> PackedLayout | None:
    """Return the layout of padded or packed sequences; None: each sequence is one document.

    Padding is a document of its own. Packed documents begin where positions restart at 0.
    """
    past = cache.length if cache else 0
    if mask is not None and not bool(mask.all()):
        lengths, device = _padded(mask), mask.device
    elif positions is None or _is_one(positions, past):
        return None
    elif past:
        raise ValueError("position_ids: the decoder counts positions itself; leave them out")
    else:
        lengths, device = _packed(positions), positions.device
    if cache is not None:
        raise ValueError("padded or packed rows have no key-value cache; pass use_cache=False")
    return PackedLayout.from_lengths(lengths).to(device)


def _padded(mask: Tensor) -> list[list[int]]:
    """Return the lengths of text and padding of each sequence, in the order of the mask."""
    lengths = []
    for row in mask.bool().cpu():
        is_text, run_lengths = torch.unique_consecutive(row, return_counts=True)
        if int(is_text.sum()) > 1:
            raise ValueError("attention_mask: a row's text is in pieces; it must be one")
        lengths.append(run_lengths.tolist())
    return lengths


def _is_one(positions: Tensor, past: int) -> bool:
    """Return whether positions continue a document of `past` tokens."""
    new_positions = torch.arange(past, past + positions.shape[-1], device=positions.device)
    return bool((positions == new_positions).all())


def _packed(positions: Tensor) -> list[list[int]]:
    """Return the lengths of packed documents, whose positions each start at 0."""
    lengths = []
    for row in positions.cpu():
        boundaries = [*torch.where(row == 0)[0].tolist(), len(row)]
        document_lengths = [end - start for start, end in pairwise(boundaries)]
        expected_positions = [i for length in document_lengths for i in range(length)]
        if row.tolist() != expected_positions:
            raise ValueError(
                "position_ids: the decoder counts positions itself, from 0 in each document; leave"
                " them out"
            )
        lengths.append(document_lengths)
    return lengths


class _WithoutSinks:
    """An attention layer without its attribute `sinks`, which transformers takes for a tensor."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name == "sinks":
            raise AttributeError(name)
        return getattr(self._module, name)


class _EngineCache(SlottedCache):
    """Adapter to an engine's KV cache and attention, through transformers' attention interface."""

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
        """Return k and v: the engine's attention function stores them."""
        self._layer = layer
        return k, v

    def plan(self, kernels: AttentionKernels, spec: AttentionSpec, dtype: torch.dtype) -> Any:
        """Note the attention scale, which is the same in all layers."""
        self._scale = spec.scale
        return self

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, rotary: bool, sinks: Tensor | None
    ) -> Tensor:
        """Return the attention output (1, N, H, hd) of q (1, N, H, hd) and k, v (1, N, KV, hd)."""
        assert sinks is None, "`check_engine` refuses it"
        module = _WithoutSinks(cast(Any, self._blocks[self._layer]).attn)
        heads = (x.transpose(1, 2) for x in (q, k, v))
        mixed, _ = self._function(module, *heads, self._mask, scaling=self._scale, **self._kwargs)
        return mixed.reshape(q.shape)


AutoConfig.register("llmfoundry", LlmfoundryConfig, exist_ok=True)
AutoModelForCausalLM.register(LlmfoundryConfig, LlmfoundryForCausalLM, exist_ok=True)
