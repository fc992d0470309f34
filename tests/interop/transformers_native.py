"""transformers' own DFlash decoding: `python transformers_native.py REQUEST RESULT`, in its own environment.

It reads another format than ours, so the weights get its names and the configuration its keys; the computation is its own.
Its sliding layers are never causal inside the block: full attention only.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

SAME_KEYS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "layer_types",
    "rope_parameters",
    "block_size",
]
OTHER_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}

request = json.loads(Path(sys.argv[1]).read_text())
directory = Path(request["drafter"])
exported = json.loads((directory / "config.json").read_text())
assert set(exported["layer_types"]) == {"full_attention"}
drafter = MuseGlimmerAssistantModel(
    MuseGlimmerAssistantConfig(
        **{key: exported[key] for key in SAME_KEYS},
        **{key: exported["dflash_config"][key] for key in ("mask_token_id", "target_layer_ids")},
    )
).eval()
weights = load_file(directory / "model.safetensors")
loading = drafter.load_state_dict({OTHER_NAMES.get(name, name): weights[name] for name in weights}, strict=False)
target = AutoModelForCausalLM.from_pretrained(request["target"], dtype=torch.float32).eval()

forwards = 0


def count(*_):
    global forwards
    forwards += 1


target.register_forward_pre_hook(count)
tokens, steps = [], []
for prompt in request["prompts"]:
    forwards, ids = 0, torch.tensor([prompt])
    output = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=drafter,
        speculation_type="dflash",
        max_new_tokens=request["new_tokens"],
        do_sample=False,
        eos_token_id=None,
    )
    tokens.append(output[0, len(prompt) :].tolist())
    steps.append(forwards - 1)  # the first one reads the prompt
result = {
    "tokens": tokens,
    "steps": steps,
    "missing": sorted(loading.missing_keys),
    "unexpected": sorted(loading.unexpected_keys),
}
Path(sys.argv[2]).write_text(json.dumps(result))
