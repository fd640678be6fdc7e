"""Between the travel desk and the data pipeline: requests as records, and a policy's own solved episodes as
conversations to imitate.

`python -m rolljax.recipes.stagent.episodes FILE --num 280` writes requests of the tiny desk (`travel.TINY`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from rolljax.data.attempts import FromRollouts
from rolljax.data.base import Place, Record, RecordSource, Stage, text_of
from rolljax.envs.base import EnvSpec
from rolljax.envs.tasks import training_indices
from rolljax.errors import Checked, Range
from rolljax.recipes.stagent.travel import TINY, Travel, TravelDesk, request_of, request_text
from rolljax.storage.run_reader import read_trajectories
from rolljax.types import Message, Task, Trajectory

HELD_OUT_FRAC = 0.2
"""Share of the requests that no record holds, for the evaluation (`Evaluation.held_out_frac`)."""


def records_of(desk: TravelDesk, num: int) -> list[Record]:
    """Return the first different requests that are not held out, each with the columns `prompt` (its text), `task` (the
    content of the task) and `level`."""
    tasks = [desk.task(i) for i in training_indices(desk, HELD_OUT_FRAC, num)]
    return [
        {"prompt": request_text(request_of(t)[0], desk.style), "task": t.content, "level": desk.category(t)}
        for t in tasks
    ]


@dataclasses.dataclass(frozen=True)
class SolvedEpisodes(Checked, Stage):
    """Yield a record for each kept episode in which a policy solved the record's task, with the whole conversation in
    the column `messages`, which `Records` trains on. Records without such an episode are left out.

    The answers are played again, so the conversation is what the policy saw.
    """

    env: EnvSpec
    """The environment of the episodes."""
    paths: tuple[str, ...]
    """Files of episodes, or folders of them, as of `attempts.FromRollouts`."""
    task_key: str = "task"
    """The column with the content of the task."""
    cap: Annotated[int, Range(low=1)] = 4
    """Maximum number of episodes kept per record, which differ in their answers."""

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        solved: dict[str, dict[tuple[str, ...], Trajectory]] = {}
        wanted = {text_of(record, self.task_key) for record in source}
        for t in (t for path in FromRollouts(self.paths).files() for t in read_trajectories(path)):
            if t.success and t.task.content in wanted:
                solved.setdefault(t.task.content, {}).setdefault(tuple(turn.text for turn in t.turns), t)
        for record in source:
            kept = list(solved.get(text_of(record, self.task_key), {}).values())[: self.cap]
            place.count("episodes_kept", len(kept))
            if not kept:
                place.drop(record, "never_solved")
            for t in kept:
                yield {"messages": conversation(self.env, t.task, [turn.text for turn in t.turns])}


def conversation(env: EnvSpec, task: Task, answers: Sequence[str]) -> list[dict[str, Any]]:
    """Return the messages of an episode, by playing its answers."""
    episode = env.make()
    try:
        said: list[Message] = [*episode.reset(task)]
        for answer in answers:
            said += [Message("assistant", answer), *episode.step(answer).messages]
    finally:
        episode.close()
    return [{"role": m.role, "content": m.content} for m in said]


def main(argv: Sequence[str] | None = None) -> None:
    """Write requests of the tiny desk into the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--num", type=int, default=280)
    args = parser.parse_args(argv)
    rows = records_of(Travel(**TINY), args.num)
    args.file.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
