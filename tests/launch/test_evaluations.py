"""Evaluations as jobs: the rendered command of each target, and what is refused."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from llmfoundry.errors import UserError
from llmfoundry.launch.job import make_eval_job
from llmfoundry.launch.targets import TARGETS
from llmfoundry.recipe.after_training import EvalRecipe
from llmfoundry.recipe.load import checked

WORDS = ["checkpoint=runs/big", "eval=v0.3", "parallel=fsdp", "precision=bf16"]


def rendered(*words: str) -> tuple[str, str]:
    """Return the composed recipe, and the object of the target."""
    recipe = checked(EvalRecipe, None, [*WORDS, *words])
    job = make_eval_job(recipe, given="runs/big", overrides=[*WORDS, *words])
    return job.text, TARGETS[job.config.target].render(job)


def test_a_batch_script_evaluates_with_all_gpus_of_a_machine(tmp_path: Path) -> None:
    recipe, script = rendered("launch=slurm", "launch.time=2:00:00")
    (last,) = [line for line in script.splitlines() if line.startswith("exec ")]
    words = shlex.split(last)
    assert words[2:5] == ["-m", "llmfoundry", "eval"]
    assert words[-1] == "parallel.nproc_per_node=8" and words[5].endswith("launch.yaml")
    assert "#SBATCH --nodes=1" in script and "#SBATCH --time=2:00:00" in script
    assert "supervise" not in script, "nothing of a training run"
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    (tmp_path / "launch.yaml").write_text(recipe)
    again = checked(EvalRecipe, str(tmp_path / "launch.yaml"), [])
    assert again.launch is None and again.precision == "bf16"
    assert again.parallel.data_parallel_shard_degree == -1


def test_a_pod_runs_the_evaluation() -> None:
    mounts = ["launch.image=me/foundry", "launch.mounts=[runs:/runs]", "output=/runs/scores"]
    _, text = rendered("launch=kubernetes", *mounts)
    (job, *_) = [one for one in yaml.safe_load_all(text) if one["kind"] == "Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    command = " ".join(container["command"])
    assert "llmfoundry eval" in command and "supervise" not in command


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["launch=slurm", "launch.nodes=2"], "launch.nodes: an evaluation runs on one machine"),
        (["launch=kubernetes", "launch.image=x"], "output: runs/big is lost with the container"),
        (["launch=slurm", "launch.tim=1:00:00"], "launch.tim: is not a key"),
    ],
)
def test_a_job_that_cannot_run_is_refused(words: list[str], line: str) -> None:
    with pytest.raises(UserError, match=line.split(":")[0]) as error:
        rendered(*words)
    assert line.split(":")[0] in str(error.value)
