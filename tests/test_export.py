"""Checkpoints that our trainer made, exported by the real command: what lies there, how it is loaded again, what is refused."""

import hashlib
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny import tiny_target, tiny_tokenizer, write_jsonl
from trained import MIXED, SLIDING, trained

from dflash import checkpoint as checkpoints
from dflash import config as configuration
from dflash.evaluate import main as evaluate
from dflash.export import load_drafter, main, serving_commands
from dflash.run_dir import create_run, read_config
from dflash.setup import set_up
from dflash.target import load_target
from dflash.verify import verify

FINISHED, FAILED, REFUSED = 0, 1, 2
WEIGHTS, SUMS = "drafter.safetensors", "SHA256SUMS"


class Place:
    """Trained checkpoints by name. Its path is one that a shell would take apart."""

    def __init__(self, root: Path):
        self.root = root / "it's $HOME; a place"
        self.root.mkdir()
        kinds = {"full": {}, "sliding": SLIDING, "mixed": MIXED}
        self.checkpoints = {name: trained(self.root, **drafter) for name, drafter in kinds.items()}
        self.checkpoints["gemma"] = trained(self.root, "gemma3")
        self.target = self.load("qwen3")

    def load(self, name: str, dtype: str = "float32"):
        return load_target(str(self.root / name), dtype=dtype, device="cpu", captured_layers=1)

    def run_of(self, name: str) -> Path:
        return self.checkpoints[name].parent.parent


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("export"))


def run(*arguments) -> int:
    return main([str(argument) for argument in arguments])


def json_at(path: Path) -> dict:
    return json.loads(path.read_text())


# -- what lies there -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["zlab", "speculators"])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_the_tensors_are_the_checkpoints(place, tmp_path, form, dtype):
    words = [] if dtype is None else ["--dtype", dtype]
    assert run(place.checkpoints["full"], "--out", tmp_path / "out", "--format", form, *words) == FINISHED
    trained_to = load_file(place.checkpoints["full"] / "drafter.safetensors")
    exported = load_file(tmp_path / "out/model.safetensors")
    assert exported.keys() == trained_to.keys()
    assert len(exported) == 3 + 11 * 2
    for name, tensor in trained_to.items():
        # bfloat16 keeps the upper half of a float32, rounded to nearest, ties to even
        bits = tensor.view(torch.int32).long() & 0xFFFFFFFF
        nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).to(torch.int32).view(torch.float32)
        assert torch.equal(exported[name].float(), tensor if dtype else nearest)
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32 if dtype else torch.bfloat16}
    assert json_at(tmp_path / "out/config.json")["dtype"] == (dtype or "bfloat16")


@pytest.mark.parametrize(("name", "form"), [("mixed", "zlab"), ("sliding", "speculators")])
def test_a_warm_start_from_an_export_is_exact(place, tmp_path, name, form):
    assert run(place.checkpoints[name], "--out", tmp_path / "out", "--format", form, "--dtype", "float32") == FINISHED
    values = configuration.to_values(read_config(place.run_of(name)))
    values["drafter"]["init_from"] = str(tmp_path / "out")
    values["run"]["root"] = str(tmp_path / "runs")
    config = configuration.parse(values)
    started = set_up(config, create_run(config)).drafter.state_dict()
    trained_to = load_file(place.checkpoints[name] / "drafter.safetensors")
    assert started.keys() == trained_to.keys()
    assert all(torch.equal(started[key], tensor) for key, tensor in trained_to.items())


def test_it_goes_into_the_run_beside_the_checkpoints(place, capsys):
    for form, directory in (("zlab", "step-00000002"), ("speculators", "step-00000002-speculators")):
        out = place.run_of("full") / "export" / directory
        assert run(place.checkpoints["full"], "--format", form) == FINISHED
        assert sorted(path.name for path in out.iterdir()) == [
            "README.md",
            "SHA256SUMS",
            "config.json",
            "dflash.json",
            "model.safetensors",
        ]
        assert str(out) in capsys.readouterr().err
        shutil.rmtree(out.parent)


def test_the_sums_are_those_that_sha256sum_checks(place, tmp_path):
    run(place.checkpoints["full"], "--out", tmp_path / "out")
    lines = (tmp_path / "out/SHA256SUMS").read_text().splitlines()
    names = [line[66:] for line in lines]
    assert names == ["README.md", "config.json", "dflash.json", "model.safetensors"]
    for name, line in zip(names, lines, strict=True):
        digest = hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest()
        assert line == f"{digest}  {name}"
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path / "out", check=True)


def test_two_exports_of_one_checkpoint_are_the_same(place, tmp_path):
    for name in ("one", "two"):
        run(place.checkpoints["full"], "--out", tmp_path / name)
    one, two = ((tmp_path / name / "SHA256SUMS").read_text() for name in ("one", "two"))
    assert one == two


def test_the_record_holds_what_the_drafter_was_made_for_and_from(place, tmp_path):
    run(place.checkpoints["sliding"], "--out", tmp_path / "out")
    record, state = json_at(tmp_path / "out/dflash.json"), json_at(place.checkpoints["sliding"] / "state.json")
    assert record["target"] == state["target"]
    assert record["target"]["sha256"] == place.target.identity()["sha256"]
    assert record["drafter"] == state["shape"]
    assert record["drafter"]["target_layer_ids"] == [0, 2]
    assert record["data"]["digest"] == state["data"]
    assert record["checkpoint"]["step"] == 2
    assert record["checkpoint"]["path"] == str(place.checkpoints["sliding"])
    assert record["checkpoint"]["files"] == json_at(place.checkpoints["sliding"] / "manifest.json")
    assert record["code"] == json_at(place.run_of("sliding") / "provenance.json")["code"]
    assert record["config"]["optim"]["samples_per_step"] == 4
    # the recipe alone: no address or key of a server that answered prompts
    assert "regenerate" not in record["config"]
    template = json.dumps(place.target.tokenizer.chat_template).encode()
    assert record["tokenizer"]["chat_template_sha256"] == hashlib.sha256(template).hexdigest()


def test_the_scales_of_the_target_are_written(place, tmp_path, capsys):
    run(place.checkpoints["gemma"], "--out", tmp_path / "out")
    own = json_at(tmp_path / "out/config.json")["dflash_config"]
    assert own["input_embedding_scale"] == pytest.approx(32**0.5)
    assert "note: the target multiplies its embedding" in capsys.readouterr().err


def test_a_mixed_drafter_is_exported_with_a_warning(place, tmp_path, capsys):
    run(place.checkpoints["mixed"], "--out", tmp_path / "out")
    said = capsys.readouterr()
    assert "is_causal" not in json_at(tmp_path / "out/config.json")
    assert "llama.cpp" in said.err
    assert "\nVLLM_USE_V2_MODEL_RUNNER=1 vllm serve " in said.out


# -- the card --------------------------------------------------------------------------------------------------------


def card_of(directory: Path) -> tuple[dict, str]:
    """(front matter, text)."""
    _, front, text = (directory / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), text


def test_the_card_tells_target_data_recipe_and_that_nothing_was_measured(place, tmp_path):
    run(place.checkpoints["full"], "--out", tmp_path / "out")
    front, text = card_of(tmp_path / "out")
    state = json_at(place.checkpoints["full"] / "state.json")
    assert front == {"pipeline_tag": "text-generation", "tags": ["dflash", "speculative-decoding"]}, "no licence either"
    for fact in (
        state["target"]["sha256"],
        state["data"],
        str(place.root / "qwen3"),
        "step 2",
        "outputs of [0, 2] of 4",
        '"samples_per_step": 4',
        "Not measured",
    ):
        assert fact in text
    assert "| tau |" not in text


def test_the_card_shows_what_evaluate_measured_and_how(place, tmp_path):
    rows = [{"id": word, "messages": [{"role": "user", "content": word}]} for word in ("river", "storm")]
    prompts = write_jsonl(tmp_path / "few.jsonl", rows)
    measured = tmp_path / "measured.json"
    words = [str(place.checkpoints["full"]), "--target", str(place.root / "qwen3"), "--prompts", str(prompts)]
    assert evaluate([*words, "--evaluate.max_new_tokens", "12", "--out", str(measured)]) == FINISHED
    assert run(place.checkpoints["full"], "--out", tmp_path / "out", "--evaluation", measured) == FINISHED
    result, (_, text) = json_at(measured), card_of(tmp_path / "out")
    (name,) = result["sets"]
    low, high = result["sets"][name]["tau_interval"]
    assert f"| {name} | 2 | {result['sets'][name]['tau']:.3f} | {low:.3f} to {high:.3f} |" in text
    assert result["command"] in text
    assert "Not measured" not in text


def measurement(tmp_path, checkpoint, *, tau: float) -> Path:
    """A file as `python -m dflash.evaluate --out` writes it, of this checkpoint's drafter."""
    of = {"prompts": 3, "tau": tau, "tau_interval": [tau - 0.5, tau + 0.5]}
    drafter = {"path": "x", "step": 2, "weights_sha256": json_at(checkpoint / "manifest.json")[WEIGHTS]["sha256"]}
    path = tmp_path / f"tau-{tau}.json"
    path.write_text(json.dumps({"command": "measure it", "sets": {"few": of}, "overall": of, "drafter": drafter}))
    return path


def all_bytes(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_card_without_figures_is_given_them_and_nothing_else_of_the_export_changes(place, tmp_path):
    checkpoint, out = place.checkpoints["full"], tmp_path / "out"
    assert run(checkpoint, "--out", out) == FINISHED
    before, measured = all_bytes(out), measurement(tmp_path, checkpoint, tau=2.25)
    assert run("--describe", out, "--evaluation", measured) == FINISHED
    after = all_bytes(out)
    assert {name for name in after if after[name] != before.get(name)} == {"README.md", "SHA256SUMS"}
    assert "| few | 3 | 2.250 | 1.750 to 2.750 |" in after["README.md"].decode()
    sums = "".join(f"{hashlib.sha256(after[name]).hexdigest()}  {name}\n" for name in sorted(after) if name != SUMS)
    assert after[SUMS].decode() == sums
    assert run(checkpoint, "--out", tmp_path / "at-once", "--evaluation", measured) == FINISHED
    assert all_bytes(tmp_path / "at-once") == after  # as if it had been measured before


def test_a_card_that_has_figures_keeps_them_for_it_may_be_registered(place, tmp_path):
    checkpoint, out = place.checkpoints["full"], tmp_path / "out"
    assert run(checkpoint, "--out", out, "--evaluation", measurement(tmp_path, checkpoint, tau=2.25)) == FINISHED
    before = all_bytes(out)
    assert run("--describe", out, "--evaluation", measurement(tmp_path, checkpoint, tau=3.5)) == FINISHED
    assert all_bytes(out) == before


def test_a_card_is_not_given_the_figures_of_another_drafter(place, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(place.checkpoints["full"], "--out", out) == FINISHED
    before, others = all_bytes(out), measurement(tmp_path, place.checkpoints["sliding"], tau=2.25)
    assert run("--describe", out, "--evaluation", others) == REFUSED
    assert "measured another drafter (x, step 2)" in capsys.readouterr().err.splitlines()[-1]
    assert all_bytes(out) == before


# -- the commands ----------------------------------------------------------------------------------------------------


def test_the_last_thing_printed_serves_it_whatever_the_path(place, tmp_path, capsys):
    out = tmp_path / "a drafter's $(place)"
    run(place.checkpoints["full"], "--out", out)
    printed = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line and not line.startswith("#")]
    vllm, sglang = printed
    target = str(place.root / "qwen3")
    assert vllm[:4] == ["vllm", "serve", target, "--speculative-config"]
    assert json.loads(vllm[4]) == {"method": "dflash", "model": str(out), "num_speculative_tokens": 3}
    assert sglang == [
        *["python", "-m", "sglang.launch_server", "--model-path", target],
        *["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(out)],
        *["--speculative-num-draft-tokens", "4"],
    ]


def test_a_pinned_target_and_its_own_code_are_served_as_they_were_trained(place, tmp_path):
    run(place.checkpoints["full"], "--out", tmp_path / "out")
    record = json_at(tmp_path / "out/dflash.json")
    record["target"] |= {"name": "someone/target", "revision": "0123abc"}
    record["config"]["target"]["trust_remote_code"] = True
    for command in serving_commands(record, "out").values():
        words = shlex.split(command)
        assert "someone/target" in words
        assert words[words.index("--revision") + 1] == "0123abc"
        assert "--trust-remote-code" in words


def test_sglang_is_not_offered_a_form_that_it_does_not_read(place, tmp_path, capsys):
    run(place.checkpoints["full"], "--out", tmp_path / "out", "--format", "speculators")
    printed = capsys.readouterr().out
    assert "vllm serve" in printed
    assert "launch_server" not in printed


# -- what is unknown -------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_left_its_run_is_exported_and_says_what_is_unknown(place, tmp_path, capsys):
    copied = shutil.copytree(place.checkpoints["full"], tmp_path / "copied")
    assert run(copied) == REFUSED
    assert "--out is not set" in capsys.readouterr().err
    assert run(copied, "--out", tmp_path / "out") == FINISHED
    record, (_, text) = json_at(tmp_path / "out/dflash.json"), card_of(tmp_path / "out")
    assert (record["config"], record["code"]) == (None, None)
    assert record["data"] == {"digest": json_at(copied / "state.json")["data"]}
    assert "Unknown: the checkpoint was exported without its run" in text
    assert "note: the run of this checkpoint is not here" in capsys.readouterr().err
    assert verify(tmp_path / "out", place.target) == []


RECORDED = ("embedding_scale", "logit_scale", "logit_softcap", "tokenizer")


def rewritten(checkpoint: Path, place: Path, **target) -> Path:
    """A copy of a checkpoint whose target says other things of itself, and nothing of RECORDED but what is given here."""
    start = checkpoints.load(checkpoint)
    kept = {key: value for key, value in start.state["target"].items() if key not in RECORDED}
    checkpoints.write(
        place, checkpoints.Checkpoint(start.drafter, start.optimizer, start.state | {"target": kept | target})
    )
    return place


@pytest.mark.parametrize("now", ["gone", "retrained"])
def test_without_the_target_of_the_training_its_scales_and_tokenizer_are_unknown(place, tmp_path, caplog, capsys, now):
    if now == "retrained":
        tiny_target(tmp_path / "target", hidden=32, seed=1)
    checkpoint = rewritten(place.checkpoints["full"], tmp_path / "step-00000002", name=str(tmp_path / "target"))
    assert run(checkpoint, "--out", tmp_path / "out") == FINISHED
    record = json_at(tmp_path / "out/dflash.json")
    assert (record["scales"], record["tokenizer"]) == (None, None)
    assert "unknown" in caplog.text
    assert "note: whether the target scales its embedding" in capsys.readouterr().err
    assert "which one is unknown" in card_of(tmp_path / "out")[1]


def test_what_the_checkpoint_records_of_its_target_needs_no_target(place, tmp_path, caplog):
    tokenizer = {"vocabulary_sha256": "1" * 64, "chat_template_sha256": "2" * 64}
    recorded = {"embedding_scale": 3.0, "logit_scale": 0.5, "logit_softcap": 30.0, "tokenizer": tokenizer}
    checkpoint = rewritten(place.checkpoints["full"], tmp_path / "step-00000002", name="someone/gone", **recorded)
    assert run(checkpoint, "--out", tmp_path / "out") == FINISHED
    config = json_at(tmp_path / "out/config.json")
    assert config["dflash_config"]["input_embedding_scale"] == 3.0
    assert config["dflash_config"]["output_multiplier"] == config["logit_scale"] == 0.5
    assert config["dflash_config"]["final_logit_softcapping"] == 30.0
    assert json_at(tmp_path / "out/dflash.json")["tokenizer"] == tokenizer
    assert caplog.text == ""
    assert card_of(tmp_path / "out")[0]["base_model"] == "someone/gone"


# -- complete or absent ----------------------------------------------------------------------------------------------


def test_an_export_that_cannot_be_finished_leaves_nothing(place, tmp_path, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # as on a full disk; the weights are 50 KB
    try:
        code = run(place.checkpoints["full"], "--out", tmp_path / "export/out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == FAILED
    assert capsys.readouterr().err.splitlines()[-1].startswith("dflash: failed: ")
    assert list((tmp_path / "export").iterdir()) == []


def test_an_export_that_is_killed_while_it_writes_leaves_nothing_that_looks_finished(place, tmp_path):
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    command = [sys.executable, "-m", "dflash.export", str(place.checkpoints["full"]), "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        while not (partial.exists() or out.exists()):
            assert child.poll() is None
            time.sleep(0.002)
        child.kill()
    # killed in the very moment between the rename and the end it would be complete
    assert not out.exists() or verify(out, place.target) == []


def test_what_a_killed_export_left_is_cleared_by_the_next(place, tmp_path):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial/stray.safetensors").write_bytes(b"half")
    assert run(place.checkpoints["full"], "--out", tmp_path / "out") == FINISHED
    assert not (tmp_path / ".out.partial").exists()
    assert verify(tmp_path / "out", place.target) == []


def test_an_empty_directory_is_taken(place, tmp_path):
    (tmp_path / "out").mkdir()
    assert run(place.checkpoints["full"], "--out", tmp_path / "out") == FINISHED
    assert verify(tmp_path / "out", place.target) == []


# -- refused ---------------------------------------------------------------------------------------------------------


def torn(place, tmp_path):
    copied = shutil.copytree(place.checkpoints["full"], tmp_path / "step-00000002")
    os.truncate(copied / "drafter.safetensors", 1000)
    return [copied, "--out", tmp_path / "out"], "drafter.safetensors has 1000 bytes"


def not_finite(place, tmp_path):
    start = checkpoints.load(place.checkpoints["full"])
    start.drafter["norm.weight"][0] = float("nan")
    checkpoints.write(tmp_path / "step-00000002", start)
    return [tmp_path / "step-00000002", "--out", tmp_path / "out"], "norm.weight holds a value that is not finite"


def of_another_version(place, tmp_path):
    start = checkpoints.load(place.checkpoints["full"])
    start.state["shape"]["experts"] = 8
    checkpoints.write(tmp_path / "step-00000002", start)
    return [tmp_path / "step-00000002", "--out", tmp_path / "out"], "another version"


def full_out(place, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("keep me")
    return [place.checkpoints["full"], "--out", tmp_path / "out"], "is not empty"


def unwritable_out(place, tmp_path):
    return [place.checkpoints["full"], "--out", place.root / "data.jsonl/out"], "name a directory that can be written"


def of_another_drafter(place, tmp_path):
    measured = {"command": "x", "sets": {}, "overall": {"prompts": 1, "tau": 2.0, "tau_interval": [1.0, 3.0]}}
    measured["drafter"] = {"path": "runs/other/step-00000009", "step": 9, "weights_sha256": "0" * 64}
    (tmp_path / "other.json").write_text(json.dumps(measured))
    words = [place.checkpoints["full"], "--evaluation", tmp_path / "other.json", "--out", tmp_path / "out"]
    return words, "runs/other/step-00000009, step 9"


def written(text):
    def make(place, tmp_path):
        (tmp_path / "file.json").write_text(text)
        words = [place.checkpoints["full"], "--evaluation", tmp_path / "file.json", "--out", tmp_path / "out"]
        return words, "is not the JSON of python -m dflash.evaluate"

    return make


REFUSALS = {
    "nothing": lambda place, at: ([], "no checkpoint is named"),
    "no such path": lambda place, at: ([at / "gone"], "no such directory"),
    "a run": lambda place, at: ([place.run_of("full")], f"e.g. {place.checkpoints['full']}"),
    "its checkpoints": lambda place, at: ([place.run_of("full") / "checkpoints"], f"e.g. {place.checkpoints['full']}"),
    "a file": lambda place, at: ([place.root / "data.jsonl"], "is a file"),
    "a target": lambda place, at: ([place.root / "qwen3"], "is no checkpoint"),
    "an export": lambda place, at: ([place.good], "is an exported drafter"),
    "any directory": lambda place, at: ([at], "manifest.json is missing"),
    "a torn checkpoint": torn,
    "weights that are not finite": not_finite,
    "a checkpoint of another version": of_another_version,
    "a full directory": full_out,
    "out is a file": lambda place, at: ([place.checkpoints["full"], "--out", place.root / "data.jsonl"], "is a file"),
    "out under a file": unwritable_out,
    "unknown format": lambda place, at: ([place.checkpoints["full"], "--format", "gguf"], "gguf"),
    "unknown dtype": lambda place, at: ([place.checkpoints["full"], "--dtype", "float16"], "float16"),
    "unknown flag": lambda place, at: ([place.checkpoints["full"], "--license", "mit"], "--license"),
    "mixed layers for speculators": lambda place, at: (
        [place.checkpoints["mixed"], "--format", "speculators", "--out", at / "out"],
        "use --format zlab",
    ),
    "a scaled target for speculators": lambda place, at: (
        [place.checkpoints["gemma"], "--format", "speculators", "--out", at / "out"],
        "use --format zlab",
    ),
    "no such evaluation": lambda place, at: (
        [place.checkpoints["full"], "--evaluation", at / "gone.json", "--out", at / "out"],
        "No such file",
    ),
    "an evaluation that is no JSON": written("tau 5"),
    "an evaluation that is a list": written("[]"),
    "an evaluation without figures": written('{"sets": {"a": {}}, "overall": {}}'),
    "an evaluation of another drafter": of_another_drafter,
    "describe without an evaluation": lambda place, at: (["--describe", place.good], "--evaluation is not set"),
    "describe and verify at once": lambda place, at: (
        ["--describe", place.good, "--evaluation", at, "--verify", place.good],
        "give one of them",
    ),
    "describe of a checkpoint": lambda place, at: (
        ["--describe", place.checkpoints["full"], "--evaluation", at / "gone.json"],
        "checkpoint",
    ),
    "verify and export at once": lambda place, at: (
        [place.checkpoints["full"], "--verify", at, "--target", place.root / "qwen3"],
        "give one of them",
    ),
    "verify without a target": lambda place, at: (["--verify", place.good], "target.name is not set"),
    "verify of nothing": lambda place, at: (["--verify", at / "gone", "--target", "x"], "no such directory"),
    "verify of a checkpoint": lambda place, at: (
        ["--verify", place.checkpoints["full"], "--target", "x"],
        "checkpoint",
    ),
    "verify of a run": lambda place, at: (["--verify", place.run_of("full"), "--target", "x"], "no dflash_config"),
    "verify with no such target": lambda place, at: (
        ["--verify", place.good, "--target", at / "gone"],
        "no such directory",
    ),
}


@pytest.fixture(scope="module")
def good(place):
    """A good export."""
    place.good = place.root / "good"
    assert run(place.checkpoints["full"], "--out", place.good) == FINISHED
    return place.good


@pytest.mark.parametrize("make", REFUSALS.values(), ids=REFUSALS)
def test_what_a_user_can_get_wrong_is_one_line_and_leaves_all_as_it_was(place, good, tmp_path, capsys, make):
    arguments, words = make(place, tmp_path)
    before = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert run(*arguments) == REFUSED
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("dflash: ")
    assert words in last
    assert {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not (place.run_of("full") / "export").exists()


# -- verifying by the command ----------------------------------------------------------------------------------------


def test_verify_says_that_all_is_well(place, good, capsys):
    assert run("--verify", good, "--target", place.root / "qwen3") == FINISHED
    assert capsys.readouterr().out == f"{good}: no problem found\n"


def test_verify_prints_each_problem_and_counts_them_last(place, good, tmp_path, capsys):
    copied = shutil.copytree(good, tmp_path / "copied")
    config = json_at(copied / "config.json")
    config["dflash_config"]["target_layer_ids"] = [1, 2]
    del config["is_causal"]
    (copied / "config.json").write_text(json.dumps(config))
    assert run("--verify", copied, "--target", place.root / "qwen3") == FAILED
    said = capsys.readouterr()
    problems = [line for line in said.out.splitlines() if line.startswith("problem: ")]
    assert [problem.split()[2] for problem in problems] == ["is", "dflash_config.target_layer_ids", "is_causal"]
    assert said.err.splitlines()[-1] == f"dflash: 3 problems in {copied}"


def test_verify_compares_weights_in_the_dtype_of_the_training(place, good, tmp_path, capsys):
    """Asked for another one it says that it cannot."""
    words = ["--verify", good, "--target", place.root / "qwen3", "--target.dtype", "bfloat16"]
    assert run(*words) == FINISHED
    assert "cannot be compared" in capsys.readouterr().out


# -- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["checkpoint", "zlab", "speculators"])
def test_a_drafter_is_loaded_from_a_checkpoint_and_from_both_forms(place, tmp_path, kind):
    directory = place.checkpoints["sliding"]
    if kind != "checkpoint":
        directory = tmp_path / "out"
        run(place.checkpoints["sliding"], "--out", directory, "--format", kind, "--dtype", "float32")
    drafter, origin = load_drafter(directory, place.target)
    start = checkpoints.load(place.checkpoints["sliding"])
    assert all(torch.equal(tensor, start.drafter[name]) for name, tensor in drafter.state_dict().items())
    assert drafter.shape.sliding_window == 24
    assert drafter.shape.target_layer_ids == (0, 2)
    assert not drafter.training
    assert not any(parameter.requires_grad for parameter in drafter.parameters())
    manifest = json_at(place.checkpoints["sliding"] / "manifest.json")
    assert origin == {
        "kind": kind,
        "path": str(directory),
        "step": 2,
        "data": start.state["data"],
        "weights_sha256": manifest["drafter.safetensors"]["sha256"],
        "notes": [],
    }


def test_a_bfloat16_export_is_loaded_in_float32(place, good):
    drafter, _ = load_drafter(good, place.target)
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float32}


def test_a_foreign_export_is_loaded_by_its_config_alone(place, good, tmp_path):
    copied = shutil.copytree(good, tmp_path / "copied")
    for name in ("dflash.json", "SHA256SUMS", "README.md"):
        (copied / name).unlink()
    drafter, origin = load_drafter(copied, place.target)
    assert drafter.shape == load_drafter(good, place.target)[0].shape
    assert (origin["step"], origin["weights_sha256"]) == (None, None)
    assert "only layers, width and vocabulary" in origin["notes"][0]


def test_the_dtype_of_the_target_may_differ_and_is_said(place, good):
    rounded = place.load("qwen3", "bfloat16")
    for directory in (place.checkpoints["full"], good):
        _, origin = load_drafter(directory, rounded)
        assert "cannot be compared" in origin["notes"][0]


@pytest.fixture(scope="module")
def others(place):
    """Targets that the drafter was not trained for."""
    tiny_target(place.root / "retrained", hidden=32, seed=1)
    tiny_target(place.root / "wider", hidden=64)
    tiny_target(place.root / "deeper", hidden=32, layers=6)
    tiny_target(place.root / "llama", "llama", hidden=32)
    shutil.copytree(place.root / "qwen3", place.root / "other tokens")
    tiny_tokenizer(480).save_pretrained(place.root / "other tokens")
    return {name: place.load(name) for name in ("retrained", "wider", "deeper", "llama", "other tokens")}


WRONG = {
    "retrained": "has other weights",
    "wider": "64",
    "deeper": "6",
    "llama": "LlamaForCausalLM",
}


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
@pytest.mark.parametrize("name", WRONG)
def test_another_target_is_refused_in_one_line(place, good, others, name, kind):
    directory = {"checkpoint": place.checkpoints["full"], "export": good}[kind]
    with pytest.raises(ValueError, match=WRONG[name]) as refusal:
        load_drafter(directory, others[name])
    assert "\n" not in str(refusal.value)
    assert str(directory) in str(refusal.value)


def test_another_tokenizer_is_refused(good, others):
    with pytest.raises(ValueError, match="has other tokens than the one of the training"):
        load_drafter(good, others["other tokens"])


def test_an_edited_config_is_refused_by_its_key(place, good, tmp_path):
    copied = shutil.copytree(good, tmp_path / "copied")
    config = json_at(copied / "config.json")
    for change, words in (
        ({"rope_theta": None, "rope_parameters": None}, "rope_theta is missing"),
        ({"hidden_size": 64}, "hidden_size is 64, this target's is 32"),
        ({"dflash_config": config["dflash_config"] | {"target_layer_ids": [0, 3]}}, "target_layer_ids"),
        ({"dflash_config": config["dflash_config"] | {"input_embedding_scale": 8.0}}, "input_embedding_scale is 8"),
    ):
        (copied / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=words):
            load_drafter(copied, place.target)


def test_missing_tensors_are_refused_by_name(place, good, tmp_path):
    copied = shutil.copytree(good, tmp_path / "copied")
    tensors = load_file(copied / "model.safetensors")
    del tensors["layers.1.self_attn.k_norm.weight"]
    save_file(tensors, copied / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.k_norm\.weight is missing"):
        load_drafter(copied, place.target)


NO_DRAFTER = {
    "a run": lambda place, at: (place.run_of("full"), "e.g. .*step-00000002"),
    "an empty directory": lambda place, at: (at, "is not a drafter .config.json"),
    "a target": lambda place, at: (place.root / "qwen3", "is not a drafter .its config.json has no dflash_config"),
    "a torn checkpoint": lambda place, at: (torn(place, at)[0][0], "cannot be used"),
}


@pytest.mark.parametrize("make", NO_DRAFTER.values(), ids=NO_DRAFTER)
def test_what_is_no_drafter_is_refused_with_the_cause(place, tmp_path, make):
    directory, words = make(place, tmp_path)
    with pytest.raises(ValueError, match=words) as refusal:
        load_drafter(directory, place.target)
    assert "\n" not in str(refusal.value)
