#!/usr/bin/env bash
# Rebuilds the shipped weights from nothing: renders the dataset, trains DEIMv2-Atto from random weights by the recipe
# `tabletop`, copies the result. Under two hours on two processor cores. Interrupt it at any time; the same command goes on.
# usage: scripts/train_tabletop.sh [WORK FOLDER]          (default runs/)
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-runs}
carpus=${CARPUS:-.venv/bin/carpus}
[ -x "$carpus" ] || { echo "train_tabletop: no $carpus; run 'make setup' first" >&2; exit 2; }

"$carpus" sim dataset "$work/tabletop" --train 4000 --heldout 1000 --seed 0
"$carpus" train --data "$work/tabletop" --out "$work/atto" --recipe tabletop --variant atto --seed 0 --eval-every 2 \
  --eval-images 250 --threads 1
mkdir -p weights docs/images
cp "$work/atto/best.pt" weights/deimv2-atto-tabletop.pt
"$(dirname "$carpus")/python" docs/learning_curve.py "$work/atto"
cat <<TEXT
weights/deimv2-atto-tabletop.pt written; to check it:
  $carpus export weights/deimv2-atto-tabletop.pt --out $work/atto.carpus
  $carpus evaluate $work/atto.carpus $work/tabletop/heldout
TEXT
