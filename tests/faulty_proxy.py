"""A proxy between a client and a real server that puts faults between, as the test plans them.

`with FaultyProxy(server.url, plan) as proxy:` listens at proxy.url. For each request `plan(path, body, tries)` is asked, where
`tries` counts how often this very body came before; it returns None to pass the request on, one of FAULTS, an `Instead`, or a
function that changes the JSON which the server answers.
"""

import http.client
import json
import select
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

CHAT = "/v1/chat/completions"
SLOW = "slow"  # no answer until the client hangs up
DROPPED = "dropped"  # the connection ends in the middle of the server's answer
BROKEN = "broken"  # half of the server's answer, as if it were all
HOLD_SECONDS = 60


@dataclass(frozen=True)
class Instead:
    """An answer that does not come from the server."""

    status: int
    said: Any = "something went wrong"
    headers: dict[str, str] = field(default_factory=dict)


def aborted(completion: dict[str, Any]) -> dict[str, Any]:
    """The server's answer as of one that gave it up."""
    return {**completion, "choices": [{**completion["choices"][0], "finish_reason": "abort"}]}


FAULTS = {
    SLOW: SLOW,
    DROPPED: DROPPED,
    BROKEN: BROKEN,
    "no completion": Instead(200, {"hello": "world"}),
    "a list": Instead(200, []),
    "aborted": aborted,
    "busy": Instead(429),
    "busy for a second": Instead(429, headers={"Retry-After": "1"}),
    "internal error": Instead(500),
    "bad gateway": Instead(502, "<html>nginx</html>"),
}

Plan = Callable[[str, dict[str, Any], int], Any]


def no_faults(path: str, body: dict[str, Any], tries: int) -> None:
    """Passes everything on."""


class FaultyProxy:
    """`upstream` may change: a server that comes back elsewhere."""

    def __init__(self, upstream: str, plan: Plan = no_faults):
        self.upstream, self.plan = upstream, plan
        self.completions: list[dict[str, Any]] = []
        """Bodies of the chat completions asked for, as they came."""
        self.in_flight = self.most_in_flight = 0
        """Chat completions that are being answered, and the most at a time."""
        self._tries: Counter[str] = Counter()
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # 40 ms an answer

            def do_GET(self) -> None:
                proxy._answer(self)

            do_POST = do_GET

            def log_message(self, *_) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        content = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        body, path = json.loads(content or b"{}"), handler.path
        with self._lock:
            tries = self._tries[path + content.decode()]
            self._tries[path + content.decode()] += 1
            if path == CHAT:
                self.completions.append(body)
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            self._carry_out(self.plan(path, body, tries), handler, content)
        except OSError:  # the client has hung up, or there is no server
            handler.close_connection = True
        finally:
            if path == CHAT:
                with self._lock:
                    self.in_flight -= 1

    def _carry_out(self, fault: Any, handler: BaseHTTPRequestHandler, content: bytes) -> None:
        if fault == SLOW:
            select.select([handler.connection], [], [], HOLD_SECONDS)
            handler.close_connection = True
            return
        headers = {}
        if isinstance(fault, Instead):
            status, headers = fault.status, fault.headers
            said = fault.said if isinstance(fault.said, str) else json.dumps(fault.said)
            answer = said.encode()
        else:
            status, answer = self._pass_on(handler, content)
        if callable(fault):
            answer = json.dumps(fault(json.loads(answer))).encode()
        if fault == BROKEN:
            answer = answer[: len(answer) // 2]
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(answer)))
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        if fault == DROPPED:
            handler.wfile.write(answer[: len(answer) // 2])
            handler.close_connection = True
            return
        handler.wfile.write(answer)

    def _pass_on(self, handler: BaseHTTPRequestHandler, content: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(urlsplit(self.upstream).netloc, timeout=HOLD_SECONDS)
        try:
            headers = {
                name: handler.headers[name] for name in ("Authorization", "Content-Type") if name in handler.headers
            }
            connection.request(handler.command, handler.path, content, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except http.client.HTTPException as error:
            raise OSError(str(error)) from error
        finally:
            connection.close()

    def __enter__(self) -> "FaultyProxy":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()
