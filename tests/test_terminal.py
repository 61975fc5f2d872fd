"""What a terminal, a log file and a pipe whose reader has left get to see."""

from __future__ import annotations

import fcntl
import os
import pty
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from llmfoundry.command_text import command_line
from llmfoundry.distributed.fsdp import _NO_BUFFER_SYNC
from llmfoundry.recipe.paths import ROOT
from llmfoundry.terminal import columns, progress, quiet_libraries

BAR = """
from llmfoundry.terminal import *
outlast_readers(); quiet_libraries(); show_loading()
with progress(1000, "preparing", "B", scaled=True) as bar:
    for _ in range(1000):
        bar.update()
import tqdm
for _ in tqdm.tqdm(range(3)): pass
print("done")
"""


def on_a_terminal(code: str) -> str:
    """What a Python program shows on a terminal of its own."""
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-c", code]
    ours = ("RANK", "TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment):
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(mine, 4096):
                shown += part
        except OSError:  # the other side is closed
            pass
    os.close(mine)
    return shown.decode()


def test_a_terminal_gets_a_bar_and_a_notice_at_once_that_pytorch_loads() -> None:
    shown = on_a_terminal(BAR)
    assert shown.startswith("loading PyTorch ...\r\n") and "done" in shown
    assert "\rpreparing" in shown.replace("\r\n", "\n")


def test_a_log_file_gets_a_line_each_tenth_and_no_control_characters(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        subprocess.run([sys.executable, "-c", BAR], stdout=file, stderr=file, cwd=ROOT, check=True)
    text = log.read_bytes().decode()
    assert "\r" not in text and "\x1b" not in text and "loading" not in text
    lines = text.splitlines()
    reported = [
        int(line.split("%")[0].split()[-1]) for line in lines if line.startswith("preparing")
    ]
    assert (
        reported[0] == 0
        and reported[-1] == 100
        and reported == sorted(reported)
        and len(reported) <= 11
    )
    assert "done" in lines and len(lines) == len(reported) + 1, "other libraries' bars are silent"


LOGS = """
import os, sys
from llmfoundry.terminal import *
outlast_readers()
if sys.argv[1] == "run":
    outlast_full_disks()
for n in range(3):
    print("a line", file=sys.stderr, flush=True)
    print("x" * 10_000, flush=True)
"""


@pytest.mark.parametrize(("kind", "status"), [("run", 0), ("data", 1)])
def test_a_run_outlasts_a_full_disk_under_its_log_and_a_command_says_what_it_lost(
    kind: str, status: int
) -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-c", LOGS, kind]
        assert subprocess.run(command, stdout=full, stderr=full, cwd=ROOT).returncode == status


def test_what_a_library_prints_lands_in_no_file_where_standard_error_is_closed(
    tmp_path: Path,
) -> None:
    code = """
from llmfoundry.terminal import outlast_readers
import os, subprocess, sys
outlast_readers()
with open(sys.argv[1], "wb") as file:
    os.write(2, b"a library's warning")
    subprocess.run(["sh", "-c", "echo another >&2"], check=True)
"""
    words = ["sh", "-c", 'exec "$@" 2>&- >&-', "sh", sys.executable, "-c", code, tmp_path / "f"]
    subprocess.run(words, cwd=ROOT, check=True)
    assert (tmp_path / "f").read_bytes() == b""


def test_a_bar_that_is_not_to_be_shown_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(3, "x", "", shown=False) as bar:
        bar.update(3)
    assert capsys.readouterr() == ("", "")


def test_a_user_may_still_decide_about_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "0")
    quiet_libraries()
    assert os.environ["TQDM_DISABLE"] == "0"


def test_a_command_outlives_its_reader(tmp_path: Path) -> None:
    code = (
        "from llmfoundry.terminal import outlast_readers as o; o()\n"
        "import os, sys\n"
        "for n in range(20_000): print('line', n)\n"
        "print('reported', file=sys.stderr, flush=True); print('last', flush=True)\n"
        f"open({str(tmp_path / 'end')!r}, 'w').write('whole')"
    )
    line = f'{sys.executable} -c "$CODE" 2>&1 | head -1; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", line],
        env={**os.environ, "CODE": code},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("line 0\n0\n", "")
    assert (tmp_path / "end").read_text() == "whole"


def test_a_command_outlives_its_terminal(tmp_path: Path) -> None:
    code = (
        "from llmfoundry.terminal import outlast_readers as o; o()\n"
        "import signal, sys, time; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "print(sys.stdout.isatty(), flush=True); sys.stdin.read()\n"
        "print('nobody reads this', flush=True); print('nor this', file=sys.stderr, flush=True)\n"
        f"open({str(tmp_path / 'end')!r}, 'w').write('whole')"
    )
    ours, its = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=its,
        stderr=its,
        start_new_session=True,
    )
    os.close(its)
    assert os.read(ours, 100).split() == [b"True"]
    os.close(ours)
    process.communicate()
    assert process.returncode == 0 and (tmp_path / "end").read_text() == "whole"


@pytest.mark.filterwarnings("error")
def test_replicas_are_made_without_a_warning() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        module = DistributedDataParallel(torch.nn.Linear(2, 2), init_sync=False, **_NO_BUFFER_SYNC)
        assert not module.broadcast_buffers
    finally:
        torch.distributed.destroy_process_group()


def test_columns_are_as_wide_as_their_texts_and_numbers_end_at_one_place() -> None:
    lines = columns(("task", "n", "notes"), [("copa", "1,000", ""), ("a", "7", "x")], left=(0, 2))
    assert lines == [
        "task      n  notes",
        "copa  1,000",
        "a         7  x",
    ]
    assert columns(("task", "n"), []) == ["task  n"]


def test_a_terminal_obeys_nothing_that_a_model_writes() -> None:
    """Its title, its colors and its lines stay; a pipe gets every character."""
    shows = (
        "import sys; from llmfoundry.terminal import shown_on\n"
        r"print(shown_on(sys.stdout, '\x1b]0;owned\x07a\tb\r\x9b2J\x7f\n\u00e9\u200d\U0001f600'))"
    )
    shown = on_a_terminal(shows).replace("\r\n", "\n")
    assert shown == "\\x1b]0;owned\\x07a\tb\\r\\x9b2J\\x7f\n\u00e9\u200d\U0001f600\n"
    piped = subprocess.run([sys.executable, "-c", shows], capture_output=True, check=True)
    assert piped.stdout.decode().startswith("\x1b]0;owned\x07a\tb\r\x9b2J")


def test_printed_commands_can_be_copied_into_a_shell() -> None:
    words = ("runs/it's mine; rm -rf", "to=hf", "output=runs/a b/hf", "plugins=[a.py,b.py]")
    line = command_line("convert", *words)
    assert shlex.split(line) == ["python", "scripts/convert.py", *words]
    plain = command_line("generate", "runs/quickstart", "prompt=def __init__(self")
    assert plain == "python scripts/generate.py runs/quickstart prompt='def __init__(self'"


@pytest.mark.slow
def test_torchao_that_transformers_imports_is_silent() -> None:
    code = (
        "from llmfoundry.terminal import quiet_libraries; quiet_libraries()\n"
        "import transformers.modeling_utils, sys, importlib.util\n"
        "assert ('torchao' in sys.modules) == (importlib.util.find_spec('torchao') is not None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
