"""Telling a target's leader of its draft: again and again, but only while it is true."""

import asyncio

from paceline.cluster.controller.actor import attach
from paceline.cluster.controller.events import AttachDraft
from paceline.protos.v1 import admin_pb2, admin_pb2_grpc
from paceline.worker.step import Epoch
from tests.fake_cluster import serve


class FakeLeaderAdmin(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    async def AttachDraft(  # noqa: N802 - the .proto's name
        self, request: admin_pb2.AttachDraftRequest, context: object
    ) -> admin_pb2.AttachDraftResponse:
        self.told.append((request.draft_group_id, request.epoch))
        return admin_pb2.AttachDraftResponse()


def pairing(address: str) -> AttachDraft:
    return AttachDraft("t0", address, "d0", "d0:1", Epoch(3))


async def test_a_leader_is_told_once() -> None:
    leader = FakeLeaderAdmin()
    server, address = await serve(admin_pb2_grpc.add_AdminServiceServicer_to_server, leader)
    await asyncio.wait_for(attach(pairing(address), lambda action: True), 10.0)
    assert leader.told == [("d0", 3)]
    await server.stop(None)


async def test_a_leader_that_is_gone_is_not_called_for_ever() -> None:
    answers = iter([True, True, False])
    await asyncio.wait_for(attach(pairing("127.0.0.1:1"), lambda action: next(answers)), 10.0)
    assert list(answers) == [], "it gave up while the pairing was still true"
