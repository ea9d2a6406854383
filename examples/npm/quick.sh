#!/usr/bin/env bash
# NPM on a small scale, from raw text to phrases retrieved for a mask: trains a masked LM, continues it as NPM, and
# writes the hidden states of the training text to a datastore. About ten minutes on two CPU cores.
# Run the same command again to resume a stopped run.
#
#   bash examples/npm/quick.sh TRAIN.txt VALID.txt OUTPUT_DIR [more fairseq-train flags, for both trainings]
#
# The texts have one sentence per line, in their order in the document, and blank lines between documents.
#
# Environment: MLM_UPDATES (1500), UPDATES (600), VOCAB (8000), USER_DIR (mlsm_plugin).
set -euo pipefail
train=$1 valid=$2 output=$3
shift 3
updates=${UPDATES:-600}
model=(--arch mlsm_roberta_tiny --encoder-layers 4 --max-positions 256 --dropout 0 --attention-dropout 0)

[ -e "$output/tokenizer/dict.txt" ] ||
    mlsm tokenizer --input "$train" --vocab-size "${VOCAB:-8000}" --output "$output/tokenizer"
[ -e "$output/data-bin/train.idx" ] ||
    mlsm binarize --tokenizer "$output/tokenizer" --train "$train" --valid "$valid" --output "$output/data-bin"

mlsm auxiliary "$output/data-bin" --save-dir "$output/mlm" --max-update "${MLM_UPDATES:-1500}" "${model[@]}" \
    --tokens-per-sample 128 --batch-size 32 --lr 2e-3 "$@"

fairseq-train "$output/data-bin" --user-dir "${USER_DIR:-mlsm_plugin}" --save-dir "$output/npm" \
    --task nonparametric_masked_lm --criterion span_contrastive "${model[@]}" \
    --finetune-from-model "$output/mlm/checkpoint_last.pt" \
    --sample-break-mode complete --tokens-per-sample 128 \
    --group-size 16 --batch-size 2 --required-batch-size-multiple 1 \
    --optimizer adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-6 --weight-decay 0.01 --clip-norm 1.0 \
    --autocast auto --lr-scheduler polynomial_decay --lr 5e-4 --warmup-updates $((updates / 10)) --total-num-update "$updates" \
    --max-update "$updates" --log-format simple --log-interval 50 --no-epoch-checkpoints \
    --save-interval-updates 200 --keep-interval-updates 1 "$@"

mlsm npm datastore "$output/data-bin" --checkpoint "$output/npm/checkpoint_last.pt" \
    --output "$output/datastore" --tokens-per-sample 128
mlsm npm fill --checkpoint "$output/npm/checkpoint_last.pt" --datastore "$output/datastore" --topk 3 --contexts 1 \
    "This is one of the best <mask> of the year." "He was born in <mask> and went to school there."
