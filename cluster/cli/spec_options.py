"""The options of speculative decoding, shared by the commands that take them.

docs/speculation.md says of each what it is for. Names are those of SGLang and vLLM where these
have the option.
"""

from typing import Annotated, Any

import typer


def option(*names: str, help: str = "", **rest: Any) -> Any:  # Any: typer's own
    return typer.Option(*names, help=help, show_default=False, **rest)


Draft = Annotated[
    str | None,
    option(
        "--draft",
        "--speculative-draft-model-path",
        help="A head or a draft model, by name or directory; auto, ngram or none.",
    ),
]
SpeculativeConfig = Annotated[
    str | None,
    option("--speculative-config", help='JSON: {"method": "eagle3", "model": "HEAD", …}.'),
]
Algorithm = Annotated[
    str | None,
    option(
        "--speculative-algorithm",
        "--spec-method",
        help="auto (as the draft is), none, ngram, standalone, eagle or eagle3.",
    ),
]
NumSteps = Annotated[int | None, option("--speculative-num-steps", help="Guesses in a row.")]
Topk = Annotated[
    int | None, option("--speculative-eagle-topk", "--speculative-topk", help="Branches each.")
]
NumDraftTokens = Annotated[
    int | None, option("--speculative-num-draft-tokens", help="Of a tree, with its root.")
]
Adaptive = Annotated[
    bool | None,
    option(
        "--speculative-adaptive/--no-speculative-adaptive",
        "--spec-adaptive/--no-spec-adaptive",
        help="Fewer guesses where they do not pay.",
    ),
]
Overlap = Annotated[
    str | None, option("--spec-overlap", help="Launch steps ahead: auto (on a GPU), on or off.")
]
TokenMap = Annotated[
    str | None,
    option(
        "--token-map",
        "--speculative-token-map",
        help="File of the ids that an EAGLE-1 or -2 head may guess.",
    ),
]
NgramCorpus = Annotated[
    str | None,
    option("--ngram-corpus", help="Text or .jsonl file that n-gram guesses may come from."),
]
Rule = Annotated[
    str | None, option("--spec-rule", help="How guesses are accepted: coupled or rejection.")
]
ThresholdSingle = Annotated[
    float | None,
    option(
        "--spec-threshold-single",
        "--speculative-accept-threshold-single",
        help="With rejection; below 1 is not exact.",
    ),
]
ThresholdAcc = Annotated[
    float | None,
    option(
        "--spec-threshold-acc",
        "--speculative-accept-threshold-acc",
        help="With rejection; below 1 is not exact.",
    ),
]
SimulatedAcceptLength = Annotated[
    float | None,
    option("--simulated-accept-length", help="Tokens per step, made up, for benchmarks."),
]
SimulatedMethod = Annotated[
    str | None, option("--simulated-method", help="match-expected or multinomial.")
]
Placement = Annotated[str | None, option("--draft-placement", help="auto, decoupled or colocated.")]


def draft_overrides(
    *,
    draft: str | None,
    speculative_config: str | None,
    speculative_algorithm: str | None,
    **rest: Any,  # Any: values of several types
) -> dict[str, Any]:
    """Dotted keys of a ClusterConfig to what was given; None where nothing was.

    Args:
        rest: by the names of fields of [draft].
    Raises: ConfigError: as `parse_speculative_config`.
    """
    from paceline.cluster.draft_config import parse_speculative_config

    overrides: dict[str, Any] = {f"draft.{name}": value for name, value in rest.items()}
    if speculative_config is not None:
        overrides |= parse_speculative_config(speculative_config)
    if draft:
        # A draft named here is what it is, whatever method a file has for another.
        overrides |= {"draft.method": "auto", "draft.model": draft}
    if speculative_algorithm is not None:
        overrides["draft.method"] = speculative_algorithm.lower()
    return overrides
