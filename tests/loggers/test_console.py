"""The console's lines, compared with the text that a user is meant to see."""

from __future__ import annotations

import io
import re

import pytest

from llmfoundry.loggers.console import Console

FIRST = {
    "loss/train/total": 9.01234,
    "metrics/train/bits_per_byte": 3.25,
    "l2_norm/grad/global": 12.3456,
    "lr-DecoupledAdamW/group0": 3e-5,
    "memory/peak_allocated_mem": 0.79,
}
LATER = {
    **FIRST,
    "loss/train/total": 3.4567891,
    "l2_norm/grad/global": 0.981,
    "lr-DecoupledAdamW/group0": 6e-4,
    "memory/peak_allocated_mem": 1.21,
    "throughput/tokens_per_sec": 12345.0,
    "throughput/device/mfu": 0.4123,
    "time/remaining_estimate": 192.0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(stream: io.StringIO) -> list[str]:
    return stream.getvalue().split("\n")


def test_step_lines_are_exactly_these() -> None:
    stream = io.StringIO()
    console = Console(stream=stream)
    console.step(1, FIRST, total=1000)
    console.step(120, LATER, total=1000)
    assert printed(stream) == [
        "   1/1000  loss  9.0123  bpb 3.2500  grad  12.346  lr 3.0e-05    809 MiB",
        " 120/1000  loss  3.4568  bpb 3.2500  grad   0.981  lr 6.0e-04    1.2 GiB"
        "  12.3k tok/s  mfu 41.2%   3m12s left",
        "",
    ]


def test_columns_stay_where_they_are_when_a_value_is_missing() -> None:
    stream = io.StringIO()
    console = Console(stream=stream)
    console.step(5, LATER, total=1000)
    console.step(6, {k: v for k, v in LATER.items() if "bits" not in k}, total=1000)
    whole, gap, _ = printed(stream)
    assert [m.start() for m in re.finditer("grad|lr|tok/s|left", whole)] == [
        m.start() for m in re.finditer("grad|lr|tok/s|left", gap)
    ]
    assert "bpb" not in gap


def test_mfu_is_shown_only_where_it_is_known() -> None:
    stream = io.StringIO()
    metrics = {k: v for k, v in LATER.items() if "mfu" not in k}
    Console(stream=stream).step(5, metrics, total=10)
    assert "mfu" not in stream.getvalue()
    assert "12.3k tok/s   3m12s left" in stream.getvalue()


def test_a_loss_that_is_not_a_number_is_shown() -> None:
    stream = io.StringIO()
    Console(stream=stream).step(1, {"loss/train/total": float("nan")}, total=10)
    assert stream.getvalue() == " 1/10  loss     nan\n"


def test_color_only_on_a_terminal_without_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    texts = {}
    for name, stream in (("terminal", Terminal()), ("file", io.StringIO())):
        Console(stream=stream).step(120, LATER, total=1000)
        texts[name] = stream.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    Console(stream=stream).step(120, LATER, total=1000)
    assert "\x1b[" in texts["terminal"]
    assert re.sub(r"\x1b\[\d+m", "", texts["terminal"]) == texts["file"] == stream.getvalue()


def test_a_narrow_terminal_keeps_the_line_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    Console(stream=stream).step(120, LATER, total=1000)
    line = stream.getvalue().rstrip("\n")
    assert len(line) <= 80
    assert "loss  3.4568" in line and "3m12s left" in line


def test_only_the_main_rank_prints() -> None:
    stream = io.StringIO()
    console = Console(is_main=False, stream=stream)
    console.banner([("model", "x")])
    console.step(1, FIRST, total=2)
    console.note("x")
    console.samples(1, [("a", "b")])
    console.finish([("report", "x")])
    assert stream.getvalue() == ""


def test_blocks_align_their_values() -> None:
    stream = io.StringIO()
    Console(stream=stream).banner([("model", "dbrx"), ("parameters", "28.4M\n9.1M active")])
    assert stream.getvalue() == (
        "\n  model       dbrx\n  parameters  28.4M\n              9.1M active\n\n"
    )


def test_a_models_text_cannot_steer_the_terminal() -> None:
    stream = io.StringIO()
    Console(stream=stream).samples(7, [("a\n", "b\x1b[2J\x07\tc\x9b\u202e")])
    assert stream.getvalue() == (
        "\nsamples after 7 batches\n  > a\n    b\\x1b[2J\\x07    c\\x9b\\u202e\n\n"
    )


def test_text_that_the_stream_cannot_encode_is_replaced() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(stream=stream).note("caf\u00e9 \u65e5")
    assert raw.getvalue() == b"  caf? ?\n"


def test_a_console_that_went_away_does_not_end_training() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    console = Console(stream=Closed())
    console.note("x")
    console.step(1, FIRST, total=2)


def test_norms_of_single_parameters_do_not_lengthen_the_line() -> None:
    many = {f"l2_norm/{k}/blocks.{i}.w": 1.0 for k in ("grad", "moment") for i in range(300)}
    lines = []
    for metrics in (LATER, {**many, **LATER}):
        stream = io.StringIO()
        Console(stream=stream).step(120, metrics, total=1000)
        lines.append(stream.getvalue())
    assert lines[0] == lines[1]


def test_a_banner_fits_eighty_columns_and_loses_nothing() -> None:
    stream, value = io.StringIO(), " ".join(f"word-{n}" for n in range(40))
    Console(stream=stream).banner([("data", value), ("length", "1 batch")])
    lines = stream.getvalue().splitlines()
    assert len(lines) > 5 and max(map(len, lines)) <= 80
    assert " ".join(stream.getvalue().split()) == f"data {value} length 1 batch"
