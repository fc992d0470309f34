"""vLLM's CPU build: `python vllm_cpu.py REQUEST RESULT`, in its own environment. Both of our formats."""

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the correction below reaches the engine
}

import torch
from vllm import LLM, SamplingParams
from vllm.model_executor.models import qwen3_dflash


def normalize_context_k(self, keys):
    """RMS norm of the context keys [L, n, heads, D], each layer with its own weight.

    vLLM 0.32 gives its rms_norm the weights of all layers, [L, D]. The GPU kernel takes them so; the CPU kernel uses the
    first layer's for all, which only makes the drafts worse.
    """
    wide = keys.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._rms_norm_eps)
    return (wide * self._k_norm_weights.float()[:, None, None]).to(keys.dtype)


qwen3_dflash.DFlashQwen3Model._normalize_context_k = normalize_context_k

request = json.loads(Path(sys.argv[1]).read_text())
engine = LLM(
    model=request["target"],
    speculative_config={
        "method": "dflash",
        "model": request["drafter"],
        "num_speculative_tokens": request["block_size"] - 1,
    },
    dtype="float32",
    max_model_len=512,
    max_num_seqs=1,
    enforce_eager=True,
    enable_prefix_caching=False,
    skip_tokenizer_init=True,
    disable_log_stats=False,  # the only place where steps are counted
)


def drafts() -> int:
    """Draft-and-verify steps so far."""
    return sum(metric.value for metric in engine.get_metrics() if metric.name == "vllm:spec_decode_num_drafts")


sampling = SamplingParams(temperature=0, max_tokens=request["new_tokens"], ignore_eos=True, detokenize=False)
tokens, steps = [], []
for prompt in request["prompts"]:
    before = drafts()
    (output,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    tokens.append(list(output.outputs[0].token_ids))
    steps.append(drafts() - before)
Path(sys.argv[2]).write_text(json.dumps({"tokens": tokens, "steps": steps, "missing": [], "unexpected": []}))
