"""What Ray Serve hosts: Engine, which owns a deployment, and Ingress, a front without listeners.

Plain classes, made Serve deployments in app.py. Serve's HTTP proxy takes the listeners' place;
behind it stands the same ASGI app that our own fronts serve, so routes, errors and streams are
the same. From Ingress on, a request goes by gRPC as it does from any front.
"""

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import ray

from paceline.cluster.config import CONTROLLER_NAME, ClusterConfig
from paceline.cluster.group.spawn import call_actor
from paceline.worker.errors import Unavailable
from paceline.worker.telemetry import configure_logging

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from paceline.cluster.front.service import GenerationCore

log = logging.getLogger(__name__)

_START_POLL_S = 0.5


class Engine:
    """Starts a deployment on the cluster Serve runs on, and ends it with itself."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, config: ClusterConfig
    ) -> None:
        from paceline.cluster.launch import start

        configure_logging("serve-engine")
        # `start` waits for Ray calls, which an event loop must not.
        self._deployment = await asyncio.to_thread(start, config)

    async def namespace(self) -> str:
        """Where the deployment is found, once it runs."""
        return self._deployment.config.ray.namespace

    async def check_health(self) -> None:
        """Raises: Unavailable: the controller is gone; Serve then starts the engine anew."""
        if not await asyncio.to_thread(self._deployment.is_alive):
            raise Unavailable("the controller does not answer")

    async def __del__(self) -> None:
        if hasattr(self, "_deployment"):
            await asyncio.to_thread(self._deployment.stop)


class Ingress:
    """
    Args:
        namespace: of the deployment to stand in front of.
        engine: a handle of the Engine that starts it; None when it runs already.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, namespace: str, engine: Any = None
    ) -> None:  # Any: a Serve handle
        from paceline.cluster.front.actor import front_settings
        from paceline.cluster.front.server import build_core

        configure_logging("serve-ingress")
        if engine is not None:
            namespace = await engine.namespace.remote()
        spec = await _find_front_spec(namespace)
        self._api_keys = spec.section.api_keys
        self._core: GenerationCore = build_core(front_settings(spec))
        self._is_ready = False
        await self.check_health()

    def __serve_build_asgi_app__(self) -> "ASGIApp":
        from paceline.cluster.front.http_api import build_http_app

        return build_http_app(self._core, api_keys=self._api_keys, is_ready=lambda: self._is_ready)

    async def check_health(self) -> None:
        """Raises: Unavailable: the controller does not answer.

        A deployment without a ready group is a matter of readiness: a new replica would not help.
        """
        status = await self._core.status()
        self._is_ready = any(
            group.role == "target" and group.state == "ready" for group in status.groups
        )

    async def __del__(self) -> None:
        if hasattr(self, "_core"):
            await self._core.close()


async def _find_front_spec(namespace: str) -> Any:  # Any: a FrontSpec, through Ray
    """Waits while the deployment starts. Raises: Unavailable: there is none."""
    try:
        controller = ray.get_actor(CONTROLLER_NAME, namespace)
    except ValueError:
        raise Unavailable(
            f"no deployment runs in the Ray namespace '{namespace}'; start one with "
            "`paceline serve --ray-address auto`, or leave out `attach`"
        ) from None
    while True:
        try:
            return await call_actor(controller.front_spec.remote(), "the controller")
        except Unavailable as error:
            if "starting" not in error.message:
                raise
            await asyncio.sleep(_START_POLL_S)
