"""How long a phone that cannot be served is left alone, and how often people hear of it."""

from __future__ import annotations

from etfarm.device_agents.targets.phones.patience import Patience


def test_pauses_double_up_to_the_last() -> None:
    patience = Patience(5.0, 120.0)
    pauses = [patience.pause_s() for _ in range(20)]
    longest = [5.0, 10.0, 20.0, 40.0, 80.0, *[120.0] * 15]
    assert all(most / 2 <= pause <= most for pause, most in zip(pauses, longest, strict=True))
    assert pauses[:5] == sorted(pauses[:5]) and len(set(pauses)) > 10
    assert patience.tries == 20


def test_a_sentence_is_new_once_also_where_several_take_turns() -> None:
    patience = Patience(5.0, 120.0)
    assert [patience.is_new(sentence) for sentence in ("silent", "no room", "silent", "no room")] == [True, True, False, False]
