import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.stages import STAGE

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "dflash").rglob("*.py"))
TASKS, FLOWS = sorted((ROOT / "tasks").rglob("*.py")), sorted((ROOT / "flows").rglob("*.py"))
HEAVY = {"torch", "transformers", "accelerate"}
ORCHESTRATION = {"prefect", "mlflow", "pynvml", "flows", "tasks"}
PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def names_imported(tree: ast.AST) -> Iterator[str]:
    """Every dotted name that is imported anywhere in a module, also inside a function or as a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}".lstrip(".") for alias in node.names)
            yield from [node.module] if node.module else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "importlib.import_module"):
            yield ast.literal_eval(node.args[0])


def names_called(tree: ast.AST) -> Iterator[str]:
    return (ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))


def parts(name: str) -> set[str]:
    return set(name.split("."))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_the_trainer_imports_no_orchestrator_tracker_or_nvml(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert [name for name in names_imported(tree) if parts(name) & ORCHESTRATION] == []


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_a_task_imports_no_flow_and_no_torch_and_only_tracking_imports_mlflow_or_nvml(path):
    forbidden = {"flows"} | HEAVY | (set() if path.stem == "tracking" else {"mlflow", "pynvml"})
    seen_by_a_type_checker_alone = {"registry": {"mlflow", "mlflow.MlflowClient", "mlflow.entities.model_registry"}}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {name for name in names_imported(tree) if name.split(".")[0] in forbidden}
    allowed = seen_by_a_type_checker_alone.get(path.stem, set()) | {"mlflow.entities.model_registry.ModelVersion"}
    assert found <= allowed


@pytest.mark.parametrize("path", FLOWS, ids=lambda path: path.stem)
def test_a_flow_imports_neither_torch_nor_mlflow_nor_nvml(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not [name for name in names_imported(tree) if name.split(".")[0] in HEAVY | {"mlflow", "pynvml"}]


@pytest.mark.parametrize("flow", [path.stem for path in FLOWS if path.stem != "__init__"])
def test_a_flow_process_starts_without_torch_transformers_mlflow_or_matplotlib(flow):
    code = f"import sys, flows.{flow}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "mlflow", "pynvml", "matplotlib"} & set(done.stdout.split())


@pytest.mark.parametrize("path", [*MODULES, *TASKS, *FLOWS], ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_no_module_reads_or_writes_a_pickle(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert [
        name for name in names_imported(tree) if parts(name) & PICKLES or name in ("torch.save", "torch.load")
    ] == []
    assert [name for name in names_called(tree) if name in ("torch.save", "torch.load")] == []
    loads = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("np.load")
    ]
    assert [node for node in loads if any(keyword.arg == "allow_pickle" for keyword in node.keywords)] == []


def test_the_scan_finds_what_it_looks_for():
    tree = ast.parse("import torch\ndef f():\n  from mlflow import x\n  torch.save(1)\n  from .tasks import y\n")
    assert {name for name in names_imported(tree) if parts(name) & ORCHESTRATION} == {
        "mlflow",
        "mlflow.x",
        "tasks",
        "tasks.y",
    }
    assert "torch.save" in names_called(tree)
    assert len(MODULES) > 10


def test_only_stages_keep_results_and_as_json():
    """A result that Prefect keeps is a pickle unless it is told otherwise, also where a user has it keep all of them."""
    tasks = [
        decorator
        for path in (*TASKS, *FLOWS)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if ast.unparse(decorator).startswith(("task(", "flow("))
    ]
    assert len(tasks) > 12
    for decorator in map(ast.unparse, tasks):
        assert "persist_result=False" in decorator or decorator.endswith("**STAGE)"), decorator
        # an exception that ends a flow is kept all the same
        assert not decorator.startswith("flow(") or "result_serializer='json'" in decorator, decorator
    assert STAGE["result_serializer"] == "json"
