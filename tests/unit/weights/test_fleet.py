"""How members of a refit are numbered, and who may be given up."""

import asyncio

from rl.weights.fleet import Fleet
from tests.support.refit_fakes import FakeFleet, FakeSender, FakeServer


def make(replicas: int, min_replicas: int) -> tuple[Fleet, FakeFleet, list[FakeServer]]:
    sender = FakeSender()
    generator = FakeFleet(sender, replicas, num_readers=2)
    servers = [FakeServer(f"server {index}", sender) for index in range(2)]
    return Fleet(generator, servers, min_replicas), generator, servers


async def test_readers_are_numbered_anew_over_those_who_are_left() -> None:
    fleet, _, _ = make(2, 1)
    members = [(member.name, member.first_reader) for member in fleet.members()]
    assert members == [("generation[0]", 0), ("generation[1]", 2), ("server 0", 4), ("server 1", 5)]
    assert fleet.members()[1].reader_names == ["generation[1].0", "generation[1].1"]
    assert await fleet.give_up("generation[0]", "it died")
    assert await fleet.give_up("server 0", "it died too")
    assert [(member.name, member.first_reader) for member in fleet.members()] == [("generation[1]", 0), ("server 1", 2)]


async def test_replicas_are_given_up_down_to_the_least_number_servers_without_one() -> None:
    fleet, generator, _ = make(3, 2)
    assert await fleet.give_up("generation[1]", "it died")
    assert not await fleet.give_up("generation[0]", "it died")
    assert not await fleet.give_up("generation[1]", "it is unknown now")
    assert generator.removed == {"generation[1]": "it died"}
    assert await fleet.give_up("server 1", "it died") and await fleet.give_up("server 0", "it died")
    assert fleet.servers == [] and len(fleet.members()) == 2


async def test_a_server_that_cannot_be_paused_or_resumed_leaves_and_the_others_go_on() -> None:
    fleet, generator, servers = make(1, 1)
    servers[0].is_dead = True
    await asyncio.gather(*fleet.pauses("keep").values())
    assert generator.is_paused and generator.replicas[0].modes == ["keep"] and servers[1].is_paused
    assert fleet.servers == [servers[1]]
    servers[1].is_dead = True
    await asyncio.gather(*fleet.resumes().values())
    assert not generator.is_paused and fleet.servers == []
