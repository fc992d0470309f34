"""Tiny real targets, a drafter's shape and conversations for the tests: random weights, real tokenizer and chat template."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash.shape import Shape

FAMILIES = ("llama", "qwen3", "gemma3", "gemma2")
SPECIAL_TOKENS = ["<|pad|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SENTENCES = """The lighthouse keeper counts the boats that come home before the storm.
A river is older than the road beside it, and both lead to the harbour.
Please list three kinds of bread, then say which one keeps longest and why.
To sort a list, compare two neighbours, swap them when they are out of order, and begin again.
She paints small houses on blue paper and sells them at the market on Saturday.
Water boils at 100 degrees, freezes at 0, and weighs about 1 kilogram per litre.
def double(number): return number * 2
The answer is 42, but the question was never written down.
Every winter the geese fly south, and every spring the children wait for them.
How many bridges cross the river, and who built the first of them?""".splitlines()
WORDS = sorted({word for sentence in SENTENCES for word in sentence.split()})
ROLES = ["system", "user", "assistant"]
TINY_SHAPE = Shape(
    width=32,
    vocabulary=50,
    target_layers=8,
    target_layer_ids=(1, 3, 5),
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    block_size=6,
    mask_token_id=49,
    layer_types=("full_attention",) * 3,
    sliding_window=None,
    rope_theta=1e4,
    max_positions=4096,
)


def tiny_tokenizer(vocabulary: int = 512, *, chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with at most `vocabulary - 8` tokens, so a target of that vocabulary has spare rows.

    It has no BOS and no mask token; its end-of-turn token <|im_end|> is its EOS, as in Qwen and SmolLM2.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 8,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(SENTENCES + ROLES, trainer)
    pad, _, end_of_turn = SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=pad,
        eos_token=end_of_turn,
        additional_special_tokens=[SPECIAL_TOKENS[1]],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_model(
    family: str = "qwen3",
    *,
    layers: int = 4,
    hidden: int = 64,
    tied: bool = False,
    vocabulary: int = 512,
    seed: int = 0,
) -> PreTrainedModel:
    """A float32 causal LM of one of FAMILIES with random weights, in eval mode.

    Norm weights are random too, not ones (gemma: not zeros), so that a norm left out or applied twice shows.
    The gemmas alternate sliding (window 16) and full attention and scale their embedding by sqrt(hidden);
    gemma2 also caps its logits at 5, low enough for random logits to feel it.
    """
    common = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 8192,
        # 1/sqrt(64): every layer changes the state about as much as the state is large
        "initializer_range": 0.125,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
        "tie_word_embeddings": tied,
    }
    gemma = {
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)],
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if family == "llama":
            model = LlamaForCausalLM(LlamaConfig(**common))
        elif family == "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**common))
        elif family == "gemma3":
            model = Gemma3ForCausalLM(Gemma3TextConfig(**common, **gemma))
        elif family == "gemma2":
            model = Gemma2ForCausalLM(Gemma2Config(**common, **gemma, final_logit_softcapping=5.0))
        else:
            raise ValueError(f"family={family}: not one of {', '.join(FAMILIES)}")
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                centre = 0.0 if family.startswith("gemma") else 1.0  # a gemma norm multiplies by 1 + weight
                torch.nn.init.uniform_(weight, centre - 0.5, centre + 0.5)
    return model.eval()


def tiny_target(
    directory: Path,
    family: str = "qwen3",
    *,
    layers: int = 4,
    hidden: int = 64,
    tied: bool = False,
    vocabulary: int = 512,
    seed: int = 0,
) -> Path:
    """`directory`, now holding a tiny model of the family, its tokenizer and its ChatML template, as from a hub."""
    model = tiny_model(family, layers=layers, hidden=hidden, tied=tied, vocabulary=vocabulary, seed=seed)
    model.save_pretrained(directory)
    tiny_tokenizer(vocabulary).save_pretrained(directory)
    return directory


def conversations(count: int, *, seed: int = 0, longest_reply: int = 120) -> list[dict]:
    """`count` chats of 1 to 3 exchanges whose replies hold 4 to `longest_reply` words, evenly spread in the logarithm.

    A third of them begin with a system message. Every reply is longer than a block of 4 tokens.
    """
    draw = random.Random(seed)

    def text(words: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(words))

    rows = []
    for index in range(count):
        messages = [{"role": "system", "content": text(6)}] if draw.random() < 1 / 3 else []
        for _ in range(draw.randint(1, 3)):
            reply_words = round(4 * (longest_reply / 4) ** draw.random())
            messages.append({"role": "user", "content": text(draw.randint(2, 12))})
            messages.append({"role": "assistant", "content": text(reply_words)})
        rows.append({"id": f"chat-{index:04d}", "messages": messages})
    return rows


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    """`path`, now holding one JSON object a line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
