"""Data processing of RecGPT (arXiv 2507.22879): behaviour compressed to rows of items, samples from easy to hard,
hashed ids; and synthetic users whose interest shifts, to try all of it on.

Pure functions from records to records, deterministic given their seed. A user is `{"user": id, "events": [{"item": id,
"action": name, "day": number, "tag": text}, ...]}`, in order of time.
"""

from __future__ import annotations

import collections
import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
INTENTIONAL = ("click", "search", "favourite", "cart", "buy")
"""Actions that show a user's interest; items that were only displayed are not among them."""
TOPICS = ("tea", "lamp", "sofa", "boot", "kite", "drum", "rice", "mask", "tent", "ring", "fern", "cake")
"""Tags of synthetic items, one for each topic."""


# ---- behaviour compression ------------------------------------------------------------------------------------------


def compress(records: Iterable[Record], actions: Sequence[str] = INTENTIONAL) -> Iterator[dict[str, Any]]:
    """Yield users with their events as rows of items, in `rows` instead of `events`.

    Events of other actions are dropped and counted in `left_out`. The rest is counted by day and action, and grouped by
    item: a row for each, in the order in which items first occurred, its days and actions likewise. No count is lost:
    the counts of a user's rows add up to the kept events.
    """
    for record in records:
        rows: dict[str, dict[tuple[Any, str], int]] = {}
        left_out = 0
        for event in record["events"]:
            if event["action"] not in actions:
                left_out += 1
                continue
            counts = rows.setdefault(event["item"], collections.Counter())
            counts[event["day"], event["action"]] += 1
        tags = {event["item"]: event.get("tag", "") for event in record["events"]}
        kept = {name: value for name, value in record.items() if name != "events"}
        yield kept | {
            "rows": [
                {
                    "item": item,
                    "tag": tags[item],
                    "behaviour": [{"day": d, "action": a, "count": n} for (d, a), n in counts.items()],
                }
                for item, counts in rows.items()
            ],
            "left_out": left_out,
        }


def write_history(records: Iterable[Record], max_chars: int = 0) -> Iterator[dict[str, Any]]:
    """Yield users with their rows as one text, in `history`: an item on each line, with its actions by day.

    Args:
      max_chars: of the text; the most recently used rows are kept, and `rows_cut` counts the others. 0: all.
    """
    for record in records:
        lines, days = [_line(row) for row in record["rows"]], [_last_day(row) for row in record["rows"]]
        newest = sorted(range(len(lines)), key=days.__getitem__, reverse=True)
        kept, chars = set(), 0
        for i in newest:
            chars += len(lines[i]) + 1
            if max_chars and chars > max_chars:
                break
            kept.add(i)
        text = "\n".join(line for i, line in enumerate(lines) if i in kept)
        yield dict(record) | {"history": text, "rows_cut": len(lines) - len(kept)}


def _line(row: Mapping[str, Any]) -> str:
    said = ", ".join(f"day {b['day']} {b['action']}" + f" x{b['count']}" * (b["count"] > 1) for b in row["behaviour"])
    return f"{row['tag'] or row['item']}: {said}"


def _last_day(row: Mapping[str, Any]) -> Any:
    return max(b["day"] for b in row["behaviour"])


def hash_ids(records: Iterable[Record], salt: str, fields: Sequence[str] = ("user",)) -> Iterator[dict[str, Any]]:
    """Yield records with hashes, 16 hexadecimal digits, in place of ids. The salt must stay secret, or ids can be
    guessed.

    Args:
      fields: names of the id fields; fields of `rows` and `events` are unchanged, as items are public.
    """
    for record in records:
        hashed = {
            name: hashlib.sha256(f"{salt}\0{record[name]}".encode()).hexdigest()[:16]
            for name in fields
            if name in record
        }
        yield dict(record) | hashed


# ---- curriculum -----------------------------------------------------------------------------------------------------


def curriculum(records: Iterable[Record], subtasks: Sequence[str], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield samples from easy to hard: by the place of their `subtask` in `subtasks`, within one in a random order from
    the seed; `stage` is that place, from 0.

    Raises:
      ValueError: a sample has another subtask.
    """
    place = {name: i for i, name in enumerate(subtasks)}
    stages: list[list[Record]] = [[] for _ in subtasks]
    for record in records:
        if record["subtask"] not in place:
            raise ValueError(f"subtask {record['subtask']!r} is none of {', '.join(subtasks)}")
        stages[place[record["subtask"]]].append(record)
    for stage, samples in enumerate(stages):
        random.Random(f"{seed}/{stage}").shuffle(samples)
        for record in samples:
            yield dict(record) | {"stage": stage}


# ---- synthetic users ------------------------------------------------------------------------------------------------


def synthetic_items(per_topic: int = 40, styles: int = 4) -> list[dict[str, Any]]:
    """Return `per_topic` items of each of `TOPICS`: `id`, `tags`, `category` (topic and a leaf of it) and `style`. No
    tag contains the style: only other users' behaviour shows it."""
    return [
        {"id": f"{topic}-{n}", "tags": [topic], "category": f"{topic} {n % 5}", "style": n % styles}
        for topic in TOPICS
        for n in range(per_topic)
    ]


def synthetic_users(
    num: int, items: Sequence[Record], *, seed: int = 0, events: int = 12, shifted: float = 0.5, noise: float = 0.15
) -> list[dict[str, Any]]:
    """Return users who like one style in all topics, and one topic at a time; some of them turn to another topic.

    Args:
      events: of each before the last one. shifted: fraction of users whose last two events, and the held-out one, are
        of another topic than the earlier ones. noise: fraction of the earlier events that are of any topic.

    Returns:
      Users with `events - 1` events, and the held-out item in `target`, its tag in `answer`; `shift`: whether the
      interest shifted; `style`.
    """
    rng = random.Random(seed)
    styles = max(item["style"] for item in items) + 1
    by_kind: dict[tuple[str, int], list[str]] = collections.defaultdict(list)
    for item in items:
        by_kind[item["tags"][0], item["style"]].append(item["id"])
    found = []
    for user in range(num):
        old, new = rng.sample(TOPICS, 2)
        style, shift = rng.randrange(styles), rng.random() < shifted
        before = [rng.choice(TOPICS) if rng.random() < noise else old for _ in range(events - 3)]
        topics = [*before, *[new if shift else old] * 3]
        chosen = [rng.choice(by_kind[t, style if rng.random() < 0.9 else rng.randrange(styles)]) for t in topics]
        happened = [
            {"item": item, "action": rng.choice(INTENTIONAL), "day": day, "tag": topic}
            for day, (item, topic) in enumerate(zip(chosen, topics, strict=True), 1)
        ]
        found.append(
            {
                "user": f"user {user}",
                "events": happened[:-1],
                "target": chosen[-1],
                "answer": topics[-1],
                "shift": shift,
                "style": style,
            }
        )
    return found


def tag_questions(records: Iterable[Record], last: int = 6) -> Iterator[dict[str, Any]]:
    """Yield users as questions for a policy: `question` names the tags of their `last` events, newest last, `answer`
    the tag of the next one; `target_tags` counts as a hit."""
    for record in records:
        tags = [event["tag"] for event in record["events"][-last:]]
        yield {
            "question": " ".join(tags),
            "answer": record["answer"],
            "target_tags": [record["answer"]],
            "subtask": "shift" if record["shift"] else "steady",
        }


def hit(prompt: str, answer: str, record: Record) -> float:
    """Return 1 if one of the tags in a policy's answer, separated by commas, is one of the next item's (`target_tags`):
    a reward for `Questions.reward`."""
    said = {tag.strip().lower() for tag in answer[:1000].split(",")[:5]}
    return float(bool(said & {str(tag).lower() for tag in record["target_tags"]}))
