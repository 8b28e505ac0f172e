"""The numbered batches of `core.shared_queue.delivery` over a network that loses, repeats and reorders."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.shared_queue.delivery import BATCH, WINDOW, ReceiveBuffer, SendBuffer
from tests.effort import examples

Batch = tuple[int, tuple[int, ...]]


def pump(sending: SendBuffer[int], receiving: ReceiveBuffer[int]) -> list[int]:
    """Send until nothing is left, over a network that does nothing wrong."""
    taken: list[int] = []
    while True:
        sending.on_ack(receiving.last_taken)
        seq, items = sending.next_batch()
        if not items:
            return taken
        taken += receiving.accept(seq, items)


def test_a_batch_has_what_no_batch_had_and_is_bounded() -> None:
    sending: SendBuffer[int] = SendBuffer()
    for item in range(BATCH + 5):
        sending.put(item)
    assert sending.next_batch() == (1, tuple(range(BATCH)))
    assert sending.next_batch() == (BATCH + 1, tuple(range(BATCH, BATCH + 5)))
    assert sending.next_batch() == (BATCH + 6, ())
    assert sending.unsent == 0
    sending.resend_unacked()
    assert sending.unsent == BATCH + 5


def test_what_is_on_its_way_is_bounded() -> None:
    sending: SendBuffer[int] = SendBuffer()
    for item in range(2 * WINDOW):
        sending.put(item)
    sent = sum(len(sending.next_batch()[1]) for _ in range(2 * WINDOW // BATCH))
    assert sent == WINDOW
    sending.on_ack(BATCH)
    assert len(sending.next_batch()[1]) == BATCH


def test_what_comes_much_too_early_is_not_kept() -> None:
    receiving: ReceiveBuffer[int] = ReceiveBuffer()
    assert receiving.accept(WINDOW + 1, (7,)) == []
    assert receiving.accept(3, (3, 4)) == []
    assert receiving.accept(WINDOW + 5, tuple(range(10))) == []
    assert list(receiving.accept(1, (1, 2))) == [1, 2, 3, 4]
    assert receiving.last_taken == 4


def test_words_of_what_was_never_sent_or_was_acknowledged_before_change_nothing() -> None:
    sending: SendBuffer[int] = SendBuffer()
    for item in range(4):
        sending.put(item)
    sending.next_batch()
    sending.on_ack(3)
    sending.on_ack(1)
    sending.on_ack(99)
    assert (len(sending), sending.last_acked) == (1, 3)
    sending.resend_unacked()
    assert sending.next_batch() == (4, (3,))


steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 5)),
        st.tuples(st.sampled_from(["send", "again", "ack", "old ack"]), st.just(0)),
        st.tuples(st.sampled_from(["deliver", "repeat", "lose"]), st.integers(0, 4)),
    ),
    max_size=80,
)


@settings(max_examples=examples(300), deadline=None)
@given(steps)
def test_every_item_is_taken_once_and_in_order(script: list[tuple[str, int]]) -> None:
    sending: SendBuffer[int] = SendBuffer()
    receiving: ReceiveBuffer[int] = ReceiveBuffer()
    connection: list[Batch] = []
    acks: list[int] = [0]
    put = 0
    taken = []
    for step, argument in script:
        if step == "put":
            for _ in range(argument):
                put += 1
                sending.put(put)
        elif step == "send":
            connection.append(sending.next_batch())
        elif step == "again":
            sending.resend_unacked()
        elif step == "ack":
            sending.on_ack(acks[-1])
        elif step == "old ack":
            sending.on_ack(acks[len(acks) // 2])
        elif argument < len(connection):
            seq, items = connection[argument] if step == "repeat" else connection.pop(argument)
            if step != "lose":
                taken += receiving.accept(seq, items)
                acks.append(receiving.last_taken)
        assert taken == list(range(1, len(taken) + 1))
        assert len(sending) <= put
    sending.on_ack(receiving.last_taken)
    sending.resend_unacked()
    taken += pump(sending, receiving)
    assert taken == list(range(1, put + 1))
    sending.on_ack(receiving.last_taken)
    assert len(sending) == 0


def test_what_was_taken_and_comes_again_out_of_order_leaves_nothing_behind() -> None:
    receiving: ReceiveBuffer[int] = ReceiveBuffer()
    receiving.accept(1, (1, 2, 3))
    receiving.accept(5, (5,))
    receiving.accept(1, (1, 2, 3))
    assert list(receiving.accept(4, (4,))) == [4, 5]
    assert receiving.early == {}
