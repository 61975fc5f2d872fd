"""Processes that cannot meet say within a limit where they looked, and why nobody was there."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

from llmfoundry.distributed.rendezvous import meet
from llmfoundry.errors import RunFailure
from llmfoundry.resilience.supervise.causes import Evidence, find_cause

LIMIT = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("rank", "address", "why"),
    [
        (0, "no.such.host.invalid", "Name or service not known|name resolution|No address"),
        (1, "no.such.host.invalid", "Name or service not known|name resolution|No address"),
        (1, "127.0.0.1", "Connection refused"),
        (0, "127.0.0.1", r"1/2 clients joined"),
        (0, "192.0.2.1", "192.0.2.1"),  # another machine's address on rank 0
    ],
)
def test_a_wrong_address_is_one_line(
    rank: int, address: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    facts = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": address, "MASTER_PORT": port}
    for name, value in facts.items():
        monkeypatch.setenv(name, str(value))
    line = rf"^MASTER_ADDR: .* did not meet at {address}:{port} within 1 s: .*({why})"
    with pytest.raises(RunFailure, match=line) as failed:
        meet(rank, 2, limit=LIMIT, timeout=LIMIT)
    said = str(failed.value)
    assert "\n" not in said
    end = {"rank": rank, "status": 1, "kind": "lost", "node": "n1", "lines": [said]}
    assert find_cause(Evidence(1, ends=[end])).kind == "network"
