"""Data processing of RecGPT (arXiv 2507.22879): behaviour compressed to rows of items, samples from easy to hard,
hashed ids; and synthetic users whose interest shifts, to try all of it on, with questions and rewards of three tasks:
their interests, tags of the next item, and why an item is recommended.

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
MAX_LIKES = 24
"""Most characters of a policy's own interests in its next question."""


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


def summarise(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Yield users with their rows as one line, in `brief`: each tag with the number of events and the day of the last
    one, `lamp x2 d11`, in the order in which tags first occurred."""
    for record in records:
        counts: collections.Counter[str] = collections.Counter()
        days: dict[str, int] = {}
        for row in record["rows"]:
            counts[row["tag"]] += sum(b["count"] for b in row["behaviour"])
            days[row["tag"]] = max(days.get(row["tag"], 0), _last_day(row))
        yield dict(record) | {"brief": ", ".join(f"{tag} x{n} d{days[tag]}" for tag, n in counts.items())}


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
      Users with `events - 1` events, and the held-out item in `target`, its tag in `answer`; `interests`: topics that
      the user likes or liked, the newest first; `shift`: whether the interest shifted; `style`.
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
                "interests": [new, old] if shift else [old],
                "shift": shift,
                "style": style,
            }
        )
    return found


# ---- questions and rewards ------------------------------------------------------------------------------------------


def interest_questions(users: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Yield the first question about each user: the interests in the compressed behaviour. `answer` names the true
    ones, the newest first."""
    for user in summarise(compress(users)):
        yield {"question": f"interests: {user['brief']}", "answer": ", ".join(user["interests"])} | _subtask(user)


def tag_questions(users: Iterable[Record], interests: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the second question about each user: tags of the next item, from the behaviour and the interests found.

    Args:
      interests: what was found for each user, as a text; None: the true ones.

    Returns:
      Questions; `answer` is the tag of the next item; `target_tags` counts as a hit.
    """
    for i, user in enumerate(summarise(compress(users))):
        likes = ", ".join(user["interests"]) if interests is None else " ".join(interests[i].split())[:MAX_LIKES]
        question = f"next: {user['brief']}; likes {likes}"
        yield {"question": question, "answer": user["answer"], "target_tags": [user["answer"]]} | _subtask(user)


def explanation_questions(users: Iterable[Record], items: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """Yield the third question about each user: why the next item is recommended. `answer` names the last event of the
    item's topic, and the item's category."""
    categories = {item["id"]: item["category"] for item in items}
    for user in summarise(compress(users)):
        category = categories[user["target"]]
        last = max(_last_day(row) for row in user["rows"] if row["tag"] == user["answer"])
        answer = f"{user['answer']} on day {last}: {category}"
        yield {"question": f"why {category}: {user['brief']}", "answer": answer} | _subtask(user)


def shipped_questions(num: int = 400, seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Return the questions of each task about `num` synthetic users, from easy to hard: those of the shipped files
    `recgpt_interests.jsonl`, `recgpt_tags.jsonl` and `recgpt_explanations.jsonl`."""
    items = synthetic_items()
    users = synthetic_users(num, items, seed=seed)
    questions = {
        "interests": interest_questions(users),
        "tags": tag_questions(users),
        "explanations": explanation_questions(users, items),
    }
    return {name: list(curriculum(rows, ["steady", "shift"])) for name, rows in questions.items()}


def _subtask(user: Record) -> dict[str, str]:
    return {"subtask": "shift" if user["shift"] else "steady"}


def interest_f1(prompt: str, answer: str, record: Record) -> float:
    """Return the F1 of the interests that a policy names, separated by commas, against the user's true ones: a reward
    for `Questions.reward`."""
    said, true = set(named(answer)), set(named(str(record["answer"])))
    return 2 * len(said & true) / (len(said) + len(true)) if said else 0.0


def hit(prompt: str, answer: str, record: Record) -> float:
    """Return 1 if one of the first five tags in a policy's answer, separated by commas, is one of the next item's
    (`target_tags`): a reward for `Questions.reward`."""
    return float(bool(set(named(answer)[:5]) & {str(tag).lower() for tag in record["target_tags"]}))


def named(answer: str) -> list[str]:
    """Return the different names in an answer, separated by commas, in order; its first 1000 characters are read."""
    return list(dict.fromkeys(name for part in answer[:1000].split(",") if (name := part.strip().lower())))
