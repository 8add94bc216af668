"""An agent's side of the rendezvous: a thread that sends heartbeats and keeps the newest reply."""

from __future__ import annotations

import http.client
import threading

from pydantic import ValidationError

from fluxtrain.rendezvous.messages import (
    HEARTBEAT_SECONDS,
    MAX_BYTES,
    PATH,
    SIGNATURE_HEADER,
    Heartbeat,
    Key,
    Reply,
    is_valid,
    reply_signature,
    request_signature,
)

_TIMEOUT_SECONDS = 3.0
_PROGRESS_FIELDS = {"step", "ranks"}


class Client:
    """Sends heartbeats to ``host:port`` until it is stopped; a service that is gone is tried again."""

    def __init__(self, host: str, port: int, key: Key, beat: Heartbeat) -> None:
        """Prepare to send ``beat``; nothing is sent before `start`."""
        self._key, self._beat = key, beat
        self._connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_SECONDS)
        self._state, self._exchanging = threading.Lock(), threading.Lock()
        self._replied = threading.Condition()
        self._reply: Reply | None = None
        self._unknown = False
        self._problem = "not asked yet"
        self._seconds = HEARTBEAT_SECONDS
        self._stopped, self._changed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to send heartbeats."""
        self._thread.start()

    def stop(self, **values: object) -> None:
        """Send a last heartbeat with ``values``, at most for the time-out of one request."""
        self._stopped.set()
        self.update(**values)
        if self._thread.is_alive():
            self._thread.join()
        self.exchange()
        self._connection.close()

    def update(self, **values: object) -> None:
        """Replace fields of the heartbeat and send it at once; progress is sent with the next one."""
        with self._state:
            self._beat = self._beat.model_copy(update=values)
        if not values.keys() <= _PROGRESS_FIELDS:
            self._changed.set()

    @property
    def reply(self) -> Reply | None:
        """Return the newest reply, None before the first."""
        with self._replied:
            return self._reply

    @property
    def problem(self) -> str:
        """Return why the last heartbeat got no valid reply; empty if it did."""
        return self._problem

    def next_reply(self, timeout: float) -> Reply | None:
        """Wait for another reply, at most ``timeout`` seconds; return the newest."""
        with self._replied:
            self._replied.wait(timeout)
            return self._reply

    def exchange(self) -> bool:
        """Send one heartbeat and keep the reply; return False if no valid one came."""
        with self._exchanging:
            try:
                reply = self._send()
                if reply.boot != self._beat.boot:  # of another process, which answers only now
                    self.update(boot=reply.boot)
                    self._unknown = True
                    reply = self._send()
            except (OSError, http.client.HTTPException, ValidationError, ValueError) as error:
                self._connection.close()
                self._problem = str(error) or type(error).__name__
                return False
        self._problem = ""
        self._unknown, self._seconds = reply.unknown, reply.heartbeat_seconds
        with self._replied:
            self._reply = reply
            self._replied.notify_all()
        return True

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._changed.clear()
            self.exchange()
            self._changed.wait(self._seconds)

    def _send(self) -> Reply:
        """Return the reply to one heartbeat; ValueError if it is not signed with the key."""
        body = self._next_body()
        key = self._key.newest
        signature = request_signature(key, body)
        headers = {"Content-Type": "application/json", SIGNATURE_HEADER: signature}
        self._connection.request("POST", PATH, body, headers)
        response = self._connection.getresponse()
        content = response.read(MAX_BYTES + 1)
        expected = reply_signature(key, signature, content)
        signed = is_valid(response.getheader(SIGNATURE_HEADER, ""), expected)
        if response.status == http.HTTPStatus.FORBIDDEN:
            self._key.refresh()  # for the next heartbeat
        if response.status != http.HTTPStatus.OK or not signed:
            raise ValueError(f"status {response.status}, signed {signed}")
        return Reply.model_validate_json(content)

    def _next_body(self) -> bytes:
        with self._state:
            self._beat = self._beat.model_copy(update={"sequence": self._beat.sequence + 1})
            beat = self._beat if self._unknown else self._beat.model_copy(update={"world": ()})
            return beat.model_dump_json(exclude_defaults=True).encode()
