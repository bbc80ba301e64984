"""`paceline verify-lossless` on tiny models: every way to draft passes, and faults fail."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.cli import main as cli
from paceline.worker.target import verify
from paceline.worker.target.tree_walk import Walk
from tests.colocated_models import ColocatedModels, make_colocated_models

SMALL = "--dtype float32 --threads-per-rank 1 --num-prompts 2 --max-tokens 20 --num-samples 150"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ColocatedModels:
    return make_colocated_models(tmp_path_factory.mktemp("colocated"))


def run(models: ColocatedModels, flags: str) -> int:
    words = f"{SMALL} {flags.format(**models.drafts)}".split()
    return cli.run(["verify-lossless", str(models.target), *words])


@pytest.mark.parametrize(
    "flags",
    [
        "--draft {eagle3}",
        "--draft {eagle} --spec-overlap on --max-num-seqs 5",
        "--draft {eagle3} --speculative-topk 2 --speculative-num-steps 3 --page-size 1",
        "--draft {standalone} --draft-placement colocated",
        "--draft {standalone}",
        "--draft ngram",
        "--draft {eagle3} --deterministic",
        "--draft {eagle3} --spec-rule rejection --speculative-topk 2",
        "--draft {eagle3} --spec-adaptive",
    ],
)
def test_a_draft_that_changes_nothing_is_found_lossless(
    flags: str, models: ColocatedModels, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(models, flags) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("LOSSLESS: ")
    assert "2 distributions are the model's" in out


@pytest.mark.parametrize(
    ("flags", "verdict"),
    [
        ("--simulated-accept-length 2", "answers have other tokens than plain decoding"),
        (
            "--spec-rule rejection --spec-threshold-acc 0.2 --speculative-topk 2",
            "distributions are not the model's",
        ),
        (
            "--spec-rule rejection --spec-threshold-single 0.05",
            "distributions are not the model's",
        ),
    ],
)
def test_an_option_that_trades_the_answer_for_speed_is_found_out(
    flags: str, verdict: str, models: ColocatedModels, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(models, f"--draft {{eagle3}} {flags}") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("NOT LOSSLESS: ")
    assert verdict in last


def test_a_verifier_that_errs_now_and_then_is_found_out(
    models: ColocatedModels,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_walked = 0

    def err_at_times(*args: Any, **kwargs: Any) -> list[Walk]:
        nonlocal num_walked
        walks = verify_trees(*args, **kwargs)
        for i, tree in enumerate(args[0]):
            num_walked += not tree.is_root
            if not tree.is_root and num_walked % 10 == 0:
                wrong = (walks[i].new_ids[-1] + 1) % 200
                walks[i] = replace(walks[i], new_ids=(*walks[i].new_ids[:-1], wrong))
        return walks

    verify_trees = verify.walk_trees
    monkeypatch.setattr(verify, "walk_trees", err_at_times)
    assert run(models, "--draft {eagle3} --num-samples 0") == 1
    out = capsys.readouterr().out
    assert "error: greedy, one at a time, prompt 1" in out
    assert out.splitlines()[-1].startswith("NOT LOSSLESS: ")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--draft none", "there is no draft, so nothing to verify"),
        ("", "no draft ships for model"),
        ("--draft {eagle3} --max-tokens 500", "lower --max-tokens"),
        ("--draft {eagle3} --num-samples 3", "--num-samples is 3"),
        ("--draft /none", "is neither built in nor a directory"),
        ("--draft {eagle3} --spec-threshold-acc 0.5", "rule 'coupled' knows no threshold"),
    ],
)
def test_what_cannot_be_verified_is_refused(
    flags: str, words: str, models: ColocatedModels, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(models, flags) == cli.EXIT_REFUSED
    assert words in capsys.readouterr().err


def test_the_built_in_prompts_suit_a_model_without_a_chat_template(tiny_model: Path) -> None:
    from paceline.cluster.lossless.prompts import MAX_PROMPTS, load_prompts

    prompts = load_prompts(tiny_model, MAX_PROMPTS)
    assert len({tuple(ids) for ids in prompts}) == MAX_PROMPTS
    assert all(prompts)
