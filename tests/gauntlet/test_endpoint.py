"""An endpoint against a server that speaks OpenAI's protocol over real connections."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from llmfoundry.api.external_models import open_outside
from llmfoundry.cli.commands.evaluate import evaluate
from llmfoundry.distributed.process_group import ALONE
from llmfoundry.errors import UserError
from llmfoundry.gauntlet.models.endpoint import ATTEMPTS, Endpoint
from llmfoundry.gauntlet.questions import GenerationPrompt, Refusal
from llmfoundry.gauntlet.task_rows import chat_rows
from llmfoundry.recipe.after_training import EvalRecipe
from llmfoundry.recipe.eval import EvalConfig
from tests.warm_scripts import on_ranks

Reply = tuple[int, Any]  # status, and JSON or text


def completion(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": "stop"}]}


def message(text: str | None) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def failure(words: str, **more: str) -> dict[str, Any]:
    return {"error": {"message": words, "type": "error", **more}}


class Server(ThreadingHTTPServer):
    """Answers by `answer(path, body)`; notes what it was sent and how many came at once."""

    request_queue_size = 64

    def __init__(self, answer: Callable[[str, Any], Reply]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.requests: list[tuple[str, Any, str | None]] = []
        self.headers: dict[str, str] = {}
        self.lock = threading.Lock()
        self.now = self.most = 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size)) if size else None
        with server.lock:
            server.requests.append((self.path, body, self.headers.get("Authorization")))
            server.now += 1
            server.most = max(server.most, server.now)
        status, reply = server.answer(self.path, body)
        with server.lock:
            server.now -= 1
        content = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
        if status == 0:  # break off in the middle
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(status)
        for name, value in server.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST

    def log_message(self, format: str, *arguments: Any) -> None:
        return


Serve = Callable[[Callable[[str, Any], Reply]], Server]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    servers = []

    def start(answer: Callable[[str, Any], Reply]) -> Server:
        server = Server(answer)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def endpoint(server: Server, **options: Any) -> Endpoint:
    made = Endpoint(server.url, "m", **options)
    made.first_delay = 0.001
    return made


def prompt(text: str = "2 + 2 =", *stops: str) -> GenerationPrompt:
    return GenerationPrompt((1, 2), text, stops, 7)


def refused(server: Server, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        endpoint(server, **options).generate([prompt()])
    (line,) = error.value.problems
    assert line.startswith(f"{server.url}: ")
    return line.removeprefix(f"{server.url}: ")


def test_a_prompt_is_sent_as_text_with_temperature_0(serve: Serve) -> None:
    server = serve(lambda path, body: (200, completion(" 4\nmore")))
    assert endpoint(server).generate([prompt("2 + 2 =", "\n")]) == [" 4"]
    body = {"model": "m", "temperature": 0, "max_tokens": 7, "stop": ["\n"], "prompt": "2 + 2 ="}
    assert server.requests == [("/v1/completions", body, None)]


def test_chat_sends_one_message(serve: Serve) -> None:
    server = serve(lambda path, body: (200, message("4")))
    assert endpoint(server, chat=True).generate([prompt()]) == ["4"]
    body = {"model": "m", "temperature": 0, "max_tokens": 7}
    body["messages"] = [{"role": "user", "content": "2 + 2 ="}]
    assert server.requests == [("/v1/chat/completions", body, None)]


def test_a_message_without_content_is_an_empty_text(serve: Serve) -> None:
    server = serve(lambda path, body: (200, message(None)))
    assert endpoint(server, chat=True).generate([prompt()]) == [""]


def test_four_stops_are_sent_and_the_others_cut_here(serve: Serve) -> None:
    server = serve(lambda path, body: (200, completion("one END two")))
    assert endpoint(server).generate([prompt("x", "a1", "b1", "c1", "d1", "END")]) == ["one "]
    assert server.requests[0][1]["stop"] == ["a1", "b1", "c1", "d1"]


def test_the_key_comes_from_the_variable(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    server = serve(lambda path, body: (200, completion("")))
    endpoint(server, api_key_env="MY_KEY").generate([prompt()])
    assert server.requests[0][2] == "Bearer secret"


def test_texts_come_in_the_order_of_prompts_whatever_finishes_first(serve: Serve) -> None:
    def answer(path: str, body: Any) -> Reply:
        number = int(body["prompt"])
        time.sleep(0.03 * (number % 3))
        return 200, completion(f"text {number}")

    server = serve(answer)
    prompts = [prompt(str(i)) for i in range(12)]
    assert endpoint(server, concurrency=6).generate(prompts) == [f"text {i}" for i in range(12)]


@pytest.mark.parametrize("concurrency", [1, 5])
def test_as_many_requests_are_under_way_as_were_asked_for(serve: Serve, concurrency: int) -> None:
    reached = threading.Event()

    def answer(path: str, body: Any) -> Reply:
        if server.most == concurrency:
            reached.set()
        reached.wait(5)
        time.sleep(0.01)
        return 200, completion("")

    server = serve(answer)
    endpoint(server, concurrency=concurrency).generate([prompt() for _ in range(11)])
    assert server.most == concurrency


@pytest.mark.parametrize("first", [(429, failure("busy")), (500, "oops"), (503, ""), (0, "")])
def test_what_may_pass_is_tried_again(serve: Serve, first: Reply) -> None:
    replies = iter([first, first, (200, completion("4"))])
    server = serve(lambda path, body: next(replies))
    assert endpoint(server).generate([prompt()]) == ["4"]
    assert len(server.requests) == 3


def test_the_server_says_how_long_to_wait(serve: Serve) -> None:
    replies = iter([(429, failure("busy")), (200, completion("4"))])
    server = serve(lambda path, body: next(replies))
    server.headers["Retry-After"] = "0.3"
    start = time.monotonic()
    endpoint(server).generate([prompt()])
    assert time.monotonic() - start >= 0.3


def test_a_server_that_stays_silent_is_given_up(serve: Serve) -> None:
    server = serve(lambda path, body: (time.sleep(0.2), (200, completion("")))[1])
    line = refused(server, timeout=0.02)
    assert line.startswith(f"gave no answer in {ATTEMPTS} attempts: timed out; try later")


def test_a_server_that_stays_busy_is_given_up(serve: Serve) -> None:
    server = serve(lambda path, body: (429, failure("slow down")))
    assert "attempts: 429 Too Many Requests: slow down; try later" in refused(server)
    assert len(server.requests) == ATTEMPTS


def test_a_missing_key_names_the_variable(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(lambda path, body: (401, failure("no key")))
    said = "401 Unauthorized: no key; the variable OPENAI_API_KEY is not set; write: export"
    assert refused(server).startswith(said)
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    assert "put a key that it accepts into the variable OPENAI_API_KEY" in refused(server)
    assert len(server.requests) == 2  # not tried again


def test_spent_credit_is_not_tried_again(serve: Serve) -> None:
    server = serve(lambda path, body: (429, failure("pay", code="insufficient_quota")))
    assert "no credit left" in refused(server)
    assert len(server.requests) == 1


def test_an_unknown_model_gets_the_names_of_those_there_are(serve: Serve) -> None:
    def answer(path: str, body: Any) -> Reply:
        if path == "/v1/models":
            return 200, {"data": [{"id": "llama"}, {"id": "dbrx"}]}
        return 404, failure("The model `m` does not exist")

    line = refused(serve(answer))
    assert line.endswith("it has no model 'm'; write one of: llama, dbrx")


def test_a_path_that_is_not_there_asks_for_the_right_address(serve: Serve) -> None:
    server = serve(lambda path, body: (404, "<html>nothing here</html>"))
    line = refused(server)
    assert line.startswith("404 Not Found: <html>nothing here</html>; write its address")
    assert line.endswith("write chat: true for a chat model")


def test_a_refused_prompt_is_a_refusal_in_its_place_and_the_others_are_answered(
    serve: Serve,
) -> None:
    def answer(path: str, body: Any) -> Reply:
        if body["prompt"] == "1":
            return 400, {"detail": "context length\nis 10"}
        return 200, completion(body["prompt"])

    said = endpoint(serve(answer)).generate([prompt(str(i)) for i in range(3)])
    assert said == ["0", Refusal("400 Bad Request: context length is 10"), "2"]


@pytest.mark.parametrize("reply", ["<html>hello</html>", {"object": "list"}, {"choices": []}, "[]"])
def test_another_protocol_is_said_so(serve: Serve, reply: Any) -> None:
    server = serve(lambda path, body: (200, reply))
    assert refused(server).startswith("does not answer as OpenAI's protocol has it: ")


def test_a_server_that_is_not_there_is_said_at_once(serve: Serve) -> None:
    server = serve(lambda path, body: (200, ""))
    server.shutdown()
    server.server_close()
    start = time.monotonic()
    with pytest.raises(UserError, match="refuses the connection; start the server, or correct"):
        Endpoint(server.url, "m").generate([prompt() for _ in range(20)])
    assert time.monotonic() - start < 10


def test_an_address_has_a_scheme() -> None:
    with pytest.raises(UserError, match="write one such as http://localhost:8000/v1"):
        Endpoint("localhost:8000", "m")


def test_the_first_refusal_ends_all(serve: Serve) -> None:
    server = serve(lambda path, body: (401, failure("no")))
    with pytest.raises(UserError):
        endpoint(server, concurrency=2).generate([prompt() for _ in range(200)])
    assert len(server.requests) < 100


@pytest.mark.parametrize("chat", [False, True])
def test_a_server_that_does_not_echo_is_reported_with_the_task_types_that_work(
    serve: Serve, chat: bool
) -> None:
    server = serve(lambda path, body: (200, completion("c")))
    asked = endpoint(server, chat=chat, spell=lambda ids: "a")
    assert not asked.can_score
    with pytest.raises(UserError) as error:
        asked.score([])
    assert len(server.requests) == (not chat)  # it is tried once
    for name in ("language_modeling", "multiple_choice", "schema", "generation_task_with_answers"):
        assert name in str(error.value)


def _ask_on(rank: int, url: str, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    asked = Endpoint(url, "m")
    texts = [str(text) for text in asked.generate([prompt(str(i)) for i in range(5)])]
    try:
        asked.generate([prompt("0"), prompt("no")])
    except UserError as error:
        texts += error.problems
    (folder / f"{rank}.json").write_text(json.dumps(texts))
    dist.destroy_process_group()


def test_processes_share_the_prompts_and_all_hear_of_a_refusal(
    serve: Serve, tmp_path: Path
) -> None:
    def answer(path: str, body: Any) -> Reply:
        if body["prompt"] == "no":
            return 403, failure("will not")
        return 200, completion(f"text {body['prompt']}")

    server = serve(answer)
    on_ranks(_ask_on, (server.url, tmp_path), 2)
    for rank in range(2):
        *texts, problem = json.loads((tmp_path / f"{rank}.json").read_text())
        assert texts == [f"text {i}" for i in range(5)]
        assert "403 Forbidden: will not" in problem
    asked = [body["prompt"] for _, body, _ in server.requests]
    assert sorted(asked) == ["0", "0", "1", "2", "3", "4", "no"]  # each once, over both processes


def test_conversations_are_sent_as_messages_and_calls_of_tools_are_read(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = {"recall": "instructions://recall?rows=3", "call": "instructions://tool_call?rows=4"}
    right = {
        json.dumps(row["messages"]): row
        for uri in tasks.values()
        for row in chat_rows(uri, key="test")
    }

    def answer(path: str, body: Any) -> Reply:
        row = right[json.dumps(body["messages"])]
        assert body.get("tools") == row.get("tools")
        if "tools" not in row:
            return 200, message(row["answer"])
        call = dict(row["reply"]["tool_calls"][0]["function"])
        call["arguments"] = json.dumps(call["arguments"])  # as OpenAI's protocol has it
        reply = message(None)
        reply["choices"][0]["message"]["tool_calls"] = [{"type": "function", "function": call}]
        return 200, reply

    kind = {"icl_task_type": "generation_task_with_answers", "num_fewshot": [0]}
    entries = [{"label": name, "dataset_uri": uri, **kind} for name, uri in tasks.items()]
    (tmp_path / "g.yaml").write_text(json.dumps({"icl_tasks": entries}))
    monkeypatch.chdir(tmp_path)
    model = f"chat:{serve(answer).url}#m"
    config = EvalConfig(gauntlet="g.yaml")
    evaluate(EvalRecipe(models=[model], output="out", eval=config, cache_folder="cache"))
    results = json.loads((tmp_path / "out" / "results.json").read_text())["gauntlet"]["tasks"]
    assert [(task["label"], task["accuracy"]) for task in results] == [("recall", 1), ("call", 1)]


@pytest.mark.parametrize("keys", [{"icl_chat_template": "zephyr"}, {"icl_gen_prefix": "It is"}])
def test_a_server_s_own_template_cannot_be_replaced(keys: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "g.yaml").write_text(
        "icl_tasks: [{label: a, dataset_uri: 'instructions://count?rows=2',"
        " icl_task_type: generation_task_with_answers, num_fewshot: [0]}]"
    )
    config = EvalConfig(gauntlet=str(tmp_path / "g.yaml"), **keys)  # type: ignore[arg-type]
    recipe = EvalRecipe(models=["chat:http://127.0.0.1:9/v1#m"], eval=config)
    with pytest.raises(UserError, match="has a template of its own"):
        evaluate(recipe)


def test_what_stands_before_a_text_is_its_servers_to_say(serve: Serve) -> None:
    """Ours puts there what a model's documents began with, whatever the prompts' format."""
    server = serve(lambda path, body: (200, completion("c")))
    opened = open_outside(f"{server.url}#m", EvalRecipe(), ALONE, seq_len=None, note=print)
    assert opened.settings.describe() == "harness prompts, what its server puts before each text"
