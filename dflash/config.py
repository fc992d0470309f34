"""Every knob, once: frozen sections with unit and reason, read from YAML and from the command line, refused when wrong."""

import argparse
import dataclasses
import itertools
import json
import os
import re
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

# strict: "8" is not 8; forbid: a typo is an error and not a default; attribute docstrings: the help text stands beside its field
SECTION = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
LayerType = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True, kw_only=True, config=SECTION)
class TargetConfig:
    """The frozen LLM that the drafter will serve."""

    name: str
    """Hugging Face hub name or local directory. Identifies the run, so it has no default."""
    revision: str | None = None
    """Hub commit, tag or branch; pin a commit to be able to repeat a run."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and features of the target. auto: bfloat16 on a GPU, float32 on a CPU (bfloat16 is slow without hardware for it)."""
    devices: tuple[str, ...] = Field(default=("auto",), min_length=1)
    """One copy of the target and one worker thread per device, e.g. [cuda:0, cuda:1]. auto: cuda:0, or the CPU."""
    device_map: str | None = None
    """Accelerate's device map ("auto", "balanced", ...) for a target that does not fit one GPU; then there is one worker."""
    attention: str | None = None
    """Attention implementation of transformers (sdpa, flash_attention_2, eager); none: what transformers chooses."""
    captured_layers: int = Field(default=5, ge=1)
    """How many target layers feed the drafter, spread from the second to the third-to-last (paper: 5; 3 cost 4 % of tau)."""
    layer_ids: tuple[int, ...] | None = None
    """The captured layers by name, 0-based, the output of each; none: spread by the paper's formula."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for a model whose code you have read."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class DataConfig:
    """Conversations that the drafter learns from: the target's own answers, or the drafter learns somebody else's."""

    path: str
    """JSONL file of conversations. Identifies the run, so it has no default."""
    heldout_path: str | None = None
    """JSONL file of conversations that are never trained on; simulated tau is measured on it."""
    max_tokens: int = Field(default=3072, ge=4)
    """Tokens a conversation is cut to (paper: 3072)."""
    template_kwargs: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Extra arguments of the chat template, as in deployment, e.g. {enable_thinking: false}."""
    prepared_dir: str = "prepared"
    """Where tokenised data is kept, under a directory named after its content; runs share it."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class RegenerateConfig:
    """The target's own answers to prompts. Its chat template gets data.template_kwargs (thinking mode), as in training."""

    prompts: str | None = None
    """JSONL file of conversations (their replies are made anew) or a text file with one prompt a line."""
    out: str = "answers"
    """Where answers are kept, under a directory named after everything that they depend on."""
    system_prompt: str | None = None
    """System message of the conversations that bring none."""
    temperature: float = Field(default=0.7, ge=0)
    """Sampling temperature, as in deployment; 0: the most likely token."""
    top_p: float = Field(default=0.8, gt=0, le=1)
    """Share of the probability that the candidates must reach, the most likely first; 1: all tokens."""
    top_k: int = Field(default=20, ge=0)
    """Most likely tokens that are candidates; 0: all."""
    max_new_tokens: int = Field(default=2048, ge=1)
    """Tokens of one reply, its end-of-turn token included."""
    cut_replies: Literal["keep", "drop"] = "keep"
    """What becomes of a conversation with a reply that reached max_new_tokens: the drafter then learns an end of turn that the
    target did not say. Either way they are counted."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the sampling; every prompt has its own numbers, whatever it is batched with."""
    batch_rows: int = Field(default=48, ge=1)
    """Conversations decoded together by the local target; bounds memory (keys and values of so many whole conversations)."""
    endpoint: str | None = None
    """Base URL of an OpenAI-compatible server that runs the target, e.g. http://localhost:8000/v1; none: the target runs here."""
    endpoint_model: str | None = None
    """The model's name on that server; none: the only one that it lists."""
    endpoint_key: str = "OPENAI_API_KEY"
    """Environment variable that holds the server's key, where it needs one."""
    requests_in_flight: int = Field(default=64, ge=1)
    """Requests that the server has at a time."""
    request_seconds: float = Field(default=600.0, gt=0)
    """Longest wait for one answer before it is asked for again."""
    outage_seconds: float = Field(default=300.0, gt=0)
    """How long the server may answer nothing at all before the command gives up; what is done stays."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class DrafterConfig:
    """The trained model. Its width and vocabulary are the target's."""

    layers: int = Field(default=5, ge=1)
    """Transformer layers (paper: 5 has the best speed-up, 8 the best tau)."""
    block_size: int = Field(default=16, ge=2)
    """Tokens of a block, the known anchor included; block_size - 1 are drafted. A large block serves small, not the reverse."""
    mask_token_id: int | None = Field(default=None, ge=0)
    """Token id of a slot not yet known. none: the tokenizer's mask token, else the first embedding row past the tokenizer."""
    heads: int | None = Field(default=None, ge=1)
    """Attention heads; none: the target's."""
    kv_heads: int | None = Field(default=None, ge=1)
    """Key and value heads; none: the target's."""
    head_dim: int | None = Field(default=None, ge=2)
    """Width of one head; none: the target's."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """Width of the MLP; none: the target's."""
    layer_types: tuple[LayerType, ...] | None = None
    """One entry a layer; none: all full_attention. Sliding layers are causal inside the block, as serving engines run them."""
    sliding_window: int | None = Field(default=None, ge=1)
    """Keys that a query of a sliding layer sees, itself included, counted from the query's own position."""
    rope_theta: float = Field(default=1_000_000.0, gt=0)
    """Base of the rotary embedding (Qwen3's value; the target's rope scaling never leaks into the drafter)."""
    init: Literal["scaled", "plain"] = "scaled"
    """scaled: fc and the final norm fitted to a few samples, so that a tied target does not start at a loss of 73 (SmolLM2;
    8 instead); plain: normal(0, 0.02) and ones."""
    init_from: str | None = None
    """Directory of an exported drafter (config.json, model.safetensors) to start from instead of a random one."""
    device: str = "auto"
    """Where the drafter trains. auto: the last GPU, or the CPU."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass: about 30 % more time for a fraction of the memory."""
    compile: bool = False
    """torch.compile the layers: minutes at the start, faster steps on a GPU afterwards."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class ObjectiveConfig:
    """What the drafter is asked to do."""

    anchors: int = Field(default=512, ge=1)
    """Blocks drawn per sample and epoch, at most (paper: 512). Fewer make a cheaper sample that teaches less."""
    loss: Literal["decay", "dpace"] = "decay"
    """decay: the paper's exp(-(k-1)/gamma) weights; dpace: weights from the drafter's own confidence (arXiv 2605.18810)."""
    gamma: float | None = Field(default=None, gt=0)
    """Decay constant in slots; none: the paper's for the block size (4 for 8, 5 for 10, 7 for 16, linear between)."""
    dpace_alpha: float = Field(default=0.5, ge=0, le=1)
    """D-PACE's smoothing of the confidence: 0 trusts it, 1 ignores it."""
    vocabulary: Literal["full", "seen"] = "full"
    """seen: the loss chooses among the token ids that the data's replies hold. Saves most of the head's cost on a CPU; the
    drafter never learns to avoid the other ids, which cost 0.02 of tau or less where it was measured with the scaled init."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = Field(default=6e-4, gt=0)
    """Peak learning rate (paper: 6e-4)."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up: cosine to min_lr_fraction, or constant and then a linear decay over the last decay_fraction."""
    warmup_fraction: float = Field(default=0.04, ge=0, lt=1)
    """Share of all steps with a rising learning rate (paper: 0.04)."""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Share of all steps that wsd decays over."""
    min_lr_fraction: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate as a share of the peak."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled decay of matrices; norms are never decayed."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment, each in [0, 1)."""
    clip: float = Field(default=1.0, gt=0)
    """Largest norm of the whole gradient."""
    samples_per_step: int = Field(default=8, ge=1)
    """Samples of one optimizer step. May exceed hs_queue_depth: the step is then drawn in parts."""
    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Context tokens plus block slots, padding included, of one forward and backward; bounds memory. One sample may exceed it."""
    skip_nonfinite: int = Field(default=0, ge=0)
    """Steps in a row with a non-finite loss or gradient that are skipped and counted; one more stops the run."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class StreamConfig:
    """From the target to the drafter through the hidden-state queue."""

    engine: Literal["local", "lockstep", "ray"] = "local"
    """local: target workers and drafter as threads over devices; lockstep: the same roles by turns in one thread,
    slower and reproducible to the last bit; ray: workers on one or many machines, as section cluster says."""
    hs_min_ready: int = Field(default=30, ge=1)
    """Samples that must be buffered at every draw. Fewer let a step be made of one length."""
    hs_queue_depth: int = Field(default=90, ge=1)
    """Samples that the queue holds at most."""
    hs_queue_bytes: int | None = Field(default=None, ge=1)
    """Bytes of features that the queue holds at most; none: half of the memory that is free at the start (so set it where
    a lockstep run must be repeated to the last bit on a machine that it fills)."""
    bucket_edges: tuple[int, ...] = Field(default=(256, 512, 1024, 2048), min_length=1)
    """Upper bounds, in tokens, of the length buckets; the last bucket is open."""
    group_tokens: int = Field(default=8192, ge=1)
    """Tokens, padding included, of one forward of the target. One sample may exceed it."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class ClusterConfig:
    """Workers on Ray, for stream.engine=ray: on the cluster that RAY_ADDRESS names, else on one that is started here."""

    target_workers: int = Field(default=1, ge=1)
    """Copies of the target, each a process of its own. More of them where the drafter waits (drafter_wait_share)."""
    target_gpus: float | None = Field(default=None, ge=0)
    """GPUs of one target worker: several with target.device_map, a fraction to share one; none: 1 where the cluster has GPUs."""
    target_cpus: int = Field(default=1, ge=1)
    """CPU cores of one target worker; what it computes on a CPU runs in as many threads."""
    drafter_workers: int = Field(default=1, ge=1)
    """Copies of the drafter that share the samples of every step. The step stays optim.samples_per_step, whatever they are."""
    drafter_gpus: float | None = Field(default=None, ge=0)
    """GPUs of one drafter worker, at most 1; none: 1 where the cluster has GPUs."""
    drafter_cpus: int = Field(default=1, ge=1)
    """CPU cores of one drafter worker."""
    shard_drafter: bool = False
    """FSDP2: each drafter worker holds a part of weights, gradients and optimizer, for a drafter that does not fit one GPU."""
    lockstep: bool = False
    """Target worker and drafters by turns, reproducible to the last bit, as stream.engine=lockstep; with one target worker."""
    max_restarts: int = Field(default=3, ge=0)
    """Times that a lost target worker is replaced, and that a lost drafter worker or queue makes the drafters start again from
    the last checkpoint, before the run fails."""
    start_seconds: float = Field(default=600.0, gt=0)
    """Longest wait for machines with room for a worker: at the start, and for one that replaces a lost one."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class CheckpointConfig:
    """What is kept, and what a run goes on from."""

    every_steps: int = Field(default=1000, ge=0)
    """Steps between two checkpoints; 0: only at the end and at a graceful stop."""
    keep: int | None = Field(default=None, ge=1)
    """Newest checkpoints of this run that are kept, beside the one marked best; none: all. Nothing else ever deletes one."""
    resume_from: str | None = None
    """Checkpoint directory that a new run goes on from. Never guessed."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class EvaluateConfig:
    """Real speculative decoding of prompts that were never trained on."""

    prompts: tuple[str, ...] | None = None
    """Prompt files, one set each, as for regenerate.prompts; none: the ones that ship with dflash (chat, code, mathematics)."""
    prompts_per_set: int | None = Field(default=None, ge=1)
    """The first so many of each set; none: all."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Tokens of one reply, its end-of-turn token included."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0: the most likely token, whose output must equal plain decoding."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Share of the probability that the candidates must reach, the most likely first; 1: all tokens."""
    top_k: int = Field(default=0, ge=0)
    """Most likely tokens that are candidates; 0: all."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of sampling and bootstrap."""
    during_training: int = Field(default=0, ge=0)
    """Prompts of each set that the trainer decodes at every checkpoint, to mark the best; 0: none. The drafter pauses meanwhile."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class RunConfig:
    """The run itself."""

    name: str = Field(default="dflash", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Prefix of the run directory: <root>/<name>-0001, -0002, ..."""
    root: str = "runs"
    """Directory that holds the run directories; on a disk with room for the checkpoints."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of initialisation, order and anchors."""
    epochs: int = Field(default=6, ge=1)
    """Passes over the data (paper: 6)."""
    max_steps: int | None = Field(default=None, ge=0)
    """Stop after so many optimizer steps if the epochs have not ended by then; none: all epochs; 0: save the untrained drafter."""
    heldout_every_steps: int = Field(default=0, ge=0)
    """Steps between two measurements on the held-out data; 0: only at the start and at the end."""


@dataclass(frozen=True, kw_only=True, config=SECTION)
class SuperviseConfig:
    """How a run is looked after."""

    stall_seconds: float = Field(default=900.0, gt=0)
    """Longest time without a sign of life (row, log line, measurement) before the trainer is taken for hung."""
    max_restarts: int = Field(default=3, ge=0)
    """Times that a crashed or hung trainer is started again from its own newest checkpoint."""
    stop_seconds: float = Field(default=300.0, gt=0)
    """Longest wait for a trainer that was asked to stop and saves."""


SECTIONS: dict[str, type] = {
    "target": TargetConfig,
    "data": DataConfig,
    "regenerate": RegenerateConfig,
    "drafter": DrafterConfig,
    "objective": ObjectiveConfig,
    "optim": OptimConfig,
    "stream": StreamConfig,
    "cluster": ClusterConfig,
    "checkpoint": CheckpointConfig,
    "evaluate": EvaluateConfig,
    "run": RunConfig,
    "supervise": SuperviseConfig,
}
FLAT_FLAGS = {
    "--hs-min-ready": "stream.hs_min_ready",
    "--hs-queue-depth": "stream.hs_queue_depth",
    "--resume-from": "checkpoint.resume_from",
}


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Config:
    """A whole run."""

    target: TargetConfig
    data: DataConfig
    regenerate: RegenerateConfig = RegenerateConfig()
    drafter: DrafterConfig = DrafterConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optim: OptimConfig = OptimConfig()
    stream: StreamConfig = StreamConfig()
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    run: RunConfig = RunConfig()
    supervise: SuperviseConfig = SuperviseConfig()


def parse(values: dict[str, Any], *, trains: bool = True) -> Config:
    """A checked configuration from plain nested values. Raises ValueError, one line with the value and the remedy.

    A command that does not train (`trains` false) needs no data.path; it is "" where none is given.
    """
    if not isinstance(values, dict):
        raise ValueError(
            f"a configuration is a mapping of sections ({', '.join(SECTIONS)}), not {type(values).__name__}"
        )
    if not trains and isinstance(values.get("data", {}), dict):
        values = values | {"data": {"path": ""} | values.get("data", {})}
    required = (("target", "name"), ("data", "path")) if trains else (("target", "name"),)
    missing = [f"{section}.{field}" for section, field in required if not values.get(section)]
    if missing:
        raise ValueError(f"{missing[0]} is not set; it identifies the run and has no default: --{missing[0]} VALUE")
    try:
        config = TypeAdapter(Config).validate_json(json.dumps(values, default=_refuse))
    except ValidationError as errors:
        error = errors.errors(include_url=False)[0]
        raise ValueError(_one_line(error["loc"], error["type"], error["msg"], error["input"])) from None
    check(config)
    return config


def _refuse(value: object) -> typing.NoReturn:
    """For what YAML reads and JSON has not, such as a date."""
    raise ValueError(f"the configuration holds {value}, a {type(value).__name__}; put it in quotes to make it text")


def _one_line(location: tuple[int | str, ...], kind: str, message: str, value: object) -> str:
    section = str(location[0])
    if kind == "unexpected_keyword_argument":
        known = SECTIONS if len(location) == 1 else SECTIONS[section].__dataclass_fields__
        return f"unknown key {'.'.join(map(str, location))}; known here: {', '.join(known)}"
    # the union arms of an optional field add their own names to the location: keep section.field
    where = ".".join(str(part) for part in location[:2])
    if kind == "missing" and len(location) == 2:
        return f"{where} is not set; it identifies the run and has no default: --{where} VALUE"
    if kind == "missing":
        return f"{where}={json.dumps(value)}: value {int(location[2]) + 1} is missing"
    message = message.replace("an object", "a mapping of names to values")
    return f"{where}={json.dumps(value)}: {message[0].lower()}{message[1:]}"


def check(config: Config) -> None:
    """Refuses combinations that no single field can see. Raises ValueError."""
    stream, drafter, optim = config.stream, config.drafter, config.optim
    if stream.hs_min_ready > stream.hs_queue_depth:
        raise ValueError(
            f"stream.hs_min_ready={stream.hs_min_ready} exceeds stream.hs_queue_depth={stream.hs_queue_depth}: "
            "no draw could ever start; lower the first or raise the second"
        )
    edges = stream.bucket_edges
    if edges[0] < 1 or any(low >= high for low, high in itertools.pairwise(edges)):
        raise ValueError(f"stream.bucket_edges={list(edges)} must be positive and ascending, e.g. [256, 512, 1024]")
    if config.data.max_tokens <= drafter.block_size:
        raise ValueError(
            f"data.max_tokens={config.data.max_tokens} does not hold one block and its context "
            f"({drafter.block_size + 1}); raise it or lower drafter.block_size"
        )
    if drafter.layer_types is not None and len(drafter.layer_types) != drafter.layers:
        raise ValueError(
            f"drafter.layer_types has {len(drafter.layer_types)} entries for drafter.layers={drafter.layers}; give one a layer"
        )
    sliding = "sliding_attention" in (drafter.layer_types or ())
    if sliding != (drafter.sliding_window is not None):
        raise ValueError(
            f"drafter.sliding_window={drafter.sliding_window} and drafter.layer_types={list(drafter.layer_types or ())}: "
            "sliding_attention layers and a window go together; set both or none"
        )
    if config.target.device_map is not None and len(config.target.devices) > 1:
        raise ValueError(
            f"target.device_map={config.target.device_map} spreads one target over the GPUs, "
            f"target.devices={list(config.target.devices)} asks for a copy on each; set one of them"
        )
    if config.checkpoint.resume_from is not None and drafter.init_from is not None:
        raise ValueError(
            f"checkpoint.resume_from={config.checkpoint.resume_from} and drafter.init_from={drafter.init_from}: "
            "a run starts from one of them; unset the other"
        )
    _check_cluster(config)
    if not all(0 <= beta < 1 for beta in optim.betas):
        raise ValueError(f"optim.betas={list(optim.betas)} must each be in [0, 1)")


def _check_cluster(config: Config) -> None:
    cluster, target, drafter = config.cluster, config.target, config.drafter
    if config.stream.engine != "ray":
        for name in ("target_workers", "drafter_workers", "shard_drafter", "lockstep"):
            if getattr(cluster, name) != getattr(ClusterConfig(), name):
                raise ValueError(
                    f"cluster.{name}={json.dumps(getattr(cluster, name))} is for stream.engine=ray, this is "
                    f"stream.engine={config.stream.engine}; set that, or leave the section out"
                )
        return
    if target.devices != ("auto",):
        raise ValueError(
            f"target.devices={list(target.devices)}: with stream.engine=ray each of cluster.target_workers has the GPUs of "
            "cluster.target_gpus; leave it auto"
        )
    if drafter.device != "auto":
        raise ValueError(
            f"drafter.device={drafter.device}: with stream.engine=ray each of cluster.drafter_workers has the GPUs of "
            "cluster.drafter_gpus; leave it auto"
        )
    if cluster.drafter_gpus is not None and cluster.drafter_gpus > 1:
        raise ValueError(
            f"cluster.drafter_gpus={cluster.drafter_gpus}: a drafter worker computes on one GPU; raise cluster.drafter_workers"
        )
    for knob, gpus in (("target_gpus", cluster.target_gpus), ("drafter_gpus", cluster.drafter_gpus)):
        if gpus is not None and gpus > 1 and gpus != int(gpus):
            raise ValueError(f"cluster.{knob}={gpus}: whole GPUs, or a fraction of one; round it")
    if cluster.lockstep and cluster.target_workers > 1:
        raise ValueError(
            f"cluster.lockstep and cluster.target_workers={cluster.target_workers}: by turns there is work for one; set one of them"
        )
    if cluster.shard_drafter and cluster.drafter_workers == 1:
        raise ValueError(
            "cluster.shard_drafter with cluster.drafter_workers=1 shards nothing; raise it or unset the former"
        )
    if cluster.shard_drafter and drafter.compile:
        raise ValueError("cluster.shard_drafter and drafter.compile do not go together here; unset one of them")


def gamma_of(objective: ObjectiveConfig, block_size: int) -> float:
    """Decay constant in slots: the configured one, or the paper's for this block size (arXiv 2602.06036, A.1)."""
    if objective.gamma is not None:
        return objective.gamma
    known = [(0, 0.0), (8, 4.0), (10, 5.0), (16, 7.0)]
    for (low, gamma_low), (high, gamma_high) in itertools.pairwise(known):
        if block_size <= high:
            return gamma_low + (gamma_high - gamma_low) * (block_size - low) / (high - low)
    return 7.0 * block_size / 16


def to_values(config: Config) -> dict[str, Any]:
    """Plain nested values, as config.json holds them; `parse(to_values(c)) == c`."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def names_local_directory(target: str) -> bool:
    """Whether a target's name means a directory, there or not, rather than a name of the hub."""
    return target.startswith(("/", ".", "~")) or target.count("/") > 1 or os.path.exists(target)


def with_absolute_paths(config: Config) -> Config:
    """The same run whatever directory it is started from: local paths made absolute, hub names left alone."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else str(Path(os.path.expanduser(path)).absolute())

    name = config.target.name
    return dataclasses.replace(
        config,
        target=dataclasses.replace(
            config.target, name=str(absolute(name)) if os.path.exists(os.path.expanduser(name)) else name
        ),
        data=dataclasses.replace(
            config.data,
            path=str(absolute(config.data.path)) if config.data.path else "",  # a command that does not train
            heldout_path=absolute(config.data.heldout_path),
            prepared_dir=str(absolute(config.data.prepared_dir)),
        ),
        regenerate=dataclasses.replace(
            config.regenerate,
            prompts=absolute(config.regenerate.prompts),
            out=str(absolute(config.regenerate.out)),
        ),
        drafter=dataclasses.replace(config.drafter, init_from=absolute(config.drafter.init_from)),
        checkpoint=dataclasses.replace(config.checkpoint, resume_from=absolute(config.checkpoint.resume_from)),
        evaluate=dataclasses.replace(
            config.evaluate,
            prompts=None
            if config.evaluate.prompts is None
            else tuple(str(absolute(path)) for path in config.evaluate.prompts),
        ),
        run=dataclasses.replace(config.run, root=str(absolute(config.run.root))),
    )


class _Loader(yaml.SafeLoader):
    """YAML 1.2 numbers: in PyYAML's YAML 1.1, `lr: 6e-4` is a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_file(path: str | Path) -> dict[str, Any]:
    """The nested values of a YAML (or JSON) configuration file. Raises ValueError."""
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}; give a YAML file of sections") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--config {path} holds no mapping of sections ({', '.join(SECTIONS)})")
    return values


def add_arguments(
    parser: argparse.ArgumentParser, *, flat: dict[str, str] = FLAT_FLAGS, sections: Iterable[str] = SECTIONS
) -> None:
    """One `--SECTION.FIELD` for every knob of `sections`, with its docstring as help, and `flat` flags: {flag: SECTION.FIELD}."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of sections; the flags below override it")
    for flag, name in flat.items():
        parser.add_argument(flag, dest=name, metavar="VALUE", default=argparse.SUPPRESS, help=f"the same as --{name}")
    for section in sections:
        cls = SECTIONS[section]
        group = parser.add_argument_group(section, cls.__doc__)
        for name, field in cls.__pydantic_fields__.items():
            default = (
                "required"
                if field.is_required()
                else f"default: {json.dumps(field.get_default(call_default_factory=True))}"
            )
            help_text = f"{' '.join((field.description or '').split())} ({default})".replace("%", "%%")
            group.add_argument(f"--{section}.{name}", metavar="VALUE", default=argparse.SUPPRESS, help=help_text)


def from_arguments(arguments: argparse.Namespace, *, trains: bool = True) -> Config:
    """The file's values with the flags' over them, parsed. Raises ValueError."""
    return parse(read_values(arguments.config, given(arguments)), trains=trains)


def given(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The fields that flags give, by section."""
    flags: dict[str, dict[str, Any]] = {}
    for key, text in vars(arguments).items():
        section, dot, name = key.partition(".")
        if dot:
            flags.setdefault(section, {})[name] = _value(text, typing.get_type_hints(SECTIONS[section])[name])
    return flags


def read_values(path: str | None, overrides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The nested values of a file, or of none, with the fields of `overrides` over them. Raises ValueError."""
    values = read_file(path) if path else {}
    for section in (*values, *overrides):
        if section not in SECTIONS:
            raise ValueError(f"unknown key {section}; known here: {', '.join(SECTIONS)}")
    for section, fields in overrides.items():
        if not isinstance(values.get(section, {}), dict):
            raise ValueError(f"{section} in {path} is not a mapping of fields")
        values[section] = values.get(section, {}) | fields
    return values


def _value(text: str, hint: Any) -> Any:
    """What a flag's text means for a field of this type; a text that does not fit is left for `parse` to refuse."""
    arms = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in arms and text.lower() in ("none", "null"):
        return None
    if str in arms or any(typing.get_origin(arm) is Literal for arm in arms):
        return text
    is_tuple = any(typing.get_origin(arm) is tuple for arm in arms)
    if is_tuple and not text.startswith("["):
        text = f"[{text}]"
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text
