"""Prove that every rank's communication matches and that nothing can deadlock.

    0: 0F0  0SEND_F0  0RECV_B0  0B0      holds: each receive finds its value at the head of its channel
    1: 1RECV_F0  1F0  1B0  1SEND_B0      ->     and every collective is entered by its whole group

The pass returns the program unchanged. Every statement must state the collectives that follow from the types of its
parameters and gradients, and every exchange that starts is waited for once. Then it plays the communication of all
ranks. Every pair of stages has a channel in each direction. Sends and receives are posted and do not wait; the first
receive of a channel gets its first send, and the reader of a value waits for it. A collective waits at its start until
every rank of its group is there; waiting at its end would only be more lenient. An operation that differs between
ranks, a value that stays unread or an endless wait is an internal error that names ranks, actions and lines.

The ranks of one stage run the same code and have the same events, so they enter their collectives in the same order.
One rank stands for its stage, and the proof is as fast for 16,384 ranks as for 16.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from partc.communication.events import Entered, Event, Message, events
from partc.errors import InternalError
from partc.ir.mesh import PIPELINE_AXIS, Mesh
from partc.ir.program import Action, Program


def check(program: Program) -> Program:
    """Raises InternalError if the schedule does not fit the program, or if communication does not match."""
    for place, actions in enumerate(program.schedule):
        strays = [action for action in actions if program.place(action.stage) != place]
        if strays:
            raise InternalError(f"pipeline rank {place} has the foreign action {strays[0]}")
        for stage in program.stages_at(place):
            _check_order(program, stage, tuple(action for action in actions if action.stage == stage))
        _check_handed(program, actions)
    places = events(program, crossing=True, proving=True).places
    prove(Mesh(((PIPELINE_AXIS, len(places)),)), dict(enumerate(places)))
    return program


def prove(mesh: Mesh, sequences: Mapping[int, tuple[Event, ...]]) -> None:
    """Play the events of every rank. Raises InternalError if communication differs, stays unread or never ends."""
    _Play(mesh, sequences).run()


def _check_order(program: Program, stage: int, actions: tuple[Action, ...]) -> None:
    """Check that a stage runs each microbatch once forward, then once backward, between its transfers."""
    into = any(transfer.target == stage for transfer in program.sent)
    out = any(transfer.source == stage for transfer in program.sent)
    back_in = any(transfer.source == stage and transfer.gradient for transfer in program.sent)
    back_out = any(transfer.target == stage and transfer.gradient for transfer in program.sent)
    arrive = [*(["RECV_F"] if into else []), "F", *(["SEND_F"] if out else []), *(["RECV_B"] if back_in else [])]
    leave = ["SEND_B"] if back_out else []
    allowed = [[*arrive, "B", *leave], [*arrive, "I", *leave, "W"]]
    if not any(action.kind in ("B", "I", "W") for row in program.schedule for action in row):
        allowed = [arrive]  # a program that only runs forward
    done: dict[int, list[str]] = {index: [] for index in range(program.microbatches)}
    for position, action in enumerate(actions):
        if action.kind == "UNSHARD":
            continue
        if action.kind == "REDUCE_GRAD":
            if position != len(actions) - 1:
                raise InternalError(f"{action} comes before {actions[-1]}")
        elif action.microbatch not in done:
            raise InternalError(f"{action} has a microbatch that doesn't exist")
        else:
            done[action.microbatch].append(action.kind)
    for index, kinds in done.items():
        if kinds not in allowed:
            raise InternalError(f"stage {stage} does {kinds} for microbatch {index}, not {allowed[0]}")


def _check_handed(program: Program, actions: tuple[Action, ...]) -> None:
    """Check stages that share a rank: the producer of a value runs before its reader forward, and after it backward."""
    forward = {(a.stage, a.microbatch): index for index, a in enumerate(actions) if a.kind == "F"}
    backward = {(a.stage, a.microbatch): index for index, a in enumerate(actions) if a.kind in ("B", "I")}
    for item in program.transfers:
        for index in () if program.travels(item) else range(program.microbatches):
            source, target = (item.source, index), (item.target, index)
            if source not in forward:
                continue
            late = forward[source] > forward[target] or (item.gradient and backward[source] < backward[target])
            if late:
                raise InternalError(
                    f"stages {item.source} and {item.target} take microbatch {index} in the wrong order"
                )


class _Channel:
    """The sends between two stages in one direction, and the receives posted for them."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.posted: list[Message] = []
        self.unread: dict[tuple[object, ...], deque[int]] = {}  # numbers of posted receives, by content
        self.read = 0

    def send(self, source: int, target: int, event: Message) -> None:
        self.sent.append(event)
        self._match(source, target, len(self.sent) - 1)

    def post(self, source: int, target: int, event: Message) -> None:
        self.unread.setdefault(event.content, deque()).append(len(self.posted))
        self.posted.append(event)
        self._match(source, target, len(self.posted) - 1)

    def _match(self, source: int, target: int, number: int) -> None:
        if number < min(len(self.sent), len(self.posted)):
            sent, posted = self.sent[number], self.posted[number]
            if sent.content != posted.content:
                raise InternalError(f"rank {target} in {posted}, but rank {source} sent next, in {sent}")

    def arrived(self, rank: int, event: Message) -> bool:
        """Whether the awaited value has been sent; if so, it is marked as read."""
        unread = self.unread.get(event.content)
        if not unread:
            raise InternalError(f"rank {rank} waits for a value whose receive it has not posted, in {event}")
        if len(self.sent) <= unread[0]:
            return False
        unread.popleft()
        self.read += 1
        return True


class _Play:
    """Plays the events of all ranks until no rank can go on."""

    def __init__(self, mesh: Mesh, sequences: Mapping[int, tuple[Event, ...]]) -> None:
        self.mesh = mesh
        self.sequences = sequences
        self.position = dict.fromkeys(sequences, 0)
        self.channels: dict[tuple[int, int, tuple[int, int]], _Channel] = {}
        self.groups: dict[tuple[int, tuple[str, ...], tuple[int, ...]], tuple[int, ...]] = {}

    def run(self) -> None:
        ready = deque(self.sequences)
        while ready:
            for rank in self._advance(ready.popleft()):
                ready.append(rank)
        waiting = [rank for rank, events in self.sequences.items() if self.position[rank] < len(events)]
        if waiting:
            lines = "; ".join(f"rank {rank} in {self._current(rank)}" for rank in waiting[:8])
            raise InternalError(f"deadlock, {len(waiting)} ranks wait: {lines}")
        for (source, target, _), channel in self.channels.items():
            if len(channel.sent) > len(channel.posted):
                unread = channel.sent[len(channel.posted)]
                raise InternalError(f"rank {source} sent a value that rank {target} never receives: {unread}")
            if len(channel.posted) > channel.read:
                unread = channel.posted[-1]
                raise InternalError(f"rank {target} never waits for a value that rank {source} sent: {unread}")

    def _current(self, rank: int) -> Event | None:
        events = self.sequences[rank]
        return events[self.position[rank]] if self.position[rank] < len(events) else None

    def _advance(self, rank: int) -> list[int]:
        """Play a rank until it waits; returns the ranks that can now go on."""
        woken: list[int] = []
        while (event := self._current(rank)) is not None:
            if isinstance(event, Message):
                peer = self._peer(rank, event.place)
                if event.kind == "send":
                    self.channels.setdefault((rank, peer, event.link), _Channel()).send(rank, peer, event)
                    woken.append(peer)
                else:
                    channel = self.channels.setdefault((peer, rank, event.link), _Channel())
                    if event.kind == "recv":
                        channel.post(peer, rank, event)
                    elif not channel.arrived(rank, event):
                        return woken
                self.position[rank] += 1
                continue
            members = self._members(rank, event)
            if not self._all_entered(rank, members, event):
                return woken
            for member in members:
                self.position[member] += 1
            woken.extend(member for member in members if member != rank)
        return woken

    def _all_entered(self, rank: int, members: tuple[int, ...], event: Entered) -> bool:
        """Whether every member has reached the group's next collective. Raises InternalError if these differ."""
        for member in members:
            other = self._current(member)
            if not isinstance(other, Entered) or self._members(member, other) != members:
                return False
            if other.content != event.content:
                raise InternalError(f"rank {rank} in {event}, but rank {member} in {other}")
        return True

    def _peer(self, rank: int, place: int) -> int:
        if not 0 <= place < self.mesh.axis(PIPELINE_AXIS):
            raise InternalError(f"rank {rank} names pipeline rank {place}, which doesn't exist")
        return self.mesh.rank({**self.mesh.coordinate(rank), PIPELINE_AXIS: place})

    def _members(self, rank: int, event: Entered) -> tuple[int, ...]:
        key = (rank, event.axes, event.places)
        if key not in self.groups:
            if event.places:
                members = tuple(self._peer(rank, place) for place in event.places)
                if rank not in members:
                    raise InternalError(f"rank {rank} is not of the group of {event}")
            else:
                members = self.mesh.group(rank, event.axes)
            self.groups[key] = members
        return self.groups[key]
