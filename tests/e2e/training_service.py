"""A training service in a process of its own, which can be killed and started again at the same address."""

import os
import re
import signal
import subprocess
import sys
import warnings

import numpy as np
import tinker
from tinker import types

from .conftest import EMITTERS, ROOT

KEY, OTHER_KEY = "tml-ours", "tml-theirs"


class TrainingService:
    """`options`: of the command, besides model, folder, port and keys."""

    def __init__(self, model, folder, *options):
        self.model, self.folder, self.options, self.port = str(model), folder, options, 0
        self.start()

    def start(self):
        env = os.environ | {
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count=1 {EMITTERS}",
        }
        command = [sys.executable, "-m", "rolljax.service", "--model", self.model, "--folder", str(self.folder)]
        command += ["--port", str(self.port), "--api_key", f"{KEY},{OTHER_KEY}", *self.options]
        self.errors = open(f"{self.folder}.log", "ab")  # noqa: SIM115
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=self.errors, text=True)
        line = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert found, f"{line}\n{self.log()}"
        self.url, self.port = found[0], int(found[1])

    def log(self):
        with open(f"{self.folder}.log") as f:
            return f.read()

    def kill(self):
        """End the process as a crash would."""
        self.process.kill()
        self._ended()

    def stop(self):
        """Ask the process to end; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self._ended()

    def _ended(self):
        code = self.process.wait()
        self.process.stdout.close()
        self.errors.close()
        return code

    def client(self, key=KEY, **settings):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            client = tinker.ServiceClient(base_url=self.url, api_key=key, **settings)
            assert client.holder and client.create_rest_client()  # now: made beside a call, they wait for each other
            return client

    def policy(self, client=None, rank=4, seed=0, **settings):
        """Return a new training client."""
        client = client or self.client()
        return client.create_lora_training_client(base_model=self.model, rank=rank, seed=seed, **settings).result()


def datum(tokens, loss="cross_entropy", weights=None, seed=None):
    """Return the datum of a sequence; what the loss needs besides it is drawn."""
    tokens, rng = list(tokens), np.random.default_rng(len(tokens) if seed is None else seed)
    n = len(tokens) - 1
    inputs = {"target_tokens": tokens[1:]}
    if loss == "cross_entropy":
        inputs["weights"] = [1.0] * n if weights is None else weights
    else:
        inputs |= {"advantages": rng.normal(size=n).astype(np.float32)}
        inputs |= {"logprobs": (-5 + 0.3 * rng.normal(size=n)).astype(np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def logprobs(outputs):
    """Return the log-probs of every datum of a result."""
    return [np.array(out["logprobs"].data).reshape(out["logprobs"].shape) for out in outputs.loss_fn_outputs]
