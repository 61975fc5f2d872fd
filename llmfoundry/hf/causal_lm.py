"""`HFCausalLM`: a causal language model of transformers, behind the decoder's contract.

Hidden states and head are apart (the loss stays chunked), blocks are found (FSDP, checkpointing and
compilation wrap them), and documents of a row never see each other. How a class is asked for that,
and what its head is, is not believed but tried: the first forward pass compares each way, on a few
tokens, with the class's own answers for the documents alone, and takes the first that agrees. The
last way, a row for each document, is right for every causal class, state-space models included.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llmfoundry.errors import UserError, one_line
from llmfoundry.hf.rope_by_document import RopeByDocument
from llmfoundry.inference.hugging_face_rows import angles_by_length
from llmfoundry.models.kv_cache import TokenChunk
from llmfoundry.models.router import Routing
from llmfoundry.ops.loss import cap, chunk_tokens, linear_cross_entropy
from llmfoundry.ops.packed_layout import IGNORE, PackedLayout
from llmfoundry.recipe.model import HFModelConfig

PROBE = (6, 3, 8, 1, 6)  # lengths of the documents that ways are tried on


class HFCausalLM(nn.Module):
    """A class of transformers as the trainer, the gauntlet and the generator call models.

    Args:
        config: see `HFModelConfig`.

    Attributes:
        hf: the class itself.
        ties: names of its parameters that are one: the first of each, and the others.
        blocks: its layers.
        peft_config: peft's, of its adapter; None: it has none.
        loss_chunk: tokens whose logits the loss holds at a time; None: as many as suit the device.
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
        self._head: str | tuple[float, float | None] | None = None
        self._takes = set(inspect.signature(self.base.forward).parameters)

    def computed(self) -> set[str]:
        """Names of buffers, which have their values without a file."""
        return {f"hf.{name}" for name in self._buffers_made}

    def vocabulary(self) -> set[str]:
        """Names of what has a row for each token: embedding, head, head's bias."""
        modules = (self.hf.get_input_embeddings(), self.hf.get_output_embeddings())
        ids = {id(p) for module in modules if module is not None for p in module.parameters()}
        every = self.named_parameters(remove_duplicate=False)
        return {name for name, p in every if id(p) in ids}

    @property
    def base(self) -> nn.Module:
        """The class without its head."""
        return getattr(self.hf, self.hf.base_model_prefix)

    @property
    def blocks(self) -> nn.ModuleList:
        """What is sharded, checkpointed and compiled one by one."""
        return self._blocks[0]

    @property
    def embedding_weight(self) -> Tensor:
        """(V, D): of tokens."""
        return self.hf.get_input_embeddings().weight

    @property
    def head_weight(self) -> Tensor:
        """(V, D)."""
        return self.hf.get_output_embeddings().weight

    def _apply(self, fn: Any, recurse: bool = True) -> HFCausalLM:
        """As nn.Module's, which would lose ties, round tables of positions, and empty them."""
        super()._apply(fn, recurse)
        for first, others in self.ties.items():
            shared = self.hf.get_parameter(first)
            for name in others:
                module, _, last = name.rpartition(".")
                self.hf.get_submodule(module)._parameters[last] = shared
        for name, made in self._buffers_made.items():
            module, _, last = name.rpartition(".")
            held = self.hf.get_submodule(module)._buffers
            device = fn(torch.empty(0, device=held[last].device)).device
            held[last] = made.to(device)
        return self

    def new_slots(
        self, *, slots: int, length: int, device: torch.device, dtype: torch.dtype
    ) -> SlotTokens:
        """Earlier tokens of so many sequences, which are computed anew with every token."""
        return SlotTokens(slots, device)

    def forward(self, tokens: Tensor, layout: PackedLayout | None = None) -> Tensor:
        """Hidden states (B, T, D) of tokens (B, T), the final norm applied."""
        return self.run(tokens, layout)[0]

    def run(
        self, tokens: Tensor, layout: PackedLayout | None = None, cache: SlotTokens | None = None
    ) -> tuple[Tensor, Routing | None]:
        """As `forward`, and what the routers did, where config.json has output_router_logits."""
        if not self._ways:
            self._try(tokens.device)
        if cache is not None:
            assert layout is None, "each sequence is one document"
            return self._of_slots(cache), None
        return self._compute(tokens, layout)

    def _compute(self, x: Tensor, layout: PackedLayout | None) -> tuple[Tensor, Routing | None]:
        """Of tokens (B, T)."""
        if layout is None or (layout.ends is None and all(len(n) == 1 for n in layout.lengths)):
            return self._call(x, {}, layout)
        way = self._ways[layout.ends is not None]
        if way == "rows":
            return self._by_rows(x, layout)
        return self._call(x, WAYS[way](self, layout, self.embedding_dtype), layout)

    def _of_slots(self, cache: SlotTokens) -> Tensor:
        """(1, N, D) of what is new in the slots."""
        rows, places = cache.rows()
        padding = tuple(rows.shape[1] - end for end in cache.ends())
        layout = PackedLayout.from_lengths([[rows.shape[1]]] * len(rows), padding)
        return self._compute(rows, layout)[0].flatten(0, 1)[places][None]

    @property
    def embedding_dtype(self) -> torch.dtype:
        """Of the weights, and so of additive masks."""
        return self.embedding_weight.dtype

    def _call(
        self, x: Tensor, given: dict[str, Any], layout: PackedLayout | None
    ) -> tuple[Tensor, Routing | None]:
        given = {"input_ids": x, **given}
        wants = self.training and bool(getattr(self.hf.config, "output_router_logits", False))
        more = {"output_router_logits": True} if wants else {}
        with self._rope.within(layout):
            out = self.base(use_cache=False, return_dict=True, **given, **more)
        logits = getattr(out, "router_logits", None) if wants else None
        return out[0], self._routing(logits, x, layout) if logits else None

    def _by_rows(self, x: Tensor, layout: PackedLayout) -> tuple[Tensor, Routing | None]:
        """A row for each document, or path of a tree; what is left of it is padding at its end."""
        rows, sources = document_rows(layout)
        sources, back = sources.to(x.device), rows.to(x.device)
        apart = x.flatten(0, 1)[sources.clamp(min=0)]
        lengths = [[int(n), int(sources.shape[1] - n)] for n in (sources >= 0).sum(1)]
        padding = tuple(rest for _, rest in lengths)
        one = [[sources.shape[1]]] * len(lengths)
        hidden, routing = self._call(apart, {}, PackedLayout.from_lengths(one, padding))
        return hidden.flatten(0, 1)[back].view(*x.shape[:2], -1), routing

    def _routing(self, logits: Any, tokens: Tensor, layout: PackedLayout | None) -> Routing | None:
        """The class's balancing loss, as it adds it; and what routers did."""
        function = getattr(sys.modules[type(self.hf).__module__], "load_balancing_loss_func", None)
        if function is None:
            return None
        layers = [layer.flatten(0, -2) for layer in logits if layer is not None]
        count, chosen = layers[0].shape[-1], int(self.hf.config.num_experts_per_tok)
        real = _real(tokens, layout)
        loss = function(tuple(layers), count, chosen, real)
        probability = torch.stack([layer.float().softmax(-1) for layer in layers])
        picked = probability.topk(chosen, dim=-1).indices
        load = torch.zeros_like(probability).scatter_(-1, picked, 1.0)
        if real is not None:
            kept = real.flatten().bool()
            load, probability = load[:, kept], probability[:, kept]
        losses = {"lbl": self.hf.config.router_aux_loss_coef * loss * len(tokens)}
        met = load.new_full((len(layers),), load.shape[1])
        return Routing(losses, load.sum(1).detach(), probability.sum(1).detach(), met)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., D)."""
        assert self._head is not None, "hidden states come from `run`"
        if self._head == "own":
            return self._own_head(hidden)
        scale, softcap = cast(tuple[float, float | None], self._head)
        weight = self.head_weight
        if not torch.is_autocast_enabled(hidden.device.type):
            weight = weight.to(hidden.dtype)
        return cap(nn.functional.linear(hidden, weight), scale, softcap)

    def loss(self, hidden: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum of the cross-entropy of hidden states (..., D) over labels (...), in nats.

        `weights` (...) are what each label counts; None: 1.
        """
        if self._head != "own":
            scale, softcap = cast(tuple[float, float | None], self._head)
            return linear_cross_entropy(
                hidden,
                self.head_weight,
                labels,
                scale=scale,
                softcap=softcap,
                weights=weights,
                chunk=self.loss_chunk,
            )
        flat, targets = hidden.flatten(0, -2), labels.flatten()
        each = torch.ones_like(targets, dtype=torch.float32) if weights is None else weights
        size = chunk_tokens(self.config.vocab_size or 1, hidden.device, self.loss_chunk)
        parts = zip(flat.split(size), targets.split(size), each.flatten().split(size), strict=True)
        total = hidden.new_zeros((), dtype=torch.float32)
        for part in parts:  # logits of a chunk are made again in the backward pass
            total = total + checkpoint(self._chunk_loss, *part, use_reentrant=False)
        return total

    def _chunk_loss(self, hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        logits = self._own_head(hidden).float()
        nats = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
        return (nats * weights).sum()

    def _own_head(self, hidden: Tensor) -> Tensor:
        """The class's forward pass around a base that only hands these hidden states on."""
        from transformers.modeling_outputs import MoeModelOutputWithPast

        flat = hidden.reshape(1, -1, hidden.shape[-1])
        given = MoeModelOutputWithPast(last_hidden_state=flat)
        base: Any = self.base
        before = base.__dict__.get("forward")
        base.forward = lambda *_, **__: given
        try:
            tokens = torch.zeros(flat.shape[:2], dtype=torch.int64, device=hidden.device)
            logits = self.hf(input_ids=tokens, use_cache=False, return_dict=True).logits
        finally:
            if before is None:
                del base.forward
            else:
                base.forward = before
        return logits.view(*hidden.shape[:-1], -1)

    @torch.no_grad()
    def _try(self, device: torch.device) -> None:
        """Choose how documents are kept apart and how logits are made, by what the class gives.

        Without autocast: in fp32 a leak is told from rounding.
        """
        was_training = self.training
        self.eval()
        try:
            with torch.autocast(device.type, enabled=False):
                self._choose(device)
        finally:
            self.train(was_training)

    def _choose(self, device: torch.device) -> None:
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
        layout = layout.to(tokens.device)
        expected = self._by_rows(tokens, layout)[0]
        other = tokens.clone()
        other[:, 0] = (tokens[:, 0] + 1) % (self.config.vocab_size or 1)
        for way in ways:
            try:
                given = WAYS[way](self, layout, self.embedding_dtype)
                found = self._call(tokens, given, layout)[0]
                apart = self._call(other, given, layout)[0]
            except Exception:  # a class that does not take such a mask: the next way
                continue
            kept = layout.documents > 0
            if _agree(found, expected) and _agree(apart[kept], found[kept]):
                return way
        return "rows"

    def _choose_head(self, tokens: Tensor) -> str | tuple[float, float | None]:
        expected = self.hf(input_ids=tokens, use_cache=False, return_dict=True).logits
        hidden = self._call(tokens, {}, None)[0]
        config, embeddings = self.hf.config, self.hf.get_output_embeddings()
        scales = [1.0, getattr(config, "logit_scale", None), _inverse(config, "logits_scaling")]
        caps = [None, getattr(config, "final_logit_softcapping", None)]
        plain = embeddings is not None and getattr(embeddings, "bias", None) is None
        for scale in scales if plain else []:
            for softcap in caps:
                if not isinstance(scale, int | float):
                    continue
                self._head = (float(scale), softcap)
                if _agree(self.head(hidden), expected):
                    return self._head
        self._head = "own"
        if not _agree(self._own_head(hidden), expected):
            raise UserError(
                f"model.pretrained: the logits of {type(self.hf).__name__} are no function of its"
                " base model's hidden states; this class cannot be trained here"
            )
        return "own"

    def takes(self, name: str) -> bool:
        """Whether the class without its head has an argument of this name."""
        return name in self._takes

    def mask_types(self) -> dict[str, int | None] | int | None:
        """Windows of its layers by the names that it has for them; see `layouts.py`."""
        return mask_types(self.hf.config)


def _find_blocks(base: nn.Module, n_layers: int) -> nn.ModuleList:
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers:
            return module
    raise UserError(
        f"model.pretrained: {type(base).__name__} has no list of {n_layers} layers, which is what"
        " is sharded and checkpointed here; this class cannot be trained here"
    )


def _ties(model: nn.Module) -> dict[str, list[str]]:
    """Names of parameters that are one: the first of each, and the others."""
    first: dict[int, str] = {}
    ties: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            ties.setdefault(first[id(parameter)], []).append(name)
        else:
            first[id(parameter)] = name
    return ties


def _probe_tokens(rows: int, width: int, config: HFModelConfig, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    top = min(config.vocab_size or 1, 1000)
    return torch.randint(0, top, (2, width), generator=generator).to(device)


def _probe_tree(width: int) -> list[list[int]]:
    """Where each token's part ends: a beginning that two texts share, and a third text."""
    root, one, two = 5, 6, 4
    shared = [root + one + two] * root
    branches = [root + one] * one + [root + one + two] * two
    ends = [*shared, *branches, *[width] * (width - root - one - two)]
    return [ends, [width] * width]


def _agree(one: Tensor, other: Tensor) -> bool:
    """Whether they are equal but for rounding of the precision they were computed in."""
    low = one.dtype != torch.float32 or torch.is_autocast_enabled(one.device.type)
    scale = float(other.float().abs().mean()) or 1.0
    worst = float((one.float() - other.float()).abs().max()) if one.numel() else 0.0
    return worst <= (0.2 if low else 1e-3) * scale


def _inverse(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return 1 / value if isinstance(value, int | float) and value else None


def _real(tokens: Tensor, layout: PackedLayout | None) -> Tensor | None:
    """(B, T), 0 at padding; None: there is none."""
    if layout is None or layout.padding is None or not any(layout.padding):
        return None
    ends = tokens.shape[1] - torch.tensor(layout.padding, device=tokens.device)
    return (torch.arange(tokens.shape[1], device=tokens.device) < ends[:, None]).long()


FULL, SLIDING = "full_attention", "sliding_attention"
HIDDEN = torch.finfo(torch.bfloat16).min  # finite in every dtype that has an exponent of 8 bits


class Asked(Protocol):
    """What the ways need to know of a class."""

    def takes(self, name: str) -> bool:
        """Whether it has an argument of this name."""

    def mask_types(self) -> dict[str, int | None] | int | None:
        """See `mask_types`."""


def mask_types(config: Any) -> dict[str, int | None] | int | None:
    """Windows by the names of a class's layers; or the one window of all of them, or none.

    Raises:
        NotImplementedError: there are layers of yet another kind.
    """
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        return window
    if not kinds <= {FULL, SLIDING}:
        raise NotImplementedError(f"layers of {sorted(kinds)}")
    if kinds == {FULL}:
        return None
    return {kind: window if kind == SLIDING else None for kind in sorted(kinds)}


def by_positions(asked: Asked, layout: PackedLayout, dtype: torch.dtype) -> dict[str, Any]:
    """Positions alone."""
    if not asked.takes("position_ids"):
        raise NotImplementedError("positions")
    return {"position_ids": layout.positions}


def by_mask(asked: Asked, layout: PackedLayout, dtype: torch.dtype) -> dict[str, Any]:
    """An additive mask, and positions where the class takes them."""
    windows = asked.mask_types()
    seen = visible(layout)
    if isinstance(windows, dict):
        mask: Any = {
            kind: _additive(seen, layout, window, dtype) for kind, window in windows.items()
        }
    else:
        mask = _additive(seen, layout, windows, dtype)
    given = {"attention_mask": mask}
    if asked.takes("position_ids"):
        given["position_ids"] = layout.positions
    return given


Way = Callable[[Any, PackedLayout, torch.dtype], dict[str, Any]]
WAYS: dict[str, Way] = {"positions": by_positions, "mask": by_mask}


def visible(layout: PackedLayout) -> Tensor:
    """(B, T, T), whether token i of a row sees token j."""
    places = torch.arange(layout.positions.shape[1], device=layout.positions.device)
    seen = (places[:, None] >= places) & (
        layout.documents[:, :, None] == layout.documents[:, None, :]
    )
    return seen if layout.ends is None else seen & (places[:, None] < layout.ends[:, None, :])


def _additive(seen: Tensor, layout: PackedLayout, window: int | None, dtype: torch.dtype) -> Tensor:
    """(B, 1, T, T): 0 where a token is seen, a window counted in positions."""
    if window is not None:
        places = layout.positions
        seen = seen & (places[:, :, None] - places[:, None, :] < window)
    hidden = max(HIDDEN, torch.finfo(dtype).min)
    zeros = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return zeros.masked_fill_(~seen, hidden)[:, None]


def document_rows(layout: PackedLayout) -> tuple[Tensor, Tensor]:
    """How a layout's documents, or the paths of its trees, become rows of their own.

    Returns:
        (B * T,) for each flat place the flat place among the new rows where it is computed; (R, L)
        the flat places that the new rows are made of, -1 after a row's end.
    """
    paths = _document_paths(layout) if layout.ends is None else _tree_paths(layout)
    width = max(map(len, paths))
    sources = torch.full((len(paths), width), -1)
    back = torch.zeros(layout.positions.numel(), dtype=torch.int64)
    for row, path in enumerate(paths):
        places = torch.tensor(path)
        sources[row, : len(path)] = places
        back[places] = row * width + torch.arange(len(path))
    return back, sources


def _document_paths(layout: PackedLayout) -> list[list[int]]:
    width, paths = layout.positions.shape[1], []
    for row, lengths in enumerate(layout.lengths):
        at = row * width
        for length in lengths:
            paths.append(list(range(at, at + length)))
            at += length
    return [path for path in paths if path]


def _tree_paths(layout: PackedLayout) -> list[list[int]]:
    """From each root to each leaf: a token is a leaf if its part ends right after it."""
    assert layout.ends is not None
    width, paths = layout.positions.shape[1], []
    for row, ends in enumerate(layout.ends.tolist()):
        above: list[int] = []
        for place, end in enumerate(ends):
            above = [j for j in above if ends[j] > place] + [place]
            if end == place + 1 or place + 1 == width:
                paths.append([row * width + j for j in above])
    return paths


class SlotTokens:
    """Tokens of sequences, under the interface of `models.kv_cache.SlotCache`."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._tokens: list[list[int]] = [[] for _ in range(slots)]
        self._pieces: Sequence[TokenChunk] = ()
        self._device = device

    def begin(self, pieces: Sequence[TokenChunk]) -> Tensor:
        """Say what the next forward pass adds; its tokens (1, N)."""
        self._pieces = pieces
        for piece in pieces:
            self._tokens[piece.slot][piece.past :] = piece.tokens
        new = [token for piece in pieces for token in piece.tokens]
        return torch.tensor([new], device=self._device)

    def ends(self) -> list[int]:
        """Tokens of each sequence that has new ones."""
        return [piece.past + len(piece.tokens) for piece in self._pieces]

    def rows(self) -> tuple[Tensor, Tensor]:
        """(B, T) all of each sequence, padded behind its end, where no causal class looks.

        And (N,), the flat places of what is new.
        """
        ends = self.ends()
        width = max(ends)
        rows = torch.zeros(len(ends), width, dtype=torch.int64)
        places: list[int] = []
        for row, (piece, end) in enumerate(zip(self._pieces, ends, strict=True)):
            rows[row, :end] = torch.tensor(self._tokens[piece.slot][:end])
            places += range(row * width + piece.past, row * width + end)
        return rows.to(self._device), torch.tensor(places, device=self._device)

    def copy(self, source: int, target: int, length: int) -> None:
        """Make the first tokens of one slot those of another."""
        self._tokens[target] = self._tokens[source][:length]

    def clear(self, slot: int) -> None:
        """There are no numbers here."""


def read_hf_config(values: dict[str, Any], *, code: str | None = None) -> Any:
    """Transformers' configuration of config.json's values.

    Raises:
        UserError: transformers does not know the class, or refuses a value.
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
    """The class, parameters on the meta device, buffers with their values.

    Raises:
        UserError: transformers has no causal language model of this kind.
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
    """Parameters lose their memory as modules register them; buffers are computed and keep it."""
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
