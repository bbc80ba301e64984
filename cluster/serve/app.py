"""build_app: a deployment behind Ray Serve, for `serve run`, `serve deploy` and KubeRay.

    serve run paceline.cluster.serve.app:build_app model=smollm2-135m draft.model=auto \
        target.tensor_parallel_size=2

Serve's HTTP proxy then answers `/v1/chat/completions`, `/v1/completions`, `/v1/models`, `/health`
and `/metrics` as our own fronts do. The arguments are the keys of a deployment's configuration
(cluster/config.py), nested as in YAML or dotted as above, and beside them:

    attach        true: stand in front of the deployment that runs in `ray.namespace` already
    num_replicas  of the ingress, 1 unless set

A deployment started here has no fronts of its own unless `front.count` says so, since Serve has
port 8000; with `front.count=1 front.port=0` it also answers gRPC with TLS, health and reflection.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from ray import serve
from ray.serve import Application, Deployment

from paceline.cluster.config import DEFAULT_NAMESPACE, ClusterConfig, load_config
from paceline.cluster.serve.ingress import Engine, Ingress
from paceline.worker.errors import ConfigError

_HEALTH_PERIOD_S = 2.0
_STOP_S = 60.0
# Ours is a controller of processes and a relay of tokens: the ranks ask for their own resources.
_ACTOR_OPTIONS = {"num_cpus": 0, "runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}}}


def build_app(args: dict[str, Any]) -> Application:  # Any: values as YAML or a shell gives them
    """Raises: ConfigError: an unknown key, or a value that cannot be; names it."""
    settings = _flatten(args)
    attach = _take(settings, "attach", bool, default=False)
    num_replicas = _take(settings, "num_replicas", int, default=1)
    ingress: Deployment = serve.deployment(
        name="PacelineIngress",
        num_replicas=num_replicas,
        max_ongoing_requests=1024,  # our own queue is the bound; Serve's would only hide it
        health_check_period_s=_HEALTH_PERIOD_S,
        ray_actor_options=_ACTOR_OPTIONS,
    )(serve.ingress()(Ingress))
    if attach:
        namespace = settings.pop("ray.namespace", DEFAULT_NAMESPACE)
        if settings:
            raise ConfigError(
                f"with attach only ray.namespace is of use, but there is {sorted(settings)}; the "
                "running deployment has its configuration already"
            )
        return ingress.bind(str(namespace))
    config = _config(settings)
    engine: Deployment = serve.deployment(
        name="PacelineEngine",
        num_replicas=1,
        health_check_period_s=_HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=config.ray.shutdown_timeout_s + _STOP_S,
        ray_actor_options=_ACTOR_OPTIONS,
    )(Engine)
    return ingress.bind(config.ray.namespace, engine.bind(config))


def _config(settings: dict[str, Any]) -> ClusterConfig:  # Any: as above
    if settings.get("ray.address"):
        raise ConfigError("ray.address is Serve's own cluster; leave it out")
    return load_config(None, {"front.count": 0} | settings)


def _flatten(args: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:  # Any: as above
    flat: dict[str, Any] = {}
    for key, value in args.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _take(settings: dict[str, Any], key: str, kind: type, *, default: Any) -> Any:  # Any: as above
    """A setting of ours; a shell gives it as text."""
    try:
        return TypeAdapter(kind).validate_python(settings.pop(key, default))
    except ValidationError as error:
        raise ConfigError(f"'{key}': {error.errors()[0]['msg'].lower()}") from error
