"""llama.cpp, with its own converter: `python llamacpp.py REQUEST RESULT`, in its own environment.

Its loader is strict: it refuses a missing tensor and an unexpected one. The converter lies in `converter/` of the environment.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, f"{sys.prefix}/converter")
sys.path.insert(0, f"{sys.prefix}/converter/gguf-py")

import gguf
import xllamacpp
from conversion import get_model_class
from conversion.base import ModelBase

request = json.loads(Path(sys.argv[1]).read_text())
target, drafter = Path(request["target"]), Path(request["drafter"])
hparams = {directory: ModelBase.load_hparams(directory, False) for directory in (target, drafter)}
kinds = {directory: get_model_class(keys["architectures"][0]) for directory, keys in hparams.items()}


def set_vocab(model) -> None:
    """Token 17 is called <t17>, so that the server's text is a list of ids."""
    count = hparams[target]["vocab_size"]
    model.gguf_writer.add_tokenizer_model("gpt2")
    model.gguf_writer.add_tokenizer_pre("default")
    model.gguf_writer.add_token_list([f"<t{index}>" for index in range(count)])
    model.gguf_writer.add_token_types([gguf.TokenType.NORMAL] * count)
    model.gguf_writer.add_token_merges(["t 1"])  # must not be empty
    model.gguf_writer.add_eos_token_id(0)  # padding, which is never said
    model.gguf_writer.add_add_bos_token(False)


kinds[target].set_vocab = set_vocab  # a drafter's own calls it, and adds the mask token


def convert(directory: Path, out: Path, **more) -> None:
    """Writes a model as GGUF in float32."""
    kinds[directory](directory, gguf.LlamaFileType.ALL_F32, out, hparams=hparams[directory], **more).write()


with tempfile.TemporaryDirectory() as scratch:
    convert(target, Path(scratch, "target.gguf"))
    convert(drafter, Path(scratch, "drafter.gguf"), target_model_dir=target)

    options = xllamacpp.CommonParams()
    options.model.path = f"{scratch}/target.gguf"
    options.n_ctx, options.n_parallel, options.warmup = 1024, 1, False
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    speculative = options.speculative
    speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH]
    speculative.draft.mparams.path = f"{scratch}/drafter.gguf"
    speculative.draft.n_max = request["block_size"] - 1
    speculative.draft.p_min = 0.0  # every draft is verified, however uncertain
    for part in (options, speculative.draft):
        part.cache_type_k = part.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(options)

    tokens, steps = [], []
    for prompt in request["prompts"]:
        answer = server.handle_completions(
            {
                "prompt": prompt,
                "n_predict": request["new_tokens"],
                "temperature": 0.0,
                "top_k": 1,
                "ignore_eos": True,
                "cache_prompt": False,
                "stream": False,
            }
        )
        answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
        assert "timings" in answer, answer
        new = [int(number) for number in re.findall(r"<t(\d+)>", answer["choices"][0]["text"])]
        tokens.append(new)
        steps.append(len(new) - answer["timings"]["draft_n_accepted"] - 1)  # the first token comes with the prompt
result = {"tokens": tokens, "steps": steps, "missing": [], "unexpected": []}
Path(sys.argv[2]).write_text(json.dumps(result))
