"""The flows' parameters: a file of the configuration, and one parameter per section whose fields go over the file's.

Prefect's form and its check at submission come from the sections in dflash/config.py: help texts, types, ranges, no unknown key.
"""

from typing import Annotated, Any, Literal

from pydantic import TypeAdapter, WithJsonSchema

from dflash import config as configuration
from dflash.config import SECTIONS, Config

Fields = dict[str, Any]
NONE: Fields = {}  # a section of which nothing is overridden; never changed
STAGES = ("regenerate", "prepare", "evaluate")
Stage = Literal["regenerate", "prepare", "evaluate"]


def _fields_of(section: str) -> WithJsonSchema:
    """A section's schema in which every field may be left out. Its defaults are told and not filled in, or a form that is sent
    as it came would put all of them over the file's values."""
    schema = TypeAdapter(SECTIONS[section]).json_schema()
    required = schema.pop("required", [])
    schema["properties"] = {name: schema["properties"][name] for name in SECTIONS[section].__dataclass_fields__}
    for name, field in schema["properties"].items():
        default = field.pop("default", None)
        note = "in the file or here" if name in required else f"default: {'none' if default is None else default}"
        field["description"] = f"{field['description']} ({note})"
    return WithJsonSchema(schema)


Target = Annotated[Fields, _fields_of("target")]
Data = Annotated[Fields, _fields_of("data")]
Regenerate = Annotated[Fields, _fields_of("regenerate")]
Drafter = Annotated[Fields, _fields_of("drafter")]
Objective = Annotated[Fields, _fields_of("objective")]
Optim = Annotated[Fields, _fields_of("optim")]
Stream = Annotated[Fields, _fields_of("stream")]
Cluster = Annotated[Fields, _fields_of("cluster")]
Checkpoint = Annotated[Fields, _fields_of("checkpoint")]
Evaluate = Annotated[Fields, _fields_of("evaluate")]
Run = Annotated[Fields, _fields_of("run")]
Supervise = Annotated[Fields, _fields_of("supervise")]


def read(config: str, parameters: dict[str, Any]) -> Config:
    """The file's configuration with the sections among `parameters` over it, local paths absolute. Raises ValueError.

    data.path may be missing where regenerate.prompts is given: answers to them become the data.
    """
    values = configuration.read_values(config, _sections(parameters))
    prompts = isinstance(values.get("regenerate"), dict) and values["regenerate"].get("prompts")
    return configuration.with_absolute_paths(configuration.parse(values, trains=not prompts))


def changed(config: Config, parameters: dict[str, Any]) -> Config:
    """A configuration with the sections among `parameters` over it. Raises ValueError."""
    values = configuration.to_values(config)
    for section, fields in _sections(parameters).items():
        values[section] |= fields
    return configuration.with_absolute_paths(configuration.parse(values))


def _sections(parameters: dict[str, Any]) -> dict[str, Fields]:
    return {name: fields for name, fields in parameters.items() if name in SECTIONS and fields}
