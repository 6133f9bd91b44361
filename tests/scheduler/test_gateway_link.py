"""What one gateway is told, and when it has lost its stream."""

from fastserve_scheduler.gateway_link import MAX_BATCH_MESSAGES, GatewayLink
from fastserve_scheduler.messages import Batch, Finished, RequestMessage, Status, StopReason, Tokens


def tokens(n: int) -> Tokens:
    return Tokens(f"r{n}", n, bytes(4))


END = Finished("r", StopReason.LENGTH, 0, 1, 0)


async def test_what_waits_goes_as_one_batch_in_order() -> None:
    link = GatewayLink("gw", batches=True)
    for message in (tokens(1), tokens(2), END):
        link.send(message)
    assert await link.next() == Batch((tokens(1), tokens(2), END))


async def test_one_message_is_no_batch_and_a_status_is_never_in_one() -> None:
    link = GatewayLink("gw", batches=True)
    status = Status(True)
    for message in (status, tokens(1), status, tokens(2), tokens(3)):
        link.send(message)
    said = [await link.next() for _ in range(4)]
    assert said == [status, tokens(1), status, Batch((tokens(2), tokens(3)))]


async def test_a_gateway_that_takes_no_batches_gets_none() -> None:
    link = GatewayLink("gw")
    link.send(tokens(1))
    link.send(tokens(2))
    assert [await link.next(), await link.next()] == [tokens(1), tokens(2)]


async def test_batches_are_bounded() -> None:
    link = GatewayLink("gw", batches=True)
    sent: list[RequestMessage] = [tokens(n) for n in range(MAX_BATCH_MESSAGES + 5)]
    for message in sent:
        link.send(message)
    first, second = await link.next(), await link.next()
    assert isinstance(first, Batch)
    assert isinstance(second, Batch)
    assert len(first.messages) == MAX_BATCH_MESSAGES
    assert [*first.messages, *second.messages] == sent


async def test_a_closed_link_says_what_it_had_to_say_and_takes_nothing_more() -> None:
    link = GatewayLink("gw", batches=True)
    link.send(tokens(1))
    link.close()
    link.send(tokens(2))
    assert await link.next() == tokens(1)
    assert await link.next() is None
    assert await link.next() is None


async def test_a_gateway_that_does_not_read_is_closed_at_the_limit() -> None:
    link = GatewayLink("gw", limit=2)
    for n in range(3):
        link.send(tokens(n))
    assert link.closed
    assert [await link.next(), await link.next(), await link.next()] == [tokens(0), tokens(1), None]
