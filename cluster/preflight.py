"""What is checked before any process is started or any weight read, so that a start fails early.

Each failure is a ConfigError or NotFound that names the thing, its value and the way out.
"""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cluster.config import ClusterConfig, FrontSection
from paceline.cluster.draft_config import HEADS, DraftSection, change_draft
from paceline.cluster.models import BUILT_IN, get_model
from paceline.cluster.models.draft_kind import is_head
from paceline.worker.errors import ConfigError, NotFound
from paceline.worker.spec.corpus_file import read_corpus

if TYPE_CHECKING:
    from paceline.worker.config import ModelConfig


def resolve_models(config: ClusterConfig, tell: Callable[[str, str, float], None]) -> ClusterConfig:
    """The config with "auto" and relative paths resolved; models are at hand on this machine.

    Raises: ConfigError, NotFound: a model that cannot be served, or a draft that is not one for it.
    """
    model = _name_or_path(config.model)
    model_dir = _fetch(model, "model", tell)
    target = _check_checkpoint(
        f"model '{config.model}'",
        model_dir,
        config.dtype,
        config.max_model_len,
        config.target.tensor_parallel_size,
    )
    _check_tokenizer(model_dir)
    draft = _resolve_draft(config, target, tell)
    draft.spec_config("cpu" if config.device == "auto" else config.device)  # warns of the tree
    names = config.names  # of the model as it was given, not of where it lies
    return config.model_copy(
        update={"model": model, "served_model_names": names, "draft": draft},
    )


def _resolve_draft(
    config: ClusterConfig, target: "ModelConfig", tell: Callable[[str, str, float], None]
) -> DraftSection:
    """The section with its method and the draft's name or path.

    What its ranks would refuse is refused here; heads need torch for that, models do not.
    """
    section = config.draft
    if section.method == "auto" and not section.model:
        built_in = BUILT_IN.get(config.model)
        section = change_draft(section, model=built_in.default_draft if built_in else "none")
    if section.ngram_corpus:
        corpus = Path(section.ngram_corpus).expanduser().absolute()
        read_corpus(corpus, target.vocab_size)
        section = change_draft(section, ngram_corpus=str(corpus))
    if not section.model:
        return section
    named = section.model
    name = _shipped_draft(config.model) if named == "auto" else _name_or_path(named)
    path = _fetch(name, "draft", tell)
    changes: dict[str, str] = {"model": name}
    if section.token_map:
        changes["token_map"] = str(Path(section.token_map).expanduser().absolute())
    if section.method in HEADS or (section.method == "auto" and is_head(path)):
        kind = _check_head(path, target, section, config.target.tensor_parallel_size)
        return change_draft(section, **changes, method=kind)
    section = change_draft(section, **changes, method="standalone")
    tp_size = section.tensor_parallel_size
    if section.is_colocated:
        tp_size = config.target.tensor_parallel_size
    _check_checkpoint(f"draft '{name}'", path, config.dtype, 0, tp_size)
    _check_vocabularies(Path(target.path), path, config.model, name)
    return section


def _check_head(path: Path, target: "ModelConfig", section: DraftSection, tp_size: int) -> str:
    """The method that a head is for."""
    from paceline.worker.models.eagle_config import load_eagle_config
    from paceline.worker.models.hot_tokens import load_token_map

    head = load_eagle_config(path, target)
    if section.method not in ("auto", head.kind):
        raise ConfigError(
            f"draft '{path}' is a head of kind '{head.kind}', but the method asked for is "
            f"'{section.method}'; leave the method out"
        )
    if section.token_map and head.kind == "eagle":
        load_token_map(Path(section.token_map).expanduser(), target.vocab_size)
    _check_split(f"draft '{path}'", head.model, tp_size)
    return head.kind


def check_local_ports(front: FrontSection) -> None:
    """Raises: ConfigError: a port that a front shall listen on is taken, or asked for twice."""
    http_ports = range(front.port, front.port + front.count) if front.port else range(0)
    grpc_ports = range(front.grpc_port, front.grpc_port + front.count)
    if front.grpc_port and (shared := set(http_ports) & set(grpc_ports)):
        raise ConfigError(
            f"port {min(shared)} is asked for twice: HTTP takes {_span(http_ports)} and gRPC "
            f"{_span(grpc_ports)}, one per front; set --port and --grpc-port further apart"
        )
    for i in range(front.count):
        for base, flag in ((front.port, "--port"), (front.grpc_port, "--grpc-port")):
            if base:
                _check_port(front.host, base + i, flag)


def _span(ports: range) -> str:
    return f"{ports[0]}" if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"


def _check_port(host: str, port: int, flag: str) -> None:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on host '{host}' port {port}: {error}; set --host to an address of "
            "this machine"
        ) from None
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} cannot be used ({error.strerror}); choose another with "
                f"{flag}, 0 for any free one, or stop the process that holds it"
            ) from None


def _name_or_path(name: str) -> str:
    """A built-in name as it is; a path made absolute, since other processes run elsewhere."""
    return name if name in BUILT_IN else str(Path(name).expanduser().absolute())


def _shipped_draft(model: str) -> str:
    built_in = BUILT_IN.get(model)
    if built_in is None or built_in.draft is None:
        have = ", ".join(name for name, known in BUILT_IN.items() if known.draft)
        raise ConfigError(
            f"no draft ships for model '{model}', only for: {have}; name a draft model instead of "
            "'auto'"
        )
    return built_in.draft


def _fetch(name: str, role: str, tell: Callable[[str, str, float], None]) -> Path:
    """The checkpoint's directory."""
    if name in BUILT_IN:
        tell(role, "fetch", 0.0)
        path = get_model(name, lambda stage, fraction: tell(role, stage, fraction))
        tell(role, "ready", 1.0)
        return path
    path = Path(name)
    if not path.exists():
        raise NotFound(
            f"{role} '{name}' is neither built in nor a directory that exists; built in are: "
            f"{', '.join(BUILT_IN)}; or give the path of a Hugging Face directory"
        )
    if not path.is_dir():
        raise ConfigError(
            f"{role} '{name}' is not a directory; give the one that holds config.json"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(f"{role} '{name}' has no config.json, so it is no Hugging Face directory")
    return path


def _check_checkpoint(
    what: str, path: Path, dtype: str, max_model_len: int, tp_size: int
) -> "ModelConfig":
    """What its ranks would refuse, without torch; whether each tensor fits they find out alone."""
    from paceline.worker.models.checkpoint_files import check_weight_files
    from paceline.worker.models.registry import load_model_config

    model = load_model_config(path, max_model_len=max_model_len, dtype=dtype)
    check_weight_files(path)
    _check_split(what, model, tp_size)
    return model


def _check_split(what: str, model: "ModelConfig", tp_size: int) -> None:
    from paceline.worker.parallel.shards import split_heads

    try:
        split_heads(model.num_heads, model.num_kv_heads, tp_size)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error.message}") from None


def _check_tokenizer(path: Path) -> None:
    from paceline.cluster.front.text import TextCodec

    TextCodec.load(path).close()


def _check_vocabularies(model_dir: Path, draft_dir: Path, model: str, draft: str) -> None:
    from paceline.worker.spec.vocab import vocab_hash

    if vocab_hash(model_dir) != vocab_hash(draft_dir):
        raise ConfigError(
            f"draft '{draft}' has another vocabulary than model '{model}', so its guesses would "
            "mean other tokens; choose a draft made for the same tokenizer"
        )
