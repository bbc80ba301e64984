"""A whole deployment as a side of a benchmark: controller, front, group, all over gRPC."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.cluster.bench.engines import RunResult
from paceline.cluster.client import PacelineClient
from paceline.cluster.config import parse_config
from paceline.cluster.launch import Deployment, start


class ServedEngine:
    """One target group at TP=1 without speculation, on a Ray cluster of its own."""

    def __init__(self, model_dir: Path, *, dtype: str, max_model_len: int) -> None:
        self._config = parse_config(
            {
                "model": str(model_dir),
                "dtype": dtype,
                "max_model_len": max_model_len,
                "draft": {"method": "none"},
                "front": {"port": 0, "grpc_port": 0},
            },
            "the benchmark",
        )
        self._deployment: Deployment | None = None
        self._runner = asyncio.Runner()
        self._client: PacelineClient | None = None

    def __enter__(self) -> Self:
        self._deployment = start(self._config)
        self._client = self._runner.run(self._connect(self._deployment.grpc_address))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._client is not None:
            self._runner.run(self._client.close())
        self._runner.close()
        if self._deployment is not None:
            self._deployment.stop(drain_s=5.0)

    def run(self, prompts: Sequence[list[int]], max_tokens: int) -> RunResult:
        """All prompts at once as separate calls, greedy, past any end of sequence."""
        return self._runner.run(self._run(prompts, max_tokens))

    async def _connect(self, address: str) -> PacelineClient:
        return PacelineClient(address)

    async def _run(self, prompts: Sequence[list[int]], max_tokens: int) -> RunResult:
        first_token_s: list[float] = []
        start_s = time.perf_counter()

        async def answer(prompt: list[int]) -> list[int]:
            assert self._client is not None, "run outside the with block"
            output_ids: list[int] = []
            async for piece in self._client.generate(
                input_ids=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True
            ):
                if piece.token_ids and not output_ids:
                    first_token_s.append(time.perf_counter() - start_s)
                output_ids.extend(piece.token_ids)
            return output_ids

        output_ids = await asyncio.gather(*map(answer, prompts))
        return RunResult(output_ids, time.perf_counter() - start_s, min(first_token_s))
