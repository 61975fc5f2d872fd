"""`open_model`: any model that a name stands for, for whoever asks it.

`generate`, `chat` and `serve` ask its engine; the gauntlet asks models that are no runs of ours
through it (`api/examine.py`). A Hugging Face model that the decoder expresses exactly is
computed by it; any other by transformers' own class. An adapter is merged into its base.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmfoundry.builders.adapter import check_base
from llmfoundry.builders.checkpoint import LoadedCheckpoint, open_checkpoint
from llmfoundry.builders.model import build_autocast, loaded_precision, weight_dtype
from llmfoundry.builders.model_layout import ModelLayout, full_model
from llmfoundry.builders.pretrained import fill_model
from llmfoundry.data.text.tokenizer import Tokenizer, special_tokens
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError, import_optional
from llmfoundry.inference.decoder_slots import (
    Autocast,
    DecoderSlots,
    first_process,
    next_logits,
    stream_tokens,
)
from llmfoundry.inference.engine import SlotEngine, SlotModel
from llmfoundry.inference.hugging_face_slots import HuggingFaceSlots
from llmfoundry.inference.leading_rank import OPEN, PASS, LeadingSlots, PassChannel, follow
from llmfoundry.inference.requests import SequenceRequest
from llmfoundry.models.adapter import merge_into
from llmfoundry.models.attention import longest_document
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.models.quantized import is_quantized
from llmfoundry.recipe.model import HFModelConfig

if TYPE_CHECKING:
    from llmfoundry.hf.open_class import OpenedHuggingFace

HUGGING_FACE, CHAT, COMPLETIONS = "hf:", "chat:", ("http://", "https://")
ADAPTER = "adapter_config.json"
_DEPTH = 4  # adapters on adapters: more of them are a circle


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, on this process.

    Attributes:
        tokenizer: the model's.
        device: where it is.
        precision: see ResolvedTrainRecipe.
        end_ids: tokens that end a text.
        n_tokens: ids below it may be drawn.
        longest: tokens that it can read; None: there is no end to it.
        root: the decoder that computes it; None: transformers' own class does.
        hugging_face: transformers' object; None: the decoder computes it.
        notes: what a reader must know of how it is computed.
        channel: of rank 0 of several ranks, which announces every forward pass; None: every rank
            makes the same calls, or there is one process.
    """

    tokenizer: Tokenizer
    device: torch.device
    precision: str
    end_ids: frozenset[int]
    n_tokens: int
    longest: int | None
    root: Root | None = None
    hugging_face: Any = None
    notes: tuple[str, ...] = ()
    channel: PassChannel | None = None

    @property
    def autocast(self) -> Autocast:
        """Makes the context of a forward pass."""
        return build_autocast(self.precision, self.device)

    def slot_model(self, *, slots: int, length: int, way: str | None = None) -> SlotModel:
        """What an engine computes with; it takes memory for slots x length tokens.

        `way`: of `HuggingFaceSlots`.
        """
        if self.root is None:
            autocast = self.precision == "amp_bf16"
            return HuggingFaceSlots(
                self.hugging_face,
                slots=slots,
                length=length,
                n_tokens=self.n_tokens,
                autocast=autocast,
                way=way,
            )
        if self.channel is None:
            return self._decoder_slots(slots, length)
        with self.channel.announced(OPEN, slots, length):
            return LeadingSlots(self.channel, self._decoder_slots(slots, length))

    def _decoder_slots(self, slots: int, length: int) -> DecoderSlots:
        assert self.root is not None
        return DecoderSlots(
            self.root,
            slots=slots,
            length=length,
            n_tokens=self.n_tokens,
            device=self.device,
            autocast=self.autocast,
        )

    def engine(self, *, slots: int, length: int, way: str | None = None) -> SlotEngine:
        """What is asked; see `slot_model`."""
        agree = first_process(self.device) if self.channel is None else None
        return SlotEngine(self.slot_model(slots=slots, length=length, way=way), agree=agree)

    def stream_without_cache(self, request: SequenceRequest) -> Iterator[int]:
        """Sample the tokens of one request without a KV cache; of the decoder only."""
        assert self.root is not None
        return stream_tokens(
            self.root,
            request,
            device=self.device,
            autocast=self.autocast,
            n_tokens=self.n_tokens,
            run_pass=None if self.channel is None else self._lead_pass,
        )

    def follow(self, channel: PassChannel) -> None:
        """Run every forward pass that rank 0 announces, until it ends."""
        follow(channel, self._decoder_slots, self._run_pass)

    def _lead_pass(self, tokens: Sequence[int]) -> Tensor:
        assert self.channel is not None
        with self.channel.announced(PASS, tokens):
            return self._run_pass(tokens)

    def _run_pass(self, tokens: Sequence[int]) -> Tensor:
        assert self.root is not None
        return next_logits(self.root, tokens, device=self.device, autocast=self.autocast)


@dataclass(frozen=True)
class OpenedModel:
    """A model that is there, of which all is read but the weights.

    Attributes:
        name: as the user wrote it.
        tokenizer: its own.
        window: tokens that it was made to read at most, its answer with them.
        start: what documents began with in its training; None: it was not trained here.
        load: reads the weights.
        load_class: reads them into transformers' class, for a given reason; None: it has none.
        checkpoint: of one of our runs; None: it is another's model, or it has no checkpoint.
    """

    name: str
    tokenizer: Tokenizer
    window: int
    start: tuple[int, ...] | None
    load: Callable[[], LoadedModel]
    load_class: Callable[[str], LoadedModel] | None = None
    checkpoint: LoadedCheckpoint | None = None

    @property
    def longest(self) -> int | None:
        """Learned positions of one of our runs; None: unlimited, or not known before `load`."""
        if self.checkpoint is None:
            return None
        return longest_document(self.checkpoint.root.model.config)

    def prompt_ids(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text to be continued, at least one.

        Special tokens that the text spells are read. A plain text begins as documents began in the
        model's training; where that is not known, with what the tokenizer puts before every text,
        as in transformers and lm-evaluation-harness. `add_special_tokens=False` puts nothing there.
        """
        if not add_special_tokens:
            return self.tokenizer.encode_chat(text)
        special = special_tokens(self.tokenizer, start=self.start)
        before = special.before if self.start is None else special.start
        return self.tokenizer.encode_prompt(text, start=before) or [special.prefix]


def lead(model: LoadedModel, world: World, speak: Callable[[LoadedModel], None]) -> None:
    """Call `speak` with the model on rank 0, while all other ranks run its forward passes.

    Every rank calls it. Ctrl-C and SIGTERM are for rank 0.
    """
    if world.size == 1:
        speak(model)
        return
    channel = PassChannel(world)
    if not world.is_main:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        model.follow(channel)
        return
    try:
        speak(replace(model, channel=channel))
    except (UserError, KeyboardInterrupt):  # not in a forward pass, so the other ranks can end
        channel.end()
        raise
    channel.end()


def is_hugging_face(name: str) -> bool:
    """Whether a name is a Hugging Face model's: hf:OWNER/NAME, or a folder with config.json."""
    folder = Path(name).expanduser()
    return name.startswith(HUGGING_FACE) or (folder / "config.json").is_file()


def is_adapter(name: str) -> bool:
    """Whether a name is that of an adapter's folder."""
    return (Path(name).expanduser() / ADAPTER).is_file() and not is_hugging_face(name)


def is_endpoint(name: str) -> bool:
    """Whether a name is a server's address."""
    return name.startswith((CHAT, *COMPLETIONS))


def check_model(name: str, *, seq_len: int | None = None) -> None:
    """Whether there is a Hugging Face model or an adapter of this name; no weights are read.

    Raises:
        UserError: there is none, or it reads less than seq_len.
    """
    if is_adapter(name):
        base = base_of_adapter(Path(name).expanduser())
        if is_hugging_face(base) or is_adapter(base):
            check_model(base, seq_len=seq_len)
        return
    from llmfoundry.hf.open_class import load_config  # transformers takes seconds

    load_config(name.removeprefix(HUGGING_FACE), seq_len)


def not_a_run(weights: str) -> UserError:
    """Return the error for `weights` of a model that is not one of our runs."""
    return UserError(f"weights: {weights} is for models that were trained here; remove it")


def open_model(
    name: str,
    world: World,
    *,
    note: Callable[[str], None],
    precision: str | None = None,
    seq_len: int | None = None,
    layout: ModelLayout | None = None,
    weights: str | None = None,
    depth: int = 0,
) -> OpenedModel:
    """The model that a name stands for, as `scripts/eval.py` takes names.

    Args:
        name: a run's folder or a checkpoint's, or the URL of one; an adapter's folder, as peft
            saves it; a folder that transformers saved, or hf:OWNER/NAME on the hub.
        world: this process.
        note: reports what the user should know.
        precision: of the loaded weights; None: see `loaded_precision`.
        seq_len: longest input in tokens; None: what the model reads at most.
        layout: how the model is distributed over processes; None: this process holds all of it.
        weights: of one of our runs: trained, or ema for their average; None: those that the run
            evaluates.
        depth: adapters that stand on this model.

    Raises:
        UserError: there is no such model, or it cannot be used here.
    """
    if is_endpoint(name):
        raise UserError(
            f"checkpoint: {name} is a server's address; write a model that is here, or"
            f" {HUGGING_FACE}OWNER/NAME"
        )
    layout = layout or full_model()
    how: dict[str, Any] = {"note": note, "precision": precision, "layout": layout}
    if weights is not None and (is_adapter(name) or is_hugging_face(name)):
        raise not_a_run(weights)
    if is_adapter(name):
        return _open_adapter(name, world, depth, seq_len=seq_len, **how)
    if is_hugging_face(name):
        return _open_hugging_face(name, world, seq_len=seq_len, **how)
    if "://" not in name and name.count("/") < 2 and not Path(name).expanduser().exists():
        try:
            return _open_run(name, world, weights=weights, **how)
        except UserError as error:
            hint = f"; a model on the Hugging Face hub is {HUGGING_FACE}{name}"
            raise UserError(*(line + hint for line in error.problems)) from error
    return _open_run(name, world, weights=weights, **how)


def _open_run(
    name: str,
    world: World,
    *,
    note: Callable[[str], None],
    precision: str | None,
    layout: ModelLayout,
    weights: str | None,
) -> OpenedModel:
    loaded, fill = open_checkpoint(
        name, world, note=note, precision=precision, layout=layout, weights=weights
    )
    if layout.is_sharded and isinstance(loaded.recipe.model, HFModelConfig):
        raise _class_in_shards(name, "its run has model.name: hf_causal_lm")
    if layout.is_sharded:
        note(f"{name}: {layout.describe(loaded.root.model, loaded.recipe.precision)}")
    window = loaded.recipe.model.max_seq_len

    def load() -> LoadedModel:
        fill()
        return of_run(loaded, world)

    start = tuple(loaded.tokenizer.document_start) if loaded.is_trained else None
    return OpenedModel(name, loaded.tokenizer, window, start, load, checkpoint=loaded)


def of_run(loaded: LoadedCheckpoint, world: World) -> LoadedModel:
    """One of our own, with its weights."""
    model: Any = loaded.root.model
    is_class = isinstance(loaded.recipe.model, HFModelConfig)
    return LoadedModel(
        tokenizer=loaded.tokenizer,
        device=world.device,
        precision=loaded.recipe.precision,
        end_ids=frozenset(loaded.tokenizer.end_ids),
        n_tokens=model.config.vocab_size,
        longest=longest_document(model.config),
        root=None if is_class else loaded.root,
        hugging_face=model.hf if is_class else None,
    )


def _open_hugging_face(
    name: str,
    world: World,
    *,
    note: Callable[[str], None],
    precision: str | None,
    seq_len: int | None,
    layout: ModelLayout,
) -> OpenedModel:
    from llmfoundry.hf.open_class import document_start, open_hugging_face  # takes seconds

    opened = open_hugging_face(name.removeprefix(HUGGING_FACE), seq_len=seq_len)

    def load_class(reason: str) -> LoadedModel:
        return _by_class(opened, world, loaded_precision(precision, "fp32", world, note), reason)

    def load() -> LoadedModel:
        try:
            kind = loaded_precision(precision, "fp32", world, note)
            return _by_decoder(opened, world, kind, layout, note)
        except UserError as error:
            if layout.is_sharded:
                if error.problems[0].startswith("parallel."):
                    raise  # a degree that does not divide the model
                raise _class_in_shards(name, str(error)) from error
            return load_class(error.problems[0].partition(" (can be:")[0])

    start = document_start(opened.config)
    by_class = None if layout.is_sharded else load_class
    return OpenedModel(name, opened.tokenizer, opened.seq_len, start, load, by_class)


def _class_in_shards(name: str, reason: str) -> UserError:
    return UserError(
        f"parallel: {name} is not computed by the native decoder, and only that is sharded here"
        f" ({reason}); remove parallel"
    )


def _by_decoder(
    opened: OpenedHuggingFace,
    world: World,
    precision: str,
    layout: ModelLayout,
    note: Callable[[str], None],
) -> LoadedModel:
    """A Hugging Face model computed by the decoder."""
    from llmfoundry.hf.read_folder import hf_folder, open_hf

    with open_hf(hf_folder(opened.name), note=lambda _: None) as found:
        with torch.device("meta"):
            root = Root(Decoder(found.config)).to(weight_dtype(precision))
        layout.check(found.config)
        if layout.is_sharded:
            note(f"{opened.name}: {layout.describe(root.model, precision)}")
        layout.place(root, world, precision=precision)
        fill_model(root.model, found.state())
    return _loaded(
        opened,
        world,
        precision,
        root=root.eval(),
        n_tokens=found.config.vocab_size,
        longest=longest_document(found.config),
    )


def _by_class(opened: OpenedHuggingFace, world: World, precision: str, reason: str) -> LoadedModel:
    """A Hugging Face model computed by its own class, for that reason."""
    theirs = opened.load(device=world.device, precision=precision)
    return _loaded(
        opened,
        world,
        precision,
        hugging_face=theirs,
        n_tokens=int(theirs.config.get_text_config().vocab_size),
        longest=opened.seq_len,
        notes=(f"{type(theirs).__name__} of transformers computes it, which is slower: {reason}",),
    )


def _loaded(opened: OpenedHuggingFace, world: World, precision: str, **found: Any) -> LoadedModel:
    """What both have of a Hugging Face model, and the rest."""
    return LoadedModel(
        tokenizer=opened.tokenizer,
        device=world.device,
        precision=precision,
        end_ids=frozenset(opened.end_ids()),
        **found,
    )


def base_of_adapter(folder: Path) -> str:
    """The name of the model that an adapter was made for.

    A path that is not there is looked for from each folder above, where both were copied together.

    Raises:
        UserError: its folder names none.
    """
    from llmfoundry.hf.peft.names import read_config

    base = read_config(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(
            f"{folder / ADAPTER}: names no base model; write it as base_model_name_or_path"
        )
    given = Path(base).expanduser()
    if "://" in base or base.startswith(HUGGING_FACE) or given.exists():
        return base
    for above in folder.absolute().parents:
        if (above / given).is_dir():
            return str(above / given)
    is_path = given.is_absolute() or base.startswith((".", "runs/")) or base.count("/") > 1
    return base if is_path else f"{HUGGING_FACE}{base}"


def _open_adapter(
    name: str,
    world: World,
    depth: int,
    *,
    note: Callable[[str], None],
    precision: str | None,
    seq_len: int | None,
    layout: ModelLayout,
) -> OpenedModel:
    folder = Path(name).expanduser()
    if depth == _DEPTH:
        raise UserError(f"{folder}: an adapter on {depth} adapters; write one on a model")
    base = open_model(
        base_of_adapter(folder),
        world,
        note=note,
        precision=precision,
        seq_len=seq_len,
        layout=layout,
        depth=depth + 1,
    )
    tokenizer, ends = base.tokenizer, {base.tokenizer.eos_id}
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.load(folder)
        ends = {*tokenizer.end_ids}

    def load() -> LoadedModel:
        loaded = base.load()
        if tokenizer.vocab_size > loaded.n_tokens:
            raise UserError(
                f"{folder}: its tokenizer has {tokenizer.vocab_size} tokens, but {base.name}"
                f" {loaded.n_tokens}; remove its tokenizer.json, or name the right base"
            )
        if loaded.root is None:
            loaded = _add_to_class(loaded, folder)
        else:
            loaded = _add_to_decoder(loaded, folder, base.load_class)
        note(f"{folder}: merged into {base.name}")
        return replace(loaded, tokenizer=tokenizer, end_ids=loaded.end_ids | ends)

    return replace(
        base, name=name, tokenizer=tokenizer, load=load, load_class=None, checkpoint=None
    )


def _add_to_decoder(
    loaded: LoadedModel, folder: Path, load_class: Callable[[str], LoadedModel] | None
) -> LoadedModel:
    """Merge an adapter into the decoder, or, where it cannot hold it, into transformers' class."""
    from llmfoundry.hf.peft.read import PeftNeeded, read_adapter

    assert loaded.root is not None
    model = loaded.root.model
    if is_quantized(model):
        raise UserError(f"{folder}: its base has weights of 4 bits; name one that has not")
    check_base(model, folder, ADAPTER)
    with torch.device("meta"):
        plain = Decoder(model.config)
    try:
        read = read_adapter(folder, plain, dropout=0.0)
    except PeftNeeded as error:
        if load_class is None:
            raise
        model.to_empty(device="meta")  # its memory goes before the class takes as much
        return _add_to_class(load_class(error.problems[0]), folder)
    with torch.no_grad():
        merge_into(model, read.plan, read.tensors)
    return loaded


def _add_to_class(loaded: LoadedModel, folder: Path) -> LoadedModel:
    import_optional("peft", "an adapter on a model of transformers' class", extra="peft")
    from llmfoundry.hf.peft.class_adapter import merge_folder

    return replace(loaded, hugging_face=merge_folder(loaded.hugging_face, folder))
