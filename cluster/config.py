"""ClusterConfig: everything one deployment is asked to be, from TOML, flags or keyword arguments.

Built once, frozen, and passed to the controller, which hands each process its slice. A key that
does not exist is refused by name, with the closest one that does. Reads no checkpoint: whether a
model exists or fits is found out at start (cluster/preflight.py).
"""

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from paceline.cluster.draft_config import DraftSection, Section, unknown_key
from paceline.cluster.flags import as_given, flag_of
from paceline.worker.config import CacheConfig, SchedulerConfig
from paceline.worker.errors import ConfigError

DEFAULT_NAMESPACE = "paceline"
CONTROLLER_NAME = "paceline-controller"


class TargetSection(Section):
    """The model's copies."""

    groups: int = Field(default=1, ge=1, le=1024)
    tensor_parallel_size: int = Field(default=1, ge=1, le=1024)


class CacheSection(Section):
    page_size: Literal[1, 16, 32, 64] = 16
    num_pages: int = Field(default=0, ge=0)  # 0 sizes the pool from free memory
    max_bytes: int = Field(
        default=0, ge=0
    )  # of the pool per rank when sized; 0 is the default limit
    enable_prefix_caching: bool = True


class SchedulerSection(Section):
    max_num_seqs: int = Field(default=32, ge=1, le=4096)
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    chunked_prefill_size: int = Field(default=512, ge=0)  # 0 computes whole prompts

    @model_validator(mode="after")
    def _is_consistent(self) -> "SchedulerSection":
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running request takes one token a step"
            )
        return self


class QueueSection(Section):
    """Bounds of the deployment's one queue; what is over them is refused at once."""

    max_num_reqs: int = Field(default=256, ge=1)
    max_num_tokens: int = Field(default=262_144, ge=1)  # prompt tokens of all waiting requests


class FrontSection(Section):
    # 0 leaves the requests to fronts that something else hosts, as Ray Serve does.
    count: int = Field(default=1, ge=0, le=64)
    host: str = "127.0.0.1"
    port: int = Field(
        default=8000, ge=0, le=65535
    )  # HTTP; 0 takes a free one; front i listens on port + i
    grpc_port: int = Field(default=50051, ge=0, le=65535)
    api_keys: tuple[str, ...] = ()
    admin_api_keys: tuple[str, ...] = ()
    ssl_keyfile: str = ""
    ssl_certfile: str = ""
    ssl_ca_certs: str = ""
    ssl_keyfile_password: str = ""

    @model_validator(mode="after")
    def _is_consistent(self) -> "FrontSection":
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ValueError("ssl_keyfile and ssl_certfile go together; one of them is missing")
        if not all((*self.api_keys, *self.admin_api_keys)):
            raise ValueError("an API key is empty; leave it out to serve without keys")
        if self.ssl_ca_certs and not self.ssl_certfile:
            raise ValueError("ssl_ca_certs asks clients for certificates; set ssl_certfile too")
        return self


class RaySection(Section):
    address: str = ""  # of a running cluster; empty starts one on this machine
    namespace: str = Field(default=DEFAULT_NAMESPACE, min_length=1)
    num_cpus: int = Field(
        default=0, ge=0
    )  # that the cluster started here offers; 0 counts the machine's
    # Logical CPUs of one rank: what placement counts, not a limit on its threads.
    num_cpus_per_rank: float = Field(default=0.5, ge=0)
    threads_per_rank: int = Field(
        default=0, ge=0
    )  # 0 shares a node's CPUs among the ranks of a group
    placement_timeout_s: float = Field(default=300.0, gt=0)
    start_timeout_s: float = Field(default=900.0, gt=0)  # of one group, once placed
    shutdown_timeout_s: float = Field(default=30.0, ge=0)


class ClusterConfig(Section):
    model: str = Field(min_length=1)  # a built-in name or a Hugging Face directory
    served_model_names: tuple[str, ...] = ()  # empty takes the model's own name
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int = Field(
        default=0, ge=0
    )  # tokens of prompt and output; 0 takes the checkpoint's
    kernels: Literal["auto", "reference", "native", "triton", "sgl"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    deterministic: bool = False  # the same bits whatever else is computed beside a request
    cuda_graphs: bool = True  # rounds with a colocated draft are recorded and repeated
    target: TargetSection = TargetSection()
    draft: DraftSection = DraftSection()
    cache: CacheSection = CacheSection()
    scheduler: SchedulerSection = SchedulerSection()
    queue: QueueSection = QueueSection()
    front: FrontSection = FrontSection()
    ray: RaySection = RaySection()

    @model_validator(mode="after")
    def _can_be_deterministic(self) -> "ClusterConfig":
        if self.deterministic and (self.device == "cuda" or self.kernels in ("triton", "sgl")):
            raise ValueError(
                f"deterministic is kept on CPUs by the kernel sets native and reference, not by "
                f"kernels '{self.kernels}' on device '{self.device}'; set device 'cpu' and kernels "
                "'auto'"
            )
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model; the first is the one answers carry."""
        return self.served_model_names or (Path(self.model).name or self.model,)

    def cache_config(self, **changes: Any) -> CacheConfig:  # Any: fields of it
        return CacheConfig(**self.cache.model_dump() | changes)

    def scheduler_config(self, **changes: Any) -> SchedulerConfig:  # Any: fields of it
        return SchedulerConfig(**self.scheduler.model_dump() | changes)


def load_config(
    path: str | Path | None = None, overrides: Mapping[str, Any] | None = None
) -> ClusterConfig:
    """The settings of a TOML file with `overrides` on top.

    Args:
        overrides: dotted keys ("draft.num_steps") to values; None means "not given".
    Raises: ConfigError: no such file, not TOML, an unknown key, or a value that cannot be.
    """
    data: dict[str, Any] = {}
    source = "the command line"
    if path is not None:
        source = str(path)
        try:
            data = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"config file '{path}': {error.strerror or error}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"config file '{path}' is not TOML: {error}") from error
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    for key, value in given.items():
        _put(data, key.split("."), value)
    return parse_config(data, source, flags=given)


def parse_config(
    data: Mapping[str, Any], source: str = "config", *, flags: Collection[str] = ()
) -> ClusterConfig:
    """
    Args:
        flags: the keys that flags set, which messages then name.
    Raises: ConfigError: names every key at fault, its value and what is allowed.
    """
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as error:
        faults = "; ".join(_describe(fault, flags) for fault in error.errors(include_url=False))
        raise ConfigError(f"{source}: {faults}") from error


def _put(data: dict[str, Any], keys: list[str], value: Any) -> None:  # Any: a TOML value
    for key in keys[:-1]:
        data = data.setdefault(key, {})
        if not isinstance(data, dict):
            raise ConfigError(f"'{key}' must be a table")
    data[keys[-1]] = value


def _describe(fault: Any, flags: Collection[str]) -> str:  # Any: pydantic's ErrorDetails
    loc = [str(part) for part in fault["loc"] if not isinstance(part, int)]
    name = ".".join(loc)
    if fault["type"] == "extra_forbidden":
        section: type[BaseModel] = ClusterConfig
        for part in loc[:-1]:
            section = type(section.model_fields[part].default)
        prefix = ".".join(loc[:-1])
        return unknown_key(loc[-1], section.model_fields, f"[{prefix}]" if prefix else "")
    if fault["type"] == "missing":
        return (
            f"'{name}' is missing; give a built-in name (`paceline models list` shows them) or a "
            "Hugging Face directory"
        )
    if fault["type"] == "model_type":
        return f"'{name}' is {fault['input']!r}: it must be a table, [{name}]"
    if fault["type"] == "value_error":
        reason = str(fault["ctx"]["error"])
        return f"[{name}] {reason}" if name else reason
    value, reason = fault["input"], fault["msg"].lower()
    if name in flags:
        return f"{flag_of(name)} ('{name}') is {as_given(name, value)}: {reason}"
    return f"'{name}' is {value!r}: {reason}"
