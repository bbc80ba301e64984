"""One step loop in this process, with or without a draft, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.group.step_loop import NewReq, ReqEvent, ReqReceipt, Sink, StepLoop
from paceline.worker.config import WorkerConfig
from paceline.worker.errors import InternalError, PacelineError
from paceline.worker.spec.drafter import Drafter
from paceline.worker.step import PageId, Phase, ReqId, ReqStep, SamplingParams, StepPlan
from paceline.worker.target.build import build_executor

Logits = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ask:
    prompt_ids: Sequence[int]
    params: SamplingParams


@dataclass(slots=True)
class Answer:
    output_ids: list[int] = field(default_factory=list)
    receipt: ReqReceipt | None = None
    error: PacelineError | None = None


class Engine:
    """A rank alone. Its steps run on the caller's thread; use it as a context.

    Raises: as `build_executor`.
    """

    def __init__(self, config: WorkerConfig, drafter: Drafter | None = None) -> None:
        self._executor = build_executor(config)
        self._loop = StepLoop(
            self._executor,
            drafter,
            cache=config.cache,
            scheduler=config.scheduler,
            spec=config.spec,
            max_model_len=config.model.max_model_len,
            eos_token_ids=config.model.eos_token_ids,
            vocab_size=config.model.vocab_size,
        )
        self._config = config
        self._num_asked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.stop()
        self._executor.shutdown()

    def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        """All at once, as many together as the scheduler lets run.

        Raises: PacelineError: a request failed.
        """
        answers = [Answer() for _ in asks]
        for ask, answer in zip(asks, answers, strict=True):
            req_id = ReqId(f"ask-{self._num_asked}")
            self._num_asked += 1
            self._loop.submit(
                NewReq(req_id, list(ask.prompt_ids), [], ask.params), _sink_of(answer)
            )
        while self._loop.step_once():
            pass
        for answer in answers:
            if answer.error is not None:
                raise answer.error
            if answer.receipt is None:
                raise InternalError("the step loop went idle before a request had ended")
        return answers

    def next_logits(self, ids: Sequence[int]) -> Logits:
        """What the model says behind `ids`, computed anew as one prompt: [vocab_size].

        Only while nothing is asked. What it writes lies in pages that the loop may think cached, so
        the engine must run without a prefix cache.
        """
        assert self._loop.is_idle
        assert not self._config.cache.enable_prefix_caching
        num_pages = -(-len(ids) // self._executor.page_size)
        row = ReqStep(
            req_pool_index=1,
            phase=Phase.PREFILL,
            prefix_len=0,
            input_ids=tuple(ids),
            pages=tuple(PageId(i + 1) for i in range(num_pages)),
            num_logits=1,
        )
        logits = self._executor.forward(StepPlan(0, (row,)))
        assert logits is not None
        found: Logits = logits[0, : self._config.model.vocab_size].double().cpu().numpy()
        return found


def _sink_of(answer: Answer) -> Sink:
    def sink(event: ReqEvent) -> None:
        answer.output_ids.extend(event.new_ids)
        if event.error is not None:
            answer.error = event.error
        if event.receipt is not None:
            answer.receipt = event.receipt

    return sink
