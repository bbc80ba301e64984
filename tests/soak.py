"""Random traffic against a toy group, and what must be true of it in the end."""

import random
from dataclasses import dataclass

from paceline.worker.clock import FakeClock
from paceline.worker.errors import DeadlineExceeded
from paceline.worker.step import FinishReason, ReqId
from tests.toy import VOCAB_SIZE, ToyDrafter, ToyGroup, generate


@dataclass
class Sent:
    prompt: list[int]
    max_tokens: int
    is_timed: bool = False
    is_aborted: bool = False


class Soak:
    """Random traffic against one group, from one seed."""

    def __init__(self, group: ToyGroup, seed: int) -> None:
        self.group = group
        self.sent: dict[str, Sent] = {}
        self._random = random.Random(seed)
        self._prompts: list[list[int]] = []
        assert isinstance(group.clock, FakeClock)
        self._clock = group.clock

    def run(self, num_reqs: int) -> None:
        rand = self._random
        while len(self.sent) < num_reqs:
            for _ in range(rand.randrange(4)):
                self._submit()
            live = [r for r in self.sent if not self._has_ended(r)]
            if live and rand.random() < 0.08:
                req_id = rand.choice(live)
                self.sent[req_id].is_aborted = self.group.loop.abort(ReqId(req_id))
            if rand.random() < 0.02:
                self.group.loop.set_drafter(ToyDrafter(rand.randrange(1000), topk=1))
            self._clock.advance(rand.random())
            self.group.loop.step_once()
        self.group.run_until_idle()

    def check(self) -> None:
        for req_id, sent in self.sent.items():
            last = self.group.last(req_id)
            output = self.group.output(req_id)
            expected = generate(sent.prompt, sent.max_tokens)
            assert output == expected[: len(output)], f"req {req_id} went astray"
            if last.error is not None:
                assert isinstance(last.error, DeadlineExceeded)
                assert sent.is_timed
            elif last.finish_reason is FinishReason.ABORT:
                assert sent.is_aborted
            else:
                assert output == expected
            receipt = last.receipt
            assert receipt is not None
            assert receipt.completion_tokens == len(output)
            # Each step emits its accepted tokens and one more, unless the req ends on an accepted.
            num_surplus = receipt.num_steps + receipt.accepted_tokens - len(output)
            assert num_surplus == 0 or (num_surplus == 1 and receipt.accepted_tokens > 0)
            assert receipt.accepted_tokens <= receipt.proposed_tokens
        self.group.assert_all_pages_returned()

    def num_preemptions(self) -> int:
        receipts = (self.group.last(req_id).receipt for req_id in self.sent)
        return sum(receipt.num_preemptions for receipt in receipts if receipt is not None)

    def num_cached_tokens(self) -> int:
        receipts = (self.group.last(req_id).receipt for req_id in self.sent)
        return sum(receipt.cached_tokens for receipt in receipts if receipt is not None)

    def _submit(self) -> None:
        rand = self._random
        req_id = str(len(self.sent))
        prompt = [rand.randrange(VOCAB_SIZE) for _ in range(rand.randrange(1, 30))]
        if self._prompts and rand.random() < 0.5:  # a prefix that others have, too
            known = rand.choice(self._prompts)
            prompt = [*known[: rand.randrange(1, len(known) + 1)], *prompt[:8]]
        prompt = prompt[:40]
        self._prompts.append(prompt)
        max_tokens = rand.randrange(1, 50)
        is_timed = rand.random() < 0.15
        deadline = self._clock.unix_s() + 12 * rand.random() if is_timed else None
        given_ids = generate(prompt, max_tokens)[: rand.randrange(4)] if rand.random() < 0.2 else []
        if given_ids == generate(prompt, max_tokens):
            given_ids = []
        self.sent[req_id] = Sent(prompt + given_ids, max_tokens - len(given_ids), is_timed)
        self.group.submit(
            req_id,
            prompt,
            max_tokens,
            output_ids=given_ids,
            priority=rand.randrange(-1, 2),
            deadline_unix_s=deadline,
        )

    def _has_ended(self, req_id: str) -> bool:
        events = self.group.events[req_id]
        return bool(events) and events[-1].is_last
