"""Loader of transformers models for evaluation and generation.

Entry point: `open_hugging_face`; `builders/open_model.py` calls it for a folder or a hub id that is
not a run of this project. Missing weights are an error: transformers would initialize them at
random, and the results would look plausible.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmfoundry.data.text.bounded_backend import with_bounds
from llmfoundry.data.text.tokenizer import Tokenizer, check_tokenizer
from llmfoundry.errors import UserError
from llmfoundry.hf.architecture import DOCUMENT_START
from llmfoundry.hf.config_keys import READ_METHODS
from llmfoundry.hf.read_folder import hf_folder, open_weights, read_folder_config
from llmfoundry.inference.hugging_face_slots import end_ids
from llmfoundry.terminal import to_stderr

DEFAULT_SEQ_LEN = 2048
"""Used if neither config nor tokenizer specify a longest input, as in lm-evaluation-harness."""
_SEQ_LENS = ("n_positions", "max_position_embeddings", "n_ctx", "max_seq_len")
_WEIGHTS = ("*.safetensors", "*.bin")
_SAFE: dict[str, Any] = {"trust_remote_code": False}  # Python files of a folder are not run
_UNSET = 10**9  # transformers writes 1e30 as a tokenizer's model_max_length where none is known


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of transformers with the interface of `Tokenizer`."""

    def __init__(self, name: str, loaded: Any) -> None:
        """Wrap a tokenizer of transformers.

        Raises:
            UserError: the tokenizer is empty, is not from the `tokenizers` library, or has no
                end-of-text token.
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
        original_values = {key: getattr(loaded, key, None) for key in names}
        super().__init__(
            with_bounds(loaded.backend_tokenizer, name), loaded.eos_token, original_values
        )
        self.template_file = f"{name}: chat_template"


@dataclass(frozen=True)
class OpenedHuggingFace:
    """A transformers model whose weights are not loaded yet.

    Attributes:
        name: a folder, or a hub id.
        config: transformers' configuration object.
        tokenizer: tokenizer of the model.
        seq_len: longest input in tokens.
    """

    name: str
    config: Any
    tokenizer: HuggingFaceTokenizer
    seq_len: int

    def end_ids(self) -> set[int]:
        """Return the tokens that end a text."""
        import transformers  # seconds

        try:
            settings = transformers.GenerationConfig.from_pretrained(self.name)
        except OSError:  # it has no generation_config.json
            settings = self.config.get_text_config()
        return end_ids(getattr(settings, "eos_token_id", None), self.tokenizer)

    def load(self, *, device: torch.device, precision: str) -> Any:
        """Load the model with its weights.

        Args:
            device: target device.
            precision: fp32, amp_bf16 (weights in fp32), bf16 or fp16.

        Raises:
            UserError: the weights cannot be read, or some are missing.
        """
        import transformers  # seconds

        arguments: dict[str, Any] = {
            "config": self.config,
            "dtype": {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32),
            "output_loading_info": True,
            **_SAFE,
        }
        source: str | None = self.name
        model_class: Any = transformers.AutoModelForCausalLM
        quantization = getattr(self.config, "quantization_config", None)
        if isinstance(quantization, dict) and quantization.get("quant_method") in READ_METHODS:
            source, model_class = None, model_class._model_mapping[type(self.config)]
            arguments["config"], arguments["state_dict"] = self._dequantized()
        elif any(Path(self.name).glob("*.safetensors")):
            with open_weights(Path(self.name)):  # refuses FP8 weights without factors
                pass

        def load(_: str, **arguments: Any) -> Any:
            return model_class.from_pretrained(source, **arguments)

        model, report = _load(self.name, "weights", load, **arguments)
        _check_weights(self.name, report["missing_keys"])
        return model.to(device)

    def _dequantized(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return the configuration and the weights of a folder in few bits, in bf16.

        transformers reads blocks of FP8 only in shapes that they divide, and needs kernels for
        MXFP4.
        """
        folder = hf_folder(self.name)
        config = copy.deepcopy(self.config)
        del config.quantization_config
        with open_weights(folder) as weights:
            for line in weights.notes:
                to_stderr(line)
            return config, {name: weights.get(name) for name in sorted(weights.names)}


def open_hugging_face(name: str, *, seq_len: int | None = None) -> OpenedHuggingFace:
    """Load a model's settings and tokenizer, and check that its folder has weights.

    Args:
        name: a folder, or an id on the Hugging Face hub.
        seq_len: longest input in tokens; unset: the model's limit.

    Raises:
        UserError: there is no such model, its weights or tokenizer are missing, or its limit is
            below seq_len.
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
    """Return transformers' configuration object of a model.

    Raises:
        UserError: there is no such model, it is not a causal language model, or its limit is below
            seq_len.
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
    """Return the training documents' start tokens; None for models not exported by this project.

    Raises:
        UserError: the entry of config.json is not a list of token ids.
    """
    ids = getattr(config, DOCUMENT_START, None)
    if ids is None:
        return None
    known = range(config.get_text_config().vocab_size)
    if not isinstance(ids, list) or not all(type(i) is int and i in known for i in ids):
        raise UserError(f"config.json: {DOCUMENT_START}: {ids!r}; write a list of token ids")
    return tuple(ids)


def _load(name: str, what: str, load: Callable[..., Any], **kwargs: Any) -> Any:
    """Call `load` and convert its errors to a UserError with advice."""
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


# Advice by a part of an exception's type or text.
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
    """Return the type and text of an exception and of its causes."""
    texts = []
    while error is not None:
        texts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return texts


def _check_weights(name: str, missing: set[str] | list[str]) -> None:
    """Reject a model whose missing weights transformers initialized at random."""
    if missing:
        first = ", ".join(sorted(missing)[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UserError(
            f"{name}: its files lack the weights {first}{more}, which would be random; save the"
            " model anew, or correct the architecture in its config.json"
        )


def _config_length(config: Any) -> int | None:
    """Return the longest input in tokens, from the keys of lm-evaluation-harness and of MPT."""
    config = config.get_text_config()
    lengths = [getattr(config, key, None) for key in _SEQ_LENS]
    return next((length for length in lengths if isinstance(length, int)), None)


def _tokenizer_length(tokenizer: Any) -> int:
    length = getattr(tokenizer, "model_max_length", None)
    return int(length) if length is not None and length < _UNSET else DEFAULT_SEQ_LEN
