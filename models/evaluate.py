"""COCO average precision of anything that detects.

`evaluate_coco` takes a function from images to `Detections`: a torch model through `ModelDetector`, or a runtime
`Detector`'s ``detect_batch``. Both go through the project's one preprocessing and one postprocessing. The metric itself
is faster-coco-eval's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from faster_coco_eval import COCO, COCOeval_faster
from numpy.typing import NDArray

from carpus.models.data.coco import CocoDataset
from carpus.models.data.store import decode
from carpus.runtime.detections import Detections
from carpus.runtime.errors import DataError

__all__ = ["DetectionMetrics", "evaluate_coco", "evaluate_detections"]

logger = logging.getLogger(__name__)

Predict = Callable[[Sequence[NDArray[np.uint8]]], Sequence[Detections]]


@dataclass(frozen=True)
class DetectionMetrics:
    """COCO detection metrics, each in 0..1; NaN where the dataset has no object to judge it by.

    Attributes:
        ap: average precision, mean over IoU 0.50:0.05:0.95 and classes.
        ap50, ap75: at one IoU.
        ap_small, ap_medium, ap_large: of objects below 32^2, up to 96^2, and above [px^2].
        ar100: average recall with 100 detections an image.
        per_class: ``ap`` of every class by name.
        images: number of images evaluated.
    """

    ap: float
    ap50: float
    ap75: float
    ap_small: float
    ap_medium: float
    ap_large: float
    ar100: float
    per_class: dict[str, float]
    images: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON: NaN becomes None."""
        values = asdict(self)
        values["per_class"] = {name: _json(value) for name, value in self.per_class.items()}
        return {name: _json(value) if isinstance(value, float) else value for name, value in values.items()}


def evaluate_coco(
    predict: Predict,
    dataset: CocoDataset,
    *,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> DetectionMetrics:
    """Runs a detector over a dataset and scores it.

    Args:
        predict: images (H, W, 3) uint8 RGB, each of its own size -> one `Detections` an image, in order. Use a score
            threshold of 0: a threshold cuts the precision-recall curve.
        dataset: images and ground truth; class ids of the detections are its classes' positions.
        batch_size: images handed over at once.
        progress: called with (images done, images in all).

    Raises:
        DataError: an image is unreadable, or the detector's answer does not fit (see `evaluate_detections`).
    """
    found: list[Detections] = []
    for images in _batches(dataset, batch_size):
        answer = predict(images)
        if len(answer) != len(images):
            raise DataError(f"The detector gave {len(answer)} results for {len(images)} images; expected one each.")
        found.extend(answer)
        if progress is not None:
            progress(len(found), len(dataset))
    return evaluate_detections(dataset, found)


def evaluate_detections(dataset: CocoDataset, detections: Iterable[Detections]) -> DetectionMetrics:
    """Scores detections against ground truth.

    Detections on crowd regions count neither way; at most the 100 best an image count.

    Args:
        dataset: the ground truth.
        detections: one for every image, in the dataset's order.

    Raises:
        DataError: another number of images, or a class id that the dataset does not have.
    """
    rows: list[NDArray[np.float64]] = []
    count = 0
    for count, found in enumerate(detections, start=1):
        if count <= len(dataset):
            rows.append(_result_rows(count, found, len(dataset.categories)))
    if count != len(dataset):
        raise DataError(
            f"{count} detection results for {len(dataset)} images of {dataset.annotations}; expected one each."
        )
    truth = COCO(_ground_truth(dataset))
    results = truth.loadRes(np.concatenate(rows) if any(len(r) for r in rows) else [])
    evaluation = COCOeval_faster(truth, results, iouType="bbox", print_function=logger.debug)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    stats = [float(value) if value > -1 else math.nan for value in evaluation.stats]
    precision = np.asarray(evaluation.eval["precision"])[
        :, :, :, 0, -1
    ]  # IoU, recall, class; all areas, 100 detections
    per_class = {}
    for index, name in enumerate(dataset.categories.names):
        values = precision[:, :, index]
        values = values[values > -1]
        per_class[name] = float(values.mean()) if values.size else math.nan
    return DetectionMetrics(
        ap=stats[0],
        ap50=stats[1],
        ap75=stats[2],
        ap_small=stats[3],
        ap_medium=stats[4],
        ap_large=stats[5],
        ar100=stats[8],
        per_class=per_class,
        images=len(dataset),
    )


def _result_rows(image_id: int, found: Detections, num_classes: int) -> NDArray[np.float64]:
    """(N, 7): image id, x, y, width, height, score, category id."""
    if len(found) and int(found.class_id.max()) >= num_classes:
        raise DataError(
            f"Image {image_id} has a detection of class {int(found.class_id.max())}, but the dataset has {num_classes} "
            "classes; evaluate on the dataset of the model's classes."
        )
    rows = np.empty((len(found), 7), dtype=np.float64)
    rows[:, 0] = image_id
    rows[:, 1:5] = found.xyxy
    rows[:, 3:5] -= rows[:, 1:3]
    rows[:, 5] = found.score
    rows[:, 6] = found.class_id + 1
    return rows


def _ground_truth(dataset: CocoDataset) -> dict[str, Any]:
    """The dataset as the evaluation reads it: image, category and annotation ids counted from 1."""
    annotations: list[dict[str, Any]] = []
    for image_id, image in enumerate(dataset, start=1):
        for box, label, crowd, area in zip(image.boxes.tolist(), image.labels, image.crowd, image.area, strict=True):
            x1, y1, x2, y2 = box
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image_id,
                    "category_id": int(label) + 1,
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": float(area),
                    "iscrowd": int(crowd),
                }
            )
    return {
        "images": [
            {"id": index, "height": image.height, "width": image.width} for index, image in enumerate(dataset, start=1)
        ],
        "categories": [{"id": index, "name": name} for index, name in enumerate(dataset.categories.names, start=1)],
        "annotations": annotations,
    }


def _batches(dataset: CocoDataset, batch_size: int) -> Iterator[list[NDArray[np.uint8]]]:
    """Decoded images, the next batch being decoded while the present one is in use."""
    groups = [dataset.images[start : start + batch_size] for start in range(0, len(dataset), batch_size)]
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(lambda group: [decode(image) for image in group], groups[0])
        for following in [*groups[1:], None]:
            images = ahead.result()
            if following is not None:
                ahead = pool.submit(lambda group: [decode(image) for image in group], following)
            yield images


def _json(value: float) -> float | None:
    return None if math.isnan(value) else value
