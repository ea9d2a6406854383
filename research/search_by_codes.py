#!/usr/bin/env python3
"""How well do codes find passages? nDCG@10 of sentences as queries for the passage from which they were taken.

    python research/search_by_codes.py TEXT --model ENCODER [--dictionary DICT_DIR ...]

The dictionary must not be learned from TEXT; without one, the latent head of ENCODER predicts the codes. Rows: words,
the sentence vectors of the whole model, the codes, their fusions with both, and the mean vector of the coded layer.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from mlsm_plugin.core.text.text_files import read_text
from mlsm_plugin.evaluation.encoder_quality import Measure, Retrieval, bm25_gains, make_retrieval
from mlsm_plugin.evaluation.quality_settings import QualitySettings
from mlsm_plugin.evaluation.sentence_encoders import HuggingFaceSentences
from mlsm_plugin.search.bm25 import OF_CODES, OF_WORDS, TermScores, best, fused, write_term_scores
from mlsm_plugin.search.index import HASHED_WORDS, word_counts
from mlsm_plugin.search.text_codes import DictionaryCodes, TextCoder, open_text_coder

COUNT = 1000  # passages of each ranking in a fusion
TEXTS_AT_ONCE = 500


def gains(rankings: list[np.ndarray], retrieval: Retrieval) -> Measure:
    """nDCG@10 of ranked passages, for each query."""
    values = []
    for ranking, source in zip(rankings, retrieval.sources, strict=True):
        places = np.flatnonzero(ranking[:10] == source)
        values.append(1 / np.log2(2 + places[0]) if len(places) else 0.0)
    return Measure(np.array(values), np.ones(len(values)))


def by_vectors(passages: np.ndarray, queries: np.ndarray) -> list[np.ndarray]:
    """Rankings by cosine."""
    unit_passages = passages / np.linalg.norm(passages, axis=1, keepdims=True)
    unit_queries = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    return list(np.argsort(-(unit_queries @ unit_passages.T), axis=1)[:, :COUNT])


def by_codes(coder: TextCoder, retrieval: Retrieval, folder: Path) -> list[np.ndarray]:
    """Rankings by BM25 over codes."""
    counts = []
    for first in range(0, len(retrieval.passages), TEXTS_AT_ONCE):
        coded = coder.coded(retrieval.passages[first : first + TEXTS_AT_ONCE])
        counts += [text.summed() for text in coded]
    write_term_scores(folder, "codes", coder.num_atoms, lambda: counts, OF_CODES)
    scores = TermScores.open(folder, "codes", len(retrieval.passages))
    queries = [text.summed() for text in coder.coded(retrieval.queries)]
    return [best(scores.of_query(query.indices, query.data), COUNT) for query in queries]


def by_words(retrieval: Retrieval, folder: Path) -> list[np.ndarray]:
    """Rankings by BM25 over words, as in ``mlsm search``."""
    write_term_scores(folder, "words", HASHED_WORDS, lambda: [word_counts(retrieval.passages)], OF_WORDS)
    scores = TermScores.open(folder, "words", len(retrieval.passages))
    queries = word_counts(retrieval.queries)
    return [best(scores.of_query(query.indices, query.data), COUNT) for query in queries]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", help="passages: a sentence a line, blank lines between documents")
    parser.add_argument("--model", required=True)
    parser.add_argument("--dictionary", nargs="+", default=[None], help="default: the model's own latent head")
    parser.add_argument("--passages", type=int, default=2500)
    parser.add_argument("--queries", type=int, default=1000)
    args = parser.parse_args()
    documents: list[list[str]] = [[]]
    for line in read_text([args.text]):
        if line:
            documents[-1].append(line)
        elif documents[-1]:
            documents.append([])
    retrieval = make_retrieval(documents, QualitySettings(passages=args.passages, queries=args.queries))
    print(f"{len(retrieval.passages)} passages, {len(retrieval.queries)} queries", flush=True)

    def show(name: str, rankings: list[np.ndarray]) -> None:
        print(f"{name:45} {gains(rankings, retrieval).figure:.3f}", flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = by_words(retrieval, folder)
        show("words", words)
        print(f"{'words, bm25s':45} {bm25_gains(retrieval).figure:.3f}")
        whole = HuggingFaceSentences(args.model)
        dense = by_vectors(whole.vectors(retrieval.passages), whole.vectors(retrieval.queries))
        show("the model's sentence vectors", dense)
        for dictionary in args.dictionary:
            coder = open_text_coder(args.model, dictionary)
            codes = by_codes(coder, retrieval, folder)
            source = "own head" if dictionary is None else f"{Path(dictionary).name}, layer {coder.layer}"
            show(f"codes: {source}, {coder.num_atoms} atoms", codes)
            fusion = [np.array([number for number, _ in fused(pair, COUNT)]) for pair in zip(words, codes, strict=True)]
            show("    with words", fusion)
            all_three = [
                np.array([number for number, _ in fused(rankings, COUNT)])
                for rankings in zip(words, codes, dense, strict=True)
            ]
            show("    with words and sentence vectors", all_three)
            if isinstance(coder, DictionaryCodes):
                show("    mean vector of the layer", by_vectors(*layer_vectors(coder, retrieval)))


def layer_vectors(coder: DictionaryCodes, retrieval: Retrieval) -> tuple[np.ndarray, np.ndarray]:
    """Mean hidden states of the coded layer, special tokens included."""
    encoder = coder.encoder
    vectors = []
    for texts in (retrieval.passages, retrieval.queries):
        rows = []
        for text in texts:
            ids, _ = coder.tokenizer.encoded_text(text)
            tokens = torch.tensor([coder.tokenizer.surrounded(ids[: coder.positions - 2])])
            rows.append(encoder.hidden_states(tokens)[0].mean(dim=0).cpu().numpy())
        vectors.append(np.stack(rows))
    return vectors[0], vectors[1]


if __name__ == "__main__":
    main()
