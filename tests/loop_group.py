"""A group for tests: a real executor, of one rank or several, under a step loop driven by hand."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.cluster.group.step_loop import NewReq, ReqEvent, ReqReceipt, StepLoop
from paceline.worker.config import SpecConfig
from paceline.worker.spec.drafter import Drafter
from paceline.worker.step import ReqId, SamplingParams
from paceline.worker.target.executor import Executor

SHARED = [3 + (i * i) % 250 for i in range(40)]
# For tiny models. Lengths around pages of 16 and chunks of 8; three of them begin alike, and one
# text repeats.
PROMPTS = [
    [70],
    [5 + (i * 11) % 240 for i in range(15)],
    [9 + (i * 7) % 240 for i in range(16)],
    [9 + (i * 5) % 240 for i in range(33)],
    [*SHARED, 100],
    [*SHARED, 101, 102, 103],
    [*SHARED[:32], *([55, 66, 77] * 6)],
    [*([20, 30, 40, 50] * 12)],
]
MAX_TOKENS = 24
GREEDY = SamplingParams(seed=1, max_tokens=MAX_TOKENS, temperature=0.0)
SAMPLED = SamplingParams(seed=40, max_tokens=MAX_TOKENS, temperature=0.8, top_p=0.9)


class LoopGroup:
    """A step loop with an empty prefix cache over an executor, whose owner shuts it down.

    Several may follow one another over the same executor, whose pages keep what was written.

    Args:
        spec: instead of the executor's own; its trees must not be larger.
        max_num_seqs: instead of the executor's own; not more.
    """

    def __init__(
        self,
        executor: Executor,
        drafter: Drafter | None = None,
        *,
        spec: SpecConfig | None = None,
        max_num_seqs: int = 0,
    ) -> None:
        config = executor.config
        scheduler = config.scheduler
        if max_num_seqs:
            scheduler = replace(scheduler, max_num_seqs=max_num_seqs)
        self.loop = StepLoop(
            executor,
            drafter,
            cache=config.cache,
            scheduler=scheduler,
            spec=spec or config.spec,
            max_model_len=config.model.max_model_len,
            eos_token_ids=config.model.eos_token_ids,
            vocab_size=config.model.vocab_size,
            check_invariants=True,
        )
        self.page_size = config.cache.page_size
        self.events: dict[str, list[ReqEvent]] = {}
        self._num_rounds = 0

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    ) -> list[list[int]]:
        """All prompts at once. One params serves all, with a seed of its own for each."""
        if isinstance(params, SamplingParams):
            params = [replace(params, seed=params.seed + i) for i in range(len(prompts))]
        self._num_rounds += 1
        streams: list[list[ReqEvent]] = []
        for i, (prompt, req_params) in enumerate(zip(prompts, params, strict=True)):
            events: list[ReqEvent] = []
            req_id = ReqId(f"{self._num_rounds}-{i}")
            self.loop.submit(NewReq(req_id, prompt, [], req_params), events.append)
            self.events[req_id] = events
            streams.append(events)
        while self.loop.step_once():
            pass
        assert self.loop.healthy
        return [[token for event in events for token in event.new_ids] for events in streams]

    def receipts(self) -> list[ReqReceipt]:
        """Of the last round, in the order of its prompts."""
        found = []
        for req_id, events in self.events.items():
            if req_id.startswith(f"{self._num_rounds}-"):
                assert events[-1].receipt is not None
                found.append(events[-1].receipt)
        return found

    def total(self, field: str) -> int:
        """Sum of a field over all receipts."""
        return sum(getattr(events[-1].receipt, field) for events in self.events.values())

    def close(self) -> None:
        """Ends the loop; every page must have come back."""
        self.loop.stop()
        snapshot = self.loop.snapshot()
        assert snapshot.num_orphaned_pages == 0
        assert snapshot.num_free_pages + snapshot.num_cached_pages == snapshot.num_pages
