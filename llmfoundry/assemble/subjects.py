"""Models from outside of the house as the gauntlet's subjects: Hugging Face's, and endpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmfoundry.assemble.job import served_precision
from llmfoundry.data.text.bpe import END_OF_TEXT, bytes_backend
from llmfoundry.data.text.chat_template import ChatTemplate
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.gauntlet.models.endpoint import Endpoint
from llmfoundry.gauntlet.prompts.settings import RAW, Chat, PromptSettings
from llmfoundry.gauntlet.questions import EvaluatedModel
from llmfoundry.parallel.launch import World
from llmfoundry.recipe.scripts.after_training import EvalRecipe

HUGGING_FACE, CHAT, COMPLETIONS = "hf:", "chat:", ("http://", "https://")
BATCH_TOKENS = 8192  # of a Hugging Face model at a time, where the recipe says nothing
ENDPOINT_BYTES = 1 << 20  # of a prompt: the server knows what it reads at most, we do not


@dataclass(frozen=True)
class ExternalModel:
    """How a model is asked, and what loads it.

    Attributes:
        asking: its tokenizer and longest input.
        load: who is asked, and what it has to say about itself after that.
    """

    asking: PromptSettings
    load: Callable[[], tuple[EvaluatedModel, list[str]]]


def is_outside(model: str) -> bool:
    """Whether a model's name is that of none of our runs."""
    folder = Path(model).expanduser()
    return model.startswith((HUGGING_FACE, CHAT, *COMPLETIONS)) or (
        (folder / "config.json").is_file()
    )


def check_outside(model: str, seq_len: int | None) -> None:
    """Whether there is a model of this name, without reading its weights or asking a server.

    Raises:
        UserError: there is none, or it reads less than seq_len.
    """
    if model.startswith((CHAT, *COMPLETIONS)):
        _address(model)
        return
    import llmfoundry.hf  # noqa: F401  registers our own class
    from llmfoundry.gauntlet.models.hugging_face import load_config

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

    Raises:
        UserError: there is no such model, or it cannot be used.
    """
    if model.startswith((CHAT, *COMPLETIONS)):
        return _endpoint(model)
    import llmfoundry.hf  # noqa: F401  registers our own class; transformers takes seconds
    from llmfoundry.gauntlet.models.hugging_face import document_start, open_hugging_face

    rows = recipe.device_eval_batch_size
    opened = open_hugging_face(model.removeprefix(HUGGING_FACE), seq_len=seq_len)

    def load() -> tuple[EvaluatedModel, list[str]]:
        subject = opened.load(
            device=world.device,
            precision=served_precision(recipe.precision or "fp32", world.device, note),
            batch_tokens=rows * (seq_len or 1024) if isinstance(rows, int) else BATCH_TOKENS,
        )
        return subject, subject.notes

    start = document_start(opened.config)
    return ExternalModel(PromptSettings.by_training(opened.tokenizer, opened.seq_len, start), load)


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

    subject = Endpoint(address, name, chat=model.startswith(CHAT), spell=spell)
    asking = PromptSettings.by_training(tokenizer, ENDPOINT_BYTES, None)
    chat = Chat(ChatTemplate(RAW, {})) if subject.chat else None
    asking = replace(asking, unit="bytes", can_score=subject.can_score, chat=chat)
    return ExternalModel(asking, lambda: (subject, []))
