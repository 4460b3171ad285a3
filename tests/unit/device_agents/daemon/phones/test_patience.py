"""How long a phone that cannot be served is left alone, and how often people hear of it."""

from __future__ import annotations

from etfarm.device_agents.daemon.phones.fleet import FailedTries


def test_pauses_double_up_to_the_last() -> None:
    tries = FailedTries(5.0, 120.0)
    pauses = [tries.add() for _ in range(20)]
    longest = [5.0, 10.0, 20.0, 40.0, 80.0, *[120.0] * 15]
    assert all(most / 2 <= pause <= most for pause, most in zip(pauses, longest, strict=True))
    assert pauses[:5] == sorted(pauses[:5]) and len(set(pauses)) > 10
    assert tries.count == 20


def test_a_sentence_is_new_once_also_where_several_take_turns() -> None:
    tries = FailedTries(5.0, 120.0)
    assert [tries.is_new(sentence) for sentence in ("silent", "no room", "silent", "no room")] == [True, True, False, False]
