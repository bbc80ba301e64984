"""Hidden states that a target hands over are those `transformers` has at the same places."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.worker.models.hidden import HiddenCapture
from paceline.worker.spec.spec_info import CaptureHiddenMode
from paceline.worker.step import Phase, ReqStep
from paceline.worker.target.executor import Executor
from tests.eagle_rig import FULL, LAST, assert_close, build_target, new_row, run

IDS = [5, 9, 33, 77, 2, 4, 100, 200, 7, 7, 31, 64, 255, 1, 0, 263, 18, 90, 12, 13]


@pytest.fixture(scope="module")
def target(tiny_model: Path) -> Executor:
    return build_target(tiny_model)


@pytest.fixture(scope="module")
def states(tiny_model: Path) -> Callable[[Sequence[int]], list[Tensor]]:
    """transformers' states entering each layer, and behind the last; then the final norm's."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    def of(ids: Sequence[int]) -> list[Tensor]:
        behind: list[Tensor] = []
        hook = model.model.layers[-1].register_forward_hook(
            lambda _module, _args, out: behind.append(out[0] if isinstance(out, tuple) else out)
        )
        with torch.no_grad():
            out = model(torch.tensor([list(ids)]), output_hidden_states=True)
        hook.remove()
        *entering, normed = (state[0] for state in out.hidden_states)
        return [*entering, behind[0].reshape(normed.shape), normed]

    return of


@pytest.mark.parametrize("taps", [(), (0,), (3,), (0, 2), (1, 2, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("num_logits", [-1, 0, 1, 3])
def test_captured_states_are_those_of_transformers(
    target: Executor,
    states: Callable[[Sequence[int]], list[Tensor]],
    taps: tuple[int, ...],
    num_logits: int,
) -> None:
    all_states = states(IDS)
    want = torch.cat([all_states[tap] for tap in taps] or [all_states[-1]], dim=-1)
    plain = run(target._runner, HiddenCapture(CaptureHiddenMode.NULL, taps), _step(num_logits))
    assert plain.hidden is None
    full = run(target._runner, HiddenCapture(FULL, taps), _step(num_logits))
    last = run(target._runner, HiddenCapture(LAST, taps), _step(num_logits))
    assert_close(full.hidden, want)
    assert_close(last.hidden, want if num_logits == -1 else want[len(IDS) - num_logits :])
    for captured in (full, last):
        assert captured.logits is not None
        assert plain.logits is not None
        torch.testing.assert_close(captured.logits, plain.logits, atol=1e-5, rtol=1e-5)


def _step(num_logits: int) -> ReqStep:
    return new_row().step(IDS, num_logits=num_logits)


def test_chunks_and_decodes_capture_what_a_whole_prompt_does(
    target: Executor, states: Callable[[Sequence[int]], list[Tensor]]
) -> None:
    capture = HiddenCapture(FULL, (1, 3))
    row = new_row()
    steps = [row.step(IDS[:7]), row.step(IDS[7:15], num_logits=0)]
    steps += [row.step([token], Phase.DECODE) for token in IDS[15:]]
    parts = [run(target._runner, capture, step).hidden for step in steps]
    all_states = states(IDS)
    got = torch.cat([part for part in parts if part is not None])
    assert_close(got, torch.cat([all_states[1], all_states[3]], dim=-1))
