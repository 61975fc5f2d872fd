"""A causal language model of transformers opened by its own class, to be asked.

`builders/open_model.py` calls `open_hugging_face` for a folder or a hub id that is no run of ours.
What is loaded is checked first: weights that a folder lacks would be random numbers, and what is
made of them looks plausible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmfoundry.data.text.bounded_backend import with_bounds
from llmfoundry.data.text.tokenizer import Tokenizer, check_tokenizer
from llmfoundry.errors import UserError
from llmfoundry.hf.architectures import DOCUMENT_START
from llmfoundry.hf.read_folder import read_folder_config
from llmfoundry.inference.hugging_face_rows import end_ids

DEFAULT_SEQ_LEN = 2048
"""For configs and tokenizers that specify no longest input, as in lm-evaluation-harness."""
_SEQ_LENS = ("n_positions", "max_position_embeddings", "n_ctx", "max_seq_len")
_WEIGHTS = ("*.safetensors", "*.bin")
_SAFE: dict[str, Any] = {"trust_remote_code": False}  # Python files of a folder are not run
_UNSET = 10**9  # transformers writes 1e30 as a tokenizer's model_max_length where none is known


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of transformers under our interface."""

    def __init__(self, name: str, loaded: Any) -> None:
        """Take over a tokenizer of transformers.

        Raises:
            UserError: it is empty, is no tokenizer of the `tokenizers` library, or names no end of
                text.
        """
        if not loaded("a", add_special_tokens=False).input_ids:
            raise UserError(
                f"{name}: has no tokenizer: its folder holds no tokenizer.json; save the model's"
                " tokenizer there"
            )
        if not getattr(loaded, "is_fast", False):
            raise UserError(
                f"{name}: its tokenizer, {type(loaded).__name__}, is not of the tokenizers library;"
                " choose a model with a tokenizer.json"
            )
        if loaded.eos_token is None:
            raise UserError(
                f"{name}: its tokenizer names no end-of-text token; add"
                ' "eos_token" to its tokenizer_config.json'
            )
        names = ("bos_token", "chat_template", "pad_token", "unk_token")
        kept = {key: getattr(loaded, key, None) for key in names}
        super().__init__(with_bounds(loaded.backend_tokenizer, name), loaded.eos_token, kept)
        self.template_file = f"{name}: chat_template"


@dataclass(frozen=True)
class OpenedHuggingFace:
    """A model that is there, of which all is read but the weights.

    Attributes:
        name: a folder, or an id on the hub.
        config: its config.json, as transformers reads it.
        tokenizer: its own.
        seq_len: longest input in tokens.
    """

    name: str
    config: Any
    tokenizer: HuggingFaceTokenizer
    seq_len: int

    def end_ids(self) -> set[int]:
        """The tokens that end a text."""
        import transformers  # seconds

        try:
            settings = transformers.GenerationConfig.from_pretrained(self.name)
        except OSError:  # it has no generation_config.json
            settings = self.config.get_text_config()
        return end_ids(getattr(settings, "eos_token_id", None), self.tokenizer)

    def load(self, *, device: torch.device, precision: str) -> Any:
        """Transformers' model with its weights.

        Args:
            device: where it goes.
            precision: fp32 or amp_bf16, weights in fp32; or bf16, weights too.

        Raises:
            UserError: they cannot be read, or some are missing.
        """
        import transformers  # seconds

        model, report = _load(
            self.name,
            "weights",
            transformers.AutoModelForCausalLM.from_pretrained,
            config=self.config,
            dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
            output_loading_info=True,
            **_SAFE,
        )
        _check_weights(self.name, report["missing_keys"])
        return model.to(device)


def open_hugging_face(name: str, *, seq_len: int | None = None) -> OpenedHuggingFace:
    """A model's settings and tokenizer.

    Args:
        name: a folder, or an id on the Hugging Face hub.
        seq_len: longest input in tokens; unset: what the model reads at most.

    Raises:
        UserError: there is no such model, its folder lacks weights or a tokenizer, or it reads less
            than seq_len.
    """
    import transformers  # seconds

    config = load_config(name, seq_len)
    folder = Path(name).expanduser()
    name = str(folder)
    check_tokenizer(name)
    loaded = _load(name, "tokenizer", transformers.AutoTokenizer.from_pretrained, **_SAFE)
    tokenizer = HuggingFaceTokenizer(name, loaded)
    if folder.is_dir() and not any(any(folder.glob(kind)) for kind in _WEIGHTS):
        raise UserError(
            f"{name}: holds no weights ({', '.join(_WEIGHTS)}); copy or download them again"
        )
    longest = seq_len or _config_length(config) or _tokenizer_length(loaded)
    return OpenedHuggingFace(name, config, tokenizer, longest)


def load_config(name: str, seq_len: int | None) -> Any:
    """A model's config.json, as transformers reads it.

    Raises:
        UserError: there is no such model, it writes no text, or it reads less than seq_len.
    """
    import transformers

    folder = Path(name).expanduser()
    if folder.is_dir():
        name = str(folder)
    else:
        file = _load(name, "model", transformers.utils.cached_file, filename="config.json")
        folder = Path(file).parent
    read_folder_config(folder)
    config = _load(name, "model", transformers.AutoConfig.from_pretrained, **_SAFE)
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise UserError(
            f"{name}: is a {config.model_type} model, of which transformers"
            f" {transformers.__version__} has no causal language model; name one that writes text"
            " from left to right"
        )
    longest = _config_length(config)
    if seq_len is not None and longest is not None and seq_len > longest:
        raise UserError(
            f"eval.icl_seq_len: {seq_len}, but {name} reads {longest} tokens at most; write"
            f" {longest} or less, or remove it"
        )
    return config


def document_start(config: Any) -> tuple[int, ...] | None:
    """What documents began with in the training of a model that was exported from here; else None.

    Raises:
        UserError: config.json specifies something else there.
    """
    ids = getattr(config, DOCUMENT_START, None)
    if ids is None:
        return None
    known = range(config.get_text_config().vocab_size)
    if not isinstance(ids, list) or not all(type(i) is int and i in known for i in ids):
        raise UserError(f"config.json: {DOCUMENT_START}: {ids!r}; write a list of token ids")
    return tuple(ids)


def _load(name: str, what: str, load: Callable[..., Any], **kwargs: Any) -> Any:
    """What `load` gives for a name; what goes wrong, in a line."""
    try:
        return load(name, **kwargs)
    except Exception as error:  # transformers and the hub's client raise many unrelated types
        reason = " ".join(str(error).split()).split(". ")[0]
        advice = "choose another model, or other versions of its files or of transformers"
        for part, better in _ADVICE.items():
            if any(part in text for text in _chain(error)):
                advice = better
                break
        raise UserError(f"{name}: cannot load its {what}: {reason}; {advice}") from error


# What an exception's type or text says: what to do about it.
_ADVICE = {
    "GatedRepoError": "accept its licence on the hub, then log in: hf auth login",
    "RepositoryNotFoundError": "write a folder's path, or an id such as EleutherAI/pythia-70m",
    "HFValidationError": "write a folder's path, or an id such as EleutherAI/pythia-70m",
    "LocalEntryNotFoundError": "connect to the network, or write the path of a folder",
    "We couldn't connect": "connect to the network, or write the path of a folder",
    "trust_remote_code": "it brings its own Python files, which are not run here; choose a model of"
    " a class that transformers has",
    "does not recognize this architecture": "install a newer transformers, or correct config.json",
    "model_type": "correct its config.json",
    "no file named": "copy or download its weights again",
}


def _chain(error: BaseException | None) -> list[str]:
    """Type and text of an exception, and of those that led to it."""
    texts = []
    while error is not None:
        texts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return texts


def _check_weights(name: str, missing: set[str] | list[str]) -> None:
    """Refuse a model of which transformers filled parts with random numbers."""
    if missing:
        first = ", ".join(sorted(missing)[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UserError(
            f"{name}: its files lack the weights {first}{more}, which would be random; save the"
            " model anew, or correct the architecture in its config.json"
        )


def _config_length(config: Any) -> int | None:
    """Longest input in tokens, from where lm-evaluation-harness reads it, and MPT's own name."""
    config = config.get_text_config()
    lengths = [getattr(config, key, None) for key in _SEQ_LENS]
    return next((length for length in lengths if isinstance(length, int)), None)


def _tokenizer_length(tokenizer: Any) -> int:
    length = getattr(tokenizer, "model_max_length", None)
    return int(length) if length is not None and length < _UNSET else DEFAULT_SEQ_LEN
