"""Small random models of transformers with small real tokenizers, as folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from llmfoundry.data.text.bpe import END_OF_TEXT, train_backend
from llmfoundry.gauntlet.models.hugging_face import HuggingFaceModel
from llmfoundry.gauntlet.questions import ScoreRequest
from llmfoundry.hf.open_class import HuggingFaceTokenizer, open_hugging_face

TEXT = [
    "Question: What is 12 + 34?\nAnswer: 46\nQuestion: Who wrote this book?\nAnswer: the author.",
    "The man turned on the faucet, because it was dirty. (He didn't know!)\n\nA: water / flowed",
    "The city councilmen refused the demonstrators a permit because they feared violence.\n",
] * 3
BOS = "<s>"
N_TOKENS = 400
SEQ_LEN = 256

_LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "head_dim": 8,
    "max_position_embeddings": SEQ_LEN,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "sliding_window": 40},
    "gemma2": {**_LLAMA, "final_logit_softcapping": 0.5, "sliding_window": 24},
    "phi3": {
        **{key: _LLAMA[key] for key in _LLAMA if key != "head_dim"},
        "original_max_position_embeddings": 35,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [8.0, 6.0, 4.0, 2.0],
        },
    },
    "gpt_neox": {key: _LLAMA[key] for key in _LLAMA if key not in ("num_key_value_heads",)},
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 64,
        "max_position_embeddings": SEQ_LEN,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": SEQ_LEN},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": SEQ_LEN},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}


def random_model(kind: str, seed: int = 0) -> Any:
    """A model whose weights are large enough that what it reads matters to what it says."""
    torch.manual_seed(seed)
    settings = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "vocab_size": N_TOKENS}
    config = transformers.AutoConfig.for_model(kind, **(_CONFIGS[kind] | settings))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def save_tokenizer(folder: Path, *, bos: bool = False, metaspace: bool = False) -> None:
    """BPE of at most N_TOKENS tokens, of bytes, or with SentencePiece's marks for spaces.

    With `bos`, <s> before every text, as Llama's.
    """
    train = _train_metaspace if metaspace else train_backend
    backend = train(TEXT, N_TOKENS - 1, progress=False)
    names = {"eos_token": END_OF_TEXT}
    if bos:
        backend.add_special_tokens([BOS])
        place = backend.token_to_id(BOS)
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, place)]
        )
        names["bos_token"] = BOS
    loaded = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    loaded.save_pretrained(folder)


def _train_metaspace(texts: list[str], size: int, *, progress: bool) -> Backend:
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    special = [END_OF_TEXT, "<unk>"]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=progress)
    backend.train_from_iterator(texts, trainer)
    return backend


def save_model(folder: Path, kind: str, *, bos: bool = False, **settings: Any) -> Path:
    """A folder with a random model and its tokenizer; `settings` are of generation_config.json."""
    model = random_model(kind)
    model.save_pretrained(folder)
    save_tokenizer(folder, bos=bos)
    if settings:
        (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def random_requests(seed: int = 0, *, longest: int = 60) -> list[ScoreRequest]:
    """Questions of three choices after worked examples that some share; one much longer."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(1, N_TOKENS - 2, (n,), generator=generator).tolist()

    examples, requests = draw(20), list[ScoreRequest]()
    for question in range(10):
        context = draw(longest) if question == 0 else [*examples, *draw(3 + question % 4)]
        for _ in range(3):
            answer = draw(1 + question % 3)
            whole = (*context, *answer)
            requests.append(ScoreRequest(whole[:-1], tuple(answer), "answer"))
    requests.append(requests[-1])  # the same once more
    requests.append(ScoreRequest(tuple(examples), (5,), "the start of others"))
    return requests


def plain_logprobs(model: Any, request: ScoreRequest) -> Tensor:
    """(n, V) float64 at the places that predict the targets, of the request all on its own."""
    with torch.no_grad():
        logits = model(torch.tensor([request.tokens]), use_cache=False).logits[0]
    return logits.double().log_softmax(-1)[-len(request.targets) :]


def plain_continuation(model: Any, tokens: tuple[int, ...], n: int, eos_ids: set[int]) -> list[int]:
    """Greedy tokens one by one, each time reading everything anew."""
    ids = list(tokens)
    for _ in range(n):
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        likeliest = int(logits.argmax())
        if likeliest in eos_ids:
            break
        ids.append(likeliest)
    return ids[len(tokens) :]


def load_hugging_face(
    name: str,
    *,
    device: torch.device,
    precision: str,
    batch_tokens: int,
    seq_len: int | None = None,
) -> tuple[HuggingFaceModel, HuggingFaceTokenizer]:
    """A folder's model, computed by its own class, and its tokenizer."""
    opened = open_hugging_face(name, seq_len=seq_len)
    model = HuggingFaceModel(
        opened.load(device=device, precision=precision),
        opened.tokenizer,
        seq_len=opened.seq_len,
        batch_tokens=batch_tokens,
        autocast=precision == "amp_bf16",
    )
    return model, opened.tokenizer
