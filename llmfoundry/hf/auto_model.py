"""transformers' own classes for the decoder: `import llmfoundry.hf`, then `AutoModelForCausalLM`.

For models that no architecture of transformers expresses; `write.py` writes their folders. The
import registers model_type `llmfoundry`, so that `from_pretrained`, `generate`, the Trainer and
evaluation harnesses work with them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from llmfoundry.errors import UserError
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.moe import ExpertWeights
from llmfoundry.models.router import Router, Routing
from llmfoundry.ops.packed_layout import PackedLayout
from llmfoundry.recipe.architecture.model import ModelConfig
from llmfoundry.recipe.front.typed import Problem, build, to_dict

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
        config = build(ModelConfig, settings or {}, problems, "settings.")
        if problems:
            raise UserError(*(problem.line for problem in problems))
        config.fill()
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

    def __init__(self, config: LlmfoundryConfig) -> None:
        super().__init__(config)
        self.model = Decoder(build(ModelConfig, config.settings, []))
        self.post_init()

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
            position_ids: must be what attention_mask implies.
            past_key_values: earlier tokens of the rows.
            labels: (B, T), not shifted; -100 counts nothing.
            use_cache: keep keys and values; the config's wish where unset.
            logits_to_keep: last positions to compute logits of; 0: all.
            return_dict: false: a tuple.
            kwargs: of the loss.

        Raises:
            ValueError: what the decoder cannot do: padded rows with a cache, other positions.
        """
        if kwargs.pop("inputs_embeds", None) is not None:
            raise ValueError("inputs_embeds: the decoder takes input_ids only")
        wants_cache = self.config.use_cache if use_cache is None else use_cache
        cache = None if past_key_values is None else _Cache(past_key_values)
        layout = _layout(attention_mask)
        if layout is not None and cache is not None:
            raise ValueError("padded rows have no key-value cache; pass use_cache=False")
        if layout is None and cache is None and wants_cache and not self.training:
            past_key_values = DynamicCache()
            cache = _Cache(past_key_values)
        _check_positions(position_ids, layout, cache.length if cache else 0)
        hidden, routing = self.model.run(input_ids, layout, cache)
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


def _layout(mask: Tensor | None) -> PackedLayout | None:
    """Text and padding of each row as documents of their own; None where nothing is padded."""
    if mask is None or bool(mask.all()):
        return None
    lengths = []
    for row in mask.bool().cpu():
        kinds, counts = torch.unique_consecutive(row, return_counts=True)
        if int(kinds.sum()) > 1:
            raise ValueError("attention_mask: a row's text is in pieces; it must be one")
        lengths.append(counts.tolist())
    return PackedLayout.from_lengths(lengths).to(mask.device)


def _check_positions(given: Tensor | None, layout: PackedLayout | None, past: int) -> None:
    """Positions other than those that the decoder counts itself would be ignored: refuse them."""
    if given is None or layout is not None:
        return
    own = torch.arange(past, past + given.shape[-1], device=given.device)
    if not bool((given == own).all()):
        raise ValueError("position_ids: the decoder counts positions itself; leave them out")


AutoConfig.register("llmfoundry", LlmfoundryConfig, exist_ok=True)
AutoModelForCausalLM.register(LlmfoundryConfig, LlmfoundryForCausalLM, exist_ok=True)
