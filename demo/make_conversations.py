"""Let the target answer demo/prompts.jsonl, greedily: `python demo/make_conversations.py TARGET_DIRECTORY`.

Writes demo/conversations.jsonl and demo/heldout.jsonl, batch by batch; started again it goes on after the last batch
written. Batches are fixed by prompts.jsonl alone, so a broken run and an unbroken one write the same files.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

DEMO = Path(__file__).parent
BATCH = 48  # conversations decoded together: 77 tokens per CPU second, 34 with 8
MAX_NEW = 128  # tokens of a reply, its end-of-turn token included
MIN_NEW = 8  # a reply shorter than this holds no more than a block or two
FILES = {"train": DEMO / "conversations.jsonl", "heldout": DEMO / "heldout.jsonl"}


def batches(prompts: list[dict]) -> list[list[dict]]:
    """The order of work: held-out first, then training prompts in groups of 4 batches, sorted by length within a group.

    Prompts come shuffled, so that a run stopped early has seen every kind.
    """
    order = []
    for split in ("heldout", "train"):
        rows = [row for row in prompts if row["split"] == split]
        for start in range(0, len(rows), 4 * BATCH):
            group = rows[start : start + 4 * BATCH]
            group.sort(key=lambda row: (len(row["turns"]), len(row["turns"][0]), row["id"]))
            order += [group[i : i + BATCH] for i in range(0, len(group), BATCH)]
    return order


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompts: list[list[int]], end: int) -> list[list[int]]:
    """The most likely continuation of every prompt (token ids), `end` included where it came within MAX_NEW tokens."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[end] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    position = (mask.cumsum(1) - 1).clamp(min=0)
    cache, alive, replies = DynamicCache(), list(range(len(prompts))), [[] for _ in prompts]
    for _ in range(MAX_NEW):
        step = model(tokens, attention_mask=mask, position_ids=position, cache=cache, logits_to_keep=1)
        tokens = step.logits[:, -1].argmax(-1)
        for row, token in zip(alive, tokens.tolist(), strict=True):
            replies[row].append(token)
        going = (tokens != end).nonzero()[:, 0]
        if len(going) == 0:
            break
        if len(going) < len(alive):  # a finished row is dropped at once: it would cost as much as a live one
            cache.batch_select_indices(going)
            alive = [alive[i] for i in going.tolist()]
            tokens, mask, position = tokens[going], mask[going], position[going]
        tokens, position = tokens[:, None], position[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], 1)
    return replies


def loops(reply: list[int], digits: set[int]) -> bool:
    """Whether 2 in 5 of the reply's three-token runs have come before in it, digits not told apart."""
    plain = [-1 if token in digits else token for token in reply]
    runs = list(zip(plain, plain[1:], plain[2:], strict=False))
    return len(set(runs)) < 0.6 * len(runs)


def answer(model: torch.nn.Module, tokenizer, batch: list[dict], digits: set[int]) -> tuple[list[dict], Counter]:
    """The batch's usable conversations, and the count of every outcome and of the tokens made."""
    end = tokenizer.eos_token_id
    going = [{"id": row["id"], "messages": []} for row in batch]
    turns = {row["id"]: row["turns"] for row in batch}
    done, counts = [], Counter()
    while going:
        for row in going:
            row["messages"].append({"role": "user", "content": turns[row["id"]][len(row["messages"]) // 2]})
        prompts = [
            tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
            for row in going
        ]
        unfinished = []
        for row, prompt, reply in zip(going, prompts, greedy(model, prompts, end), strict=True):
            counts["tokens"] += len(reply)
            ended = reply[-1] == end
            text = tokenizer.decode(reply[: len(reply) - ended], skip_special_tokens=False)
            row["messages"].append({"role": "assistant", "content": text})
            rendered = tokenizer.apply_chat_template(row["messages"], return_dict=False)
            if len(reply) < MIN_NEW:
                outcome = "dropped: short"
            elif not ended and loops(reply, digits):
                outcome = "dropped: loops"
            elif rendered[: len(prompt) + len(reply)] != prompt + reply:
                outcome = "dropped: tokenises otherwise"
            else:
                outcome = "kept: ended" if ended else "kept: cut at the limit"
                more = len(row["messages"]) < 2 * len(turns[row["id"]])
                (unfinished if more else done).append(row)
            counts[outcome] += 1
        going = unfinished
    return done, counts


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def append(path: Path, rows: list[dict]) -> None:
    """Add `rows` to the file, all or none of them."""
    text = (path.read_text(encoding="utf-8") if path.exists() else "") + "".join(
        json.dumps(row, ensure_ascii=False) + "\n" for row in rows
    )
    beside = path.with_suffix(".partial")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def replies(rows: list[dict]) -> set[str]:
    return {message["content"] for row in rows for message in row["messages"] if message["role"] == "assistant"}


def main(target: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    digits = {token for token in range(len(tokenizer)) if tokenizer.decode([token]).strip().isdigit()}
    done = {row["id"] for path in FILES.values() for row in read(path)}
    # A batch is written whole, so one id of it in the files means that it is done (the missing ones were dropped).
    todo = [batch for batch in batches(read(DEMO / "prompts.jsonl")) if not done & {row["id"] for row in batch}]
    totals = Counter()
    for number, batch in enumerate(todo, 1):
        cpu, wall = time.process_time(), time.monotonic()
        split = batch[0]["split"]
        rows, counts = answer(model, tokenizer, batch, digits)
        if split == "train":  # what the drafter is measured on, it must not have seen
            held_out = replies(read(FILES["heldout"]))
            rows = [row for row in rows if not replies([row]) & held_out]
        append(FILES[split], rows)
        cpu, wall = time.process_time() - cpu, time.monotonic() - wall
        totals += counts + Counter({f"{split} conversations": len(rows), "CPU seconds": round(cpu)})
        speed = f"{counts['tokens'] / wall:.0f} tokens/s, {counts['tokens'] / cpu:.0f} per CPU second"
        print(
            f"batch {number}/{len(todo)}: {len(rows)}/{len(batch)} kept, {counts['tokens']} tokens, {speed}", flush=True
        )
    print(json.dumps(totals, indent=1))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python demo/make_conversations.py TARGET_DIRECTORY")
    main(sys.argv[1])
