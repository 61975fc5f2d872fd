"""A check of a GPU: what is asked, what is found wrong or below its target, what a page shows."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
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
from benchmarks.gpu_check.check import Options, Runner, differs, options, time_of, unpack
from benchmarks.gpu_check.page import ItemResult, Results, StepResult, as_html
from benchmarks.gpu_check.plan import Item, Step
from llmfoundry.errors import UserError
from llmfoundry.ops import loss
from llmfoundry.recipe.front.load import checked
from llmfoundry.recipe.scripts.train import TrainRecipe

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
    facts = Item("facts", 60)
    scripts["facts"] = 'found({"device": "cpu", "modules": []})'
    steps = [Step("device", "Device", 1, (facts,)), *(Step(i.name, i.name, 1, (i,)) for i in items)]
    minutes = settings.pop("minutes", 5.0)
    return Runner(Results("cpu", minutes, "today"), steps, folder, **settings)


PRELUDE = """
import json, os, sys, time
def found(row):
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps(row) + "\\n")
"""


def states(check: Runner) -> dict[str, str]:
    return {item.name: item.state for _, item in check.results.items()}


def test_a_crash_a_refusal_and_a_missing_package_are_rows_and_the_rest_goes_on(
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
    items = [Item(name, 60) for name in scripts]
    items += [Item("of CUDA", 60, needs=("cuda",)), Item("of a kernel", 60, needs=("flash_attn",))]
    check = check_of(items, scripts, tmp_path, monkeypatch)
    check.run_all()
    assert states(check) == {
        "facts": "ok",
        "good": "ok",
        "bad": "wrong",
        "crash": "failed",
        "memory": "out of memory",
        "refused": "not here",
        "mistake": "failed",
        "last": "ok",
        "of CUDA": "not here",
        "of a kernel": "not here",
    }
    by_name = {item.name: item for _, item in check.results.items()}
    assert by_name["crash"].rows == [{"value": 4}] and "SIGSEGV" in by_name["crash"].reason
    assert "off by one" in by_name["bad"].reason and "unknown key x" in by_name["mistake"].reason
    # an item sees the results of those before it, with those to come: the file is whole meanwhile
    assert by_name["last"].rows == [{"value": 10}]
    html = (tmp_path / "gpu-check.html").read_text()
    assert all(name in html for name in by_name if name != "facts")
    assert checking.read_results(tmp_path / "gpu-check.json") == check.results
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
    state, reason, _ = checking.run(
        [sys.executable, "-c", program], log, folder=tmp_path, env={}, limit=4, own_limit=True
    )
    assert state == "too long" and reason == "ended after 4 s"
    pid = log.read_text().strip()  # a loaded machine may not have come so far
    with suppress(psutil.NoSuchProcess):  # killed; it may have to wait to end
        while pid and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.05)


def test_what_has_no_time_is_listed_and_makes_the_check_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = {"one": "found({})", "two": "found({})"}
    items = [Item(name, 60) for name in scripts]
    check = check_of(items, scripts, tmp_path, monkeypatch, minutes=1e-4)
    check.run_all()
    assert states(check) == {"facts": "ok", "one": "no time", "two": "no time"}
    assert page.status(check.results) == 1 and len(page.not_run(check.results)) == 2


def test_what_cannot_end_in_the_time_that_is_left_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its limit, or as long as an item of its kind took."""
    items = [
        Item("before", 60, "products"),
        Item("like it", 60, "products"),
        Item("by its limit", 4 * 4 * 60, "loss"),
        Item("short", 60, "save"),
    ]
    scripts = {item.name: f'open("../{item.name}", "w"); found({{"value": 1}})' for item in items}
    check = check_of(items, scripts, tmp_path, monkeypatch, minutes=1.0)
    kept = check_of(items, scripts, tmp_path, monkeypatch).results
    kept.steps[1].items[0].state, kept.steps[1].items[0].seconds = "ok", 70.0
    check.kept = kept
    check.run_all()
    assert [*states(check).values()] == ["ok", "ok", "no time", "no time", "ok"]
    reasons = [item.reason for _, item in check.results.items() if item.state == "no time"]
    assert "it takes 70 s or more" in reasons[0] and "it takes 60 s or more" in reasons[1]
    assert [name for name in scripts if (tmp_path / name).exists()] == ["short"]


def test_what_had_no_time_is_run_in_what_others_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = {"squeezed": 'found({"value": 1})', "quick": 'found({"value": 2})'}
    check = check_of([Item(name, 60) for name in scripts], scripts, tmp_path, monkeypatch)
    check.steps = [replace(s, share=1e-9 if s.name == "squeezed" else 1) for s in check.steps]
    check.run_all()
    assert [*states(check).values()] == ["ok"] * 3
    assert check.results.step("squeezed").items[0].rows == [{"value": 1}]


def test_runs_without_a_corpus_are_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [Item("corpus", 60), Item("run", 60, recipe="mpt-125m")]
    check = check_of(items, {"corpus": "sys.exit(1)", "run": "found({})"}, tmp_path, monkeypatch)
    check.steps = [Step("device", "", 1, (*check.steps[0].items, items[0])), check.steps[2]]
    check.__post_init__()
    check.run_all()
    assert states(check) == {"facts": "ok", "corpus": "failed", "run": "not here"}
    assert page.status(check.results) == 1


def test_time_that_a_step_does_not_use_is_for_those_after_it() -> None:
    steps = [Step("a", "a", 1), Step("b", "b", 3), Step("c", "c", 4)]
    assert [time_of(steps[n:], 80.0) for n in range(3)] == [10.0, pytest.approx(80 * 3 / 7), 80.0]
    assert time_of(steps, -5.0) == 0.0 and time_of([Step("d", "d", 0)], 5.0) == 0.0


def test_a_later_check_keeps_what_is_finished_and_measures_what_it_is_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("kept", "again", "late")
    items = [Item(name, 60) for name in names]
    first = check_of(items, dict.fromkeys(names, 'found({"value": 1})'), tmp_path, monkeypatch)
    first.run_all()
    first.results.step("late").items[0].state = "no time"
    options = {"kept": first.results, "chosen": ("again", "late")}
    scripts = dict.fromkeys(names, 'found({"value": 2})')
    second = check_of(items, scripts, tmp_path, monkeypatch, **options)
    second.run_all()
    values = [second.results.step(name).items[0].rows[0]["value"] for name in names]
    assert values == [1, 2, 2]
    third = check_of(items, dict.fromkeys(names, "sys.exit(1)"), tmp_path, monkeypatch)
    third.kept = second.results
    third.run_all()
    assert [*states(third).values()] == ["ok"] * 4
    assert differs({"gpu": "A"}, {"gpu": "B"}) == "gpu"
    assert differs({"libraries": {"torch": "2.11"}}, {"libraries": {"torch": "2.13"}}) == "torch"


def test_a_full_disk_is_told_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    scripts = {"one": 'found({"value": 1})', "two": 'found({"value": 1})'}
    check = check_of([Item(name, 60) for name in scripts], scripts, tmp_path, monkeypatch)
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
    ("words", "said"),
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
def test_a_mistake_in_the_command_is_one_line(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as error:
        options(words)
    assert said in str(error.value) and len(error.value.lines()) == 1


def test_the_commands_words_are_read() -> None:
    words = ["minutes=3", "device=cpu", "steps=mfu,loss", "resume=true", "output=x"]
    assert options(words) == Options(3.0, "cpu", Path("x"), None, ("mfu", "loss"), True)
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


def test_wheels_are_unpacked_and_those_of_other_machines_refused(tmp_path: Path) -> None:
    folder, into = tmp_path / "wheels", tmp_path / "into"
    folder.mkdir()
    with pytest.raises(UserError, match=r"holds no \.whl"):
        unpack(folder, into)
    write_wheel(folder, "small_package-1.0-py3-none-any.whl")
    (path,) = unpack(folder, into)
    assert (path / "small_package" / "__init__.py").read_text() == "VALUE = 7\n"
    assert unpack(folder, into) == [path]
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
    return [item for step in plan.steps(device) for item in step.items if item.recipe]


def of_each_kind(runs: list[Item]) -> list[Item]:
    """One with each key that is overridden, and one of each recipe."""
    by_kind: dict[str, Item] = {}
    for item in runs:
        for key in (item.recipe, *(word.split("=")[0] for word in item.overrides)):
            by_kind.setdefault(key, item)
    return list({item.name: item for item in by_kind.values()}.values())


def test_each_kind_of_run_is_a_sound_recipe(tmp_path: Path) -> None:
    are_sound(of_each_kind(runs_of("cuda")), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_run_of_the_plan_is_a_sound_recipe(device: str, tmp_path: Path) -> None:
    runs = runs_of(device)
    assert len(runs) > (35 if device == "cuda" else 14)
    are_sound(runs, tmp_path)


def are_sound(runs: list[Item], folder: Path) -> None:
    for item in runs:
        words = checking.command(item, folder / "rows", "cuda", folder / "runs" / "a")
        recipe = checked(TrainRecipe, words[2], words[3:])
        settings = recipe.callbacks.plugins["gpu_check"]
        assert settings is not None and settings["model"] == item.recipe, item.name
        assert recipe.tokenizer.name == "bytes" and not recipe.logger.mlflow
        assert ("compiled" in item.name and "not" not in item.name) == recipe.compile, item.name


def test_names_in_the_plan_are_items_own() -> None:
    for device in ("cuda", "cpu"):
        for step in plan.steps(device):
            names = [item.name for item in step.items]
            assert len({*names}) == len(names), step.name
    assert [step.name for step in plan.steps("cuda")] == checking.STEPS


@pytest.mark.parametrize(
    ("device", "gpus", "reasons"),
    [
        ("cpu", 0, ["needs CUDA", "needs CUDA"]),
        ("cuda", 1, ["", "needs 2 GPUs, 1 here"]),
        ("cuda", 8, ["", ""]),
    ],
)
def test_layouts_that_this_machine_cannot_have_are_listed_with_the_reason(
    device: str, gpus: int, reasons: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (step,) = (step for step in plan.steps(device) if step.name == "layouts")
    check = check_of([], {}, tmp_path, monkeypatch)
    check.results.device = device
    check.results.facts = {"gpus": gpus, "modules": ["pytest"]}
    assert [check._lacking(item) for item in step.items] == reasons
    assert [item.all_gpus for item in step.items] == [False, True]


def test_the_page_shows_how_far_layouts_are_from_a_plain_loop_and_which_were_not_run() -> None:
    row = {"test": "t[fsdp]", "outcome": "passed", "loss": 1.5e-7, "grad norm": 2e-7}
    items = [ItemResult("one", "ok", rows=[row]), ItemResult("two", "not here", "needs 2 GPUs")]
    step = StepResult("layouts", "Layouts of processes", items)
    html = as_html(Results("cuda", 1, "today", facts={"gpu": "x"}, steps=[step]))
    assert "t[fsdp]" in html and "1.5e-07" in html and "needs 2 GPUs" in html


def test_files_with_gpu_tests_are_found_those_of_kernels_in_a_step_of_their_own() -> None:
    steps = {step.name: [item.name for item in step.items] for step in plan.steps("cuda")}
    assert {"ops/test_attention_kernels.py", "ops/test_moe.py"} <= {*steps["kernels"]}
    assert "train/test_callbacks.py" in steps["tests"]
    assert not any("test_loader.py" in name for names in steps.values() for name in names)


def test_a_row_is_a_test_with_what_it_records_why_it_failed_or_was_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(record_property):\n    record_property('output error', 1e-3)\n"
        "def test_bad():\n    assert 1 == 2, 'one is not two'\n"
        "@pytest.mark.skip(reason='no GPU')\ndef test_left(): ...\n"
        "@pytest.fixture\ndef broken():\n    raise OSError('disk')\n"
        "def test_broken(broken): ...\n"
    )
    file = tmp_path / "rows"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"]
    subprocess.run([*words, f"--junitxml={file}", str(tmp_path)], capture_output=True)
    good, bad, left, broken = checking.test_rows(file)
    assert good["outcome"] == "passed" and good["output error"] == 1e-3 and good["s"] >= 0
    assert bad["outcome"] == "failed" and "one is not two" in bad["wrong"]
    assert left["outcome"] == "skipped" and left["reason"] == "no GPU"
    assert broken["outcome"] == "failed" and "disk" in broken["wrong"]
    assert checking.test_rows(tmp_path / "none") == []


def results_of_a_gpu() -> Results:
    """Of 800 TFLOP/s; one run above and one below 60 % of it, both with a loss beside the CPU's."""

    def run(rate: float, **more: Any) -> dict[str, Any]:
        row = {"TFLOP/s": rate, "step ms": 100.0, "tokens/s": 1e5, "rows": 8, "row tokens": 2048}
        row |= {"microbatch": 8, "peak GiB": 10.0, "estimate GiB": 11.0, "data wait, ms": 0.1}
        return {**row, "attention": "varlen", **more}

    def step(name: str, **items: list[dict[str, Any]]) -> StepResult:
        return StepResult(name, name, [ItemResult(n, "ok", rows=r) for n, r in items.items()])

    kinds = [{"kind": "matrix products", "ms": 60.0, "share": 0.75, "step ms": 100.0}]
    kinds += [{"kind": "norms", "ms": 20.0, "share": 0.25, "step ms": 100.0}]
    losses = {"m, fp32, CPU": [2.0, 1.0], "m, fp32, device": [2.0, 1.0005]}
    losses["m, amp_bf16, device"] = [2.0, 1.05]
    results = Results("cuda", 25, "today", "finished", 60.0, dict(GPU))
    results.steps = [
        step("device", products=[{"product": "8192", "TFLOP/s": 800.0, "ms": 1.0}]),
        step(
            "tests", file=[{"test": "t[<b>]", "outcome": "failed", "wrong": "<script>x</script>"}]
        ),
        step("kernels", flex=[{"test": "flex[a]", "outcome": "passed", "output error": 1e-3}]),
        step("experts", dbrx=[{"contender": "grouped_mm", "TFLOP/s": 240.0, "ms": 1.0}]),
        step("mfu", fast=[run(520.0)], slow=[run(400.0, **{"data wait, ms": 5.0})]),
        step("memory", full=[run(500.0, **{"peak GiB": 12.0})]),
        step("loss", head=[{"chunk": "as it is", "ms": 15.0}, {"chunk": 4096, "ms": 10.0}]),
        step("losses", **{k: [run(1.0, losses=v)] for k, v in losses.items()}),
        step("bare", **{"bare loop, compiled": [{"tokens/s": 1.25e5, "step ms": 80.0}]}),
        step("data"),
        step("save", background=[run(1.0, **{"blocked s": [0.5, 0.25], "checkpoint GiB": 1.4})]),
        step("profile", one=[{"kernel": "gemm", "calls": 3, "ms": 60.0, "share": 0.75}, *kinds]),
    ]
    results.step("bare").items.append(ItemResult("ours, compiled", "ok", rows=[run(500.0)]))
    results.step("mfu").items.append(ItemResult("flash", "not here", "needs flash_attn"))
    results.step("mfu").items.append(ItemResult("crash", "failed", "killed", log="last <words>"))
    for one in results.steps:
        for item in one.items:
            page.judge(results, one.name, item)
    return results


def test_what_is_below_its_target_is_said_with_what_was_found() -> None:
    below = {what: found for what, found, _ in page.below(results_of_a_gpu())}
    assert below == {
        "slow": "50.0% of products",  # 400 of 800; 520 are 65 %
        "experts of dbrx, grouped_mm": "30.0% of products",
        "against a bare loop, compiled": "80.0%",  # 1e5 of 1.25e5 tokens a second
        "the loss of head": "1.50 of the best chunk's time",
        "mfu: slow, waits for data": "5.0%",
    }


def test_what_is_wrong_is_said_whoever_found_it() -> None:
    lines = page.wrong(results_of_a_gpu())
    assert lines[0] == "mfu: crash: failed: killed"
    assert "m in amp_bf16 is off by 5.0e-02, more than 2e-02" in lines[1]  # fp32 is off by 5e-4
    assert "memory, full: 11.0 GiB were estimated and 12.0 taken" in lines[2]
    assert len(lines) == 3 and page.status(results_of_a_gpu()) == 1


def test_the_exit_status_is_0_where_all_ran_and_is_right() -> None:
    results = Results("cpu", 1, "today", "finished", steps=[StepResult("mfu", "speed")])
    results.steps[0].items = [ItemResult("a", "ok"), ItemResult("b", "not here", "needs CUDA")]
    assert page.status(results) == 0
    for state in ("wrong", "failed", "out of memory", "too long", "no time", "waiting"):
        results.steps[0].items[0].state = state
        assert page.status(results) == 1, state


def test_the_time_of_a_step_adds_up_to_one() -> None:
    ((name, shares),) = page.time_by_kind(results_of_a_gpu())
    found = {kind: pytest.approx(share) for kind, share in shares}
    assert name == "one" and found == {"matrix products": 0.6, "norms": 0.2, "no kernel": 0.2}


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


def test_the_page_is_whole_says_all_and_runs_nothing_of_what_it_shows() -> None:
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
        "no kernel",
    ):
        assert words in shown.text, words
    assert "<script>x" not in html


def test_a_page_of_nothing_yet_is_whole() -> None:
    results = Results("cuda", 25, "today", steps=[StepResult("mfu", "speed", [ItemResult("a")])])
    shown = Balanced()
    shown.feed(as_html(results))
    assert shown.open == [] and "waiting" in shown.text


def test_rows_survive_a_line_that_was_cut(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    assert measure.read(file) == []
    measure.append(file, {"a": 1.23456789, "b": [float("nan")], "c": None})
    with file.open("a") as out:
        out.write('{"half": ')
    assert measure.read(file) == [{"a": 1.23457, "b": ["nan"], "c": None}]


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


def test_kernels_of_a_profile_are_summed_by_name_and_kind() -> None:
    events = [
        event("nvjet_tst_128x256", 300.0),
        event("nvjet_tst_128x256", 100.0),
        event("flash_fwd_kernel", 100.0),
        event("Optimizer.step#AdamW.step", 900.0, note=True),  # holds kernels, is none
        event("aten::mm", 900.0, on=DeviceType.CPU),
    ]
    found = timing.kernel_rows(SimpleNamespace(events=lambda: events), "cuda")
    assert found == [
        {"kernel": "nvjet_tst_128x256", "calls": 2, "ms": 0.4, "share": 0.8},
        {"kernel": "flash_fwd_kernel", "calls": 1, "ms": 0.1, "share": 0.2},
        {"kind": "matrix products", "ms": 0.4, "share": 0.8},
        {"kind": "attention", "ms": 0.1, "share": 0.2},
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
    env = checking.environment([Path("/a/wheel")], "cuda")
    assert env["CUDA_VISIBLE_DEVICES"] == "3" and "/a/wheel" in env["PYTHONPATH"]
    assert not {"RANK", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "TORCHELASTIC_RUN_ID"} & {*env}
    assert checking.environment([], "cpu")["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # whoever hides all GPUs means it
    assert checking.environment([], "cuda")["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert checking.environment([], "cuda")["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize(
    ("cuda", "there", "said"),
    [
        (None, False, "built without CUDA"),
        ("13.0", False, "sees no GPU"),
        ("13.0", True, "does not"),
    ],
)
def test_a_torch_without_a_gpu_says_why(
    cuda: str | None, there: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*sizes: int, device: str) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available\nmore lines")

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch, "ones", broken)
    with pytest.raises(SystemExit, match=said):
        next(measure.facts(torch.device("cuda")))


def test_a_run_is_timed_on_the_road_of_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The corpus and one profiled run, shrunk, as the command starts them."""
    small = {step.name: step for step in plan.steps("cpu")}
    facts, _, corpus = small["device"].items
    steps = [
        Step("device", "The device", 1, (facts, corpus)),
        Step("profile", "Profile", 1, small["profile"].items[:1]),
    ]
    monkeypatch.setattr(plan, "steps", lambda device: steps)
    assert checking.check(Options(minutes=10, device="cpu", output=tmp_path)) == 0
    results = json.loads((tmp_path / "gpu-check.json").read_text())
    timed, *profiled = results["steps"][1]["items"][0]["rows"]
    assert timed["model"] == "mpt-125m" and timed["rows"] * timed["row tokens"] == 4 * 64
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
    results = checking.read_results(tmp_path / "gpu-check.json")
    assert results is not None and results.status == "finished"
    assert {item.state for _, item in results.items()} == {"ok", "not here"}
    differences = [found for *_, found in page.loss_differences(results)]
    assert len(differences) == 4 and max(differences) < 2e-2
