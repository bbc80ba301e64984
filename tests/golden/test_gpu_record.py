"""The comparison behind `make golden-gpu` finds what differs, and nothing where nothing does."""

from dataclasses import replace

import torch
from torch import Tensor

from paceline.kernels.api import BuiltTrees, TreeLinks, VerifyResult
from paceline.kernels.reference.kernel_set import ReferenceKernels
from tests.golden.gpu_record import Check, Judge, compare_random_trees, compare_vectors

OPS = {
    "build_tree",
    "reconstruct_indices_from_tree_mask",
    "verify_tree_greedy",
    "tree_speculative_sampling_target_only",
    "top_k_renorm",
    "top_p_renorm",
    "segment_packbits",
}


class Faulty(ReferenceKernels):
    """Errs in one cell of each tree batch, and in walks that accept three tokens."""

    @staticmethod
    def build_tree(*args: object, **kwargs: object) -> BuiltTrees:  # type: ignore[override]
        built = ReferenceKernels.build_tree(*args, **kwargs)  # type: ignore[arg-type]
        return replace(built, tree_mask=built.tree_mask.long().index_fill_(0, torch.tensor(0), 0))

    @staticmethod
    def verify_tree_greedy(
        draft_ids: Tensor, links: TreeLinks, target_ids: Tensor, max_depth: int
    ) -> VerifyResult:
        result = ReferenceKernels.verify_tree_greedy(draft_ids, links, target_ids, max_depth)
        is_long = result.accept_length == 3
        return replace(result, accept_length=result.accept_length - is_long.long())


def checks_of(kernels: ReferenceKernels, num_trees: int) -> dict[str, Check]:
    judge = Judge({kernels.name: kernels}, "cpu")
    compare_vectors(judge)
    compare_random_trees(judge, num_trees, 0)
    return {check.op: check for check in judge.checks}


def test_the_reference_equals_itself_in_every_op() -> None:
    checks = checks_of(ReferenceKernels(), 300)
    assert set(checks) == OPS
    assert [check for check in checks.values() if check.mismatches] == []
    assert checks["verify_tree_greedy"].compared == 300 + 7
    assert checks["tree_speculative_sampling_target_only"].compared == 300 + 10
    assert checks["build_tree"].compared >= 2 * 300


def test_planted_faults_are_counted_and_shown() -> None:
    checks = checks_of(Faulty(), 300)
    trees, walks = checks["build_tree"], checks["verify_tree_greedy"]
    assert 2 <= trees.mismatches < trees.compared / 2
    assert 10 < walks.mismatches < walks.compared
    assert "expected, found" in walks.first_mismatch
    assert checks["tree_speculative_sampling_target_only"].mismatches == 0
