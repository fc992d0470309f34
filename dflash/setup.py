"""From a configuration to everything that a run needs, each part proven or refused before the first step."""

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash import checkpoint as checkpoints
from dflash import run_dir as runs
from dflash.batches import make_batch
from dflash.checkpoint import Checkpoint
from dflash.config import Config
from dflash.data import Prepared, prepare_configured
from dflash.drafter import Drafter, check_tensors, initialise
from dflash.evaluate import Prompts, read_prompts
from dflash.files import write_json
from dflash.formats import read_exported
from dflash.hs_queue import Sample, check_limits, production_order
from dflash.job import Job, autocast, embed, samples_of
from dflash.machine import check_data_files, check_disk, queue_bytes
from dflash.objective import Head, head_loss, sample_anchors
from dflash.proofs import prove_drafter
from dflash.shape import Shape, parameter_count
from dflash.target import usable_device
from dflash.target_workers import LocalTargets, TargetFacts, TargetWorkers
from dflash.team import ALONE, Team, sharded_like

CALIBRATION_SAMPLES = 16  # whose features the scaled initialisation is fitted to
FIT_SLOTS, FIT_STEPS, FIT_LR = 256, 15, 0.1  # of the final norm: 4 CPU seconds on SmolLM2, and more gained nothing

log = logging.getLogger("dflash")


def set_up(config: Config, run_dir: Path, targets: TargetWorkers | None = None, team: Team = ALONE) -> Job:
    """Loads and proves target, data and drafter. Raises ValueError, one line, for what the user can mend.

    Without `targets` the target is loaded here. Of a team's drafter workers the first one writes.
    """
    if team.writes:
        runs.write_status(run_dir, state="starting", step=0)
    # what costs nothing to find out comes before the minutes that a large target takes to load
    start = _starting_point(config, run_dir)
    device = _drafter_device(config.drafter.device)
    check_data_files(config)

    if targets is None:
        log.info("loading target %s", config.target.name)
        targets = LocalTargets(config, queue_bytes=queue_bytes(config))
    facts = targets.facts
    shape, mask_token_id = facts.shape, facts.shape.mask_token_id

    log.info("preparing data %s", config.data.path)
    data, heldout = prepare_configured(config, facts.tokenizer)
    for path, prepared in ((config.data.path, data), (config.data.heldout_path, heldout)):
        if prepared is not None:
            _log_report(path, prepared)
    if mask_token_id in data.seen:
        raise ValueError(
            f"drafter.mask_token_id={mask_token_id} occurs in the replies of {config.data.path}; "
            "set it to a token that no conversation uses"
        )
    if start is not None:
        _check_agreement(start, shape, facts.identity, data)
    _check_queue(config, targets, data)
    check_disk(config, shape, run_dir, samples=len(data))

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    embedding, head = _frozen(facts, device)
    seen = torch.from_numpy(data.seen).to(device)
    drafter = Drafter(shape, activation_checkpointing=config.drafter.activation_checkpointing).to(device)
    optimizer = make_optimizer(drafter, config)
    job = Job(
        config=config,
        team=ALONE,  # until it joins
        targets=targets,
        data=data,
        heldout=heldout,
        prompts=None,
        shape=shape,
        device=device,
        dtype=dtype,
        embedding=embedding,
        head=head,
        loss_head=head.restricted(seen) if config.objective.vocabulary == "seen" else head,
        total_steps=0,
        started_from=0,
        drafter=drafter,
        optimizer=optimizer,
        step=0,
        epoch=0,
        trained=np.zeros(len(data), dtype=bool),
    )
    calibration = _calibration_samples(job)
    for sample in calibration:
        if not sample.features.isfinite().all():
            raise ValueError(
                f"{config.data.path}: the target's features of {sample.id} are not finite; "
                "leave it out, or use another target.dtype"
            )
    features = torch.cat([sample.features for sample in calibration]).float()
    if start is not None:
        _go_on(job, start)
    elif config.drafter.init_from is not None:
        drafter.load_state_dict(read_exported(config.drafter.init_from, shape))
    elif config.drafter.init == "scaled":
        initialise(drafter, seed=config.run.seed, features=features)
        _fit_final_norm(job, calibration)
    else:
        initialise(drafter, seed=config.run.seed, features=None)
    job.total_steps = _total_steps(job)
    # a run that died after its own last checkpoint has only to say that it is finished
    nothing_left = job.step >= job.total_steps and config.run.max_steps != 0
    if nothing_left and checkpoints.newest(run_dir) is None:
        raise ValueError(
            f"the checkpoint is at step {job.step} and the run ends at step {job.total_steps}: nothing is left to train; "
            "raise run.epochs or run.max_steps"
        )

    if config.evaluate.during_training:
        job.prompts = _prompts(job)
    block = torch.full((1, shape.block_size), mask_token_id, device=device)
    block[0, 0] = int(data.sample(0)[1][0])
    prove_drafter(drafter, features.to(device), embed(job, block)[0].to(dtype), dtype)
    if config.drafter.compile:
        for layer in drafter.layers:
            layer.compile(dynamic=True)
    if team.writes and not (run_dir / "provenance.json").exists():
        write_json(run_dir / "provenance.json", _provenance(job))
    join(job, team)
    return job


# ---------------------------------------------------------------- the parts


def _log_report(path: str | None, prepared: Prepared) -> None:
    report = prepared.report
    dropped = ", ".join(f"{count} {reason}" for reason, count in report["dropped"].items())
    log.info("%s: %d samples, %d tokens, %d cut", path, len(prepared), report["tokens"], report["truncated"])
    if dropped:
        log.warning("dropped: %s; line by line in %s", dropped, prepared.directory / "dropped.jsonl")


def _prompts(job: Job) -> Prompts:
    """The prompts that are decoded at every checkpoint, once it is clear that they can be."""
    section = job.config.evaluate
    prompts = read_prompts(section, per_set=section.during_training)
    job.targets.check_decoding(prompts)
    return prompts


def _drafter_device(device: str) -> torch.device:
    if device == "auto":
        # the last GPU: the targets' copies are counted from the first
        return torch.device(f"cuda:{torch.cuda.device_count() - 1}" if torch.cuda.is_available() else "cpu")
    return usable_device(device, knob="drafter.device")


def _frozen(facts: TargetFacts, device: torch.device) -> tuple[torch.Tensor, Head]:
    """Embedding and head where the drafter is; in float32 on a CPU, which has no fast bfloat16."""
    dtype = facts.dtype if device.type == "cuda" else torch.float32
    embedding = facts.embedding_weight.to(device, dtype)
    weight = embedding if facts.head_weight is None else facts.head_weight.to(device, dtype)
    bias = None if facts.head_bias is None else facts.head_bias.to(device, dtype)
    return embedding, Head(weight, bias, facts.logit_scale, facts.logit_softcap)


def make_optimizer(drafter: Drafter, config: Config) -> torch.optim.AdamW:
    matrices = [p for p in drafter.parameters() if p.dim() > 1]
    norms = [p for p in drafter.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": config.optim.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    # fused: one kernel, and it can leave a non-finite step out on the device, without asking the host
    return torch.optim.AdamW(groups, lr=config.optim.lr, betas=config.optim.betas, fused=True)


def _calibration_samples(job: Job) -> list[Sample]:
    """The first epoch's first samples with their features on the CPU, for the scaled initialisation and the proofs."""
    stream = job.config.stream
    order = production_order(
        job.data.lengths, edges=stream.bucket_edges, group_tokens=stream.group_tokens, seed=job.config.run.seed, epoch=0
    )
    indices = np.concatenate(order)[:CALIBRATION_SAMPLES]
    return [
        Sample(index, sample_id, 0, 0, tokens, loss_mask, job.targets.features([tokens])[0].cpu())
        for index, (sample_id, tokens, loss_mask) in zip(indices.tolist(), samples_of(job.data, indices), strict=True)
    ]


def _fit_final_norm(job: Job, samples: list[Sample]) -> None:
    """A final norm with which the untrained drafter says no more than how frequent tokens are.

    At the start the residual stream still is the mask token's embedding. With ones as the norm and a tied embedding the head
    reads the mask token from it with certainty: a loss of 73 on SmolLM2, 26 at a norm of 0.25, 11 for no knowledge at all, 8
    after this fit. Nothing but the values of `norm.weight` differs, and steps learn from there at least as fast.
    """
    per_sample = max(1, FIT_SLOTS // (len(samples) * (job.shape.block_size - 1)))
    seed = (job.config.run.seed, 0)
    anchors = [sample_anchors(sample.loss_mask.numpy(), limit=per_sample, seed=seed) for sample in samples]
    batch = make_batch(job, samples, anchors)
    weight = job.drafter.norm.weight
    with torch.no_grad(), autocast(job):
        normed = job.drafter(
            batch.features, embed(job, batch.blocks.ids), batch.blocks.anchors
        )  # times a weight of ones
        weight.fill_(0.05)  # 0.05 x sqrt(width): small logits, from which the fit is a few steps
    optimizer = torch.optim.Adam([weight], lr=FIT_LR)
    for _ in range(FIT_STEPS):
        numerator, sums = head_loss(normed * weight, batch.blocks, job.head, job.config.objective)
        (numerator / sums["weight"]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _total_steps(job: Job) -> int:
    """The step at which all epochs are trained: whole steps, and one smaller one at the end of an epoch."""
    per_step, run = job.config.optim.samples_per_step, job.config.run
    left_in_epoch = math.ceil(int((~job.trained).sum()) / per_step)
    later_epochs = run.epochs - job.epoch - 1
    total = job.step + left_in_epoch + later_epochs * math.ceil(len(job.data) / per_step)
    return total if run.max_steps is None else min(total, run.max_steps)


# ---------------------------------------------------------------- going on from a checkpoint


def _starting_point(config: Config, run_dir: Path) -> Checkpoint | None:
    """This run's own newest checkpoint if it has made one before, else the one that the configuration names, else none."""
    own = checkpoints.newest(run_dir)
    if own is None and any((run_dir / "checkpoints").glob("step-*")):
        raise ValueError(
            f"{run_dir} has checkpoints and none of them is complete; start a new run, with --resume-from a complete one of another"
        )
    named = own or config.checkpoint.resume_from
    if named is None:
        return None
    start = checkpoints.load(named)
    log.info("going on from %s, step %d", named, start.state["step"])
    return start


def _check_agreement(start: Checkpoint, shape: Shape, identity: dict[str, Any], data: Prepared) -> None:
    """Refuses to go on with another drafter, target or data than the checkpoint's."""
    ours = json.loads(json.dumps(dataclasses.asdict(shape)))
    for key, theirs in start.state["shape"].items():
        if ours[key] != theirs:
            raise ValueError(
                f"checkpoint.resume_from: the checkpoint has {key}={theirs}, this run {ours[key]}; make them agree"
            )
    theirs = start.state["target"]
    if theirs["sha256"] != identity["sha256"]:
        raise ValueError(
            f"checkpoint.resume_from: the checkpoint was trained for {theirs['name']} in {theirs['dtype']} with other weights "
            f"than {identity['name']} in {identity['dtype']}; name that target, or start from drafter.init_from"
        )
    if start.state["data"] != data.digest:
        raise ValueError(
            "checkpoint.resume_from: the checkpoint's epoch is over other data (or data settings) than data.path; "
            "name the same, or start a new run from drafter.init_from"
        )
    check_tensors(start.drafter, shape, what="checkpoint.resume_from")


def _go_on(job: Job, start: Checkpoint) -> None:
    job.drafter.load_state_dict(start.drafter)
    _load_optimizer(job, start.optimizer)
    job.step = job.started_from = start.state["step"]
    job.epoch = start.state["epoch"]
    job.trained[start.state["trained"]] = True


def _load_optimizer(job: Job, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in job.drafter.named_parameters():
        moments = {key: tensors[f"{name}.{key}"].to(job.device) for key in ("exp_avg", "exp_avg_sq")}
        job.optimizer.state[parameter] = {
            **{key: sharded_like(moment, parameter) for key, moment in moments.items()},
            "step": tensors[f"{name}.step"].to(job.device),
        }


def join(job: Job, team: Team) -> None:
    """Makes a job that was set up alone one of a connected team: with the first worker's drafter, in parts where it is sharded."""
    job.team = team
    team.same_drafter(job.drafter)
    if team.sharded:
        moments = optimizer_tensors(job)
        team.shard(job.drafter)
        job.optimizer = make_optimizer(job.drafter, job.config)
        if moments:
            _load_optimizer(job, moments)


def optimizer_tensors(job: Job) -> dict[str, torch.Tensor]:
    """The optimizer's state by parameter name, as a checkpoint holds it."""
    named, states = job.drafter.named_parameters(), job.optimizer.state
    return {f"{name}.{key}": tensor for name, parameter in named for key, tensor in states[parameter].items()}


def state_of(job: Job) -> dict[str, Any]:
    """What a checkpoint must know beside tensors."""
    return {
        "step": job.step,
        "epoch": job.epoch,
        "seed": job.config.run.seed,
        "trained": np.flatnonzero(job.trained).tolist(),
        "shape": dataclasses.asdict(job.shape),
        "target": job.targets.facts.identity,
        "data": job.data.digest,
    }


def _provenance(job: Job) -> dict[str, Any]:
    return {
        "code": runs.code_version(),
        "packages": runs.package_versions(),
        "target": job.targets.facts.identity,
        "data": {"path": job.config.data.path, "digest": job.data.digest, "report": job.data.report},
        "heldout": None
        if job.heldout is None
        else {"path": job.config.data.heldout_path, "digest": job.heldout.digest},
        "drafter": dataclasses.asdict(job.shape) | {"parameters": parameter_count(job.shape)},
        "parent": job.config.checkpoint.resume_from,
        "started_from": job.config.drafter.init_from,
    }


# ---------------------------------------------------------------- what the machine must hold


def _check_queue(config: Config, targets: TargetWorkers, data: Prepared) -> None:
    """Refuses a queue that samples cannot get through."""
    check_limits(
        data.lengths,
        bytes_per_token=targets.facts.bytes_per_token,
        min_ready=config.stream.hs_min_ready,
        depth=config.stream.hs_queue_depth,
        max_bytes=targets.queue_bytes,
    )
