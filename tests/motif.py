"""A tiny target that has learnt a language, so that a drafter for it can be good or bad: "motifs", fixed runs of words.

A word is one token, written as a capital and a small letter (`KaTiMo` is three). Every motif has a usual successor; a reply
walks on from the motif that the prompt began, and ends after a final motif. What comes next is nearly certain, but only to
who remembers which motif it is in: each word is in about two of them.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tiny import CHATML, SPECIAL_TOKENS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dflash import checkpoint
from dflash import config as configuration
from dflash.run_dir import create_run
from dflash.train import FINISHED, main

CAPITALS, SMALLS = "BCDFGHJKLMNPRSTV", "aeiouylmnrstdkp"
WORDS = [capital + small for capital in CAPITALS for small in SMALLS]
VOCABULARY = 512  # 13 rows more than the tokenizer has tokens: room for a mask token
MOTIFS, MOTIF_WORDS = 40, 12
FINAL_MOTIFS = 3
SURPRISE = 0.05  # chance that a motif is followed by any other than its successor
LANGUAGE_SEED = 11

TRAINING_STEPS, ROWS, ROW_TOKENS, LR = 400, 8, 192, 4e-3


class Language:
    """The motifs, their successors and which of them are final: the same ones every time."""

    def __init__(self):
        draw = random.Random(LANGUAGE_SEED)
        self.motifs = [[draw.choice(WORDS) for _ in range(MOTIF_WORDS)] for _ in range(MOTIFS)]
        circle = draw.sample(range(MOTIFS), MOTIFS)
        self.successor = dict(zip(circle, circle[1:] + circle[:1], strict=True))
        self.final = set(draw.sample(range(MOTIFS), FINAL_MOTIFS))

    def exchange(self, draw: random.Random) -> tuple[str, str]:
        """What a user writes, the end of one motif and the begin of another, and a reply that goes on from there."""
        before, motif, cut = draw.randrange(MOTIFS), draw.randrange(MOTIFS), draw.randint(3, MOTIF_WORDS - 1)
        prompt = self.motifs[before][-draw.randint(1, 8) :] + self.motifs[motif][:cut]
        reply = self.motifs[motif][cut:]
        while motif not in self.final:
            motif = draw.randrange(MOTIFS) if draw.random() < SURPRISE else self.successor[motif]
            reply = reply + self.motifs[motif]
        return "".join(prompt), "".join(reply)


def motif_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose only merges are the words: any text has tokens, and every text comes back as it was."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet, *WORDS]
    bpe = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, [(*word,) for word in WORDS]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    pad, start_of_turn, end_of_turn = SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=pad,
        eos_token=end_of_turn,
        additional_special_tokens=[start_of_turn],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def motif_target(directory: Path, *, seed: int = 0, steps: int = TRAINING_STEPS) -> Path:
    """`directory`, now holding a Qwen3 of 4 layers that has learnt to chat in the language, as from a hub.

    The same bytes for the same seed on the same kind of CPU. With the default steps it takes about a minute of one core.
    """
    tokenizer = motif_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=32,
                max_position_embeddings=2048,
                rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},  # the drafter's is another
                initializer_range=0.05,
                tie_word_embeddings=False,
                pad_token_id=0,
                bos_token_id=None,
                eos_token_id=2,
            )
        )
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):  # not ones, so that a norm left out or applied twice shows
                torch.nn.init.uniform_(weight, 0.5, 1.5)

    with one_thread():
        teach(model, tokenizer, steps=steps, seed=seed)
    model.eval().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, steps: int, seed: int) -> None:
    """Trains on endless chats in the language, one after the other."""
    language, draw, ids = Language(), random.Random(seed), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LR, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        while len(ids) < ROWS * ROW_TOKENS:
            messages = []
            for _ in range(draw.randint(1, 2)):
                prompt, reply = language.exchange(draw)
                messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
            ids += tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"]
        batch, ids = torch.tensor(ids[: ROWS * ROW_TOKENS]).view(ROWS, ROW_TOKENS), ids[ROWS * ROW_TOKENS :]
        logits = model(batch).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@contextmanager
def one_thread() -> Iterator[None]:
    """Kernels this small gain nothing from a second thread, and their sums must not depend on how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def motif_prompts(count: int, *, seed: int = 1) -> list[dict]:
    """`count` rows with one user turn each, different for different seeds."""
    language, draw = Language(), random.Random(f"prompts {seed}")
    contents = [language.exchange(draw)[0] for _ in range(count)]
    return [
        {"id": f"motif-{seed}-{index:04d}", "messages": [{"role": "user", "content": content}]}
        for index, content in enumerate(contents)
    ]


def motif_conversations(target_dir: Path, count: int, *, seed: int = 2, max_new_tokens: int = 250) -> list[dict]:
    """`motif_prompts(count)` with the target's own greedy replies, in batches; a reply that does not end in time is cut."""
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    tokenizer.padding_side = "left"
    rows, batch = motif_prompts(count, seed=seed), 32
    for start in range(0, count, batch):
        some = rows[start : start + batch]
        texts = [
            tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True) for row in some
        ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        for row, ids in zip(some, output[:, inputs["input_ids"].shape[1] :], strict=True):
            content = tokenizer.decode(ids, skip_special_tokens=True)
            row["messages"].append({"role": "assistant", "content": content})
    return rows


def train_motif_drafter(root: Path, target_dir: Path, data: Path, *, name: str = "motif", **changes: Any) -> Path:
    """The last checkpoint of a run of the trainer (lockstep: the same bytes every time); changes are section__field=value."""
    values: dict[str, dict[str, Any]] = {
        "target": {"name": str(target_dir), "layer_ids": [0, 2], "devices": ["cpu"]},
        "data": {"path": str(data), "prepared_dir": str(root / "prepared"), "max_tokens": 512},
        "drafter": {"layers": 2, "block_size": 8, "device": "cpu"},
        "objective": {"anchors": 64},
        "optim": {"samples_per_step": 4, "lr": 3e-3},
        "stream": {"engine": "lockstep", "hs_min_ready": 8, "hs_queue_depth": 16, "bucket_edges": [64, 128, 192]},
        "checkpoint": {"every_steps": 0},
        "run": {"root": str(root), "name": name, "epochs": 4},
    }
    for field, value in changes.items():
        section, key = field.split("__")
        values[section][key] = value
    run_dir = create_run(configuration.parse(values))
    assert main([str(run_dir)]) == FINISHED
    last = checkpoint.newest(run_dir)
    assert last is not None
    return last
