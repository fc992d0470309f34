"""Drafter workers together: who trains what, and that two of them compute what one would."""

import json
import multiprocessing
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tiny import conversations, tiny_target, write_jsonl

from dflash import config as configuration
from dflash.hs_queue import Sample
from dflash.job import Job, samples_of
from dflash.run_dir import create_run
from dflash.setup import join, make_optimizer, optimizer_tensors, set_up
from dflash.team import Team
from dflash.train import take_step

STEPS = 20
SAMPLES = 50
PER_STEP = 7  # over 50 samples: the last step of an epoch has one sample, for two or three workers
KINDS = ("weights", "moments")  # tensors of a state, by name


def sample(index: int, tokens: int) -> Sample:
    ids = torch.zeros(tokens, dtype=torch.int64)
    return Sample(index, str(index), 0, 0, ids, ids.bool(), torch.empty(0, 0))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_sample_of_a_draw_is_trained_by_exactly_one_worker_and_the_tokens_are_spread(size):
    draw = np.random.default_rng(size)
    for count in (1, 2, 7, 40):
        samples = [sample(index, int(tokens)) for index, tokens in enumerate(draw.integers(10, 3000, count))]
        shares = [Team(rank, size).share(samples) for rank in range(size)]
        assert sorted(s.index for share in shares for s in share) == list(range(count))
        tokens = [sum(len(s.tokens) for s in share) for share in shares]
        assert max(tokens) - min(tokens) <= max(len(s.tokens) for s in samples)


@pytest.mark.parametrize("groups", [0, 1, 5, 6])
def test_groups_are_dealt_once_and_every_worker_gets_equally_many(groups):
    order = [np.array([2 * index, 2 * index + 1]) for index in range(groups)]
    dealt = [list(Team(rank, 3).deal(order)) for rank in range(3)]
    assert len({len(mine) for mine in dealt}) == 1
    assert sorted(int(index) for mine in dealt for group in mine for index in group) == list(range(2 * groups))


# ---------------------------------------------------------------- two equal one


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("team")
    tiny_target(root / "target", hidden=32)
    write_jsonl(root / "data.jsonl", conversations(SAMPLES, longest_reply=20))
    return root


def job_of(world: Path, name: str, micro_batch_tokens: int) -> Job:
    """A run set up in float64; the same for whoever sets it up."""
    values = {
        "target": {"name": str(world / "target"), "captured_layers": 2},
        "data": {"path": str(world / "data.jsonl"), "prepared_dir": str(world / "prepared")},
        "drafter": {"layers": 2, "block_size": 4},
        "objective": {"anchors": 6},
        # a clip that is reached: it needs the whole gradient
        "optim": {"samples_per_step": PER_STEP, "lr": 1e-3, "clip": 0.05, "micro_batch_tokens": micro_batch_tokens},
        "stream": {"hs_min_ready": 5, "hs_queue_depth": 10, "bucket_edges": [90, 160]},
        "run": {"root": str(world / "runs"), "epochs": 6, "name": name},
    }
    config = configuration.parse(values)
    job = set_up(config, create_run(config))
    job.drafter.double()
    job.dtype, job.embedding = torch.float64, job.embedding.double()
    job.head = job.loss_head = type(job.head)(job.head.weight.double(), None, job.head.scale, job.head.softcap)
    job.optimizer = make_optimizer(job.drafter, config)
    return job


def trained(job: Job) -> list[dict]:
    """Loss, gradient norm, weights and the optimizer's moments after every step, of the whole team."""
    rows = [next(samples_of(job.data, np.array([index]))) for index in range(len(job.data))]
    features = [job.targets.features([tokens])[0] for _, tokens, _ in rows]

    def draw_step(n: int):
        left = np.flatnonzero(~job.trained)[:n].tolist()
        for part in (left[:5], left[5:]):  # in parts, as from a queue that is smaller than the step
            if part:
                yield [Sample(i, rows[i][0], job.epoch, 0, *rows[i][1:], features[i].clone()) for i in part]

    states = []
    for _ in range(STEPS):
        result = take_step(job, draw_step)
        weight, tau, blocks, norm = result.values[:4].tolist()
        losses = result.values[4 + 2 * (job.shape.block_size - 1) :]
        assert len(losses) == len(result.samples)
        states.append(
            {
                "loss": float(losses.sum()) / weight,
                "losses": {s.index: float(value) for s, value in zip(result.samples, losses, strict=True)},
                "norm": norm,
                "tau": tau / blocks,
                "weights": copied(job.team.whole(job.drafter.state_dict())),
                "moments": copied(job.team.whole(optimizer_tensors(job))),
            }
        )
    return states


def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def work(world: Path, rank: int, size: int, port: int, sharded: bool) -> None:
    """A drafter worker, in a process of its own."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
    team = Team.connect(rank, size, store=store, address=("127.0.0.1", port), sharded=sharded)
    job = job_of(world, f"rank{rank}", 100_000)
    if rank > 0:  # whatever a worker has made of the seed, the first one's drafter is the team's
        with torch.no_grad():
            for parameter in job.drafter.parameters():
                parameter.add_(1.0)
    join(job, team)
    states = trained(job)
    if rank == 0:
        write_states(world / f"states-{size}-{sharded}", states)
    dist.barrier()


def write_states(directory: Path, states: list[dict]) -> None:
    directory.mkdir()
    for step, state in enumerate(states):
        for kind in KINDS:
            save_file(state.pop(kind), directory / f"{kind}-{step}.safetensors")
    (directory / "states.json").write_text(json.dumps(states))


def read_states(directory: Path) -> list[dict]:
    states = json.loads((directory / "states.json").read_text())
    for step, state in enumerate(states):
        state["losses"] = {int(index): loss for index, loss in state["losses"].items()}
        state |= {kind: load_file(directory / f"{kind}-{step}.safetensors") for kind in KINDS}
    return states


@pytest.fixture(scope="module")
def alone(world) -> list[dict]:
    """One drafter that takes every step in many small micro-batches."""
    return trained(job_of(world, "alone", 300))


@pytest.mark.parametrize("sharded", [False, True], ids=["copies", "sharded"])
@pytest.mark.parametrize("size", [2, 3])
def test_drafter_workers_together_equal_one_drafter_with_as_many_micro_batches(world, alone, size, sharded):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=work, args=(world, rank, size, port, sharded)) for rank in range(size)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * size
    together = read_states(world / f"states-{size}-{sharded}")
    for step, (ours, theirs) in enumerate(zip(together, alone, strict=True)):
        for name in ("loss", "norm", "tau"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-6), (step, name)
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6), step
        for kind in KINDS:
            assert ours[kind].keys() == theirs[kind].keys()
            for name, tensor in theirs[kind].items():
                scale = float(tensor.abs().max()) or 1.0
                assert float((ours[kind][name] - tensor).abs().max()) <= 1e-6 * scale, (step, name)
    assert any(state["norm"] > 0.05 for state in alone), "the clip was never reached"
    assert any(len(state["losses"]) < size for state in alone), "no step had fewer samples than workers"
