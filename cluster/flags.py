"""The flag of `paceline serve` that sets a key of ClusterConfig, for messages."""

# Where the flag is not the key's last part in dashes.
_FLAGS = {
    "served_model_names": "--served-model-name",
    "draft.method": "--speculative-algorithm",
    "draft.model": "--draft",
    "draft.placement": "--draft-placement",
    "draft.groups": "--draft-replicas",
    "draft.tensor_parallel_size": "--draft-tensor-parallel-size",
    "draft.num_steps": "--speculative-num-steps",
    "draft.topk": "--speculative-topk",
    "draft.num_draft_tokens": "--speculative-num-draft-tokens",
    "draft.adaptive": "--speculative-adaptive",
    "draft.overlap": "--spec-overlap",
    "draft.token_map": "--token-map",
    "draft.ngram_corpus": "--ngram-corpus",
    "draft.rule": "--spec-rule",
    "draft.threshold_single": "--spec-threshold-single",
    "draft.threshold_acc": "--spec-threshold-acc",
    "draft.timeout_s": "--draft-timeout-ms",
    "draft.fallback": "--draft-fallback",
    "cache.max_bytes": "--kv-cache-memory-bytes",
    "queue.max_num_reqs": "--max-num-queued-reqs",
    "queue.max_num_tokens": "--max-num-queued-tokens",
    "front.count": "--fronts",
    "front.api_keys": "--api-key",
    "front.admin_api_keys": "--admin-api-key",
    "ray.address": "--ray-address",
    "ray.placement_timeout_s": "--placement-timeout",
    "ray.start_timeout_s": "--start-timeout",
    "ray.shutdown_timeout_s": "--shutdown-timeout",
}


def flag_of(key: str) -> str:
    """Of a dotted key, "front.port" to "--port"."""
    return _FLAGS.get(key, "--" + key.rpartition(".")[2].replace("_", "-"))


def as_given(key: str, value: object) -> str:
    """A key's value as its flag takes it."""
    if key == "draft.timeout_s" and isinstance(value, int | float):
        return f"{value * 1000:g}"
    return repr(value)
