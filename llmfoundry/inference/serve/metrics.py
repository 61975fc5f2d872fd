"""What Prometheus gets of the server: vLLM's names where they mean the same.

`app` counts with `ServerMetrics`. The idea: a dashboard that was made for vLLM reads this server
too; only what vLLM has no name for has one of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from llmfoundry.inference.requests import Engine

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class ServerMetrics:
    """Counts and times of one server; each has the label model_name."""

    def __init__(self, model: str, engine: Engine) -> None:
        """All are 0."""
        self.registry, self._model = CollectorRegistry(), model
        vllm = self._family
        self.prompt_tokens = vllm(Counter, "vllm:prompt_tokens", "Tokens of prompts.")
        self.tokens = vllm(Counter, "vllm:generation_tokens", "Tokens written.")
        self.first_token = vllm(
            Histogram,
            "vllm:time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_SECONDS,
        )
        self.between_tokens = vllm(
            Histogram,
            "vllm:inter_token_latency_seconds",
            "Between two tokens of an answer.",
            buckets=_GAPS,
        )
        self.latency = vllm(
            Histogram,
            "vllm:e2e_request_latency_seconds",
            "From a request's arrival to its last token.",
            buckets=_SECONDS,
        )
        self.prompt_length = vllm(
            Histogram, "vllm:request_prompt_tokens", "Tokens of a prompt.", buckets=_TOKENS
        )
        self.answer_length = vllm(
            Histogram, "vllm:request_generation_tokens", "Tokens of an answer.", buckets=_TOKENS
        )
        self._ended = Counter(
            "vllm:request_success",
            "Answers that were written to their end.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._replies = Counter(
            "llmfoundry_http_requests",
            "Requests by path and status; 499: the client left.",
            ["model_name", "path", "status"],
            registry=self.registry,
        )
        self._gauge("vllm:num_requests_running", "Answers being written.", lambda: engine.running)
        self._gauge("vllm:num_requests_waiting", "Answers without a slot.", lambda: engine.waiting)
        self._gauge("llmfoundry_slots", "Answers at a time at most.", lambda: engine.slots)

    def ended(self, reason: str) -> None:
        """Count an answer that has its finish_reason."""
        self._ended.labels(self._model, reason).inc()

    def replied(self, path: str, status: int) -> None:
        """Count a request."""
        self._replies.labels(self._model, path, str(status)).inc()

    def text(self) -> bytes:
        """What a scrape gets."""
        return generate_latest(self.registry)

    def _family(self, kind: Any, name: str, meaning: str, **settings: Any) -> Any:
        family = kind(name, meaning, ["model_name"], registry=self.registry, **settings)
        return family.labels(self._model)

    def _gauge(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        self._family(Gauge, name, meaning).set_function(value)
