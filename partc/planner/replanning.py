"""A new plan for a package's training: the same model, options, batch and precision, on another cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partc.cluster.files import cluster_of
from partc.compilation.options import as_compile_errors
from partc.compilation.plan import REDUCED
from partc.errors import PartcError
from partc.frontend.origin import BATCH, WEIGHTS
from partc.package.launch import check_trains, read_package
from partc.planner.planning import Planner, Request
from partc.planner.space import Fixed
from partc.runtime.checkpoint.restore import Checkpoint, newest
from partc.runtime.processes.agreement import Together
from partc.runtime.torch_private import lone_store

if TYPE_CHECKING:
    from partc.cluster.cluster import Cluster
    from partc.compilation.plan import ParallelPlan

ONE = ("1",)  # the decision for one microbatch


def checkpoint_to_continue(directory: Path, checkpoint: Path, say: Callable[[str], None]) -> Checkpoint:
    """The newest complete checkpoint of a package's training. Raises PartcError P0503 and P0523 to P0525."""
    plan = read_package(directory)
    with as_compile_errors():
        found = newest(checkpoint, Together(lone_store(), 0, 1), needed=True, say=say)
        assert found is not None
        found.check_fits(plan)
    for name in ("precision", "options"):
        if found.run.get(name) not in (None, plan[name]):
            raise PartcError(
                "P0525",
                f"the checkpoint {found.path} is of another training: its {name} are {found.run[name]!r}, those of "
                f"{directory} are {plan[name]!r}",
                help="name the package that wrote it",
            )
    return found


def request_of(directory: Path, cluster: str | Cluster, checkpoint: Checkpoint | None, **given: Any) -> Request:
    """The request that plans a package's training anew; `given` are further options of the search.

    The optimizer comes from the checkpoint; the form of gradients' sums from the package, and so do CUDA graphs if the
    cluster has GPUs. If each microbatch is a batch of its own, their number stays. Raises PartcError P0503, P0504 and
    the errors of Request.checked.
    """
    plan = read_package(directory)
    check_trains(directory)
    command: Mapping[str, Any] = plan["command"]
    kept: Fixed = {"microbatches": (str(plan["microbatches"]),)} if plan["repeated"] else {}
    kernels = command.get("kernels", "")
    found = cluster_of(cluster) if isinstance(cluster, str) else cluster
    request = Request.checked(
        str(directory / "model.py"),
        found,
        options=plan["options"],
        precision=plan["precision"],
        kernels=kernels if kernels == "inductor" else "auto",
        cuda_graphs=command.get("cuda_graphs", False) and found.device.kind == "gpu",
        optimizer=checkpoint.run["optimizer"] if checkpoint is not None else command.get("optimizer"),
        **{name: command[name] for name in REDUCED if name in command},
        **given,
    )
    if kept and "microbatches" in request.fixed:
        raise PartcError(
            "P0811",
            f"--fix {given['fix']} decides on microbatches, each of which is a batch of its own in {directory}",
            help=f"leave it out: microbatches={plan['microbatches']} stays",
        )
    return replace(request, fixed={**request.fixed, **kept}, kept=kept)


def planner_of(directory: Path, request: Request) -> Planner:
    """The planner of a request for a package's training.

    If the package computes the whole batch at once, and the model couples its examples, so does every plan: with more
    microbatches, each would be a batch of its own, which is another training. Raises PartcError P0503 and P0811.
    """
    planner = Planner(request)
    if read_package(directory)["microbatches"] > 1 or not planner.couples_examples():
        return planner
    if request.fixed.get("microbatches", ONE) != ONE:
        raise PartcError(
            "P0811",
            f"--fix decides on microbatches, but the model couples examples, and {directory} computes the whole batch "
            "at once",
            help="leave it out: microbatches=1 stays",
        )
    kept: Fixed = {"microbatches": ONE}
    return Planner(replace(request, fixed={**request.fixed, **kept}, kept=kept), planner.simulator)


def nodes_of(directory: Path, plan: ParallelPlan, cluster: Cluster) -> int | None:
    """`--nodes` of a replanned package: the ranks of a node, if the gradients of the first one were summed in nodes.

    None if one node has all ranks, or if an axis of the plan fills no whole nodes. Raises PartcError P0503.
    """
    if plan.nodes is not None or read_package(directory)["command"].get("nodes") is None:
        return plan.nodes
    try:
        options = replace(plan, nodes=cluster.devices).compile_options()
    except PartcError:
        return None
    return options.nodes if options.mesh.size > cluster.devices else None


def data_of(directory: Path) -> dict[str, bytes]:
    """The contents of the files that a package's model file reads, by name."""
    found = ((name, directory / name) for name in (WEIGHTS, BATCH))
    return {name: path.read_bytes() for name, path in found if path.is_file()}
