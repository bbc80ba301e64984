"""The size of a KV pool: what was asked for, what fits, and what every rank can hold."""

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from paceline.kernels.registry import load_kernels
from paceline.worker.cache.kv_buffer import KvBuffer, KvShape, choose_num_pages, free_cpu_bytes
from paceline.worker.cache.req_to_token import row_width
from paceline.worker.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpecConfig,
    WorkerConfig,
)
from paceline.worker.errors import ConfigError
from paceline.worker.parallel.local import LocalCollective

MODEL = ModelConfig(
    path="", architecture="LlamaForCausalLM", vocab_size=8, hidden_size=8, intermediate_size=8,
    num_layers=2, num_heads=2, num_kv_heads=2, head_dim=4, max_model_len=100, rms_norm_eps=1e-5,
    rope_theta=1e4,
)  # fmt: skip
SHAPE = KvShape(num_layers=2, num_kv_heads=2, head_dim=4, dtype=torch.float32)
CONFIG = WorkerConfig(MODEL, CacheConfig(page_size=16), SchedulerConfig(max_num_seqs=4))


class LeastOf(LocalCollective):
    """A group whose other ranks can hold `least` pages."""

    def __init__(self, least: int) -> None:
        self._least = least

    def all_reduce_min(self, value: int) -> int:
        return min(value, self._least)


def test_a_token_takes_k_and_v_of_every_layer() -> None:
    assert SHAPE.token_bytes == 2 * 2 * 2 * 4 * 4


def test_pages_that_were_asked_for_are_given() -> None:
    config = replace(CONFIG, cache=CacheConfig(page_size=16, num_pages=7))
    assert choose_num_pages(config, SHAPE, LocalCollective()) == 7


def test_the_pool_is_never_larger_than_all_reqs_need() -> None:
    # 4 reqs of 7 pages, and a page or two each for draft nodes behind them.
    assert 4 * 7 <= choose_num_pages(CONFIG, SHAPE, LocalCollective()) <= 4 * 9


def test_a_limit_in_bytes_holds_with_page_0_inside_it() -> None:
    max_bytes = 10 * 16 * SHAPE.token_bytes
    config = replace(CONFIG, cache=CacheConfig(page_size=16, max_bytes=max_bytes))
    assert choose_num_pages(config, SHAPE, LocalCollective()) == 9


def test_a_cpu_group_takes_a_gib_at_most_by_default() -> None:
    huge = replace(CONFIG, scheduler=SchedulerConfig(max_num_seqs=1 << 30))
    for tp_size in (1, 2):
        config = replace(huge, parallel=ParallelConfig(tp_size=tp_size))
        num_pages = choose_num_pages(config, SHAPE, LocalCollective())
        assert (num_pages + 1) * 16 * SHAPE.token_bytes * tp_size <= 1 << 30


def test_every_rank_gets_what_the_poorest_can_hold() -> None:
    assert choose_num_pages(CONFIG, SHAPE, LeastOf(8)) == 8


def test_a_pool_too_small_for_one_request_says_the_numbers_and_the_way_out() -> None:
    config = replace(CONFIG, cache=CacheConfig(page_size=16, num_pages=6))
    with pytest.raises(ConfigError, match=r"holds 6 pages.*100 tokens needs 7.*max_model_len"):
        choose_num_pages(config, SHAPE, LocalCollective())


def test_a_page_of_no_tokens_is_refused() -> None:
    config = replace(CONFIG, cache=CacheConfig(page_size=0))
    with pytest.raises(ConfigError, match="page_size is 0"):
        choose_num_pages(config, SHAPE, LocalCollective())


def test_a_control_groups_limit_counts_as_free_memory(tmp_path: Path) -> None:
    machine = free_cpu_bytes(tmp_path)
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_cpu_bytes(tmp_path) > 1_000_000
    (tmp_path / "memory.max").write_text("1000000\n")
    assert free_cpu_bytes(tmp_path) == 300_000
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 200000\n")
    assert free_cpu_bytes(tmp_path) == 500_000
    assert machine > 1_000_000


def test_rows_have_room_for_a_tree_behind_the_longest_req() -> None:
    for page_size in (1, 16):
        spec = SpecConfig(num_draft_tokens=40, topk=8, num_steps=10)
        config = replace(CONFIG, cache=CacheConfig(page_size=page_size), spec=spec)
        assert row_width(config) >= 100 + 8 * 10 + 40
        assert row_width(config) % page_size == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_takes_memory_only_where_it_is_written(dtype: torch.dtype) -> None:
    shape = replace(SHAPE, num_kv_heads=64, head_dim=64, dtype=dtype)
    num_pages = (1 << 30) // (shape.token_bytes * 16)
    before = psutil.Process().memory_info().rss
    kv = KvBuffer(shape, num_pages, 16, "cpu")
    kv.k[0][:16] = 1.0
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert kv.v[1].shape == ((num_pages + 1) * 16, 64, 64)
    assert kv.v[1].dtype == dtype
    assert not kv.v[1][::4096].any()


def test_moves_read_all_sources_before_they_write() -> None:
    kv = KvBuffer(SHAPE, num_pages=3, page_size=2, device="cpu")
    for cache in (*kv.k, *kv.v):
        cache.copy_(torch.arange(8.0).view(8, 1, 1).expand_as(cache))
    kv.move(load_kernels("reference", "cpu"), torch.tensor([3, 2]), torch.tensor([2, 4]))
    for cache in (*kv.k, *kv.v):
        assert cache[:, 0, 0].tolist() == [0, 1, 3, 3, 2, 5, 6, 7]
