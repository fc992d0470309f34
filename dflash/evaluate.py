"""What a drafter is worth: held-out prompts decoded with it and without it, side by side.

    python -m dflash.evaluate DRAFTER --target T [--prompts FILE ...] [--against DRAFTER] [--out FILE.json] [--plot FILE.png]

DRAFTER is a checkpoint or an exported directory. For a checkpoint inside its run, everything else defaults to the run's own
configuration: the target, its chat template's arguments, the settings of `evaluate`.

tau of a prompt: the tokens that its draft-and-verify steps committed, bonus tokens included, over the number of these steps.
tau of a set: the mean over its prompts, as in the tables of the paper (arXiv 2602.06036), so that one endless reply counts no
more than another; `tau_pooled`, all tokens over all steps, is what a serving engine's counters show. Intervals are the middle
95 % of means over prompts drawn again with replacement (Efron 1979). Between two drafters the difference on each prompt is drawn,
so that it does not matter how far easy and hard prompts lie apart.

Exit codes: 0 measured, 1 failed, also where a float32 target's greedy output is another one with a drafter, 2 refused, 3 stopped.
"""

import argparse
import functools
import itertools
import json
import math
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from dflash import config as configuration
from dflash.command import FAILED, FINISHED, STOP_WITH_STDIN, Parser, run
from dflash.config import Config, EvaluateConfig
from dflash.conversation import DROP_REASONS, Template, Unusable
from dflash.decode import Decoded, Decoder, check_lengths, decode_plain
from dflash.drafter import Drafter
from dflash.export import load_drafter
from dflash.files import check_writable, sha256_of, write_json
from dflash.progress import ProgressLine
from dflash.prompt_file import PROMPT_DROP_REASONS, Prompt, prompt_of, rows
from dflash.run_dir import package_versions
from dflash.sampling import Sampling
from dflash.target import Target, load_configured, stop_tokens

SHIPPED = tuple(str(Path(__file__).parent / "prompts" / f"{name}.jsonl") for name in ("chat", "code", "mathematics"))
DRAWS = 10_000  # of the bootstrap: an interval's ends then move by 1 % of its width from seed to seed
WARM_UP_TOKENS = 8  # decoded in every way before anything is timed: first forwards allocate and choose kernels
TABLE_SLOTS = 15  # that fit a terminal of 80 columns; the JSON file has all
DRAFTERS = ("drafter", "against")  # keys of the JSON file
PLAIN = 0  # the first way to decode; a drafter's comes after it

Prompts = dict[str, list[Prompt]]  # by the name of their set
Way = Callable[..., Decoded]  # all is said but the prompt, max_new_tokens and seed


@dataclass
class Tally:
    """All replies to one prompt, decoded in one way."""

    tokens: int = 0
    seconds: float = 0.0
    """Wall time, prompt included."""
    committed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    difference: str | None = None
    """Where the first token is that plain decoding chose otherwise."""

    @property
    def tau(self) -> float | None:
        """None where every reply ended with its first token, which no step makes."""
        return sum(self.committed) / len(self.committed) if self.committed else None

    def add(self, decoded: Decoded, seconds: float) -> None:
        self.tokens += len(decoded.tokens)
        self.seconds += seconds
        self.committed += decoded.committed
        self.accepted += decoded.accepted


@dataclass(frozen=True)
class Row:
    """One prompt and how each way of decoding did on it."""

    set: str
    id: str
    ways: list[Tally]


# ---------------------------------------------------------------- the command


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code. The last line on stderr is the cause when it is not 0."""
    words = sys.argv[1:] if arguments is None else arguments
    return run(lambda: evaluate(words), stopped="stopped; nothing was written")


def evaluate(arguments: list[str]) -> int:
    """Measures, writes and prints; FAILED where an output differs that must not. Raises ValueError for what a user can mend."""
    parsed = _parse(arguments)
    config = configuration.from_arguments(parsed, trains=False)
    prompts = read_prompts(config.evaluate, per_set=config.evaluate.prompts_per_set)
    target = load_configured(config.target, captures=False)
    template = Template(target.tokenizer, config.data.template_kwargs)
    loaded = [load_drafter(path, target) for path in (parsed.drafter, parsed.against) if path is not None]
    # in the target's dtype, as serving engines run a drafter
    drafters, origins = [drafter.to(target.dtype) for drafter, _ in loaded], [origin for _, origin in loaded]
    check_prompts(prompts, template, config.evaluate, target, drafters)

    measured = measure(target, drafters, prompts, template, config.evaluate)
    result = {
        "command": shlex.join(["python", "-m", "dflash.evaluate", *(w for w in arguments if w != STOP_WITH_STDIN)]),
        "target": target.identity(),
        **dict(zip(DRAFTERS, origins, strict=False)),
        "settings": _settings(config, target, drafters),
        "packages": package_versions(),
        **summarise(measured, [drafter.shape.block_size for drafter in drafters], config.evaluate),
        "prompts": [_row_values(row) for row in measured],
    }
    if parsed.out is not None:
        write_json(parsed.out, result)
    names = _names([path for path in (parsed.drafter, parsed.against) if path is not None])
    if parsed.plot is not None:
        from dflash.plots import acceptance  # here: the trainer decodes with this module too, and never draws

        by_drafter = {name.partition(" (")[0]: of_drafter(result["sets"], at) for at, name in enumerate(names)}
        acceptance(parsed.plot, by_drafter, title=" against ".join(names) + f" on {Path(target.name).name}")
    print_tables(result, names)
    return FINISHED if target.dtype != torch.float32 else say_differences(measured, names)


def say_differences(measured: list[Row], names: list[str]) -> int:
    """FAILED, with the first one said, where an output is not that of plain decoding; for a target in float32."""
    differing = [(row, at) for row in measured for at, tally in enumerate(row.ways) if tally.difference is not None]
    if not differing:
        return FINISHED
    row, at = differing[0]
    print(
        f"dflash: {names[at - 1]} changes the greedy output, which in float32 no drafter may: prompt {row.id} of {row.set}, "
        f"{row.ways[at].difference}; {len(differing)} of {len(measured) * len(names)} outputs differ",
        file=sys.stderr,
    )
    return FAILED


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m dflash.evaluate",
        usage="%(prog)s DRAFTER --target T [--prompts FILE ...] [--against DRAFTER] [--SECTION.FIELD VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "drafter", type=Path, help="checkpoint (runs/NAME/checkpoints/step-XXXXXXXX) or exported directory"
    )
    parser.add_argument("--against", type=Path, metavar="DRAFTER", help="a second drafter, on the same prompts")
    parser.add_argument("--prompts", nargs="+", metavar="FILE", help="the same as --evaluate.prompts")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file to write")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="PNG file to write")
    configuration.add_arguments(parser, flat={"--target": "target.name"}, sections=("target", "data", "evaluate"))
    parsed = parser.parse_args(arguments)
    if parsed.prompts is not None:
        vars(parsed)["evaluate.prompts"] = json.dumps(parsed.prompts)
    for path in (parsed.drafter, parsed.against):
        if path is not None and not path.is_dir():
            raise ValueError(f"{path}: no such directory; give a checkpoint (step-XXXXXXXX) or an exported drafter")
    for path in (parsed.out, parsed.plot):
        if path is not None:
            check_writable(path)
    own = parsed.drafter.resolve().parent.parent / "config.json"
    if parsed.config is None and parsed.drafter.resolve().parent.name == "checkpoints" and own.exists():
        parsed.config = str(own)
    return parsed


def _names(paths: Sequence[Path]) -> list[str]:
    """What tables and pictures call the drafters: run and step of a checkpoint, else the directory; A and B where there are two."""
    names = []
    for path in (path.resolve() for path in paths):
        inside_run = path.parent.name == "checkpoints"
        names.append(f"{path.parent.parent.name} {path.name}" if inside_run else path.name)
    return names if len(names) == 1 else [f"{letter} ({name})" for letter, name in zip("AB", names, strict=True)]


def _settings(config: Config, target: Target, drafters: list[Drafter]) -> dict[str, Any]:
    section, cuda = config.evaluate, target.device.type == "cuda"
    return {
        "max_new_tokens": section.max_new_tokens,
        "temperature": section.temperature,
        "top_p": section.top_p,
        "top_k": section.top_k,
        "seed": section.seed,
        "prompts_per_set": section.prompts_per_set,
        "template_kwargs": config.data.template_kwargs,
        "block_sizes": [drafter.shape.block_size for drafter in drafters],
        "drafter_dtype": str(drafters[0].fc.weight.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(target.device) if cuda else target.device.type,
        "files": {
            Path(path).stem: {"path": path, "sha256": sha256_of(Path(path))} for path in section.prompts or SHIPPED
        },
    }


# ---------------------------------------------------------------- prompts


def read_prompts(config: EvaluateConfig, *, per_set: int | None) -> Prompts:
    """The prompts of every set, named after its file: the first `per_set` of each, or all. Raises ValueError, one line."""
    sets: Prompts = {}
    for path in config.prompts or SHIPPED:
        name = Path(path).stem
        if name in sets:
            raise ValueError(
                f"evaluate.prompts: two files are named {name}, which names their sets; rename one of them"
            )
        sets[name] = []
        for line, row in rows(path, knob="evaluate.prompts"):
            if len(sets[name]) == per_set:
                break
            try:
                sets[name].append(prompt_of(row))
            except Unusable as error:
                reason = (DROP_REASONS | PROMPT_DROP_REASONS)[error.reason]
                raise ValueError(
                    f"evaluate.prompts={path}:{line.number}: {reason} {error.detail}".rstrip() + "; mend or remove it"
                ) from None
        if not sets[name]:
            raise ValueError(f"evaluate.prompts={path}: holds no prompt; give a JSONL or text file of prompts")
    return sets


def check_prompts(
    prompts: Prompts, template: Template, config: EvaluateConfig, target: Target, drafters: list[Drafter]
) -> None:
    """Refuses, before anything is decoded, what cannot be: a prompt that the template refuses or that is too long."""
    if config.max_new_tokens < 2:
        raise ValueError(
            f"evaluate.max_new_tokens={config.max_new_tokens}: the first token comes from the prompt's own forward, so no "
            "draft would be made; raise it"
        )
    positions = min(check_lengths([0], 1, target, drafter) for drafter in drafters)
    for name, prompt in ((name, prompt) for name, group in prompts.items() for prompt in group):
        lengths = list[int]()
        try:
            hold_conversation(prompt, template, lambda tokens, lengths=lengths: lengths.append(len(tokens)) or "")
        except Unusable as error:
            raise ValueError(
                f"prompt {prompt.id} of {name}: {DROP_REASONS[error.reason]} ({error.detail}); mend it or the template"
            ) from None
        if lengths[-1] + len(lengths) * config.max_new_tokens > positions:
            raise ValueError(
                f"prompt {prompt.id} of {name}: its {lengths[-1]} tokens and {len(lengths)} replies of up to "
                f"evaluate.max_new_tokens={config.max_new_tokens} exceed the {positions} positions of target and drafter; "
                "shorten the prompt or lower it"
            )


def hold_conversation(prompt: Prompt, template: Template, reply: Callable[[list[int]], str]) -> None:
    """Asks for a reply to every turn; `reply` gets the conversation so far as token ids and returns what goes on with it."""
    messages: list[dict[str, Any]] = []
    for stage in prompt.stages:
        messages += stage
        text = template.render(messages, prompt.tools, add_generation_prompt=True)
        messages.append({"role": "assistant", "content": reply(template.tokens(text))})


# ---------------------------------------------------------------- decoding


def measure(
    target: Target, drafters: list[Drafter], prompts: Prompts, template: Template, config: EvaluateConfig
) -> list[Row]:
    """Every prompt, decoded without a drafter and with each by turns, so that a machine that slows down slows all of them."""
    ways = [_plain(target, config), *(_drafted(target, drafter, config) for drafter in drafters)]
    everything = [(name, prompt) for name, group in prompts.items() for prompt in group]
    measured = list[Row]()
    with ProgressLine("prompt", len(everything)) as progress:
        _warm_up(ways, everything[0][1], template)
        began = time.monotonic()
        for number, (name, prompt) in enumerate(everything):
            measured.append(decode_row(name, prompt, number, ways, template, config))
            seconds_each = (time.monotonic() - began) / len(measured)
            progress.show(len(measured), _so_far(measured), seconds_each * (len(everything) - len(measured)))
    return measured


def decode_row(
    name: str, prompt: Prompt, number: int, ways: list[Way], template: Template, config: EvaluateConfig
) -> Row:
    """All replies to one prompt in every way. A conversation goes on with the plain reply: every drafter is asked the same."""
    row, replies = Row(name, prompt.id, [Tally() for _ in ways]), itertools.count(1)
    order = np.roll(range(len(ways)), number)  # each is first in its turn

    def reply(tokens: list[int]) -> str:
        turn, said = next(replies), dict[int, Decoded]()
        for at in order:
            began = time.perf_counter()
            said[at] = ways[at](tokens, seed=_seed(config.seed, number, turn))
            row.ways[at].add(said[at], time.perf_counter() - began)
        plain = said[PLAIN].tokens
        for at, tally in enumerate(row.ways):
            if config.temperature == 0 and tally.difference is None and said[at].tokens != plain:
                tally.difference = f"reply {turn}, {_first_difference(said[at].tokens, plain)}"
        return _text(plain, template)

    hold_conversation(prompt, template, reply)
    return row


def decode_tau(
    target: Target,
    drafter: Drafter,
    prompts: Prompts,
    *,
    config: EvaluateConfig,
    template_kwargs: dict[str, Any],
    stopping: threading.Event,
) -> dict[str, Any] | None:
    """tau, its interval and tau by set, prompts, tokens and steps; None once `stopping` is set. No plain decoding beside it."""
    template, way = Template(target.tokenizer, template_kwargs), _drafted(target, drafter, config)
    groups = {name: list[Tally]() for name in prompts}
    for number, (name, prompt) in enumerate((name, prompt) for name, group in prompts.items() for prompt in group):
        if stopping.is_set():
            return None
        tally, replies = Tally(), itertools.count(1)

        def reply(tokens: list[int], number=number, tally=tally, replies=replies) -> str:
            decoded = way(tokens, seed=_seed(config.seed, number, next(replies)))
            tally.add(decoded, decoded.target_seconds + decoded.drafter_seconds)
            return _text(decoded.tokens, template)

        hold_conversation(prompt, template, reply)
        groups[name].append(tally)
    tau, interval = mean_and_interval([_taus(group) for group in groups.values()], seed=config.seed)
    tallies = [tally for group in groups.values() for tally in group]
    return {
        "tau": tau,
        "tau_interval": interval,
        "sets": {name: mean_and_interval([_taus(group)], seed=config.seed)[0] for name, group in groups.items()},
        "prompts": len(tallies),
        "tokens": sum(tally.tokens for tally in tallies),
        "steps": sum(len(tally.committed) for tally in tallies),
    }


def _plain(target: Target, config: EvaluateConfig) -> Way:
    return functools.partial(decode_plain, target, **_how(target, config))


def _drafted(target: Target, drafter: Drafter, config: EvaluateConfig) -> Way:
    own = replace(target, layer_ids=list(drafter.shape.target_layer_ids))  # two drafters may look at different layers
    return functools.partial(Decoder(own, drafter).decode, **_how(target, config))


def _how(target: Target, config: EvaluateConfig) -> dict[str, Any]:
    sampling = Sampling(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p)
    return {"max_new_tokens": config.max_new_tokens, "stop": stop_tokens(target), "sampling": sampling}


def _warm_up(ways: list[Way], prompt: Prompt, template: Template) -> None:
    def reply(tokens: list[int]) -> str:
        for way in ways:
            way(tokens, max_new_tokens=WARM_UP_TOKENS)
        return ""

    hold_conversation(replace(prompt, stages=prompt.stages[:1]), template, reply)


def _seed(seed: int, number: int, turn: int) -> int:
    """Of one reply, so that no two of them share random numbers."""
    return int(np.random.SeedSequence([seed, number, turn]).generate_state(1)[0])


def _text(reply: list[int], template: Template) -> str:
    return template.tokenizer.decode(reply, skip_special_tokens=True)


def _first_difference(ours: list[int], plain: list[int]) -> str:
    at = next((i for i, pair in enumerate(zip(ours, plain, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return f"it has {len(ours)} tokens instead of {len(plain)}"
    return f"token {at + 1}: {ours[at]} instead of {plain[at]}"


def _so_far(measured: list[Row]) -> str:
    plain, drafted = ([row.ways[at] for row in measured] for at in (PLAIN, PLAIN + 1))
    rates = [sum(tally.tokens for tally in way) / sum(tally.seconds for tally in way) for way in (drafted, plain)]
    taus = _taus(drafted)
    return f"tau {np.mean(taus) if taus else math.nan:.2f}  {rates[0]:,.1f} tok/s, {rates[1]:,.1f} without a drafter"


# ---------------------------------------------------------------- statistics


def mean_and_interval(groups: Sequence[Sequence[float]], *, seed: int) -> tuple[float | None, list[float] | None]:
    """The mean over all values of all groups and its bootstrap 95 % interval, [low, high]: the percentiles 2.5 and 97.5.

    Values are drawn again within their group, since how many prompts of which set there are is no accident. No mean without
    a value; no interval where a group has a single one, which says nothing of how others would differ.
    """
    draw, arrays = np.random.default_rng(seed), [np.array(group) for group in groups if group]
    if not arrays:
        return None, None
    count = sum(map(len, arrays))
    mean = float(sum(map(np.sum, arrays)) / count)
    if min(map(len, arrays)) == 1:
        return mean, None
    sums = np.zeros(DRAWS)
    for array in arrays:
        sums += array[draw.integers(len(array), size=(DRAWS, len(array)), dtype=np.int32)].sum(axis=1)
    return mean, np.percentile(sums / count, [2.5, 97.5]).tolist()


def summarise(measured: list[Row], block_sizes: list[int], config: EvaluateConfig) -> dict[str, Any]:
    """{"sets": {name: ...}, "overall": ...}: the first drafter's figures, the second's in `against`, and their difference."""
    names = list(dict.fromkeys(row.set for row in measured))
    groups = [[row for row in measured if row.set == name] for name in names]
    return {
        "sets": {name: _summary([group], block_sizes, config) for name, group in zip(names, groups, strict=True)},
        "overall": _summary(groups, block_sizes, config),
    }


def _summary(groups: list[list[Row]], block_sizes: list[int], config: EvaluateConfig) -> dict[str, Any]:
    first, *second = (_figures(groups, at, size, config) for at, size in enumerate(block_sizes, start=1))
    if not second:
        return first
    pairs = [[(row.ways[1].tau, row.ways[2].tau) for row in group] for group in groups]
    gains = [[a - b for a, b in group if a is not None and b is not None] for group in pairs]
    difference, interval = mean_and_interval(gains, seed=config.seed)
    return first | {"against": second[0], "difference": difference, "difference_interval": interval}


def _figures(groups: list[list[Row]], at: int, block_size: int, config: EvaluateConfig) -> dict[str, Any]:
    """What one drafter did; `acceptance` is, for each drafted slot, the share of steps that accepted it."""
    rows = [row for group in groups for row in group]
    drafted, plain = [row.ways[at] for row in rows], [row.ways[PLAIN] for row in rows]
    tau, interval = mean_and_interval([_taus([row.ways[at] for row in group]) for group in groups], seed=config.seed)
    committed = np.array([count for tally in drafted for count in tally.committed])
    accepted = np.array([count for tally in drafted for count in tally.accepted])
    if not len(committed):
        raise ValueError(
            f"prompts of {', '.join(dict.fromkeys(row.set for row in rows))}: every reply ends with its first token, so the "
            "drafter never drafts; are they rendered as the target expects (chat template, data.template_kwargs)?"
        )
    rates = [sum(tally.tokens for tally in way) / sum(tally.seconds for tally in way) for way in (drafted, plain)]
    return {
        "prompts": len(rows),
        "tokens": sum(tally.tokens for tally in drafted),
        "steps": len(committed),
        "tau": tau,
        "tau_interval": interval,
        "tau_pooled": float(committed.mean()),
        "acceptance": [float((accepted >= slot).mean()) for slot in range(1, block_size)],
        "tokens_per_second": rates[0],
        "plain_tokens_per_second": rates[1],
        "speed_up": rates[0] / rates[1],
        "identical": None if config.temperature else sum(t.difference is None for t in drafted) / len(rows),
    }


def _taus(tallies: list[Tally]) -> list[float]:
    return [tally.tau for tally in tallies if tally.tau is not None]


# ---------------------------------------------------------------- what is told


def _row_values(row: Row) -> dict[str, Any]:
    plain, first, *second = row.ways
    values = {"id": row.id, "set": row.set, **_tally_values(first), "plain_tokens": plain.tokens}
    values["plain_seconds"] = plain.seconds
    return values | ({"against": _tally_values(second[0])} if second else {})


def _tally_values(tally: Tally) -> dict[str, Any]:
    return {
        "tokens": tally.tokens,
        "steps": len(tally.committed),
        "tau": tally.tau,
        "seconds": tally.seconds,
        "difference": tally.difference,
    }


def print_tables(result: dict[str, Any], names: list[str]) -> None:
    """Two tables a drafter, tau and speed and then its acceptance per slot, and the difference of two drafters."""
    console = Console(highlight=False)
    scopes = result["sets"] | ({"overall": result["overall"]} if len(result["sets"]) > 1 else {})
    for at, name in enumerate(names):
        console.print(f"\n{name} on {result['target']['name']}", markup=False, soft_wrap=True)
        if note := result[DRAFTERS[at]].get("note"):  # what of it could not be checked
            console.print(note, markup=False, soft_wrap=True)
        console.print(_tau_table(of_drafter(scopes, at)))
        console.print("% of the steps that accept the draft in slot 1, 2, ...")
        console.print(_slot_table(of_drafter(scopes, at)))
    if len(names) > 1:
        console.print("A minus B, tau on the same prompts")
        table = _table("set", "difference", "95 % interval")
        for scope, values in scopes.items():
            table.add_row(scope, f"{values['difference']:+.3f}", _interval(values["difference_interval"], "+.3f"))
        console.print(table)


def of_drafter(scopes: dict[str, dict[str, Any]], at: int) -> dict[str, dict[str, Any]]:
    """The figures of one drafter from those of both: 0 is the first, 1 the one it is compared with."""
    return scopes if at == 0 else {scope: values["against"] for scope, values in scopes.items()}


def _tau_table(figures: dict[str, dict[str, Any]]) -> Table:
    table = _table("set", "prompts", "tau", "95 % interval", "tokens/s", "without", "identical")
    for scope, values in figures.items():
        table.add_row(
            scope,
            f"{values['prompts']:,}",
            f"{values['tau']:.3f}",
            _interval(values["tau_interval"], ".3f"),
            f"{values['tokens_per_second']:,.1f}",
            f"{values['plain_tokens_per_second']:,.1f}",
            "-" if values["identical"] is None else f"{values['identical']:.1%}",
        )
    return table


def _slot_table(figures: dict[str, dict[str, Any]]) -> Table:
    slots = min(TABLE_SLOTS, len(next(iter(figures.values()))["acceptance"]))
    table = _table("set", *(str(slot) for slot in range(1, slots + 1)))
    for scope, values in figures.items():
        table.add_row(scope, *(f"{100 * share:.0f}" for share in values["acceptance"][:slots]))
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first)
    for other in others:
        table.add_column(other, justify="right", no_wrap=True)
    return table


def _interval(ends: list[float] | None, form: str) -> str:
    return "-" if ends is None else f"{ends[0]:{form}} to {ends[1]:{form}}"


if __name__ == "__main__":
    sys.exit(main())
