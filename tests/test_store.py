"""What rank 0 serves: keys, and exchanges of one request a rank."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from meetings import all_exchange, identities, met
from programs import wait_until
from torch.distributed import DistError, HashStore

from cos598d.errors import UserError
from cos598d.terminal.words import ranks_in_words
from cos598d.world.identity import Identity
from cos598d.world.meeting import Meeting
from cos598d.world.rendezvous import meet
from cos598d.world.server import LARGEST_ARRIVAL
from cos598d.world.store import StoreClient

pytestmark = pytest.mark.usefixtures("servers")


def test_a_store_of_ours_keeps_what_torch_expects_of_one(servers):
    meetings = met(identities(2))
    first, second = (meeting.store for meeting in meetings)
    first.set("a", b"\x00\xff")
    assert second.get("a") == b"\x00\xff"
    assert [first.add("n", 2), second.add("n", 3)] == [2, 5]
    assert second.get("n") == b"5"
    assert second.check(["a", "n"])
    assert not second.check(["a", "b"])
    assert first.compare_set("a", b"\x00\xff", "new") == b"new"
    assert first.compare_set("a", "other", "newer") == b"new"
    first.append("a", "est")
    assert second.multi_get(["a", "n"]) == [b"newest", b"5"]
    assert second.num_keys() == 2
    assert first.delete_key("a")
    assert not first.delete_key("a")
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(second.get, "late")
        first.set("late", "here")
        assert waits.result(10) == b"here"


def test_an_exchange_is_one_request_of_each_rank(servers, monkeypatch):
    meetings = met(identities(8))
    asked = []
    request = StoreClient.request

    def counted(self, *words, **more):
        asked.append(words)
        return request(self, *words, **more)

    monkeypatch.setattr(StoreClient, "request", counted)
    assert all_exchange(meetings) == [[{"rank": rank} for rank in range(8)]] * 8
    assert len(asked) == 8


def test_a_rank_may_say_much_but_only_once_it_has_met_the_others(servers):
    meetings = met(identities(2))
    long = "x" * (LARGEST_ARRIVAL + 1)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda meeting: meeting.exchange(long), meetings)) == [[long, long]] * 2
    them = identities(2, secret=b"")
    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(meet, them[0], 1, {})
        one = pool.submit(meet, them[1], 1, {"sync": long})
        for future in (zero, one):
            with pytest.raises(UserError, match="rank 0 is gone|did not come|lost rank 1"):
                future.result(60)


def test_what_only_rank_0_needs_goes_only_there(servers):
    meetings = met(identities(4))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda meeting: meeting.collect(meeting.identity.rank), meetings))
    assert found == [[0, 1, 2, 3], None, None, None]


def test_a_rank_that_gives_nothing_is_named(servers):
    meetings = met(identities(3), seconds=20)
    for meeting in meetings:
        meeting.store.seconds = meeting.seconds = 0.5
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(meeting.exchange, 1) for meeting in meetings[:2]]:
            with pytest.raises(UserError, match=r"no word from rank 2 within 0\.5 s"):
                future.result(30)


def test_an_exchange_through_any_store_waits_on_one_key():
    """As the worlds of `check` and of these tests do it, through a file."""
    checked = []

    class Counted(HashStore):
        def check(self, keys):
            checked.append(tuple(keys))
            return super().check(keys)

    store = Counted()
    meetings = [Meeting(Identity(rank, 4), store, ["here"] * 4, seconds=20) for rank in range(4)]
    assert all_exchange(meetings) == [[{"rank": rank} for rank in range(4)]] * 4
    assert set(checked) == {("exchange/1/complete",)}


def test_when_rank_0_is_gone_the_others_learn_it(servers):
    meetings = met(identities(2))
    servers[0].stop()
    with pytest.raises(DistError, match="Connection closed"):
        meetings[1].exchange(1)


def test_of_many_ranks_the_first_are_named():
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words([1, 3]) == "ranks 1, 3"
    assert ranks_in_words(list(range(100))).endswith("18, 19 and 80 more")


def test_threads_that_use_the_store_at_once_share_what_connections_there_are(servers):
    store = met(identities(2))[1].store
    opened = []
    connected = store._connection

    def counted():
        connection = connected()
        opened.append(id(connection[0]))
        return connection

    store._connection = counted
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(store.get, f"late{k}") for k in range(3)]
        wait_until(lambda: len(opened) == 3)
        for k in range(3):
            store.set(f"late{k}", str(k))
        assert [future.result(20) for future in waiting] == [b"0", b"1", b"2"]
    for _ in range(20):
        store.check(["late0"])
    assert len(set(opened)) <= 4
