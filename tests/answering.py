"""Samplers without a model: they join a group over TCP, and each answer's tokens depend on its address alone."""

import dataclasses
import threading

import numpy as np

from rolljax.cluster.group import SamplerGroup
from rolljax.cluster.messages import SamplerJob, pack_sampled, software, unpack_requests
from rolljax.cluster.placement import Remote
from rolljax.cluster.wire import Channel, Port, connect
from rolljax.sampler.client import SamplerLimits
from rolljax.sampler.prompt_queue import SamplerLoad, SamplerStats
from rolljax.types import Sampled

KEY = b"a key of both sides"
SLOTS = 4
NUMBERS = {
    "stats": dataclasses.astuple(SamplerStats()),
    "load": dataclasses.astuple(SamplerLoad(0, 0, SLOTS, 0, 0, 0, 0)),
}


def tokens_of(address, length):
    """Return the tokens at an address."""
    return np.random.default_rng(address).integers(0, 1000, length).astype(np.int32)


class Answering:
    """A sampler that samples one token of each request at a time.

    Args:
      takes: it takes new weights when they are announced; else when `take` is called.
    """

    def __init__(self, port, name, *, version=0, takes=True, process=""):
        self.version, self.takes, self.announced, self.refused = version, takes, version, ""
        self.served = 0
        self._open, self._lock, self._wake = {}, threading.Lock(), threading.Event()
        self.free = threading.Event()
        """Clear while it samples nothing."""
        self.free.set()
        self.over = threading.Event()
        self.channel = Channel(connect(("127.0.0.1", port), KEY), "the controller", self._handle, self._end)
        self.channel.start()
        self.channel.send("hello", {**software(), "name": name, "process": process or name, "host": "", "kind": "cpu"})
        threading.Thread(target=self._sample, daemon=True).start()

    def leave(self):
        """Die."""
        self.channel.end("it died")

    def take(self):
        """Take the newest weights."""
        self.version = self.announced
        self.channel.send("swapped", {"version": self.version})

    def _end(self, reason):
        self.over.set()
        self._wake.set()
        self.free.set()

    def _handle(self, frame):
        if frame.kind == "job":
            self.channel.send("ready", {"version": self.version, **NUMBERS})
        elif frame.kind == "weights":
            self.announced = frame.fields["version"]
            if self.takes and self.announced > self.version:
                self.take()
        elif frame.kind == "submit":
            with self._lock:
                for r in unpack_requests(frame.fields, frame.arrays):
                    had = 0 if r.resume is None else len(r.resume)
                    self._open[r.number] = [had, tokens_of(r.address, r.params.max_tokens)]
            self._wake.set()
        elif frame.kind == "abort":
            with self._lock:
                for number in frame.fields["numbers"]:
                    self._open.pop(number, None)
        elif frame.kind == "refuse":
            self.refused = frame.fields["reason"]
        elif frame.kind == "end":
            self.channel.finish()

    def _sample(self):
        while not self.over.is_set():
            self._wake.wait()
            self.free.wait()
            with self._lock:
                now = {number: (at, tokens) for number, (at, tokens) in self._open.items()}
                for number in now:
                    self._open[number][0] += 1
                ended = [n for n, (at, tokens) in now.items() if at + 1 == len(tokens)]
                for number in ended:
                    del self._open[number]
                self.served += len(ended)
                if not self._open:
                    self._wake.clear()
            parts = [self._part(tokens[at : at + 1]) for at, tokens in now.values()]
            sizes, columns = pack_sampled(parts)
            ends = [[n, "length", 0.0, 0.0, 0] for n in ended]
            fields = {"numbers": [*now], "sizes": sizes, "ended": ends, "failed": [], **NUMBERS}
            if now:
                self.channel.send("tokens", fields, columns)

    def _part(self, tokens):
        logp, none = np.zeros(1, np.float32), np.zeros((1, 0), np.float32)
        version, experts = np.full(1, self.version, np.int32), np.zeros((1, 0, 0), np.uint8)
        return Sampled(tokens, logp, logp, version, none.astype(np.int32), none, none, experts)


class Fleet:
    """A group, and the port where samplers join."""

    def __init__(self, **settings):
        self.said = []
        settings = Remote(**{"heartbeat_s": 0.1, "lost_s": 60.0, **settings})
        job = SamplerJob("run", 1, {}, None, False, settings.heartbeat_s, settings.lost_s)
        self.group = SamplerGroup(settings, job, SamplerLimits(4096, SLOTS, 1000), self.said.append)
        self.port = Port(("127.0.0.1", 0), KEY, self.group.welcome)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.group.close()
        self.port.close()

    def state(self, name):
        member = self.group._router.members.get(name)
        return "" if member is None else member.where

    def join(self, name, **more):
        return Answering(self.port.number, name, **more)
