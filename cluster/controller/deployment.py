"""From a ClusterConfig to what each group and front is told."""

from collections.abc import Sequence

from paceline.cluster.config import ClusterConfig
from paceline.cluster.front.actor import FrontSpec
from paceline.cluster.group.settings import ModelRef, RankSettings
from paceline.cluster.group.spawn import GroupSpec
from paceline.cluster.placement.bundles import NodeView, Resources
from paceline.worker.config import ModelConfig


def choose_device(config: ClusterConfig, nodes: Sequence[NodeView]) -> str:
    """As configured; "auto" is a GPU where the cluster has any."""
    if config.device != "auto":
        return config.device
    return "cuda" if any(node.total.gpus for node in nodes) else "cpu"


def target_specs(config: ClusterConfig, device: str, host: str = "") -> list[GroupSpec]:
    draft_ref = None
    if config.draft.is_colocated:
        draft_ref = _draft_ref(config)
    tp_size = config.target.tensor_parallel_size
    return [
        GroupSpec(
            role="target",
            settings=RankSettings(
                group_id=f"target-{i}",
                tp_rank=0,
                tp_size=tp_size,
                model=model_ref(config),
                cache=config.cache_config(),
                scheduler=config.scheduler_config(),
                spec=config.draft.spec_config(device),
                draft=draft_ref,
                fallback=config.draft.fallback,
                kernels=config.kernels,
                device=device,
                deterministic=config.deterministic,
                cuda_graphs=config.cuda_graphs,
                host=host,
                namespace=config.ray.namespace,
            ),
            per_rank=_per_rank(config, device),
        )
        for i in range(config.target.groups)
    ]


def draft_specs(config: ClusterConfig, device: str, host: str = "") -> list[GroupSpec]:
    if not config.draft.is_decoupled:
        return []
    # Every target may send it a full batch; targets share the drafts evenly.
    num_targets = -(-config.target.groups // config.draft.groups)
    scheduler = config.scheduler_config(max_num_seqs=config.scheduler.max_num_seqs * num_targets)
    return [
        GroupSpec(
            role="draft",
            settings=RankSettings(
                group_id=f"draft-{i}",
                tp_rank=0,
                tp_size=config.draft.tensor_parallel_size,
                model=_draft_ref(config),
                cache=config.cache_config(num_pages=0),  # its KV is smaller; it sizes its own pool
                scheduler=scheduler,
                spec=config.draft.spec_config(device),
                kernels=config.kernels,
                device=device,
                host=host,
                namespace=config.ray.namespace,
            ),
            per_rank=_per_rank(config, device),
        )
        for i in range(config.draft.groups)
    ]


def front_specs(config: ClusterConfig, model: ModelConfig) -> list[FrontSpec]:
    front = config.front
    return [
        _front_spec(
            config,
            model,
            index=i,
            port=front.port + i if front.port else 0,
            grpc_port=front.grpc_port + i if front.grpc_port else 0,
        )
        for i in range(front.count)
    ]


def hosted_front_spec(config: ClusterConfig, model: ModelConfig) -> FrontSpec:
    """Of a front that brings its own listeners."""
    return _front_spec(config, model, index=-1, port=0, grpc_port=0)


def _front_spec(
    config: ClusterConfig, model: ModelConfig, *, index: int, port: int, grpc_port: int
) -> FrontSpec:
    return FrontSpec(
        index=index,
        model_ref=model_ref(config),
        model=model,
        served_model_names=config.names,
        section=config.front,
        port=port,
        grpc_port=grpc_port,
        speculative_method=config.draft.method,
        simulated_accept_length=config.draft.simulated_accept_length,
        namespace=config.ray.namespace,
    )


def model_ref(config: ClusterConfig) -> ModelRef:
    return ModelRef(config.model, config.dtype, config.max_model_len)


def _draft_ref(config: ClusterConfig) -> ModelRef:
    return ModelRef(config.draft.model, config.dtype)


def _per_rank(config: ClusterConfig, device: str) -> Resources:
    return Resources(config.ray.num_cpus_per_rank, 1.0 if device.startswith("cuda") else 0.0)
