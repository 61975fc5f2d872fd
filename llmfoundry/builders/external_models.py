"""Models from elsewhere for the gauntlet: Hugging Face's, and endpoints.

A Hugging Face model that the decoder expresses exactly is computed by it, with shared beginnings
computed once; any other by transformers' own class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from llmfoundry.builders.job import build_autocast, served_precision, weight_dtype
from llmfoundry.builders.pretrained import fill_model
from llmfoundry.data.text.bpe import END_OF_TEXT, bytes_backend
from llmfoundry.data.text.chat_template import ChatTemplate
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.launch import World
from llmfoundry.errors import UserError
from llmfoundry.gauntlet.models.endpoint import Endpoint
from llmfoundry.gauntlet.models.hugging_face import (
    OpenedHuggingFace,
    document_start,
    load_config,
    open_hugging_face,
)
from llmfoundry.gauntlet.models.own import OwnModel
from llmfoundry.gauntlet.prompts.settings import RAW, Chat, PromptSettings
from llmfoundry.gauntlet.questions import EvaluatedModel
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.recipe.scripts.after_training import EvalRecipe

HUGGING_FACE, CHAT, COMPLETIONS = "hf:", "chat:", ("http://", "https://")
BATCH_TOKENS = 8192  # of a Hugging Face model at a time, where the recipe sets nothing
ENDPOINT_BYTES = 1 << 20  # of a prompt: the server knows what it reads at most, we do not


@dataclass(frozen=True)
class ExternalModel:
    """How a model is asked, and what loads it.

    Attributes:
        settings: its tokenizer and longest input.
        load: the model with its weights, and what a reader must know of how it is computed.
    """

    settings: PromptSettings
    load: Callable[[], tuple[EvaluatedModel, list[str]]]


def is_outside(model: str) -> bool:
    """Whether a model's name is that of none of our runs."""
    folder = Path(model).expanduser()
    return model.startswith((HUGGING_FACE, CHAT, *COMPLETIONS)) or (
        (folder / "config.json").is_file()
    )


def check_outside(model: str, seq_len: int | None) -> None:
    """Whether there is a model of this name, without reading its weights or asking a server."""
    if model.startswith((CHAT, *COMPLETIONS)):
        _address(model)
        return
    import llmfoundry.hf  # noqa: F401  registers our own class

    load_config(model.removeprefix(HUGGING_FACE), seq_len)


def open_outside(
    model: str,
    recipe: EvalRecipe,
    world: World,
    *,
    seq_len: int | None,
    note: Callable[[str], None],
) -> ExternalModel:
    """The model that a name stands for, but for its weights; see EvalRecipe.models.

    Args:
        model: the name.
        recipe: how it is computed.
        world: this process.
        seq_len: longest question in tokens; unset: what the model reads at most.
        note: reports what the model is computed in, if that is not what was asked.
    """
    if model.startswith((CHAT, *COMPLETIONS)):
        return _endpoint(model)
    import llmfoundry.hf  # noqa: F401  registers our own class; transformers takes seconds

    rows = recipe.device_eval_batch_size
    opened = open_hugging_face(model.removeprefix(HUGGING_FACE), seq_len=seq_len)

    def load() -> tuple[EvaluatedModel, list[str]]:
        precision = served_precision(recipe.precision or "fp32", world, note)
        tokens = rows * (seq_len or 1024) if isinstance(rows, int) else BATCH_TOKENS
        try:
            return _by_decoder(opened, world, precision, tokens), []
        except UserError as error:
            reason = error.problems[0].partition(" (can be:")[0]
        theirs = opened.load(device=world.device, precision=precision, batch_tokens=tokens)
        kind = type(theirs.model).__name__
        return theirs, [f"{kind} of transformers, each text apart, which is slower: {reason}"]

    start = document_start(opened.config)
    settings = PromptSettings.by_training(opened.tokenizer, opened.seq_len, start)
    return ExternalModel(settings, load)


def _by_decoder(
    opened: OpenedHuggingFace, world: World, precision: str, batch_tokens: int
) -> OwnModel:
    """A Hugging Face model computed by the decoder."""
    from llmfoundry.hf.read import hf_folder, open_hf

    with open_hf(hf_folder(opened.name), note=lambda _: None) as found:
        with torch.device("meta"):
            root = Root(Decoder(found.config)).to(weight_dtype(precision))
        root.to_empty(device=world.device)
        fill_model(root.model, found.tensors())
    return OwnModel(
        root.eval(),
        opened.tokenizer,
        seq_len=opened.seq_len,
        device=world.device,
        batch_tokens=batch_tokens,
        autocast=build_autocast(precision, world.device),
        data_rank=world.data_rank,
        data_size=world.data_size,
        data_group=world.data_group,
        end_ids=opened.end_ids(),
        n_tokens=found.config.vocab_size,  # as transformers draws: all that the head has
    )


def _address(model: str) -> tuple[str, str]:
    """chat: or nothing, an address, # and the server's name of the model: the last two."""
    address, _, name = model.removeprefix(CHAT).partition("#")
    if not name:
        raise UserError(
            f"models: {model}: names no model; write ADDRESS#MODEL, such as"
            " http://localhost:8000/v1#my-model"
        )
    return address, name


def _endpoint(model: str) -> ExternalModel:
    address, name = _address(model)
    # it takes text: tokens are bytes here, and only bound the length
    tokenizer = Tokenizer(bytes_backend(), END_OF_TEXT)

    def spell(ids: Sequence[int]) -> str:
        return tokenizer.decode([i for i in ids if i != tokenizer.eos_id])

    endpoint = Endpoint(address, name, chat=model.startswith(CHAT), spell=spell)
    settings = PromptSettings.by_training(tokenizer, ENDPOINT_BYTES, None)
    chat = Chat(ChatTemplate(RAW, {})) if endpoint.chat else None
    settings = replace(settings, unit="bytes", can_score=endpoint.can_score, chat=chat)
    return ExternalModel(settings, lambda: (endpoint, []))
