"""`paceline verify-lossless`: whether a draft changes any answer, on the user's own machine."""

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cluster.cli import spec_options
from paceline.cluster.cli.spec_options import option

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.cluster.lossless.run import Report
    from paceline.cluster.lossless.tokens import Difference


def verify_lossless(
    model: Annotated[
        str, typer.Argument(help="A built-in name or a Hugging Face directory.", metavar="MODEL")
    ],
    *,
    num_prompts: Annotated[int, typer.Option(help="Of the built-in ones.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 48,
    num_samples: Annotated[
        int, typer.Option(help="Of each distribution; 0 checks tokens only.")
    ] = 400,
    temperature: Annotated[float, typer.Option(help="Of what is sampled.")] = 0.8,
    dtype: Annotated[
        str | None, option("--dtype", help="auto, float32, bfloat16 or float16.")
    ] = None,
    max_model_len: Annotated[int | None, option("--max-model-len")] = None,
    device: Annotated[str | None, option("--device", help="auto, cpu or cuda.")] = None,
    kernels: Annotated[
        str | None, option("--kernels", help="auto, reference, triton or sgl.")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Same bits in any batch: no flip is allowed.")
    ] = False,
    page_size: Annotated[int | None, option("--page-size", "--block-size")] = None,
    max_num_seqs: Annotated[
        int | None, option("--max-num-seqs", "--max-running-requests", help="At once.")
    ] = None,
    threads_per_rank: Annotated[int | None, option("--threads-per-rank")] = None,
    draft: spec_options.Draft = None,
    speculative_config: spec_options.SpeculativeConfig = None,
    speculative_algorithm: spec_options.Algorithm = None,
    speculative_num_steps: spec_options.NumSteps = None,
    speculative_topk: spec_options.Topk = None,
    speculative_num_draft_tokens: spec_options.NumDraftTokens = None,
    speculative_adaptive: spec_options.Adaptive = None,
    spec_overlap: spec_options.Overlap = None,
    token_map: spec_options.TokenMap = None,
    ngram_corpus: spec_options.NgramCorpus = None,
    spec_rule: spec_options.Rule = None,
    spec_threshold_single: spec_options.ThresholdSingle = None,
    spec_threshold_acc: spec_options.ThresholdAcc = None,
    simulated_accept_length: spec_options.SimulatedAcceptLength = None,
    simulated_method: spec_options.SimulatedMethod = None,
    draft_placement: spec_options.Placement = None,
) -> None:
    """Compare speculative with plain decoding: the tokens, and how sampled ones are distributed.

    Runs in this process, one rank, no cluster; every step drafts unless --speculative-adaptive is
    given. Exit codes: 0 lossless, 1 not, or nothing was drafted, 3 refused before the start.
    """
    from rich.console import Console

    from paceline.cluster.config import load_config
    from paceline.cluster.lossless.run import Options, verify
    from paceline.cluster.preflight import resolve_models

    options = Options(num_prompts, max_tokens, num_samples, temperature)
    options.check()
    overrides = {
        "model": model,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "device": device,
        "kernels": kernels,
        "deterministic": deterministic,
        "cache.page_size": page_size,
        "scheduler.max_num_seqs": max_num_seqs,
        "ray.threads_per_rank": threads_per_rank,
    }
    is_untold = speculative_config is None and speculative_algorithm is None
    overrides |= spec_options.draft_overrides(
        draft=draft or ("auto" if is_untold else None),
        speculative_config=speculative_config,
        speculative_algorithm=speculative_algorithm,
        num_steps=speculative_num_steps,
        topk=speculative_topk,
        num_draft_tokens=speculative_num_draft_tokens,
        # Where it does not pay, nothing would be drafted, and nothing shown.
        adaptive=bool(speculative_adaptive),
        overlap=spec_overlap,
        token_map=token_map,
        ngram_corpus=ngram_corpus,
        rule=spec_rule,
        threshold_single=spec_threshold_single,
        threshold_acc=spec_threshold_acc,
        simulated_accept_length=simulated_accept_length,
        simulated_method=simulated_method,
        placement=draft_placement,
    )
    config = load_config(None, overrides)
    errors = Console(stderr=True)
    config = resolve_models(config, lambda role, stage, fraction: None)
    report = verify(
        config,
        _device(config.device),
        options,
        lambda text: errors.print(f"… {text}", highlight=False, markup=False),
    )
    print_report(report, Console(width=110))
    if not report.is_lossless:
        raise typer.Exit(1)


def print_report(report: "Report", console: "Console") -> None:
    """Two tables, what differed, and the verdict in one line."""
    from rich.table import Table

    table = Table("tokens", "compared", "per step", "drafts accepted", "flips", "errors")
    for check in report.tokens:
        num_emitted = check.num_accepted + check.num_steps
        table.add_row(
            check.name,
            str(check.num_tokens),
            f"{num_emitted / max(check.num_steps, 1):.2f}",
            f"{check.num_accepted}/{check.num_proposed}",
            str(len(check.flips) if check.are_flips_allowed else 0),
            str(len(check.errors)),
        )
    console.print(table)
    if report.distributions:
        table = Table("distribution", "samples", "cells", "chi-square", "p-value", "")
        for found in report.distributions:
            table.add_row(
                f"prompt {found.prompt + 1}",
                str(found.num_samples),
                str(found.num_cells),
                f"{found.statistic:.1f}",
                f"{found.p_value:.3g}",
                "as the model's" if found.is_met else f"NOT the model's (p < {found.limit:g})",
            )
        console.print(table)
    for check in report.tokens:
        for difference in check.differences:
            kind = "error" if difference in check.errors else "flip"
            console.print(f"{kind}: {check.name}, {_describe(difference)}", highlight=False)
    console.print(_verdict(report), highlight=False)


def _describe(found: "Difference") -> str:
    where = f"prompt {found.prompt + 1}, token {found.position + 1}"
    if found.wanted is None or found.got is None:
        return f"{where}: the answers have different lengths"
    return (
        f"{where}: {found.got} instead of {found.wanted}, scores {found.gap:.3g} apart "
        f"(rounding explains {found.tie:.3g})"
    )


def _verdict(report: "Report") -> str:
    num_tokens = sum(check.num_tokens for check in report.tokens)
    if not report.num_proposed:
        return "NOT SHOWN: no draft token was proposed, so nothing was verified"
    if report.is_lossless:
        flips = f", {report.num_flips} flips at ties" if report.num_flips else ""
        agree = len(report.distributions)
        also = f"; {agree} distributions are the model's" if agree else ""
        return f"LOSSLESS: {num_tokens} tokens are those of plain decoding{flips}{also}"
    faults = []
    if report.num_errors:
        faults.append(f"{report.num_errors} answers have other tokens than plain decoding")
    num_strange = sum(not check.is_met for check in report.distributions)
    if num_strange:
        faults.append(f"{num_strange} distributions are not the model's")
    return f"NOT LOSSLESS: {'; '.join(faults)}"


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
