#!/usr/bin/env bash
# Rebuilds the shipped weights from nothing: renders the dataset, trains DEIMv2-Atto from random weights in two runs (small
# pictures first, then full-size ones with a falling learning rate), copies the result. Under two hours on two processor
# cores. Interrupt it at any time; the same command goes on.
# usage: scripts/train_tabletop.sh [WORK FOLDER]          (default runs/)
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-runs}
carpus=${CARPUS:-.venv/bin/carpus}
[ -x "$carpus" ] || { echo "train_tabletop: no $carpus; run 'make setup' first" >&2; exit 2; }
common=(--recipe tabletop --variant atto --seed 0 --batch-size 8 --lr 1e-3 --clip-norm 0.1 --num-denoising 30
  --dense-supervision True --zoom-out-prob 0.1 --crop-prob 0.3 --ema-decay 0.998 --final-lr-factor 0.02
  --eval-images 250 --threads 1)

"$carpus" sim dataset "$work/tabletop" --train 4000 --heldout 1000 --seed 0
"$carpus" train --data "$work/tabletop" --out "$work/atto-192" "${common[@]}" --epochs 8 --input-scales 0 0.6 \
  --warmup-iterations 300 --flat-epochs 8 --no-aug-epochs 0 --strong-from 1 --strong-until 8 --mosaic-prob 0.15 \
  --mosaic-until 6 --matcher-change-epoch 8 --ema-warmups 200 --eval-every 2
"$carpus" train --data "$work/tabletop" --out "$work/atto" "${common[@]}" --epochs 4 --input-scales 0 0.8 1 1.0 \
  --init "$work/atto-192/best.pt" --warmup-iterations 50 --flat-epochs 1 --no-aug-epochs 1 --strong-from 0 \
  --strong-until 2 --mosaic-prob 0.0 --mosaic-until 0 --matcher-change-epoch 3 --ema-warmups 100 --eval-every 1
mkdir -p weights docs/images
cp "$work/atto/best.pt" weights/deimv2-atto-tabletop.pt
"$(dirname "$carpus")/python" docs/learning_curve.py "$work/atto-192" "$work/atto"
cat <<TEXT
weights/deimv2-atto-tabletop.pt written; to check it:
  $carpus export weights/deimv2-atto-tabletop.pt --out $work/atto.carpus
  $carpus evaluate $work/atto.carpus $work/tabletop/heldout
TEXT
