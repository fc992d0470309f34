"""One conversation as the target reads it: checked, rendered by its own chat template, tokenised, with a loss mask.

The loss mask needs no `{% generation %}` markers. A conversation is rendered twice: as it is, and with each assistant
text replaced by a sentinel. What stands between the sentinels is the template's own text, and walking the real
rendering along it gives the exact characters of every reply; token offsets turn those into a mask. `prove` shows for
the template at hand that the masked tokens decode to the replies and their end-of-turn tokens.
"""

import hashlib
import inspect
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError
from tokenizers import Encoding, Tokenizer, processors

ROLES = {"system", "developer", "user", "assistant", "tool", "human", "gpt"}
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names under which templates read a turn's reasoning; transformers fills the missing ones in from the one given."""

EMPTY = "empty"
BAD_MESSAGE = "bad_message"
NOT_TEXT = "not_text"
UNKNOWN_ROLE = "unknown_role"
NO_REPLY = "no_reply"
TEMPLATE_REFUSED = "template_refused"
TEMPLATE_REWRITES = "template_rewrites_reply"
NO_END_OF_TURN = "no_end_of_turn"
NO_ANCHOR = "no_anchor"
DROP_REASONS = {
    EMPTY: "no messages",
    BAD_MESSAGE: "a message that is no object, has no role, no content, or malformed tool calls",
    NOT_TEXT: "content that is not text, such as an image, or that is not valid Unicode",
    UNKNOWN_ROLE: "a role that is not one of " + ", ".join(sorted(ROLES)),
    NO_REPLY: "no assistant turn, or only empty ones",
    TEMPLATE_REFUSED: "the chat template raised an error",
    TEMPLATE_REWRITES: "the chat template changes, repeats or omits a reply, so that its place is not certain",
    NO_END_OF_TURN: "no end-of-turn token follows a reply",
    NO_ANCHOR: "no two neighbouring supervised tokens are left after the cut at max_tokens",
}

SENTINEL = "dflash7c1e93b2a5f4r"
SENTINELS = re.compile(SENTINEL + r"(\d+)z")
EMPTY_THINKING = re.compile(r"\s*(?:<\w+>\s*)?</\w+>\s*")
SYNTHETIC = [
    {"role": "user", "content": "Which colour has the sky?"},
    {"role": "assistant", "content": "Blue, on a clear day."},
    {"role": "user", "content": "And the grass?"},
    {"role": "assistant", "content": "Green, where it rains."},
]


class Unusable(Exception):
    """A conversation is dropped: one of DROP_REASONS and what was found."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


# ---------------------------------------------------------------- from a row to messages


def turns_of(row: Any) -> list[Any] | None:
    """The messages of a row in either form, or None where it is no conversation."""
    if not isinstance(row, dict):
        return None
    turns = row["conversations"] if row.get("messages") is None and "conversations" in row else row.get("messages")
    return turns if isinstance(turns, list) else None


def conversation(row: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """(messages, tools) of a row, as a chat template takes them; raises Unusable."""
    messages = messages_of(row)
    if not any(message["role"] == "assistant" for message in messages):
        raise Unusable(NO_REPLY)
    return messages, row.get("tools") or None


def messages_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a row, with the roles and the text content that chat templates know; raises Unusable."""
    messages = [_message(message) for message in turns_of(row) or []]
    if not messages:
        raise Unusable(EMPTY)
    return messages


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise Unusable(BAD_MESSAGE, f"{message!r:.80}")
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    calls = message.get("tool_calls") or []
    if not isinstance(role, str):
        raise Unusable(BAD_MESSAGE, f"role is {role!r:.80}")
    if role not in ROLES:
        raise Unusable(UNKNOWN_ROLE, f"{role!r:.80}")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise Unusable(BAD_MESSAGE, f"tool_calls is {calls!r:.80}")
    if isinstance(content, list):
        content = "".join(_text_of(part) for part in content)
    if content is None and (calls or any(message.get(key) for key in REASONING_KEYS)):
        content = ""
    if not isinstance(content, str):
        raise Unusable(BAD_MESSAGE, f"content is {content!r:.80}")
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {**rest, "role": SHAREGPT_ROLES.get(role, role), "content": content}


def _text_of(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise Unusable(NOT_TEXT, f"{part!r:.80}")
    return part["text"]


# ---------------------------------------------------------------- from a conversation to text and its replies


@dataclass(frozen=True)
class Reply:
    """Character positions of one assistant turn in a rendering."""

    start: int
    """First character that the model itself must write."""
    end: int
    """After the last character known to be the model's own text; the end-of-turn token is the next special one."""
    calls: bool
    """The turn ends with a tool call, so template text may stand between `end` and the end-of-turn token."""
    whole_call: bool
    """`end` lies after the call's arguments, so whatever special token comes next is its end (`<|call|>`)."""


@dataclass(frozen=True)
class Rendered:
    """One conversation as the target reads it."""

    text: str
    replies: list[Reply]


class Template:
    """A tokenizer and its chat template, ready to turn conversations into tokens and loss masks."""

    def __init__(self, tokenizer: Any, kwargs: dict[str, Any]):
        self.name = tokenizer.name_or_path or type(tokenizer).__name__
        if not tokenizer.is_fast:
            raise ValueError(
                f"target.name={self.name}: its tokenizer has no character offsets; give one with tokenizer.json"
            )
        if not tokenizer.chat_template:
            raise ValueError(
                f"target.name={self.name}: its tokenizer has no chat template; "
                "take the chat version of the model or put chat_template.jinja beside its tokenizer"
            )
        if reserved := sorted(set(kwargs) & set(inspect.signature(tokenizer.apply_chat_template).parameters)):
            raise ValueError(
                f"data.template_kwargs: {', '.join(reserved)} cannot be set; give the template's own variables"
            )
        self.tokenizer, self.kwargs = tokenizer, kwargs
        # A copy, because truncation and padding are state of the tokenizer that anyone may have set
        self.backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        alone = tokenizer("a")["input_ids"]
        self.adds_bos = tokenizer.bos_token_id is not None and alone[:1] == [tokenizer.bos_token_id]
        self.identity = [
            hashlib.sha256(self.backend.to_str().encode()).hexdigest(),
            tokenizer.special_tokens_map,
            tokenizer.chat_template,
            self.adds_bos,
            kwargs,
        ]
        # Byte-level processors trim spaces off the offsets, which hides that a token straddles a boundary
        self.backend.post_processor = processors.ByteLevel(trim_offsets=False)
        self.special = self._special_tokens()
        self.headers = self._headers()
        self.closes = self._closing_tokens()

    def _special_tokens(self) -> np.ndarray:
        """[vocabulary] bool: tokens that may end a turn: the special ones but unk and a BOS that is not EOS."""
        tokenizer = self.tokenizer
        special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        special |= set(tokenizer.all_special_ids)
        special -= {tokenizer.unk_token_id, tokenizer.bos_token_id} - {tokenizer.eos_token_id}
        marks = np.zeros(max(self.backend.get_vocab(with_added_tokens=True).values()) + 1, dtype=bool)
        marks[list(special)] = True
        return marks

    def _headers(self) -> list[str]:
        """The template's text before a reply, as far as it agrees with the generation prompt.

        A template may write another header for the last turn than for older ones, so both are tried. Where it has no
        generation prompt (Mistral), the header is all that follows the user's words.
        """
        headers = set()
        try:
            whole = self.render(SYNTHETIC, None)
            for turn in (1, 3):
                prompt = self.render(SYNTHETIC[:turn], None, add_generation_prompt=True)
                before = _agree(prompt, self.render(SYNTHETIC[:turn], None))
                if before == len(prompt):
                    words = SYNTHETIC[turn - 1]["content"]
                    before = prompt.rfind(words) + len(words)
                headers.add(prompt[before : _agree(prompt, whole)])
        except Unusable as error:
            raise ValueError(
                f"target.name={self.name}: its chat template refuses a plain conversation of a user and an assistant "
                f"({error.detail}); mend the template or data.template_kwargs"
            ) from error
        return sorted(headers - {""})

    def _closing_tokens(self) -> np.ndarray:
        """[vocabulary] bool: the special tokens that the template writes after a reply."""
        try:
            rendered = self.locate(SYNTHETIC, None)
        except Unusable as error:
            raise ValueError(
                f"target.name={self.name}: {DROP_REASONS[error.reason]} ({error.detail}); mend its chat template"
            ) from error
        encoding = self.encode([rendered])[0]
        tokens, ends = np.array(encoding.ids), self._ends(rendered, encoding)
        if ends.max() == len(tokens):
            raise ValueError(
                f"target.name={self.name}: its chat template writes no special token after a reply, so a drafter would "
                "never learn to stop; let it end every assistant turn with the end-of-turn token"
            )
        closes = np.zeros_like(self.special)
        closes[tokens[ends]] = True
        return closes

    def render(self, messages: list[dict[str, Any]], tools: Any, add_generation_prompt: bool = False) -> str:
        """The conversation as text, as the template writes it; raises Unusable where the template refuses it."""
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **self.kwargs
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise Unusable(TEMPLATE_REFUSED, " ".join(str(error).split())) from error

    def locate(self, messages: list[dict[str, Any]], tools: Any) -> Rendered:
        """The rendering and where its replies are; raises Unusable."""
        text = self.render(messages, tools)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Unusable(NOT_TEXT, str(error)) from error
        probe, fields = _probe(messages)
        found = _walk(text, self.render(probe, tools), fields)
        replies, previous_end = [], 0
        for _, group in groupby(found, key=lambda place: place[0].turn):
            places = list(group)
            first, end = places[0][1], places[-1][2]
            header_ends = (
                at + len(header) for header in self.headers if (at := text.rfind(header, previous_end, first)) >= 0
            )
            start = max(header_ends, default=first)
            thinks = any(field.kind == "reasoning" for field, _, _ in places)
            if not thinks and EMPTY_THINKING.fullmatch(text, start, first):
                start = first
            last = places[-1][0]
            after_call = _after_arguments(text, end, last.arguments) if last.kind == "call" else None
            previous_end = after_call or end
            replies.append(Reply(start, previous_end, last.kind == "call", after_call is not None))
        if not replies:
            raise Unusable(NO_REPLY)
        return Rendered(text, replies)

    def encode(self, batch: list[Rendered]) -> list[Encoding]:
        """Tokens with character offsets, no special token added."""
        return self.backend.encode_batch([rendered.text for rendered in batch], add_special_tokens=False)

    def _ends(self, rendered: Rendered, encoding: Encoding) -> np.ndarray:
        """[replies] position of the first special token that ends or follows each reply; the number of tokens: none."""
        finishes = [finish for _, finish in encoding.offsets]
        special = np.append(np.flatnonzero(self.special[encoding.ids]), len(finishes))
        after = np.searchsorted(finishes, [reply.end for reply in rendered.replies])
        return special[np.searchsorted(special, after)]

    def mask(self, rendered: Rendered, encoding: Encoding) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32 [S], loss_mask bool [S]) with exactly one BOS where the tokenizer has one; raises Unusable."""
        tokens = np.array(encoding.ids, dtype=np.int32)
        loss_mask = np.zeros(len(tokens), dtype=bool)
        # A token that straddles the start of a reply begins before it, and so stays out
        begins = [begin for begin, _ in encoding.offsets]
        starts = np.searchsorted(begins, [reply.start for reply in rendered.replies])
        ends, limits = self._ends(rendered, encoding), [*starts[1:], len(tokens)]
        for reply, start, end, limit in zip(rendered.replies, starts, ends, limits, strict=True):
            if end >= limit or not (reply.whole_call or self.closes[tokens[end]]):
                raise Unusable(NO_END_OF_TURN)
            loss_mask[start : end + 1] = True
        if self._lacks_bos(tokens):
            tokens = np.insert(tokens, 0, self.tokenizer.bos_token_id)
            loss_mask = np.insert(loss_mask, 0, False)
        return tokens, loss_mask

    def tokens(self, text: str) -> list[int]:
        """The ids of a rendering, with exactly one BOS where the tokenizer has one."""
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return [self.tokenizer.bos_token_id, *ids] if self._lacks_bos(ids) else ids

    def _lacks_bos(self, ids: Any) -> bool:
        return self.adds_bos and ids[0] != self.tokenizer.bos_token_id


def _agree(left: str, right: str) -> int:
    """Characters at the start that both texts share."""
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@dataclass(frozen=True)
class Field:
    """A text of an assistant turn that was replaced by a sentinel."""

    turn: int
    kind: str
    """reasoning, content or call"""
    value: str
    arguments: Any = None
    """Of a call, whose value is its name."""


def _probe(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Field]]:
    """The same conversation with a sentinel in place of every text that an assistant wrote, and those texts.

    Blank texts stay, since templates ask for them. `<think>` tags inside a content stay too: templates look for them.
    """
    fields: list[Field] = []

    def sentinel(turn: int, kind: str, value: Any, arguments: Any = None) -> Any:
        if not isinstance(value, str) or not value.strip():
            return value
        fields.append(Field(turn, kind, value, arguments))
        return f"{SENTINEL}{len(fields) - 1}z"

    def call(turn: int, value: dict[str, Any]) -> dict[str, Any]:
        inner = value.get("function")
        if isinstance(inner, dict):
            return {**value, "function": call(turn, inner)}
        return {**value, "name": sentinel(turn, "call", value.get("name"), value.get("arguments"))}

    probe = []
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            message = dict(message)
            thinking, closing, content = message["content"].rpartition("</think>")
            lead, opening, thought = thinking.rpartition("<think>")
            thought, content = sentinel(turn, "reasoning", thought), sentinel(turn, "content", content)
            message["content"] = lead + opening + thought + closing + content
            for key in REASONING_KEYS:
                if key in message:
                    message[key] = sentinel(turn, "reasoning", message[key])
            if message.get("tool_calls"):
                message["tool_calls"] = [call(turn, value) for value in message["tool_calls"]]
        probe.append(message)
    return probe, fields


def _walk(text: str, probe: str, fields: list[Field]) -> list[tuple[Field, int, int]]:
    """(field, start, end) in `text` of every sentinel of `probe`, in order; raises Unusable where they do not agree."""
    pieces = SENTINELS.split(probe)
    literals, numbers = pieces[::2], [int(number) for number in pieces[1::2]]
    if len(set(numbers)) < len(numbers) or max(numbers, default=-1) >= len(fields):
        raise Unusable(TEMPLATE_REWRITES, "a reply is written twice")
    order = [fields[number].turn for number in numbers]
    if order != sorted(order):
        raise Unusable(TEMPLATE_REWRITES, "replies change places")
    for number, field in enumerate(fields):
        # Templates drop older reasoning, and some the words beside a call, but never a call or a whole reply
        needed = field.kind == "call" or (field.kind == "content" and field.turn not in order)
        if needed and number not in numbers:
            raise Unusable(TEMPLATE_REWRITES, f"the {field.kind} of message {field.turn} is left out")
    places, position = [], len(literals[0])
    same = text.startswith(literals[0])
    for number, literal in zip(numbers, literals[1:], strict=True):
        field = fields[number]
        ends = (position + len(value) for value in _trimmed(field.value) if text.startswith(value, position))
        end = next((end for end in ends if text.startswith(literal, end)), None)
        if not same or end is None:
            raise Unusable(TEMPLATE_REWRITES, f"the {field.kind} of message {field.turn} is not written as given")
        places.append((field, position, end))
        position = end + len(literal)
    if position != len(text):
        raise Unusable(TEMPLATE_REWRITES, "the rendering goes on after the last reply")
    return places


def _after_arguments(text: str, position: int, arguments: Any) -> int | None:
    """Where a call's arguments end if they follow its name as JSON, 64 characters of template text allowed between."""
    forms = [json.dumps(arguments, ensure_ascii=False), arguments if isinstance(arguments, str) else ""]
    starts = ((text.find(form, position, position + 64 + len(form)), form) for form in forms if form)
    return next((at + len(form) for at, form in starts if at >= 0), None)


def _trimmed(value: str) -> Iterable[str]:
    """The forms in which a template may write a text: as it is, or with its ends trimmed."""
    newlines = (value.strip("\n"), value.lstrip("\n"), value.rstrip("\n"))
    return dict.fromkeys((value, *newlines, value.strip(), value.lstrip(), value.rstrip()))


# ---------------------------------------------------------------- the proof


def prove(template: Template, messages: list[dict[str, Any]], tools: Any, where: str) -> None:
    """Shows that the masked tokens of a conversation are its replies and their end-of-turn tokens.

    Raises ValueError with the turn where they decode to anything else, Unusable as `Template.locate` does.
    """
    rendered = template.locate(messages, tools)
    tokens, loss_mask = template.mask(rendered, template.encode([rendered])[0])
    tokenizer = template.tokenizer
    own = tokenizer(rendered.text, add_special_tokens=False)["input_ids"]
    edges = np.flatnonzero(np.diff(loss_mask, prepend=False, append=False)).reshape(-1, 2)
    if tokens.tolist() not in (own, [tokenizer.bos_token_id, *own]) or len(edges) != len(rendered.replies):
        raise ValueError(
            f"target.name={template.name}: the loss mask cannot be proven on {where}: {len(edges)} stretches of "
            f"{len(tokens)} tokens for {len(rendered.replies)} replies of {len(own)}; use another tokenizer or template"
        )
    for reply, (start, end) in zip(rendered.replies, edges, strict=True):
        masked = _squeeze(tokenizer.decode(tokens[start : end - 1]))
        # Through the tokenizer and back, because normalisation and unknown characters may change the words
        text = rendered.text[reply.start : reply.end]
        words = _squeeze(tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]))
        words = words.removesuffix(_squeeze(tokenizer.decode(tokens[end - 1 : end])))
        if reply.calls:
            masked = masked[: len(words)]
        straddling = words[: len(words) - len(masked)]
        before = _squeeze(tokenizer.decode(tokens[max(start - 1, 0) : start]))
        if not (words.endswith(masked) and before.endswith(straddling)):
            raise ValueError(
                f"target.name={template.name}: the loss mask cannot be proven on {where}: the supervised tokens say "
                f"{masked!r:.80} where the reply is {words!r:.80}; use another tokenizer or chat template"
            )


def _squeeze(text: str) -> str:
    return "".join(text.split())
