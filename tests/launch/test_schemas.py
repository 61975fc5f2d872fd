"""What launch prints for ten recipes is valid by others' own schemas, and a misspelt key is not.

Kubernetes' objects by kubernetes-validate (strict), JobSet and TrainJob by the classes of Kubeflow
Trainer's API, whose unknown keys vanish, and SkyPilot's task by its own JSON schema.

    pip install --target SITE kubernetes-validate kubeflow-trainer-api jsonschema
    pip install --target SITE --no-deps skypilot
    PYTHONPATH=SITE pytest -m slow tests/launch/test_schemas.py
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from tests.launch.test_render import URL, pod_of, render

pytestmark = pytest.mark.slow
RECIPES = (
    "quickstart.yaml",
    "mpt-125m.yaml",
    "mpt-7b.yaml",
    "mpt-70b.yaml",
    "dbrx.yaml",
    "llama-8b.yaml",
    "starcoder2-3b.yaml",
    "finetune/llama-8b-lora.yaml",
    "finetune/llama-8b-dpo.yaml",
    "finetune/mpt-7b-sft.yaml",
)
FULL = (
    "launch.secrets=[HF_TOKEN]",
    "launch.env.NCCL_DEBUG=WARN",
    "launch.mounts=[data:/data,/scratch:/scratch]",
    "launch.resources={cpu: 96, memory: 1Ti}",
    "launch.queue=team",
    "launch.priority=high",
    "launch.time=10:00:00",
    "launch.setup=[nvidia-smi]",
    "launch.workdir=/data",
    "supervise.act=true",
)
CORE = {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "ConfigMap", "Job"}


def kubernetes_objects(recipe: str, *words: str) -> dict[str, dict[str, Any]]:
    common = ("launch=kubernetes", "launch.image=me/foundry", "launch.namespace=training", URL)
    text = render(*common, *words, recipe=recipe)
    return {found["kind"]: found for found in yaml.safe_load_all(text)}


@pytest.fixture(scope="module")
def validate() -> Any:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")

    def check(found: dict[str, Any]) -> None:
        kubernetes_validate.validate(found, kubernetes_validate.latest_version(), strict=True)

    return check


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("recipe", RECIPES)
def test_core_objects_and_pods(recipe: str, validate: Any) -> None:
    for words in ((), FULL, ("nodes=4", *FULL), ("nodes=2", "launch.service_account=trainer")):
        found = kubernetes_objects(recipe, *words)
        for kind, each in found.items():
            if kind in CORE:
                validate(each)
        if "JobSet" in found:
            inner = found["JobSet"]["spec"]["replicatedJobs"][0]["template"]
            named = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
            validate(named | inner)
        assert "supervise" in " ".join(
            pod_of(next(reversed(found.values())))["containers"][0]["command"]
        )


def test_a_misspelt_key_of_the_core_fails(validate: Any) -> None:
    job = kubernetes_objects("quickstart.yaml")["Job"]
    for place, key in _places(job):
        wrong = copy.deepcopy(job)
        _at(wrong, place)[f"{key}s"] = _at(wrong, place).pop(key)
        with pytest.raises(Exception, match=f"{key}s|required"):
            validate(wrong)


def _places(job: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], str]]:
    yield ("spec",), "backoffLimit"
    yield ("spec",), "podFailurePolicy"
    yield ("spec", "template", "spec"), "terminationGracePeriodSeconds"
    yield (
        ("spec", "template", "spec", "containers", 0),
        "workingDir" if "workingDir" in pod_of(job)["containers"][0] else "env",
    )
    yield ("spec", "template", "spec", "containers", 0, "volumeMounts", 0), "mountPath"
    yield ("spec", "template", "spec", "volumes", 1, "emptyDir"), "medium"


def _at(found: Any, place: tuple[Any, ...]) -> Any:
    for part in place:
        found = found[part]
    return found


KINDS = {"JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob"}


def back(found: dict[str, Any]) -> dict[str, Any]:
    """An object as Kubeflow's own class of it has it, which raises at a wrong type."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    return getattr(models, KINDS[found["kind"]]).from_dict(copy.deepcopy(found)).to_dict()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_custom_objects(recipe: str, kind: str) -> None:
    for words in (("nodes=4",), ("nodes=4", *FULL)):
        found = kubernetes_objects(recipe, *words, f"launch.object={kind.lower()}")[kind]
        assert back(found) == found


def test_a_misspelt_key_of_a_custom_object_is_lost() -> None:
    jobset = kubernetes_objects("quickstart.yaml", "nodes=2")["JobSet"]
    for place, key in [
        (("spec",), "failurePolicy"),
        (("spec", "network"), "enableDNSHostnames"),
        (("spec", "replicatedJobs", 0), "replicas"),
        (("spec", "replicatedJobs", 0, "template", "spec"), "completionMode"),
    ]:
        wrong = copy.deepcopy(jobset)
        _at(wrong, place)[f"{key}s"] = _at(wrong, place).pop(key)
        assert back(wrong) != wrong
    train = kubernetes_objects("quickstart.yaml", "launch.object=trainjob")["TrainJob"]
    train["spec"]["trainer"]["numNode"] = train["spec"]["trainer"].pop("numNodes")
    assert back(train) != train


@pytest.fixture(scope="module")
def sky() -> Iterator[Any]:
    """SkyPilot's schemas, without what its package imports for its clouds."""
    pytest.importorskip("jsonschema")
    spec = importlib.util.find_spec("sky")
    if spec is None or spec.origin is None:
        pytest.skip("no SkyPilot: pip install --no-deps skypilot")
    folder = Path(spec.origin).parent
    stand_ins: dict[str, Any] = {}
    for name in ("sky", "sky.utils", "sky.skylet"):
        stand_ins[name] = types.ModuleType(name)
        stand_ins[name].__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
    stand_ins["sky"].__version__ = "0.14.1"
    autostop = mock.MagicMock()
    autostop.AutostopWaitFor.supported_modes.return_value = ["jobs"]
    with mock.patch.dict(sys.modules, stand_ins | {"sky.skylet.autostop_lib": autostop}):
        schemas = importlib.import_module("sky.utils.schemas")
        schemas._task_config_schema = lambda: {}  # type: ignore[attr-defined]
        yield schemas


def check_task(schemas: Any, task: dict[str, Any]) -> None:
    import jsonschema

    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())
    assert task["run"] and isinstance(task["run"], str)


@pytest.mark.parametrize("recipe", RECIPES)
def test_skypilots_task(recipe: str, sky: Any) -> None:
    words = ("launch=skypilot", "launch.resources={accelerators: H100, use_spot: true}", URL)
    more = (
        "launch.env.NCCL_DEBUG=WARN",
        "launch.secrets=[HF_TOKEN]",
        "launch.setup=[pip list]",
        "launch.mounts=['s3://my/data:/data']",
        "launch.image=me/foundry",
        "nodes=4",
    )
    for extra in ((), more):
        task = yaml.safe_load(render(*words, *extra, "dry_run=true", recipe=recipe))
        check_task(sky, task)
        assert task["resources"]["accelerators"] == "H100:8"
    assert task["secrets"] == {"HF_TOKEN": None} and task["num_nodes"] == 4


def test_a_misspelt_key_of_skypilots_fails(sky: Any) -> None:
    import jsonschema

    words = ("launch=skypilot", "launch.resources.accelerators=H100", URL, "dry_run=true")
    task = yaml.safe_load(render(*words, recipe="quickstart.yaml"))
    for section, key in ((task, "num_nodes"), (task["resources"], "accelerators")):
        wrong = copy.deepcopy(section)
        wrong[f"{key}x"] = wrong.pop(key)
        with pytest.raises(jsonschema.ValidationError, match="Additional properties"):
            check_task(sky, task | wrong if section is task else task | {"resources": wrong})
