"""Whose actors end where a server starts its own."""

from __future__ import annotations

from etfarm.server.workers.cluster.tenure import Tenure


def test_a_leader_ends_what_earlier_ones_and_itself_have_left_on_the_node() -> None:
    first, second = Tenure.of_leader("secret", 9), Tenure.of_leader("secret", 10)
    left = [first.name("node"), second.name("node")]
    own = second.name("node")
    assert second.list_former([*left, first.name("other"), own], own) == left


def test_a_former_leader_stays_away_from_a_node_of_a_later_one() -> None:
    first, second = Tenure.of_leader("secret", 9), Tenure.of_leader("secret", 10)
    own = first.name("node")
    assert first.list_former([own, second.name("other")], own) == []
    assert first.list_former([own, second.name("node")], own) is None


def test_farms_are_apart_and_do_not_show_their_secrets() -> None:
    assert Tenure.of_leader("secret", 1).farm == Tenure.of_leader("secret", 2).farm
    assert Tenure.of_leader("secret", 1).farm != Tenure.of_leader("another", 1).farm
    assert "secret" not in Tenure.of_leader("secret", 1).farm
    assert Tenure.of_lone_server().farm != Tenure.of_lone_server().farm
