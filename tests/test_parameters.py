import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jsonschema import ValidationError, validate
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema
from refused import assert_refused

from dflash.config import SECTIONS
from flows.evaluation import evaluate
from flows.nightly import nightly
from flows.restart import restart
from flows.train import train
from tasks.parameters import changed, read

ROOT = Path(__file__).parent.parent
DEPLOYMENTS = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
SMALL = "target: {name: t}\ndata: {path: d.jsonl}\nrun: {name: night, epochs: 3}\n"


def schema_of(flow) -> dict:
    return parameter_schema(flow).model_dump()


@pytest.mark.parametrize("flow", [train, nightly, restart, evaluate], ids=lambda flow: flow.fn.__name__)
def test_every_field_of_the_form_has_a_help_text(flow):
    for name, parameter in schema_of(flow)["properties"].items():
        assert parameter.get("description"), name
        for field, values in parameter.get("properties", {}).items():
            assert len(values["description"]) > 10, (name, field)


@pytest.mark.parametrize("flow", [train, nightly], ids=lambda flow: flow.fn.__name__)
def test_the_form_has_the_sections_of_the_configuration_and_fills_in_none_of_their_fields(flow):
    properties = schema_of(flow)["properties"]
    for section, cls in SECTIONS.items():
        assert set(properties[section]["properties"]) == set(cls.__dataclass_fields__)
        assert properties[section]["default"] == {}
        assert not [name for name, field in properties[section]["properties"].items() if "default" in field]
        assert "required" not in properties[section]


@pytest.mark.parametrize(
    "given",
    [
        {"run": {"epoch": 3}},
        {"run": {"epochs": "3"}},
        {"run": {"epochs": 0}},
        {"stream": {"engine": "lokal"}},
        {"runs": {}},
        {"refresh": ["deploy"]},
        {"config": 7},
    ],
    ids=str,
)
def test_a_typo_or_a_wrong_type_does_not_fit_the_form(given):
    schema = schema_of(train) | {"additionalProperties": False}
    validate({"config": "file.yaml", "run": {"epochs": 3}, "refresh": ["prepare"]}, schema)
    with pytest.raises(ValidationError):
        validate({"config": "file.yaml"} | given, schema)


def test_a_field_that_is_given_goes_over_the_files_and_leaves_all_others(tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    config = read(str(tmp_path / "small.yaml"), {"run": {"epochs": 5}, "stream": {}, "config": "no section"})
    assert (config.run.name, config.run.epochs, config.target.name) == ("night", 5, "t")
    again = changed(config, {"stream": {"hs_min_ready": 4}, "run": {}})
    assert (again.stream.hs_min_ready, again.run.name, again.run.epochs) == (4, "night", 5)


def test_only_a_run_that_regenerates_may_do_without_data(tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text("target: {name: t}\n")
    with pytest.raises(ValueError, match=r"data\.path is not set"):
        read(str(file), {})
    assert read(str(file), {"regenerate": {"prompts": "p.txt"}}).data.path == ""


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])
def test_a_deployment_names_a_flow_and_gives_what_fits_its_form(deployment):
    flow = load_flow_from_entrypoint(str(ROOT / deployment["entrypoint"]))
    assert (flow.name, deployment["work_pool"]["name"]) == ("dflash", "dflash")
    validate(
        deployment["parameters"] | ({"run": "x-0001"} if "root" in deployment["parameters"] else {}), schema_of(flow)
    )
    assert set(deployment["parameters"]) <= set(inspect.signature(flow.fn).parameters)
    if "config" in deployment["parameters"]:
        read(str(ROOT / deployment["parameters"]["config"]), {})
    assert str(ROOT) not in (ROOT / "prefect.yaml").read_text()


@pytest.mark.parametrize(
    "arguments, value, remedy",
    [
        ([], "--config", "give a file"),
        (["--config", "no.yaml"], "no.yaml", "No such file"),
        (["--config", "small.yaml", "--run.epochs", "0"], "run.epochs=0", "greater than or equal to 1"),
        (["--config", "small.yaml", "--run.epoch", "1"], "--run.epoch", "--help"),
        (["--config", "small.yaml", "--refresh", "deploy"], "deploy", "prepare"),
        (["--config", "small.yaml", "--stream.hs_min_ready", "100"], "hs_min_ready=100", "lower the first"),
    ],
)
def test_a_mistake_on_the_command_line_is_refused_before_anything_is_started(tmp_path, arguments, value, remedy):
    (tmp_path / "small.yaml").write_text(SMALL)
    done = subprocess.run(
        [sys.executable, "-m", "flows.train", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert_refused(done.returncode, done.stderr, value, remedy)
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]
