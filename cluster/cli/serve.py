"""`paceline serve`: a deployment here or on a Ray cluster, until Ctrl-C, then a drain."""

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cluster.cli import spec_options
from paceline.cluster.cli.spec_options import option

if TYPE_CHECKING:
    from paceline.cluster.config import ClusterConfig
    from paceline.cluster.launch import Deployment, StopReport

_ALIVE_PERIOD_S = 2.0


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
    config: Annotated[Path | None, option("--config", help="TOML; flags win over it.")] = None,
    served_model_name: Annotated[
        list[str] | None, option("--served-model-name", help="Repeatable.")
    ] = None,
    dtype: Annotated[Text, option("--dtype", help="auto, float32, bfloat16 or float16.")] = None,
    max_model_len: Annotated[
        Number, option("--max-model-len", "--context-length", help="Prompt and output together.")
    ] = None,
    device: Annotated[Text, option("--device", help="auto, cpu or cuda.")] = None,
    kernels: Annotated[
        Text, option("--kernels", help="auto, reference, native, triton or sgl.")
    ] = None,
    deterministic: Annotated[
        Flag,
        typer.Option("--deterministic/--no-deterministic", help="Same bits in any batch; CPU."),
    ] = None,
    cuda_graphs: Annotated[
        Flag, typer.Option("--cuda-graphs/--disable-cuda-graph", help="Record repeated GPU work.")
    ] = None,
    tensor_parallel_size: Annotated[
        Number, option("--tensor-parallel-size", "-tp", "--tp-size", help="Ranks of one copy.")
    ] = None,
    groups: Annotated[Number, option("--groups", help="Copies of the model.")] = None,
    # The draft.
    draft: spec_options.Draft = None,
    speculative_config: spec_options.SpeculativeConfig = None,
    speculative_algorithm: spec_options.Algorithm = None,
    speculative_num_steps: spec_options.NumSteps = None,
    speculative_topk: spec_options.Topk = None,
    speculative_num_draft_tokens: spec_options.NumDraftTokens = None,
    speculative_adaptive: spec_options.Adaptive = None,
    spec_overlap: spec_options.Overlap = None,
    token_map: spec_options.TokenMap = None,
    ngram_corpus: spec_options.NgramCorpus = None,
    spec_rule: spec_options.Rule = None,
    spec_threshold_single: spec_options.ThresholdSingle = None,
    spec_threshold_acc: spec_options.ThresholdAcc = None,
    simulated_accept_length: spec_options.SimulatedAcceptLength = None,
    simulated_method: spec_options.SimulatedMethod = None,
    draft_tensor_parallel_size: Annotated[
        Number, option("--draft-tensor-parallel-size", help="Ranks of one draft.")
    ] = None,
    draft_replicas: Annotated[Number, option("--draft-replicas", help="Draft groups.")] = None,
    draft_placement: spec_options.Placement = None,
    draft_timeout_ms: Annotated[
        Real, option("--draft-timeout-ms", help="What a step waits for a draft at most.")
    ] = None,
    draft_fallback: Annotated[
        Text, option("--draft-fallback", help="Guesses while no draft answers: none or ngram.")
    ] = None,
    # Cache and scheduling.
    page_size: Annotated[
        Number, option("--page-size", "--block-size", help="Tokens: 1, 16, 32 or 64.")
    ] = None,
    num_pages: Annotated[Number, option("--num-pages", help="0 sizes the pool.")] = None,
    kv_cache_memory_bytes: Annotated[
        Number, option("--kv-cache-memory-bytes", help="Of a sized pool at most, per rank.")
    ] = None,
    enable_prefix_caching: Annotated[
        Flag, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching")
    ] = None,
    max_num_seqs: Annotated[
        Number, option("--max-num-seqs", "--max-running-requests", help="Per group.")
    ] = None,
    max_num_batched_tokens: Annotated[
        Number, option("--max-num-batched-tokens", help="In one step.")
    ] = None,
    chunked_prefill_size: Annotated[
        Number, option("--chunked-prefill-size", help="Prompt tokens per step; 0: whole.")
    ] = None,
    max_num_queued_reqs: Annotated[
        Number, option("--max-num-queued-reqs", "--max-queued-requests", help="More are refused.")
    ] = None,
    max_num_queued_tokens: Annotated[
        Number, option("--max-num-queued-tokens", help="Prompt tokens; more are refused.")
    ] = None,
    # The fronts.
    fronts: Annotated[Number, option("--fronts", help="Front processes.", min=1)] = None,
    host: Annotated[Text, option("--host", help="To listen on; 127.0.0.1 unless set.")] = None,
    port: Annotated[Number, option("--port", help="HTTP, 8000; 0 takes a free one.")] = None,
    grpc_port: Annotated[
        Number, option("--grpc-port", help="gRPC, 50051; 0 takes a free one.")
    ] = None,
    api_key: Annotated[
        list[str] | None, option("--api-key", envvar=_ENV_KEY, help="Repeatable.")
    ] = None,
    admin_api_key: Annotated[
        list[str] | None, option("--admin-api-key", envvar="PACELINE_ADMIN_API_KEY")
    ] = None,
    ssl_keyfile: Annotated[Text, option("--ssl-keyfile")] = None,
    ssl_certfile: Annotated[Text, option("--ssl-certfile")] = None,
    ssl_ca_certs: Annotated[
        Text, option("--ssl-ca-certs", help="Clients must show a certificate it signed.")
    ] = None,
    ssl_keyfile_password: Annotated[Text, option("--ssl-keyfile-password")] = None,
    # Ray.
    ray_address: Annotated[
        Text, option("--ray-address", help="A running cluster, or auto; else one is started.")
    ] = None,
    namespace: Annotated[Text, option("--namespace", help="Of the actors' names.")] = None,
    num_cpus: Annotated[Number, option("--num-cpus", help="Of the cluster started here.")] = None,
    num_cpus_per_rank: Annotated[Real, option("--num-cpus-per-rank")] = None,
    threads_per_rank: Annotated[Number, option("--threads-per-rank")] = None,
    placement_timeout: Annotated[
        Real, option("--placement-timeout", help="Seconds to wait for room.")
    ] = None,
    start_timeout: Annotated[
        Real, option("--start-timeout", help="Seconds for one group to load, once placed.")
    ] = None,
    shutdown_timeout: Annotated[
        Real, option("--shutdown-timeout", help="Seconds for running requests to end.")
    ] = None,
) -> None:
    """Serve a model over gRPC and HTTP until Ctrl-C or SIGTERM, then let running requests end.

    A second Ctrl-C ends at once. Exit codes: 0 drained after SIGTERM, 130 after Ctrl-C, 3 refused
    before the start, 1 failed.
    """
    from paceline.cluster.config import load_config

    overrides: dict[str, Any] = {  # Any: values of several types
        "model": model,
        "served_model_names": served_model_name or None,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "device": device,
        "kernels": kernels,
        "deterministic": deterministic,
        "cuda_graphs": cuda_graphs,
        "target.tensor_parallel_size": tensor_parallel_size,
        "target.groups": groups,
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
    overrides |= spec_options.draft_overrides(
        draft=draft,
        speculative_config=speculative_config,
        speculative_algorithm=speculative_algorithm,
        num_steps=speculative_num_steps,
        topk=speculative_topk,
        num_draft_tokens=speculative_num_draft_tokens,
        adaptive=speculative_adaptive,
        overlap=spec_overlap,
        token_map=token_map,
        ngram_corpus=ngram_corpus,
        rule=spec_rule,
        threshold_single=spec_threshold_single,
        threshold_acc=spec_threshold_acc,
        simulated_accept_length=simulated_accept_length,
        simulated_method=simulated_method,
        tensor_parallel_size=draft_tensor_parallel_size,
        groups=draft_replicas,
        placement=draft_placement,
        timeout_s=None if draft_timeout_ms is None else draft_timeout_ms / 1000,
        fallback=draft_fallback,
    )
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
