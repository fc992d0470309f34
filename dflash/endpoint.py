"""A server as a source of the target's answers: any that speaks OpenAI's chat completions (vLLM, SGLang, llama.cpp's, ...).

Nothing of a server is taken on trust. Before the first prompt it must read a set of conversations in the very token ids that the
target's own tokenizer and template give, and with each answer it must have counted as many prompt tokens as we did.

A request that fails is made again. Its failure counts against the prompt only when the server is shown to answer others at that
time: another answer came in the meantime, or a probe of one token gets one. TRIES such failures, or one that says that the prompt
itself is at fault (400 and the like), and the prompt is REFUSED. Where the server answers nobody, prompts wait for it, and once it
has been silent for `outage_seconds` the command ends.
"""

import asyncio
import hashlib
import json
import os
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Generator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache, cached_property
from typing import Any, TypeVar

import httpx2

from dflash.answers import LENGTH, REFUSED, STOP, Answer, Pending, Request
from dflash.config import RegenerateConfig
from dflash.conversation import SYNTHETIC, Template, Unusable

TRIES = 8
START_TRIES, START_SECONDS = 4, 60.0  # a refusal at the start costs less than waiting for a server that will not come
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.1, 30.0  # doubled from one try to the next
CONNECT_SECONDS = 10.0
BUSY = 429
UNAUTHORISED = {401, 403}
PROMPT_READ_OTHERWISE = 422  # as if the server had said so: this one is refused, if it reads the probe as we do
PROMPT_AT_FAULT = {400, 404, 413, PROMPT_READ_OTHERWISE}
UNKNOWN_WAY = PROMPT_AT_FAULT | {405, 501}
OTHER_ENDINGS = ("tool_calls", "function_call", "content_filter")
NOTHING_ELSE = {
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "samplers": ["temperature", "top_k", "top_p"],
}
"""What is left out is not off: vLLM and SGLang take it from the model's generation_config.json, llama.cpp from its own defaults
(top_k 40, min_p 0.05), its command line and the model file. `samplers` is llama.cpp's, which would apply the temperature last."""
LONGEST_QUOTE = 300  # characters of what a server says
REMEDY = "start the server with the target's own tokenizer and chat template"
T = TypeVar("T")
Way = Callable[[list[dict[str, Any]]], Awaitable[Any]]

SYSTEM = {"role": "system", "content": "Answer in one short sentence."}
SPACES = "def f(x):\n    return {'a': [x, 2.50]}  # two  spaces\n\n\tA tab, and then: 1234567 apples cost $89.10!"
WORLD = "Grüße aus São Paulo, Москва, 東京와 서울 — naïve “quotes”, ½ × 3 ≠ 4, 👩‍🚀🇧🇷."
CONVERSATIONS = [
    SYNTHETIC[:1],
    SYNTHETIC[:3],
    [SYSTEM, *SYNTHETIC[:1]],
    [SYSTEM, *SYNTHETIC[:3]],
    [{"role": "user", "content": SPACES}],
    [{"role": "user", "content": WORLD}, {"role": "assistant", "content": SPACES}, {"role": "user", "content": "42"}],
]
"""What a server must read as we do. Their characters are composed ones: llama.cpp leaves decomposed ones (NFD) as they are."""


class ServerFailed(Exception):
    """The server stayed away or is not what it was at the start. What has been answered stays."""


class _Fault(Exception):
    """Why a request got no answer."""

    def __init__(self, seen: str, *, status: int | None = None, retry_after_seconds: float = 0.0, passing: bool = True):
        super().__init__(seen)
        self.seen, self.status, self.retry_after_seconds = seen, status, retry_after_seconds
        self.passing = passing
        """Another try in a moment may help."""


class Endpoint:
    """The server at `regenerate.endpoint` as a source of answers. `check` it before it is asked for any.

    Raises ValueError for an address or a key that cannot be used.
    """

    def __init__(self, config: RegenerateConfig, template: Template):
        assert config.endpoint is not None
        self.config, self.template = config, template
        self._url = _address(config.endpoint)
        self._root = self._url.removesuffix("/v1")
        self._key = _key(config.endpoint_key)
        messages = SYNTHETIC[:1]
        self._probe = Request(key="probe", messages=messages, tools=None, prompt_tokens=self._ids(messages))
        self._checked = False

    @property
    def identity(self) -> dict[str, Any]:
        """The name of the served model, so that the same server at another address gives the same."""
        return {"served_model": self.model}

    @cached_property
    def model(self) -> str:
        """`regenerate.endpoint_model`, or the only model that the server lists; raises ValueError."""
        return self.config.endpoint_model or self._at_start(self._only_model)

    def check(self) -> None:
        """Shows that the server reads conversations as the target's own tokenizer and template do, and that it answers.

        Raises ValueError with the first difference, or where the server shows in no way which ids it reads.
        """
        assert self.model  # known before the loop of the check runs
        self._at_start(self._same_ids)

    # ------------------------------------------------------------ answers

    def answers(self, pending: Pending) -> Generator[tuple[Request, Answer], None, None]:
        """Each answer as it comes; see `dflash.answers.Source`. Raises ServerFailed, once all that has come is out."""
        assert self._checked
        under_way = set[asyncio.Task[tuple[Request, Answer]]]()
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            self._begin(self.config.request_seconds)
            try:
                while True:
                    if room := self.config.requests_in_flight - len(under_way):
                        under_way |= {loop.create_task(self._reply(request)) for request in pending.take(room)}
                    if not under_way:
                        return
                    if not any(task.done() for task in under_way):
                        runner.run(_first(under_way))
                    ended = [task for task in under_way if task.done()]
                    task = min(ended, key=lambda task: task.exception() is not None)  # answers before a failure
                    under_way.remove(task)
                    yield task.result()
            finally:
                runner.run(self._hang_up(under_way))

    def _begin(self, seconds: float) -> None:
        """A connection that nothing is known of yet, and the longest wait for an answer on it."""
        self._seconds, connections = seconds, self.config.requests_in_flight
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),  # the rest is limited as a whole, by _send
            verify=_certificates(),
            limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections),
        )
        self._probing = asyncio.Lock()
        self._answered_at = self._probe_failed_at = time.monotonic()
        self._silent_since: float | None = None
        """When the first request failed after the last answer."""

    async def _hang_up(self, under_way: set[asyncio.Task]) -> None:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await self._client.aclose()

    async def _reply(self, request: Request) -> tuple[Request, Answer]:
        """The answer to a request, however often it must be made."""
        tries = failures = 0
        while True:
            began = time.monotonic()
            try:
                return request, await self._complete(request, self.config.max_new_tokens)
            except _Fault as caught:
                fault = caught
            failures += 1
            if self._answered_at < began:
                self._silent_since = self._silent_since or time.monotonic()
            # a server that is too busy says nothing against the prompt, and a probe would only add to it
            if fault.status != BUSY and await self._answers_others(began):
                tries += 1
                if fault.status in PROMPT_AT_FAULT or tries == TRIES:
                    detail = fault.seen if tries == 1 else f"{tries} tries, the last: {fault.seen}"
                    return request, Answer(content="", finish_reason=REFUSED, completion_tokens=0, detail=detail)
            await self._pause(failures, fault)

    async def _answers_others(self, began: float) -> bool:
        """Whether the server has answered anybody since a request began, or answers a probe now."""
        async with self._probing:  # so that one probe serves all that fail together
            if max(self._answered_at, self._probe_failed_at) < began:
                seconds = min(self.config.request_seconds, self.config.outage_seconds)
                try:
                    await self._complete(self._probe, 1, seconds=seconds)
                except _Fault:
                    self._probe_failed_at = time.monotonic()
            return self._answered_at >= began

    async def _pause(self, failures: int, fault: _Fault) -> None:
        """The wait before the next try; raises ServerFailed when the server has been silent for too long."""
        left = self.config.outage_seconds
        if self._silent_since is not None:
            left -= time.monotonic() - self._silent_since
            if left <= 0:
                raise ServerFailed(
                    f"regenerate.endpoint={self._url}: the server has answered nothing for regenerate.outage_seconds="
                    f"{self.config.outage_seconds:g}; last seen: {fault.seen}; start it again, then the same command goes on"
                )
        await asyncio.sleep(min(max(_wait_seconds(failures), fault.retry_after_seconds), left))

    async def _complete(self, request: Request, max_tokens: int, seconds: float | None = None) -> Answer:
        """One try at a request; raises _Fault, also when the server has read it in other tokens than we do."""
        body = self._body(request, max_tokens)
        completion = await self._send("POST", f"{self._url}/chat/completions", body, seconds=seconds)
        try:
            choice = completion["choices"][0]
            message, ending = choice["message"], choice["finish_reason"]
            content, reasoning = message.get("content"), message.get("reasoning_content") or message.get("reasoning")
            usage = completion.get("usage") or {}
            read, written = usage.get("prompt_tokens"), usage.get("completion_tokens")
        except (LookupError, TypeError, AttributeError):
            raise _Fault(self._quote(f"JSON that is no completion: {json.dumps(completion)}")) from None
        if ending not in (STOP, LENGTH, *OTHER_ENDINGS):
            raise _Fault(self._quote(f"a completion with finish_reason {json.dumps(ending)}"))
        # null where the reply ended, or was cut, while it reasoned
        if not (isinstance(content, str | None) and isinstance(reasoning, str | None)):
            raise _Fault(self._quote(f"a completion with content {json.dumps(content)}"))
        if not (isinstance(read, int | None) and isinstance(written, int | None)):
            raise _Fault(self._quote(f"a completion with usage {json.dumps(usage)}"))
        if read not in (None, len(request.prompt_tokens)):
            raise _Fault(
                f"the server read {read} prompt tokens, target.name={self.template.name} gives {len(request.prompt_tokens)}",
                status=PROMPT_READ_OTHERWISE,
            )
        self._answered_at, self._silent_since = time.monotonic(), None
        if written is None:
            text = (reasoning or "") + (content or "")
            written = len(self.template.backend.encode(text, add_special_tokens=False).ids)
        if ending in OTHER_ENDINGS:
            detail = f"the server ended it with finish_reason {ending!r}"
            return Answer(content="", finish_reason=REFUSED, completion_tokens=written, detail=detail)
        return Answer(content=content or "", reasoning=reasoning, finish_reason=ending, completion_tokens=written)

    def _body(self, request: Request, max_tokens: int) -> dict[str, Any]:
        config = self.config
        digest = hashlib.sha256(f"{config.seed} {request.key}".encode()).digest()
        return {
            **self._chat(request.messages, request.tools),
            "max_tokens": max_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k or -1,
            **NOTHING_ELSE,
            "seed": int.from_bytes(digest[:4]) >> 1,  # 31 bits: some servers keep it in a signed integer
        }

    def _chat(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> dict[str, Any]:
        """A conversation as every server takes it."""
        body = {"model": self.model, "messages": messages}
        if tools:
            body["tools"] = tools
        if self.template.kwargs:
            body["chat_template_kwargs"] = self.template.kwargs
        return body

    # ------------------------------------------------------------ at the start

    def _at_start(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What the server says, while nothing depends on it yet; raises ValueError where it cannot be had."""

        async def connected() -> T:
            self._begin(min(self.config.request_seconds, START_SECONDS))
            try:
                return await ask()
            finally:
                await self._hang_up(set())

        with asyncio.Runner() as runner:
            try:
                return runner.run(connected())
            except _Fault as fault:
                raise ValueError(
                    f"regenerate.endpoint={self._url}: {fault.seen}; start the server, or give the base URL of one that speaks "
                    "OpenAI's chat completions, such as http://localhost:8000/v1"
                ) from None
            except ServerFailed as failure:
                raise ValueError(str(failure)) from None

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer of a server that is there; raises _Fault after START_TRIES, or where another try would not help."""
        for failures in range(1, START_TRIES):
            try:
                return await ask()
            except _Fault as fault:
                if not fault.passing or fault.status in UNKNOWN_WAY:
                    raise
                await asyncio.sleep(max(_wait_seconds(failures), min(fault.retry_after_seconds, START_SECONDS)))
        return await ask()

    async def _only_model(self) -> str:
        listed = await self._patiently(lambda: self._send("GET", f"{self._url}/models"))
        try:
            names = [model["id"] for model in listed["data"]]
        except (LookupError, TypeError):
            raise _Fault(self._quote(f"its /models lists no models: {json.dumps(listed)}")) from None
        if len(names) != 1:
            found = f"{len(names)} models ({self._quote(', '.join(map(str, names)))})"
            raise ValueError(f"regenerate.endpoint={self._url} serves {found}; name one as regenerate.endpoint_model")
        return names[0]

    async def _same_ids(self) -> None:
        ways = [self._tokenize_messages, self._tokenize_rendering, self._complete_with_ids]
        for messages in CONVERSATIONS:
            try:
                ours = self._ids(messages)
            except Unusable:  # a template without system messages, for one
                continue
            theirs = None
            while ways and theirs is None:
                theirs = await self._ids_there(ways[0], messages)
                if theirs is None:
                    ways.pop(0)
            if theirs is None:
                await self._answers_at_all()  # or it says what is wrong, such as the model's name
                raise ValueError(
                    f"regenerate.endpoint={self._url}: the server shows in no way which token ids it reads, so its template cannot "
                    "be compared with the target's; use a current vLLM, SGLang or llama.cpp server"
                )
            if theirs != ours:
                raise ValueError(
                    f"regenerate.endpoint={self._url}: the server does not read a conversation as target.name="
                    f"{self.template.name} does: {self._difference(theirs, ours)}; {REMEDY}"
                )
        await self._answers_at_all()
        self._checked = True

    async def _answers_at_all(self) -> None:
        await self._patiently(lambda: self._complete(self._probe, 1))

    async def _ids_there(self, way: Way, messages: list[dict[str, Any]]) -> list[int] | None:
        """The ids of a conversation, if the server knows this way of asking for them."""
        try:
            ids = await self._patiently(lambda: way(messages))
        except _Fault as fault:
            if fault.status in UNKNOWN_WAY:
                return None
            raise
        except ServerFailed:  # a gateway may let nothing through but /v1; a key that is wrong shows there too
            return None
        # an empty list is llama.cpp's answer to a question that it does not know
        return ids if isinstance(ids, list) and ids and all(type(id) is int for id in ids) else None

    async def _tokenize_messages(self, messages: list[dict[str, Any]]) -> Any:
        """vLLM and SGLang. Both add the generation prompt unless told otherwise; SGLang, told of it, renders in another way."""
        return (await self._send("POST", f"{self._root}/tokenize", self._chat(messages))).get("tokens")

    async def _tokenize_rendering(self, messages: list[dict[str, Any]]) -> Any:
        """llama.cpp, which tokenises a chat in this very way: its BOS added, special tokens parsed."""
        rendered = await self._send("POST", f"{self._root}/apply-template", self._chat(messages))
        body = {"content": rendered.get("prompt"), "add_special": True, "parse_special": True}
        return (await self._send("POST", f"{self._root}/tokenize", body)).get("tokens")

    async def _complete_with_ids(self, messages: list[dict[str, Any]]) -> Any:
        """vLLM puts the prompt's ids beside the choices, SGLang into each."""
        body = {**self._chat(messages), "max_tokens": 1, "temperature": 0.0, "return_token_ids": True}
        completion = await self._send("POST", f"{self._url}/chat/completions", body)
        places = [completion, *(completion.get("choices") or [])]
        return next((place["prompt_token_ids"] for place in places if place.get("prompt_token_ids")), None)

    def _ids(self, messages: list[dict[str, Any]]) -> list[int]:
        return self.template.tokens(self.template.render(messages, None, add_generation_prompt=True))

    def _difference(self, theirs: list[int], ours: list[int]) -> str:
        """The first one between two token sequences that are not the same."""
        pairs = zip(theirs, ours, strict=False)
        at = next((at for at, (their, our) in enumerate(pairs) if their != our), min(len(theirs), len(ours)))
        return f"at position {at} the server has {self._token(theirs, at)}, the target {self._token(ours, at)}"

    def _token(self, ids: list[int], at: int) -> str:
        return f"{ids[at]} {self.template.tokenizer.decode([ids[at]])!r}" if at < len(ids) else "nothing more"

    # ------------------------------------------------------------ one request

    async def _send(self, method: str, url: str, body: Any = None, *, seconds: float | None = None) -> dict[str, Any]:
        """The JSON object that the server answers with; raises _Fault, or ServerFailed when it does not let us in."""
        seconds = seconds or self._seconds
        # dumps, not the client's own encoder, which refuses the NaN that a prompt file may hold: let the server judge
        content = None if body is None else json.dumps(body)
        try:
            async with asyncio.timeout(seconds):
                headers = {"Content-Type": "application/json"}
                response = await self._client.request(method, url, content=content, headers=headers)
        except TimeoutError:
            raise _Fault(f"no answer within {seconds:g} s", passing=False) from None
        except httpx2.HTTPError as error:
            away = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
            kind = "the server cannot be reached" if away else type(error).__name__
            raise _Fault(self._quote(f"{kind}: {error}".removesuffix(": ")), passing=not away) from None
        try:
            said = response.json()
        except (ValueError, RecursionError):
            said = None
        if response.status_code in UNAUTHORISED:
            cause = "does not accept the key in" if self._key else "wants a key; put it into"
            raise ServerFailed(
                f"regenerate.endpoint={self._url}: the server {cause} the environment variable {self.config.endpoint_key} "
                f"(regenerate.endpoint_key): it says {response.status_code}"
            )
        if response.status_code != 200:
            seen = f"HTTP {response.status_code}: {_message(said) or response.text or response.reason_phrase}"
            raise _Fault(
                self._quote(seen),
                status=response.status_code,
                retry_after_seconds=_retry_after_seconds(response.headers.get("Retry-After", "")),
            )
        if not isinstance(said, dict):
            raise _Fault(self._quote(f"not a JSON object: {response.text}"))
        return said

    def _quote(self, text: str) -> str:
        """One line without the key, which a server may send back."""
        text = " ".join(text.split())
        if self._key:
            for form in (json.dumps(self._key)[1:-1], self._key):
                text = text.replace(form, "***")
        return text if len(text) <= LONGEST_QUOTE else text[:LONGEST_QUOTE] + " ..."


@cache
def _certificates() -> ssl.SSLContext:
    """Those that are trusted. Read once, since that takes 50 ms and each start opens three connections."""
    return httpx2.create_ssl_context()


async def _first(tasks: set[asyncio.Task]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def _address(endpoint: str) -> str:
    if "@" in endpoint or "?" in endpoint:  # not shown: it may be a secret
        raise ValueError(
            "regenerate.endpoint: no password or query can be in it; put a key into the environment variable"
        )
    try:
        url = httpx2.URL(endpoint)
    except httpx2.InvalidURL:
        url = None
    if url is None or url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"regenerate.endpoint={endpoint}: not an http URL; give one such as http://localhost:8000/v1")
    return str(url).rstrip("/")


def _key(variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ValueError(f"the environment variable {variable} holds characters that no key can have; set it again")
    return key


def _message(said: Any) -> str | None:
    """What a server's error says, in the forms that servers give it."""
    while isinstance(said, dict):
        said = said.get("error") or said.get("message") or said.get("detail")
    return None if said is None else said if isinstance(said, str) else json.dumps(said)


def _wait_seconds(failures: int) -> float:
    """Doubled with each failure and scattered, so that requests which failed together do not come back together."""
    return min(FIRST_WAIT_SECONDS * 2 ** min(failures - 1, 16), LONGEST_WAIT_SECONDS) * random.uniform(0.5, 1)


def _retry_after_seconds(header: str) -> float:
    """Of the header's two forms, seconds or a date; 0 where there is none."""
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0
