#!/usr/bin/env bash
# Full fine-tuning: every weight trains, kept in fp32 with AdamW's two moments, 16 bytes a parameter beside activations.
#   runs/full.sh MODEL DATA OUTPUT_DIR
set -euo pipefail
cd "$(dirname "$0")/.."
MODEL=${1:-HuggingFaceTB/SmolLM2-135M-Instruct}
DATA=${2:-examples/completion.jsonl}
OUT=${3:-outputs/full}

python train.py \
  --model_name "$MODEL" --train_type full \
  --dataset "$DATA" \
  --num_epochs 2 --batch_size 4 --lr 2e-5 --wd 0.01 --warmup_ratio 0.1 \
  --save_every 100 --keep_last 1 \
  --output_dir "$OUT" --resume auto
python generate.py --checkpoint "$OUT" --prompt "Question: What is 4 plus 3? Answer:" --raw --max_new_tokens 16
