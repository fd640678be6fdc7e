"""Counters of a group of samplers: differences of its totals are what was done in between, whoever leaves."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from rolljax.cluster.stats import StatsSum
from rolljax.sampler.prompt_queue import SamplerStats


def test_what_a_lost_sampler_did_stays_in_the_total():
    group = StatsSum()
    for name in ("a", "b"):
        group.put(name, SamplerStats())
    group.put("a", SamplerStats(sampled_tok=10, held_s=1.5))
    group.put("b", SamplerStats(sampled_tok=4))
    before = group.total()
    group.retire("a")
    assert group.total() == before == SamplerStats(sampled_tok=14, held_s=1.5)
    group.put("c", SamplerStats())
    group.put("c", SamplerStats(sampled_tok=3))
    assert (group.total().sampled_tok, before.sampled_tok) == (17, 14)


def test_what_a_sampler_did_before_it_joined_does_not_count():
    group = StatsSum()
    group.put("a", SamplerStats(sampled_tok=500))
    assert group.total() == SamplerStats()
    group.put("a", SamplerStats(sampled_tok=501))
    group.retire("a")
    group.put("a", SamplerStats(sampled_tok=900))  # it was out of reach, and rejoins
    group.put("a", SamplerStats(sampled_tok=902))
    assert group.total().sampled_tok == 3


def test_a_sampler_that_starts_again_under_its_name_counts_from_zero():
    group = StatsSum()
    group.put("a", SamplerStats())
    group.put("a", SamplerStats(requests=7, sampled_tok=90))
    group.put("a", SamplerStats(requests=9, sampled_tok=5))
    assert group.total() == SamplerStats(requests=16, sampled_tok=95)


EVENTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["put", "put", "restart", "retire"]), st.integers(0, 50)),
    max_size=60,
)


@given(EVENTS)
def test_no_difference_is_negative_and_work_counts_once(events):
    group, now, known, counted = StatsSum(), dict.fromkeys("abc", 0), set(), 0
    before = dataclasses.astuple(group.total())
    for name, event, more in events:
        if event == "retire":
            group.retire(name)
            known.discard(name)
        else:
            if event == "restart" and more < now[name]:
                now[name], work = more, more
            else:
                now[name], work = now[name] + more, more
            group.put(name, SamplerStats(sampled_tok=now[name], held_s=now[name] / 3))
            counted += work if name in known else 0
            known.add(name)
        after = dataclasses.astuple(group.total())
        assert all(a >= b for a, b in zip(after, before, strict=True))
        assert group.total().sampled_tok == counted
        before = after
