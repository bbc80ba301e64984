"""`paceline serve`: a deployment here or on a Ray cluster, until Ctrl-C, then a drain."""

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from paceline.cluster.config import ClusterConfig
    from paceline.cluster.launch import Deployment, StopReport

_ALIVE_PERIOD_S = 2.0


def _option(*names: str, help: str = "", **rest: Any) -> Any:  # Any: typer's own
    return typer.Option(*names, help=help, show_default=False, **rest)


Text = str | None
Number = int | None
Real = float | None
Flag = bool | None

_ENV_KEY = "PACELINE_API_KEY"


def serve(
    model: Annotated[
        Text, typer.Argument(help="A built-in name or a Hugging Face directory.", metavar="MODEL")
    ] = None,
    *,
    config: Annotated[Path | None, _option("--config", help="TOML; flags win over it.")] = None,
    served_model_name: Annotated[
        list[str] | None, _option("--served-model-name", help="Repeatable.")
    ] = None,
    dtype: Annotated[Text, _option("--dtype", help="auto, float32, bfloat16 or float16.")] = None,
    max_model_len: Annotated[
        Number, _option("--max-model-len", "--context-length", help="Prompt and output together.")
    ] = None,
    device: Annotated[Text, _option("--device", help="auto, cpu or cuda.")] = None,
    kernels: Annotated[Text, _option("--kernels", help="auto, reference, triton or sgl.")] = None,
    deterministic: Annotated[
        Flag,
        typer.Option("--deterministic/--no-deterministic", help="Same bits in any batch; CPU."),
    ] = None,
    tensor_parallel_size: Annotated[
        Number, _option("--tensor-parallel-size", "-tp", "--tp-size", help="Ranks of one copy.")
    ] = None,
    groups: Annotated[Number, _option("--groups", help="Copies of the model.")] = None,
    # The draft.
    draft: Annotated[
        Text, _option("--draft", help="A draft model; auto takes the one that ships.")
    ] = None,
    speculative_config: Annotated[
        Text, _option("--speculative-config", help='JSON: {"method": "draft_model", …}.')
    ] = None,
    speculative_algorithm: Annotated[
        Text, _option("--speculative-algorithm", help="none, ngram or standalone.")
    ] = None,
    speculative_draft_model_path: Annotated[
        Text, _option("--speculative-draft-model-path", help="As --draft.")
    ] = None,
    speculative_num_steps: Annotated[
        Number, _option("--speculative-num-steps", help="Guesses in a row.")
    ] = None,
    speculative_topk: Annotated[
        Number, _option("--speculative-eagle-topk", "--speculative-topk", help="Branches each.")
    ] = None,
    speculative_num_draft_tokens: Annotated[
        Number, _option("--speculative-num-draft-tokens", help="Of a tree, with its root.")
    ] = None,
    draft_tensor_parallel_size: Annotated[
        Number, _option("--draft-tensor-parallel-size", help="Ranks of one draft.")
    ] = None,
    draft_replicas: Annotated[Number, _option("--draft-replicas", help="Draft groups.")] = None,
    draft_placement: Annotated[
        Text, _option("--draft-placement", help="decoupled or colocated.")
    ] = None,
    draft_timeout_ms: Annotated[
        Real, _option("--draft-timeout-ms", help="What a step waits for a draft at most.")
    ] = None,
    draft_fallback: Annotated[
        Text, _option("--draft-fallback", help="Guesses while no draft answers: none or ngram.")
    ] = None,
    # Cache and scheduling.
    page_size: Annotated[
        Number, _option("--page-size", "--block-size", help="Tokens: 1, 16, 32 or 64.")
    ] = None,
    num_pages: Annotated[Number, _option("--num-pages", help="0 sizes the pool.")] = None,
    kv_cache_memory_bytes: Annotated[
        Number, _option("--kv-cache-memory-bytes", help="Of a sized pool at most, per rank.")
    ] = None,
    enable_prefix_caching: Annotated[
        Flag, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching")
    ] = None,
    max_num_seqs: Annotated[
        Number, _option("--max-num-seqs", "--max-running-requests", help="Per group.")
    ] = None,
    max_num_batched_tokens: Annotated[
        Number, _option("--max-num-batched-tokens", help="In one step.")
    ] = None,
    chunked_prefill_size: Annotated[
        Number, _option("--chunked-prefill-size", help="Prompt tokens per step; 0: whole.")
    ] = None,
    max_num_queued_reqs: Annotated[
        Number, _option("--max-num-queued-reqs", "--max-queued-requests", help="More are refused.")
    ] = None,
    max_num_queued_tokens: Annotated[
        Number, _option("--max-num-queued-tokens", help="Prompt tokens; more are refused.")
    ] = None,
    # The fronts.
    fronts: Annotated[Number, _option("--fronts", help="Front processes.", min=1)] = None,
    host: Annotated[Text, _option("--host", help="To listen on; 127.0.0.1 unless set.")] = None,
    port: Annotated[Number, _option("--port", help="HTTP, 8000; 0 takes a free one.")] = None,
    grpc_port: Annotated[
        Number, _option("--grpc-port", help="gRPC, 50051; 0 takes a free one.")
    ] = None,
    api_key: Annotated[
        list[str] | None, _option("--api-key", envvar=_ENV_KEY, help="Repeatable.")
    ] = None,
    admin_api_key: Annotated[
        list[str] | None, _option("--admin-api-key", envvar="PACELINE_ADMIN_API_KEY")
    ] = None,
    ssl_keyfile: Annotated[Text, _option("--ssl-keyfile")] = None,
    ssl_certfile: Annotated[Text, _option("--ssl-certfile")] = None,
    ssl_ca_certs: Annotated[
        Text, _option("--ssl-ca-certs", help="Clients must show a certificate it signed.")
    ] = None,
    ssl_keyfile_password: Annotated[Text, _option("--ssl-keyfile-password")] = None,
    # Ray.
    ray_address: Annotated[
        Text, _option("--ray-address", help="A running cluster, or auto; else one is started.")
    ] = None,
    namespace: Annotated[Text, _option("--namespace", help="Of the actors' names.")] = None,
    num_cpus: Annotated[Number, _option("--num-cpus", help="Of the cluster started here.")] = None,
    num_cpus_per_rank: Annotated[Real, _option("--num-cpus-per-rank")] = None,
    threads_per_rank: Annotated[Number, _option("--threads-per-rank")] = None,
    placement_timeout: Annotated[
        Real, _option("--placement-timeout", help="Seconds to wait for room.")
    ] = None,
    start_timeout: Annotated[
        Real, _option("--start-timeout", help="Seconds for one group to load, once placed.")
    ] = None,
    shutdown_timeout: Annotated[
        Real, _option("--shutdown-timeout", help="Seconds for running requests to end.")
    ] = None,
) -> None:
    """Serve a model over gRPC and HTTP until Ctrl-C or SIGTERM, then let running requests end.

    A second Ctrl-C ends at once. Exit codes: 0 drained after SIGTERM, 130 after Ctrl-C, 3 refused
    before the start, 1 failed.
    """
    from paceline.cluster.config import load_config, parse_speculative_config

    overrides: dict[str, Any] = {  # Any: values of several types
        "model": model,
        "served_model_names": served_model_name or None,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "device": device,
        "kernels": kernels,
        "deterministic": deterministic,
        "target.tensor_parallel_size": tensor_parallel_size,
        "target.groups": groups,
        "draft.num_steps": speculative_num_steps,
        "draft.topk": speculative_topk,
        "draft.num_draft_tokens": speculative_num_draft_tokens,
        "draft.tensor_parallel_size": draft_tensor_parallel_size,
        "draft.groups": draft_replicas,
        "draft.placement": draft_placement,
        "draft.timeout_s": None if draft_timeout_ms is None else draft_timeout_ms / 1000,
        "draft.fallback": draft_fallback,
        "cache.page_size": page_size,
        "cache.num_pages": num_pages,
        "cache.max_bytes": kv_cache_memory_bytes,
        "cache.enable_prefix_caching": enable_prefix_caching,
        "scheduler.max_num_seqs": max_num_seqs,
        "scheduler.max_num_batched_tokens": max_num_batched_tokens,
        "scheduler.chunked_prefill_size": chunked_prefill_size,
        "queue.max_num_reqs": max_num_queued_reqs,
        "queue.max_num_tokens": max_num_queued_tokens,
        "front.count": fronts,
        "front.host": host,
        "front.port": port,
        "front.grpc_port": grpc_port,
        "front.api_keys": api_key or None,
        "front.admin_api_keys": admin_api_key or None,
        "front.ssl_keyfile": ssl_keyfile,
        "front.ssl_certfile": ssl_certfile,
        "front.ssl_ca_certs": ssl_ca_certs,
        "front.ssl_keyfile_password": ssl_keyfile_password,
        "ray.address": ray_address,
        "ray.namespace": namespace,
        "ray.num_cpus": num_cpus,
        "ray.num_cpus_per_rank": num_cpus_per_rank,
        "ray.threads_per_rank": threads_per_rank,
        "ray.placement_timeout_s": placement_timeout,
        "ray.start_timeout_s": start_timeout,
        "ray.shutdown_timeout_s": shutdown_timeout,
    }
    if speculative_config is not None:
        overrides |= parse_speculative_config(speculative_config)
    if draft_model := draft or speculative_draft_model_path:
        overrides |= {"draft.method": "standalone", "draft.model": draft_model}
    if speculative_algorithm is not None:
        overrides["draft.method"] = speculative_algorithm.lower()
    given = {key: value for key, value in overrides.items() if value is not None}
    run_server(load_config(config, given))


def run_server(config: "ClusterConfig") -> None:
    """Starts, serves, drains. Raises: typer.Exit: with the exit code of how it ended."""
    from paceline.cluster.cli.progress import StartProgress
    from paceline.cluster.cli.signals import StopSignals
    from paceline.cluster.launch import start
    from paceline.worker.errors import Unavailable

    with StopSignals() as signals:
        with StartProgress() as progress:

            def tell(process: str, stage: str, fraction: float) -> None:
                signals.install()
                progress.tell(process, stage, fraction)

            deployment = start(config, tell)
        signals.install()
        signals.begin_serving()
        print(f"serving {config.names[0]}: {_where(deployment)}", flush=True)
        _say("Ctrl-C lets running requests end and stops; a second one stops at once.")
        logs = deployment.log_dir
        is_lost = False
        while not signals.asked.wait(_ALIVE_PERIOD_S):
            for line in deployment.news():
                _say(line)
            if not deployment.is_alive():
                is_lost = True
                break
        if not is_lost:
            _say(f"draining for {config.ray.shutdown_timeout_s:g} s at most")
        report = deployment.stop(0.0 if is_lost else None, signals.hurry)
        _say(describe_stop(report))
        if report.is_ray_lost:
            _say(
                "paceline: Ray's own processes ended, and the deployment with them, so nothing was "
                "drained; a service manager must signal this process alone (systemd: "
                f"KillMode=mixed); Ray's logs: {logs}"
            )
            sys.stdout.flush()
            os._exit(1)  # Ray's library crashes at an orderly exit once its GCS is gone
        if is_lost:
            raise Unavailable(
                f"the controller died, and the deployment with it; its log says why: {logs}"
            )
        if report.leftover_pids:
            raise typer.Exit(1)
        raise typer.Exit(130 if signals.first is signal.SIGINT else 0)


def describe_stop(report: "StopReport") -> str:
    if report.leftover_pids:
        return f"stopped, but processes are left: {', '.join(map(str, report.leftover_pids))}"
    ended = f"; {report.num_aborted} requests were aborted" if report.num_aborted else ""
    if not report.num_processes:
        return f"stopped{ended}"
    return f"stopped: all {report.num_processes} processes are gone{ended}"


def _where(deployment: "Deployment") -> str:
    grpc = ", ".join(deployment.grpc_addresses)
    scheme = deployment.http_url.split("://", 1)[0]
    http = ", ".join(f"{scheme}://{address}" for address in deployment.http_addresses)
    return f"gRPC {grpc}, HTTP {http}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
