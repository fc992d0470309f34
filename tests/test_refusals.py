"""What a user can get wrong: exit code 2 and one line that names the value and the remedy, before any training.

Every row goes through the real command. `{place}` is the directory that the module's fixture fills.
"""

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from refused import assert_refused
from tiny import CHATML, conversations, tiny_model, tiny_target, tiny_tokenizer, write_jsonl
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from dflash import checkpoint as checkpoints
from dflash.train import FINISHED, main

# file of {place}: what it holds
FILES = {
    "not-yaml.yaml": "target: {name: [\n",
    "list.yaml": "- target\n- data\n",
    "section.yaml": "target: {name: x}\ndata: {path: x}\noptimizer: {lr: 1}\n",
    "key.yaml": "target: {name: x}\ndata: {path: x}\noptim: {learning_rate: 1}\n",
    "flat-section.yaml": "target: {name: x}\ndata: x\n",
    "no-data.yaml": "target: {name: x}\ndata: {max_tokens: 8}\n",
    "date.yaml": "target: {name: x}\ndata: {path: x}\nrun: {name: 2026-01-31}\n",
    "not-utf8.yaml": "target: {name: \udcff}\n",
    "empty.jsonl": "",
    "blank.jsonl": "\n  \n\n",
    "broken.jsonl": '{"messages": [{"role": "user", "content": "a"}]}\n{"messages": [\n',
    "no-conversation.jsonl": '\n{"text": "a reply of nobody"}\n',
    "no-reply.jsonl": '{"messages": [{"role": "user", "content": "a"}]}\n' * 3,
    "not-utf8.jsonl": '{"messages": "\udcff"}\n',
    "file": "a regular file\n",
}

# row: arguments after those of a run that is fine, the value that the line names, the remedy
FLAGS = {
    # configuration
    "wrong type, number": ("--optim.lr fast", 'optim.lr="fast"', "should be a valid number"),
    "wrong type, whole number": ("--run.epochs 2.5", "run.epochs=2.5", "should be a valid integer"),
    "wrong type, truth": ("--drafter.compile 3", "drafter.compile=3", "should be a valid boolean"),
    "wrong type, list": ("--stream.bucket_edges a,b", 'stream.bucket_edges="a"', "should be a valid integer"),
    "wrong type, pair": ("--optim.betas 0.9", "optim.betas=[0.9]", "value 2 is missing"),
    "wrong choice": ("--stream.engine remote", 'stream.engine="remote"', "'local', 'lockstep' or 'ray'"),
    "not finite": ("--optim.lr .inf", "optim.lr=Infinity", "should be a finite number"),
    "template_kwargs no mapping": ("--data.template_kwargs 3", "data.template_kwargs=3", "mapping"),
    "gate above depth": ("--hs-min-ready 9 --hs-queue-depth 4", "stream.hs_min_ready=9", "lower the first or raise"),
    "zero gate": ("--hs-min-ready 0", "stream.hs_min_ready=0", "greater than or equal to 1"),
    "negative depth": ("--hs-queue-depth -3", "stream.hs_queue_depth=-3", "greater than or equal to 1"),
    "zero step": ("--optim.samples_per_step 0", "optim.samples_per_step=0", "greater than or equal to 1"),
    "negative micro-batch": ("--optim.micro_batch_tokens -1", "optim.micro_batch_tokens=-1", "greater than or equal"),
    "zero learning rate": ("--optim.lr 0", "optim.lr=0", "greater than 0"),
    "no drafter layer": ("--drafter.layers 0", "drafter.layers=0", "greater than or equal to 1"),
    "zero epochs": ("--run.epochs 0", "run.epochs=0", "greater than or equal to 1"),
    "negative seed": ("--run.seed -1", "run.seed=-1", "greater than or equal to 0"),
    "zero group": ("--stream.group_tokens 0", "stream.group_tokens=0", "greater than or equal to 1"),
    "edges descend": ("--stream.bucket_edges 64,32", "stream.bucket_edges=[64, 32]", "ascending, e.g. ["),
    "edge of zero": ("--stream.bucket_edges 0,32", "stream.bucket_edges=[0, 32]", "positive and ascending"),
    "no edges": ("--stream.bucket_edges []", "stream.bucket_edges=[]", "at least 1"),
    "beta of one": ("--optim.betas 0.9,1", "optim.betas=[0.9, 1.0]", "must each be in [0, 1)"),
    "block of one": ("--drafter.block_size 1", "drafter.block_size=1", "greater than or equal to 2"),
    "cut below a block": ("--data.max_tokens 4", "data.max_tokens=4", "raise it or lower drafter.block_size"),
    "layer types too many": (
        "--drafter.layer_types full_attention,full_attention",
        "2 entries for drafter.layers=1",
        "give one a layer",
    ),
    "layer type unknown": ("--drafter.layer_types linear", 'drafter.layer_types="linear"', "'sliding_attention'"),
    "sliding without window": (
        "--drafter.layer_types sliding_attention",
        "drafter.sliding_window=None",
        "set both or none",
    ),
    "window without sliding": ("--drafter.sliding_window 8", "drafter.sliding_window=8", "set both or none"),
    "negative mask token": ("--drafter.mask_token_id -1", "drafter.mask_token_id=-1", "greater than or equal to 0"),
    "device map and devices": (
        "--target.device_map auto --target.devices cpu,cpu",
        "target.device_map=auto",
        "set one of them",
    ),
    "two starts": (
        "--drafter.init_from {place}/a --resume-from {place}/b",
        "checkpoint.resume_from={place}/b and drafter.init_from={place}/a",
        "unset the other",
    ),
    "name with a slash": ("--run.name a/b", 'run.name="a/b"', "should match pattern '^[A-Za-z0-9]"),
    # command line
    "unknown flag": ("--drafter.depth 3", "--drafter.depth", "--help"),
    "abbreviated flag": ("--run.epoch 3", "--run.epoch", "--help"),
    "flag without value": ("--optim.lr", "--optim.lr", "expected one argument"),
    # disk
    "root under a file": ("--run.root {place}/file/runs", "run.root={place}/file/runs", "that can be written"),
    "root under /proc": ("--run.root /proc/runs", "run.root=/proc/runs", "that can be written"),
    "prepared under a file": (
        "--data.prepared_dir {place}/file/prepared",
        "data.prepared_dir={place}/file/prepared",
        "that can be written",
    ),
    "checkpoints larger than the disk": ("--drafter.intermediate_size 1000000000000", "checkpoints x", "make room"),
    # data
    "no data file": ("--data.path {place}/none.jsonl", "data.path={place}/none.jsonl", "give a JSONL file"),
    "no such home": ("--data.path ~nobody-here/a.jsonl", "~nobody-here/a.jsonl", "give a JSONL file"),
    "no held-out file": (
        "--data.heldout_path {place}/none.jsonl",
        "data.heldout_path={place}/none.jsonl",
        "give a JSONL file",
    ),
    "broken held-out line": (
        "--data.heldout_path {place}/broken.jsonl",
        "data.heldout_path={place}/broken.jsonl:2",
        "give one conversation a line",
    ),
    "data is a directory": ("--data.path {place}", "data.path={place}: is a directory", "give a JSONL file"),
    "empty data": ("--data.path {place}/empty.jsonl", "data.path={place}/empty.jsonl", "give a JSONL file"),
    "blank data": ("--data.path {place}/blank.jsonl", "data.path={place}/blank.jsonl", "give a JSONL file"),
    "broken line": ("--data.path {place}/broken.jsonl", "broken.jsonl:2", "give one conversation a line"),
    "line of no UTF-8": ("--data.path {place}/not-utf8.jsonl", "not-utf8.jsonl:1", "give one conversation a line"),
    "no conversation": ("--data.path {place}/no-conversation.jsonl", "no-conversation.jsonl:2", 'give {{"messages": ['),
    "no reply": ("--data.path {place}/no-reply.jsonl", "none of its 3 conversations", "mend the data"),
    "block above every reply": (
        "--drafter.block_size 60",
        "drafter.block_size=60 is larger than the longest reply",
        "lower it",
    ),
    "template_kwargs of tokenizer": ("--data.template_kwargs '{{tools: 1}}'", "tools cannot be set", "own variables"),
    # target
    "no target": ("--target.name {place}/none", "target.name={place}/none: no such directory", "save_pretrained"),
    "hub name unknown": ("--target.name nobody/none", "target.name=nobody/none: its config", "check the name"),
    "target is a file": ("--target.name {place}/file", "target.name={place}/file: no such directory", "give one that"),
    "target without config": ("--target.name {place}/runs", "target.name={place}/runs: no config", "save_pretrained"),
    "encoder": ("--target.name {place}/encoder", "target.name={place}/encoder", "causal LM"),
    "torn weights": ("--target.name {place}/torn", "target.name={place}/torn", "give a complete one"),
    "missing weights": ("--target.name {place}/lacking", "target.name={place}/lacking", "give a complete causal LM"),
    "no tokenizer": ("--target.name {place}/no-tokenizer", "target.name={place}/no-tokenizer", "save the target's own"),
    "torn tokenizer": ("--target.name {place}/torn-tokenizer", "torn-tokenizer: no usable", "save the target's own"),
    "torn config": ("--target.name {place}/torn-config", "target.name={place}/torn-config", "is it whole?"),
    "no template": ("--target.name {place}/no-template", "target.name={place}/no-template", "chat_template.jinja"),
    "template refuses": ("--target.name {place}/refuses", "not in the mood", "mend the template"),
    "template of no Jinja": ("--target.name {place}/no-jinja", "target.name={place}/no-jinja", "mend the template"),
    "no end of turn": ("--target.name {place}/endless", "target.name={place}/endless", "end every assistant turn"),
    "layer unknown": ("--target.layer_ids 0,7", "has no layer 7", "ascending ids within 0 to 2"),
    "layer negative": ("--target.layer_ids [-1,1]", "has no layer -1", "ascending ids within 0 to 2"),
    "last layer": ("--target.layer_ids 0,3", "3 is the last layer", "ascending ids within 0 to 2"),
    "layer twice": (
        "--target.layer_ids 1,1",
        "target.layer_ids=[1, 1]: not ascending or not distinct",
        "within 0 to 2",
    ),
    "layers descend": ("--target.layer_ids 2,0", "target.layer_ids=[2, 0]: not ascending", "within 0 to 2"),
    "no layer": ("--target.layer_ids []", "target.layer_ids=[]: empty", "within 0 to 2"),
    "too many layers": ("--target.captured_layers 4", "target.captured_layers=4", "lower it"),
    "device unknown": ("--target.devices tpu9", "target.devices=tpu9", "use auto"),
    "device absent": ("--target.devices cuda:99", "target.devices=cuda:99", "use auto"),
    "device of nothing": ("--target.devices meta", "target.devices=meta", "use auto"),
    "device not built in": ("--target.devices xpu", "target.devices=xpu", "use auto"),
    "device map unknown": ("--target.device_map sideways", "target.device_map=sideways", "'auto', 'balanced'"),
    "attention unknown": ("--target.attention fancy", "target.attention=fancy", "sdpa"),
    # drafter
    "mask is pad": ("--drafter.mask_token_id 0", "drafter.mask_token_id=0: this is", "set it to a token that no"),
    "mask is end of turn": ("--drafter.mask_token_id 2", "'s eos token", "set it to a token that no conversation uses"),
    "mask past the vocabulary": ("--drafter.mask_token_id 512", "drafter.mask_token_id=512", "use 0 to 511"),
    "mask in replies": ("--drafter.mask_token_id {used}", "drafter.mask_token_id={used} occurs", "set it to a token"),
    "no mask token": ("--target.name {place}/no-spare-row", "drafter.mask_token_id is not set", "set it to a token"),
    "heads do not divide": ("--drafter.heads 4 --drafter.kv_heads 3", "drafter.kv_heads=3", "change one of them"),
    "odd head": ("--drafter.head_dim 7", "drafter.head_dim=7 is odd", "give an even width"),
    "drafter device unknown": ("--drafter.device tpu9", "drafter.device=tpu9", "use auto, cpu or cuda:0"),
    "drafter device absent": ("--drafter.device cuda:99", "drafter.device=cuda:99", "use auto"),
    "drafter device of nothing": ("--drafter.device meta", "drafter.device=meta", "use auto"),
    "init_from nothing": ("--drafter.init_from {place}/none", "drafter.init_from={place}/none", "model.safetensors"),
    "init_from a target": (
        "--drafter.init_from {place}/target",
        "drafter.init_from={place}/target",
        "model.safetensors",
    ),
    "init_from a list": ("--drafter.init_from {place}/list", "drafter.init_from={place}/list", "model.safetensors"),
    # queue
    "queue below a sample": ("--stream.hs_queue_bytes 100", "stream.hs_queue_bytes=100", "lower data.max_tokens"),
    "queue below the gate": ("--stream.hs_queue_bytes 20000", "stream.hs_queue_bytes=20000", "stream.hs_min_ready"),
    "queue above the memory": (
        "--stream.hs_queue_bytes 1000000000000000",
        "hs_queue_bytes=1000000000000000",
        "lower it",
    ),
    # resume
    "resume from nothing": ("--resume-from {place}/none", "checkpoint {place}/none", "name a complete step-"),
    "resume from a file": ("--resume-from {place}/file", "checkpoint {place}/file", "name a complete step-"),
    "resume from a run": ("--resume-from {place}/runs/fine-0001", "fine-0001 cannot be used", "name a complete step-"),
    "resume from torn": ("--resume-from {place}/step-torn", "drafter.safetensors has", "name a complete step-"),
    "resume from altered": ("--resume-from {place}/step-altered", "sha256", "name a complete step-"),
    "resume from unreadable": ("--resume-from {place}/step-unreadable", "unreadable", "name a complete step-"),
    "other block size": ("{resume} --drafter.block_size 8", "block_size=4, this run 8", "make them agree"),
    "other layers": ("{resume} --target.layer_ids 0,1", "target_layer_ids=[0, 2], this run [0, 1]", "make them agree"),
    "other mask token": ("{resume} --drafter.mask_token_id 511", "mask_token_id=", "make them agree"),
    "other target": ("{resume} --target.name {place}/other", "other weights than {place}/other", "name that target"),
    "other data": ("{resume} --data.path {place}/other.jsonl", "other data", "name the same"),
    "nothing left": ("--resume-from {checkpoint}", "the run ends at step 1", "raise run.epochs or run.max_steps"),
}

# row: the whole command line, the value that the line names, the remedy
COMMANDS = {
    "nothing": ("", "target.name is not set", "--target.name VALUE"),
    "no config": ("--config {place}/none.yaml", "--config {place}/none.yaml: No such file", "give a YAML file"),
    "config is a directory": ("--config {place}", "--config {place}: Is a directory", "give a YAML file"),
    "config no YAML": ("--config {place}/not-yaml.yaml", "--config {place}/not-yaml.yaml is not YAML", "line 2"),
    "config no UTF-8": ("--config {place}/not-utf8.yaml", "--config {place}/not-utf8.yaml is not YAML", "byte"),
    "config a list": ("--config {place}/list.yaml", "--config {place}/list.yaml", "mapping of sections (target, data"),
    "config empty": ("--config {place}/empty.jsonl", "--config {place}/empty.jsonl", "mapping of sections (target"),
    "unknown section": ("--config {place}/section.yaml", "unknown key optimizer", "known here: target, data"),
    "unknown key": ("--config {place}/key.yaml", "unknown key optim.learning_rate", "known here: lr, schedule"),
    "section no mapping": ("--config {place}/flat-section.yaml", 'data="x"', "mapping"),
    "data not named": ("--config {place}/no-data.yaml", "data.path is not set", "--data.path VALUE"),
    "value no text": ("--config {place}/date.yaml", "2026-01-31", "quotes"),
    "run directory that is none": (
        "{place}/target",
        "{place}/target is not a run directory",
        "start one with --config",
    ),
    "no run directory": ("{place}/none", "{place}/none is not a run directory", "start one with --config"),
    "frozen": ("{place}/runs/fine-0001 --optim.lr 1", "--optim.lr cannot change it", "start a new run"),
    "two configurations": ("{place}/runs/fine-0001 --config x", "--config cannot change it", "start a new run"),
    "run directory not writable": ("{place}/runs/read-only-0001", "runs/read-only-0001", "can be written"),
    "run directory of another version": ("{place}/runs/other-0001", "unknown key optim.momentum", "start one with"),
    "finished": ("{place}/runs/fine-0001", "{place}/runs/fine-0001 is finished", "--resume-from"),
    "being trained": (
        "{place}/runs/held-0001",
        "is being trained by process {pid}",
        "stop that one or start a new run",
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with one input that is fine and finished a run, and every bad one that the rows name."""
    place = tmp_path_factory.mktemp("place")
    for name, text in FILES.items():
        (place / name).write_text(text, errors="surrogateescape")
    _make_targets(place)
    chats = conversations(6, longest_reply=40)
    write_jsonl(place / "data.jsonl", chats)
    write_jsonl(place / "other.jsonl", chats[:5])
    (place / "fine.json").write_text(json.dumps(_fine_config(place)))
    # so that a row is refused for its own fault
    assert main(["--config", f"{place}/fine.json", "--run.name", "fine"]) == FINISHED
    _make_checkpoints(place)
    with _make_runs(place):
        yield place


def _fine_config(place: Path) -> dict:
    return {
        "target": {"name": f"{place}/target", "captured_layers": 2},
        "data": {"path": f"{place}/data.jsonl", "max_tokens": 64, "prepared_dir": f"{place}/prepared"},
        "drafter": {"layers": 1, "block_size": 4, "intermediate_size": 32},
        "objective": {"anchors": 4},
        "stream": {"engine": "lockstep", "hs_min_ready": 2, "hs_queue_depth": 4, "bucket_edges": [32]},
        "run": {"root": f"{place}/runs", "name": "refused", "epochs": 1},
    }


def _make_targets(place: Path) -> None:
    target = tiny_target(place / "target", hidden=32)
    tiny_target(place / "other", hidden=32, seed=1)
    tokenizer = tiny_tokenizer()
    templates = {
        "no-template": None,
        "refuses": "{{ raise_exception('not in the mood') }}",
        "no-jinja": "{% for %}",
        "endless": CHATML.replace("<|im_end|>", ""),
    }
    for name, template in templates.items():
        shutil.copytree(target, place / name, ignore=shutil.ignore_patterns("chat_template.jinja"))
        tiny_tokenizer(chat_template=template).save_pretrained(place / name)
    shutil.copytree(target, place / "no-tokenizer", ignore=shutil.ignore_patterns("tokenizer*"))
    files = {"torn": "model.safetensors", "torn-tokenizer": "tokenizer.json", "torn-config": "config.json"}
    for name, file in files.items():
        torn = shutil.copytree(target, place / name) / file
        torn.write_bytes(torn.read_bytes()[:-100])

    tiny_model(hidden=32, layers=2).save_pretrained(place / "lacking")
    shutil.copy(target / "config.json", place / "lacking")  # of 4 layers
    tiny_model(hidden=32, vocabulary=len(tokenizer)).save_pretrained(place / "no-spare-row")
    BertModel(
        BertConfig(hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, vocab_size=512)
    ).save_pretrained(place / "encoder")
    for name in ("lacking", "no-spare-row", "encoder"):
        tokenizer.save_pretrained(place / name)


def _make_checkpoints(place: Path) -> None:
    fine = checkpoints.directory_of(place / "runs" / "fine-0001", 1)
    torn, altered, unreadable = (
        shutil.copytree(fine, place / f"step-{damage}") for damage in ("torn", "altered", "unreadable")
    )
    weights = (fine / "drafter.safetensors").read_bytes()
    (torn / "drafter.safetensors").write_bytes(weights[:-1])
    (altered / "drafter.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    (unreadable / "manifest.json").write_text("{")
    (place / "list").mkdir()
    (place / "list" / "config.json").write_text("[]")
    shutil.copy(fine / "drafter.safetensors", place / "list" / "model.safetensors")


@contextlib.contextmanager
def _make_runs(place: Path) -> Iterator[None]:
    """Runs that were interrupted, each with its own obstacle; the one of held-0001 is a trainer's lock."""
    held, read_only, other = (
        shutil.copytree(place / "runs" / "fine-0001", place / "runs" / f"{name}-0001")
        for name in ("held", "read-only", "other")
    )
    for run in (held, read_only, other):
        status = json.loads((run / "status.json").read_text())
        (run / "status.json").write_text(json.dumps(status | {"state": "running"}))
    (read_only / ".lock").unlink()
    (read_only / ".lock").mkdir()  # fails for root too, whom permissions do not stop
    config = json.loads((other / "config.json").read_text())
    config["optim"]["momentum"] = 0.9
    (other / "config.json").write_text(json.dumps(config))
    with open(held / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _command(place: Path, row: str) -> tuple[list[str], str, str]:
    """(arguments, value, remedy) of a row, filled in."""
    checkpoint = checkpoints.directory_of(place / "runs" / "fine-0001", 1)
    words = {
        "place": place,
        "checkpoint": checkpoint,
        "resume": f"--run.epochs 2 --resume-from {checkpoint}",
        "used": PreTrainedTokenizerFast.from_pretrained(place / "target").encode("the")[0],
        "pid": os.getpid(),
    }
    arguments, value, remedy = (text.format(**words) for text in (FLAGS | COMMANDS)[row])
    fine = ["--config", f"{place}/fine.json"] if row in FLAGS else []
    return [*fine, *shlex.split(arguments)], value, remedy


def _others(place: Path) -> dict[Path, tuple[bytes, int]]:
    """Content and time of every file of the runs that the refused ones stand next to, and of what is shared."""
    files = [*place.glob("runs/*-0001/**/*"), *place.glob("prepared/*/*")]
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files if file.is_file()}


def _assert_refused(place: Path, runs_before: set[Path], code: int, stderr: str, value: str, remedy: str) -> None:
    assert_refused(code, stderr, value, remedy)
    for run in set(place.glob("runs/refused-*")) - runs_before:
        assert not (run / "metrics.jsonl").exists()
        assert not list((run / "checkpoints").iterdir())
        assert json.loads((run / "status.json").read_text())["state"] == "refused"


@pytest.mark.parametrize("row", [*FLAGS, *COMMANDS])
def test_bad_input_is_refused_in_one_line_with_value_and_remedy_before_any_training(place, row, capfd):
    arguments, value, remedy = _command(place, row)
    others, runs = _others(place), set(place.glob("runs/refused-*"))
    code = main(arguments)
    _assert_refused(place, runs, code, capfd.readouterr().err, value, remedy)
    assert others.items() <= _others(place).items()


@pytest.mark.parametrize("row", ["no config", "broken line", "unknown flag"])
def test_the_process_itself_exits_with_2_and_shows_no_traceback(place, row):
    arguments, value, remedy = _command(place, row)
    runs = set(place.glob("runs/refused-*"))
    command = [sys.executable, "-m", "dflash.train", *arguments]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    _assert_refused(place, runs, done.returncode, done.stderr, value, remedy)
    assert done.stdout == ""
