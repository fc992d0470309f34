"""What refilling ended rows is worth: the shipped prompts answered by us and by transformers' plain batches of the same size.

    python -m benchmarks.regenerate [--target demo/SmolLM2-135M-Instruct] [--prompts 384] [--rows 48] [--alone 24]

Greedy, float32, one thread, CPU seconds in one process. A plain batch is `model.generate` over `rows` prompts of like length: it
ends when its longest reply ends. Every answer of both must be the same, and some are made again one by one. Exit code 1 when an
answer differs or the ratio is below 1.5.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dflash.answers import Request
from dflash.conversation import Template
from dflash.generation import LocalSource
from dflash.prompt_file import prompt_of, rows
from dflash.sampling import Sampling
from dflash.target import Target, load_target

REQUIRED_RATIO = 1.5
MAX_NEW_TOKENS = 128  # as the demonstration's answers were made
PROMPTS = Path("demo/prompts.jsonl")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo/SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", type=int, default=384, help="of the shipped ones, from the first on")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--alone", type=int, default=24, help="prompts that are also answered one by one")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    target = load_target(arguments.target, captured_layers=1, dtype="float32")
    requests = read(target, arguments.prompts)

    refilled, ours = cpu_seconds(lambda: answered(target, requests, arguments.rows))
    plain, theirs = cpu_seconds(lambda: plain_batches(target, requests, arguments.rows))
    few = requests[:: max(1, len(requests) // max(1, arguments.alone))][: arguments.alone]
    alone, by_one = cpu_seconds(lambda: plain_batches(target, few, 1))

    tokens, ratio = sum(map(len, refilled.values())), theirs / ours
    same, same_alone = (sum(other[key] == refilled[key] for key in other) for other in (plain, alone))
    print(f"{len(requests)} prompts, {tokens} tokens, {arguments.rows} rows, CPU seconds")
    print(f"  refilled rows    {ours:8.1f}   {tokens / ours:6.1f} tokens/s")
    print(f"  plain batches    {theirs:8.1f}   {tokens / theirs:6.1f} tokens/s   {same}/{len(plain)} answers the same")
    rate = sum(map(len, alone.values())) / by_one
    print(f"  one by one       {by_one:8.1f}   {rate:6.1f} tokens/s   {same_alone}/{len(alone)} answers the same")
    good = ratio >= REQUIRED_RATIO and same == len(plain) and same_alone == len(alone)
    print(f"plain / refilled: {ratio:.2f} (required {REQUIRED_RATIO}) {'PASS' if good else 'FAIL'}")
    return 0 if good else 1


def read(target: Target, count: int) -> list[Request]:
    """The first turns of the first prompts, longest first."""
    template, requests = Template(target.tokenizer, {}), []
    for _, row in rows(PROMPTS, knob="prompts"):
        prompt = prompt_of(row)
        tokens = template.tokens(template.render(prompt.stages[0], None, add_generation_prompt=True))
        requests.append(Request(key=prompt.key, messages=prompt.stages[0], tools=None, prompt_tokens=tokens))
    return sorted(requests[:count], key=lambda request: -len(request.prompt_tokens))


def answered(target: Target, requests: list[Request], row_count: int) -> dict[str, list[int]]:
    """Token ids of every answer, by our source."""

    class Waiting:
        def __init__(self):
            self.left = list(requests)

        def take(self, count: int) -> list[Request]:
            taken, self.left = self.left[:count], self.left[count:]
            return taken

    source = LocalSource(target, sampling=Sampling(), max_new_tokens=MAX_NEW_TOKENS, seed=0, rows=row_count)
    return {request.key: answer.token_ids or [] for request, answer in source.answers(Waiting())}


def plain_batches(target: Target, requests: list[Request], row_count: int) -> dict[str, list[int]]:
    """The same by transformers' `generate`, `row_count` prompts at a time."""
    tokenizer: Any = target.tokenizer
    model: Any = target.model
    end, answers = tokenizer.eos_token_id, {}
    for start in range(0, len(requests), row_count):
        batch = requests[start : start + row_count]
        ids = {"input_ids": [request.prompt_tokens for request in batch]}
        padded = tokenizer.pad(ids, padding_side="left", return_tensors="pt")
        limits = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, "eos_token_id": end, "pad_token_id": end}
        made = model.generate(**padded, **limits)[:, padded["input_ids"].shape[1] :].tolist()
        for request, reply in zip(batch, made, strict=True):
            answers[request.key] = reply[: reply.index(end)] if end in reply else reply
    return answers


def cpu_seconds(work: Callable[[], dict[str, list[int]]]) -> tuple[dict[str, list[int]], float]:
    started = time.process_time()
    return work(), time.process_time() - started


if __name__ == "__main__":
    sys.exit(main())
