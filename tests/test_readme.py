"""Every README and page of docs/: each command line in it runs, each path in it exists.

tests/recipe/test_examples.py composes every line; the slow test here runs them, as a newcomer
would: page by page, in a folder of their own after `make train`, with an empty home, shortened by
what this file adds.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.tiny import ENV, ROOT

READMES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for pattern in ("*.md", "yamls/**/*.md", "llmfoundry/**/*.md", "benchmarks/**/*.md")
    for path in sorted(ROOT.glob(pattern))
}
README = READMES["README.md"]
DOCS = {p.relative_to(ROOT).as_posix(): p.read_text() for p in sorted(ROOT.glob("docs/**/*.md"))}
PAGES = READMES | DOCS

# Lines that are not run, and why; each must still be in some page.
NOT_RUN = {
    r"git clone <this repository>": "the address is the reader's",
    r"make (check|test)$": "they run this test",
    r"make gpu-check": "a GPU",
    r"^make install$|^pip install ": "from a package index; the extras are compared below",
    r"^(source|export) ": "of the lines that follow it",
    r"ray start ": "machines of a cluster",
    r"^mlflow server ": "an MLflow server; the lines of its page use a file",
    r"^curl |^guidellm ": "they ask a server: tests/inference/test_serve_command.py has one",
    r"RAY_ADDRESS=\S+ python scripts/prepare_data.py RECIPE": "a Ray cluster and a shared folder",
}
# Lines that are composed and checked, and not run, and why.
COMPOSED = {
    r"s3://": "a bucket",
    r"[= \[]my/": "the reader's own files",
    r"mpt-1b.yaml|mpt-7b.yaml|check.py mpt-7b": "GPUs",
    r"launch=ssh|launch=slurm nodes=\d+( launch.*)?$": "other machines",
    r"data=dbrx-mix": "streams of shards in DATA_ROOT",
    r"fetch_eval_data.py from_foundry=|migrate.py llm-foundry/": "a clone of LLM Foundry",
    r"supervise.launch=": "machines of a cluster",
    r"scripts/serve.py": "it answers until a signal; tests/inference/test_serve_command.py runs it",
    r"runs.py serve": "the same; tests/launch/test_runs.py runs it",
    r"runs.py follow": "it follows until the run ends; tests/launch/test_runs.py runs it",
    r"scaling.py yamls/scaling/\S+ (?!--dry-run)": "minutes; tests/cli/commands/test_scaling.py",
    r"eval=v0.3$": "rows of benchmarks, which are fetched first",
}
# Lines of which a shrunk or local form is run: what takes its place, and why.
LOCAL = {
    r"^make train$": ("python scripts/train.py yamls/quickstart.yaml", "it installs first"),
    r"hf:gpt2\]\" eval=v0.3": ('hf:runs/quickstart/hf]" eval=generated_easy', "the hub"),
    r"hf:gpt2\]\" eval.gauntlet": ('hf:runs/quickstart/hf]" eval.gauntlet', "the hub"),
    r"^torchrun --nproc-per-node 8": (f"{sys.executable} -m torch.distributed.run --standalone"
                                      " --nproc-per-node 2", "8 GPUs"),
    r"^srun --nodes 4 --ntasks-per-node 8 ": ("", "Slurm"),
    r"sweep.n=\d": ("sweep.n=3", "minutes"),
    r"=http://127.0.0.1:5000": ("=sqlite:///mlflow.db", "an MLflow server"),
    r"^(?=python .*models:/)": ("MLFLOW_TRACKING_URI=sqlite:///mlflow.db ", "as it was exported"),
}  # fmt: skip
SHORT = {  # the max_duration that a line is run with, by the first pattern that it matches
    r"--help|--dry-run|--version": "",
    r"sweep=halving": "9ba",
    r"launch=local": "100000ba",  # it is stopped by the page
    r"scripts/(train|finetune|supervise)\.py |llmfoundry train ": "2ba",
}
SMALL = "model.n_layers=1 model.d_model=64 model.n_heads=2"
SMALLER = {  # what is added as well, and why max_duration alone would not do
    r"train.py yamls/mpt-125m": (
        f"{SMALL} max_seq_len=128 global_train_batch_size=4", "a step of 125M parameters on 524,288"
        " tokens is an hour"),
    r"model=mpt-125m": (SMALL, "its checkpoint is 1.5 GB, in each copy of the folder"),
    r"train.py yamls/quickstart-ema": ("save_interval=1ba", "two checkpoints are averaged"),
    r"(train|prepare_data).py yamls/quickstart-distill": (
        "data=files data.paths=[README.md] tokenizer=huggingface"
        " tokenizer.path=runs/quickstart/tokenizer", "the teacher would read 4M tokens"),
    r"supervise.py quickstart$": ("run_name=kept", "runs/quickstart is complete"),
    r"prepare_data.py yamls/mpt-125m": (
        "data=files data.paths=[README.md] tokenizer=bytes", "C4 is on the hub"),
}  # fmt: skip
AS_IT_IS = {  # quick, beside the runs that are shortened
    r"^(cp|llmfoundry cp) ",
    r"scripts/(average|chat|check|compare|convert|eval|generate|inspect_data|plan|track)\.py",
    r"scripts/launch.py .*dry_run=true|scripts/runs.py (list|stop)|llmfoundry eval ",
}


def lines_of(text: str) -> Iterator[str]:
    """The command lines of a page's bash blocks, comments left out."""
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line := re.sub(r"\s+#.*", "", line).strip():
                yield line


LINES = list(dict.fromkeys(line for text in PAGES.values() for line in lines_of(text)))


def first(table: Iterable[str], line: str) -> str | None:
    """The first pattern of a table that a line matches."""
    return next((pattern for pattern in table if re.search(pattern, line)), None)


RUN = [line for line in LINES if not first(NOT_RUN, line)]
WITH_LINES = [page for page, text in PAGES.items() if {*RUN} & {*lines_of(text)}]
CALLS = [line for line in RUN if re.search(r"scripts/\w+\.py|^llmfoundry (?!cp|ls)", line)]


def prepare_folder(folder: Path) -> Path:
    """A folder that looks like the repository to who only reads it."""
    folder.mkdir(exist_ok=True)
    for name in ("scripts", "yamls", "eval", "docs", "llmfoundry", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def test_the_readme_is_short_and_has_commands() -> None:
    assert len(README.encode()) < 8192
    assert len(LINES) > 110 and len(CALLS) > 100


@pytest.mark.parametrize("table", [NOT_RUN, COMPOSED, LOCAL, SHORT, SMALLER])
def test_every_exception_is_of_a_line_that_is_there(table: dict[str, object]) -> None:
    assert {pattern for line in LINES if (pattern := first(table, line))} == {*table}


def test_every_line_is_a_call_that_the_tests_understand() -> None:
    known = r"^(python|llmfoundry|torchrun|srun|make|cp) "
    assert [line for line in RUN if not re.search(known, line)] == []
    for line in RUN:
        assert [t for t in (COMPOSED, LOCAL, SHORT, SMALLER, AS_IT_IS) if first(t, line)], line


def test_no_line_is_run_with_another_evaluation_than_it_is_printed_with() -> None:
    changed = [words for words, _ in SMALLER.values()] + [local for local, _ in LOCAL.values()]
    assert [words for words in changed if re.search(r"(?<!\w)eval[=.]|callbacks", words)] == [
        LOCAL[r"hf:gpt2\]\" eval=v0.3"][0],  # their rows are not here
        LOCAL[r"hf:gpt2\]\" eval.gauntlet"][0],  # as it is printed
    ]


def call(line: str, cwd: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a line in a shell, as a newcomer does: `python` and `llmfoundry` are this project's."""
    path = f"{home.parent / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", line],
        cwd=cwd,
        env=ENV | {"HOME": str(home), "PATH": path, "PYTHONPATH": str(ROOT)},
        input="Reverse: d a c\n",
        capture_output=True,
        text=True,
        timeout=1800,
    )


def shortened(line: str) -> str:
    """A line as it is run here."""
    for pattern, (instead, _) in LOCAL.items():
        line = re.sub(pattern, lambda _, text=instead: text, line)
    if first(COMPOSED, line):
        return f"{line} --cfg job"
    duration = SHORT.get(first(SHORT, line) or "", "")
    words = f" max_duration={duration}" if duration else ""
    more, _ = SMALLER.get(first(SMALLER, line) or "", ("", ""))
    return f"{line}{words} {more}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Makes folders in which the runs that the pages talk of are there, shrunk."""
    place = tmp_path_factory.mktemp("readme")
    home, bin_folder = place / "home", place / "bin"
    for folder in (home, bin_folder):
        folder.mkdir()
    for name, words in (("python", ""), ("llmfoundry", "-m llmfoundry ")):
        (bin_folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words}"$@"\n')
        (bin_folder / name).chmod(0o755)
    base = prepare_folder(place / "base")
    for line in (
        "make train",
        "python scripts/convert.py runs/quickstart to=hf output=runs/quickstart/hf",
        "python scripts/finetune.py yamls/finetune/quickstart-sft.yaml",
        next(line for line in LINES if line.endswith("run_name=mine")),  # docs/train-my-text.md
    ):
        done = call(shortened(line), base, home)
        assert done.returncode == 0, line + done.stdout[-2000:] + done.stderr[-2000:]

    def copy(folder: Path) -> Path:
        shutil.copytree(base, folder, symlinks=True)
        return folder

    copy.home = home  # type: ignore[attr-defined]
    return copy


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("page", WITH_LINES)
def test_the_lines_of_a_page_run(
    page: str, trained: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = trained(tmp_path / "here")
    problems = []
    for line in lines_of(PAGES[page]):
        if line not in RUN:
            continue
        for output in re.findall(r"output=(\S+/\S+)", line):  # of the line or page before
            shutil.rmtree(folder / output, ignore_errors=True)
        if re.match(r"(llmfoundry )?cp ", line):
            (folder / "my.yaml").unlink(missing_ok=True)
        done = call(shortened(line), folder, trained.home)  # type: ignore[attr-defined]
        if done.returncode or "Traceback" in done.stderr:
            problems.append(f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    assert not problems, "\n\n".join(problems)


def test_extras_that_a_readme_names_are_there() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    extras = {
        name
        for page, text in PAGES.items()
        if "docs/keys" not in page
        for names in re.findall(r"llmfoundry-recipes\[([\w,]+)\]|`\[([a-z]\w+)\]`", text)
        for name in ",".join(names).split(",")
        if name
    }
    assert len(extras) > 15
    for name in extras:
        assert re.search(rf"^{name} = \[", project, re.MULTILINE), name


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_what_is_there(page: str) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", PAGES[page]):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        if anchor:
            text = (file / "README.md" if file.is_dir() else file).read_text()
            heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in heads}


ELSEWHERE = {"eval/local_data"}  # fetched, not shipped


@pytest.mark.parametrize("page", PAGES)
def test_paths_that_a_readme_names_exist(page: str) -> None:
    tops = "llmfoundry|scripts|yamls|eval|tests|benchmarks|constraints|pyproject"
    text = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    for path in re.findall(rf"`((?:{tops})[\w.\-/]*[/.][\w.\-/]*)`", text):
        if path not in ELSEWHERE and not path.startswith("eval."):  # a recipe's key
            assert (ROOT / path).exists(), path


OTHERS = {"convert_composer_to_hf.py"}  # LLM Foundry's
FILES = [
    path.relative_to(ROOT)
    for top in ("llmfoundry", "scripts", "yamls", "eval", "tests", "benchmarks", "docs")
    for path in (ROOT / top).rglob("*")
]


def is_here(path: str) -> bool:
    """Whether a name, or the end of a path, is that of a file."""
    parts = Path(path).parts
    return (ROOT / path).exists() or any(file.parts[-len(parts) :] == parts for file in FILES)


@pytest.mark.parametrize("page", [page for page in PAGES if "docs/keys" not in page])
def test_programs_that_a_readme_names_exist(page: str) -> None:
    text = PAGES[page]
    modules = re.findall(r"python -m (benchmarks[\w.]*)", text)
    names = re.findall(r"(?<![\w./:-])[\w./-]*\w\.(?:py|css|js)\b(?!\w)", text)
    for path in {*names, *(f"{module.replace('.', '/')}.py" for module in modules)}:
        assert path in OTHERS or re.match("my_", path) or is_here(path), path


def test_files_that_the_notice_names_exist() -> None:
    text = re.sub(r"https?://\S+", "", (ROOT / "NOTICE").read_text())
    paths = re.findall(r"[\w*./-]+\.(?:py|yaml|jinja|jsonl?)\b|[\w.-]+(?:/[\w.-]+)+/", text)
    assert len(paths) > 25
    for path in paths:
        found = [*ROOT.glob(path)] if "/" in path else []
        pattern = re.escape(path).replace(r"\*", ".*")
        assert found or any(re.fullmatch(pattern, file.name) for file in FILES), path


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`make ([a-z-]+)", str(READMES)))))
def test_a_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_make_help_lists_every_target() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = {line.split()[0] for line in done.stdout.splitlines()}
    assert {"help", "install", "train", "test", "check", "bench", "ui", "clean"} <= listed


def test_every_path_in_the_tree_exists() -> None:
    page = READMES["llmfoundry/README.md"]
    tree = page.split("# Code map", 1)[1].split("```text\n", 1)[1].split("```", 1)[0]
    folders: list[str] = []
    for line in filter(str.strip, tree.splitlines()):
        name = line.strip().split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders = [*folders[:depth], name]
        assert (ROOT / "/".join(folders)).exists(), line
