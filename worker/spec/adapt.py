"""How deep to draft: the shape of trees that emits most tokens a second, from what steps showed.

Two things are learnt apart, since they change apart: how likely drafts of each depth are accepted,
over all steps, and what a step of each shape costs, per number of rows. Costs are kept as ratios to
the shape in use, each measured within moments of it, so that longer contexts or a busier machine,
which slow all shapes alike, change no decision. Drafting nothing is a shape like the others: where
it is best, it is chosen, and speculation costs no more than the probes. Pure: a caller measures.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

from paceline.worker.config import SpecConfig
from paceline.worker.spec.limits import max_tree_nodes
from paceline.worker.step import SpecShape

PLAIN = SpecShape(num_steps=0, topk=1, num_draft_tokens=1)

# Steps per probe of another shape than the best known: 2.1 %, or less, where a probe costs more
# than a step.
PROBE_PERIOD = 48
PROBES_AT_FIRST = 3  # more, for a number of rows that is new: one to warm up, two to measure
# What a switch must promise, so that noise alone causes none; to plain, near to nothing.
_MIN_GAIN, _MIN_PLAIN_GAIN = 1.04, 1.01
_MOST_CREDIT = float(PROBES_AT_FIRST * PROBE_PERIOD)
_SETTLE_STEPS = (
    10  # after a switch, in which the new shape's ratio is measured and nothing switched
)
_UNIT_WINDOW = 21  # medians of so many: a hiccup is no change, eleven steps are
_RATIO_WINDOW = 7
_MIN_SAMPLES = 2
_FIRST_SHARE, _PRIOR_WEIGHT = 0.6, 4.0  # of drafts accepted, and the rows that it weighs
_TREE_HOPE = 1.5  # chains' worth of drafts per depth
_WINDOW = 64.0  # steps over which acceptance is averaged
_RARE_WINDOW = 8.0  # where only probes show it
_UNSEEN_WINDOW = 512.0  # of trees that were not grown
_MIN_ROWS = 16.0  # to be seen of the shape in use before another is preferred


class DepthController:
    """Chooses the shape of each step's trees, within the one configured.

    Deterministic, and of bounded memory: a few numbers per shape, for 8 + 4 * log2(rows / 8)
    numbers of rows.
    """

    def __init__(self, spec: SpecConfig) -> None:
        self._configured = SpecShape(spec.num_steps, spec.topk, spec.num_draft_tokens)
        self._shapes = candidate_shapes(spec)
        self._acceptance = _Acceptance(self._shapes)
        self._bands: dict[int, _Band] = {}

    def choose(self, num_rows: int) -> SpecShape:
        """The shape for a step of so many SPECULATE rows."""
        if len(self._shapes) == 1 or num_rows < 1:
            return self._configured
        band = self._band(num_rows)
        band.settle_on_best(self._acceptance)
        return band.probe() or band.current

    def observe(
        self,
        num_rows: int,
        shape: SpecShape,
        accept_lengths: Iterable[int],
        step_s: float | None,
    ) -> None:
        """What came of a step.

        Args:
            num_rows: as `choose` was asked.
            accept_lengths: of its rows, without those that ended their req early.
            step_s: how long it took; None where it did other work too, as prompts.
        """
        if len(self._shapes) == 1 or num_rows < 1 or shape not in self._shapes:
            return
        band = self._band(num_rows)
        is_probe = shape != band.current
        self._acceptance.observe(shape, accept_lengths, is_rare=band.current == PLAIN)
        if step_s is not None and step_s > 0.0:
            band.observe(shape, step_s, is_probe=is_probe)

    def current(self, num_rows: int) -> SpecShape:
        """What `choose` gives for so many rows when it does not probe."""
        band = self._bands.get(band_of(num_rows))
        return self._configured if band is None else band.current

    def _band(self, num_rows: int) -> "_Band":
        key = band_of(num_rows)
        band = self._bands.get(key)
        if band is None:
            nearest = min(self._bands, key=lambda other: (abs(other - key), other), default=None)
            like = None if nearest is None else self._bands[nearest]
            band = self._bands[key] = _Band(self._shapes, self._configured, like)
        return band


def candidate_shapes(spec: SpecConfig) -> tuple[SpecShape, ...]:
    """Plain, chains up to the configured depth, and with `topk` smaller trees; by their size.

    Only the configured one where it is not to be adapted.
    """
    configured = SpecShape(spec.num_steps, spec.topk, spec.num_draft_tokens)
    if not spec.adaptive or spec.is_simulated:
        return (configured,)
    shapes = {PLAIN, configured}
    shapes |= {SpecShape(depth, 1, depth + 1) for depth in _depths(spec.num_steps)}
    if spec.topk > 1:
        half = (spec.num_steps + 1) // 2
        nodes = min(spec.num_draft_tokens, max_tree_nodes(half, spec.topk))
        shapes.add(SpecShape(half, spec.topk, nodes))
        if spec.num_draft_tokens // 2 > spec.topk:
            shapes.add(SpecShape(spec.num_steps, spec.topk, spec.num_draft_tokens // 2))
    return tuple(sorted(shapes, key=lambda shape: (_size(shape), shape.topk)))


def band_of(num_rows: int) -> int:
    """Numbers of rows that share their measurements: each alone up to 8, then four per doubling."""
    if num_rows <= 8:
        return num_rows
    octave = num_rows.bit_length() - 4  # 0 for 8 to 15
    return 8 + 4 * octave + ((num_rows >> (octave + 1)) - 4)


def _depths(num_steps: int) -> list[int]:
    """Every depth up to 6, then ever fewer."""
    depths, depth = [], 1
    while depth < num_steps:
        depths.append(depth)
        depth += max(1, depth // 3) if depth >= 6 else 1
    return [*depths, num_steps]


def _size(shape: SpecShape) -> int:
    """What costs are interpolated over: tokens to verify and forwards of the draft."""
    return shape.num_draft_tokens + shape.num_steps


class _Acceptance:
    """How likely a draft of each depth is accepted where the one above it was.

    Chains share their shares, since one is the beginning of the other; each tree has its own. Where
    little was seen of one, or nothing lately, it is taken to be like all that was seen, and a tree
    to be better, so that it is tried again.
    """

    def __init__(self, shapes: Sequence[SpecShape]) -> None:
        num_steps = max(shape.num_steps for shape in shapes)
        self._all = [_Share() for _ in range(num_steps)]
        self._kinds = {_kind(shape): [_Share() for _ in range(num_steps)] for shape in shapes}

    def observe(self, shape: SpecShape, accept_lengths: Iterable[int], *, is_rare: bool) -> None:
        seen = _kind(shape)
        for kind, shares in self._kinds.items():
            if kind != seen:
                _fade(shares, _UNSEEN_WINDOW)
        if shape.num_steps == 0:
            return
        window = _RARE_WINDOW if is_rare else _WINDOW
        lengths = [min(length, shape.num_steps) for length in accept_lengths]
        for shares in (self._all, self._kinds[seen]):
            _fade(shares[: shape.num_steps], window)
            for length in lengths:
                for depth in range(min(length + 1, shape.num_steps)):
                    shares[depth].add(depth < length)

    def tokens_per_row(self, shape: SpecShape) -> float:
        """Of a step, with the bonus."""
        total = reached = 1.0
        own = self._kinds[_kind(shape)]
        for depth in range(shape.num_steps):
            prior = self._all[depth].value(_FIRST_SHARE)
            if shape.topk > 1:
                prior = 1.0 - (1.0 - prior) ** _TREE_HOPE
            reached *= own[depth].value(prior)
            total += reached
        return total

    def is_known(self, shape: SpecShape) -> bool:
        return shape.num_steps == 0 or self._kinds[_kind(shape)][0].num_trials >= _MIN_ROWS


class _Share:
    """Hits of trials, the older ones weighing less."""

    __slots__ = ("num_hits", "num_trials")

    def __init__(self) -> None:
        self.num_hits = self.num_trials = 0.0

    def add(self, is_hit: bool) -> None:
        self.num_hits += is_hit
        self.num_trials += 1.0

    def value(self, prior: float) -> float:
        return (self.num_hits + _PRIOR_WEIGHT * prior) / (self.num_trials + _PRIOR_WEIGHT)


def _kind(shape: SpecShape) -> SpecShape | None:
    return None if shape.topk == 1 else shape


def _fade(shares: Iterable[_Share], window: float) -> None:
    for share in shares:
        share.num_hits *= 1.0 - 1.0 / window
        share.num_trials *= 1.0 - 1.0 / window


class _Band:
    """What is known of steps with about one number of rows.

    A shape's ratio is its step time over the `unit`, which is what the shape in use shows, divided
    by that shape's own ratio. So the unit follows the machine, and a ratio is measured only when
    another shape is in use, or just after a switch to it.
    """

    def __init__(
        self, shapes: Sequence[SpecShape], configured: SpecShape, like: "_Band | None"
    ) -> None:
        self._shapes = shapes
        self._configured = configured
        self._costs = {shape: _Cost() for shape in shapes}
        self._costs[configured].ratio = 1.0
        self.current = configured
        if like is not None:
            self.current = like.current
            for shape, cost in self._costs.items():
                cost.ratio = like._costs[shape].ratio
        self._units: deque[float] = deque(maxlen=_UNIT_WINDOW)
        self._num_settling = 0
        self._credit = _MOST_CREDIT  # in steps
        self._turn = 0

    def settle_on_best(self, acceptance: _Acceptance) -> None:
        """Makes the shape of most tokens a second the one in use, where that is clearly another."""
        if self._num_settling > 0 or len(self._units) < _MIN_SAMPLES:
            return
        if not acceptance.is_known(self.current):
            return

        def speed(shape: SpecShape) -> float:
            ratio = self._ratio(shape)
            return 0.0 if ratio is None else acceptance.tokens_per_row(shape) / ratio

        best = max(self._shapes, key=speed)  # the smallest of equals
        needed = _MIN_PLAIN_GAIN if best == PLAIN else _MIN_GAIN
        if speed(best) > needed * speed(self.current):
            self._costs[best].ratio = self._ratio(best)
            self.current = best
            self._num_settling = _SETTLE_STEPS

    def probe(self) -> SpecShape | None:
        """Another shape to be tried now, if it is time for one."""
        self._credit = min(self._credit + 1.0, _MOST_CREDIT)
        if self._num_settling > 0 or len(self._units) < _MIN_SAMPLES:
            return None
        shapes = self._worth_probing()
        shape = shapes[self._turn // 2 % len(shapes)]
        if self.current != PLAIN and (self._turn % 2 == 0 or not self._costs[PLAIN].is_measured):
            shape = PLAIN  # what must never be missed
        price = PROBE_PERIOD * max(1.0, self._relative(shape))
        if self._credit < min(price, _MOST_CREDIT):
            return None
        self._credit -= price
        self._turn += 1
        return shape

    def _relative(self, shape: SpecShape) -> float:
        """A step's time to one of the shape in use; 1 if unknown."""
        ratio, current = self._ratio(shape), self._ratio(self.current)
        return 1.0 if ratio is None or current is None else ratio / current

    def observe(self, shape: SpecShape, step_s: float, *, is_probe: bool) -> None:
        cost = self._costs[shape]
        if not cost.is_warm:  # kernels are compiled for it, memory is allocated
            cost.is_warm = True
            return
        if is_probe or self._num_settling > 0:
            if self._units:
                cost.add(step_s / median(self._units))
            self._num_settling -= not is_probe
        else:
            ratio = self._ratio(shape)
            assert ratio is not None
            self._units.append(step_s / ratio)

    def _worth_probing(self) -> list[SpecShape]:
        """The configured shape, which shows all depths, and the neighbours of the current one."""
        at = self._shapes.index(self.current)
        near = self._shapes[max(at - 1, 0) : at + 2]
        wanted = dict.fromkeys((self._configured, *near))
        return [shape for shape in wanted if shape != self.current]

    def _ratio(self, shape: SpecShape) -> float | None:
        """Measured; or of a neighbouring band; or between what is known of smaller and larger."""
        known = self._costs[shape].ratio
        if known is not None or shape == PLAIN:
            return known
        points = [
            (_size(other), ratio)
            for other in self._shapes
            if (ratio := self._costs[other].ratio) is not None
        ]
        below = max((point for point in points if point[0] <= _size(shape)), default=None)
        above = min((point for point in points if point[0] >= _size(shape)), default=None)
        if below is None or above is None:
            return None
        if below[0] == above[0]:
            return max(below[1], above[1])
        share = (_size(shape) - below[0]) / (above[0] - below[0])
        return below[1] + share * (above[1] - below[1])


class _Cost:
    """The ratio of one shape in one band: given, until it is measured."""

    __slots__ = ("_samples", "is_warm", "ratio")

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_RATIO_WINDOW)
        self.is_warm = False
        self.ratio: float | None = None

    @property
    def is_measured(self) -> bool:
        return len(self._samples) >= _MIN_SAMPLES

    def add(self, ratio: float) -> None:
        self._samples.append(ratio)
        if self.is_measured:
            self.ratio = median(self._samples)
