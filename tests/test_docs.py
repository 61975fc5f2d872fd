"""The documentation: pages are linked and current, the notebook runs, the site is built.

tests/recipe/test_examples.py composes every command of docs/, tests/test_readme.py follows links.
"""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tiny import ROOT

DOCS = ROOT / "docs"
QUESTIONS = {  # as users type them into the site's search, and the page that answers
    "train on my own text": "docs/train-my-text/",
    "resume a run that was killed": "docs/tutorials/pretraining/",
    "fine-tune on chat conversations": "docs/finetune-chats/",
    "merge lora adapter": "docs/lora/",
    "write my own evaluation task": "docs/evaluate/",
    "compare two runs": "docs/compare/",
    "learning rate sweep": "docs/sweep/",
    "slurm job": "docs/slurm/",
    "openai compatible server": "docs/serve/",
    "migrate llm foundry yaml": "docs/migrate/",
    "custom optimizer plugin": "docs/add-optimizer/",
    "train from python": "docs/python/",
}


def nav() -> list[str]:
    """The pages of the site, in order."""
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    return re.findall(r"([\w./-]+\.md)$", text, re.MULTILINE)


def test_every_page_is_in_the_site_once() -> None:
    there = {path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md")}
    shown = nav()
    assert len(shown) == len(set(shown)) > 40
    assert there <= set(shown)
    assert [page for page in shown if not (ROOT / page).is_file()] == []


def test_the_keys_are_those_of_the_recipes() -> None:
    written = runpy.run_path(str(DOCS / "generate_keys.py"))["pages"]()
    there = {path.name: path.read_text() for path in (DOCS / "keys").glob("*.md")}
    assert there.keys() == written.keys(), "python docs/generate_keys.py"
    stale = [name for name in there if there[name] != written[name]]
    assert stale == [], "python docs/generate_keys.py"


def test_files_for_the_forge_are_what_it_reads() -> None:
    for path in (ROOT / ".github").rglob("*.yml"):
        assert isinstance(yaml.safe_load(path.read_text()), dict), path
    forms = [yaml.safe_load(p.read_text()) for p in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")]
    for form in forms:
        if "body" in form:
            assert {"name", "description"} <= form.keys()
            for part in form["body"]:
                assert part["type"] in {"textarea", "input"} and part["attributes"]["label"]
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["steps"]
    assert steps[-1]["run"] == "bash .ci/run" and (ROOT / ".ci/run").is_file()
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{cited["version"]}"' in project
    assert {"cff-version", "title", "message", "authors"} <= cited.keys()


def cells() -> list[str]:
    """The code of the notebook."""
    notebook = json.loads((DOCS / "notebook.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    found = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in found), "clear its outputs"
    return ["".join(cell["source"]) for cell in found]


def test_the_notebook_is_python() -> None:
    assert len(cells()) == 5  # tests/api/test_docs.py runs them, shortened
    for cell in cells():
        compile(cell, "notebook", "exec")


@pytest.mark.slow
@pytest.mark.timeout(900)  # seconds, on a busy machine
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs: pip install -e .[notebook]")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(DOCS / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    kinds = {kind for output in shown for kind in output.get("data", {})}
    assert "image/png" in kinds
    texts = "".join(output.get("text", "") for output in shown)
    assert "def __init__(self" in texts and "on the rows that both answered" in texts
    assert (tmp_path / "runs/notebook/report.html").is_file()


@pytest.mark.skipif(
    importlib.util.find_spec("zensical") is None, reason="needs zensical: pip install -e .[docs]"
)
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    for name in ("docs", "yamls", "llmfoundry", "benchmarks", "eval"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("local_data"))
    for path in (*ROOT.glob("*.md"), *ROOT.glob("*.yml"), *ROOT.glob("LICENSE"), ROOT / "NOTICE"):
        shutil.copy(path, tmp_path)
    done = subprocess.run(
        [sys.executable, "docs/build_site.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "build/site/docs/index.html").is_file()
    index = json.loads((tmp_path / "build/site/search.json").read_text())["items"]
    for question, page in QUESTIONS.items():
        assert page in found(index, question), question


def found(index: list[dict[str, Any]], question: str) -> set[str]:
    """The pages that the site's search can show: those with every word, at the head of one."""
    texts: dict[str, str] = {}
    for item in index:
        page = item["location"].partition("#")[0]
        texts[page] = f"{texts.get(page, '')} {item['title']} {item['text']}".lower()
    words = [re.compile(rf"\b{re.escape(word)}") for word in re.findall(r"\w+", question.lower())]
    return {page for page, text in texts.items() if all(word.search(text) for word in words)}
