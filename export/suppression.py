"""Non-maximum suppression as the last part of an exported graph, with the thresholds as inputs.

Only operators of ONNX's default domain, in a form that gives the same detections, in the same order, on every runtime.
Runtimes differ in two ways that would show otherwise: OpenVINO's TopK orders equal values as it likes, and its
NonMaxSuppression drops a box whose IoU equals the threshold, where ONNX says exceeds. So TopK is asked for values and
for keys that are all different, never for the order of scores, and the threshold enters as the next greater float32.
The plain form of the same computation is ``carpus.runtime.postprocess.suppress_queries``.
"""

from __future__ import annotations

import onnx

from carpus.runtime.errors import BackendError
from carpus.runtime.iospec import DETECTION_OUTPUTS, THRESHOLD_INPUTS, Postprocess

__all__ = ["with_suppression"]

_PREFIX = "suppression."

# The text form of ONNX. Constants that 16 bits cannot hold are integers, which no artefact rounds, cast where needed.
_BOXES = """
  {scores} = Sigmoid(logits)
  scaled = Mul(boxes, size)
  centre, extent = Split<axis=2, num_outputs=2>(scaled)
  positive = Max(extent, zero)
  half_extent = Mul(positive, half)
  near = Sub(centre, half_extent)
  far = Add(centre, half_extent)
  xyxy = Concat<axis=2>(near, far)
"""
# A relative step of 3 / 2^25 rounds to the next float32, for 0 too thanks to a floor of 6e-29. At 1, where nothing is
# suppressed, boxes lose their area instead, as no runtime takes a threshold above 1.
_THRESHOLD = """
  three_float = Cast<to=1>(three)
  divisor = Cast<to=1>(two_to_25)
  step = Div(three_float, divisor)
  iou_step = Mul({iou}, step)
  iou_next = Add({iou}, iou_step)
  step_2 = Mul(step, step)
  step_4 = Mul(step_2, step_2)
  iou_positive = Max(iou_next, step_4)
  iou_used = Min(iou_positive, one_float)
  all_stay = GreaterOrEqual({iou}, one_float)
  overlap_boxes = Where(all_stay, zero, xyxy)
"""
# The first of equally good classes; ArgMax would be a TopK.
_BEST_CLASS = """
  best = ReduceMax<keepdims=1>({scores}, two)
  is_best = Equal({scores}, best)
  best_or_more = Where(is_best, class_ids, num_classes)
  best_class = ReduceMin<keepdims=1>(best_or_more, two)
  candidates = Squeeze(best, two)
"""
_EVERY_CLASS = """
  candidates = Reshape({scores}, pairs_shape)
"""
# Exactly `count` of the greatest values a row, equal ones by index.
_GREATEST = """
  {p}top, {p}unused = TopK<axis=1>({values}, {p}count)
  {p}least = ReduceMin<keepdims=1>({p}top, one)
  {p}above = Greater({values}, {p}least)
  {p}above_int = Cast<to=7>({p}above)
  {p}above_count = ReduceSum<keepdims=1>({p}above_int, one)
  {p}tied = Equal({values}, {p}least)
  {p}tied_int = Cast<to=7>({p}tied)
  {p}tied_rank = CumSum({p}tied_int, one_scalar)
  {p}room = Sub({p}count, {p}above_count)
  {p}fits = LessOrEqual({p}tied_rank, {p}room)
  {p}tied_first = And({p}tied, {p}fits)
  {p}chosen = Or({p}above, {p}tied_first)
"""
_CUT = """
  cut_scores = Where(cut_chosen, candidates, zero)
"""
_SCORES_OF_BEST_CLASS = """
  columns = Unsqueeze({values}, two)
  of_best_class = Equal(class_ids, best_class)
  class_scores = Where(of_best_class, columns, zero)
"""
_SCORES_OF_EVERY_CLASS = """
  class_scores = Reshape({values}, scores_shape)
"""
_SUPPRESS = """
  above_threshold = Greater(class_scores, {score})
  counting = Where(above_threshold, class_scores, zero)
  by_class = Transpose<perm=[0, 2, 1]>(counting)
  selected = NonMaxSuppression(overlap_boxes, by_class, kept_count, iou_used, {score})
  selected_index = Gather<axis=1>(selected, index_columns)
  selected_scores = GatherND({grid}, selected_index)
  grid_shape = Shape({grid})
  blank = ConstantOfShape(grid_shape)
  marked = ScatterND(blank, selected_index, selected_scores)
  remaining = Reshape(marked, pairs_shape)
"""
_ORDER = """
  position = Range(zero_int, num_pairs, one_scalar)
  key_int = Sub(num_pairs, position)
  key = Cast<to=1>(key_int)
  key_of_chosen = Where(kept_chosen, key, zero)
  kept_keys, by_index = TopK<axis=1>(key_of_chosen, kept_count)
  values = GatherElements<axis=1>(remaining, by_index)
  mine = Unsqueeze(values, two)
  others = Unsqueeze(values, one)
  greater = Greater(others, mine)
  equal = Equal(others, mine)
  slot = Range(zero_int, kept_scalar, one_scalar)
  slot_row = Unsqueeze(slot, zero_axis)
  slot_column = Unsqueeze(slot, one)
  earlier = Less(slot_row, slot_column)
  equal_earlier = And(equal, earlier)
  before = Or(greater, equal_earlier)
  before_int = Cast<to=7>(before)
  rank = ReduceSum<keepdims=0>(before_int, two)
  order = ScatterElements<axis=1>(by_index, rank, by_index)
  {found_scores} = GatherElements<axis=1>(remaining, order)
  filled = Greater({found_scores}, zero)
  filled_int = Cast<to=7>(filled)
  {found_count} = ReduceSum<keepdims=0>(filled_int, one)
"""
_LABEL_OF_BEST_CLASS = """
  row = Identity(order)
  label_table = Squeeze(best_class, two)
  label = GatherElements<axis=1>(label_table, order)
"""
_LABEL_OF_EVERY_CLASS = """
  row = Div(order, num_classes)
  row_start = Mul(row, num_classes)
  label = Sub(order, row_start)
"""
_FOUND = """
  {found_classes} = Where(filled, label, minus_one)
  row_index = Unsqueeze(row, two)
  found = GatherND<batch_dims=1>(xyxy, row_index)
  filled_column = Unsqueeze(filled, two)
  {found_boxes} = Where(filled_column, found, zero)
"""


def with_suppression(model: onnx.ModelProto, input_size: tuple[int, int], spec: Postprocess) -> onnx.ModelProto:
    """A detector's graph with suppression behind it.

    Args:
        model: one input (N, 3, H, W); outputs logits (N, A, C) and boxes (N, A, 4) cxcywh in 0..1 of the input.
        input_size: (height, width) of the input [px].
        spec: of kind "nms" and ``in_graph``; names the outputs that hold scores and boxes before suppression.

    Returns:
        A model with the further inputs ``THRESHOLD_INPUTS``, each (1,) float32, and the outputs ``DETECTION_OUTPUTS``
        before the scores and boxes of all A positions.

    Raises:
        BackendError: the model does not have these outputs.
    """
    logits, boxes = _outputs(model)
    positions, classes = (_size(logits, axis) for axis in (1, 2))
    opset = next(entry.version for entry in model.opset_import if entry.domain == "")
    body = _graph_text(positions, classes, input_size, spec)
    tail = onnx.parser.parse_model(f'<ir_version: {model.ir_version}, opset_import: ["" : {opset}]>\n{body}')
    tail = onnx.compose.add_prefix(tail, _PREFIX, rename_inputs=False, rename_outputs=False)
    merged = onnx.compose.merge_models(model, tail, io_map=[(logits.name, "logits"), (boxes.name, "boxes")])
    merged.graph.output.append(boxes)
    merged.graph.name = model.graph.name
    merged.producer_name, merged.producer_version = model.producer_name, model.producer_version
    onnx.checker.check_model(merged, full_check=True)
    return merged


def _outputs(model: onnx.ModelProto) -> tuple[onnx.ValueInfoProto, onnx.ValueInfoProto]:
    outputs = list(model.graph.output)
    if len(outputs) != 2 or any(len(value.type.tensor_type.shape.dim) != 3 for value in outputs):
        raise BackendError(
            "suppression needs a graph with the outputs logits (N, A, C) and boxes (N, A, 4), it has "
            f"{[value.name for value in outputs]}"
        )
    return outputs[0], outputs[1]


def _size(value: onnx.ValueInfoProto, axis: int) -> int:
    size = int(value.type.tensor_type.shape.dim[axis].dim_value)
    if size < 1:
        raise BackendError(f"suppression needs fixed sizes, but axis {axis} of {value.name!r} is open")
    return size


def _graph_text(positions: int, classes: int, input_size: tuple[int, int], spec: Postprocess) -> str:
    pairs = positions * classes if spec.multi_label else positions
    kept = min(spec.top_k, pairs)
    cut = pairs > spec.max_candidates
    score, iou = THRESHOLD_INPUTS
    count, boxes, scores, labels = DETECTION_OUTPUTS
    values = "cut_scores" if cut else "candidates"
    parts = [
        _BOXES,
        _THRESHOLD,
        _EVERY_CLASS if spec.multi_label else _BEST_CLASS,
        *((_GREATEST.format(p="cut_", values="candidates"), _CUT) if cut else ()),
        _SCORES_OF_EVERY_CLASS if spec.multi_label else _SCORES_OF_BEST_CLASS,
        _SUPPRESS,
        _GREATEST.format(p="kept_", values="remaining"),
        _ORDER,
        _LABEL_OF_EVERY_CLASS if spec.multi_label else _LABEL_OF_BEST_CLASS,
        _FOUND,
    ]
    nodes = "".join(parts).format(
        scores=spec.logits,
        score=score,
        iou=iou,
        values=values,
        grid="class_scores" if spec.multi_label else values,
        found_count=count,
        found_boxes=boxes,
        found_scores=scores,
        found_classes=labels,
    )
    height, width = input_size
    constants = {
        "float zero": "0",
        "float half": "0.5",
        "float[1] one_float": "1",
        "float[4] size": f"{width}, {height}, {width}, {height}",
        "int64 three": "3",
        "int64 two_to_25": str(2**25),
        "int64 zero_int": "0",
        "int64 minus_one": "-1",
        "int64 one_scalar": "1",
        "int64[1] zero_axis": "0",
        "int64[1] one": "1",
        "int64[1] two": "2",
        "int64[1] kept_count": str(kept),
        "int64 kept_scalar": str(kept),
        "int64 num_pairs": str(pairs),
        "int64[2] pairs_shape": f"-1, {pairs}",
        "int64[3] scores_shape": f"-1, {positions}, {classes}",
        "int64 num_classes": str(classes),
        f"int64[{classes}] class_ids": ", ".join(map(str, range(classes))),
        f"int64[{3 if spec.multi_label else 2}] index_columns": "0, 2, 1" if spec.multi_label else "0, 2",
        "int64[1] cut_count": str(spec.max_candidates),
    }
    used = {name: value for name, value in constants.items() if _is_used(name.split()[1], nodes)}
    initializers = ", ".join(f"{name} = {{{value}}}" for name, value in used.items())
    return f"""detector (
      float[N, {positions}, {classes}] logits, float[N, {positions}, 4] boxes, float[1] {score}, float[1] {iou}
    ) => (
      int64[N] {count}, float[N, {kept}, 4] {boxes}, float[N, {kept}] {scores}, int64[N, {kept}] {labels},
      float[N, {positions}, {classes}] {spec.logits}
    ) <{initializers}> {{{nodes}}}"""


def _is_used(name: str, nodes: str) -> bool:
    return any(f"{before}{name}{after}" in nodes for before in "( " for after in ",)")
