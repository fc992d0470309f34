"""A real OpenAI-compatible server for the tests: llama.cpp's, from the package xllamacpp, in a process of its own.

`with LlamaServer(gguf) as server:` listens at server.url until `server.kill()` or the end; `to_gguf(target, gguf)` makes its file
of a tiny target of the llama family.
"""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

NAMES = {  # transformers' of a layer's tensors and llama.cpp's
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
START_SECONDS = 60


def to_gguf(target: Path, path: Path, *, chat_template: str | None = None) -> Path:
    """`path`, now holding the tiny llama target of a directory in float32, with its tokenizer and its, or another, template."""
    config = json.loads((target / "config.json").read_text())
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    vocabulary = config["vocab_size"]
    tokens = {id: token for token, id in tokenizer["model"]["vocab"].items()}
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    kinds = gguf.TokenType
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(vocabulary)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")  # its pattern is that of tokenizers' ByteLevel
    writer.add_token_list([tokens.get(id, f"[unused{id}]") for id in range(vocabulary)])
    writer.add_token_types(
        [kinds.CONTROL if id in special else kinds.NORMAL if id in tokens else kinds.UNUSED for id in range(vocabulary)]
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(chat_template or (target / "chat_template.jinja").read_text())
    for name, tensor in load_file(target / "model.safetensors").items():
        outer = OUTER_NAMES.get(name.removesuffix(".weight"))
        if outer is None:
            _, _, layer, inner = name.removesuffix(".weight").split(".", 3)
            outer = f"blk.{layer}.{NAMES[inner]}"
            if inner in ("self_attn.q_proj", "self_attn.k_proj"):
                tensor = _interleaved(tensor, config["head_dim"])
        writer.add_tensor(f"{outer}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleaved(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head for a rotation of neighbours (llama.cpp) instead of halves (transformers)."""
    halves = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


class LlamaServer:
    """A server of a GGUF file; `port` 0 takes a free one, `sampling` are its defaults in the words of xllamacpp."""

    def __init__(self, model: Path, *, port: int = 0, slots: int = 4, key: str = "", **sampling: float):
        command = [sys.executable, __file__, str(model), str(port), str(slots), key, json.dumps(sampling)]
        self._log = open(model.with_suffix(".log"), "ab")  # noqa: SIM115
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._log)
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], START_SECONDS)
        line = self.process.stdout.readline().decode().strip() if ready else ""
        if not line:
            self.kill()
            raise RuntimeError(f"llama.cpp's server did not start, see {self._log.name}")
        self.url = line

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        """The server is gone, as after a power cut."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()

    def __enter__(self) -> "LlamaServer":
        return self

    def __exit__(self, *_) -> None:
        if self.process.returncode is None:
            self.kill()


def _serve(model: str, port: str, slots: str, key: str, sampling: str) -> None:
    import xllamacpp as llama

    params = llama.CommonParams()
    params.model.path = model
    params.model_alias = {"tiny"}
    params.port = int(port)
    params.api_keys = [key] if key else []
    params.n_parallel, params.n_ctx, params.n_threads_http = int(slots), int(slots) * 512, 16
    for name, value in json.loads(sampling).items():
        setattr(params.sampling, name, value)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32  # greedy replies as those of transformers
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.warmup = params.fit_params = False
    server = llama.Server(params)
    print(server.listening_address, flush=True)
    parent = os.getppid()
    while os.getppid() == parent:  # a server must not outlive its test
        time.sleep(0.5)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
