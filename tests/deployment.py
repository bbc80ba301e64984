"""Real deployments for tests: one Ray per module, any number of deployments in it, and a judge."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import ray
import torch

from paceline.cluster.config import load_config
from paceline.cluster.launch import Deployment, start
from paceline.protos.v1 import admin_pb2, generation_pb2
from paceline.protos.v1.admin_pb2_grpc import AdminServiceStub
from paceline.protos.v1.generation_pb2_grpc import GenerationServiceStub


@contextmanager
def local_ray(work_dir: Path, num_cpus: int = 4) -> Iterator[None]:
    """One Ray for the deployments of a module, so that each of them starts faster."""
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=80 * 1024 * 1024,
        runtime_env={"working_dir": str(work_dir)},
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def deployed(model: Path, namespace: str, **settings: Any) -> Iterator[Deployment]:
    """A deployment in fp32 on free ports; `settings` are dotted keys with "__" for the dot."""
    overrides = {
        "model": str(model),
        "dtype": "float32",
        "front.port": 0,
        "front.grpc_port": 0,
        "ray.namespace": namespace,
        "ray.num_cpus_per_rank": 0.1,
        "ray.threads_per_rank": 1,
        "ray.placement_timeout_s": 30.0,
        "ray.start_timeout_s": 90.0,
        "ray.shutdown_timeout_s": 5.0,
    }
    overrides |= {key.replace("__", "."): value for key, value in settings.items()}
    deployment = start(load_config(None, overrides))
    try:
        yield deployment
    finally:
        deployment.stop()


class Judge:
    """transformers' greedy tokens of the same checkpoint in fp32."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def greedy(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """End tokens do not end it, as with `ignore_eos`."""
        ids = torch.tensor([list(prompt_ids)])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        new_ids: list[int] = out[0, ids.shape[1] :].tolist()
        return new_ids


def group_info(deployment: Deployment, group_id: str) -> generation_pb2.GroupInfo:
    with grpc.insecure_channel(deployment.grpc_address) as channel:
        info = GenerationServiceStub(channel).GetServerInfo(
            generation_pb2.GetServerInfoRequest(), timeout=10
        )
    return next(group for group in info.groups if group.group_id == group_id)


def snapshot(address: str) -> admin_pb2.SnapshotResponse:
    """Of a leader, target or draft."""
    with grpc.insecure_channel(address) as channel:
        return AdminServiceStub(channel).Snapshot(admin_pb2.SnapshotRequest(), timeout=10)
