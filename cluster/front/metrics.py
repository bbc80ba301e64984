"""A front's Prometheus metrics, with the suffixes and meanings of vLLM's.

Each front has a registry of its own, so that several can live in one process. The request id is
never a label. What has the label `replica` is a group's, as the controller knows it: every front
shows the same, so aggregate with max, not sum, over fronts.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from paceline.protos.v1 import common_pb2, controller_pb2

PREFIX = "paceline"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0)
_MAX_GAPS = 256


class DraftMetrics(Collector):
    """The links of target groups to drafts in groups of their own, as last reported.

    Counts are the leader's own: one that was restarted begins at 0, which Prometheus knows as the
    reset of a counter, so `rate` and `increase` hold across it.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.drafts: dict[str, common_pb2.DraftHealth] = {}  # by target group

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        labels = ("model_name", "replica")
        name = f"{PREFIX}_decoupled"
        late = CounterMetricFamily(
            f"{name}_draft_late", "Rounds that a draft did not answer in time", labels=labels
        )
        stale = CounterMetricFamily(
            f"{name}_draft_stale", "Trees dropped because they came for other tokens", labels=labels
        )
        rtt = GaugeMetricFamily(
            f"{name}_draft_rtt_seconds", "Moving average of a round with a draft", labels=labels
        )
        peer_up = GaugeMetricFamily(
            f"{name}_peer_up", "Whether a draft is linked and answers", labels=labels
        )
        for group_id, draft in self.drafts.items():
            values = (self._model_name, group_id)
            late.add_metric(values, draft.num_late_rounds)
            stale.add_metric(values, draft.num_stale_rows)
            rtt.add_metric(values, draft.rtt_s)
            peer_up.add_metric(values, draft.is_up)
        yield from (late, stale, rtt, peer_up)


class FrontMetrics:
    """`simulated_accept_length` labels all the rest, and is 0 where nothing is made up."""

    def __init__(self, model_name: str, *, simulated_accept_length: float = 0.0) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(
                f"{PREFIX}_{name}", text, ("model_name", *labels), registry=self.registry
            )

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            family = Histogram(
                f"{PREFIX}_{name}", text, ("model_name",), buckets=buckets, registry=self.registry
            )
            return family.labels(model_name)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"{PREFIX}_{name}", text, ("model_name", *labels), registry=self.registry)

        self.running = gauge("num_requests_running", "Requests that a group runs").labels(
            model_name
        )
        self.waiting = gauge("num_requests_waiting", "Requests that wait for a group").labels(
            model_name
        )
        self._kv_usage = gauge("kv_cache_usage_perc", "Used share of a group's pages", ("replica",))
        self._drafts = DraftMetrics(model_name)
        self.registry.register(self._drafts)
        self._queued = gauge("controller_queue_len", "Requests in the controller's queue")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of ended requests")
        self._generated = counter("generation_tokens", "Tokens generated")
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the cache")
        self._preemptions = counter("num_preemptions", "Preemptions")
        self._succeeded = counter("request_success", "Answered requests", ("finished_reason",))
        self._failed = counter("request_failure", "Requests that failed after a start", ("reason",))
        self._rejections = counter("admission_rejections", "Requests refused", ("reason",))
        self._draft_steps = counter("spec_decode_num_drafts", "Steps that verified a draft")
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens verified")
        self._accepted_tokens = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted")
        gauge(
            "spec_decode_simulated_accept_length",
            "Tokens per step made up for a benchmark, 0 for real",
        ).labels(model_name).set(simulated_accept_length)
        self._fallback_steps = counter(
            "decoupled_fallback_steps", "Steps without a draft although speculation is on"
        )
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds",
            "From receipt of a request to its first token",
        )
        self._gaps_s: list[float] = []
        self._inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between the steps of a stream", _TOKEN_SECONDS
        )
        self._time_per_token = histogram(
            "request_time_per_output_token_seconds", "Mean over a request", _TOKEN_SECONDS
        )
        self._latency = histogram("e2e_request_latency_seconds", "Of a whole request")
        self._queue_time = histogram("request_queue_time_seconds", "In the controller's queue")
        self._prefill_time = histogram("request_prefill_time_seconds", "From a group to a token")
        self._decode_time = histogram("request_decode_time_seconds", "From first to last token")

    def note_gap(self, gap_s: float) -> None:
        """Seconds between two steps of a stream: so many that they are observed in bulk."""
        self._gaps_s.append(gap_s)
        if len(self._gaps_s) == _MAX_GAPS:
            self._observe_gaps()

    def _observe_gaps(self) -> None:
        for gap_s in self._gaps_s:
            self._inter_token_latency.observe(gap_s)
        self._gaps_s.clear()

    def reject(self, reason: str) -> None:
        self._rejections.labels(self._model_name, reason).inc()

    def end(self, receipt: common_pb2.Receipt, reason: str, *, is_failure: bool = False) -> None:
        """Accounts for one request that reached its end, whatever the end was."""
        name = self._model_name
        (self._failed if is_failure else self._succeeded).labels(name, reason).inc()
        self._prompt_tokens.labels(name).inc(receipt.prompt_tokens)
        self._generated.labels(name).inc(receipt.completion_tokens)
        self._prefix_queries.labels(name).inc(receipt.prompt_tokens)
        self._prefix_hits.labels(name).inc(receipt.cached_tokens)
        self._preemptions.labels(name).inc(receipt.num_preemptions)
        self._draft_tokens.labels(name).inc(receipt.proposed_tokens)
        self._accepted_tokens.labels(name).inc(receipt.accepted_tokens)
        self._fallback_steps.labels(name).inc(receipt.fallback_steps)
        if receipt.proposed_tokens:
            # The first token comes out of the prefill, which verifies no draft.
            num_drafts = max(0, receipt.num_steps - 1 - receipt.fallback_steps)
            self._draft_steps.labels(name).inc(num_drafts)
        self._latency.observe(receipt.total_s)
        self._queue_time.observe(receipt.queue_s)
        if receipt.completion_tokens == 0:
            return
        decode_s = max(0.0, receipt.total_s - receipt.time_to_first_token_s)
        self._prefill_time.observe(max(0.0, receipt.time_to_first_token_s - receipt.queue_s))
        self._decode_time.observe(decode_s)
        if receipt.completion_tokens > 1:
            self._time_per_token.observe(decode_s / (receipt.completion_tokens - 1))

    def render(self, status: controller_pb2.GetStatusResponse | None) -> bytes:
        """The scrape's text; `status` brings the groups' load where the controller answers."""
        self._observe_gaps()
        self._kv_usage.clear()
        self._drafts.drafts.clear()
        if status is not None:
            self._queued.labels(self._model_name).set(status.num_queued_reqs)
            for group in status.groups:
                if group.role == "target" and group.num_pages:
                    usage = 1.0 - group.num_free_pages / group.num_pages
                    self._kv_usage.labels(self._model_name, group.group_id).set(usage)
                if group.HasField("draft") and group.epoch:  # not of a draft in its own process
                    self._drafts.drafts[group.group_id] = group.draft
        return generate_latest(self.registry)
