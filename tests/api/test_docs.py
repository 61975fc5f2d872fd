"""The blocks of docs/python.md and the cells of the notebook run, on a small recipe."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.plugin_tables import tables_as_before
from tests.tiny import ROOT

SMALL = {  # what the examples say, and what is run here: the same in seconds
    '"quickstart"': '"tiny.yaml"',
    '"50ba"': '"4ba"',
    '"60ba"': '"6ba"',
    '"30ba"': '"4ba"',
    "rows=50": "rows=3",
    "max_new_tokens=20": "max_new_tokens=5",
    "max_new_tokens=40": "max_new_tokens=5",
}


def small(code: str) -> str:
    """The code as it is run here."""
    for text, instead in SMALL.items():
        code = code.replace(text, instead)
    return code


PAGE = (ROOT / "docs/python.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
NOTEBOOK = json.loads((ROOT / "docs/notebook.ipynb").read_text())
CELLS = ["".join(c["source"]) for c in NOTEBOOK["cells"] if c["cell_type"] == "code"]


def test_every_replacement_is_of_something() -> None:
    code = "\n".join([*BLOCKS, *CELLS])
    assert [text for text in SMALL if text not in code] == []


def test_the_blocks_of_the_page_run(here: Path) -> None:
    pytest.importorskip("pandas")
    names: dict[str, Any] = {}
    assert len(BLOCKS) > 5
    for block in BLOCKS:
        exec(compile(small(block), "python.md", "exec"), names)
    assert names["run"].stopped == "" and names["run"].batch == 4
    assert names["own"].batch == 4 and len(names["table"]) == len(names["scores"])
    assert str(names["logits"].shape[:2]) == str(names["ids"].shape)


def test_the_cells_of_the_notebook_run(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    matplotlib.use("Agg")
    (tmp_path / "tiny.yaml").write_text((trained / "tiny.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in CELLS:
        exec(compile(small(cell), "notebook", "exec"), names)
    assert names["run"].batch == 4


def test_the_plugin_of_the_page_trains(here: Path) -> None:
    import llmfoundry as lf

    values = {"plugins": [ROOT / "docs/examples/my_loss.py"], "loss.name": "focal"}
    with tables_as_before():
        run = lf.train(
            lf.recipe("tiny.yaml", {**values, "max_duration": "1ba", "run_name": "focal-page"}),
            show="nothing",
        )
    assert run.batch == 1
