"""An endpoint's scores of given texts against the same model's own numbers.

The server answers as vLLM's completions do with `echo` and `logprobs`: the text's tokens, <s> first
where the tokenizer adds one, then a written one.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from llmfoundry.data.text.bpe import END_OF_TEXT, byte_alphabet, bytes_backend
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.gauntlet.models.echo import read_score
from llmfoundry.gauntlet.models.endpoint import Endpoint
from llmfoundry.gauntlet.questions import Refusal, Score, ScoreRequest
from tests.gauntlet.hugging_face_models import random_model, save_tokenizer
from tests.warm_scripts import run_script

TEXTS = [
    ("Question: What is 12 + 34?\nAnswer:", " 46"),
    ("Question: What is 12 + 34?\nAnswer:", " the author of this book"),
    ("The man turned on the faucet, because it was", " dirty. (He didn't know!)"),
    ("naïve “quotes” and a snow man ☃ in", " çedille ☃☃!"),
    ("A: wat", "er / flowed"),  # the border is within a token of the whole
    ("The man", " 日本語"),  # ends in a character of several tokens
    ("☃", "☃"),
    ("é", "ü😀"),
]
EOS = 256  # of the tokenizer of bytes
LONGEST = 120  # characters of a prompt that the server takes


def replaced(tokenizer: Any, ids: list[int]) -> tuple[list[str], None]:
    """Each token decoded alone: a part of a character is U+FFFD."""
    return [tokenizer.decode([i]) for i in ids], None


def as_vllm(tokenizer: Any, ids: list[int]) -> tuple[list[str], list[int]]:
    """Offsets are sums of lengths, also of <s> and of U+FFFD, which are not in the text."""
    tokens, _ = replaced(tokenizer, ids)
    return tokens, [0, *itertools.accumulate(map(len, tokens[:-1]))]


def token_bytes(tokenizer: Any, ids: list[int]) -> list[bytes]:
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
    special = tokenizer.all_special_ids
    pieces = tokenizer.convert_ids_to_tokens(ids)
    return [
        b"" if i in special else bytes(byte_of[character] for character in piece)
        for i, piece in zip(ids, pieces, strict=True)
    ]


def as_openai(tokenizer: Any, ids: list[int]) -> tuple[list[str], list[int]]:
    r"""`bytes:\xe2\x80`; a token within a character begins where that does."""
    tokens, offsets, before = [], list[int](), b""
    for i, raw in zip(ids, token_bytes(tokenizer, ids), strict=True):
        inside = raw[:1] != b"" and raw[0] & 0xC0 == 0x80
        offsets.append(sum(byte & 0xC0 != 0x80 for byte in before) - inside)
        before += raw
        try:
            tokens.append(raw.decode() or tokenizer.decode([i]))
        except UnicodeDecodeError:
            tokens.append("bytes:" + repr(raw)[2:-1])
    return tokens, offsets


def as_llama_cpp_python(tokenizer: Any, ids: list[int]) -> tuple[list[str], list[int]]:
    """Parts of characters are left out, of each token and of all before it."""
    raws = token_bytes(tokenizer, ids)
    before = [b"".join(raws[:n]) for n in range(len(raws))]
    return [raw.decode(errors="ignore") for raw in raws], [
        len(raw.decode(errors="ignore")) for raw in before
    ]


SPELLINGS = {
    "replaced": replaced,
    "vllm": as_vllm,
    "openai": as_openai,
    "llama-cpp-python": as_llama_cpp_python,
}


class ModelServer(ThreadingHTTPServer):
    """`model` behind /v1/completions."""

    def __init__(self, folder: Path, *, bos: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        save_tokenizer(folder, bos=bos)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = random_model("llama")
        self.spelling = "replaced"
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def logprobs(self, text: str) -> tuple[list[int], torch.Tensor]:
        """Ids of the text and (n, V) log-probabilities of the token after each."""
        ids = self.tokenizer(text).input_ids
        with torch.no_grad():
            return ids, self.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)

    def echo(self, text: str, alternatives: int) -> dict[str, Any]:
        ids, logprobs = self.logprobs(text)
        ids = [*ids, int(logprobs[-1].argmax())]
        tokens, offsets = SPELLINGS[self.spelling](self.tokenizer, ids)
        likeliest: list[Any] = [None]
        for row, chosen in zip(logprobs, ids[1:], strict=True):
            places = {*row.topk(alternatives).indices.tolist(), chosen}
            likeliest.append({f"{self.tokenizer.decode([i])}#{i}": row[i].item() for i in places})
        return {
            "tokens": tokens,
            "token_logprobs": [
                None,
                *(row[i].item() for row, i in zip(logprobs, ids[1:], strict=True)),
            ],
            "top_logprobs": likeliest,
            **({} if offsets is None else {"text_offset": offsets}),
        }


class _Handler(BaseHTTPRequestHandler):
    server: ModelServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text, status = body["prompt"], 200
        reply: dict[str, Any] = {"choices": [{"text": text}]}
        if len(text) > LONGEST:
            status, reply = 400, {"error": {"message": f"at most {LONGEST} characters"}}
        elif body.get("echo"):
            reply["choices"][0]["logprobs"] = self.server.echo(text, body["logprobs"])
            reply["usage"] = {"prompt_tokens": len(self.server.tokenizer(text).input_ids)}
        content = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        return


@pytest.fixture(scope="module", params=[True, False], ids=["bos", "plain"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ModelServer]:
    made = ModelServer(tmp_path_factory.mktemp("served"), bos=request.param)
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def endpoint(server: ModelServer, tokenizer: Tokenizer) -> Endpoint:
    def spell(ids: Sequence[int]) -> str:
        return tokenizer.decode([i for i in ids if i != EOS])

    return Endpoint(server.url, "m", spell=spell)


def as_request(tokenizer: Tokenizer, context: str, target: str) -> ScoreRequest:
    read, wanted = tokenizer.encode(context), tokenizer.encode(target)
    return ScoreRequest((EOS, *read, *wanted[:-1]), tuple(wanted), target)


def expected(server: ModelServer, context: str, target: str) -> tuple[int, float, float, bool]:
    """Tokens of the target, their log-probability, the likeliest ones', and whether they are it."""
    ids, logprobs = server.logprobs(context + target)
    n_read = len(server.tokenizer(context).input_ids)
    while ids[:n_read] != server.tokenizer(context).input_ids[:n_read]:
        n_read -= 1  # the last of the context's tokens goes into one with the target's first
    rows = logprobs[n_read - 1 : -1]
    own = rows.gather(1, torch.tensor(ids[n_read:])[:, None])[:, 0]
    best = rows.amax(1)
    return len(own), own.sum().item(), best.sum().item(), bool((own == best).all())


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_scores_are_the_models_own_however_tokens_are_spelled(
    server: ModelServer, spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "spelling", spelling)
    tokenizer = Tokenizer(bytes_backend(), END_OF_TEXT)
    asked = endpoint(server, tokenizer)
    assert asked.can_score
    scores = asked.score([as_request(tokenizer, *texts) for texts in TEXTS])
    for score, texts in zip(scores, TEXTS, strict=True):
        assert isinstance(score, Score)
        n, logprob, best, greedy = expected(server, *texts)
        assert score.n_tokens == n
        assert score.logprob == pytest.approx(logprob, abs=1e-9)
        assert score.best_logprob == pytest.approx(best, abs=1e-9)
        assert score.greedy == greedy
    sizes = [len(server.tokenizer(context + target).input_ids) for context, target in TEXTS]
    probe = len(server.tokenizer("a b").input_ids)
    assert asked.tokens_computed == sum(sizes) + probe


def test_where_spellings_leave_open_which_tokens_are_the_answers_offsets_decide() -> None:
    # 日 and 本 of three bytes each, in two tokens and three, or in three and two
    numbers = [None, -1.0, -2.0, -4.0, -8.0, -16.0, -32.0]
    said: dict[str, Any] = {"tokens": ["x", *["\ufffd"] * 5, "!"], "token_logprobs": numbers}
    said["top_logprobs"] = [None, *({"a": -0.5, "b": -0.7} for _ in numbers[1:])]
    reply = {"choices": [{"logprobs": said}]}
    reason = "the server's tokens do not show where the answer begins"
    assert read_score(reply, "x日", "本") == Refusal(reason, left_out=True)
    for offsets, expected in (([0, 1, 1, 2, 2, 2, 3], -28.0), ([0, 1, 1, 1, 2, 2, 3], -24.0)):
        said["text_offset"] = offsets
        score = read_score(reply, "x日", "本")
        assert isinstance(score, Score) and score.logprob == expected
    said["text_offset"] = [-1] * 7
    assert read_score(reply, "x日", "本") == Refusal(reason, left_out=True)


def test_a_space_that_a_decoder_drops_before_a_word_is_the_words() -> None:
    said = {"tokens": ["<s>", "The", "man", "!"], "token_logprobs": [None, -1.0, -2.0, -4.0]}
    said["top_logprobs"] = [None, {"a": -0.5}, {"b": -0.5}, {"c": -0.5}]
    score = read_score({"choices": [{"logprobs": said}]}, "The", " man")
    assert isinstance(score, Score) and (score.logprob, score.n_tokens) == (-2.0, 1)


def test_a_greedy_target_is_known_as_such(server: ModelServer) -> None:
    tokenizer = Tokenizer(bytes_backend(), END_OF_TEXT)
    greedy = []
    for context, _ in TEXTS[:3]:
        _, logprobs = server.logprobs(context)
        likeliest = server.tokenizer.decode([int(logprobs[-1].argmax())])
        (score,) = endpoint(server, tokenizer).score([as_request(tokenizer, context, likeliest)])
        assert isinstance(score, Score)
        assert score.greedy == expected(server, context, likeliest)[3]
        greedy.append(score.greedy)
    assert any(greedy)


def test_what_cannot_be_scored_is_refused_and_the_rest_is_scored(server: ModelServer) -> None:
    tokenizer = Tokenizer(bytes_backend(), END_OF_TEXT)
    long = as_request(tokenizer, "x" * LONGEST, " y")
    first = as_request(tokenizer, "", "The man")
    usual = as_request(tokenizer, *TEXTS[0])
    refused, alone, score = endpoint(server, tokenizer).score([long, first, usual])
    assert refused == Refusal(f"400 Bad Request: at most {LONGEST} characters")
    assert isinstance(score, Score)
    has_bos = server.tokenizer.bos_token is not None
    assert isinstance(alone, Score) == has_bos
    if not has_bos:
        reason = "the server gives no probability of a text's first token"
        assert alone == Refusal(reason, left_out=True)


def test_multiple_choice_runs_on_a_server_and_a_refused_row_counts_as_wrong(
    server: ModelServer, tmp_path: Path
) -> None:
    rows = [{"query": q, "choices": [a.strip(), "no"], "gold": 0} for q, a in TEXTS[:3]]
    rows.append({"query": "x" * LONGEST, "choices": ["a", "b"], "gold": 0})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "label": "mine",
        "dataset_uri": "rows.jsonl",
        "num_fewshot": [0],
        "icl_task_type": "multiple_choice",
    }
    (tmp_path / "g.yaml").write_text(yaml.safe_dump({"icl_tasks": [task]}))
    model = f'models=["{server.url}#m"]'
    words, direct = [model, "eval.gauntlet=g.yaml", "output=found"], {"no_proxy": "127.0.0.1"}
    done = run_script("eval.py", words, cwd=tmp_path, variables=direct)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "found" / "results.json").read_text())["gauntlet"]
    (found,) = results["tasks"]
    assert found["refused"] == 1 and found["n"] == 4
    said = "mine/0-shot: 1 of 4 questions were refused, and count as wrong: 400 Bad Request: at"
    assert results["problems"][0].startswith(said)
    assert "1 refused" in done.stdout
    assert results["cost"]["unit"] == "bytes" and results["cost"]["tokens_computed"] > 0
    lines = [json.loads(x) for x in (tmp_path / "found" / "rows.jsonl").read_text().splitlines()]
    right = 0
    for number, (context, target) in enumerate(TEXTS[:3], start=1):
        gold = next(x for x in lines if x["row"].endswith(f":{number}") and x["choice"] == 0)
        (n, logprob), (n_no, no) = (expected(server, context, x)[:2] for x in (target, " no"))
        assert gold["tokens"] == n
        assert gold["logprob"] == pytest.approx(logprob, abs=1e-9)
        right += logprob / n > no / n_no
    assert found["metrics"]["acc_token"] == pytest.approx(right / 4)
    assert found["accuracy"] == found["metrics"]["acc_token"]
