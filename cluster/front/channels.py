"""gRPC channels and listeners as all our processes set them up, but for the draft exchange.

worker/link/channel_options.py has its options, and why they differ.
"""

from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

Options = tuple[tuple[str, int], ...]
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
_MAX_CHANNELS = 64


def server_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """Pings keep a connection through a long prefill, and a client may send its own that often.

    With gRPC's defaults a client that pings every second through a silent prefill of 7 s is
    told to go away (too_many_pings).
    """
    return (
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        # The interval above alone still sends away a client that pings every second.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Two servers on one port would share its requests without a word.
        ("grpc.so_reuseport", 0),
    )


def client_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """For channels inside a cluster: no proxy, quick to notice a peer that is back."""
    return (
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    )


class ChannelCache:
    """One channel per address; past a bound, idle ones are closed, the longest unused first.

    A group that is rebuilt has a new address, so channels of dead leaders age out.
    """

    def __init__(self, max_channels: int = _MAX_CHANNELS) -> None:
        self._max_channels = max_channels
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._num_users: Counter[str] = Counter()

    @asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """The channel to `address`, kept open while the block runs."""
        channel = self._channels.pop(address, None)
        if channel is None:
            channel = grpc.aio.insecure_channel(address, options=client_options())
        self._channels[address] = channel
        self._num_users[address] += 1
        try:
            yield channel
        finally:
            self._num_users[address] -= 1
            await self._close_surplus()

    async def _close_surplus(self) -> None:
        surplus = len(self._channels) - self._max_channels
        idle = [address for address in self._channels if self._num_users[address] == 0]
        for address in idle[: max(0, surplus)]:
            del self._num_users[address]
            await self._channels.pop(address).close()

    async def close(self) -> None:
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            await channel.close()
