"""Runs a candidate's program and answers calls of its functions with plain data. It is not trusted: it may damage
itself, and the other end must handle that. Channel: the socket on descriptor 0."""

from __future__ import annotations

import fcntl
import os
import sys
import types

from plain import Codec  # type: ignore[import-not-found]
from wire import Lost, receive, send  # type: ignore[import-not-found]

MAX_OBJECTS = 10_000


def main() -> None:
    channel = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 10)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    objects: list[object] = []

    def handle(value: object) -> tuple[int, str]:
        if len(objects) >= MAX_OBJECTS:
            raise ValueError("too many objects")
        objects.append(value)
        return len(objects) - 1, type(value).__name__

    module = types.ModuleType("candidate")
    sys.modules["candidate"] = module
    while True:
        try:
            order, source = receive(channel)
        except Lost:
            return
        answer: dict[str, object]
        codec = Codec(handle, lambda number, _: objects[number])
        try:
            if order["op"] == "load":
                exec(compile(source, "candidate.py", "exec", dont_inherit=True), module.__dict__)
                names = [name for name, value in vars(module).items() if callable(value)]
                answer = {"names": names}
            else:
                function = getattr(module, order["name"])
                args, kwargs = codec.decode(order["args"]), codec.decode(order["kwargs"])
                value = function(*args, **kwargs)
                answer = {"value": ["object", *handle(value)] if order["opaque"] else codec.encode(value)}
        except BaseException as e:  # border: the candidate's own code
            kinds = [kind.__name__ for kind in type(e).__mro__]
            answer = {"error": kinds[0], "kinds": kinds, "text": describe(e), "fatal": not isinstance(e, Exception)}
        try:
            send(channel, answer)
        except Lost:
            return


def describe(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except BaseException:  # border: an exception of the candidate's is its code
        return ""


if __name__ == "__main__":
    main()
