"""Faults put into the source one at a time, each of which `make test` must catch: `python tests/mutations.py [NAME ...]`.

A fault replaces a text that stands exactly once in `rolljax/`, wherever its file has moved to. It is put into a copy of
the repository, where the test files that are expected to catch it run as in `make test`. The exit code is 1 if a fault
passed them, if its text is not found, or if its tests did not run.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Fault(NamedTuple):
    old: str
    """What stands in the source; any white space between its words."""
    new: str
    tests: str
    """Files below `tests/` that are expected to fail."""


FAULTS = {
    "sign of the clipped loss": Fault(
        "return -jnp.where(advantages_BT < 0, lower_BT, upper_BT) * advantages_BT",
        "return jnp.where(advantages_BT < 0, lower_BT, upper_BT) * advantages_BT",
        "unit/trainer/test_objectives.py",
    ),
    "upper clip below one": Fault(
        "jnp.minimum(ratio_BT, 1.0 + high)", "jnp.minimum(ratio_BT, 1.0 - high)", "unit/trainer/test_objectives.py"
    ),
    "KL turned round": Fault(
        "kl_estimate(logp_BT - jax.lax.stop_gradient(ref_logp_BT), estimator, jnp)",
        "kl_estimate(jax.lax.stop_gradient(ref_logp_BT) - logp_BT, estimator, jnp)",
        "unit/trainer/test_objectives.py",
    ),
    "mask missed in the mean of a segment": Fault(
        "total_BT = segment_sum(jnp.where(mask_BT, x_BT, 0.0), ids_BT)",
        "total_BT = segment_sum(x_BT, ids_BT)",
        "unit/trainer/test_objectives.py",
    ),
    "NaN under weight 0 reaches the sum": Fault(
        "jnp.sum(clean(values, weights).astype(jnp.float32) * weights)",
        "jnp.sum(values.astype(jnp.float32) * weights)",
        "unit/trainer/test_masked.py",
    ),
    "denominator without the sequences": Fault(
        "return 1 / (sequences * length)", "return 1 / length", "unit/trainer/test_aggregation.py"
    ),
    "standard deviation of a population": Fault(
        "np.maximum(self.size_N - ddof, 1)", "np.maximum(self.size_N, 1)", "unit/trainer/test_credit.py"
    ),
    "leave-one-out over all": Fault(
        "centred * (group.size_N / np.maximum(group.size_N - 1, 1))", "centred * 1.0", "unit/trainer/test_credit.py"
    ),
    "value of this token for the next one's": Fault(
        "rewards_TN[t] + gamma * next_value - values_TN[t]",
        "rewards_TN[t] + gamma * values_TN[t] - values_TN[t]",
        "unit/trainer/test_credit.py",
    ),
    "values not carried across observations": Fault(
        "next_value = np.where(mask_TN[t], values_TN[t], next_value)",
        "next_value = values_TN[t]",
        "unit/trainer/test_credit.py",
    ),
    "logits not shifted against tokens": Fault(
        'a["prev"][span] = np.arange(span.start - 1, span.stop - 1)',
        'a["prev"][span] = np.arange(span.start, span.stop)',
        "unit/trainer/test_batch.py unit/trainer/test_update.py",
    ),
    "first sampled token read behind the prompt's end": Fault(
        "first_prev=start + part.prefix - 1", "first_prev=start + part.prefix", "unit/trainer/test_batch.py unit/trainer/test_update.py"
    ),
    "siblings see each other": Fault(
        "& same_segment & (shared | own)", "& same_segment", "unit/model/test_decoder.py"
    ),
    "rotation of one half turned round": Fault("b * cos + a * sin", "b * cos - a * sin", "unit/model/test_decoder.py"),
    "first micro-batch left out": Fault(
        "jax.lax.fori_loop(0, batch.num_micro, body, zeros)", "jax.lax.fori_loop(1, batch.num_micro, body, zeros)", "unit/trainer/test_update.py"
    ),
    "an update that is not finite is applied": Fault("ok = finite & some", "ok = some", "unit/trainer/test_update.py"),
    "sampled without its temperature": Fault(
        "scaled = logits_SV / jnp.where(greedy_S1, 1.0, distribution.temperature[:, None])",
        "scaled = logits_SV + 0 * jnp.where(greedy_S1, 1.0, distribution.temperature[:, None])",
        "e2e/test_sampler.py",
    ),
    "stale version on new tokens": Fault(
        "self.version = version",
        "del version",
        "e2e/test_sampler.py",
    ),
    "stale pages are used again": Fault("if not self.cfg.reuse_stale:", "if False:", "e2e/test_scheduler.py"),
    "a group one version too old": Fault(
        "late = [e for e in self if e.age(version) > rules.oldest] + oldest[rules.num_oldest :]",
        "late = [e for e in self if e.age(version) > rules.oldest + 1] + oldest[rules.num_oldest :]",
        "unit/rollout/test_group_buffer.py",
    ),
    "a fraction is rounded up": Fault(
        "math.floor((self.async_ratio - age) * self.prompts_per_step + 1e-9)",
        "math.ceil((self.async_ratio - age) * self.prompts_per_step + 1e-9)",
        "unit/rollout/test_group_buffer.py",
    ),
    "youngest start first": Fault(
        "key=lambda e: (not e.kept, e.version, e.prompt_index)", "key=lambda e: (not e.kept, -e.version, e.prompt_index)", "unit/rollout/test_group_buffer.py"
    ),
    "nobody waits for what would be too old": Fault(
        "if len(taken) < rules.prompts_per_step or not self._in_time(taken, version):",
        "if len(taken) < rules.prompts_per_step:",
        "unit/rollout/test_group_buffer.py",
    ),
    "what was in flight is forgotten": Fault(
        "self._restart = [e for e in entries if not e.ready]", "self._restart = []", "unit/rollout/test_group_buffer.py"
    ),
    "an expired group is not cancelled": Fault(
        "self._running.pop(entry.prompt_index).cancel()", "self._running.pop(entry.prompt_index)", "unit/run/test_phase_rollouts.py"
    ),
    "a replaced group begins with the version of the old one": Fault(
        "self._version = version entries", "entries", "unit/run/test_phase_rollouts.py"
    ),
    "what is ready is not saved": Fault(
        "if is_saved and not _has_experts(g)", "if False", "unit/run/test_phase_rollouts.py"
    ),
    "pages that leak": Fault("self._free.extend(pages)", "del pages", "e2e/test_sampler.py"),
    "a failed episode counts as a wrong answer": Fault(
        'if t.status == "failed" or not t.turns:', "if not t.turns:", "unit/rollout/test_filters.py"
    ),
    "a fault of the infrastructure laid at the environment": Fault(
        'kind: FaultKind = "infra" if infra else', 'kind: FaultKind = "env" if infra else', "unit/rollout/test_rollout.py"
    ),
    "training on held-out tasks": Fault(
        "not is_held_out(task, frac)", "is_held_out(task, frac)", "unit/envs/test_tasks.py"
    ),
    "a damaged checkpoint passes": Fault(
        "wrong = [name for name in written if found[name] != written[name]]", "wrong: list[str] = []", "unit/storage/test_durable.py"
    ),
}  # fmt: skip


def find(fault, package):
    """Return the one file that has the fault's text, and its text with the fault.

    Raises:
      LookupError: the text does not occur exactly once.
    """
    pattern = re.compile(r"\s+".join(map(re.escape, fault.old.split())))
    found = [(path, text) for path in package.rglob("*.py") for text in [path.read_text()] if pattern.search(text)]
    count = sum(len(pattern.findall(text)) for _, text in found)
    if count != 1:
        raise LookupError(f"its text stands {count} times in {package.name}/: {fault.old}")
    ((path, text),) = found
    return path, pattern.sub(lambda _: fault.new, text)


def passes(tests, copy):
    """Return whether test files pass in a copy of the repository.

    Raises:
      LookupError: they did not run.
    """
    env = os.environ | {"PYTHONPATH": str(copy), "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", *(f"tests/{name}" for name in tests.split())]
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise LookupError(f"{tests} did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def is_caught(fault, copy):
    """Return whether the fault's tests fail on it, and undo the fault.

    Raises:
      LookupError: its text is not found, or its tests did not run.
    """
    path, changed = find(fault, copy / "rolljax")
    before = path.read_text()
    path.write_text(changed)
    try:
        return not passes(fault.tests, copy)
    finally:
        path.write_text(before)


def main(names):
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    bad = 0
    with tempfile.TemporaryDirectory(prefix="rolljax-mutants-") as folder:
        subprocess.run(
            ["xargs", "-0", "cp", "--parents", "-t", folder], cwd=ROOT, input=tracked.stdout, text=True, check=True
        )
        wrong = [t for t in dict.fromkeys(FAULTS[n].tests for n in names or FAULTS) if not passes(t, Path(folder))]
        if wrong:
            print(f"these fail without any fault: {', '.join(wrong)}")  # noqa: T201
            return 1
        for name in names or FAULTS:
            start = time.monotonic()
            try:
                verdict = "caught" if is_caught(FAULTS[name], Path(folder)) else "NOT CAUGHT"
            except LookupError as e:
                verdict = f"NOT TRIED: {e}"
            bad += verdict != "caught"
            print(f"{verdict:10}  {name}  ({time.monotonic() - start:.0f} s, {FAULTS[name].tests})", flush=True)  # noqa: T201
    print(f"{len(names or FAULTS) - bad} of {len(names or FAULTS)} faults are caught")  # noqa: T201
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
