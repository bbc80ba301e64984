"""Growth of draft trees: which tokens to expand next, and which of all candidates make the tree.

A candidate's score is the product of the probabilities down its path. Candidates of a req are
numbered (its `gid`): the `topk` children of the root first, then `topk * topk` for each further
step, lane by lane, children of one lane in descending order. It knows no model: probabilities
come as arguments (`top_children` of a sampler). Selecting is the same on the host and on a device;
the candidates that make a tree are chosen as a `DraftTree` on the host (`organise`), and without a
sync as tensors for `KernelSet.build_tree` (`organise_tensors`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.worker.spec.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Candidates:
    """What one step adds to the choice; n is topk at step 0 and topk^2 later.

    scores [bs, n] fp32, token_ids [bs, n] int64; lane_gids [bs, topk] int64: the candidate that
    each lane of the next step stands on.
    """

    scores: Tensor
    token_ids: Tensor
    lane_gids: Tensor


@dataclass(frozen=True, slots=True)
class Selection:
    """The lanes to expand next, best first; all [bs, topk].

    input_ids int64; scores fp32, -inf for a lane that stands on nothing; parent_lanes int64, the
    lane of the step before that each continues, 0 at step 0 where all continue the root.
    """

    input_ids: Tensor
    scores: Tensor
    parent_lanes: Tensor
    candidates: Candidates


def select_top_k_tokens(
    step: int, topk_p: Tensor, topk_index: Tensor, scores: Tensor | None, topk: int
) -> Selection:
    """The `topk` best candidates of a step, ties to the lowest gid; NaN counts as -inf.

    Args:
        step: 0 for the children of the root.
        topk_p, topk_index: children of each lane in descending order of probability: [bs, topk]
            at step 0, [bs * topk, topk] later. -inf marks a child that there is not.
        scores: [bs, topk], the selection's of the step before; None at step 0.
    Source: beam growth of EAGLE-2, arXiv 2406.16858.
    """
    # Rounded up to more than 1, a child would score above its parent.
    topk_p = _no_nan(topk_p).clamp_(max=1.0)
    if scores is None:
        gids = torch.arange(topk, device=topk_p.device).expand_as(topk_index)
        candidates = Candidates(topk_p, topk_index, gids)
        return Selection(topk_index, topk_p, torch.zeros_like(gids), candidates)
    # A missing lane of score -inf has missing children, whatever they claim: -inf * 0 is NaN.
    products = _no_nan(scores.unsqueeze(-1) * topk_p.view(-1, topk, topk))
    products = products.masked_fill(scores.unsqueeze(-1) == -torch.inf, -torch.inf)
    expanded = products.flatten(1)  # [bs, topk * topk]
    token_ids = topk_index.view(-1, topk * topk)
    ordered, order = _best_first(expanded)
    chosen = order[:, :topk]
    first_gid = topk + (step - 1) * topk * topk
    candidates = Candidates(expanded, token_ids, chosen + first_gid)
    return Selection(token_ids.gather(1, chosen), ordered[:, :topk], chosen // topk, candidates)


@dataclass(frozen=True, slots=True)
class Organised:
    """The chosen candidates of one req.

    parents: the gid under each lane of all steps but the last, -1 for the root, in the order of
    "table indices": candidate g stands on parents[g // topk]. selected: ascending gids.
    draft_ids: their tokens.
    """

    parents: tuple[int, ...]
    selected: tuple[int, ...]
    draft_ids: tuple[int, ...]

    def tree(self, topk: int) -> DraftTree:
        node_of = {-1: 0} | {gid: i + 1 for i, gid in enumerate(self.selected)}
        parents = (
            node_of[self.parents[gid // topk] if gid >= topk else -1] for gid in self.selected
        )
        return DraftTree(self.draft_ids, tuple(parents))


def organise(steps: Sequence[Candidates], num_draft_tokens: Sequence[int]) -> list[Organised]:
    """The best `num_draft_tokens[b] - 1` candidates of each req, ties to the lowest gid.

    A child never scores above its parent and has the greater gid, so a chosen child's parent is
    chosen as well. Candidates of score -inf are never chosen, so a req may end with fewer.
    """
    scores, order = _best_first(torch.cat([step.scores for step in steps], 1))
    token_ids = torch.cat([step.token_ids for step in steps], 1).tolist()
    num_real = (scores > -torch.inf).sum(1).tolist()
    lane_gids = [step.lane_gids.tolist() for step in steps[:-1]]
    organised = []
    for b, ranked in enumerate(order.tolist()):
        num_wanted = max(num_draft_tokens[b] - 1, 0)
        selected = sorted(ranked[: min(num_wanted, num_real[b])])
        parents = (-1, *(gid for gids in lane_gids for gid in gids[b]))
        draft_ids = tuple(token_ids[b][gid] for gid in selected)
        organised.append(Organised(parents, tuple(selected), draft_ids))
    return organised


@dataclass(frozen=True, slots=True)
class OrganisedTensors:
    """The chosen candidates of a batch, as `KernelSet.build_tree` takes them; all int64.

    parents [bs, 1 + topk * (num_steps - 1)]; selected, draft_ids [bs, num_draft_tokens - 1];
    num_real [bs]: how many of those are candidates. The rest fill up: id 0, linked nowhere.
    """

    parents: Tensor
    selected: Tensor
    draft_ids: Tensor
    num_real: Tensor


def organise_tensors(steps: Sequence[Candidates], num_draft_tokens: int) -> OrganisedTensors:
    """As `organise`, for trees of one size on any device; no sync.

    `num_draft_tokens - 1` is at most the number of candidates.
    """
    scores, order = _best_first(torch.cat([step.scores for step in steps], 1))
    token_ids = torch.cat([step.token_ids for step in steps], 1)
    num_nodes, num_candidates = num_draft_tokens - 1, order.shape[1]
    assert num_nodes <= num_candidates, (num_nodes, num_candidates)
    is_real = scores[:, :num_nodes] > -torch.inf
    # A gid behind all candidates' has no parent, and stands last in ascending order.
    ranks = torch.arange(num_nodes, device=order.device)
    filled = torch.where(is_real, order[:, :num_nodes], num_candidates + ranks)
    selected = filled.sort(-1).values
    chosen = token_ids.gather(1, selected.clamp(max=num_candidates - 1))
    roots = order.new_full((len(order), 1), -1)
    return OrganisedTensors(
        torch.cat([roots, *(step.lane_gids for step in steps[:-1])], 1),
        selected,
        chosen.masked_fill(selected >= num_candidates, 0),
        is_real.sum(1),
    )


def build_trees(
    steps: Sequence[Candidates], num_draft_tokens: Sequence[int], topk: int
) -> list[DraftTree]:
    """The tree of each req, of at most `num_draft_tokens[b]` nodes with its root."""
    return [organised.tree(topk) for organised in organise(steps, num_draft_tokens)]


def _best_first(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Each row, without NaN, sorted by (score descending, index ascending): (scores, indices).

    Not topk: it breaks ties as it likes, and would choose a child whose parent, of equal score,
    it left out.
    """
    ordered = scores.sort(dim=-1, descending=True, stable=True)
    return ordered.values, ordered.indices


def _no_nan(scores: Tensor) -> Tensor:
    return scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
