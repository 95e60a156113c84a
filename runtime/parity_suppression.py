"""Whether a graph that suppresses its detections itself does so as the runtime would, from the same scores and boxes.

The scores and boxes before suppression are held against the trained module's elsewhere, within limits. From there on
nothing is left to tolerance: the same values must give the same detections in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from carpus.runtime.iospec import DETECTION_OUTPUTS, Postprocess
from carpus.runtime.postprocess import cxcywh_to_xyxy, suppress_queries

__all__ = ["THRESHOLD_CASES", "suppression_differences"]

THRESHOLD_CASES: tuple[tuple[float, float] | None, ...] = (None, (0.001, 0.45), (0.3, 0.7), (0.05, 0.2), (1.0, 0.5))
"""Score and IoU thresholds that images are run with in turn; None is the bundle's own."""

_BOX_PX = 1e-2  # a box is only rescaled, in float32
_IOU_STEP = 2e-6  # an IoU nearer to the threshold than float32 arithmetic can tell may fall on either side


def suppression_differences(
    outputs: Mapping[str, np.ndarray],
    index: int,
    spec: Postprocess,
    model_size: tuple[int, int],
    score_threshold: float,
    iou_threshold: float,
) -> int:
    """Detections of one image that are not what suppression makes of the graph's own scores and boxes.

    Args:
        outputs: the graph's outputs, computed with these thresholds.
        index: the image.
        spec: how to read them.
        model_size: (height, width) of the model's input [px].
        score_threshold: least score.
        iou_threshold: greatest IoU of two detections of one class.
    """
    scores, boxes = outputs[spec.logits][index], outputs[spec.boxes][index]
    count, xyxy, score, class_id = (outputs[name][index] for name in DETECTION_OUTPUTS)
    found = int(count)
    tail = len(score) - found
    if not 0 <= found <= len(score):
        return len(score)
    least = len(score)
    for step in (0.0, -_IOU_STEP, _IOU_STEP):
        iou = min(max(iou_threshold + step, 0.0), 1.0)
        query, expected_class, expected_score = suppress_queries(scores, boxes, model_size, spec, score_threshold, iou)
        shared = min(found, len(query))
        height, width = model_size
        wanted = boxes[query[:shared]].astype(np.float64) * (width, height, width, height)
        wanted[:, 2:] = np.maximum(wanted[:, 2:], 0.0)
        same = np.abs(cxcywh_to_xyxy(wanted) - xyxy[:shared]).max(1, initial=0.0) <= _BOX_PX
        same &= (score[:shared] == expected_score[:shared]) & (class_id[:shared] == expected_class[:shared])
        least = min(least, int((~same).sum()) + abs(found - len(query)))
        if least == 0:
            break
    return least + int(tail > 0 and bool(score[found:].any()))
