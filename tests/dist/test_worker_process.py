"""A draft group without Ray: its leader as a process of its own, from environment to gRPC."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.worker.config import CacheConfig, SpecConfig, WorkerConfig
from paceline.worker.entry import encode_config
from paceline.worker.models.registry import load_model_config


@pytest.mark.timeout(60)
def test_a_draft_leader_serves_until_it_is_told_to_stop(tiny_draft: Path) -> None:
    config = WorkerConfig(
        load_model_config(tiny_draft, max_model_len=64),
        cache=CacheConfig(num_pages=16),
        spec=SpecConfig(method="standalone"),
        num_threads=1,
    )
    env = os.environ | {
        "PACELINE_WORKER_CONFIG": encode_config(config),
        "PACELINE_WORKER_GROUP": "draft-0",
        "PACELINE_WORKER_LISTEN": "127.0.0.1:0",
    }
    command = [sys.executable, "-m", "paceline.worker.entry"]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines: list[str] = []
            address = ""
            while not address:
                line = process.stderr.readline()
                assert line, f"the draft ended: {lines}"
                lines.append(line)
                if match := re.search(r"draft serving.* address=(\S+)", line):
                    address = match[1]
            with grpc.insecure_channel(address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
