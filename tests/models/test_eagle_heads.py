"""EAGLE heads compute their published formulas, written out here in plain torch."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from paceline.worker.config import ParallelConfig
from paceline.worker.parallel.rendezvous import reserve_rendezvous
from paceline.worker.spec.spec_info import CaptureHiddenMode
from paceline.worker.step import Phase
from paceline.worker.target.build import build_executor
from paceline.worker.target.executor import Executor
from tests.eagle_rig import (
    FULL,
    LAST,
    assert_close,
    build_head_runner,
    build_target,
    new_row,
    run,
    target_config,
)
from tests.tiny import VOCAB_SIZE, make_tiny_model
from tests.tiny_heads import (
    LAYOUTS,
    HeadSizes,
    Layout,
    TinyHead,
    make_eagle3_head,
    make_eagle_head,
)

IDS = [5, 9, 33, 77, 2, 4, 100, 200, 7, 7, 31, 64, 255, 1, 0, 263, 18, 90, 12, 13]
HOT_TOKENS = tuple(range(3, VOCAB_SIZE, 2))
TAPS = [0, 1, 3]  # of 3 layers: the embedding, a state between, the state behind the last
EXTRA = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in TAPS]}}


# --- the formulas -----------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def attend(head: TinyHead, prefix: str, x: Tensor, positions: Tensor) -> Tensor:
    """Causal attention over a whole sequence; x [T, width]."""
    dim = head.config["head_dim"]

    def project(name: str) -> Tensor:
        y = x @ head.tensors[f"{prefix}.self_attn.{name}.weight"].T
        return y.view(len(x), -1, dim).transpose(0, 1)  # [heads, T, dim]

    angles = positions[:, None] / 10000.0 ** (torch.arange(0, dim, 2) / dim)
    cos, sin = (torch.cat([f(angles), f(angles)], -1) for f in (torch.cos, torch.sin))

    def rotate(y: Tensor) -> Tensor:
        half = torch.cat([-y[..., dim // 2 :], y[..., : dim // 2]], -1)
        return y * cos + half * sin

    q, k, v = rotate(project("q_proj")), rotate(project("k_proj")), project("v_proj")
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) / dim**0.5
    scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1)
    return out @ head.tensors[f"{prefix}.self_attn.o_proj.weight"].T


def feed_forward(head: TinyHead, prefix: str, x: Tensor) -> Tensor:
    gate, up, down = (
        head.tensors[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
    )
    return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def eagle3(head: TinyHead, embed: Tensor, hidden: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
    """(logits, features to feed in again) of one sequence from position 0."""
    w = head.tensors
    h = hidden
    if h.shape[-1] != embed.shape[-1]:
        if head.config.get("norm_before_fc"):
            h = rms_norm(h, w["input_norm.weight"])
        h = h @ w["fc.weight"].T + w.get("fc.bias", torch.zeros(()))
    normed = rms_norm(h, w["layers.0.hidden_norm.weight"])
    residual = normed if head.config.get("norm_before_residual") else h
    x = torch.cat([rms_norm(embed, w["layers.0.input_layernorm.weight"]), normed], -1)
    residual = residual + attend(head, "layers.0", x, torch.arange(len(x)))
    x = rms_norm(residual, w["layers.0.post_attention_layernorm.weight"])
    features = residual + feed_forward(head, "layers.0", x)
    return rms_norm(features, w["norm.weight"]) @ lm_head.T, features


def eagle1(head: TinyHead, embed: Tensor, hidden: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
    w = head.tensors
    x = torch.cat([embed, hidden], -1) @ w["fc.weight"].T + w.get("fc.bias", torch.zeros(()))
    for i in range(head.config["num_hidden_layers"]):
        prefix = f"layers.{i}"
        normed = x if i == 0 else rms_norm(x, w[f"{prefix}.input_layernorm.weight"])
        x = x + attend(head, prefix, normed, torch.arange(len(x)))
        x = x + feed_forward(
            head, prefix, rms_norm(x, w[f"{prefix}.post_attention_layernorm.weight"])
        )
    return x @ lm_head.T, x


# --- one rank ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("untied") / "target", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def target(untied: Path) -> Executor:
    return build_target(untied)


@pytest.fixture(scope="module")
def weights(untied: Path) -> dict[str, Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float32).state_dict())


def check_formula(
    target: Executor,
    head: TinyHead,
    formula: Callable[[TinyHead, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    embedding: Tensor,
    lm_head: Tensor,
    token_map: str = "",
) -> None:
    """From the target's features in two parts, then from the head's own, as chains are drafted."""
    drafts = build_head_runner(target, head.path, token_map)
    features = run(target._runner, drafts.config.capture(FULL), new_row().step(IDS)).hidden
    assert features is not None
    features = features.clone()
    kept = features.clone()
    shifted = IDS[1:]
    want, want_hidden = formula(head, embedding[shifted], features[:-1], lm_head)
    row = new_row()
    first = drafts.forward(features[:7], row.step(shifted[:7]), mode=FULL)
    second = drafts.forward(features[7:-1], row.step(shifted[7:], num_logits=1), mode=LAST)
    assert_close(first.logits, want[:7])
    assert_close(first.hidden, want_hidden[:7])
    assert_close(second.logits, want[-1:])
    assert_close(second.hidden, want_hidden[-1:])
    assert torch.equal(features, kept), "the head wrote into what it was handed"
    # A token drafted behind: its feature is the head's own, at the next position.
    assert second.hidden is not None
    hidden = second.hidden.clone()
    third = drafts.forward(hidden, row.step([44], Phase.DECODE))
    assert torch.equal(hidden, second.hidden), "the head wrote into its own features"
    mixed = features[:-1]
    if "fc.weight" in head.tensors and formula is eagle3:  # the formula takes one width
        if head.config.get("norm_before_fc"):
            mixed = rms_norm(mixed, head.tensors["input_norm.weight"])
        mixed = mixed @ head.tensors["fc.weight"].T + head.tensors.get("fc.bias", torch.zeros(()))
    sequence = torch.cat([mixed, hidden])
    want, want_hidden = formula(head, embedding[[*shifted, 44]], sequence, lm_head)
    assert_close(third.logits, want[-1:])
    assert_close(third.hidden, want_hidden[-1:])
    null = drafts.forward(hidden, row.step([44], Phase.DECODE), mode=CaptureHiddenMode.NULL)
    assert null.hidden is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_eagle3_head_computes_its_formula_in_every_layout(
    tmp_path: Path, target: Executor, weights: dict[str, Tensor], layout: Layout
) -> None:
    head = make_eagle3_head(tmp_path, HeadSizes(extra=EXTRA), hot_tokens=HOT_TOKENS, layout=layout)
    embedding = weights["model.embed_tokens.weight"]
    check_formula(target, head, eagle3, embedding, head.tensors["lm_head.weight"])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"fc_bias": True}, id="fc with bias"),
        pytest.param({"norm_before_fc": True}, id="a norm before fc"),
        pytest.param({"norm_before_residual": True}, id="a normed residual"),
    ],
)
def test_an_eagle3_head_has_what_its_config_and_checkpoint_say(
    tmp_path: Path, target: Executor, weights: dict[str, Tensor], options: dict[str, Any]
) -> None:
    # Any: fields of config.json
    fc_bias = options.pop("fc_bias", False)
    head = make_eagle3_head(tmp_path, HeadSizes(extra=EXTRA | options), fc_bias=fc_bias)
    embedding = weights["model.embed_tokens.weight"]
    check_formula(target, head, eagle3, embedding, head.tensors["lm_head.weight"])


def test_an_eagle3_head_without_lm_head_uses_its_targets(
    tmp_path: Path, target: Executor, weights: dict[str, Tensor]
) -> None:
    head = make_eagle3_head(tmp_path, HeadSizes(extra=EXTRA), own_head=False)
    check_formula(
        target, head, eagle3, weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    )


def test_an_eagle3_head_as_wide_as_its_features_has_no_fc(
    tmp_path: Path, target: Executor, weights: dict[str, Tensor]
) -> None:
    extra = {"eagle_config": {"use_aux_hidden_state": False}}
    head = make_eagle3_head(tmp_path, HeadSizes(extra=extra), num_taps=0)
    embedding = weights["model.embed_tokens.weight"]
    check_formula(target, head, eagle3, embedding, head.tensors["lm_head.weight"])


@pytest.mark.parametrize("tied", [False, True], ids=["own lm_head", "tied"])
def test_an_eagle3_head_narrower_than_its_target_has_its_own_embedding(
    tmp_path: Path, target: Executor, tied: bool
) -> None:
    sizes = HeadSizes(
        hidden_size=32, num_heads=4, num_kv_heads=2, extra=EXTRA | {"tie_word_embeddings": tied}
    )
    sizes.extra["target_hidden_size"] = 72
    head = make_eagle3_head(tmp_path, sizes, own_embedding=True, own_head=not tied)
    embedding = head.tensors["embed_tokens.weight"]
    lm_head = embedding if tied else head.tensors["lm_head.weight"]
    check_formula(target, head, eagle3, embedding, lm_head)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_eagle_head_computes_its_formula_in_every_layout(
    tmp_path: Path, target: Executor, weights: dict[str, Tensor], layout: Layout
) -> None:
    head = make_eagle_head(tmp_path, HeadSizes(num_layers=2), layout=layout)
    check_formula(
        target, head, eagle1, weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    )


def test_an_eagle_head_without_bias_adds_none(
    tmp_path: Path, target: Executor, weights: dict[str, Tensor]
) -> None:
    head = make_eagle_head(tmp_path, fc_bias=False)
    check_formula(
        target, head, eagle1, weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    )


def test_a_token_map_leaves_an_eagle_head_the_rows_of_its_tokens(
    tmp_path: Path, target: Executor, weights: dict[str, Tensor]
) -> None:
    head = make_eagle_head(tmp_path / "head")
    token_map = tmp_path / "hot.json"
    token_map.write_text(str([200, 3, 70, 71]))
    drafts = build_head_runner(target, head.path, str(token_map))
    assert drafts.head.vocab_size == 4
    assert drafts.head.hot_token_id is not None
    hot = drafts.head.hot_token_id.tolist()
    assert hot == [3, 70, 71, 200]
    embedding, lm_head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    check_formula(target, head, eagle1, embedding, lm_head[hot], str(token_map))


def test_an_eagle3_head_knows_its_hot_tokens_and_takes_no_others(
    tmp_path: Path, target: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    head = make_eagle3_head(tmp_path, HeadSizes(extra=EXTRA), hot_tokens=HOT_TOKENS)
    drafts = build_head_runner(target, head.path, token_map="elsewhere.json")
    assert drafts.head.hot_token_id is not None
    assert tuple(drafts.head.hot_token_id.tolist()) == HOT_TOKENS
    assert drafts.head.vocab_size == len(HOT_TOKENS)
    assert "ignored token map" in caplog.text


# --- several ranks ----------------------------------------------------------------------------


def on_ranks(path: Path, tp_size: int, act: Callable[[Executor], list[Tensor | None]]) -> Any:
    """What rank 0 got where every rank, a thread each, does the same."""
    listener, rendezvous = reserve_rendezvous("127.0.0.1")
    config = target_config(path)

    def rank(tp_rank: int) -> list[Tensor | None]:
        parallel = ParallelConfig(tp_size, tp_rank, "gloo", rendezvous, timeout_s=30.0)
        executor = build_executor(
            replace(config, parallel=parallel), listener=listener if tp_rank == 0 else None
        )
        try:
            return act(executor)
        finally:
            executor._collective.shutdown()

    with ThreadPoolExecutor(tp_size) as pool:
        return list(pool.map(rank, range(tp_size)))


@pytest.mark.parametrize("kind", ["eagle", "eagle with a token map", "eagle3"])
@pytest.mark.parametrize("tp_size", [2, 4])
def test_a_head_on_several_ranks_computes_what_it_does_on_one(
    tmp_path: Path, untied: Path, target: Executor, kind: str, tp_size: int
) -> None:
    token_map = ""
    if kind == "eagle3":
        head = make_eagle3_head(
            tmp_path, HeadSizes(extra=EXTRA, intermediate_size=97), hot_tokens=HOT_TOKENS
        )
    else:
        head = make_eagle_head(tmp_path, HeadSizes(num_layers=2, intermediate_size=97))
        if "map" in kind:
            token_map = str(tmp_path / "hot.json")
            Path(token_map).write_text(str(list(HOT_TOKENS)))

    def act(executor: Executor) -> list[Tensor | None]:
        drafts = build_head_runner(executor, head.path, token_map)
        features = run(executor._runner, drafts.config.capture(FULL), new_row().step(IDS)).hidden
        assert features is not None
        row = new_row()
        first = drafts.forward(features[:-1], row.step(IDS[1:], num_logits=2), mode=FULL)
        assert first.hidden is not None
        second = drafts.forward(first.hidden[-1:], row.step([44], Phase.DECODE))
        return [features, first.hidden, second.hidden, first.logits, second.logits]

    want = act(target)
    ranks = on_ranks(untied, tp_size, act)
    for got, wanted in zip(ranks[0], want, strict=True):
        assert wanted is not None
        assert_close(got, wanted, 1e-4)
    for other in ranks[1:]:
        assert other[3:] == [None, None]
        for got, leaders in zip(other[:3], ranks[0][:3], strict=True):
            assert torch.equal(got, leaders), "ranks would draft from different features"
