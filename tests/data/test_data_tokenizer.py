"""Tokenizers: against transformers, tiktoken and the byte alphabet's definition."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tiktoken_ext.openai_public
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from llmfoundry.data.preparation.build_tokenizer import build_tokenizer, tokenizer_summary
from llmfoundry.data.preparation.partition import content_hash
from llmfoundry.data.text import bpe
from llmfoundry.data.text.bpe import byte_alphabet, train_backend
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.recipe.data import DataConfig, TokenizerConfig

# Every hard case: digits, white space of all kinds, scripts, emoji, control characters, specials.
TEXTS = [
    "",
    " ",
    "def f(x):\n    return x + 1234567\n\n\n",
    "  leading,\ttabs \r\n and trailing   ",
    "don't I'LL we'Re 'S x's 12,345.67 ½ ²",
    "Ünïcödé 中文字符 العربية हिन्दी עברית 🚀👩‍👩‍👧",
    "\x00\x01\x7f\x85\xa0\u2028\u3000\ufeff\U0010ffff",
    "<|endoftext|> a<|endoftext|>b <|endofprompt|>",
    "a" * 5000 + "\n" * 40,
]


def corpus(folder: Path, n: int = 60) -> DataConfig:
    """Files of Python sources, large enough for some hundred merges."""
    folder.mkdir()
    lines = Path(json.__file__).read_text().splitlines(keepends=True)
    for k in range(n):
        (folder / f"{k:03}.txt").write_text("".join(lines[k * 6 : k * 6 + 12]) + f"# {k}\n")
    return DataConfig(name="files", paths=[str(folder)], cache_folder=str(folder.parent / "cache"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    data = corpus(tmp_path_factory.mktemp("trained") / "text")
    return build_tokenizer(TokenizerConfig(vocab_size=700), data, progress=False)


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return build_tokenizer(TokenizerConfig(name="bytes"), DataConfig(), progress=False)


@pytest.mark.parametrize("kind", ["trained", "plain"])
def test_byte_level_kinds_lose_nothing(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


@pytest.mark.parametrize("kind", ["trained", "plain"])
def test_end_of_text_spelled_in_a_document_is_no_end_of_text(
    kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.eos_id not in ids
    assert tokenizer.eos_id not in tokenizer.encode_batch(["a<|endoftext|>b"])[0]
    assert tokenizer.decode([tokenizer.eos_id]) == "<|endoftext|>"


def test_byte_tokens_are_the_bytes(plain: Tokenizer) -> None:
    assert (plain.vocab_size, plain.eos_id) == (257, 256)
    for text in TEXTS:
        assert plain.encode(text) == list(text.encode())


def test_training_reaches_the_size_and_shortens_text(trained: Tokenizer) -> None:
    assert trained.vocab_size == 700
    text = Path(json.__file__).read_text()
    assert len(trained.encode(text)) < 0.6 * len(text)
    assert tokenizer_summary(trained, TokenizerConfig(vocab_size=700)).endswith("is 0")
    assert "too few repeated pairs for the 8,192" in tokenizer_summary(trained, TokenizerConfig())


def test_token_bytes_add_up_to_the_text(trained: Tokenizer, plain: Tokenizer) -> None:
    for tokenizer in (trained, plain):
        sizes = tokenizer.token_bytes()
        assert sizes.dtype == np.int32 and sizes.shape == (tokenizer.vocab_size,)
        assert sizes[tokenizer.eos_id] == 0
        for text in TEXTS:
            assert sizes[tokenizer.encode(text)].sum() == len(text.encode())


def test_transformers_loads_what_is_saved(trained: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    trained.save(tmp_path, max_length=128)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = theirs(text, split_special_tokens=True, verbose=False)["input_ids"]
        assert ids == trained.encode(text)
        assert theirs.decode(ids) == text
    assert theirs.encode("a<|endoftext|>")[-1] == trained.eos_id  # there, specials are parsed
    assert (theirs.eos_token_id, theirs.pad_token_id) == (trained.eos_id, trained.eos_id)
    assert len(theirs) == trained.vocab_size
    assert theirs.model_max_length == 128


def test_saving_and_loading_changes_nothing(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path / "a")
    loaded = Tokenizer.load(tmp_path / "a")
    assert loaded.fingerprint == trained.fingerprint
    assert [loaded.encode(text) for text in TEXTS] == [trained.encode(text) for text in TEXTS]
    path = TokenizerConfig(name="huggingface", path=str(tmp_path / "a"))
    assert build_tokenizer(path, DataConfig(), progress=False).fingerprint == trained.fingerprint


def test_a_pickled_tokenizer_reads_no_special_tokens_either(trained: Tokenizer) -> None:
    copy = pickle.loads(pickle.dumps(trained))
    text = "spelled <|endoftext|> out"
    assert copy.encode(text) == trained.encode(text) and trained.eos_id not in copy.encode(text)
    assert copy.fingerprint == trained.fingerprint


def test_training_is_repeatable_and_cached(tmp_path: Path) -> None:
    data = corpus(tmp_path / "text")
    config = TokenizerConfig(vocab_size=400)
    first = build_tokenizer(config, data, progress=False)
    made = list((tmp_path / "cache/tokenizers").glob("*/tokenizer.json"))
    assert len(made) == 1
    stamp = made[0].stat().st_mtime_ns
    assert build_tokenizer(config, data, progress=False).fingerprint == first.fingerprint
    assert made[0].stat().st_mtime_ns == stamp
    shutil.rmtree(tmp_path / "cache")
    assert build_tokenizer(config, data, progress=False).fingerprint == first.fingerprint


def test_held_out_documents_teach_the_tokenizer_nothing(tmp_path: Path) -> None:
    """A word in every held-out document and no other must not become a token."""
    data = corpus(tmp_path / "text")
    data.validation_fraction = 0.5
    for file in sorted(Path(data.paths[0]).iterdir()):
        text = file.read_text()
        marked = text + "zyxwvut\n" * 20
        if content_hash(marked) < 2**63:
            file.write_text(marked)
        elif content_hash(text) < 2**63:
            file.unlink()
    held_out = [f for f in Path(data.paths[0]).iterdir() if "zyxwvut" in f.read_text()]
    assert len(held_out) > 10
    ids = build_tokenizer(TokenizerConfig(vocab_size=500), data, progress=False).encode("zyxwvut")
    assert len(ids) >= 6
    data.validation_fraction = 0.0
    ids = build_tokenizer(TokenizerConfig(vocab_size=500), data, progress=False).encode("zyxwvut")
    assert len(ids) == 1


@pytest.mark.parametrize("name", ["r50k_base", "cl100k_base", "o200k_base"])
def test_tiktoken_encodings_give_the_same_ids(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their expressions and special tokens, with ranks learned here: theirs need a download."""
    text = Path(json.__file__).read_text() + Path(argparse_source()).read_text()
    ranks = learned_ranks([text], 900)
    constructor = getattr(tiktoken_ext.openai_public, name)
    monkeypatch.setattr(
        tiktoken_ext.openai_public, "load_tiktoken_bpe", lambda *args, **kwargs: dict(ranks)
    )
    facts = constructor() | {"explicit_n_vocab": None}
    first_special = len(ranks) + 1  # an id stays free, as in cl100k_base
    specials = {token: first_special + n for n, token in enumerate(facts["special_tokens"])}
    theirs = tiktoken.Encoding(**facts | {"special_tokens": specials})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda asked: theirs if asked == name else None)

    data = DataConfig(cache_folder=str(tmp_path / "cache"))
    config = TokenizerConfig(name="tiktoken", encoding=name)
    ours = build_tokenizer(config, data, progress=False)
    for sample in [*TEXTS, text]:
        assert ours.encode(sample) == theirs.encode_ordinary(sample)
        assert ours.decode(ours.encode(sample)) == sample
    assert (ours.eos_id, ours.vocab_size) == (theirs.eot_token, theirs.n_vocab)


def learned_ranks(texts: list[str], vocab_size: int) -> dict[bytes, int]:
    vocabulary = train_backend(texts, vocab_size, progress=False).get_vocab()
    byte = {char: value for value, char in enumerate(byte_alphabet())}
    del vocabulary["<|endoftext|>"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return {bytes(byte[char] for char in token): rank for rank, token in enumerate(tokens)}


def argparse_source() -> str:
    import argparse

    return argparse.__file__


def test_tiktoken_names_models_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(name: str) -> None:
        raise ConnectionError(f"no route to {name}")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    data = DataConfig(cache_folder=str(tmp_path))
    with pytest.raises(UserError, match=r"cannot download cl100k_base: .*TIKTOKEN_CACHE_DIR"):
        build_tokenizer(TokenizerConfig(name="tiktoken"), data, progress=False)
    config = TokenizerConfig(name="tiktoken", encoding="cl200k")
    with pytest.raises(UserError, match=r"tokenizer\.encoding: 'cl200k' is neither .*cl100k_base"):
        build_tokenizer(config, data, progress=False)


def sentencepiece_like(folder: Path) -> None:
    """A tokenizer of Llama 2's kind, with truncation set as some published files have it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "a", "b", "\u2581a", "ab", "ä"]
    vocabulary = {piece: n for n, piece in enumerate(pieces)}
    merges = [("\u2581", "a"), ("a", "b")]
    model = models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.enable_truncation(4)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))


def test_sentencepiece_like_folders_load(tmp_path: Path) -> None:
    folder = tmp_path / "spm"
    sentencepiece_like(folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.eos_id, tokenizer.byte_level) == (2, False)
    ids = tokenizer.encode("a ab a ä 🚀</s>")
    assert len(ids) > 4 and tokenizer.eos_id not in ids
    sizes = tokenizer.token_bytes()
    assert sizes[ids].sum() == len(" a ab a ä 🚀</s>".encode())  # with the blank put in front
    assert sizes[:3].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", '{"eos_token": "</s>", "chat_template": "{{ messages }}"}'),
        ("special_tokens_map.json", '{"eos_token": "</s>"}'),
        ("generation_config.json", '{"eos_token_id": [2, 1]}'),
        ("config.json", '{"eos_token_id": 2}'),
    ],
)
def test_the_end_of_text_is_found_wherever_a_folder_names_it(
    tmp_path: Path, file: str, content: str
) -> None:
    folder = tmp_path / "spm"
    sentencepiece_like(folder)
    (folder / file).write_text(content)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_id == 2
    tokenizer.save(tmp_path / "saved")
    kept = json.loads((tmp_path / "saved/tokenizer_config.json").read_text())
    assert kept.get("chat_template") == json.loads(content).get("chat_template")


def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "spm"
    with pytest.raises(UserError, match=r"spm: holds no tokenizer\.json"):
        Tokenizer.load(folder)
    sentencepiece_like(folder)
    with pytest.raises(UserError, match=r'spm: names no end-of-text token.*add "eos_token"'):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(UserError, match=r"eos_token '<end>' is not in its vocabulary"):
        Tokenizer.load(folder)
    for token in ('{"content": {"a": 1}}', "[1]", "true"):
        (folder / "tokenizer_config.json").write_text(f'{{"eos_token": {token}}}')
        with pytest.raises(UserError, match=r"tokenizer_config\.json: eos_token: .* is no token"):
            Tokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: is not JSON"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json: is not a tokenizer"):
        Tokenizer.load(folder)


def test_a_hub_id_out_of_reach_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    config = TokenizerConfig(name="huggingface", path="nobody/nothing-of-this-name")
    with pytest.raises(UserError, match=r"tokenizer\.path: cannot load nobody/nothing"):
        build_tokenizer(config, DataConfig(), progress=False)


def test_a_folder_without_tokenizer_json_goes_through_transformers(tmp_path: Path) -> None:
    """GPT-2's older files, vocab.json and merges.txt."""
    alphabet = byte_alphabet()
    vocabulary = {char: n for n, char in enumerate(alphabet)}
    vocabulary |= {"he": 256, "<|endoftext|>": 257}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    config = TokenizerConfig(name="huggingface", path=str(tmp_path))
    tokenizer = build_tokenizer(config, DataConfig(), progress=False)
    assert tokenizer.encode("he!") == [256, ord("!")]
    assert tokenizer.eos_id == 257


def test_pre_tokenizer_splits_long_numbers() -> None:
    backend = train_backend(["1234567 " * 50], 400, progress=False)
    assert isinstance(backend.pre_tokenizer, pre_tokenizers.Sequence)
    words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("1234567")]
    assert words == ["123", "456", "7"]


def test_a_long_word_is_learned_from_in_parts() -> None:
    """Of one word of 65,536 letters the library would learn for 18 s."""
    words = "a short text, 1234 and " + "x" * 20_000 + " " * 1000 + "-" * 513
    assert "".join(bpe._with_short_words([words])) == words
    learned = train_backend([words], 400, progress=False).get_vocab()
    assert max(map(len, learned)) == bpe._LONGEST_WORD
    short = [("y" * bpe._LONGEST_WORD + " 12 ") * 3, ""]
    assert [*bpe._with_short_words(short)] == short
