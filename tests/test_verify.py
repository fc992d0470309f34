"""Every fault that an engine would load in silence is planted in a real export, found, and named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_target, tiny_tokenizer
from trained import MIXED, SLIDING, trained

from dflash.export import export
from dflash.target import load_target
from dflash.verify import examine, verify


class Place:
    """Exports of trained drafters, by name, and their targets."""

    def __init__(self, root: Path):
        self.root = root
        kinds = {"full": {}, "sliding": SLIDING, "mixed": MIXED}
        self.checkpoints = {name: trained(root, **drafter) for name, drafter in kinds.items()}
        self.checkpoints["gemma"] = trained(root, "gemma3")
        self.exports = {}
        for name, checkpoint in self.checkpoints.items():
            self._export(name, checkpoint, "zlab")
        for name in ("full", "sliding"):
            self._export(f"{name} speculators", self.checkpoints[name], "speculators")
        self.targets = {family: self.target(family) for family in ("qwen3", "gemma3")}

    def _export(self, name, checkpoint, form):
        self.exports[name] = self.root / "exports" / name
        export(checkpoint, self.exports[name], format=form, dtype="float32")

    def target(self, name: str):
        return load_target(str(self.root / name), dtype="float32", device="cpu", captured_layers=1)

    def target_of(self, name: str):
        return self.targets["gemma3" if name == "gemma" else "qwen3"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("verify"))


@pytest.fixture
def copy(place, tmp_path):
    """A copy of an export; without its record it is one of somebody else's."""

    def make(name: str = "full", *, foreign: bool = False) -> Path:
        directory = tmp_path / "drafter"
        shutil.copytree(place.exports[name], directory)
        if foreign:
            for file in ("dflash.json", "SHA256SUMS", "README.md"):
                (directory / file).unlink()
        return directory

    return make


def edit(directory: Path, change) -> None:
    """Changes config.json in place."""
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))


def edit_tensors(directory: Path, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["full", "sliding", "mixed", "gemma", "full speculators", "sliding speculators"])
def test_an_export_has_no_problem_and_a_foreign_one_of_the_same_content_neither(place, copy, name):
    found = examine(place.exports[name], place.target_of(name))
    assert found.problems == []
    foreign = examine(copy(name, foreign=True), place.target_of(name))
    assert foreign.problems == []
    said = "\n".join(foreign.notes)
    assert "no dflash.json" in said
    assert "no SHA256SUMS" in said
    assert ("mixed" in "\n".join(found.notes)) == (name == "mixed")
    assert ("embedding" in "\n".join(found.notes)) == (name == "gemma")


# fault: what is done to config.json, words of the line that names it. Each is found without any record of the export.
FAULTS = {
    "no rope base": (
        lambda c: [c.pop(key) for key in ("rope_theta", "rope_parameters", "rope_scaling")],
        ["rope_theta", "is missing", "10000"],
    ),
    "rope base in the new spelling alone": (lambda c: c.pop("rope_theta"), ["rope_theta", "transformers 4"]),
    "two rope bases": (lambda c: c.update(rope_theta=10000.0), ["rope_theta", "10000.0", "1000000.0"]),
    "scaled rope": (lambda c: c.update(rope_scaling={"type": "linear", "factor": 2}), ["rope_scaling", "linear"]),
    "last layer": (lambda c: c["dflash_config"].update(target_layer_ids=[1, 3]), ["target_layer_ids", "[1, 3]"]),
    "layer out of range": (lambda c: c["dflash_config"].update(target_layer_ids=[1, 9]), ["target_layer_ids", "9"]),
    "one layer too many": (lambda c: c["dflash_config"].update(target_layer_ids=[0, 1, 2]), ["fc.weight", "[32, 96]"]),
    "no layer ids": (lambda c: c["dflash_config"].pop("target_layer_ids"), ["target_layer_ids", "is missing"]),
    "keys at the top alone": (
        lambda c: c.update(c["dflash_config"], dflash_config={}),
        ["dflash_config.mask_token_id", "is missing", "outside"],
    ),
    "no mask token": (lambda c: c["dflash_config"].pop("mask_token_id"), ["mask_token_id", "is missing"]),
    "mask token past the embedding": (
        lambda c: c["dflash_config"].update(mask_token_id=512),
        ["mask_token_id", "512", "rows 0 to 511"],
    ),
    "mask token is pad": (lambda c: c["dflash_config"].update(mask_token_id=0), ["mask_token_id", "pad token"]),
    "mask token is eos": (lambda c: c["dflash_config"].update(mask_token_id=2), ["mask_token_id", "eos token"]),
    "mask token is text": (lambda c: c["dflash_config"].update(mask_token_id=70), ["mask_token_id", "ordinary token"]),
    "two block sizes": (lambda c: c.update(block_size=8), ["block_size", "8", "4"]),
    "no block size": (lambda c: [c.pop("block_size"), c["dflash_config"].pop("block_size")], ["block_size", "16"]),
    "other architecture": (
        lambda c: c.update(architectures=["Qwen3DFlashModel"]),
        ["architectures", "DFlashDraftModel"],
    ),
    "no architecture": (lambda c: c.pop("architectures"), ["architectures", "None"]),
    "the target's model type": (lambda c: c.update(model_type="llama"), ["model_type", "llama"]),
    "no number of target layers": (lambda c: c.pop("num_target_layers"), ["num_target_layers", "is missing"]),
    "other number of target layers": (lambda c: c.update(num_target_layers=6), ["num_target_layers", "6", "4"]),
    "causal full layers": (lambda c: c.update(is_causal=True), ["is_causal", "True"]),
    "causal for vLLM": (lambda c: c["dflash_config"].update(causal=True), ["dflash_config.causal", "True"]),
    "too few layer types": (lambda c: c.update(layer_types=["full_attention"]), ["layer_types", "2 layers"]),
    "other width": (lambda c: c.update(hidden_size=64), ["hidden_size", "64", "32"]),
    "other vocabulary": (lambda c: c.update(vocab_size=500), ["vocab_size", "500", "512"]),
    "other head width": (lambda c: c.update(head_dim=32), ["q_proj.weight", "[64, 32]", "[128, 32]"]),
    "too few positions": (
        lambda c: c.update(max_position_embeddings=2048),
        ["max_position_embeddings", "2048", "8192"],
    ),
    "other epsilon": (lambda c: c.update(rms_norm_eps=1e-5), ["rms_norm_eps", "1e-05"]),
    "a scale that the target has not": (
        lambda c: c["dflash_config"].update(input_embedding_scale=8.0),
        ["input_embedding_scale", "8", "1"],
    ),
    "a cap that the target has not": (
        lambda c: c["dflash_config"].update(final_logit_softcapping=30.0),
        ["final_logit_softcapping", "30"],
    ),
    "other dtype": (lambda c: c.update(dtype="bfloat16"), ["float32", "bfloat16"]),
}
# found in an export of ours, whose dflash.json says what was trained
FAULTS_BY_RECORD = {
    "layer ids one too high": (
        lambda c: c["dflash_config"].update(target_layer_ids=[1, 2]),
        ["dflash_config.target_layer_ids", "[1, 2]", "[0, 2]"],
    ),
    "other mask token": (lambda c: c["dflash_config"].update(mask_token_id=505), ["mask_token_id", "505", "504"]),
    "other block size": (
        lambda c: [c.update(block_size=8), c["dflash_config"].update(block_size=8)],
        ["block_size", "8", "4"],
    ),
    "other rope base": (
        lambda c: [c.update(rope_theta=5e5), c["rope_parameters"].update(rope_theta=5e5)],
        ["rope_theta", "500000.0", "1000000.0"],
    ),
    "rope base in the old spelling alone": (lambda c: c.pop("rope_parameters"), ["rope_parameters", "is missing"]),
    "no causality": (lambda c: c.pop("is_causal"), ["is_causal", "is missing", "False"]),
    "other heads": (
        lambda c: c.update(num_attention_heads=2, head_dim=32, num_key_value_heads=1),
        ["num_attention_heads", "2", "4"],
    ),
    "an extra key": (lambda c: c.update(quantization_config={"bits": 4}), ["quantization_config.bits", "4"]),
}
FAULTS_OF_SLIDING = {
    "window switched off": (lambda c: c.update(use_sliding_window=False), ["use_sliding_window", "not true"]),
    "no window": (lambda c: c.update(sliding_window=None), ["sliding_window", "2 layers slide"]),
    "no causality": (lambda c: c.pop("is_causal"), ["is_causal", "is missing", "llama.cpp"]),
    "bidirectional": (lambda c: c.update(is_causal=False), ["is_causal", "False"]),
}
FAULTS_OF_MIXED = {
    "one causality for all": (lambda c: c.update(is_causal=True), ["is_causal", "True"]),
    "the other for all": (lambda c: c.update(is_causal=False), ["is_causal", "False"]),
}
FAULTS_OF_GEMMA = {
    "no embedding scale": (
        lambda c: c["dflash_config"].pop("input_embedding_scale"),
        ["input_embedding_scale", "is 1", "5.65685"],
    ),
}
FAULTS_OF_SPECULATORS = {
    "layer ids of z-lab": (lambda c: c.update(aux_hidden_state_layer_ids=[0, 2]), ["aux_hidden_state_layer_ids", "-1"]),
    "no mask token": (lambda c: c.pop("mask_token_id"), ["mask_token_id", "is missing"]),
    "no rope base": (
        lambda c: [c["transformer_layer_config"].pop(key) for key in ("rope_theta", "rope_parameters")],
        ["transformer_layer_config.rope_theta", "is missing"],
    ),
    "vLLM takes full layers for causal": (
        lambda c: [c.update(sliding_window_non_causal=False), c["transformer_layer_config"].pop("is_causal")],
        ["transformer_layer_config.is_causal", "vLLM"],
    ),
    "reduced vocabulary": (lambda c: c.update(draft_vocab_size=400), ["draft_vocab_size", "400", "512"]),
    "predicts from the anchor": (lambda c: c.update(sample_from_anchor=True), ["sample_from_anchor", "True"]),
    "other number of drafted tokens": (
        lambda c: c["speculators_config"]["proposal_methods"][0].update(speculative_tokens=4),
        ["speculators_config.proposal_methods", "4", "3"],
    ),
    "no target": (
        lambda c: c["speculators_config"].pop("verifier"),
        ["speculators_config.verifier", "names no target"],
    ),
    "other algorithm": (lambda c: c.update(speculators_model_type="eagle3"), ["speculators_model_type", "eagle3"]),
}
TABLES = {
    "full": FAULTS,
    "sliding": FAULTS_OF_SLIDING,
    "mixed": FAULTS_OF_MIXED,
    "gemma": FAULTS_OF_GEMMA,
    "full speculators": FAULTS_OF_SPECULATORS,
}
PLANTED = [(name, *fault) for name, faults in TABLES.items() for fault in faults.values()]
IDS = [f"{name}: {fault}" for name, faults in TABLES.items() for fault in faults]


@pytest.mark.parametrize("foreign", [True, False], ids=["foreign", "ours"])
@pytest.mark.parametrize(("name", "change", "words"), PLANTED, ids=IDS)
def test_a_fault_of_the_config_is_found_and_named(place, copy, name, change, words, foreign):
    directory = copy(name, foreign=foreign)
    edit(directory, change)
    problems = verify(directory, place.target_of(name))
    if not foreign and words[-1] == "ordinary token":  # the record vouches, for another id
        words = ["mask_token_id", "70", "504"]
    assert any(all(word in problem for word in words) for problem in problems), problems
    assert all("\n" not in problem for problem in problems)


@pytest.mark.parametrize(("change", "words"), FAULTS_BY_RECORD.values(), ids=FAULTS_BY_RECORD)
def test_what_only_the_training_knows_is_found_by_the_record(place, copy, change, words):
    directory = copy()
    edit(directory, change)
    (directory / "SHA256SUMS").unlink()
    problems = verify(directory, place.target_of("full"))
    assert any(all(word in problem for word in words) for problem in problems), problems
    assert "dflash.json" in "".join(problems)


def test_layer_ids_one_too_low_are_found_in_speculators_form(place, copy):
    directory = copy("full speculators")
    edit(directory, lambda c: c.update(aux_hidden_state_layer_ids=[2, 3]))
    (directory / "SHA256SUMS").unlink()
    assert verify(directory, place.target_of("full")) == [
        "config.json: aux_hidden_state_layer_ids is [2, 3]; the drafter was exported with [1, 3] (dflash.json)"
    ]


def rename(old: str, new: str):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


TENSOR_FAULTS = {
    "missing": (lambda t: t.pop("hidden_norm.weight"), ["hidden_norm.weight", "is missing"]),
    "renamed": (
        rename("layers.1.mlp.up_proj.weight", "layers.1.mlp.w3.weight"),
        ["layers.1.mlp.up_proj.weight is missing", "layers.1.mlp.w3.weight", "renamed"],
    ),
    "extra": (lambda t: t.update({"embed_tokens.weight": torch.ones(512, 32)}), ["embed_tokens.weight", "not part"]),
    "misshapen": (lambda t: t.update({"fc.weight": torch.ones(32, 32)}), ["fc.weight", "[32, 32]", "[32, 64]"]),
    "prefixed": (
        lambda t: [t.update({f"model.{name}": t.pop(name)}) for name in list(t)],
        ["every name begins with model."],
    ),
    "not a number": (lambda t: t["norm.weight"].fill_(float("nan")), ["norm.weight", "not finite"]),
    "infinite": (lambda t: t["fc.weight"][0].fill_(float("inf")), ["fc.weight", "not finite"]),
    "zero": (lambda t: t["layers.0.self_attn.v_proj.weight"].zero_(), ["v_proj.weight", "zero everywhere"]),
    "of another dtype": (
        lambda t: t.update({"norm.weight": t["norm.weight"].to(torch.float16)}),
        ["float16, float32"],
    ),
    "all of another dtype": (
        lambda t: t.update({name: tensor.to(torch.bfloat16) for name, tensor in t.items()}),
        ["bfloat16", "float32"],
    ),
    "of a layer less": (lambda t: [t.pop(name) for name in list(t) if name.startswith("layers.1.")], ["layers.1."]),
}


@pytest.mark.parametrize("name", ["full", "full speculators"])
@pytest.mark.parametrize(("change", "words"), TENSOR_FAULTS.values(), ids=TENSOR_FAULTS)
def test_a_fault_of_the_tensors_is_found_and_named(place, copy, name, change, words):
    directory = copy(name, foreign=True)
    edit_tensors(directory, change)
    problems = verify(directory, place.target_of(name))
    assert any(all(word in problem for word in words) for problem in problems), problems
    assert all(problem.startswith("model.safetensors: ") for problem in problems), problems


def test_a_damaged_or_missing_file_of_tensors_is_a_problem(place, copy):
    directory = copy(foreign=True)
    whole = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(whole[:-100])
    assert "damaged" in verify(directory, place.target_of("full"))[0]
    (directory / "model.safetensors").unlink()
    assert "No such file" in verify(directory, place.target_of("full"))[0]


def test_one_changed_bit_is_found_by_the_sums(place, copy):
    directory = copy()
    edit_tensors(directory, lambda t: t["norm.weight"].mul_(1.0001))
    (problem,) = verify(directory, place.target_of("full"))
    assert problem.startswith("model.safetensors is not the file that was exported")


def test_a_missing_file_and_one_that_engines_would_read_are_problems_and_others_notes(place, copy):
    directory = copy()
    (directory / "README.md").unlink()
    (directory / "mask_embedding.pt").write_bytes(b"")
    (directory / "adapter.safetensors").write_bytes(b"")
    (directory / "notes.txt").write_text("ours")
    found = examine(directory, place.target_of("full"))
    assert [problem.split()[0].rstrip(":") for problem in found.problems] == [
        "README.md",
        "adapter.safetensors",
        "mask_embedding.pt",
    ]
    assert any(note.startswith("notes.txt") for note in found.notes)


def test_a_card_with_a_licence_in_it_is_no_problem(place, copy):
    directory = copy()
    with open(directory / "README.md", "a") as card:
        card.write("license: mit\n")
    found = examine(directory, place.target_of("full"))
    assert found.problems == []
    assert any("README.md" in note for note in found.notes)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"drafter": {}}'])
def test_a_damaged_record_is_a_problem(place, copy, text):
    directory = copy()
    (directory / "dflash.json").write_text(text)
    problems = verify(directory, place.target_of("full"))
    assert any(problem.startswith("dflash.json is damaged") for problem in problems)


def test_a_target_of_other_weights_is_found_by_the_record_alone(place, copy, tmp_path):
    tiny_target(tmp_path / "other", hidden=32, seed=1)
    other = load_target(str(tmp_path / "other"), dtype="float32", device="cpu", captured_layers=1)
    (problem,) = verify(place.exports["full"], other)
    assert "other weights" in problem
    assert str(tmp_path / "other") in problem
    assert verify(copy(foreign=True), other) == []


def test_a_target_of_another_architecture_is_named(place, tmp_path):
    tiny_target(tmp_path / "llama", "llama", hidden=32)
    llama = load_target(str(tmp_path / "llama"), dtype="float32", device="cpu", captured_layers=1)
    (problem,) = verify(place.exports["full"], llama)
    assert "Qwen3ForCausalLM" in problem
    assert "LlamaForCausalLM" in problem


def test_a_target_in_another_dtype_is_said_to_be_compared_by_its_sizes(place):
    rounded = load_target(str(place.root / "qwen3"), dtype="bfloat16", device="cpu", captured_layers=1)
    found = examine(place.exports["full"], rounded)
    assert found.problems == []
    assert any("bfloat16" in note and "cannot be compared" in note for note in found.notes)


def test_another_tokenizer_and_another_chat_template_are_told_apart(place, tmp_path):
    for name, tokenizer in (
        ("tokens", tiny_tokenizer(480)),
        ("template", tiny_tokenizer(chat_template="{{ messages[0]['content'] }}")),
    ):
        shutil.copytree(place.root / "qwen3", tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        target = load_target(str(tmp_path / name), dtype="float32", device="cpu", captured_layers=1)
        problems = verify(place.exports["full"], target)
        expected = {"tokens": "has other tokens", "template": "the chat template of"}[name]
        assert any(expected in problem for problem in problems), problems


JUNK = [None, True, -1, "", ["a"], {}]


@pytest.mark.parametrize("name", ["sliding", "sliding speculators"])
def test_no_change_of_any_key_goes_unnoticed(place, copy, name):
    directory = copy(name)
    (directory / "SHA256SUMS").unlink()
    whole = json.loads((directory / "config.json").read_text())
    paths = [(key,) for key in whole]
    paths += [(key, inner) for key, section in whole.items() if isinstance(section, dict) for inner in section]
    for path in paths:
        for junk in JUNK:
            config = json.loads(json.dumps(whole))
            section = config if len(path) == 1 else config[path[0]]
            if section[path[-1]] == junk:
                continue
            section[path[-1]] = junk
            (directory / "config.json").write_text(json.dumps(config))
            try:
                problems = verify(directory, place.target_of(name))
            except ValueError as error:  # no drafter's config at all
                problems = [str(error)]
            assert problems, (path, junk)


@pytest.mark.parametrize("what", ["nothing", "checkpoint", "run", "file"])
def test_what_is_no_export_is_refused(place, tmp_path, what):
    checkpoint = place.checkpoints["full"]
    path, words = {
        "nothing": (tmp_path / "gone", "no such directory"),
        "checkpoint": (checkpoint, "is a checkpoint"),
        "run": (checkpoint.parent.parent, "no dflash_config"),
        "file": (place.root / "data.jsonl", "no such directory"),
    }[what]
    with pytest.raises(ValueError, match=words) as refusal:
        verify(path, place.target_of("full"))
    assert str(path) in str(refusal.value)
