#!/usr/bin/env bash
# MLSM pre-training as published (Berend, ACL Findings 2023). README.md gives each number with its source. Phase 1 takes
# 90 % of the updates, phase 2 the rest, with longer samples. Run the same command again to resume a stopped run.
#
#   bash examples/mlsm/pretrain.sh DATA_BIN SAVE_DIR [more fairseq-train flags, for both phases]
#
# Environment: UPDATES (300000), BATCH (1024; samples of an update, all GPUs together), MAX_SENTENCES (64; samples
# that a GPU computes at once, in phase 1), GPUS (1; also 1 on the CPU), USER_DIR (mlsm_plugin).
set -euo pipefail
data=$1 save=$2
shift 2
updates=${UPDATES:-300000} batch=${BATCH:-1024} sentences=${MAX_SENTENCES:-64} gpus=${GPUS:-1}
long=$((sentences / 4 > 0 ? sentences / 4 : 1))

train() { # tokens per sample, samples at once, last update, save dir, further flags
    local tokens=$1 at_once=$2 last=$3 dir=$4
    shift 4
    fairseq-train "$data" --user-dir "${USER_DIR:-mlsm_plugin}" --save-dir "$dir" \
        --task masked_latent_semantic --criterion latent_semantic_kl \
        --arch mlsm_roberta_medium --max-positions 512 --autocast auto \
        --sample-break-mode complete --tokens-per-sample "$tokens" \
        --batch-size "$at_once" --update-freq $((batch / (at_once * gpus) > 0 ? batch / (at_once * gpus) : 1)) \
        --optimizer adam --adam-betas '(0.9, 0.999)' --adam-eps 1e-8 --weight-decay 0.01 --clip-norm 1.0 \
        --lr-scheduler polynomial_decay --lr 1e-4 --warmup-updates $((updates / 100)) \
        --total-num-update "$updates" --max-update "$last" \
        --log-format simple --log-interval 100 --no-epoch-checkpoints \
        --save-interval-updates 5000 --keep-interval-updates 1 "$@"
}

done_marker="$save/phase1/finished"
if [ ! -e "$done_marker" ]; then
    train 128 "$sentences" $((updates * 9 / 10)) "$save/phase1" "$@"
    touch "$done_marker"
fi
restore=()
if [ ! -e "$save/phase2/checkpoint_last.pt" ]; then
    # keep the optimizer's state; start a new epoch, since the samples are now longer
    restore=(--restore-file "$save/phase1/checkpoint_last.pt" --reset-dataloader --reset-meters)
fi
train 512 "$long" "$updates" "$save/phase2" "${restore[@]}" "$@"
