"""The files of a target that decide a stage, hashed without loading anything."""

from pathlib import Path

from dflash.config import TargetConfig
from dflash.files import sha256_of, sha256_of_json

TOKENIZER = ("tokenizer*", "chat_template*", "special_tokens*", "added_tokens*", "vocab*", "merges*", "*.model")
CODE = ("*.py",)  # of a target with code of its own
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json")


def tokenizer_digest(target: TargetConfig) -> str:
    """Of the files that tokenizer and chat template are made of."""
    return _digest(target, (*TOKENIZER, *CODE, "config.json"))


def target_digest(target: TargetConfig) -> str:
    """Of everything: weights, tokenizer, configuration."""
    return _digest(target, (*TOKENIZER, *CODE, *WEIGHTS))


def _digest(target: TargetConfig, patterns: tuple[str, ...]) -> str:
    """Of a local directory, the content of its files; of a hub's model, of the files in the revision that it stands at."""
    directory = Path(target.name)
    if not directory.is_dir():
        directory = _from_hub(target, patterns)
    files = sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()})
    if not files:
        raise ValueError(f"target.name={target.name}: {directory} holds no model; name one, or a model on the hub")
    return sha256_of_json({path.name: sha256_of(path) for path in files})


def _from_hub(target: TargetConfig, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(target.name, revision=target.revision, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"target.name={target.name}: neither a directory nor a model that the hub gives "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); check the name, or the network"
        ) from None
