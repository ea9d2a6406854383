#!/usr/bin/env bash
# TACO on a small scale, from raw text to a model that fills masks: about five minutes on two CPU cores. Run the same
# command again to resume a stopped run.
#
#   bash examples/taco/quick.sh TRAIN.txt VALID.txt OUTPUT_DIR [more fairseq-train flags]
#
# The texts have one sentence per line and blank lines between documents. With --contrastive-weight 0 the model trains
# on masked LM alone, and the contrastive loss is only logged.
#
# Environment: UPDATES (600), VOCAB (8000), USER_DIR (mlsm_plugin).
set -euo pipefail
train=$1 valid=$2 output=$3
shift 3
updates=${UPDATES:-600}

[ -e "$output/tokenizer/dict.txt" ] ||
    mlsm tokenizer --input "$train" --vocab-size "${VOCAB:-8000}" --output "$output/tokenizer"
[ -e "$output/data-bin/train.idx" ] ||
    mlsm binarize --tokenizer "$output/tokenizer" --train "$train" --valid "$valid" --output "$output/data-bin"

fairseq-train "$output/data-bin" --user-dir "${USER_DIR:-mlsm_plugin}" --save-dir "$output/model" \
    --task taco --criterion token_contrastive \
    --arch taco_small --encoder-layers 2 --encoder-embed-dim 128 --encoder-ffn-embed-dim 512 \
    --encoder-attention-heads 2 --sample-break-mode complete --tokens-per-sample 128 \
    --batch-size 32 --required-batch-size-multiple 1 \
    --optimizer adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-6 --weight-decay 0.01 --clip-norm 1.0 \
    --autocast auto --lr-scheduler polynomial_decay --lr 2e-3 --warmup-updates $((updates / 10)) --total-num-update "$updates" \
    --max-update "$updates" --log-format simple --log-interval 50 --no-epoch-checkpoints \
    --save-interval-updates 200 --keep-interval-updates 1 "$@"

python - "$output/model" <<'END'
import sys

from mlsm_plugin.hub import from_pretrained

model = from_pretrained(sys.argv[1])
for text in ("This is one of the best <mask> of the year.", "He was the <mask> of the United States."):
    print(text, *(f"{word.strip()} {score:.2f}" for _, score, word in model.fill_mask(text, topk=5)), sep="  ")
END
