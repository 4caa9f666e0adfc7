"""The options and the order of NCCL groups, on a stand-in for torch's groups."""

from __future__ import annotations

import datetime
import json
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import partc
from partc.package.launch import torchrun_command
from partc.runtime import torch_private
from partc.runtime.clock import Clock
from partc.runtime.comm import comm as communication
from partc.runtime.comm import distributed
from partc.runtime.comm.comm import Pending
from partc.runtime.comm.distributed import LINK_BLOCKS, DistributedComm
from partc.runtime.errors import UsageError
from partc.runtime.layout import parse_mesh
from partc.runtime.place import Place
from partc.runtime.processes import watchdog
from partc.runtime.processes.agreement import Together
from partc.runtime.processes.devices import own_device
from partc.runtime.processes.rendezvous import LauncherVariables, WatchedStore
from partc.runtime.processes.signals import Caught
from partc.runtime.torch_private import lone_store, nccl_settings
from partc.runtime.train import train
from tests.durable import imported_from
from tests.durable import train as run_train
from tests.zoo import EXAMPLES

CUDA = torch.device("cuda", 0)


class Meetings:
    """Where the ranks of a group wait for each other; after some seconds nobody will come any more."""

    def __init__(self) -> None:
        self._places: dict[str, threading.Barrier] = {}
        self._lock = threading.Lock()

    def meet(self, place: str, size: int) -> None:
        with self._lock:
            barrier = self._places.setdefault(place, threading.Barrier(size))
        barrier.wait(timeout=20)


class Options:
    def __init__(self) -> None:
        self.config = type("Config", (), {"max_ctas": None})()
        self._timeout: datetime.timedelta | None = None


class Work:
    def wait(self) -> None: ...


class Group:
    """In the place of `ProcessGroupNCCL`. As there, ranks wait for each other while they connect and shut down."""

    Options = Options
    meetings = Meetings()
    said: dict[threading.Thread, list[str]]  # by thread: one for each rank
    asynchronous: list[bool]
    made: list[Group]

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.rank, self.size, self.options = rank, size, options
        self.name = store.prefix
        Group.made.append(self)

    def _say(self, what: str) -> None:
        Group.said.setdefault(threading.current_thread(), []).append(f"{what} {self.name}")

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert device == CUDA
        self.meetings.meet(f"connect {self.name}", self.size)
        self._say("connect")

    def allreduce(self, tensors: list[Tensor], options: Any) -> Work | None:
        return self._collective("all_reduce", options)

    def _allgather_base(self, whole: Tensor, part: Tensor, options: Any) -> Work | None:
        whole.view(self.size, -1).copy_(part)
        return self._collective("all_gather", options)

    def _reduce_scatter_base(self, part: Tensor, whole: Tensor, options: Any) -> Work | None:
        return self._collective("reduce_scatter", options)

    def alltoall_base(self, into: Tensor, x: Tensor, _: Any, __: Any, options: Any) -> Work | None:
        into.copy_(x)
        return self._collective("all_to_all", options)

    def _collective(self, name: str, options: Any) -> Work | None:
        self._say(name)
        Group.asynchronous.append(options.asyncOp)
        return Work() if options.asyncOp else None

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Work:
        assert (self.rank, target) == (0, 1)
        self._say("send")
        return Work()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        assert (self.rank, source) == (1, 0)
        self._say("recv")
        return Work()

    def shutdown(self) -> None:
        self.meetings.meet(f"shutdown {self.name}", self.size)
        self._say("shutdown")

    def abort(self) -> None:
        self._say("abort")


class Prefix:
    def __init__(self, prefix: str, store: Any) -> None:
        self.prefix = prefix


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[Group]:
    """From now on groups are the stand-in's, and what is made on a GPU lies on the CPU."""
    Group.said, Group.asynchronous, Group.made, Group.meetings = {}, [], [], Meetings()
    monkeypatch.setattr(torch_private.dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(distributed, "PrefixStore", Prefix)
    monkeypatch.setattr(distributed, "finish", lambda device: Group.said[threading.current_thread()].append("finish"))
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "NCCL_RUNTIME_CONNECT"):
        monkeypatch.delenv(name, raising=False)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **kind: zeros(*size, **kind))
    return Group


def connected(place: Place, size: int) -> DistributedComm:
    return DistributedComm(
        rank=place.rank,
        coordinate=place.coordinate,
        groups=place.groups,
        links=place.links,
        stages=place.stages,
        world_size=size,
        store=lone_store(),
        device=CUDA,
        timeout=datetime.timedelta(seconds=10),
    )


def on_all_ranks(package: Path, size: int, work: Any) -> list[list[str]]:
    """The result of `work` in each rank's thread, by rank; failures are raised here."""
    failures: list[BaseException] = []
    said: list[list[str]] = [[] for _ in range(size)]

    def run(rank: int, place: Place) -> None:
        try:
            work(connected(place, size))
            said[rank] = Group.said[threading.current_thread()]
        except BaseException as error:
            failures.append(error)

    sizes = parse_mesh(json.loads((package / "plan.json").read_text())["mesh"])
    with imported_from(package):
        places = [Place.of(rank, sizes) for rank in range(size)]
    threads = [threading.Thread(target=run, args=(rank, place)) for rank, place in enumerate(places)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return said


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nccl") / "build"
    partc.compile(EXAMPLES / "gpt.py", mesh="2x2x2", microbatches=4, schedule="interleaved", virtual_stages=2).write(
        path
    )
    return path


def test_every_group_connects_and_has_its_first_operation_before_any_step(
    nccl: type[Group], package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = on_all_ranks(package, 8, lambda comm: None)
    operations: Counter[str] = Counter()
    for each in said:
        assert len(each) % 3 == 0 and each
        groups = []
        for connect, operation, end in zip(each[::3], each[1::3], each[2::3], strict=True):
            kind, group = operation.split(" ", 1)
            assert connect == f"connect {group}" and end == "finish", "one after the other, each done"
            assert kind in (("send", "recv") if group.startswith("link") else ("all_reduce",))
            operations[operation] += 1
            groups.append((tuple(map(int, group.rpartition(":")[2].split("-"))), group.rpartition(":")[0]))
        assert groups == sorted(groups)
    assert all(
        operations[f"send {group}"] == 1 for group in {each.split(" ", 1)[1] for each in operations if "recv" in each}
    )
    for group in nccl.made:
        assert group.options.config.max_ctas == (LINK_BLOCKS if group.name.startswith("link") else None)
        assert group.options._timeout == datetime.timedelta(seconds=10)


def test_groups_shut_down_in_one_order_and_abort_whatever_is_left(nccl: type[Group], package: Path) -> None:
    def ended(comm: DistributedComm) -> None:
        Group.said[threading.current_thread()].clear()
        comm.disconnect()
        comm.abort()

    for each in on_all_ranks(package, 8, ended):
        assert each and all(line.startswith("shutdown ") for line in each), "what is shut down is not aborted"

    def failed(comm: DistributedComm) -> None:
        Group.said[threading.current_thread()].clear()
        comm.abort()

    for each in on_all_ranks(package, 8, failed):
        assert each and all(line.startswith("abort ") for line in each)


def test_collectives_waited_for_at_once_run_in_the_callers_stream(
    nccl: type[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    ticks = iter(range(1000))
    monkeypatch.setattr("partc.runtime.clock.time.monotonic_ns", lambda: next(ticks))
    axis = distributed.NcclAxis(Group(Prefix("tp:0-1", None), 0, 2, Options()), 0, 2)
    axis.name, axis.clock = "tp", clock
    clock.start(torch.device("cpu"))
    x = torch.ones(4, 4)
    for call in ("all_reduce", "all_reduce_", "all_gather", "reduce_scatter", "all_to_all", "reduce_gradients"):
        how: dict[str, dict[str, int]] = {
            "all_gather": {"dim": 0}, "reduce_scatter": {"dim": 0}, "all_to_all": {"split_dim": 0, "concat_dim": 1}
        }  # fmt: skip
        operand = [x] if call == "reduce_gradients" else x
        getattr(axis, call)(operand, **how.get(call, {}))
        assert nccl.asynchronous.pop() is False and not nccl.asynchronous, call
        if call != "reduce_gradients":
            going = getattr(axis, f"start_{call}")(x, **how.get(call, {}))
            assert nccl.asynchronous.pop() is True and isinstance(going, Pending), call
            going.wait()
    waits = [each for each in clock.stop() if each.kind == "collective"]
    assert len(waits) == 11
    # Of what is waited for at once all is a wait, from before it starts: on a GPU the stream itself does it.
    assert all(each.posted == each.start for each in waits[::2])
    assert all(each.posted < each.start for each in waits[1::2])


def test_tensors_of_a_unit_travel_in_one_launch_without_copies() -> None:
    said: list[str] = []

    class Many:
        def _start_coalescing(self) -> None:
            said.append("start")

        def _end_coalescing(self) -> Work:
            said.append("end")
            return Work()

        def _allgather_base(self, whole: Tensor, part: Tensor, options: Any) -> None:
            said.append(f"gather {tuple(part.shape)} {part.data_ptr() == parts[len(said) - 1].data_ptr()}")
            whole.copy_(torch.cat([part, part + 1]))

        def _reduce_scatter_base(self, part: Tensor, whole: Tensor, options: Any) -> None:
            said.append(f"scatter {tuple(whole.shape)}")
            part.copy_(whole[len(part) :])

    axis = distributed.NcclAxis(Many(), 1, 2)
    parts = [torch.zeros(2, 3), torch.ones(1)]
    wholes = [torch.empty(4, 3), torch.empty(2)]
    axis.start_all_gather_many(parts, wholes).wait()
    assert said == ["start", "gather (2, 3) True", "gather (1,) True", "end"]
    assert wholes[0].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2 and wholes[1].tolist() == [1.0, 2.0]
    said.clear()
    found = axis.start_reduce_scatter_many(wholes).wait()
    assert said == ["start", "scatter (4, 3)", "scatter (2,)", "end"]
    assert found[0].tolist() == [[1.0] * 3] * 2 and found[1].tolist() == [2.0]
    assert not distributed.GlooAxis.moves_many


def test_settings_of_nccl_are_defaults() -> None:
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    nccl_settings(environment, pipeline=False)
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3" and "NCCL_RUNTIME_CONNECT" not in environment
    assert environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    environment = {}
    nccl_settings(environment, pipeline=True)
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == environment["NCCL_RUNTIME_CONNECT"] == "0"


def test_a_gpu_has_a_queue_for_each_stream() -> None:
    """Otherwise a receive that is posted ahead may hold up the send that its peer waits for."""
    environment: dict[str, str] = {}
    for kept in ("32", "8"):
        own_device("cpu", Together(lone_store(), 0, 1), environment)
        assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == kept
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"


def test_a_start_forgets_what_an_ended_one_told_its_monitors() -> None:
    class Caught:
        def wait(self, seconds: float) -> bytes:
            time.sleep(seconds)
            return b""

    store = dist.HashStore()
    store.set("exception_dump", "1")
    store.set("other", "kept")
    meetings = [WatchedStore(LauncherVariables(rank, 2, "localhost", 1), 20.0, Caught()) for rank in range(2)]  # type: ignore[arg-type]
    other = threading.Thread(target=meetings[1].session, args=(store,))
    other.start()
    meetings[0].session(store)
    other.join()
    assert not store.check(["exception_dump"]) and store.check(["other"])


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_ends_with_its_groups(fails: bool, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the watch still looks, and before rank 0 lets go of the store; one that fails breaks them off."""
    said: list[str] = []

    class Comm:
        def __init__(self, **given: Any) -> None: ...

        def __getattr__(self, name: str) -> Any:
            return lambda: said.append(name)

    class Watching(train.Watchdog):
        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            said.append("unwatched")

    def trained(*given: Any) -> None:
        said.append("trained")
        if fails:
            raise UsageError("P0528", "cause", "help", alike=True)

    monkeypatch.setattr(distributed, "DistributedComm", Comm)
    monkeypatch.setattr(train, "common_store", lambda *given: lone_store())
    monkeypatch.setattr(train, "world", lambda: LauncherVariables(0, 1))
    monkeypatch.setattr(train, "world_size", lambda: 8)
    monkeypatch.setattr(train, "Watchdog", Watching)
    monkeypatch.setattr(train, "train", trained)
    monkeypatch.setattr(train, "materialise", lambda *given: None)
    with imported_from(package):
        job = train.parse(["--device", "cpu"], package)
        monkeypatch.setattr(Together, "broadcast", lambda self, text: text)
        monkeypatch.setattr(Together, "first_problem", lambda self, problem: problem)
        if fails:
            with pytest.raises(UsageError):
                train.run_this_rank(job, train.Task(train.prepared, train.train))
        else:
            train.run_this_rank(job, train.Task(train.prepared, train.train))
    ends = ["trained", "unwatched", "abort"] if fails else ["trained", "barrier", "disconnect", "unwatched", "close"]
    assert said == ends


class Machine:
    """Processes with their environment and what GPUs each sees, by uuid."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seen: list[tuple[str, ...]], names: list[str]) -> None:
        self._here = threading.local()
        self.seen, self.names = seen, names
        cuda, here = torch.cuda, self._here
        monkeypatch.setattr(cuda, "device_count", lambda: len(here.seen))
        properties = lambda index: type("P", (), {"uuid": here.seen[index]})  # noqa: E731
        monkeypatch.setattr(cuda, "get_device_properties", properties)
        monkeypatch.setattr(cuda, "set_device", lambda device: None)
        monkeypatch.setattr("partc.runtime.processes.devices.hostname", lambda: here.name)

    def devices(self, local: list[int], wanted: str = "auto") -> list[torch.device | UsageError]:
        """By rank."""
        store, found = lone_store(), dict[int, Any]()

        def run(rank: int) -> None:
            self._here.seen, self._here.name = self.seen[rank], self.names[rank]
            try:
                together = Together(store, rank, len(local))
                found[rank] = own_device(wanted, together, {"LOCAL_RANK": str(local[rank])})  # type: ignore[arg-type]
            except UsageError as error:
                found[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(local))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[rank] for rank in range(len(local))]


FOUR = ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("seen", "local", "wanted", "expected"),
    [
        ([FOUR] * 4, [0, 1, 2, 3], "auto", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ([FOUR] * 2, [0, 1], "auto", ["cuda:0", "cuda:1"]),
        ([("a",), ("b",), ("c",)], [0, 1, 2], "auto", ["cuda:0"] * 3),  # as SLURM's --gpus-per-task shows them
        ([("a",), ("b",)], [0, 0], "auto", ["cuda:0"] * 2),
        ([()] * 3, [0, 1, 2], "auto", ["cpu"] * 3),
        ([FOUR] * 8, list(range(8)), "cpu", ["cpu"] * 8),
        ([("a",)] * 2, [0, 1], "auto", "ranks . and . .* both see one alone, a"),
        ([FOUR] * 2, [0, 0], "auto", "ranks . and . .* both see one alone, a"),
        ([FOUR] * 8, list(range(8)), "auto", r"rank [4-7] is process [4-7] of node0, where it sees 4 GPUs"),
        ([FOUR, FOUR, (), ()], [0, 1, 0, 1], "auto", r"rank [23] \(node0\) sees no GPU, and rank 0 some"),
        ([(), FOUR], [0, 0], "auto", r"rank 1 \(node0\) sees 4 GPUs, and rank 0 none"),
        ([()] * 2, [0, 1], "cuda", r"rank [01] \(node0\) sees no GPU"),
    ],
)
def test_every_rank_has_its_own_gpu_or_none_has(
    seen: list[tuple[str, ...]], local: list[int], wanted: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, seen, ["node0"] * len(seen))
    found = machine.devices(local, wanted)
    if isinstance(expected, list):
        assert list(map(str, found)) == expected
        return
    texts = {str(each) for each in found}
    assert len(texts) == 1 and all(isinstance(each, UsageError) and each.alike for each in found)
    with pytest.raises(UsageError, match=f"P0540: not every rank has a GPU of its own: {expected}"):
        raise found[0]  # type: ignore[misc]


class Event:
    """The device comes to events only as far as a test lets it."""

    come = 0
    recorded = 0

    def record(self) -> None:
        Event.recorded += 1
        self.number = Event.recorded

    def query(self) -> bool:
        return self.number <= Event.come


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Clock:
    import contextlib

    Event.come = Event.recorded = 0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    clock = Clock()
    clock.follow(CUDA)
    return clock


def test_a_report_says_what_the_device_is_at(followed: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, now = followed, [100.0]
    monkeypatch.setattr("partc.runtime.clock.time.monotonic", lambda: now[0])
    clock.entering("setup")
    Event.come = 1
    assert clock.doing == "setup" and clock.waited == 0
    clock.step = 7
    for name in ("0F0", "0B0", "the update"):
        clock.entering(name, "work")
    assert clock.doing == "setup on its GPU (the host is at the update of step 7)"
    Event.come = 2  # in its forward pass there is a collective that never ends
    assert clock.doing == "0F0 of step 7 on its GPU (the host is at the update of step 7)"
    now[0] = 700.0
    assert clock.doing.startswith("0F0 of step 7 on its GPU") and clock.waited == 600.0
    Event.come = 3
    assert clock.doing.startswith("0B0 of step 7 on its GPU") and clock.waited == 0
    Event.come = 4
    assert clock.doing == "the update of step 7" and clock.waited == 0
    clock.entering("data")
    Event.come = 5
    clock.entering("0F0", "work")
    assert clock.doing == "data of step 7 on its GPU (the host is at 0F0 of step 7)"


def test_what_is_recorded_is_no_place_of_the_devices(followed: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    followed.entering("0F0", "work")
    assert Event.recorded == 0 and followed.doing == "0F0"


def test_a_device_that_fails_is_told_and_is_no_lost_store(followed: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def query(event: Event) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")

    followed.entering("setup")
    followed.entering("0F0")
    monkeypatch.setattr(Event, "query", query)
    assert "CUDA error: an illegal memory access" in followed.doing and "\n" not in followed.doing


def test_the_clock_of_one_axis_is_not_anothers() -> None:
    """A view of an axis for what is waited for at once is the axis, but for that."""
    axis = communication.Axis(1, 4)
    assert axis.at_once is axis and axis.overlaps


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without GPUs")
def test_gpus_that_are_asked_for_and_not_there_are_an_error_of_all(tmp_path: Path) -> None:
    build = partc.compile(EXAMPLES / "mlp.py", mesh="2").write(tmp_path / "build")
    done = run_train(build, "--device", "cuda", real=True)
    said = done.stderr.count("error P0540: not every rank has a GPU of its own: rank ")
    assert done.returncode and said == 1 and "--device cpu" in done.stderr, done.stderr
    done = run_train(build, "--device", "cuda")
    assert done.returncode == 2 and "P0540: this process sees no GPU" in done.stderr
    assert run_train(build, "--device", "cpu", "--steps", 1, real=True).returncode == 0


def test_fewer_gpus_than_ranks_are_told_in_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = partc.compile(EXAMPLES / "mlp.py", mesh="2").write(tmp_path / "build")
    for count, told in ((0, False), (1, True), (2, False)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert ("--device cpu" in " ".join(torchrun_command(build, []))) == told
        assert torchrun_command(build, ["--device", "cuda"]).count("--device") == 1


def test_a_device_that_stands_still_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's kernels wait forever: whose device has not moved for as long as a rank may wait is named, and all stop."""

    class Stuck(Clock):
        waited = 0.3  # type: ignore[assignment]
        doing = "0F1 of step 3 on its GPU (the host is at the update of step 3)"  # type: ignore[assignment]

    said: list[Any] = []
    ended = threading.Event()

    def leave(why: str, rank: int, doing: str, code: int, **how: object) -> None:
        said.append((why, rank, doing, code))
        ended.set()
        raise RuntimeError("left")

    monkeypatch.setattr(watchdog, "end_process", leave)
    monkeypatch.setattr(threading, "excepthook", lambda given: None)
    for timeout, stops in ((600.0, False), (0.2, True)):
        said.clear()
        ended.clear()
        broken: list[str] = []
        with (
            Caught(checkpoints=False) as caught,
            watchdog.Watchdog(
                lone_store(), LauncherVariables(0, 1), caught, Stuck(), timeout, None, [partial(broken.append, "off")]
            ),
        ):
            assert ended.wait(10.0 if stops else 2.5) == stops
        if stops:
            where = "0F1 of step 3 on its GPU (the host is at the update of step 3)"
            assert said[0] == (f"rank 0 has not moved for 0.2 s in {where}", 0, where, 1) and broken[0] == "off"


def test_what_breaks_off_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "ABORTED", 0.2)
    called: list[str] = []
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError), watchdog.breaking_off() as leaving:
        leaving.append(lambda: called.append("first") or 1 / 0)  # type: ignore[arg-type,func-returns-value]
        leaving.append(lambda: time.sleep(20))
        raise ZeroDivisionError
    assert called == ["first"] and time.monotonic() - began < 10
