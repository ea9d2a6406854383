"""``mlsm classify``: classify texts zero-shot, with a template and words for each label."""

from __future__ import annotations

import argparse

from mlsm_plugin.cli.coding_options import add_max_unk_rate, check_positive
from mlsm_plugin.cli.fill import add_retrieval_options, open_model_and_datastore, warn_of_cuts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_retrieval_options(parser)
    parser.add_argument(
        "--template", required=True, metavar="TEXT", help="sentence with {} for the text and one <mask>"
    )
    parser.add_argument(
        "--verbalizer",
        required=True,
        metavar="FILE",
        help="words of the labels, a line for each label: label TAB word, word, ...",
    )
    parser.add_argument(
        "--input", required=True, metavar="TSV", help="texts to classify; lines are: label TAB text, or text alone"
    )
    parser.add_argument("--header", action="store_true", help="skip the first line of --input, which names its columns")
    add_max_unk_rate(parser, of="the file")
    parser.add_argument("--output", metavar="TSV", help="file to write: predicted label, its probability, text")
    parser.add_argument(
        "--parametric", action="store_true", help="use the softmax of the masked-LM head instead of retrieval"
    )
    parser.add_argument(
        "--max-occurrences",
        type=int,
        default=10_000,
        metavar="N",
        help="largest number of occurrences of a word to compare with",
    )


def run(args: argparse.Namespace, extra: list[str]) -> int:
    """Predict, and print the accuracy if the input has labels."""
    from collections import Counter

    import numpy as np

    from mlsm_plugin.files.atomic_files import atomic_open, check_output_file
    from mlsm_plugin.files.progress import Progress
    from mlsm_plugin.hidden_states.masked_lms import why_untrained
    from mlsm_plugin.retrieval.phrase_filling import PhraseFiller
    from mlsm_plugin.retrieval.zero_shot import (
        ParametricClassifier,
        RetrievalClassifier,
        check_tokens,
        read_texts,
        read_verbalizer,
    )
    from mlsm_plugin.tokenization.masked_text import MASK
    from mlsm_plugin.tokenization.unknown_tokens import ANOTHER_TOKENIZER, check_known, check_max_unk_rate

    check_positive(args, "max_occurrences")
    check_max_unk_rate(args.max_unk_rate)
    if args.output:
        check_output_file(args.output)
    if args.template.count("{}") != 1 or args.template.count(MASK) != 1:
        raise ValueError(f"--template needs {{}} and {MASK}, once each; got {args.template!r}")
    if args.datastore is None and not args.parametric:
        raise ValueError("--datastore is required unless --parametric is given")
    verbalizer = read_verbalizer(args.verbalizer)
    items = read_texts(args.input, list(verbalizer), header=args.header)
    interface, store = open_model_and_datastore(args)
    check_tokens(interface, items)
    check_known(
        (item.text for item in items), interface.bpe, interface.task.source_dictionary,
        args.max_unk_rate, where=args.input, remedy=ANOTHER_TOKENIZER,
    )  # fmt: skip
    interface.max_unk_rate = 1
    classifier: ParametricClassifier | RetrievalClassifier
    if args.parametric:
        why = why_untrained(interface.cfg)
        if why is not None:
            raise ValueError(f"{why}: --parametric needs a masked LM; pass --datastore instead")
        classifier = ParametricClassifier(interface, verbalizer)
    else:
        classifier = RetrievalClassifier(
            PhraseFiller(interface, store), verbalizer, max_occurrences=args.max_occurrences
        )
    texts = [args.template.replace("{}", item.text.replace(MASK, " ")) for item in items]
    warn_of_cuts(sum(map(classifier.was_cut, texts)), len(texts))
    shares = np.stack([classifier.probabilities(text) for text in Progress(texts, unit="text")])
    predicted = [classifier.labels[index] for index in shares.argmax(axis=1)]
    counts = Counter(predicted)
    print("predicted: " + ", ".join(f"{label} {counts[label]}" for label in classifier.labels))
    if items[0].label is not None:
        correct = sum(label == item.label for label, item in zip(predicted, items, strict=True))
        majority = max(Counter(item.label for item in items).values())
        print(
            f"accuracy {correct / len(items):.4f} ({correct} of {len(items)}; always the most frequent label: "
            f"{majority / len(items):.4f})"
        )
    if args.output:
        with atomic_open(args.output, "w") as file:
            for label, share, item in zip(predicted, shares.max(axis=1), items, strict=True):
                file.write(f"{label}\t{share:.4f}\t{item.text}\n")
    return 0
