"""speculators, the vLLM project's library: `python speculators_library.py REQUEST RESULT`, in its own environment.

It decodes nothing. It converts an export of z-lab's form into its own (request: drafter, target, converted), and loads one
that we wrote in its form (request: exported), which must hold the same.
"""

import json
import sys
from pathlib import Path

import torch
from speculators import SpeculatorModel
from speculators.convert.entrypoints import convert_model

request = json.loads(Path(sys.argv[1]).read_text())
convert_model(
    model=request["drafter"],
    verifier=request["target"],
    algorithm="dflash",
    output_path=request["converted"],
    validate_device="cpu",
)


def weights(model: SpeculatorModel) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


model, loading = SpeculatorModel.from_pretrained(request["exported"], output_loading_info=True)
ours, theirs = (weights(SpeculatorModel.from_pretrained(request[key])) for key in ("exported", "converted"))
result = {
    "missing": sorted(loading["missing_keys"]),
    "unexpected": sorted(loading["unexpected_keys"]),
    "differ": sorted(name for name in ours.keys() | theirs.keys() if not torch.equal(ours[name], theirs[name])),
    "keys": {
        key: [json.loads(Path(request[form], "config.json").read_text()).get(key) for form in ("exported", "converted")]
        for key in (
            "block_size",
            "mask_token_id",
            "aux_hidden_state_layer_ids",
            "draft_vocab_size",
            "sample_from_anchor",
        )
    },
}
Path(sys.argv[2]).write_text(json.dumps(result))
