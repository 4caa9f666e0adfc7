"""Source of losses over classes; if classes are sharded, the offset of this rank's classes is an argument."""

from __future__ import annotations

from collections.abc import Sequence

from partc.codegen.operands import Operands, arguments


def _first_class(o: Operands) -> str:
    """The number of the first class in this rank's logits, if classes are sharded."""
    index = 1 if o.op.name == "cross_entropy_backward" else 0
    return f"{o.rank} * {o.shape(index)[-1]}"


def pick(o: Operands) -> str:
    offset = (f"offset={_first_class(o)}",) if "axis" in o.attrs else ()
    return f"{o.named('functional.pick')}({', '.join((*o.args, *offset))})"


def smooth_sum(o: Operands) -> str:
    weight = o.args[1:2] if o.args[1:2] != ("None",) else ()
    if weight and "axis" in o.attrs:
        weight = (f"{o.named('comm')}.{o.axis}.take({weight[0]}, dim=0)",)
    return f"{o.named('functional.smooth_sum')}({', '.join((o.args[0], *weight))})"


def cross_entropy_backward(o: Operands) -> str:
    names = ("", "", "", "", "weight=None", "ignore_index=-100", "label_smoothing=0.0")
    parts = [arguments(o.args[: len(names)], names, {})]
    if "axis" in o.attrs:
        parts += [f"offset={_first_class(o)}", f"num_classes={o.whole(1)[-1]}"]
    return f"{o.named('functional.cross_entropy_backward')}({', '.join(parts)})"


def cross_entropy_rows(o: Operands) -> str:
    names = ("", "", "", "weight=None", "ignore_index=-100", "label_smoothing=0.0", "smooth=None", "num_classes=")
    smoothing = o.args[5] != "0.0"
    return (
        f"{o.named('functional.cross_entropy_rows')}({arguments(o.args[:8] if smoothing else o.args[:6], names, {})})"
    )


def linear_cross_entropy(o: Operands) -> str:
    x, weight, bias, labels, class_weight = o.args
    parts = [x, weight, labels, f"chunks={o.attrs['chunks']}"]
    parts += [f"bias={bias}"] if bias != "None" else []
    parts += [f"offset={_first_row(o, 1)}"] if "axis" in o.attrs else []
    if len(o.op.results) > 3:
        parts.append("smooth=True")
        if class_weight != "None":
            here = f"{o.named('comm')}.{o.axis}.take({class_weight}, dim=0)" if "axis" in o.attrs else class_weight
            parts.append(f"class_weight={here}")
    return f"{o.named('functional.linear_cross_entropy')}({', '.join((*parts, *_by_kernels(o)))})"


def linear_cross_entropy_backward(o: Operands) -> str:
    trained = ("bias_trained=True",) if len(o.op.results) > 2 else ()
    return f"{o.named('functional.linear_cross_entropy_backward')}({', '.join((*_of_losses(o), *trained))})"


def linear_cross_entropy_add_grad(gradients: Sequence[str], o: Operands) -> str:
    weight, *bias = gradients
    more = [f"bias_into={name}" for name in bias]
    return f"{o.named('functional.linear_cross_entropy_add_grad')}({', '.join((weight, *_of_losses(o), *more))})"


def _of_losses(o: Operands) -> list[str]:
    grad, x, weight, bias, labels, lse, *rest = o.args
    parts = [grad, x, weight, labels, lse, f"chunks={o.attrs['chunks']}"]
    parts += [f"bias={bias}"] if bias != "None" else []
    names = ("class_weight=None", "ignore_index=-100", "label_smoothing=0.0")
    parts += filter(None, [arguments(tuple(rest), names, {})])
    if "axis" in o.attrs:
        parts += [f"offset={_first_row(o, 2)}", f"num_classes={o.whole(2)[0]}"]
    return [*parts, *_by_kernels(o)]


def _by_kernels(o: Operands) -> list[str]:
    return [f"kernels={o.named('kernels.logits')}"] if "kernels" in o.attrs else []


def _first_row(o: Operands, index: int) -> str:
    """The number of the first class in this rank's rows of a head's weight."""
    return f"{o.rank} * {o.shape(index)[0]}"
