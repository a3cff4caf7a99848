"""roll_call: simulated ranks name the right rank, whoever asks, with few messages."""

from __future__ import annotations

import pytest
from predicted.lost_ranks import Network, counted

from autotp.distributed.peers.roll_call import SILENCE, Census, State, lost_of, notes_of
from autotp.distributed.peers.tree import children_of

SIZE = 100


@pytest.mark.parametrize("lost", [0, 1, 8, 64, 65, 99])
def test_a_killed_rank_is_told_all_others(lost: int) -> None:
    network = Network(SIZE)
    network.kill(lost)
    assert all(list(node.lost) == [lost] for node in network.nodes.values())
    network.ask_all()
    assert network.told == {rank: [lost] for rank in range(SIZE) if rank != lost}


@pytest.mark.parametrize("lost", [0, 8, 64, 99])
def test_a_stopped_rank_is_named_by_those_that_ask(lost: int) -> None:
    network = Network(SIZE)
    network.stop(lost)
    assert not any(node.lost for node in network.nodes.values()), "it may only be slow"
    network.ask_all()
    assert network.told == {rank: [lost] for rank in range(SIZE) if rank != lost}


def test_a_rank_that_goes_on_is_not_silent() -> None:
    network = Network(SIZE)
    network.stop(8)
    network.stopped.clear()
    network.nodes[8].resume()
    network.pass_a_second()
    network.ask_all()
    assert network.told == {rank: [] for rank in range(SIZE)}


def test_a_rank_that_takes_leave_is_named_to_those_that_wait_for_it() -> None:
    network = Network(SIZE)
    network.nodes[9].leave(failed=False)
    network.deliver()
    network.kill(9)
    assert not any(node.lost for node in network.nodes.values())
    network.ask_all()
    assert network.told[0] == [9]
    network.kill(64)  # A rank that was killed is the cause, and not one that took leave.
    network.ask_all()
    assert network.told[0] == [64]


def test_a_stopped_rank_is_named_when_the_first_to_ask_has_taken_leave() -> None:
    """Rank 0 tells what the roll call found, raises its Error, and ends. Then another rank asks."""
    network, answers = Network(SIZE), list[Census]()
    network.stop(64)
    network.nodes[0].ask(answers.append)
    for _ in range(int(SILENCE) + 1):
        network.pass_a_second()
    assert lost_of(answers.pop()) == [64]
    network.nodes[0].leave(failed=False)
    network.deliver()
    network.kill(0)
    network.nodes[1].ask(answers.append)
    network.deliver()
    assert lost_of(answers.pop()) == [64]


def test_the_note_of_a_killed_rank_is_known() -> None:
    network, answers = Network(SIZE), list[Census]()
    network.nodes[65].set_note("raised OutOfMemoryError: no memory")
    network.deliver()
    network.kill(65)
    network.nodes[99].ask(answers.append)
    network.deliver()
    assert notes_of(answers[0]) == {65: "raised OutOfMemoryError: no memory"}


def test_a_rank_that_fails_alone_is_lost_with_its_note() -> None:
    network = Network(SIZE)
    network.nodes[3].set_note("raised ValueError: no")
    network.nodes[3].leave(failed=True)
    network.deliver()
    assert all(node.lost == {3: "raised ValueError: no"} for rank, node in network.nodes.items() if rank != 3)


def test_a_roll_call_tells_what_each_rank_does() -> None:
    network, answers = Network(SIZE), list[Census]()
    for rank in (5, 6, 77):
        network.nodes[rank].state = lambda: State("", "", (("tp", 3),))
    network.nodes[40].ask(answers.append)
    network.deliver()
    (census,) = answers
    assert census.states[State("", "", (("tp", 3),))] == [[5, 7], [77, 78]]
    assert {rank for rank, state in census.by_rank().items() if state.doing} == {*range(SIZE)} - {5, 6, 77}
    assert Census.of_data(census.as_data()) == census and lost_of(census) == []


def test_news_for_some_ranks_reaches_them_only() -> None:
    network, told = Network(SIZE), list[tuple[int, int, str]]()
    for rank, node in network.nodes.items():
        node.topics = {"news": lambda sender, data, rank=rank: told.append((rank, sender, data))}
    network.nodes[66].tell([0, 67, 99], "news", "read it")
    network.deliver()
    assert sorted(told) == [(rank, 66, "read it") for rank in (0, 67, 99)]


def test_a_neighbour_that_joined_and_never_connected_is_silent() -> None:
    network = Network(SIZE)
    network.kill(9)
    for node in network.nodes.values():
        node.lost.clear()
    network.nodes[8].expected[9] = network.now - SILENCE
    network.ask_all()
    assert network.told[0] == [9]


def test_messages_grow_with_the_number_of_ranks() -> None:
    small, large = counted(64), counted(512)
    assert small.wrong == large.wrong == 0
    assert large.beats <= 30, "a second, at the busiest machine"
    assert large.news <= 2 * 512 and large.roll <= 8 * 512
    assert len(children_of(0, 512)) == 21
