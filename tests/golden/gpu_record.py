"""Tree kernels on a GPU, sgl-kernel's own among them, against our reference: equality, recorded.

Run by `make golden-gpu`; ends with status 1 where anything differs. Distributions are counts of
4096ths and coins are multiples of 2^-13 and 2^-11: every sum and product is exact in fp32, in any
order, so that equality is required of walks by chance too, also where a coin meets a sum.
"""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.api import BuiltTrees, TreeMaskMode
from paceline.kernels.registry import load_kernels
from paceline.worker.spec.selection import Candidates, organise, select_top_k_tokens

HERE = Path(__file__).parent
VECTORS = json.loads((HERE / "tree_kernels.json").read_text())
BATCH = 250
VOCAB_SIZES = (64, 300, 1000)
UNITS = 4096  # that a distribution is counted in
THRESHOLDS = ((1.0, 1.0), (0.25, 1.0), (1.0, 0.5), (0.5, 0.25), (0.0, 1.0))
MAX_NODES = 60
MAX_PACKED = 32


@dataclass
class Check:
    """How often an op was compared with the reference, tree by tree, and how often it differed."""

    kernels: str
    op: str
    compared: int = 0
    mismatches: int = 0
    first_mismatch: str = ""


@dataclass(frozen=True)
class Batch:
    """Trees of one shape as drafting leaves them; everything on the CPU."""

    topk: int
    num_steps: int
    verified_id: Tensor
    parents: Tensor  # candidates under candidates
    selected: Tensor
    draft_ids: Tensor  # without roots
    node_parents: Tensor  # [bs, n], -1 for roots
    seq_lens: Tensor


class Judge:
    """Runs an op of each subject on the device and of the reference on the CPU."""

    def __init__(self, subjects: dict[str, Any], device: str) -> None:
        self.reference = load_kernels("reference", "cpu")
        self.subjects = subjects
        self.device = device
        self._checks: dict[tuple[str, str], Check] = {}

    def compare(self, op: str, bs: int, *args: Any, full_lens: Sequence[int] = ()) -> Any:
        """The reference's answer; full_lens are the trees' shares of a FULL_MASK."""
        expected = getattr(self.reference, op)(*args)
        wanted = [_rows(tensor, bs, full_lens) for tensor in _tensors(expected)]
        for name, subject in self.subjects.items():
            ours = getattr(subject, op)(*(_to(arg, self.device) for arg in args))
            found = [_rows(tensor, bs, full_lens) for tensor in _tensors(ours)]
            scalars = [arg for arg in args if isinstance(arg, int | float)]
            for b in range(bs):
                pairs = [(x[b], y[b]) for x, y in zip(wanted, found, strict=True)]
                if all(torch.equal(x, y) for x, y in pairs):
                    self.count(name, op)
                    continue
                shown = [(x.tolist(), y.tolist()) for x, y in pairs]
                self.count(name, op, f"tree {b}, {scalars}: (expected, found) {shown}")
        return expected

    def count(self, name: str, op: str, difference: str = "") -> None:
        check = self._checks.setdefault((name, op), Check(name, op))
        check.compared += 1
        check.mismatches += bool(difference)
        check.first_mismatch = check.first_mismatch or difference[:2000]

    @property
    def checks(self) -> list[Check]:
        return list(self._checks.values())


def compare_vectors(judge: Judge) -> None:
    """The trees, walks and cuts worked by hand; tests/kernels holds the reference to them."""
    for vector in VECTORS["build_tree"]:
        names = ("verified_id", "parents", "selected", "draft_ids", "seq_lens")
        given = [torch.tensor(vector[name], dtype=torch.int64) for name in names]
        _compare_trees(judge, *given, vector["topk"])
    for tree in VECTORS["greedy"]:
        links = judge.reference.build_tree_links(torch.tensor([tree["parents"]]))
        ids = torch.tensor([tree["draft_ids"]])
        for walk in tree["walks"]:
            targets = torch.tensor([[walk["targets"].get(str(i), -1) for i in range(ids.numel())]])
            judge.compare("verify_tree_greedy", 1, ids, links, targets, tree["max_depth"])
    tree = VECTORS["sampling"]
    links = judge.reference.build_tree_links(torch.tensor([tree["parents"]]))
    for walk in tree["walks"]:
        judge.compare(
            "tree_speculative_sampling_target_only",
            1,
            torch.tensor([tree["draft_ids"]]),
            links,
            torch.tensor([tree["target_probs"]]),
            torch.tensor([[*walk["coins"], 0.0, 0.0]]),
            torch.tensor([walk["final"]]),
            tree["max_depth"],
            *walk["thresholds"],
        )
    probs = torch.tensor(VECTORS["renorm"]["probs"], device=judge.device)
    for cut in VECTORS["renorm"]["cuts"]:
        kind, limit = next(iter(cut.items()))
        limits = torch.tensor([limit] * len(probs), device=judge.device)
        for name, subject in judge.subjects.items():
            ours = getattr(subject, f"{kind}_renorm")(probs, limits).cpu()
            is_equal = bool(((ours - torch.tensor(cut["expected"])).abs() < 1e-6).all())
            judge.count(name, f"{kind}_renorm", "" if is_equal else f"{cut}: {ours.tolist()}")
    given = VECTORS["packbits"]
    for name, subject in judge.subjects.items():
        x = torch.tensor(given["x"], dtype=torch.bool, device=judge.device)
        starts, ends = (
            torch.tensor(given[key], dtype=torch.int32, device=judge.device)
            for key in ("input_indptr", "output_indptr")
        )
        y = torch.zeros(len(given["y"]), dtype=torch.uint8, device=judge.device)
        subject.segment_packbits(x, starts, ends, y)
        judge.count(name, "segment_packbits", "" if y.tolist() == given["y"] else f"{y.tolist()}")


def compare_random_trees(judge: Judge, num_trees: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for i, first in enumerate(range(0, num_trees, BATCH)):
        bs = min(BATCH, num_trees - first)
        vocab_size = VOCAB_SIZES[i % len(VOCAB_SIZES)]
        batch = random_batch(bs, vocab_size, generator)
        given = (batch.verified_id, batch.parents, batch.selected, batch.draft_ids, batch.seq_lens)
        built = _compare_trees(judge, *given, batch.topk)
        ids, links = built.draft_ids, built.links
        max_depth = max(batch.num_steps - i % 2, 1)
        targets = _targets(batch, ids, vocab_size, generator)
        judge.compare("verify_tree_greedy", bs, ids, links, targets, max_depth)
        judge.compare(
            "tree_speculative_sampling_target_only",
            bs,
            ids,
            links,
            _distributions(batch, ids, vocab_size, generator),
            torch.randint(0, 2**13, ids.shape, generator=generator) / 2**13,
            torch.randint(0, 2**11, (bs,), generator=generator) / 2**11,
            max_depth,
            *THRESHOLDS[i % len(THRESHOLDS)],
        )


def random_batch(bs: int, vocab_size: int, generator: torch.Generator) -> Batch:
    """bs trees grown as drafting grows them, some of their probabilities equal."""
    topk, num_steps = (int(torch.randint(1, 9, (), generator=generator)) for _ in range(2))
    num_candidates = topk + (num_steps - 1) * topk * topk
    limit = min(num_candidates + 1, MAX_NODES)
    n = int(torch.randint(2, limit + 1, (), generator=generator))
    scores: Tensor | None = None
    steps: list[Candidates] = []
    for step in range(num_steps):
        lanes = bs * (topk if step else 1)
        topk_p = (torch.rand(lanes, topk, generator=generator) * 64).ceil() / 64
        ids = torch.rand(lanes, vocab_size, generator=generator).topk(topk).indices
        topk_p = topk_p.sort(-1, descending=True).values
        selection = select_top_k_tokens(step, topk_p, ids, scores, topk)
        scores = selection.scores
        steps.append(selection.candidates)
    organised = organise(steps, [n] * bs)
    return Batch(
        topk,
        num_steps,
        torch.randint(0, vocab_size, (bs,), generator=generator),
        torch.tensor([tree.parents for tree in organised]),
        torch.tensor([tree.selected for tree in organised]),
        torch.tensor([tree.draft_ids for tree in organised]),
        torch.tensor([[-1, *tree.tree(topk).parents] for tree in organised]),
        torch.randint(0, 200, (bs,), generator=generator),
    )


def _compare_trees(judge: Judge, *given: Any) -> BuiltTrees:
    """In every mode that has room for the nodes, and back from the mask; the last answer."""
    _, _, selected, _, seq_lens, _ = given
    bs, n = len(selected), selected.shape[1] + 1
    modes = [TreeMaskMode.FULL_MASK, TreeMaskMode.QLEN_ONLY_BITPACKING, TreeMaskMode.QLEN_ONLY]
    if n > MAX_PACKED:
        modes.remove(TreeMaskMode.QLEN_ONLY_BITPACKING)
    for mode in modes:
        lens = [n * (seq_len + n) for seq_len in seq_lens.tolist()]
        built: BuiltTrees = judge.compare("build_tree", bs, *given, mode, full_lens=lens)
    judge.compare("reconstruct_indices_from_tree_mask", bs, built.tree_mask, seq_lens, n)
    return built


def _targets(batch: Batch, ids: Tensor, vocab_size: int, generator: torch.Generator) -> Tensor:
    """The target's token at each node: most often that of one of its children."""
    bs, n = ids.shape
    targets = torch.randint(0, vocab_size, (bs, n + 1), generator=generator)
    agrees = torch.rand(bs, n - 1, generator=generator) < 0.8
    at = torch.where(agrees, batch.node_parents[:, 1:], n)
    for node in range(1, n):
        targets.scatter_(1, at[:, node - 1 : node], ids[:, node : node + 1])
    return targets[:, :n].contiguous()


def _distributions(
    batch: Batch, ids: Tensor, vocab_size: int, generator: torch.Generator
) -> Tensor:
    """[bs, n, V] fp32 in whole 4096ths, much of it on each node's children."""
    bs, n = ids.shape
    weights = torch.rand(bs, n, vocab_size, generator=generator) ** 8
    rows = torch.arange(bs)[:, None].expand(bs, n - 1)
    share = torch.rand(bs, n - 1, generator=generator) * vocab_size / 8
    weights.index_put_((rows, batch.node_parents[:, 1:], ids[:, 1:]), share, accumulate=True)
    counts = (weights / weights.sum(-1, keepdim=True) * UNITS).floor()
    largest = counts.argmax(-1, keepdim=True)
    counts.scatter_add_(-1, largest, UNITS - counts.sum(-1, keepdim=True))
    return counts / UNITS


def _to(arg: Any, device: str) -> Any:
    if isinstance(arg, Tensor):
        return arg.to(device)
    if is_dataclass(arg) and not isinstance(arg, type):
        return type(arg)(*(_to(getattr(arg, field.name), device) for field in fields(arg)))
    return arg


def _tensors(answer: Any) -> list[Tensor]:
    """All tensors of an answer, on the CPU; as int64, for unsigned ones compare nowhere else."""
    if isinstance(answer, Tensor):
        return [answer.cpu().long()]
    parts = answer
    if not isinstance(answer, tuple):
        parts = [getattr(answer, field.name) for field in fields(answer)]
    return [tensor for part in parts for tensor in _tensors(part)]


def _rows(tensor: Tensor, bs: int, full_lens: Sequence[int]) -> Sequence[Tensor]:
    """The part of each tree."""
    if full_lens and tensor.numel() == sum(full_lens):
        return tensor.split(list(full_lens))
    return tensor.reshape(bs, -1).unbind()


def _subjects() -> dict[str, Any]:
    """Our Triton kernels, and sgl-kernel's own behind our signatures."""
    from paceline.kernels.sgl import trees

    sgl = load_kernels("sgl", "cuda")
    foreign = SimpleNamespace(
        build_tree=trees.build_tree,
        reconstruct_indices_from_tree_mask=trees.reconstruct_indices_from_tree_mask,
        verify_tree_greedy=trees.verify_tree_greedy,
        tree_speculative_sampling_target_only=trees.tree_speculative_sampling_target_only,
        top_k_renorm=sgl.top_k_renorm,
        top_p_renorm=sgl.top_p_renorm,
        segment_packbits=trees.segment_packbits,
    )
    return {"triton": load_kernels("triton", "cuda"), "sgl-kernel": foreign}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for name in ("paceline", "torch", "triton", "sglang-kernel", "sgl-kernel", "flashinfer-python"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    # A copied package has no metadata; it knows its own version.
    import sgl_kernel

    versions["sgl_kernel"] = str(getattr(sgl_kernel, "__version__", "unknown"))
    return versions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-trees", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "gpu_record.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("no CUDA device is here; this compares kernels on one\n")
        return 2
    judge = Judge(_subjects(), "cuda")
    compare_vectors(judge)
    compare_random_trees(judge, options.num_trees, options.seed)
    record = {
        "provenance": "written by `make golden-gpu`: ops on the device against the torch reference",
        "device": torch.cuda.get_device_name(),
        "versions": _versions(),
        "random_trees": options.num_trees,
        "seed": options.seed,
        "checks": [asdict(check) for check in judge.checks],
    }
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    for check in judge.checks:
        sys.stdout.write(
            f"{check.kernels:<11} {check.op:<38} {check.compared:>6} compared, "
            f"{check.mismatches} mismatches\n"
        )
    return int(any(check.mismatches for check in judge.checks))


if __name__ == "__main__":
    sys.exit(main())
