"""The server over real sockets: OpenAI's own client, what is refused, and who leaves."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import transformers
from prometheus_client.parser import text_string_to_metric_families

from llmfoundry.data.text.bpe import bytes_backend
from tests.half_open import FOREIGN_HOSTS, LOCAL_HOSTS, get, half_sent, is_closed
from tests.inference.serving import TEMPLATE, Running, ScriptedEngine, running, served_bytes, until

SNOW = "héllo ☃ 𝄞 you"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(ScriptedEngine()) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_openais_client_completes(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="m", prompt=f"say:{SNOW}", max_tokens=50)
    assert reply.choices[0].text == SNOW and reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    n_prompt, n_answer = 1 + len(f"say:{SNOW}".encode()), len(SNOW.encode())
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (n_prompt, n_answer)
    assert reply.usage.total_tokens == n_prompt + n_answer
    cut = client.completions.create(model="m", prompt=f"say:{SNOW}", max_tokens=3)
    assert cut.choices[0].text == "hé" and cut.choices[0].finish_reason == "length"


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_adds_up_to_the_whole_answer(client: openai.OpenAI, echo: bool) -> None:
    fields: Any = {"prompt": f"say:{SNOW}", "max_tokens": 50, "logprobs": 1, "echo": echo}
    parts = [
        part.choices[0] for part in client.completions.create(model="m", stream=True, **fields)
    ]
    whole = client.completions.create(model="m", **fields).choices[0]
    said = f"say:{SNOW}{SNOW}" if echo else SNOW
    assert "".join(part.text for part in parts) == whole.text == said
    assert [part.finish_reason for part in parts][-2:] == [None, "stop"]
    assert whole.logprobs is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [x for part in parts if part.logprobs for x in getattr(part.logprobs, name)]
        assert streamed == getattr(whole.logprobs, name), name
    assert not any("\ufffd" in part.text for part in parts)


def test_openais_client_chats(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "Be short."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "say:"}, {"type": "text", "text": SNOW}],
        },
    ]
    reply = client.chat.completions.create(
        model="m", messages=messages, logprobs=True, top_logprobs=2, stop="\n"
    )
    choice = reply.choices[0]
    assert choice.message.role == "assistant" and choice.message.content == SNOW
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    spelled = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
    assert spelled.decode() == SNOW
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_a_chat_streams_its_role_its_text_and_its_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": f"say:{SNOW}"}],
        stop=["\n"],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert said == SNOW and chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(f"{SNOW}</turn>".encode())
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_end_of_a_turn_ends_a_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "say:one</turn>two"}]
    )
    assert reply.choices[0].message.content == "one"


def test_prompts_are_texts_tokens_or_lists_of_either(client: openai.OpenAI) -> None:
    ids = [256, *b"say:b"]
    for prompt, said in (
        ("say:a", ["a"]),
        (["say:a", "x say:b"], ["a", "b"]),
        (ids, ["b"]),
        ([ids, [*b"say:c"]], ["b", "c"]),
    ):
        reply = client.completions.create(model="m", prompt=prompt, n=2)
        assert [choice.text for choice in reply.choices] == [t for t in said for _ in range(2)]
        assert [choice.index for choice in reply.choices] == list(range(2 * len(said)))


def test_an_echo_has_the_prompts_own_numbers(server: Running) -> None:
    prompt = "a ☃ say:bc"
    reply = server.complete(prompt, echo=True, logprobs=1, max_tokens=1)["choices"][0]
    ids = [256, *prompt.encode(), ord("b")]
    scores = reply["logprobs"]
    assert reply["text"] == prompt + "b"
    assert scores["token_logprobs"] == [None, *(-float(i) for i in ids[1:-1]), -0.5]
    assert scores["tokens"][:3] == ["<|endoftext|>", "a", " "]
    assert scores["tokens"][3:6] == ["bytes:\\xe2", "bytes:\\x98", "bytes:\\x83"]
    starts = [0, *(len(prompt.encode()[:n].decode(errors="ignore")) for n in range(len(ids) - 1))]
    assert scores["text_offset"] == starts
    assert server.complete(prompt, echo=True, max_tokens=0)["choices"][0]["text"] == prompt
    parts = server.events("/v1/completions", {"prompt": prompt, "echo": True, "max_tokens": 0})
    assert [part["choices"][0]["text"] for part in parts] == [prompt]
    only = server.complete(prompt, echo=True, logprobs=0, max_tokens=0)["choices"][0]
    assert only["logprobs"]["token_logprobs"] == scores["token_logprobs"][:-1]


def test_special_tokens_in_a_prompt_are_read_as_in_transformers(server: Running) -> None:
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_backend())
    rendered = "user: a</turn><|endoftext|>\nassistant: ☃"
    for prompt in (rendered, f"<|endoftext|>{rendered}"):
        ids = theirs(prompt).input_ids
        for fields in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            reply = server.complete(prompt, echo=True, logprobs=0, max_tokens=0, **fields)
            assert reply["usage"]["prompt_tokens"] == len(ids)
            (choice,) = reply["choices"]
            starts = choice["logprobs"]["text_offset"]
            parts = [prompt[a:b] for a, b in itertools.pairwise([*starts, len(prompt)])]
            assert choice["text"] == "".join(parts) == prompt
            assert parts[-3:] == ["", "", "☃"] and "<|endoftext|>" in parts
    messages = [{"role": "user", "content": rendered}, {"role": "user", "content": '[{"a": 1}]'}]
    ids = theirs.encode(
        theirs.apply_chat_template(
            messages, chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False
        )
    )
    status, reply = server.ask("/v1/chat/completions", {"messages": messages})
    assert (status, reply["usage"]["prompt_tokens"]) == (200, len(ids))
    plain = server.complete("a", add_special_tokens=False)
    assert plain["usage"]["prompt_tokens"] == 1
    assert server.complete("a")["usage"]["prompt_tokens"] == 2  # as documents begin
    status, reply = server.ask("/v1/completions", {"prompt": "", "add_special_tokens": False})
    assert (status, reply["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("snow", [0, 1, 3])
def test_an_echo_of_tokens_cut_inside_a_character(
    server: Running, snow: int, max_tokens: int
) -> None:
    said = "𝄞".encode()
    cut = [*said[1:], *b"say:", *"☃".encode()[snow:], *said[:2]]  # what is not there is broken
    fields = {"max_tokens": max_tokens, "ignore_eos": True, "skip_special_tokens": False}
    (choice,) = server.complete(cut, echo=True, logprobs=0, **fields)["choices"]
    tokens = [raw_byte(token) for token in choice["logprobs"]["tokens"]]
    whole = b"".join(tokens)
    assert whole[: len(cut)] == bytes(cut)
    assert choice["text"] == whole.decode(errors="replace")
    starts = choice["logprobs"]["text_offset"]
    assert starts == sorted(starts) and starts[3:7] == [3, 4, 5, 6]
    assert starts[len(cut) - 2 : len(cut)] == [len(bytes(cut).decode(errors="replace")) - 1] * 2


def raw_byte(token: str) -> bytes:
    return bytes.fromhex(token[8:]) if token.startswith("bytes:") else token.encode()


def test_a_replacement_character_in_a_prompt_is_no_cut_character(server: Running) -> None:
    assert server.complete("say:\ufffd")["choices"][0]["text"] == "\ufffd"
    echoed = server.complete("say:\ufffd", echo=True)["choices"][0]
    assert echoed["text"] == "say:\ufffd\ufffd"


@pytest.mark.parametrize("skip", [None, True, False])
def test_special_tokens_are_found_as_stops_whether_or_not_they_are_shown(
    server: Running, skip: bool | None
) -> None:
    fields = {"max_tokens": 9, "ignore_eos": True, "skip_special_tokens": skip}
    for stop, shown in (("<|endoftext|>", "ab"), ("b<|endoftext|>", "a"), ("<|endoftext|>x", None)):
        choice = server.complete("say:ab", stop=[stop], **fields)["choices"][0]
        assert choice["finish_reason"] == ("length" if shown is None else "stop")
        assert choice["text"] == (shown or "ab" + "<|endoftext|>" * 7)


def test_who_scores_a_text_always_gets_one_token_more(server: Running) -> None:
    """lm-evaluation-harness leaves the last token out, whatever it is."""
    ids = [*b"say:"]  # the next token is the end of text
    reply = server.complete(ids, echo=True, logprobs=1, max_tokens=1)["choices"][0]
    assert reply["logprobs"]["tokens"] == ["s", "a", "y", ":", "<|endoftext|>"]
    assert reply["text"] == "say:" and reply["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cross_tokens(server: Running, stream: bool) -> None:
    body = {"prompt": "say:one ☃ two ☃ three", "max_tokens": 99, "stop": ["☃ t", "never"]}
    if stream:
        events = server.events("/v1/completions", body)
        text = "".join(event["choices"][0]["text"] for event in events)
        finish = events[-1]["choices"][0]["finish_reason"]
    else:
        choice = server.complete(**body)["choices"][0]
        text, finish = choice["text"], choice["finish_reason"]
    assert (text, finish) == ("one ", "stop")
    until(lambda: not server.worker.engine.busy)


def test_answers_of_one_request_stream_side_by_side(server: Running) -> None:
    body = {"prompt": ["say:ab☃", "say:cd"], "n": 2, "echo": True, "max_tokens": 9}
    said = dict.fromkeys(range(4), "")
    for event in server.events("/v1/completions", body):
        (choice,) = event["choices"]
        said[choice["index"]] += choice["text"]
    assert [*said.values()] == ["say:ab☃ab☃"] * 2 + ["say:cdcd"] * 2


def test_the_end_of_text_can_be_ignored(server: Running) -> None:
    fields = {"max_tokens": 5, "ignore_eos": True}
    shown = server.complete("say:ab", **fields, skip_special_tokens=False)["choices"][0]
    assert shown["text"] == "ab" + "<|endoftext|>" * 3 and shown["finish_reason"] == "length"
    for hidden in ({}, {"skip_special_tokens": True}):  # vLLM's default
        reply = server.complete("say:ab", **fields, **hidden, logprobs=0)
        choice = reply["choices"][0]
        assert choice["text"] == "ab" and reply["usage"]["completion_tokens"] == 5
        assert choice["logprobs"]["tokens"] == ["a", "b", *["<|endoftext|>"] * 3]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 2]


def test_models_health_and_metrics(server: Running, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").id == "m"
    assert server.ask("/health") == (200, {"status": "ok"})
    client.completions.create(model="m", prompt="say:abc", max_tokens=9)
    families = {f.name: f for f in text_string_to_metric_families(server.ask("/metrics")[1])}
    for name in (
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:prompt_tokens"),
        *("vllm:generation_tokens", "vllm:request_success", "vllm:time_to_first_token_seconds"),
        *("vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds"),
    ):
        assert all(s.labels["model_name"] == "m" for s in families[name].samples), name
    ended = {
        s.labels["finished_reason"]: s.value
        for s in families["vllm:request_success"].samples
        if s.name.endswith("_total")
    }
    assert ended["stop"] >= 1


REFUSED = [
    (b"{", None, "JSON"),
    (b"[1]", None, "object"),
    (b"\xff\xfe", None, "JSON"),
    (b'{"prompt": "\\ud800 alone"}', None, "JSON"),
    (b"[" * 50_000, None, "JSON"),
    ({}, "prompt", "required"),
    ({"prompt": []}, "prompt", "no tokens"),
    ({"prompt": [[]]}, "prompt", "no tokens"),
    ({"prompt": ["a", 1]}, "prompt", "mixes"),
    ({"prompt": {"a": 1}}, "prompt", "Expected"),
    ({"prompt": [99999]}, "prompt", "no token of this model"),
    ({"prompt": [-1]}, "prompt[0]", ">= 0"),
    ({"prompt": "a", "n": 0}, "n", ">= 1"),
    ({"prompt": "a", "n": 1000}, "n", "at most"),
    ({"prompt": "a", "temperature": "hot"}, "temperature", "Expected"),
    ({"prompt": "a", "temperature": 3}, "temperature", "<= 2"),
    ({"prompt": "a", "top_p": 0}, "top_p", "> 0"),
    ({"prompt": "a", "presence_penalty": -9}, "presence_penalty", ">= -2"),
    ({"prompt": "a", "seed": 10**30}, "seed", ""),
    ({"prompt": "a", "max_tokens": 10**6}, "max_tokens", "at most"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "echo"),
    ({"prompt": "a", "max_tokens": 4096}, "max_tokens", "4096"),
    ({"prompt": "a" * 5000}, "prompt", "4096"),
    ({"prompt": "a", "logprobs": 99}, "logprobs", "at most"),
    ({"prompt": "a", "stop": ""}, "stop", "empty"),
    ({"prompt": "a", "stop": ["a"] * 99}, "stop", "at most"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias", "not supported"),
    ({"prompt": "a", "best_of": 2}, "best_of", "not supported"),
    ({"prompt": "a", "guided_json": {}}, "guided_json", "not supported"),
    ({"prompt": "a", "repetition_penalty": 1.2}, "repetition_penalty", "not supported"),
    ({"prompt": "please refuse"}, None, "refused"),
]


@pytest.mark.parametrize("body, param, why", REFUSED, ids=range(len(REFUSED)))
def test_a_bad_request_is_refused_by_name(server: Running, body: Any, param: Any, why: str) -> None:
    status, reply = server.ask("/v1/completions", body)
    assert status == 400
    error = reply["error"]
    assert {*error} == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (error["param"], why in error["message"]) == (param, True), error


def test_harmless_fields_are_taken(server: Running) -> None:
    server.complete("say:a", user="me", best_of=1, suffix=None, logit_bias={}, tools=[], min_p=0.0)


CHATS = [
    ([], 400, "messages"),
    ([{"content": "a"}], 400, "messages[0]"),
    ([{"role": "user"}], 400, "messages[0]"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        400,
        "messages[0].content[0]",
    ),
    ([{"role": "king", "content": "a"}], 422, "messages"),
]


@pytest.mark.parametrize("messages, status, param", CHATS, ids=range(len(CHATS)))
def test_a_bad_chat_is_refused(server: Running, messages: Any, status: int, param: str) -> None:
    found, reply = server.ask("/v1/chat/completions", {"messages": messages})
    assert (found, reply["error"]["param"]) == (status, param), reply


def test_tools_and_alternatives_without_logprobs_are_refused(server: Running) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    tool = {"type": "function", "function": {"name": "f"}}
    for extra in (
        {"tools": [tool]},
        {"top_logprobs": 2},
        {"response_format": {"type": "json_object"}},
    ):
        status, reply = server.ask("/v1/chat/completions", chat | extra)
        assert (status, reply["error"]["param"]) == (400, next(iter(extra)))


def test_too_many_prompts_are_refused_before_they_are_encoded() -> None:
    encoded: list[str] = []
    engine = ScriptedEngine()
    served = served_bytes(engine, most_sequences=3, prompt_ids=lambda text: encoded.append(text))
    with running(engine, served=served) as server:
        status, reply = server.ask("/v1/completions", {"prompt": ["a"] * 2, "n": 2})
    assert (status, reply["error"]["param"]) == (400, "n") and not encoded


def test_a_model_without_a_template_says_so() -> None:
    engine = ScriptedEngine()
    with running(
        engine, served=served_bytes(engine, template=None, no_template="it has none")
    ) as r:
        status, reply = r.ask(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}
        )
        assert status == 400 and "it has none" in reply["error"]["message"]


def test_unknown_models_paths_and_methods_have_an_error_object(server: Running) -> None:
    status, reply = server.ask("/v1/completions", {"model": "gpt-9", "prompt": "a"})
    assert (status, reply["error"]["code"]) == (404, "model_not_found")
    assert server.ask("/v1/models/gpt-9")[0] == 404
    assert "/v1/completions" in server.ask("/v1/embeddings", {})[1]["error"]["message"]
    assert server.ask("/v1/completions")[0] == 405
    assert server.ask("/v1/completions", {"prompt": "a"}, Content_Type="text/plain")[0] == 415


@pytest.mark.parametrize(
    "path, headers, status",
    [
        ("/v1/completions", {}, 413),
        ("/v1/completions", {"Authorization": "Bearer wrong"}, 401),
        ("/v1/completions", {"Content_Type": "text/plain"}, 415),
        ("/v1/nothing", {}, 404),
        ("/v1/models", {}, 405),
    ],
)
def test_who_sends_a_large_body_hears_why_it_is_refused(
    path: str, headers: dict[str, str], status: int
) -> None:
    with running(ScriptedEngine(), key="k" * 20) as server:
        found, reply = server.ask(path, {"prompt": "a" * 10_000_000}, **headers)
    assert found == status and reply["error"]["message"]


def test_without_a_key_other_names_of_this_machine_are_refused(server: Running) -> None:
    """A page in a browser could else have its own name point here (DNS rebinding)."""
    port = int(server.url.rpartition(":")[2])
    for host in [*FOREIGN_HOSTS, None]:
        reply = get(port, "/v1/models", host)
        assert b" 403 " in reply or b" 400 " in reply, host
        assert b'"data"' not in reply
    for host in LOCAL_HOSTS:
        assert b" 200 " in get(port, "/v1/models", host), host


HALF = {
    "head": b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: ",
    "second head": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /",
    "body": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
    b"Content-Type: application/json\r\n\r\n{",
}


@pytest.mark.parametrize("key", [None, "k" * 20], ids=["open", "key"])
@pytest.mark.parametrize("sent", HALF.values(), ids=HALF)
def test_of_half_sent_requests_the_oldest_make_room(sent: bytes, key: str | None) -> None:
    with running(ScriptedEngine(), key=key, pending=10) as server:
        port = int(server.url.rpartition(":")[2])
        with half_sent(port, 40, sent) as connections:
            assert server.complete("say:a")["choices"][0]["text"] == "a"
            assert all(is_closed(connection) for connection in connections[:29])
            assert 'reason="crowded"} 3' in server.ask("/metrics")[1]


@pytest.mark.parametrize("sent", ["head", "second head"])
def test_a_head_that_does_not_end_is_closed(sent: str) -> None:
    with running(ScriptedEngine(delay=0.1), head_seconds=1.0) as server:
        port = int(server.url.rpartition(":")[2])
        long = {"prompt": "say:" + "x" * 20, "max_tokens": 99}
        with half_sent(port, 3, HALF[sent]) as connections, ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.ask, "/v1/completions", long)  # takes longer than a head
            began = time.monotonic()
            for connection in connections:
                while time.monotonic() < began + 0.8:
                    connection.sendall(b"y")  # a byte now and then is no more time
                    time.sleep(0.1)
                assert is_closed(connection)
            assert answer.result()[1]["choices"][0]["text"] == "x" * 20
            assert 'reason="late"} 3' in server.ask("/metrics")[1]


def test_a_large_reply_may_be_read_slowly() -> None:
    """Larger than what the kernel takes over, and for longer than a head may take."""
    with running(ScriptedEngine(length=200_000), head_seconds=0.3, body=10**6) as server:
        prompt = "a" * 100_000
        body = {"prompt": prompt, "max_tokens": 0, "echo": True, "n": 64}
        with raw(server, "/v1/completions", body) as connection:
            until(lambda: 'completions",status="200"' in server.ask("/metrics")[1])
            time.sleep(1)
            data = b""
            while not data.endswith(b"}}"):
                part = connection.recv(1 << 20)
                assert part, len(data)
                data += part
    choices = json.loads(data.partition(b"\r\n\r\n")[2])["choices"]
    assert [choice["text"] for choice in choices] == [prompt] * 64


def test_the_key_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    key = "k" * 20
    with running(ScriptedEngine(), key=key) as server:
        for wrong in (
            "Bearer nonsense",
            "Bearer ",
            key,
            f"Basic {key}",
            "Bearer kkk\xfc",
            f"Bearer {key}k",
        ):
            status, reply = server.ask("/v1/completions", {"prompt": "a"}, Authorization=wrong)
            assert (status, reply["error"]["code"]) == (401, "invalid_api_key")
            assert server.ask("/metrics", Authorization=wrong)[0] == 401
        assert server.ask("/health", Authorization="")[0] == 200
        assert server.ask("/v1/models", Host="served.example")[0] == 200
        assert server.complete("say:a")["choices"][0]["text"] == "a"
        assert key not in server.ask("/metrics")[1]
    assert key not in caplog.text


def test_a_full_queue_is_429_and_empties() -> None:
    with running(ScriptedEngine(slots=1, delay=0.01), waiting=2) as server:
        long = {"prompt": "say:a", "max_tokens": 4000, "ignore_eos": True}
        taken = [raw(server, "/v1/completions", long) for _ in range(3)]
        until(lambda: server.worker.open == 3)
        status, reply = server.ask("/v1/completions", {"prompt": "say:a"})
        assert (status, reply["error"]["code"]) == (429, "queue_full")
        for connection in taken:
            connection.close()
        until(lambda: server.worker.open == 0)
        assert server.complete("say:a")["choices"][0]["text"] == "a"
        status, reply = server.ask("/v1/completions", {"prompt": "a", "n": 4})
        assert (status, reply["error"]["param"]) == (400, "n")  # it would never fit


def test_time_runs_out_with_504_or_an_event() -> None:
    with running(ScriptedEngine(slots=2, delay=0.03), seconds=1.0) as server:
        body = {"prompt": "say:" + "x" * 99, "max_tokens": 99}
        status, reply = server.ask("/v1/completions", body)
        assert (status, reply["error"]["code"]) == (504, "timeout")
        events = server.events("/v1/completions", body)
        assert events[0]["choices"][0]["text"] == "x"
        assert events[-1]["error"]["type"] == "timeout_error"
        until(lambda: not server.worker.engine.busy)
        assert server.worker.open == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_is_not_written_when_the_server_ends_is_given_up(stream: bool) -> None:
    with running(ScriptedEngine(slots=1, delay=0.01)) as server, ThreadPoolExecutor(2) as pool:
        body = {"prompt": "say:a", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
        asked = [pool.submit(server.ask, "/v1/completions", body) for _ in range(2)]
        until(lambda: server.worker.open == 2)
        server.loop.call_soon_threadsafe(server.server.drain, 0.8)
        replies = sorted((future.result() for future in asked), key=str)
        shown = [reply if isinstance(reply, str) else json.dumps(reply) for _, reply in replies]
        assert all("the server was stopped" in text for text in shown)
        assert [status for status, _ in replies] == ([200, 503] if stream else [503, 503])
        assert server.ask("/v1/completions", {"prompt": "say:a"})[0] == 503
        until(lambda: server.worker.open == 0 and not server.worker.engine.busy)


def raw(server: Running, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection that has sent a request and read nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("waits", [False, True], ids=["running", "waiting"])
def test_a_client_that_leaves_frees_its_slot(stream: bool, waits: bool) -> None:
    engine = ScriptedEngine(slots=1, delay=0.01)
    with running(engine) as server:
        long = {"prompt": "say:" + "x" * 4000, "max_tokens": 4000 - 100, "stream": stream}
        long = long | {"prompt": "say:" + "x" * 90}
        long = long | {"max_tokens": 3900, "ignore_eos": True}
        others = [raw(server, "/v1/completions", long) for _ in range(2 if waits else 1)]
        until(lambda: engine.running + engine.waiting == len(others))
        time.sleep(0.05)
        others[-1].close()
        until(lambda: engine.running + engine.waiting == len(others) - 1)
        assert server.worker.open == len(others) - 1
        for other in others:
            other.close()
        until(lambda: not engine.busy)
        until(lambda: 'status="499"' in server.ask("/metrics")[1])


def test_a_slow_reader_holds_up_nobody() -> None:
    with running(ScriptedEngine(slots=2), seconds=20.0) as server:
        body = {"prompt": "say:a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        slow = raw(server, "/v1/completions", body | {"logprobs": 2})
        until(lambda: server.worker.engine.busy)
        assert server.complete("say:abc")["choices"][0]["text"] == "abc"
        until(lambda: not server.worker.engine.busy)  # written to the end, though nobody reads
        data = b""
        while not data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            data += slow.recv(1 << 20)
        assert data.count(b'"finish_reason":"length"') == 1
        slow.close()


def test_an_engine_that_fails_ends_the_server() -> None:
    engine = ScriptedEngine(slots=1, delay=0.01)
    with running(engine) as server:
        ended: list[bool] = []
        server.worker.on_failure = lambda: ended.append(True)
        with ThreadPoolExecutor(3) as pool:
            long = {"prompt": "say:" + "x" * 99, "max_tokens": 99}
            asked = [pool.submit(server.ask, "/v1/completions", long) for _ in range(3)]
            until(lambda: engine.running + engine.waiting == 3)
            engine.fails = RuntimeError("a secret of the engine")
            statuses = [future.result() for future in asked]
        assert [status for status, _ in statuses] == [500, 500, 500]
        assert not any("secret" in reply["error"]["message"] for _, reply in statuses)
        until(lambda: ended == [True])
        assert server.ask("/health")[0] == 503
        assert server.ask("/v1/completions", {"prompt": "a"})[0] == 503
