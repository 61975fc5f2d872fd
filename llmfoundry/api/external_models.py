"""Models from elsewhere in an evaluation: Hugging Face models, adapters and endpoints.

`examine.py` opens a model by `open_outside`: first its tokenizer and prompt settings, and its
weights when the model is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from llmfoundry.builders.model_layout import ModelLayout
from llmfoundry.builders.open_model import (
    CHAT,
    LoadedModel,
    OpenedModel,
    check_model,
    is_adapter,
    is_endpoint,
    is_hugging_face,
    open_model,
)
from llmfoundry.data.text.bpe import bytes_backend
from llmfoundry.data.text.chat_template import ChatTemplate
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.gauntlet.models.endpoint import Endpoint
from llmfoundry.gauntlet.models.hugging_face import HuggingFaceModel
from llmfoundry.gauntlet.models.own_decoder import OwnModel
from llmfoundry.gauntlet.questions import RAW, Chat, EvaluatedModel, PromptSettings
from llmfoundry.recipe.after_training import EvalRecipe

BATCH_TOKENS = 8192  # of a Hugging Face model at a time, where the recipe sets nothing
UNSPELLED = "\uffff"  # no character: the server alone reads special tokens that a text spells
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
    return is_endpoint(model) or is_hugging_face(model) or is_adapter(model)


def check_outside(model: str, seq_len: int | None) -> None:
    """Whether there is a model of this name, without reading its weights or asking a server."""
    if is_endpoint(model):
        _address(model)
    else:
        check_model(model, seq_len=seq_len)


def open_outside(
    model: str,
    recipe: EvalRecipe,
    world: World,
    *,
    seq_len: int | None,
    note: Callable[[str], None],
    live: OpenedModel | None = None,
    layout: ModelLayout | None = None,
) -> ExternalModel:
    """The model that a name stands for, but for its weights; see EvalRecipe.models.

    Args:
        model: the name.
        recipe: how it is computed.
        world: this process.
        seq_len: longest question in tokens; unset: what the model reads at most.
        note: reports what the model is computed in, if that is not what was asked.
        live: the model, if a program holds it.
        layout: how the model is distributed over processes; None: this process holds all of it.
    """
    if live is None and is_endpoint(model):
        return _endpoint(model)
    opened = live or open_model(
        model, world, note=note, precision=recipe.precision, seq_len=seq_len, layout=layout
    )
    rows = recipe.device_eval_batch_size
    tokens = rows * (seq_len or 1024) if isinstance(rows, int) else BATCH_TOKENS

    def load() -> tuple[EvaluatedModel, list[str]]:
        loaded = opened.load()
        return _evaluated(loaded, world, opened.window, tokens), [*loaded.notes]

    settings = PromptSettings.by_training(opened.tokenizer, opened.window, opened.start)
    return ExternalModel(settings, load)


def _evaluated(
    loaded: LoadedModel, world: World, seq_len: int, batch_tokens: int
) -> EvaluatedModel:
    world = world.in_evaluation()
    if loaded.root is None:
        return HuggingFaceModel(
            loaded.hugging_face,
            loaded.tokenizer,
            seq_len=seq_len,
            batch_tokens=batch_tokens,
            autocast=loaded.precision == "amp_bf16",
        )
    return OwnModel(
        loaded.root,
        loaded.tokenizer,
        seq_len=seq_len,
        device=world.device,
        batch_tokens=batch_tokens,
        autocast=loaded.autocast,
        data_rank=world.data_rank,
        data_size=world.data_size,
        data_group=world.data_group,
        end_ids=loaded.end_ids,
        n_tokens=loaded.n_tokens,
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
    tokenizer = Tokenizer(bytes_backend(UNSPELLED), UNSPELLED)

    def spell(ids: Sequence[int]) -> str:
        return tokenizer.decode([i for i in ids if i != tokenizer.eos_id])

    endpoint = Endpoint(address, name, chat=model.startswith(CHAT), spell=spell)
    settings = PromptSettings.by_training(tokenizer, ENDPOINT_BYTES, None)
    chat = Chat(ChatTemplate(RAW, {})) if endpoint.chat else None
    settings = replace(settings, unit="bytes", can_score=endpoint.can_score, chat=chat)
    return ExternalModel(settings, lambda: (endpoint, []))
