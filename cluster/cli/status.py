"""`paceline status`: what a running server consists of and how busy it is."""

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cluster.cli.generate import Address, ApiKey

if TYPE_CHECKING:
    from paceline.protos.v1 import generation_pb2

    _Info = tuple[generation_pb2.GetModelInfoResponse, generation_pb2.GetServerInfoResponse]


def status(
    *,
    address: Address = "127.0.0.1:50051",
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a running server's groups and load."""
    from google.protobuf.json_format import MessageToDict

    from paceline.cluster.client import PacelineClient

    async def ask() -> (
        "tuple[generation_pb2.GetModelInfoResponse, generation_pb2.GetServerInfoResponse]"
    ):
        async with PacelineClient(address, api_key=api_key) as client:
            return await client.model_info(), await client.server_info()

    model, server = asyncio.run(ask())
    if as_json:
        both = {
            name: MessageToDict(
                message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            )
            for name, message in (("model", model), ("server", server))
        }
        print(json.dumps(both))
        return
    _print_table(model, server)


def _print_table(
    model: "generation_pb2.GetModelInfoResponse", server: "generation_pb2.GetServerInfoResponse"
) -> None:
    from rich.console import Console
    from rich.table import Table

    # A pipe has no width to fit.
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(
        f"paceline {server.version}  up {server.uptime_s:.0f} s  "
        f"model {', '.join(model.served_model_names)} ({model.dtype}, context "
        f"{model.max_model_len})  speculation {_describe_speculation(server)}  "
        f"queued {server.num_queued_reqs}",
        highlight=False,
        markup=False,
    )
    table = Table("group", "role", "state", "tp", "address", "pages free", "running", "waiting")
    table.add_column("draft")
    table.add_column("epoch")
    for group in server.groups:
        table.add_row(
            group.group_id,
            group.role,
            group.state,
            str(group.tp_size),
            group.address,
            f"{group.num_free_pages}/{group.num_pages}",
            str(group.num_running_reqs),
            str(group.num_waiting_reqs),
            _describe_draft(group),
            str(group.epoch),
        )
    console.print(table)
    for group in server.groups:
        if group.last_error:
            console.print(
                f"{group.group_id}: last error: {group.last_error}", highlight=False, markup=False
            )
        if group.draft.refusal:
            console.print(
                f"{group.group_id}: its draft refuses it: {group.draft.refusal}",
                highlight=False,
                markup=False,
            )


def _describe_speculation(server: "generation_pb2.GetServerInfoResponse") -> str:
    if not server.simulated_accept_length:
        return server.speculative_method
    made_up = f"{server.simulated_accept_length:g} tokens/step"
    return f"{server.speculative_method} (ACCEPTANCE SIMULATED, {made_up})"


def _describe_draft(group: "generation_pb2.GroupInfo") -> str:
    name = group.draft_group_id or "-"
    is_down = bool(group.draft_group_id) and group.HasField("draft") and not group.draft.is_up
    return f"{name} (down)" if is_down else name
