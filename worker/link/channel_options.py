"""gRPC options of the draft exchange, for both ends.

They differ from those of the other channels (cluster/front/channels.py) on purpose: a draft that is
gone is to be noticed within seconds, since until then each round waits for its timeout, and
messages are a round of token ids, never a client's whole request.
"""

from paceline.worker.link.wire import MAX_MESSAGE_BYTES

_SHARED_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A host that vanished without a word is noticed within 15 s: by the target, which then plans
    # no trees, and by the draft, which then frees what the target's reqs hold.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

LINK_OPTIONS = (
    *_SHARED_OPTIONS,
    # The schedule of reconnects is ours: a channel shares no connection state with an earlier one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),  # both ends are inside one cluster
)

SERVER_OPTIONS = (
    *_SHARED_OPTIONS,
    # Links ping an idle stream every 10 s, and a proxy between may ping more often; by default gRPC
    # answers that with GOAWAY (too_many_pings), which breaks the stream. The interval alone still
    # sends away who pings every second.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Two servers on one port would share its connections between them; a used port is an error.
    ("grpc.so_reuseport", 0),
)
