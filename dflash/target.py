"""The frozen target: tokens -> features; its embedding and head; the proof that both are what they claim to be.

Letters: B samples of a group, S tokens of a sample, K captured layers, H target width, V vocabulary, N decoder layers.
"""

import hashlib
import json
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from dflash.config import TargetConfig, names_local_directory
from dflash.shape import chosen_layers

PROOF_TOKENS = (33, 21, 8)  # S of each probe: different, so that a group of them is padded
# Largest mean difference of two ways to one vector, relative to its norm. Rounding alone reaches 1e-6 in float32 and
# 1e-2 in bfloat16 (SmolLM2, 30 layers); a leak of padding, a wrong layer or a missing scale is 0.1 or more.
# In float64 too, for models round to float32 inside: every norm, and the softmax of eager attention.
PROOF_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05}
IDENTITY_VALUES = 1024  # values per tensor that identity() hashes: milliseconds for an 8B target


class _Captured(Exception):
    """Leaves a forward once its highest captured layer has run."""


class _Capture(threading.local):
    """What this thread is capturing into; None in every other thread, whose forwards then pass the hooks untouched."""

    features: list[Tensor] | None = None


@dataclass(frozen=True, eq=False)
class Target:
    """A frozen causal LM, with what a drafter needs of it; made by `load_target`. Safe to use from several threads."""

    name: str
    revision: str | None
    """The commit, where the hub gave one."""
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    decoder: nn.Module = field(repr=False)
    """The text backbone, without the head."""
    layers: nn.ModuleList = field(repr=False)
    layer_ids: list[int]
    """Captured layers, ascending: id i is the output of decoder layer i, Hugging Face's hidden_states[i + 1]."""
    embedding_weight: Tensor = field(repr=False)
    """[V, H], the raw rows: the target's input is `embedding_scale` times them."""
    head_weight: Tensor = field(repr=False)
    """[V, H]; the same memory as the embedding where they are tied."""
    head_bias: Tensor | None = field(repr=False)
    """[V], where the head has one."""
    embedding_scale: float
    """What the target multiplies an embedding row by (Gemma: sqrt(H)); 1.0 where it does not."""
    logit_scale: float
    """What the head's output is multiplied by (Cohere, Granite), before the soft cap; 1.0 where it is not."""
    logit_softcap: float | None
    """c of c tanh(logits / c) (Gemma 2), or None."""
    _capture: _Capture = field(default_factory=_Capture, repr=False)

    @property
    def width(self) -> int:
        """H."""
        return self.embedding_weight.shape[1]

    @property
    def vocabulary(self) -> int:
        """V, the rows of the embedding: often more than the tokenizer has tokens."""
        return self.embedding_weight.shape[0]

    @property
    def num_layers(self) -> int:
        """N."""
        return len(self.layers)

    @property
    def device(self) -> torch.device:
        """Where tokens go in and features come out."""
        return self.embedding_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_weight.dtype

    def features(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        """The captured states of a group: for tokens of [S_i] each, [S_i, K*H] on the target's device.

        One forward of the backbone over the right-padded group, left after the highest captured layer. No attention
        mask is passed: a causal model's real tokens come before the padding and cannot see it, and without a mask
        the fastest attention kernels apply and no [S, S] mask is built. `prove` checks this on the model at hand.

        Nothing here waits for a GPU: the result is ready when the current stream gets there. (transformers itself
        reads one flag per forward, before the first layer.) The tensors are ordinary ones, constants to autograd:
        they are allocated before the forward. That runs under no_grad and not in inference mode, which would mark
        whatever a model caches on the way (rotary tables for a longer sequence) as unusable to other threads.
        """
        padded_BS = _right_padded(tokens, self.device)
        size = len(self.layer_ids) * self.width
        features = [torch.empty(len(row), size, dtype=self.dtype, device=self.device) for row in tokens]
        self._capture.features = features
        try:
            with torch.no_grad():
                self.decoder(input_ids=padded_BS, use_cache=False)
        except _Captured:
            return features
        finally:
            self._capture.features = None
        raise AssertionError("the highest captured layer did not run in the backbone's forward")

    def _hook_layers(self) -> None:
        """Let every captured layer copy its output into the features of the thread that captures."""

        def keep(slot: int, output: Any) -> None:
            if self._capture.features is None:
                return
            state_BSH = output[0] if isinstance(output, tuple) else output
            # copied at once: the padded state is free again, and a later layer that adds in place changes nothing
            for state, feature in zip(state_BSH, self._capture.features, strict=True):
                columns = feature[:, slot * self.width : (slot + 1) * self.width]
                columns.copy_(state[: len(feature)], non_blocking=True)
            if slot == len(self.layer_ids) - 1:
                raise _Captured

        for slot, layer_id in enumerate(self.layer_ids):
            self.layers[layer_id].register_forward_hook(lambda _, __, output, slot=slot: keep(slot, output))

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [..., V] of final normed states [..., H], by the exposed head, scale and soft cap."""
        logits = F.linear(hidden, self.head_weight, self.head_bias).float() * self.logit_scale
        return logits if self.logit_softcap is None else self.logit_softcap * torch.tanh(logits / self.logit_softcap)

    def prove(self) -> None:
        """Check on this very model, in seconds, all that training builds on; raise ValueError with the cause if not so.

        Features are finite, differ between tokens and between layers, are the outputs of exactly the named layers,
        depend on neither padding nor grouping, and cost no layer above the highest;
        and the exposed head on the target's own final state gives the target's own logits.
        """
        tokens = _probe_tokens(self.vocabulary)
        with _counted_calls(self.layers[self.layer_ids[-1] + 1 :]) as calls_above:
            features = self.features(tokens)
        if calls_above:
            raise ValueError(
                f"target.name={self.name}: {len(calls_above)} layers above the highest captured one "
                f"({self.layer_ids[-1]}) ran during a capture; this architecture cannot be cut there"
            )
        self._prove_varied(features)
        final_BSH, logits_BSV, states = _full_forward(self.model, _right_padded(tokens, self.device))
        self._prove_states(features, states)
        alone = [self.features([row])[0] for row in tokens]
        self._compare(
            features, alone, "a feature depends on the padding or the group it ran in; is the model not causal?"
        )
        head_device = self.head_weight.device
        self._compare(
            [self.logits(final_BSH.to(head_device))],
            [logits_BSV.to(head_device)],
            "its head, applied to its own final state, does not give its own logits; has it an unknown scale or cap?",
        )

    def _prove_varied(self, features: list[Tensor]) -> None:
        tokens_TKH = torch.cat(features).unflatten(1, (len(self.layer_ids), self.width))
        for slot, layer_id in enumerate(self.layer_ids):
            state = tokens_TKH[:, slot]
            where = f"target.name={self.name}: the output of layer {layer_id}"
            if not state.isfinite().all():
                raise ValueError(f"{where} is not finite; are the weights damaged, or too large for {self.dtype}?")
            if (state == state[0]).all():
                raise ValueError(f"{where} is the same for every token; are the weights damaged?")
            if slot > 0 and torch.equal(state, tokens_TKH[:, slot - 1]):
                raise ValueError(f"{where} equals that of layer {self.layer_ids[slot - 1]}; capture one of them")

    def _prove_states(self, features: list[Tensor], states: tuple[Tensor, ...]) -> None:
        if len(states) != self.num_layers + 1:
            raise ValueError(
                f"target.name={self.name}: gives {len(states)} hidden states for {self.num_layers} layers, "
                "so its layers cannot be told apart"
            )
        for slot, layer_id in enumerate(self.layer_ids):
            captured = [feature[:, slot * self.width : (slot + 1) * self.width] for feature in features]
            outputs = [states[layer_id + 1][i, : len(row)].to(self.device) for i, row in enumerate(features)]
            self._compare(captured, outputs, f"the capture is not the output of layer {layer_id}")

    def _compare(self, ours: list[Tensor], theirs: list[Tensor], cause: str) -> None:
        difference = max(_relative_difference(a, b) for a, b in zip(ours, theirs, strict=True))
        if not difference <= PROOF_TOLERANCE[self.dtype]:  # so that NaN fails
            raise ValueError(
                f"target.name={self.name}: {cause} (relative difference {difference:.1e}, "
                f"allowed {PROOF_TOLERANCE[self.dtype]:.0e} in {self.dtype})"
            )

    def identity(self) -> dict:
        """What this target is, as JSON; equal for equal weights on any device, different after any training of them.

        The hash takes up to IDENTITY_VALUES values of every tensor, as float32: not proof against a forger.
        """
        digest = hashlib.sha256()
        for name, weight in sorted(self.model.named_parameters()):
            values = weight.detach().reshape(-1)
            # odd, so that the sample walks over all columns of a matrix whose width is a power of two
            stride = (values.numel() // IDENTITY_VALUES) | 1
            digest.update(f"{name} {list(weight.shape)}\n".encode())
            digest.update(values[::stride].float().cpu().numpy().tobytes())
        return {
            "name": self.name,
            "revision": self.revision,
            "architecture": type(self.model).__name__,
            "layers": self.num_layers,
            "width": self.width,
            "vocabulary": self.vocabulary,
            "dtype": str(self.dtype).removeprefix("torch."),
            "sha256": digest.hexdigest(),
            "embedding_scale": self.embedding_scale,
            "logit_scale": self.logit_scale,
            "logit_softcap": self.logit_softcap,
            "tokenizer": tokenizer_hashes(self.tokenizer),
        }


def load_target(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    attention: str | None = None,
    layer_ids: Sequence[int] | None = None,
    captured_layers: int = 5,
    trust_remote_code: bool = False,
) -> Target:
    """The target by hub name or local directory, frozen, in eval mode; arguments as in `dflash.config.TargetConfig`.

    `layer_ids` names the captured layers; without it they are `captured_layers` by the paper's rule.
    Everything that cannot be used is a ValueError of one line: see tests/test_target.py for the list.
    """
    place = _device(device)
    origin = {"revision": revision, "trust_remote_code": trust_remote_code}
    config = _config(name, origin)
    tokenizer = _tokenizer(name, origin)
    text_config = config.get_text_config(decoder=True)
    ids = chosen_layers(text_config.num_hidden_layers, layer_ids, captured_layers)
    if dtype == "auto":
        dtype = "bfloat16" if place.type == "cuda" else "float32"
    model = _model(name, origin | {"dtype": getattr(torch, dtype), "device_map": device_map}, attention)
    if device_map is None:
        model.to(place)
    elif any(weight.device.type == "meta" for weight in model.parameters()):
        raise ValueError(
            f"target.device_map={device_map}: part of the target does not fit the GPUs and would be swapped in at "
            "every forward; use more GPUs or a smaller dtype"
        )
    model.eval().requires_grad_(False)

    decoder = model.get_decoder()
    layers = _decoder_layers(name, decoder, text_config)
    embedding_weight, head_weight, head_bias = _embedding_and_head(name, model, text_config)
    logit_softcap = getattr(text_config, "final_logit_softcapping", None)
    tokens_1S = _right_padded(_probe_tokens(len(embedding_weight))[:1], embedding_weight.device)
    final_1SH, logits_1SV, states = _full_forward(model, tokens_1S)
    embedding_scale = _embedding_scale(F.embedding(tokens_1S, embedding_weight), states[0])
    product_1SV = F.linear(final_1SH.to(head_weight.device), head_weight, head_bias)
    logit_scale = _logit_scale(product_1SV, logits_1SV, logit_softcap)
    target = Target(
        name=name,
        revision=getattr(config, "_commit_hash", None),
        model=model,
        tokenizer=tokenizer,
        decoder=decoder,
        layers=layers,
        layer_ids=ids,
        embedding_weight=embedding_weight,
        head_weight=head_weight,
        head_bias=head_bias,
        embedding_scale=_configured(embedding_scale, text_config, embedding_weight.dtype),
        logit_scale=_configured(logit_scale, text_config, head_weight.dtype),
        logit_softcap=logit_softcap,
    )
    target._hook_layers()
    return target


def load_configured(section: TargetConfig, *, device: str | None = None, captures: bool = True) -> Target:
    """The target of a configuration, on its first device if none is named.

    `captures` is false where nobody names the captured layers here: what is decoded needs none, and a drafter brings its own.
    """
    return load_target(
        section.name,
        revision=section.revision,
        dtype=section.dtype,
        device=device or section.devices[0],
        device_map=section.device_map,
        attention=section.attention,
        layer_ids=section.layer_ids if captures else None,
        captured_layers=section.captured_layers if captures else 1,
        trust_remote_code=section.trust_remote_code,
    )


def tokenizer_hashes(tokenizer: Any) -> dict[str, str]:
    """What decides which ids a conversation becomes: the tokens with their ids, and the chat template."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1]))
    texts = {"vocabulary_sha256": vocabulary, "chat_template_sha256": json.dumps(tokenizer.chat_template)}
    return {key: hashlib.sha256(text.encode()).hexdigest() for key, text in texts.items()}


def load_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerFast:
    """The target's tokenizer alone; refuses what `load_target` refuses of it."""
    origin = {"revision": revision, "trust_remote_code": trust_remote_code}
    _config(name, origin)
    return _tokenizer(name, origin)


def resolve_mask_token(target: Target, explicit: int | None) -> int:
    """The id that fills a block's unknown slots: `explicit`, else the tokenizer's mask token, else its first spare row.

    A spare row is one of the embedding past the tokenizer's last token, as in Qwen3. Never pad or eos: those mean
    something to the target, and a drafter that sees them in every slot is worse without any error.
    """
    tokenizer: Any = target.tokenizer
    mask = explicit if explicit is not None else tokenizer.mask_token_id
    if mask is None:
        if len(tokenizer) >= target.vocabulary:
            raise ValueError(
                f"drafter.mask_token_id is not set, and {target.name} has neither a mask token nor an embedding row "
                "past its tokenizer; set it to a token that no conversation uses (a reserved one)"
            )
        mask = len(tokenizer)
    if not 0 <= mask < target.vocabulary:
        raise ValueError(
            f"drafter.mask_token_id={mask}: {target.name} has no such embedding row; use 0 to {target.vocabulary - 1}"
        )
    for role, ids in {"pad": {tokenizer.pad_token_id}, "eos": stop_tokens(target)}.items():
        if mask in ids:
            raise ValueError(
                f"drafter.mask_token_id={mask}: this is {target.name}'s {role} token; "
                "set it to a token that no conversation uses"
            )
    return mask


def stop_tokens(target: Target) -> frozenset[int]:
    """The ids that end an answer: those of the target's generation config, and its tokenizer's eos."""
    generation = target.model.generation_config
    eos = generation.eos_token_id if generation is not None else None  # one id, a list of them, or None
    ids = [*(eos if isinstance(eos, list) else [eos]), target.tokenizer.eos_token_id]
    return frozenset(token for token in ids if token is not None)


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    return usable_device(device, knob="target.devices")


def usable_device(device: str, *, knob: str) -> torch.device:
    """The device of that name, once a number has been there and back. Raises ValueError with the name of its knob."""
    try:
        number = torch.ones(1, device=device)
        number.item()  # which "meta" refuses
    except (RuntimeError, AssertionError) as error:  # AssertionError: what torch was built without
        raise ValueError(
            f"{knob}={device}: not a device of this machine ({_first_line(error)}); use auto, cpu or cuda:0"
        ) from error
    return number.device


def _config(name: str, origin: dict) -> PreTrainedConfig:
    looks_local = names_local_directory(name)
    if looks_local and not Path(name).is_dir():
        raise ValueError(f"target.name={name}: no such directory; give one that save_pretrained wrote, or a hub name")
    if looks_local and not (Path(name) / "config.json").is_file():
        raise ValueError(f"target.name={name}: no config.json in it; give a directory that save_pretrained wrote")
    try:
        config = AutoConfig.from_pretrained(name, **origin)
    except OSError as error:
        remedy = "is it whole?" if looks_local else "check the name, revision, access and network, or give a directory"
        raise ValueError(f"target.name={name}: its config cannot be read: {_first_line(error)} ({remedy})") from error
    except (ValueError, ImportError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"target.name={name}: brings its own Python code; read it, then set target.trust_remote_code"
            ) from error
        raise ValueError(f"target.name={name}: {_first_line(error)}") from error
    if config.is_encoder_decoder:
        raise ValueError(f"target.name={name}: {config.model_type} is an encoder-decoder; a causal LM is needed")
    return config


def _tokenizer(name: str, origin: dict) -> PreTrainedTokenizerFast:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **origin)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"target.name={name}: no usable tokenizer; save the target's own beside it ({_first_line(error)})"
        ) from error
    known = set(tokenizer("a b c", add_special_tokens=False)["input_ids"]) - {tokenizer.unk_token_id}
    if not known:  # transformers makes an empty tokenizer for some families when the files are not there
        raise ValueError(f"target.name={name}: no usable tokenizer; save the target's own beside it (it knows no text)")
    if not tokenizer.is_fast:
        raise ValueError(
            f"target.name={name}: its tokenizer {type(tokenizer).__name__} is not a fast one, so a token cannot be "
            "traced back to its characters; add a tokenizer.json"
        )
    return tokenizer


def _model(name: str, arguments: dict, attention: str | None) -> Any:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            attn_implementation=attention,
            use_safetensors=True,  # a .bin is a pickle
            output_loading_info=True,
            **arguments,
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        device_map = arguments["device_map"]
        options = {"target.name": name, "target.attention": attention, "target.device_map": device_map}
        asked = ", ".join(f"{knob}={value}" for knob, value in options.items() if value is not None)
        raise ValueError(
            f"{asked}: cannot be loaded as a causal LM: {_first_line(error)}; give a complete one that transformers knows"
        ) from error
    model, loading = loaded
    if loading["missing_keys"]:
        # transformers warns and fills them with random numbers
        missing = sorted(loading["missing_keys"])
        raise ValueError(
            f"target.name={name}: {len(missing)} weights are not in the checkpoint, e.g. {missing[0]}; "
            "give a complete causal LM with its language-model head"
        )
    return model


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(" :")


def _decoder_layers(name: str, decoder: nn.Module, config: PreTrainedConfig) -> nn.ModuleList:
    """The backbone's own list of decoder layers: `layers` in most families, `h` in GPT-2's, `blocks` in MPT's."""
    count = config.num_hidden_layers
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == count]
    if len(lists) != 1:
        raise ValueError(
            f"target.name={name}: {type(decoder).__name__} has {len(lists)} lists of {count} modules where its decoder "
            "layers should be; this architecture is not supported"
        )
    return lists[0]


def _embedding_and_head(
    name: str, model: PreTrainedModel, config: PreTrainedConfig
) -> tuple[Tensor, Tensor, Tensor | None]:
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"target.name={name}: {type(model).__name__} has no language-model head")
    if embedding.weight.shape != head.weight.shape or embedding.weight.shape[1] != config.hidden_size:
        raise ValueError(
            f"target.name={name}: embedding {list(embedding.weight.shape)} and head {list(head.weight.shape)} must "
            f"have one shape, as wide as its layers ({config.hidden_size})"
        )
    return embedding.weight, head.weight, getattr(head, "bias", None)


# The two scales are measured on a forward, not looked up: families name them differently, or only have them in code.


def _embedding_scale(rows: Tensor, first_input: Tensor) -> float:
    """Ratio of the first layer's input to the raw embedding rows, [1, S, H] both, where that is a constant.

    Where it is not (learned positions are added, a norm follows), 1.0: a drafter adds no positions of its own.
    """
    first_input = first_input.to(rows.device)
    scale = _ratio(first_input, rows)
    # rounding is 0.002 in bfloat16; added positions are 0.1 or more
    return scale if _relative_difference(scale * rows.double(), first_input) < 0.01 else 1.0


def _logit_scale(product: Tensor, logits: Tensor, softcap: float | None) -> float:
    """Ratio of the logits, the soft cap undone, to the head's product with the final normed states, [1, S, V] both."""
    logits = logits.to(product.device).double()
    if softcap is not None:
        # undone where it is steep: near the cap, atanh magnifies the logits' rounding
        steep = logits.abs() < softcap / 2
        product, logits = product[steep], softcap * torch.atanh(logits[steep] / softcap)
    return _ratio(logits, product)


def _ratio(scaled: Tensor, plain: Tensor) -> float:
    """Least-squares s of scaled = s plain."""
    scaled, plain = scaled.double(), plain.double()
    return ((scaled * plain).sum() / (plain * plain).sum()).item()


def _configured(measured: float, config: PreTrainedConfig, dtype: torch.dtype) -> float:
    """The number that `measured` is a measurement of: 1, sqrt(H), or one of the configuration's or its inverse."""
    # a Gemma keeps its scale in the weights' dtype: sqrt(3072) is 55.5 in bfloat16
    root = torch.tensor(config.hidden_size**0.5)
    numbers = [
        float(number)
        for number in config.to_dict().values()
        if isinstance(number, int | float) and math.isfinite(number) and number > 0
    ]
    exact = [1.0, root.item(), root.to(dtype).item(), *numbers, *(1 / number for number in numbers)]
    nearest = min(exact, key=lambda number: abs(number - measured))
    # 0.001 in bfloat16, whose rounding leaves an error of 1e-4 in a ratio over 2,000 values
    tolerance = max(1e-4, torch.finfo(dtype).eps / 8)
    return nearest if abs(nearest - measured) < tolerance * abs(measured) else measured


def _full_forward(model: PreTrainedModel, tokens_BS: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """(final normed states [B, S, H], logits [B, S, V], all N + 1 hidden states) of a whole forward."""
    with torch.no_grad():
        output = model(input_ids=tokens_BS, use_cache=False, output_hidden_states=True)
    return output.hidden_states[-1], output.logits, output.hidden_states


def _probe_tokens(vocabulary: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(vocabulary, (length,), generator=draw) for length in PROOF_TOKENS]


def _right_padded(tokens: Sequence[Tensor], device: torch.device) -> Tensor:
    """[B, S] on the device; the padding is id 0, which any embedding has and no real token sees."""
    longest = max(len(row) for row in tokens)
    # pinned, or the copy to a GPU would wait for the stream
    padded = torch.zeros(len(tokens), longest, dtype=torch.int64, pin_memory=device.type == "cuda")
    for row, ids in zip(padded, tokens, strict=True):
        row[: len(ids)] = ids
    return padded.to(device, non_blocking=True)


def _relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """Mean over the rows of |ours - theirs| / |theirs|, Euclidean norms over the last dimension."""
    ours, theirs = ours.double(), theirs.double()
    return ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-30)).mean().item()


@contextmanager
def _counted_calls(modules: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """A list that gets every one of `modules` that starts a forward inside the `with`."""
    calls: list[nn.Module] = []
    handles = [module.register_forward_pre_hook(lambda module, _: calls.append(module)) for module in modules]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
