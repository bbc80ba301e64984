"""The n-gram drafter's corpus, from its file and the target's tokenizer."""

import logging
from typing import TYPE_CHECKING

from paceline.cluster.front.text import TextCodec
from paceline.cluster.group.settings import Progress

if TYPE_CHECKING:
    from paceline.worker.config import ModelConfig, SpecConfig
    from paceline.worker.spec.ngram_corpus import Corpus

log = logging.getLogger(__name__)


def load_corpus(
    spec: "SpecConfig", model: "ModelConfig", progress: Progress | None = None
) -> "Corpus | None":
    """None where no corpus is named.

    Raises: ConfigError: as `encode_corpus`.
    """
    if not spec.ngram_corpus:
        return None
    from paceline.worker.spec.corpus_file import encode_corpus
    from paceline.worker.spec.ngram_corpus import Corpus

    codec = TextCodec.load(model.path)
    try:
        texts = encode_corpus(
            spec.ngram_corpus,
            lambda text: codec.encode(text, add_special_tokens=False),
            model.vocab_size,
            lambda fraction: progress("corpus", fraction) if progress else None,
        )
    finally:
        codec.close()
    corpus = Corpus(texts)
    log.info("corpus indexed path=%s tokens=%d", spec.ngram_corpus, corpus.num_tokens)
    return corpus
