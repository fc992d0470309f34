"""z-lab's own client: `python zlab.py REQUEST RESULT`, in its own environment."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from dflash import DFlashDraftModel  # z-lab's: ours is not in this environment

request = json.loads(Path(sys.argv[1]).read_text())
target = AutoModelForCausalLM.from_pretrained(request["target"], dtype=torch.float32).eval()
drafter, loading = DFlashDraftModel.from_pretrained(request["drafter"], dtype=torch.float32, output_loading_info=True)

forwards = 0


def count(*_):
    global forwards
    forwards += 1


target.register_forward_pre_hook(count)
tokens, steps = [], []
for prompt in request["prompts"]:
    forwards = 0
    output = drafter.spec_generate(target, torch.tensor([prompt]), request["new_tokens"], stop_token_ids=None)
    tokens.append(output[0, len(prompt) :].tolist())
    steps.append(forwards - 1)  # the first one reads the prompt
result = {
    "tokens": tokens,
    "steps": steps,
    "missing": sorted(loading["missing_keys"]),
    "unexpected": sorted(loading["unexpected_keys"]),
}
Path(sys.argv[2]).write_text(json.dumps(result))
