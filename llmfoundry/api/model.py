"""`Model`: any model that a name stands for, as a module of PyTorch. `load` and `build` make it."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor, nn

from llmfoundry.api.generation import Drawer, continue_prompt
from llmfoundry.api.recipes import Overrides, checked_recipe, checked_texts
from llmfoundry.builders.adapter import adapt, begin_adapter
from llmfoundry.builders.model import build_root, served_precision
from llmfoundry.builders.open_model import LoadedModel, OpenedModel, open_model
from llmfoundry.builders.pretrained import open_base
from llmfoundry.builders.registry import find_address
from llmfoundry.builders.tokenizer import make_tokenizer, settle_vocabulary
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.process_group import World, choose_device
from llmfoundry.errors import UserError, one_line
from llmfoundry.models.attention import longest_document
from llmfoundry.ops.packed_layout import PackedLayout
from llmfoundry.recipe.after_training import GenerateRecipe
from llmfoundry.recipe.finetune import ResolvedFinetuneRecipe
from llmfoundry.recipe.model import HFModelConfig
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.terminal import to_stderr


class Model(nn.Module):
    """A model with its tokenizer.

    >>> model = lf.load("runs/quickstart")
    >>> ids = model.tokenizer("def __init__(self")
    >>> logits = model(ids)
    >>> logits.shape == (*ids.shape, model.module.config.vocab_size)
    True
    >>> text = model.generate("def __init__(self", max_new_tokens=8)
    >>> text.startswith("def __init__(self")
    True

    Attributes:
        name: the name that it was loaded by.
        module: the `Decoder`, or the class of transformers that computes the model.
        precision: fp32, bf16, fp16 or amp_bf16, in which `forward` computes.
    """

    def __init__(self, opened: OpenedModel, loaded: LoadedModel) -> None:
        """Wrap a model that the builders have opened; `load` and `build` call this."""
        super().__init__()
        self.name, self.precision = opened.name, loaded.precision
        self._opened, self._loaded = opened, loaded
        self.module: nn.Module = loaded.hugging_face if loaded.root is None else loaded.root.model
        self.training = self.module.training

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    @property
    def tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer: `tokenizer(text)` returns ids (1, T), and `decode` the text."""
        return ModelTokenizer(self._opened, self.device)

    @property
    def opened(self) -> OpenedModel:
        """All but the weights; its `load` returns the model as it is now."""
        return replace(self._opened, load=self._on_device)

    def forward(self, ids: Tensor, layout: PackedLayout | None = None) -> Tensor:
        """Return logits (B, T, V) of ids (B, T).

        Args:
            ids: tokens; without a `layout` each sequence is one document.
            layout: documents that are packed into a sequence, such as `batch.layout`.

        Raises:
            UserError: there is a `layout`, and the module is a class of transformers.
        """
        loaded = self._on_device()
        if loaded.root is None and layout is not None:
            kind = type(self.module).__name__
            raise UserError(
                f"layout: {kind} of transformers takes no packed documents; call the model with one"
                " document in each sequence, without a layout"
            )
        with loaded.autocast():
            if loaded.root is None:
                return self.module(ids).logits
            return loaded.root(ids, layout, lambda model, hidden: model.head(hidden))

    @overload
    def generate(self, prompt: str, **settings: Any) -> str: ...

    @overload
    def generate(self, prompt: Tensor, **settings: Any) -> Tensor: ...

    def generate(self, prompt: str | Tensor, **settings: Any) -> str | Tensor:
        """Return a prompt and its continuation, as `scripts/generate.py` prints them.

        Args:
            prompt: a text; or ids (1, T), for which ids are returned.
            settings: keys of scripts/generate.py: max_new_tokens, temperature, top_k, top_p, seed,
                kv_cache.

        Raises:
            UserError: a setting is unknown or out of range, or the prompt is too long.
        """
        text = prompt if isinstance(prompt, str) else ""
        recipe = checked_texts(GenerateRecipe, {"checkpoint": self.name, "prompt": text}, settings)
        recipe.fill()
        with in_eval_mode(self):
            if isinstance(prompt, str):
                return "".join(continue_prompt(recipe, self._opened, self._on_device()))
            if prompt.numel() != prompt.shape[-1] or not prompt.numel():
                raise UserError(f"prompt: ids {tuple(prompt.shape)}, and one sequence is continued")
            ids = prompt.flatten().tolist()
            tokens = Drawer(recipe, self._on_device()).draw(ids, recipe.max_new_tokens)
            return torch.tensor([[*ids, *tokens]], device=self.device)

    def _on_device(self) -> LoadedModel:
        """The model where its weights are now."""
        return replace(self._loaded, device=self.device)

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.parameters())
        return f"Model({self.name!r}, {count:,} parameters, {self.precision} on {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Model:
        checkpoint = self._opened.checkpoint
        root = None if checkpoint is None else checkpoint.root
        loaded, root = copy.deepcopy((self._loaded, root), memo)  # which share their modules
        opened = self._opened
        if checkpoint is not None and root is not None:
            opened = replace(opened, checkpoint=replace(checkpoint, root=root))
        return Model(opened, loaded)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{self!r} cannot be pickled; save model.state_dict(), or load {self.name!r} again"
        )


class ModelTokenizer:
    """A model's tokenizer, by whose other names its `data.text.tokenizer.Tokenizer` is reached."""

    def __init__(self, opened: OpenedModel, device: torch.device) -> None:
        self._opened, self._device = opened, device

    @property
    def base(self) -> Tokenizer:
        """The tokenizer itself."""
        return self._opened.tokenizer

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Tensor:
        """Return the ids (1, T) of a text to be continued, on the model's device.

        They begin as documents began in the model's training, unless `add_special_tokens` is false.
        """
        if not isinstance(text, str):
            raise UserError(f"tokenizer: takes one text, and this is a {type(text).__name__}")
        ids = self._opened.prompt_ids(text, add_special_tokens=add_special_tokens)
        return torch.tensor([ids], dtype=torch.int64, device=self._device)

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """Return the text of ids (T,) or (1, T)."""
        numbers = ids.flatten().tolist() if isinstance(ids, Tensor) else [*ids]
        return self.base.decode(numbers)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.base, name)


def load(
    name: str | os.PathLike[str],
    *,
    precision: str | None = None,
    weights: str | None = None,
    device: str | torch.device | None = None,
) -> Model:
    """Load a model.

    >>> lf.load("runs/quickstart").name
    'runs/quickstart'

    Args:
        name: a run's folder or a checkpoint's, or the URL of one; a `Run`; an adapter's folder in
            peft's format; a folder that transformers saved, or hf:OWNER/NAME on the hub; or a
            registered version, models:/NAME@best.
        precision: fp32, bf16, fp16 or amp_bf16; None: the default of scripts/generate.py.
        weights: of a run: trained, or ema for their average; None: those that the run evaluates.
        device: None: this process's GPU, else the CPU.

    Raises:
        UserError: there is no such model, or it cannot be used here.
    """
    written = os.fspath(name)
    # These values are checked as scripts/generate.py checks them.
    values = {"precision": precision, "weights": weights}
    recipe = checked_texts(GenerateRecipe, {"checkpoint": written}, values)
    world = this_process(device)
    address = find_address(written, "checkpoint", world, uri=recipe.registry.uri, note=to_stderr)
    opened = open_model(address, world, note=to_stderr, precision=precision, weights=weights)
    loaded = opened.load()
    for line in loaded.notes:
        to_stderr(line)
    return Model(replace(opened, name=written), loaded)


def build(
    recipe: TrainRecipe | str,
    overrides: Overrides = (),
    *,
    device: str | torch.device | None = None,
) -> Model:
    """Return the model that a run of a recipe begins with: initialized, or pretrained.

    >>> new = lf.build(lf.recipe("tiny.yaml"))
    >>> new.name
    'tiny, before training'

    Args:
        recipe: from `lf.recipe`, or what `lf.recipe` takes.
        overrides: with the name of a recipe, as of `lf.recipe`.
        device: None: this process's GPU, else the CPU.
    """
    resolved = checked_recipe(recipe, overrides).resolve()
    world = this_process(device)
    resolved.precision = served_precision(resolved.precision, world, to_stderr)
    pretrained = None
    if isinstance(resolved, ResolvedFinetuneRecipe):
        pretrained = open_base(resolved, world, note=to_stderr)
    tokenizer = make_tokenizer(resolved, world, pretrained)
    settle_vocabulary(resolved, tokenizer, to_stderr)
    # The weights, on the device; those of a run do not depend on its layout either.
    root = build_root(resolved)
    adapt(root.model, resolved, note=to_stderr)
    root.to_empty(device=world.device)
    if pretrained is None:
        root.model.init_weights(resolved.seed)
    else:
        pretrained.fill(root.model)
        begin_adapter(root.model, resolved)
    root.eval()
    config = root.model.config
    is_class = isinstance(resolved.model, HFModelConfig)
    loaded = LoadedModel(
        tokenizer=tokenizer,
        device=world.device,
        precision=resolved.precision,
        end_ids=frozenset(tokenizer.end_ids),
        n_tokens=config.vocab_size,
        longest=longest_document(config),
        root=None if is_class else root,
        hugging_face=getattr(root.model, "hf", None) if is_class else None,
    )
    name, start = f"{resolved.run_name}, before training", tuple(tokenizer.document_start)
    opened = OpenedModel(name, tokenizer, config.max_seq_len, start, load=lambda: loaded)
    return Model(opened, loaded)


@contextmanager
def in_eval_mode(*models: Model) -> Iterator[None]:
    """Set models to eval mode; afterwards each of their modules has its mode again."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def this_process(device: str | torch.device | None = None) -> World:
    """Return the world of this process alone, also under a launcher."""
    if device is None:
        return World(0, 1, 0, choose_device(int(os.environ.get("LOCAL_RANK", 0)), None))
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device: {device} cannot be used: {one_line(error)}; write cpu") from error
    return World(0, 1, 0, torch.device(device))
