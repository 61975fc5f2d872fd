"""A check of a GPU: what is asked, what is found wrong or below its target, what a page shows."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.autograd import DeviceType

from benchmarks.gpu_check import check as checking
from benchmarks.gpu_check import measure, page, plan, timing
from benchmarks.gpu_check.check import Options, Runner, differs, options
from benchmarks.gpu_check.page import as_html
from benchmarks.gpu_check.plan import CUDA, Item, Results, Step
from benchmarks.gpu_check.wheels import unpack
from llmfoundry.errors import UserError
from llmfoundry.ops import loss
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import TrainRecipe
from tests.tiny import ROOT

GPU = {"gpu": "NVIDIA H200", "peak TFLOP/s": 989.5}


def check_of(
    items: Sequence[Item],
    scripts: dict[str, str],
    folder: Path,
    patch: pytest.MonkeyPatch,
    **settings: Any,
) -> Runner:
    """A check whose items run the Python programs of their names, in a step of their own each."""

    def words(item: Item, file: Path, *_: object) -> list[str]:
        return [sys.executable, "-c", PRELUDE + scripts[item.name], str(file)]

    patch.setattr(checking, "command", words)
    facts = Item("facts", "facts")
    scripts["facts"] = 'found({"device": "cpu", "modules": []})'
    steps = [Step("device", "Device", 1, [facts]), *(Step(i.name, i.name, 1, [i]) for i in items)]
    minutes = settings.pop("minutes", 5.0)
    return Runner(Results("cpu", minutes, "today", steps), folder, **settings)


def item(name: str, limit: float = 60, **settings: Any) -> Item:
    return Item(name, settings.pop("measure", "loss"), limit=limit, **settings)


PRELUDE = """
import json, os, sys, time
def found(row):
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps(row) + "\\n")
"""


def states(check: Runner) -> dict[str, str]:
    return {item.name: item.state for _, item in check.results.items()}


def test_a_crash_a_refusal_and_a_missing_package_are_rows_and_the_rest_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = {
        "good": 'found({"value": 1})',
        "bad": 'found({"value": 2}); found({"value": 3, "wrong": "off by one"})',
        "crash": 'found({"value": 4}); os.kill(os.getpid(), 11)',
        "memory": 'print("torch.OutOfMemoryError: CUDA out of memory. Tried ..."); sys.exit(1)',
        "refused": 'print("model: needs 9.0 GiB; 1.0 GiB are free; write less"); sys.exit(2)',
        "mistake": 'print("unknown key x"); sys.exit(2)',
        "last": 'found({"value": len(json.load(open("../gpu-check.json"))["steps"])})',
    }
    items = [item(name) for name in scripts]
    items += [item("of CUDA", needs=("cuda",)), item("of a kernel", needs=("flash_attn",))]
    check = check_of(items, scripts, tmp_path, monkeypatch)
    check.run_all()
    assert states(check) == {
        "facts": "ok",
        "good": "ok",
        "bad": "failed",
        "crash": "failed",
        "memory": "failed",
        "refused": "not here",
        "mistake": "failed",
        "last": "ok",
        "of CUDA": "not here",
        "of a kernel": "not here",
    }
    by_name = {one.name: one for _, one in check.results.items()}
    assert by_name["crash"].rows == [{"value": 4}] and "SIGSEGV" in by_name["crash"].reason
    assert "CUDA out of memory" in by_name["memory"].reason
    assert "off by one" in by_name["bad"].reason and "unknown key x" in by_name["mistake"].reason
    # an item sees the results of those before it, with those to come: the file is complete
    assert by_name["last"].rows == [{"value": 10}]
    html = (tmp_path / "gpu-check.html").read_text()
    assert all(name in html for name in by_name if name != "facts")
    kept = checking.read_results(tmp_path / "gpu-check.json", "cpu")
    assert kept["status"] == "finished" and kept["facts"] == check.results.facts
    assert kept["steps"] == json.loads(json.dumps([asdict(step) for step in check.results.steps]))
    assert not (tmp_path / "work").exists() and page.status(check.results) == 1


def test_an_item_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    program = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    log = tmp_path / "log"
    words = [sys.executable, "-c", program]
    ended, _ = checking.run(words, log, folder=tmp_path, env={}, limit=4)
    assert ended is None
    pid = log.read_text().strip()  # a loaded machine may not have come so far
    with suppress(psutil.NoSuchProcess):  # killed; it may have to wait to end
        while pid and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.05)


def test_what_has_no_time_is_listed_and_makes_the_check_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = {"one": "found({})", "two": "found({})"}
    items = [item(name) for name in scripts]
    check = check_of(items, scripts, tmp_path, monkeypatch, minutes=1e-4)
    check.run_all()
    assert states(check) == {"facts": "ok", "one": "no time", "two": "no time"}
    assert page.status(check.results) == 1 and len(page.not_run(check.results)) == 2


def test_an_item_ends_at_its_limit_and_at_the_end_of_the_time_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = 'found({"value": 1}); time.sleep(600)'
    check = check_of([item("slow", 8)], {"slow": slow}, tmp_path, monkeypatch)
    check.run_all()
    found = check.results.step("slow").items[0]
    assert found.state == "failed" and found.reason == "too long: ended after 8 s"
    check = check_of([item("slow", 80)], {"slow": slow}, tmp_path, monkeypatch, minutes=0.3)
    check.run_all()
    found = check.results.step("slow").items[0]
    assert found.state == "no time" and found.rows in ([{"value": 1}], [])


def test_what_cannot_end_in_the_time_that_is_left_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a fraction of its limit."""
    items = [item("long", 4 * 4 * 60), item("short")]
    scripts = {one.name: f'open("../{one.name}", "w"); found({{"value": 1}})' for one in items}
    check = check_of(items, scripts, tmp_path, monkeypatch, minutes=1.0)
    check.run_all()
    assert [*states(check).values()] == ["ok", "no time", "ok"]
    assert "it takes 60 s or more" in check.results.step("long").items[0].reason
    assert [name for name in scripts if (tmp_path / name).exists()] == ["short"]


def test_what_had_no_time_is_run_in_what_others_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = {"squeezed": 'found({"value": 1})', "quick": 'found({"value": 2})'}
    check = check_of([item(name) for name in scripts], scripts, tmp_path, monkeypatch)
    check.results.step("squeezed").share = 1e-9
    check.run_all()
    assert [*states(check).values()] == ["ok"] * 3
    assert check.results.step("squeezed").items[0].rows == [{"value": 1}]


def test_runs_without_a_corpus_are_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [item("corpus"), item("run", measure="train")]
    check = check_of(items, {"corpus": "sys.exit(1)", "run": "found({})"}, tmp_path, monkeypatch)
    check.run_all()
    assert states(check) == {"facts": "ok", "corpus": "failed", "run": "not here"}
    assert page.status(check.results) == 1


def test_time_that_a_step_does_not_use_is_for_those_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = check_of([item(n) for n in "abc"], dict.fromkeys("abc", ""), tmp_path, monkeypatch)
    for step, share in zip(check.results.steps, (1, 1, 3, 4), strict=True):
        step.share = share
    check._ends = time.monotonic() + 80
    shares = [80.0, 10.0, 80 * 3 / 7, 80.0]  # what all others need has all of it
    assert [check._share(n) for n in range(4)] == pytest.approx(shares, rel=0.05)
    check._ends = time.monotonic() - 5
    assert check._share(1) < 0


def test_a_later_check_keeps_what_is_finished_and_measures_what_it_is_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("kept", "again", "late")

    def run(script: str, **options: Any) -> Runner:
        scripts = dict.fromkeys(names, script)
        check = check_of([item(name) for name in names], scripts, tmp_path, monkeypatch, **options)
        check.run_all()
        return check

    first = asdict(run('found({"value": 1})').results)
    first["steps"][-1]["items"][0]["state"] = "no time"
    second = run('found({"value": 2})', kept=first, chosen=("again", "late"))
    values = [second.results.step(name).items[0].rows[0]["value"] for name in names]
    assert values == [1, 2, 2]
    third = run("sys.exit(1)", kept=asdict(second.results))
    assert [*states(third).values()] == ["ok"] * 4
    assert differs({"gpu": "A"}, {"gpu": "B"}) == "gpu"
    assert differs({"libraries": {"torch": "2.11"}}, {"libraries": {"torch": "2.13"}}) == "torch"


def test_a_full_disk_is_reported_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    scripts = {"one": 'found({"value": 1})', "two": 'found({"value": 1})'}
    check = check_of([item(name) for name in scripts], scripts, tmp_path, monkeypatch)
    monkeypatch.setattr(checking, "atomic_write", full)
    check.run_all()
    assert [*states(check).values()] == ["ok"] * 3
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert "No space left" in check.unwritten


def test_a_device_that_is_not_there_leaves_an_earlier_page_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpu-check.json").write_text("earlier")
    check = check_of([], {}, tmp_path, monkeypatch)
    monkeypatch.setattr(
        checking, "command", lambda *_: [sys.executable, "-c", "exit('torch sees no GPU')"]
    )
    with pytest.raises(UserError, match="torch sees no GPU"):
        check.run_all()
    assert (tmp_path / "gpu-check.json").read_text() == "earlier"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["minute=3"], "unknown key 'minute'; did you mean 'minutes'"),
        (["25"], "not key=value"),
        (["minutes=0"], "minutes: 0 is not a time"),
        (["minutes=nan"], "minutes: nan is not a time"),
        (["device=gpu"], "device: 'gpu' is not a choice"),
        (["steps=mfu,kernel"], "'kernel' is not a choice; did you mean 'kernels'"),
        (["steps=,"], "steps: is empty"),
        (["resume=yes"], "resume: 'yes' is not a choice"),
        (["output="], "output: is empty"),
        (["device=cpu", "device=cpu"], "device: is given twice"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        options(words)
    assert message in str(error.value) and len(error.value.lines()) == 1


def test_the_commands_words_are_read() -> None:
    words = ["minutes=3", "device=cpu", "steps=mfu,loss", "resume=true", "output=x"]
    assert options(words) == Options(3.0, "cpu", Path("x"), ("mfu", "loss"), True)
    assert options(["steps=[mfu, loss]"]).steps == ("mfu", "loss")
    assert options([]) == Options() and Options().device == "cuda"


def test_two_checks_do_not_share_a_folder(tmp_path: Path) -> None:
    with checking._alone(tmp_path), pytest.raises(UserError, match="another check is at work"):
        checking._alone(tmp_path)
    checking._alone(tmp_path).release()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        checking._alone(tmp_path / "file" / "folder")


def write_wheel(folder: Path, name: str) -> None:
    package, version = name.split("-")[:2]
    about = f"{package}-{version}.dist-info"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        wheel.writestr(f"{package}/__init__.py", "VALUE = 7\n")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0")
        tag = name.removesuffix(".whl").split("-", 2)[2]
        wheel.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
        wheel.writestr(f"{about}/RECORD", "")


SCRIPT = ROOT / "scripts" / "gpu_check.py"


def test_a_machine_without_packages_is_told_which_to_bring() -> None:
    said = subprocess.run(  # -S: the standard library alone
        [sys.executable, "-S", SCRIPT, "device=cpu"], capture_output=True, text=True
    )
    assert said.returncode == 2 and len(said.stderr.splitlines()) == 1, said.stderr
    assert said.stderr.startswith("wheels: ") and "cannot be imported" in said.stderr


def test_the_wheels_that_the_help_names_are_enough(tmp_path: Path) -> None:
    for module in measure.NEEDED:
        found = importlib.util.find_spec(module)
        assert found is not None and found.origin is not None
        (tmp_path / module).symlink_to(Path(found.origin).parent)
    said = subprocess.run(
        [sys.executable, "-S", SCRIPT, "device=none"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert said.returncode == 2 and said.stderr.startswith("device: 'none'"), said.stderr
    assert set(measure.NEEDED.values()) <= {*re.findall(r"[\w-]+", SCRIPT.read_text())}


def test_wheels_are_unpacked_and_those_of_other_machines_refused(tmp_path: Path) -> None:
    folder, into = tmp_path / "wheels", tmp_path / "into"
    folder.mkdir()
    with pytest.raises(UserError, match=r"holds no \.whl"):
        unpack(folder, into)
    write_wheel(folder, "small_package-1.0-py3-none-any.whl")
    unpack(folder, into)
    assert (into / "small_package" / "__init__.py").read_text() == "VALUE = 7\n"
    for name, message in {
        "fast-1.0-cp27-cp27m-manylinux_2_17_x86_64.whl": "is not a supported wheel",
        "fast-1.0-cp310-abi3-macosx_11_0_vax.whl": "is not a supported wheel",
    }.items():
        write_wheel(folder, name)
        with pytest.raises(UserError, match=f"wheels: .*{message}"):
            unpack(folder, into)
        (folder / name).unlink()
    (folder / "broken-1.0-py3-none-any.whl").write_text("no zip file")
    with pytest.raises(UserError, match=r"wheels: .*broken"):
        unpack(folder, into)


def runs_of(device: str) -> list[Item]:
    return [one for step in plan.steps(device) for one in step.items if one.measure == "train"]


def of_each_kind(runs: list[Item]) -> list[Item]:
    """One with each key that is overridden, and one of each recipe."""
    by_kind: dict[str, Item] = {}
    for run in runs:
        keys = (word.split("=")[0] for word in run.settings["words"])
        for key in (run.settings["recipe"], *keys):
            by_kind.setdefault(key, run)
    return list({run.name: run for run in by_kind.values()}.values())


def test_each_kind_of_run_is_a_sound_recipe(tmp_path: Path) -> None:
    are_sound(of_each_kind(runs_of("cuda")), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_run_of_the_plan_is_a_sound_recipe(device: str, tmp_path: Path) -> None:
    runs = runs_of(device)
    assert len(runs) > (35 if device == "cuda" else 14)
    are_sound(runs, tmp_path)


def are_sound(runs: list[Item], folder: Path) -> None:
    for run in runs:
        name, *words = measure.run_words(folder / "a.rows", **run.settings)
        recipe = checked(TrainRecipe, name, words)
        settings = recipe.callbacks.plugins["gpu_check"]
        assert settings is not None and settings["file"] == str(folder / "a.rows"), run.name
        assert recipe.tokenizer.name == "bytes" and not recipe.logger.mlflow
        assert ("compiled" in run.name and "not" not in run.name) == recipe.compile, run.name


def test_names_in_the_plan_are_items_own() -> None:
    for device in ("cuda", "cpu"):
        for step in plan.steps(device):
            names = [one.name for one in step.items]
            assert len({*names}) == len(names), step.name
    assert [step.name for step in plan.steps("cuda")] == checking.STEPS


def test_layouts_run_on_every_gpu_and_are_listed_on_a_cpu_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = next(step for step in plan.steps(CUDA) if step.name == "layouts").items
    check = check_of([], {}, tmp_path, monkeypatch)
    check.results.facts = {"modules": ["pytest"]}
    assert check._lacking(one) == "needs CUDA" and one.all_gpus
    check.results.device = CUDA
    assert check._lacking(one) == ""


def test_the_page_shows_how_far_layouts_are_from_a_plain_loop_and_which_were_not_run() -> None:
    rows: list[dict[str, Any]] = [
        {"test": "t[fsdp]", "outcome": "passed", "loss": 1.5e-7, "grad norm": 2e-7},
        {"test": "t[hsdp]", "outcome": "skipped", "reason": "needs 4 GPUs, 1 here"},
    ]
    one = Item("one", "tests", state="ok", rows=rows)
    two = Item("two", "tests", state="not here", reason="needs 2 GPUs")
    step = Step("layouts", "Layouts of processes", 1, [one, two])
    html = as_html(Results("cuda", 1, "today", [step], facts={"gpu": "x"}))
    assert "t[fsdp]" in html and "1.5e-07" in html and "needs 2 GPUs" in html
    assert "needs 4 GPUs, 1 here" in html


def test_files_with_gpu_tests_are_found_those_of_kernels_in_a_step_of_their_own() -> None:
    steps = {step.name: step for step in plan.steps("cuda")}

    def files(step: str) -> set[str]:
        return {Path(f).name for one in steps[step].items for f in one.settings["files"]}

    assert {"test_attention_kernels.py", "test_moe.py"} <= files("kernels")
    assert "test_callbacks.py" in files("tests")
    assert "test_loader.py" not in files("tests") | files("kernels")


def test_a_row_is_a_test_with_what_it_records_why_it_failed_or_was_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "pytestmark = pytest.mark.gpu\n"
        "def test_good(record_property):\n    record_property('output error', 1e-3)\n"
        "def test_bad():\n    assert 1 == 2, 'one is not two'\n"
        "@pytest.mark.skip(reason='no GPU')\ndef test_left(): ...\n"
        "@pytest.fixture\ndef broken():\n    raise OSError('disk')\n"
        "def test_broken(broken): ...\n"
    )
    file, settings = tmp_path / "rows", {"files": [str(tmp_path / "test_some.py")]}
    words = checking.command(Item("", "tests", settings), file, "cpu")
    assert subprocess.run(words, capture_output=True, cwd=ROOT).returncode == 0
    good, bad, left, broken = plan.read(file)
    assert good["outcome"] == "passed" and good["output error"] == 1e-3 and good["s"] >= 0
    assert bad["outcome"] == "failed" and "one is not two" in bad["wrong"]
    assert left["outcome"] == "skipped" and left["reason"] == "no GPU"
    assert broken["outcome"] == "failed" and "disk" in broken["wrong"]
    settings["files"] = [str(tmp_path / "none.py")]
    words = checking.command(Item("", "tests", settings), file := tmp_path / "none", "cpu")
    subprocess.run(words, capture_output=True, cwd=ROOT)
    assert "ended with status 4" in plan.read(file)[0]["wrong"]


def results_of_a_gpu() -> Results:
    """Of 800 TFLOP/s; one run above and one below 60 % of it, both with a loss beside the CPU's."""

    def run(rate: float, **more: Any) -> dict[str, Any]:
        row = {"TFLOP/s": rate, "step ms": 100.0, "tokens/s": 1e5, "rows": 8, "row tokens": 2048}
        row |= {"microbatch": 8, "peak GiB": 10.0, "estimate GiB": 11.0, "data wait, ms": 0.1}
        return {**row, "attention": "varlen", **more}

    def step(name: str, **items: list[dict[str, Any]]) -> Step:
        found = [Item(n, "", state="ok", rows=rows) for n, rows in items.items()]
        return Step(name, name, 1, found)

    losses = {"m, fp32, CPU": [2.0, 1.0], "m, fp32, device": [2.0, 1.0005]}
    losses["m, amp_bf16, device"] = [2.0, 1.05]
    steps = [
        step("device", products=[{"product": "8192", "TFLOP/s": 800.0, "ms": 1.0}]),
        step(
            "tests", file=[{"test": "t[<b>]", "outcome": "failed", "wrong": "<script>x</script>"}]
        ),
        step("kernels", flex=[{"test": "flex[a]", "outcome": "passed", "output error": 1e-3}]),
        step("experts", dbrx=[{"contender": "grouped_mm", "TFLOP/s": 240.0, "ms": 1.0}]),
        step("mfu", fast=[run(520.0)], slow=[run(400.0, **{"data wait, ms": 5.0})]),
        step("memory", full=[run(500.0, **{"peak GiB": 12.0})]),
        step("loss", head=[{"chunk": "as it is", "ms": 15.0, "of best chunk": 1.5}]),
        step(
            "losses",
            **{k: [run(1.0, losses=v, precision=k.split(", ")[1])] for k, v in losses.items()},
        ),
        step("bare", **{"bare loop, compiled": [{"tokens/s": 1.25e5, "step ms": 80.0}]}),
        step("data"),
        step("save", background=[run(1.0, **{"blocked s": [0.5, 0.25], "checkpoint GiB": 1.4})]),
        step("profile", one=[{"kernel": "gemm", "calls": 3, "ms": 60.0, "share": 0.75}]),
    ]
    results = Results("cuda", 25, "today", steps, "finished", 60.0, dict(GPU))
    results.step("losses").items[0].device = "cpu"
    results.step("bare").items.append(Item("ours, compiled", "", state="ok", rows=[run(500.0)]))
    flash = Item("flash", "", state="not here", reason="needs flash_attn")
    crash = Item("crash", "", state="failed", reason="killed", log="last <words>")
    results.step("mfu").items += [flash, crash]
    for one, found in results.items():
        page.judge(results, one, found)
    return results


def test_what_is_below_its_target_is_listed_with_what_was_found() -> None:
    below = {what: found for what, found, _ in page.below(results_of_a_gpu())}
    assert below == {
        "mfu: slow": "5.0% data wait of step",
        "experts: dbrx grouped_mm": "30.0% of products",
        "bare: ours, compiled": "80.0% of bare loop",  # 1e5 of 1.25e5 tokens a second
        "loss: head as it is": "1.5 of best chunk",
    }
    both = [found for what, found, _ in page.below(results_of_a_gpu()) if what == "mfu: slow"]
    assert both == ["50.0% of products", "5.0% data wait of step"]  # 400 of 800; 520 are 65 %
    on_cpu = replace(results_of_a_gpu(), device="cpu")
    assert page.below(on_cpu) == [] and len(page.wrong(on_cpu)) == 2


def test_what_is_wrong_is_listed_whoever_found_it() -> None:
    lines = page.wrong(results_of_a_gpu())
    assert lines[0] == "mfu: crash: killed"
    assert lines[1] == "memory: full: 0.9167 estimate of peak: at least 0.95"  # 11 GiB of 12
    assert lines[2] == "losses: m, amp_bf16, device: 0.05 amp_bf16 off by: at most 0.02"
    assert len(lines) == 3 and page.status(results_of_a_gpu()) == 1  # fp32 is off by 5e-4


def test_the_exit_status_is_0_where_all_ran_and_is_right() -> None:
    items = [Item("a", "", state="ok"), Item("b", "", state="not here", reason="needs CUDA")]
    results = Results("cpu", 1, "today", [Step("mfu", "speed", 1, items)], "finished")
    assert page.status(results) == 0
    for state in ("failed", "no time", "waiting"):
        results.steps[0].items[0].state = state
        assert page.status(results) == 1, state


class Balanced(HTMLParser):
    """Knows which elements are open, and all text."""

    VOID = ("meta", "br", "line", "rect", "path")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not any(key in ("src", "href") for key, _ in attrs)  # it needs nothing but itself
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opened and closed at once."""

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def test_the_page_is_complete_shows_all_and_runs_nothing_of_it() -> None:
    html = as_html(results_of_a_gpu())
    shown = Balanced()
    shown.feed(html)
    assert shown.open == []
    for words in (
        "NVIDIA H200",
        "80.8% of the table's 989.5",  # 800 of 989.5
        "50.0% of products",
        "needs flash_attn",
        "last <words>",
        "<script>x</script>",
        "2048",
        "0.5, 0.25",
    ):
        assert words in shown.text, words
    assert "<script>x" not in html


def test_a_page_of_nothing_yet_is_complete() -> None:
    results = Results("cuda", 25, "today", [Step("mfu", "speed", 1, [Item("a", "train")])])
    shown = Balanced()
    shown.feed(as_html(results))
    assert shown.open == [] and "waiting" in shown.text


def test_rows_survive_an_unfinished_line(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    assert plan.read(file) == []
    plan.append(file, {"a": 1.23456789, "b": [float("nan")], "c": None})
    with file.open("a") as out:
        out.write('{"half": ')
    assert plan.read(file) == [{"a": 1.23457, "b": ["nan"], "c": None}]


def test_a_chunk_of_the_loss_is_as_many_tokens_as_were_asked() -> None:
    def chunks() -> int:
        hidden, weight = torch.zeros(100, 8), torch.zeros(16, 8)
        options, labels = loss.HeadOptions(torch.float32), torch.zeros(100, dtype=torch.int64)
        run = loss.HeadPass(hidden, weight, labels, options, wants=(True, True))
        return len([*run.parts()])

    with measure.of_chunks(32):
        assert chunks() == 4
    with measure.of_chunks(None):
        assert chunks() == 1
    assert chunks() == 1


def event(name: str, us: float, *, on: Any = DeviceType.CUDA, note: bool = False) -> Any:
    time_range = SimpleNamespace(elapsed_us=lambda: us)
    return SimpleNamespace(
        name=name, device_type=on, time_range=time_range, is_user_annotation=note
    )


def test_kernels_of_a_profile_are_summed_by_name_and_kind_and_add_up_to_the_step() -> None:
    events = [
        event("nvjet_tst_128x256", 300.0),
        event("nvjet_tst_128x256", 100.0),
        event("flash_fwd_kernel", 100.0),
        event("Optimizer.step#AdamW.step", 900.0, note=True),  # holds kernels, is none
        event("aten::mm", 900.0, on=DeviceType.CPU),
    ]
    found = [*timing.kernel_rows(SimpleNamespace(events=lambda: events), "cuda", 1.0)]
    assert found == [
        {"kernel": "nvjet_tst_128x256", "calls": 2, "ms": 0.4, "share": 0.4},
        {"kernel": "flash_fwd_kernel", "calls": 1, "ms": 0.1, "share": 0.1},
        {"kind": "no kernel", "ms": 0.5, "share": 0.5},
        {"kind": "matrix products", "ms": 0.4, "share": 0.4},
        {"kind": "attention", "ms": 0.1, "share": 0.1},
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", "matrix products"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("triton_tem_fused_flex_attention_backward_0", "attention"),
        ("void at::native::vectorized_layer_norm_kernel", "norms"),
        ("triton_poi_fused_gelu_3", "compiled"),
        ("Memcpy HtoD (Pinned -> Device)", "copies and casts"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::elementwise_kernel<128, 4>", "elementwise"),
        ("ncclDevKernel_AllGather", "collectives"),
        ("something", "other"),
    ],
)
def test_a_kernels_kind_is_in_its_name(name: str, kind: str) -> None:
    assert timing.kind(name) == kind


def test_a_gpus_moments_are_events_and_its_times_milliseconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.recorded = False

        def record(self) -> None:
            self.recorded = True

        def elapsed_time(self, later: Event) -> float:
            assert self.recorded and later.recorded
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    before, after = (measure.mark(torch.device("cuda")) for _ in range(2))
    assert measure.seconds_between(before, after) == 0.25


def test_an_items_process_sees_one_gpu_or_none_and_no_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    for name in ("RANK", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "TORCHELASTIC_RUN_ID", "MASTER_PORT"):
        monkeypatch.setenv(name, "8")
    env = checking.environment("cuda")
    assert env["CUDA_VISIBLE_DEVICES"] == "3" and str(ROOT) in env["PYTHONPATH"]
    assert not {"RANK", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "TORCHELASTIC_RUN_ID"} & {*env}
    assert checking.environment("cpu")["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # whoever hides all GPUs means it
    assert checking.environment("cuda")["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert checking.environment("cuda")["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize(
    ("cuda", "there", "message"),
    [
        (None, False, "built without CUDA"),
        ("13.0", False, "sees no GPU"),
        ("13.0", True, "does not"),
    ],
)
def test_a_torch_without_a_gpu_names_the_reason(
    cuda: str | None, there: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*sizes: int, device: str) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available\nmore lines")

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch, "ones", broken)
    with pytest.raises(SystemExit, match=message):
        next(measure.facts(torch.device("cuda")))


@pytest.mark.slow
def test_a_run_is_timed_through_the_code_path_of_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The corpus and one profiled run, shrunk, as the command starts them."""
    small = {step.name: step for step in plan.steps("cpu")}
    facts, _, corpus = small["device"].items
    steps = [
        replace(small["device"], items=[facts, corpus]),
        replace(small["profile"], items=small["profile"].items[:1]),
    ]
    monkeypatch.setattr(checking, "steps", lambda device: steps)
    assert checking.check(Options(minutes=10, device="cpu", output=tmp_path)) == 0
    results = json.loads((tmp_path / "gpu-check.json").read_text())
    timed, *profiled = results["steps"][1]["items"][0]["rows"]
    assert timed["rows"] * timed["row tokens"] == 4 * 64
    assert timed["tokens/s"] == pytest.approx(256 / timed["step ms"] * 1e3, rel=1e-4)
    # by hand: 2 layers of 12 d^2 and the head, 6 FLOPs each; attention 12 d a token of the row
    flops = 6 * (2 * 12 * 64**2 + 512 * 64) + 2 * 12 * 64 * 64
    assert timed["TFLOP/s"] == pytest.approx(flops * timed["tokens/s"] / 1e12, rel=1e-4)
    assert len(timed["losses"]) == 3 and all(loss > 0 for loss in timed["losses"])
    kernels = [row for row in profiled if "kernel" in row]
    assert len(kernels) == 10 and sum(row["share"] for row in profiled if "kind" in row) > 0.99
    assert "aten::" in (tmp_path / "gpu-check.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_whole_check_runs_on_a_cpu(tmp_path: Path) -> None:
    assert checking.check(Options(minutes=110, device="cpu", output=tmp_path)) == 0
    content = checking.read_results(tmp_path / "gpu-check.json", "cpu")
    items = [one for step in content["steps"] for one in step["items"]]
    assert content["status"] == "finished"
    assert {one["state"] for one in items} == {"ok", "not here"}
    keys = ("fp32 off by", "amp_bf16 off by")
    off = [row[key] for one in items for row in one["rows"] for key in keys if key in row]
    assert len(off) == 4 and max(off) < 2e-2
