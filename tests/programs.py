"""Programs for tests, written out by hand."""

from __future__ import annotations

from partc.ir.layout import Layout
from partc.ir.mesh import Mesh
from partc.ir.parser import parse
from partc.ir.program import Call, Graph, Op, Parameter, Program, Ref, Region, TensorType, Value


def value(name: str, *shape: int, layout: str = "", dtype: str = "f32") -> Value:
    """A value with a shape, or with a layout in its own notation."""
    found = Layout.parse(layout) if layout else Layout.replicated(shape)
    return Value(name=name, type=TensorType(dtype=dtype, layout=found))  # type: ignore[arg-type]


def op(name: str, *args: object, makes: Value, **attrs: object) -> Op:
    """An operation; strings among its arguments are values."""
    given = tuple(Ref(arg) if isinstance(arg, str) else arg for arg in args)
    return Op(name=name, args=given, attrs=tuple(attrs.items()), results=(makes,))  # type: ignore[arg-type]


def tiny(mesh: str = "1") -> Program:
    """One region `main`: y = linear(x, w), loss = sum(y)."""
    x, w, y, loss = value("x", 6, 5), value("w", 7, 5), value("y", 6, 7), value("loss")
    graph = Graph(
        inputs=(x,),
        ops=(op("linear", "x", "w", makes=y), op("sum", "y", (0, 1), False, makes=loss)),
        outputs=("loss",),
    )
    return Program(
        name="tiny",
        mesh=Mesh.parse(mesh),
        inputs=("x",),
        values=(x, loss),
        parameters=(Parameter(name="w", type=w.type, trainable=True),),
        regions=(Region(name="main", params=(w,), forward=graph),),
        calls=(Call(name="main", region="main", params=("w",), args=("x",), results=("loss",)),),
    )


def fused_graph(body: str) -> Program:
    """A program of one region, whose lines below its name are given; its inputs and loss are found there."""
    forward = body.partition("backward:")[0].splitlines()
    params = [line.split()[1].rstrip(":") for line in forward if line.strip().startswith("param ")]
    inputs = [line.strip().removeprefix("input ") for line in forward if line.strip().startswith("input ")]
    names = [line.partition(":")[0] for line in inputs]
    held = "".join(line.strip().replace("param", "parameter") + "\n" for line in forward if "param " in line)
    return parse(
        "program one mesh tp=2 microbatches 1 loss loss\n"
        + "".join(f"input {name}\n" for name in names)
        + "".join(f"value {line}\n" for line in inputs)
        + "value loss: f32[]\n"
        + held
        + f"call main = main({', '.join(names)}; {', '.join(params)}) -> loss\n"
        + f"region main phase microbatch:\n{body}"
    )
