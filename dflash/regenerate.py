"""The target's own answers to prompts, kept as they end: what a drafter must learn from.

    python -m dflash.regenerate --prompts FILE --target T --out DIR [--config FILE] [--SECTION.FIELD VALUE ...]
                                [--refresh] [--report FILE.json]

    DIR/<key>/                       key: target, chat template, system prompt, sampling, lengths, seed; not the prompts
      shard-*.jsonl, claims          every prompt's answer (answer_store.py): never made twice
      prompts-<digest>/              what this prompt file comes to
        conversations.jsonl          in the file's order; data.path for training
        dropped.jsonl, report.json, lengths.png

The same command started again, or at the same time elsewhere, does only what is missing. With --refresh all answers are made anew;
the ones before stay as DIR/<key>.until-<time>.
Exit codes: 0 all answered, 1 failed, 2 refused before any work, 3 stopped; what is answered stays.
"""

import argparse
import contextlib
import hashlib
import heapq
import json
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dflash import config as configuration
from dflash import prompt_file
from dflash.answer_store import AnswerStore, set_aside
from dflash.answers import LENGTH, REFUSED, Answer, Request, Source
from dflash.command import FINISHED, Parser, run
from dflash.config import Config
from dflash.conversation import DROP_REASONS, Template, Unusable
from dflash.endpoint import Endpoint
from dflash.files import check_writable, replaced, sha256_of_json, write_json
from dflash.generation import LocalSource
from dflash.plots import histogram
from dflash.progress import ProgressLine, print_summary
from dflash.prompt_file import PROMPT_DROP_REASONS, Line, Prompt, prompt_of
from dflash.sampling import Sampling
from dflash.target import load_configured, load_tokenizer

CODE_VERSION = 1  # part of the key: raised when the same inputs give other answers
ELSEWHERE_SECONDS = 1.0  # between two looks at prompts that another process is answering
KNOB = "regenerate.prompts"
FLAGS = {"--prompts": "regenerate.prompts", "--target": "target.name", "--out": "regenerate.out"}

KEPT = "kept"
EMPTY_REPLY, CUT, RETOKENISED, TARGET_REFUSED = "empty_reply", "cut", "tokenises_otherwise", "refused"
ALL_DROP_REASONS = (
    DROP_REASONS
    | PROMPT_DROP_REASONS
    | {
        EMPTY_REPLY: "a reply without a word",
        CUT: "a reply reached max_new_tokens (regenerate.cut_replies=drop)",
        RETOKENISED: "rendered and tokenised again, the reply is not the tokens that the target said",
        TARGET_REFUSED: "the target or its server cannot answer it",
    }
)


# ---------------------------------------------------------------- the command, in order


def regenerate(config: Config, *, refresh: bool = False, report_file: Path | None = None) -> int:
    """Answers what is missing, or everything anew, then writes what the prompt file comes to."""
    section = config.regenerate
    if section.prompts is None:
        raise ValueError("regenerate.prompts is not set; name the file: --prompts FILE")
    prompts = read_index(Path(section.prompts), system=section.system_prompt)  # before the minutes that a target takes
    if report_file is not None:
        check_writable(report_file)
    source, template = _source(config)
    key = _key(config, source, template)
    aside = set_aside(Path(section.out), key) if refresh else None
    with AnswerStore(Path(section.out), key) as store:
        missing = [entry for entry in prompts.entries if entry.key not in store]
        work, done = Work(missing, prompts, template, store, section.cut_replies), len(prompts.entries) - len(missing)
        with ProgressLine("prompt", len(prompts.entries), done) as progress:
            if aside is not None:
                progress.say(f"the answers until now are set aside: {aside}")
            progress.say(f"{store.directory}: {len(prompts.entries):,} prompts, {len(missing):,} of them to answer")
            here = answer(work, source, done=done, progress=progress)
        report = write_result(prompts, store, here)
        if report_file is not None:
            directory = result_directory(prompts, store).absolute()
            places = {"conversations": str(directory / "conversations.jsonl"), "directory": str(directory)}
            write_json(report_file, places | {"report": report})
        tell(prompts, store, report)
    return FINISHED


def _source(config: Config) -> tuple[Source, Template]:
    section, target = config.regenerate, config.target
    if section.endpoint is not None:
        tokenizer = load_tokenizer(target.name, revision=target.revision, trust_remote_code=target.trust_remote_code)
        template = Template(tokenizer, config.data.template_kwargs)
        endpoint = Endpoint(section, template)
        endpoint.check()
        return endpoint, template
    loaded = load_configured(target, captures=False)
    sampling = Sampling(temperature=section.temperature, top_k=section.top_k, top_p=section.top_p)
    local = LocalSource(
        loaded, sampling=sampling, max_new_tokens=section.max_new_tokens, seed=section.seed, rows=section.batch_rows
    )
    local.prove()
    return local, Template(loaded.tokenizer, config.data.template_kwargs)


def _key(config: Config, source: Source, template: Template) -> dict[str, Any]:
    """Everything that an answer depends on, beside its prompt."""
    section = config.regenerate
    greedy = section.temperature == 0
    return {
        "code": CODE_VERSION,
        "source": source.identity,
        "template": sha256_of_json(template.identity),
        "template_kwargs": config.data.template_kwargs,
        "system_prompt": section.system_prompt,
        "max_new_tokens": section.max_new_tokens,
        "temperature": section.temperature,
        "top_p": None if greedy else section.top_p,
        "top_k": None if greedy else section.top_k,
        "seed": None if greedy else section.seed,
        "cut_replies": section.cut_replies,
    }


# ---------------------------------------------------------------- prompts


@dataclass(frozen=True)
class Entry:
    """One prompt of the file, by place: its text is read when its turn comes."""

    key: str
    id: str
    line: Line
    characters: int


@dataclass(frozen=True)
class Index:
    """What a prompt file holds."""

    path: Path
    digest: str
    """Of the prompts and their ids, in order."""
    system: str | None
    rows: int
    entries: list[Entry]
    """Every prompt once, in the file's order."""
    unusable: list[dict[str, Any]]
    """line, id, reason and detail of the rows that are no prompts."""

    def prompt(self, entry: Entry) -> Prompt:
        row = prompt_file.row_at(self.path, entry.line, knob=KNOB)
        with contextlib.suppress(Unusable):
            prompt = prompt_of(row, system=self.system)
            if prompt.key == entry.key:
                return prompt
        # its answer would be kept as that of another prompt
        raise ValueError(f"{KNOB}={self.path}:{entry.line.number}: changed since the start; start the command again")


def read_index(path: Path, *, system: str | None) -> Index:
    """Every prompt of a file. Raises ValueError for a line that is no row, and where there is no prompt at all."""
    entries: dict[str, Entry] = {}
    unusable: list[dict[str, Any]] = []
    digest, rows = hashlib.sha256(), 0
    for line, row in prompt_file.rows(path, knob=KNOB):
        rows += 1
        try:
            prompt = prompt_of(row, system=system)
        except Unusable as error:
            unusable.append(_dropped(line.number, prompt_file.id_of(row), error.reason, error.detail))
            continue
        digest.update(f"{prompt.key} {prompt.id}\n".encode(errors="surrogatepass"))
        entries.setdefault(prompt.key, Entry(prompt.key, prompt.id, line, prompt.characters))
    if not entries:
        first = (
            f", the first: line {unusable[0]['line']}, {ALL_DROP_REASONS[unusable[0]['reason']]}" if unusable else ""
        )
        raise ValueError(f"{KNOB}={path}: none of its {rows} rows is a prompt{first}; give one prompt a line")
    return Index(path, digest.hexdigest(), system, rows, list(entries.values()), unusable)


def _dropped(line: int, sample_id: str | None, reason: str, detail: str) -> dict[str, Any]:
    return {"line": line, "id": sample_id, "reason": reason, "detail": detail}


# ---------------------------------------------------------------- answering


@dataclass
class Chat:
    """A conversation that is being answered, turn by turn."""

    entry: Entry
    prompt: Prompt
    messages: list[dict[str, Any]] = field(default_factory=list)
    replies: list[dict[str, Any]] = field(default_factory=list)
    """finish_reason, tokens and prompt_tokens of each."""


class Work:
    """The requests that wait for a source, further turns before new prompts; what is answered goes into the store.

    Further turns first: no more conversations are open than replies are under way, or a kill would cost turns that ended long ago.
    A prompt is claimed when it is taken, so that no other process has it; the ones that another has are put aside.
    """

    def __init__(self, entries: list[Entry], prompts: Index, template: Template, store: AnswerStore, cut_replies: str):
        self._prompts, self._template, self._store, self._cut_replies = prompts, template, store, cut_replies
        self._waiting: list[tuple[bool, int, int, Entry | Chat]] = []
        self._open: dict[str, Chat] = {}
        self._pushed, self.size = 0, len(entries)
        self.elsewhere: list[Entry] = []
        """Prompts that another process is answering."""
        self.finished = 0
        """Prompts that are done since the start, here or elsewhere."""
        for entry in entries:
            self._push(entry.characters, entry)

    def _push(self, characters: int, item: Entry | Chat) -> None:
        self._pushed += 1
        heapq.heappush(self._waiting, (isinstance(item, Entry), -characters, self._pushed, item))

    def take(self, count: int) -> list[Request]:
        """See `dflash.answers.Pending`."""
        requests: list[Request] = []
        while self._waiting and len(requests) < count:
            items = [heapq.heappop(self._waiting)[-1] for _ in range(min(count - len(requests), len(self._waiting)))]
            claimed = [item for item in items if isinstance(item, Chat) or self._claimed(item)]
            # after the claim, or an answer that came between a look and the claim would be made twice
            self._store.refresh()
            for item in claimed:
                if isinstance(item, Chat):
                    chat = item
                elif item.key in self._store:
                    self._store.release(item.key)
                    self.finished += 1
                    continue
                else:
                    chat = Chat(item, self._prompts.prompt(item))
                request = self._request(chat)
                requests += [request] if request else []
        return sorted(requests, key=lambda request: len(request.prompt_tokens), reverse=True)

    def _claimed(self, entry: Entry) -> bool:
        if self._store.claim(entry.key):
            return True
        self.elsewhere.append(entry)
        return False

    def look_again(self) -> None:
        """Lets the prompts wait again that another process had."""
        entries, self.elsewhere = self.elsewhere, []
        for entry in entries:
            self._push(entry.characters, entry)

    def _request(self, chat: Chat) -> Request | None:
        stage = len(chat.replies)
        chat.messages += chat.prompt.stages[stage]
        try:
            text = self._template.render(chat.messages, chat.prompt.tools, add_generation_prompt=True)
            tokens = self._template.tokens(text)
        except Unusable as error:
            self._finish(chat, error.reason, error.detail)
            return None
        key = f"{chat.entry.key} {stage}"
        self._open[key] = chat
        return Request(key=key, messages=list(chat.messages), tools=chat.prompt.tools, prompt_tokens=tokens)

    def answered(self, request: Request, answer: Answer) -> None:
        """Takes a reply: the conversation goes on with its next turn, or is kept or dropped."""
        chat = self._open.pop(request.key)
        chat.replies.append(
            {
                "finish_reason": answer.finish_reason,
                "tokens": answer.completion_tokens,
                "prompt_tokens": len(request.prompt_tokens),
            }
        )
        if answer.finish_reason == REFUSED:
            return self._finish(chat, TARGET_REFUSED, answer.detail)
        if not answer.content.strip() and not answer.reasoning:
            return self._finish(chat, EMPTY_REPLY)
        if answer.finish_reason == LENGTH and self._cut_replies == "drop":
            return self._finish(chat, CUT, f"{answer.completion_tokens} tokens")
        message = message_of(request, answer, self._template)
        if message is None:
            return self._finish(chat, RETOKENISED, f"{answer.content!r:.80}")
        chat.messages.append(message)
        if len(chat.replies) == len(chat.prompt.stages):
            return self._finish(chat, KEPT)
        self._push(sum(len(message["content"]) for message in chat.messages), chat)

    def _finish(self, chat: Chat, outcome: str, detail: str = "") -> None:
        cut = any(reply["finish_reason"] == LENGTH for reply in chat.replies)
        self._store.write(
            {
                "key": chat.entry.key,
                "id": chat.entry.id,
                "outcome": outcome,
                "detail": detail,
                "finish_reason": LENGTH if cut else chat.replies[-1]["finish_reason"] if chat.replies else None,
                "replies": chat.replies,
                "messages": chat.messages,
                **({"tools": chat.prompt.tools} if chat.prompt.tools else {}),
            }
        )
        self.finished += 1


def message_of(request: Request, answer: Answer, template: Template) -> dict[str, Any] | None:
    """The assistant's turn which, rendered by the template, gives the reply's own tokens; None where there is none.

    Thinking is left in the content or taken out of it, whichever the template writes back as it was said. Where the source does
    not know its tokens (a server), the turn is taken as it came.
    """
    turn: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.token_ids is None:
        return turn | ({"reasoning_content": answer.reasoning} if answer.reasoning else {})
    turns = [turn]
    if "</think>" in answer.content:
        reasoning, _, content = answer.content.partition("</think>")
        reasoning = reasoning.strip().removeprefix("<think>").strip("\n")
        turns.append(turn | {"reasoning_content": reasoning, "content": content.lstrip("\n")})
    said = request.prompt_tokens + answer.token_ids
    for turn in turns:
        try:
            tokens = template.tokens(template.render([*request.messages, turn], request.tools))
        except Unusable:
            continue
        if tokens[: len(said)] == said:
            return turn
    return None


def answer(work: Work, source: Source, *, done: int, progress: ProgressLine) -> dict[str, float]:
    """Has all the work answered, of which `done` prompts were before; replies, tokens and seconds of this process."""
    started, replies, tokens = time.monotonic(), 0, 0
    while True:
        with closing(source.answers(work)) as answers:  # a server is hung up on at once, whatever happens here
            for request, reply in answers:
                work.answered(request, reply)
                replies, tokens = replies + 1, tokens + reply.completion_tokens
                seconds = time.monotonic() - started
                left = (work.size - work.finished) * seconds / max(1, work.finished)
                progress.show(done + work.finished, f"{tokens / seconds:,.0f} tok/s  {replies:,} replies", left)
        if not work.elsewhere:
            return {"replies": replies, "reply_tokens": tokens, "seconds": time.monotonic() - started}
        progress.show(done + work.finished, f"{len(work.elsewhere):,} are being answered by another process", 0)
        time.sleep(ELSEWHERE_SECONDS)
        work.look_again()


# ---------------------------------------------------------------- what came out


def result_directory(prompts: Index, store: AnswerStore) -> Path:
    """Where what a prompt file comes to is kept."""
    return store.directory / f"prompts-{prompts.digest[:8]}"


def write_result(prompts: Index, store: AnswerStore, here: dict[str, float]) -> dict[str, Any]:
    """conversations.jsonl, dropped.jsonl, report.json and lengths.png of a prompt file that is answered; the report."""
    directory = result_directory(prompts, store)
    directory.mkdir(exist_ok=True)
    dropped, lengths, finish_reasons = list(prompts.unusable), list[int](), Counter[str]()
    prompt_tokens = kept = 0
    with replaced(directory / "conversations.jsonl") as file:
        for entry in prompts.entries:
            record = store.read(entry.key)
            finish_reasons.update(reply["finish_reason"] for reply in record["replies"])
            lengths += [reply["tokens"] for reply in record["replies"]]
            prompt_tokens += sum(reply["prompt_tokens"] for reply in record["replies"])
            if record["outcome"] != KEPT:
                dropped.append(_dropped(entry.line.number, entry.id, record["outcome"], record["detail"]))
                continue
            kept += 1
            row = {"id": entry.id, **{name: record[name] for name in ("messages", "tools") if name in record}}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    with replaced(directory / "dropped.jsonl") as file:
        file.writelines(
            json.dumps(row, ensure_ascii=False) + "\n" for row in sorted(dropped, key=lambda row: row["line"])
        )
    reasons = Counter(row["reason"] for row in dropped)
    report = {
        "prompts": prompts.rows,
        "duplicates": prompts.rows - len(prompts.entries) - len(prompts.unusable),
        "conversations": kept,
        "dropped": dict(reasons.most_common()),
        "replies": len(lengths),
        "finish_reasons": dict(finish_reasons.most_common()),
        "prompt_tokens": prompt_tokens,
        "reply_tokens": sum(lengths),
        "reply_length": {f"p{q}": float(np.percentile(lengths, q)) for q in (0, 10, 50, 90, 100)} if lengths else {},
        "this_process": here,
    }
    write_json(directory / "report.json", report)
    if lengths:
        histogram(directory / "lengths.png", lengths, title=f"{len(lengths):,} replies", xlabel="tokens of a reply")
    if not kept:
        why = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        raise ValueError(
            f"{KNOB}={prompts.path}: no conversation is left of {prompts.rows} prompts ({why}); see {directory / 'dropped.jsonl'}"
        )
    return report


def tell(prompts: Index, store: AnswerStore, report: dict[str, Any]) -> None:
    """The one-screen summary."""
    directory, here = result_directory(prompts, store), report["this_process"]
    counts = ", ".join(f"{count:,} {reason}" for reason, count in report["finish_reasons"].items())
    lines = {
        "kept": f"{report['conversations']:,} conversations of {report['prompts']:,} prompts",
        "replies": f"{report['replies']:,} ({counts}), {report['reply_tokens']:,} tokens",
        "length": ", ".join(f"{name} {value:,.0f}" for name, value in report["reply_length"].items())
        + " tokens, lengths.png",
    }
    if report["duplicates"]:
        lines["duplicates"] = f"{report['duplicates']:,} prompts that the file holds before"
    for reason, count in report["dropped"].items():
        lines[f"dropped, {reason}"] = f"{count:,}: {ALL_DROP_REASONS[reason]}"
    if report["dropped"]:
        lines["dropped"] = "line by line in dropped.jsonl"
    rate = here["reply_tokens"] / max(here["seconds"], 1e-9)
    lines["now"] = f"{here['replies']:,} replies in {here['seconds']:,.0f} s, {rate:,.0f} tokens/s"
    lines["next"] = f"python -m dflash.train --config ... --data.path {directory / 'conversations.jsonl'}"
    print_summary(directory, lines)


# ---------------------------------------------------------------- the command


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code. The last line on stderr is the cause when it is not 0."""

    def body() -> int:
        parser = Parser(
            prog="python -m dflash.regenerate",
            usage="%(prog)s --prompts FILE --target T --out DIR [--config FILE] [--SECTION.FIELD VALUE ...]",
            description=__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.add_argument(
            "--refresh", action="store_true", help="make all answers anew; the ones before are set aside"
        )
        parser.add_argument(
            "--report", type=Path, metavar="FILE", help="JSON file to write: where the result lies, and counts"
        )
        configuration.add_arguments(parser, flat=FLAGS, sections=("target", "data", "regenerate"))
        parsed = parser.parse_args(arguments)
        config = configuration.from_arguments(parsed, trains=False)
        return regenerate(config, refresh=parsed.refresh, report_file=parsed.report)

    return run(body, stopped="stopped; what is answered stays, and the same command goes on")


if __name__ == "__main__":
    sys.exit(main())
