#!/usr/bin/env bash
# Span denoising (T5) on a small scale, from raw text to a model that fills gaps: about ten minutes on two CPU cores.
# Run the same command again to resume a stopped run.
#
#   bash examples/denoising/quick.sh TRAIN.txt VALID.txt OUTPUT_DIR [more fairseq-train flags]
#
# Environment: UPDATES (1500), VOCAB (8000), USER_DIR (mlsm_plugin).
set -euo pipefail
train=$1 valid=$2 output=$3
shift 3
updates=${UPDATES:-1500}

[ -e "$output/tokenizer/dict.txt" ] ||
    mlsm tokenizer --input "$train" --vocab-size "${VOCAB:-8000}" --output "$output/tokenizer"
[ -e "$output/data-bin/train.idx" ] ||
    mlsm binarize --tokenizer "$output/tokenizer" --train "$train" --valid "$valid" --output "$output/data-bin"

fairseq-train "$output/data-bin" --user-dir "${USER_DIR:-mlsm_plugin}" --save-dir "$output/model" \
    --task span_denoising --criterion cross_entropy --tokens-per-sample 128 \
    --arch denoising_small --encoder-layers 3 --encoder-embed-dim 256 --encoder-attention-heads 4 --dropout 0 \
    --batch-size 32 --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0 \
    --autocast auto --lr-scheduler polynomial_decay --lr 1e-3 --warmup-updates $((updates / 10)) --total-num-update "$updates" \
    --max-update "$updates" --log-format simple --log-interval 50 --no-epoch-checkpoints \
    --save-interval-updates 500 --keep-interval-updates 1 "$@"

mlsm infill --checkpoint "$output/model" "This is one of the <extra_id_0> of the year." \
    "He was born in <extra_id_0> and went <extra_id_1> school there."
