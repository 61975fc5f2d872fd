"""Causal language models of transformers behind the interface of the project's decoder.

Entry point: `HFCausalLM`. Hidden states and head are separate, so that the loss can compute logits
in chunks. The class's blocks are located, so that FSDP, activation checkpointing and compilation
can wrap them. Packed documents never attend to each other. Classes differ in how they isolate
documents and in their head. The first forward pass therefore compares several strategies, on a few
tokens, with the class's results for single documents, and uses the first one that agrees. The last
strategy, one sequence for each document, is correct for every causal class, including state-space
models.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llmfoundry.errors import UserError, one_line
from llmfoundry.hf.class_masks import WAYS, document_rows, mask_types, padding_mask
from llmfoundry.hf.rope_by_document import RopeByDocument
from llmfoundry.hf.token_rows import head_operands
from llmfoundry.inference.hugging_face_slots import angles_by_length
from llmfoundry.models.adapter import is_added
from llmfoundry.models.kv_cache import TokenChunk
from llmfoundry.models.router import Routing
from llmfoundry.ops.distillation import (
    DistillationLosses,
    DistillationWeights,
    linear_distillation,
    logit_distillation,
)
from llmfoundry.ops.loss import cap, chunk_tokens, linear_losses
from llmfoundry.ops.packed_layout import IGNORE, Batch, PackedLayout
from llmfoundry.recipe.model import HFModelConfig

PROBE = (6, 3, 8, 1, 6)  # lengths of the documents that strategies are compared on
OWN_HEAD = "own"  # the class computes the logits


class HFCausalLM(nn.Module):
    """A transformers model with the interface that the trainer, gauntlet and generator expect.

    Args:
        config: see `HFModelConfig`.

    Attributes:
        hf: the transformers model.
        ties: names of tied parameters: the first name, and all other names of the same parameter.
        blocks: the list of transformer layers.
        peft_config: configuration of the peft adapter; None: no adapter.
        loss_chunk: number of tokens whose logits the loss materializes at a time; None: chosen for
            the device.
    """

    loss_chunk: int | None = None

    def __init__(self, config: HFModelConfig) -> None:
        super().__init__()
        self.config, self.peft_config = config, None
        self.hf = build_class(config)
        self.hf.config.use_cache = False
        self._buffers_made = {name: b.detach().clone() for name, b in self.hf.named_buffers()}
        self.ties = _ties(self.hf)
        self._blocks = [_find_blocks(self.base, config.n_layers)]  # in a list: not registered again
        self._rope = RopeByDocument(self.base)
        self._ways: dict[bool, str] = {}  # by whether layouts branch
        # OWN_HEAD, or scale and softcap of the logits; None until the first pass
        self._head: str | tuple[float, float | None] | None = None
        self._takes = set(inspect.signature(self.base.forward).parameters)

    def computed(self) -> set[str]:
        """Return the names of buffers. Their values are computed, not loaded from a file."""
        return {f"hf.{name}" for name in self._buffers_made}

    def vocabulary(self) -> set[str]:
        """Return the names of parameters with one row per token: embedding, head, head's bias."""
        modules = (self.hf.get_input_embeddings(), self.hf.get_output_embeddings())
        ids = {id(p) for module in modules if module is not None for p in module.parameters()}
        every = self.named_parameters(remove_duplicate=False)
        return {name for name, p in every if id(p) in ids and not is_added(name)}

    @property
    def base(self) -> nn.Module:
        """The model without its head."""
        return getattr(self.hf, self.hf.base_model_prefix)

    @property
    def blocks(self) -> nn.ModuleList:
        """The layers, which are sharded, checkpointed and compiled one by one."""
        return self._blocks[0]

    @property
    def embedding_weight(self) -> Tensor:
        """(V, D), the token embedding."""
        return self.hf.get_input_embeddings().weight

    @property
    def head_weight(self) -> Tensor:
        """(V, D), the output head."""
        return self.hf.get_output_embeddings().weight

    def _apply(self, fn: Any, recurse: bool = True) -> HFCausalLM:
        """Apply `fn` as nn.Module does, but keep ties, and keep buffers in their dtype.

        nn.Module would untie parameters, cast position tables, and leave them uninitialized after
        a move from the meta device.
        """
        super()._apply(fn, recurse)
        for first, others in self.ties.items():
            shared = self.hf.get_parameter(first)
            for name in others:
                module, _, last = name.rpartition(".")
                self.hf.get_submodule(module)._parameters[last] = shared
        for name, made in self._buffers_made.items():
            module, _, last = name.rpartition(".")
            buffers = self.hf.get_submodule(module)._buffers
            device = fn(torch.empty(0, device=buffers[last].device)).device
            buffers[last] = made.to(device)
        return self

    def new_slots(
        self, *, slots: int, length: int, device: torch.device, dtype: torch.dtype
    ) -> SlotTokens:
        """Return slots that store tokens only; sequences are recomputed for every new token."""
        return SlotTokens(slots, device)

    def forward(self, tokens: Tensor, layout: PackedLayout | None = None) -> Tensor:
        """Return hidden states (B, T, D) of tokens (B, T) after the final norm."""
        return self.run(tokens, layout)[0]

    def run(
        self, tokens: Tensor, layout: PackedLayout | None = None, cache: SlotTokens | None = None
    ) -> tuple[Tensor, Routing | None]:
        """Return hidden states and, if config.json enables output_router_logits, the routing.

        Args:
            tokens: (B, T).
            layout: documents of the sequences; None: each sequence is one document.
            cache: slots of the generator; `tokens` are then the new tokens of all slots, (1, N).
        """
        if not self._ways:
            self._try(tokens.device)
        if cache is not None:
            assert layout is None, "each sequence is one document"
            return self._of_slots(cache), None
        return self._compute(tokens, layout)

    def _compute(self, x: Tensor, layout: PackedLayout | None) -> tuple[Tensor, Routing | None]:
        """Run tokens (B, T) with the strategy that was chosen for the layout."""
        if layout is None or (layout.ends is None and all(len(n) == 1 for n in layout.lengths)):
            return self._call(x, {}, layout)
        way = self._ways[layout.ends is not None]
        if way == "rows":
            return self._by_rows(x, layout)
        return self._call(x, WAYS[way](self, layout, self.embedding_dtype), layout)

    def _of_slots(self, cache: SlotTokens) -> Tensor:
        """Return the hidden states (1, N, D) of the new tokens of all slots."""
        sequences, positions = cache.rows()  # positions are indices of the flattened sequences
        n_sequences, width = sequences.shape
        padding = tuple(width - end for end in cache.ends())
        layout = PackedLayout.from_lengths([[width]] * n_sequences, padding)
        hidden, _ = self._compute(sequences, layout)
        return hidden.flatten(0, 1)[positions][None]

    @property
    def embedding_dtype(self) -> torch.dtype:
        """Dtype of the weights and of additive masks."""
        return self.embedding_weight.dtype

    def _call(
        self, x: Tensor, arguments: dict[str, Any], layout: PackedLayout | None
    ) -> tuple[Tensor, Routing | None]:
        """Call the base model on tokens (B, T); return hidden states (B, T, D) and the routing.

        Args:
            x: tokens (B, T).
            arguments: other arguments of the base model's forward pass.
            layout: documents of the sequences, for RoPE and the routing.
        """
        arguments = {"input_ids": x, **arguments}
        has_routing = self.training and bool(getattr(self.hf.config, "output_router_logits", False))
        if has_routing:
            arguments["output_router_logits"] = True
        with self._rope.within(layout):
            out = self.base(use_cache=False, return_dict=True, **arguments)
        hidden = out[0]
        logits = getattr(out, "router_logits", None) if has_routing else None
        routing = self._routing(logits, x, layout) if logits else None
        return hidden, routing

    def _by_rows(self, x: Tensor, layout: PackedLayout) -> tuple[Tensor, Routing | None]:
        """Run each document, or each path of a tree, as a sequence, padded at its end."""
        # gather: (R, L) tokens of the documents
        back, sources = document_rows(layout)
        back, sources = back.to(x.device), sources.to(x.device)
        unpacked = x.flatten(0, 1)[sources.clamp(min=0)]
        width = sources.shape[1]
        padding = tuple(int(width - n) for n in (sources >= 0).sum(1))
        one_document = [[width]] * len(padding)
        padded = PackedLayout.from_lengths(one_document, padding)
        # compute, and scatter to the original positions
        hidden, routing = self._call(unpacked, {}, padded)
        return hidden.flatten(0, 1)[back].view(*x.shape[:2], -1), routing

    def _routing(self, logits: Any, tokens: Tensor, layout: PackedLayout | None) -> Routing | None:
        """Return the class's load-balancing loss and the expert load; None if it has no such loss.

        Args:
            logits: router logits of each layer.
            tokens: (B, T).
            layout: documents and padding of the sequences.
        """
        function = getattr(sys.modules[type(self.hf).__module__], "load_balancing_loss_func", None)
        if function is None:
            return None
        # loss, weighted as in the class
        layers = [layer.flatten(0, -2) for layer in logits if layer is not None]  # (B * T, E)
        n_experts, top_k = layers[0].shape[-1], int(self.hf.config.num_experts_per_tok)
        mask = padding_mask(tokens, layout)
        loss = function(tuple(layers), n_experts, top_k, mask)
        losses = {"lbl": self.hf.config.router_aux_loss_coef * loss * len(tokens)}
        # expert load and router probabilities, without padding
        probability = torch.stack([layer.float().softmax(-1) for layer in layers])
        experts = probability.topk(top_k, dim=-1).indices
        load = torch.zeros_like(probability).scatter_(-1, experts, 1.0)
        if mask is not None:
            is_token = mask.flatten().bool()
            load, probability = load[:, is_token], probability[:, is_token]
        n_tokens = load.new_full((len(layers),), load.shape[1])
        return Routing(losses, load.sum(1).detach(), probability.sum(1).detach(), n_tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) of hidden states (..., D)."""
        assert self._head is not None, "hidden states come from `run`"
        if isinstance(self._head, str):  # OWN_HEAD
            return self._own_head(hidden)
        scale, softcap = self._head
        hidden, weight = head_operands(self.hf, hidden)
        if not torch.is_autocast_enabled(hidden.device.type):
            weight = weight.to(hidden.dtype)
        return cap(nn.functional.linear(hidden, weight), scale, softcap)

    def loss(self, hidden: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the sum of the cross-entropy over all labels, in nats.

        Args:
            hidden: (..., D), hidden states.
            labels: (...), token ids or IGNORE.
            weights: (...), weight of each label; None: 1.
        """
        return self.losses(hidden, labels, weights)[0]

    def losses(
        self,
        hidden: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        z_loss_weight: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of cross-entropy and z-loss, and the z-loss; see `Decoder.losses`."""
        # a plain head: logits are fused with the loss
        assert self._head is not None, "hidden states come from `run`"
        if not isinstance(self._head, str):
            scale, softcap = self._head
            hidden, weight = head_operands(self.hf, hidden)
            return linear_losses(
                hidden,
                weight,
                labels,
                scale=scale,
                softcap=softcap,
                weights=weights,
                z_loss_weight=z_loss_weight,
                chunk=self.loss_chunk,
            )

        # the class computes logits, chunk by chunk; the backward pass recomputes them
        hidden, labels = hidden.flatten(0, -2), labels.flatten()
        if weights is None:
            weights = torch.ones_like(labels, dtype=torch.float32)
        size = chunk_tokens(self.config.vocab_size or 1, hidden.device, self.loss_chunk)
        chunks = zip(
            hidden.split(size), labels.split(size), weights.flatten().split(size), strict=True
        )
        total = z_total = hidden.new_zeros((), dtype=torch.float32)
        for chunk in chunks:
            loss, z_loss = checkpoint(
                self._chunk_losses, *chunk, z_loss_weight, use_reentrant=False
            )
            total, z_total = total + loss, z_total + z_loss.detach()
        return total, z_total

    def distillation(
        self,
        hidden: Tensor,
        batch: Batch,
        by: DistillationWeights,
        *,
        z_loss_weight: float = 0.0,
    ) -> DistillationLosses:
        """Return cross-entropy and divergence from the teacher; see `Decoder.distillation`."""
        assert self._head is not None and batch.teacher is not None
        if not isinstance(self._head, str):
            scale, softcap = self._head
            return linear_distillation(
                hidden,
                self.head_weight,
                batch.labels,
                batch.teacher,
                by,
                weights=batch.weights,
                z_loss_weight=z_loss_weight,
                scale=scale,
                softcap=softcap,
                chunk=self.loss_chunk,
            )

        # the class computes the logits of one sequence at a time, and again in the backward pass
        def of_row(hidden: Tensor, row: Batch) -> DistillationLosses:
            assert row.teacher is not None
            logits = self._own_head(hidden).float()
            return logit_distillation(
                logits, row.labels, row.teacher, by, weights=row.weights,
                z_loss_weight=z_loss_weight,
            )  # fmt: skip

        rows = [
            checkpoint(of_row, part, row, use_reentrant=False)
            for part, row in zip(hidden.split(1), batch.split(1), strict=True)
        ]
        return DistillationLosses(
            *(torch.stack(values).sum() for values in zip(*rows, strict=True))
        )

    def _chunk_losses(
        self, hidden: Tensor, labels: Tensor, weights: Tensor, z_loss_weight: float
    ) -> tuple[Tensor, Tensor]:
        """Return `losses` of a chunk (C, D) with labels (C,)."""
        logits = self._own_head(hidden).float()
        nats = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
        total = (nats * weights).sum()
        if not z_loss_weight:
            return total, torch.zeros_like(total)
        squares = torch.where(labels == IGNORE, 0, logits.logsumexp(-1).square())
        z_loss = z_loss_weight * (squares * weights).sum()
        return total + z_loss, z_loss

    def _own_head(self, hidden: Tensor) -> Tensor:
        """Compute logits with the class's forward pass.

        Its base model is replaced for the call by a function that returns these hidden states.
        """
        from transformers.modeling_outputs import MoeModelOutputWithPast

        flat = hidden.reshape(1, -1, hidden.shape[-1])
        base_output = MoeModelOutputWithPast(last_hidden_state=flat)
        base: Any = self.base
        original_forward = base.__dict__.get("forward")
        base.forward = lambda *_, **__: base_output
        try:
            tokens = torch.zeros(flat.shape[:2], dtype=torch.int64, device=hidden.device)
            logits = self.hf(input_ids=tokens, use_cache=False, return_dict=True).logits
        finally:
            if original_forward is None:
                del base.forward
            else:
                base.forward = original_forward
        return logits.view(*hidden.shape[:-1], -1)

    @torch.no_grad()
    def _try(self, device: torch.device) -> None:
        """Choose how documents are isolated and how logits are computed, by comparison.

        Autocast is disabled: fp32 distinguishes leaks between documents from rounding errors.

        Raises:
            UserError: the class fails, or cannot be trained here.
        """
        was_training = self.training
        self.eval()
        try:
            with torch.autocast(device.type, enabled=False):
                self._choose(device)
        except (RuntimeError, ValueError, TypeError) as error:
            if isinstance(error, torch.OutOfMemoryError | torch.distributed.DistError):
                raise
            raise UserError(
                f"model.pretrained: {type(self.hf).__name__} of transformers fails with this"
                f" config.json: {one_line(error)}; correct it"
            ) from error
        finally:
            self.train(was_training)

    def _choose(self, device: torch.device) -> None:
        """Set the strategies and the head by passes over random tokens."""
        tokens = _probe_tokens(len(PROBE), sum(PROBE), self.config, device)
        layout = PackedLayout.from_lengths([[*PROBE], [*PROBE[::-1]]])
        tree = PackedLayout.from_ends(_probe_tree(sum(PROBE)))
        by_length = angles_by_length(self.hf.config)
        self._ways |= {
            False: self._choose_way(tokens, layout, ("positions", "mask")),
            # paths of a tree may differ in length, and so in a token's angles
            True: self._choose_way(tokens, tree, () if by_length else ("mask",)),
        }
        self._head = self._choose_head(tokens)

    def _choose_way(self, tokens: Tensor, layout: PackedLayout, ways: tuple[str, ...]) -> str:
        """Return the first strategy whose hidden states match those of single documents.

        A second pass changes the first token of each sequence: later documents must not change.
        """
        layout = layout.to(tokens.device)
        expected = self._by_rows(tokens, layout)[0]
        changed = tokens.clone()
        changed[:, 0] = (tokens[:, 0] + 1) % (self.config.vocab_size or 1)
        for way in ways:
            try:
                arguments = WAYS[way](self, layout, self.embedding_dtype)
                hidden = self._call(tokens, arguments, layout)[0]
                hidden_changed = self._call(changed, arguments, layout)[0]
            except Exception:  # the class does not support such a mask: the next strategy
                continue
            is_later = layout.documents > 0
            is_isolated = _agree(hidden_changed[is_later], hidden[is_later])
            if _agree(hidden, expected) and is_isolated:
                return way
        return "rows"

    def _choose_head(self, tokens: Tensor) -> str | tuple[float, float | None]:
        """Return scale and softcap that reproduce the logits of the class, or OWN_HEAD.

        `self._head` is set meanwhile, as `head` uses it.

        Raises:
            UserError: the class computes its logits from more than the hidden states.
        """
        # candidates, by the settings that transformers' classes have
        expected = self.hf(input_ids=tokens, use_cache=False, return_dict=True).logits
        hidden, _ = self._call(tokens, {}, None)
        config, embeddings = self.hf.config, self.hf.get_output_embeddings()
        scales = [1.0, getattr(config, "logit_scale", None), _inverse(config, "logits_scaling")]
        softcaps = [None, getattr(config, "final_logit_softcapping", None)]
        is_matrix = embeddings is not None and getattr(embeddings, "bias", None) is None
        if not is_matrix:
            scales = []

        # the first pair with the same logits
        for scale in scales:
            for softcap in softcaps:
                if not isinstance(scale, int | float):
                    continue
                self._head = (float(scale), softcap)
                if _agree(self.head(hidden), expected):
                    return self._head

        # otherwise the class computes the logits
        self._head = OWN_HEAD
        if not _agree(self._own_head(hidden), expected):
            raise UserError(
                f"model.pretrained: the logits of {type(self.hf).__name__} are no function of its"
                " base model's hidden states; this class cannot be trained here"
            )
        return OWN_HEAD

    def takes(self, name: str) -> bool:
        """Return whether the forward pass of the base model has an argument of this name."""
        return name in self._takes

    def mask_types(self) -> dict[str, int | None] | int | None:
        """Return the attention windows of the layer types; see the function `mask_types`."""
        return mask_types(self.hf.config)


def _find_blocks(base: nn.Module, n_layers: int) -> nn.ModuleList:
    """Return the list of layers: the first nn.ModuleList of that length."""
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers:
            return module
    raise UserError(
        f"model.pretrained: {type(base).__name__} has no list of {n_layers} layers, which is what"
        " is sharded and checkpointed here; this class cannot be trained here"
    )


def _ties(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of tied parameters: the first name, and all other names."""
    first: dict[int, str] = {}
    ties: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            ties.setdefault(first[id(parameter)], []).append(name)
        else:
            first[id(parameter)] = name
    return ties


def _probe_tokens(seed: int, width: int, config: HFModelConfig, device: torch.device) -> Tensor:
    """Return random tokens (2, width)."""
    generator = torch.Generator().manual_seed(seed)
    end = min(config.vocab_size or 1, 1000)
    return torch.randint(0, end, (2, width), generator=generator).to(device)


def _probe_tree(width: int) -> list[list[int]]:
    """Return the `ends` of a layout with a tree: two texts with a common prefix, and a third text.

    The second sequence is a single text.
    """
    n_prefix, n_first, n_second = 5, 6, 4  # tokens of the prefix and of the two continuations
    first_end = n_prefix + n_first
    tree_end = first_end + n_second
    prefix = [tree_end] * n_prefix
    continuations = [first_end] * n_first + [tree_end] * n_second
    third_text = [width] * (width - tree_end)
    return [[*prefix, *continuations, *third_text], [width] * width]


def _agree(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding in their precision."""
    low = one.dtype != torch.float32 or torch.is_autocast_enabled(one.device.type)
    scale = float(other.float().abs().mean()) or 1.0
    worst = float((one.float() - other.float()).abs().max()) if one.numel() else 0.0
    return worst <= (0.2 if low else 1e-3) * scale


def _inverse(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return 1 / value if isinstance(value, int | float) and value else None


class SlotTokens:
    """Tokens of sequences, under the interface of `models.kv_cache.SlotCache`."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._tokens: list[list[int]] = [[] for _ in range(slots)]
        self._chunks: Sequence[TokenChunk] = ()
        self._device = device

    def begin(self, pieces: Sequence[TokenChunk]) -> Tensor:
        """Add the chunks of the next forward pass; return their tokens (1, N)."""
        self._chunks = pieces
        for chunk in pieces:
            self._tokens[chunk.slot][chunk.past :] = chunk.tokens
        new_tokens = [token for chunk in pieces for token in chunk.tokens]
        return torch.tensor([new_tokens], device=self._device)

    def ends(self) -> list[int]:
        """Return the length of each sequence that has new tokens."""
        return [chunk.past + len(chunk.tokens) for chunk in self._chunks]

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return the full sequences that have new tokens.

        Returns:
            (B, T), the sequences, padded at the end, which causal attention ignores; (N,), the
            flat indices of the new tokens.
        """
        ends = self.ends()
        width = max(ends)
        rows = torch.zeros(len(ends), width, dtype=torch.int64)
        new_indices: list[int] = []
        for row, (chunk, end) in enumerate(zip(self._chunks, ends, strict=True)):
            rows[row, :end] = torch.tensor(self._tokens[chunk.slot][:end])
            new_indices += range(row * width + chunk.past, row * width + end)
        return rows.to(self._device), torch.tensor(new_indices, device=self._device)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of slot `source` to slot `target`."""
        self._tokens[target] = self._tokens[source][:length]

    def clear(self, slot: int) -> None:
        """Do nothing: token ids are always finite."""


def read_hf_config(values: dict[str, Any], *, code: str | None = None) -> Any:
    """Return transformers' configuration object for the values of a config.json.

    Args:
        values: content of config.json.
        code: folder with the model's Python files, which are run; None: only classes of
            transformers.

    Raises:
        UserError: transformers does not know the class, or rejects a value.
    """
    from transformers import AutoConfig

    kind = values.get("model_type")
    try:
        if code is not None:
            config = AutoConfig.from_pretrained(code, trust_remote_code=True)
            return type(config).from_dict({**config.to_dict(), **values})
        plain = {key: value for key, value in values.items() if key != "auto_map"}
        return AutoConfig.for_model(**{"model_type": kind, **plain})
    except Exception as error:
        raise UserError(
            f"config.json: transformers cannot read it (model_type {kind!r}): {one_line(error)}"
        ) from error


def build_class(config: HFModelConfig) -> Any:
    """Construct the class with parameters on the meta device and computed buffers.

    Raises:
        UserError: transformers has no causal language model of this type.
    """
    from transformers import AutoModelForCausalLM

    hf_config = read_hf_config(config.hf_config, code=config.code)
    try:
        with _parameters_on_meta():
            return AutoModelForCausalLM.from_config(
                hf_config,
                attn_implementation=config.hf_attn_impl,
                dtype=torch.float32,
                trust_remote_code=config.code is not None,
            )
    except Exception as error:
        raise UserError(
            f"model.pretrained: transformers cannot build {config.hf_config.get('model_type')!r} as"
            f" a causal language model (model.attn_impl {config.hf_attn_impl}): {one_line(error)}"
        ) from error


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device when a module registers it. Buffers stay."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            empty = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            module._parameters[name] = empty

    nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
