"""A stand-in for `torch.distributed` whose devices are threads of one process.

A collective is a rendezvous: every member deposits its tensor; the last to arrive computes for all,
in rank order, and wakes those who sleep until it is done: results do not depend on timing, and
nothing polls. The k-th call of each member of a group belongs to its k-th rendezvous, waited for at
once or later.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from meshdsl.backends.engines.failures import CollectiveError, place_of
from meshdsl.backends.engines.stack_sampler import is_of_device
from meshdsl.backends.engines.turns import Gates, Turns
from meshdsl.backends.runtime.values import group_members

if TYPE_CHECKING:
    import torch

    Tensors = tuple[torch.Tensor, ...] | list[torch.Tensor]
    Signature = tuple[tuple[torch.dtype, torch.Size | None], ...]


# --- rendezvous ---------------------------------------------------------------------------------


class CollectiveCall(NamedTuple):
    """The call of one device in a rendezvous; the results go to `outs`, one for each tensor.

    `leaves` are the sizes of the blocks for each member, where they may differ.
    """

    rank: int
    kind: str
    op: str
    tensors: Tensors
    outs: Tensors
    line: int
    leaves: tuple[int, ...] | None = None

    @property
    def is_contiguous(self) -> bool:
        """Whether all memory that is read or written lies in order."""
        for tensor in self.tensors:
            if not tensor.is_contiguous():
                return False
        return self.outs is self.tensors or all(out.is_contiguous() for out in self.outs)

    @property
    def signature(self) -> Signature:
        """What all members agree on: the dtypes and shapes; of blocks that may differ, the dtypes.

        The sizes of those blocks are `leaves`.
        """
        if self.leaves is None:
            return tuple([(tensor.dtype, tensor.shape) for tensor in self.tensors])
        return tuple([(tensor.dtype, None) for tensor in self.tensors])

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor of a call that has one."""
        (tensor,) = self.tensors
        return tensor

    @property
    def out(self) -> torch.Tensor:
        """The result of a call that has one."""
        (out,) = self.outs
        return out


class Meeting:
    """The rendezvous of one collective: its members' calls, any problem, whether it is over.

    `to_come` counts the members that have not arrived. `cancelled`: it cannot take place any more.
    `holder` arrived last, and computes for all. `sent` is what each member sends, if all the same.
    """

    __slots__ = (
        "axes",
        "calls",
        "cancelled",
        "holder",
        "over",
        "problem",
        "ranks",
        "sent",
        "to_come",
    )

    def __init__(self, axes: tuple[str, ...], ranks: list[int]) -> None:
        self.axes, self.ranks = axes, ranks
        self.calls: list[CollectiveCall | None] = [None] * len(ranks)
        self.to_come = len(ranks)
        self.problem = ""
        self.holder: int | None = None
        self.over = self.cancelled = False
        self.sent: SentCollective | None = None

    @property
    def absent(self) -> list[int]:
        """The members that have not arrived yet."""
        return [r for r, call in zip(self.ranks, self.calls, strict=True) if call is None]


class Group:
    """One process group: its rendezvous that some members have not reached, the oldest first."""

    def __init__(self, axes: tuple[str, ...], ranks: list[int]) -> None:
        self.axes, self.ranks = axes, ranks
        self.open: deque[Meeting] = deque()

    def enter(self, position: int, call: CollectiveCall) -> Meeting:
        """Add a call to the first rendezvous without one of this member."""
        for meeting in self.open:
            if meeting.calls[position] is None:
                break
        else:
            meeting = Meeting(self.axes, self.ranks)
            self.open.append(meeting)
        meeting.calls[position] = call
        meeting.to_come -= 1
        if not meeting.to_come:
            self.open.remove(meeting)
        return meeting


def perform(calls: list[CollectiveCall]) -> None:
    """Compute one collective for all members, whose calls come in rank order."""
    if calls[0].leaves is not None:
        _exchange(calls)
    else:
        _KINDS[calls[0].kind](calls)


def _all_reduce(calls: list[CollectiveCall]) -> None:
    """Reduce in place: the results are the tensors."""
    first, *others = calls
    reduce_, copy_ = _in_place(first.op)
    for call in others:
        reduce_(first.tensors, call.tensors)
    for call in others:
        copy_(call.tensors, first.tensors)


@functools.cache
def _in_place(op: str) -> tuple[Callable[[Tensors, Tensors], None], ...]:
    """What reduces lists of tensors into the first, and what copies them."""
    import torch

    return getattr(torch, f"_foreach_{_COMBINE[op]}_"), torch._foreach_copy_


def _all_gather(calls: list[CollectiveCall]) -> None:
    import torch

    for call in calls:
        for index, out in enumerate(call.outs):
            blocks = out.chunk(len(calls))
            torch._foreach_copy_(blocks, [source.tensors[index] for source in calls])


def _reduce_scatter(calls: list[CollectiveCall]) -> None:
    for index in range(len(calls[0].tensors)):
        blocks = [call.tensors[index].chunk(len(calls)) for call in calls]
        for position, call in enumerate(calls):
            _reduce(call.op, [block[position] for block in blocks], call.outs[index])


def _all_to_all(calls: list[CollectiveCall]) -> None:
    blocks = [call.tensor.chunk(len(calls)) for call in calls]
    for index, call in enumerate(calls):
        for target, source in zip(call.out.chunk(len(calls)), blocks, strict=True):
            target.copy_(source[index])


_COMBINE = {"sum": "add", "max": "maximum", "min": "minimum", "prod": "mul"}
"""What reduces two tensors in torch."""


def _send(calls: list[CollectiveCall]) -> None:
    sent, received = calls
    received.out.copy_(sent.tensor)


_KINDS = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send": _send,
}


def _exchange(calls: list[CollectiveCall]) -> None:
    """Blocks of any size."""
    import torch

    parts = [torch.split(call.tensor, list(call.leaves or ())) for call in calls]
    for index, call in enumerate(calls):
        call.out.copy_(torch.cat([blocks[index] for blocks in parts]))


def _reduce(op: str, parts: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """The parts reduced in order, into `out`, which may be the first of them."""
    import torch

    combine = getattr(torch, _COMBINE[op])
    if len(parts) == 1:
        return out.copy_(parts[0])
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)
    return out


# --- torch.distributed --------------------------------------------------------------------------


FILE = "<device program>"
"""The file name that an emitted text is compiled under."""


class Released(BaseException):
    """Ends a device whose collective can no longer take place, or whose run was given up."""


class SentCollective(NamedTuple):
    """One collective of one device, as it took place.

    `payload` is the size of the local input in bytes; of blocks that may differ in size, those for
    others. `line` is that of the emitted text.
    """

    kind: str
    op: str
    axes: tuple[str, ...]
    size: int
    payload: int
    line: int
    exchanged: bool = False

    @property
    def wire_bytes(self) -> int:
        """Bytes that a ring algorithm sends from this device, by the compiler's own formula."""
        from meshdsl.placed.collectives import COLLECTIVES

        if self.exchanged:
            return self.payload
        return COLLECTIVES[self.kind].wire(self.size, self.payload)


class CoalescedOptions:
    """The options of a collective on several tensors; the local engine reads the reduction."""

    reduceOp: str = ""
    asyncOp: bool = False


class Member(NamedTuple):
    """A process group as one device sees it: `groups["rows"]` of the emitted text."""

    dist: LocalDist
    group: Group
    position: int
    rank: int

    def connect(self, source: int, target: int) -> None:
        """Pairs of devices need no groups here."""

    def pair(self, source: int, target: int) -> tuple[Member, int, int]:
        """The group for messages from one device to another, and the ranks of both in it."""
        return self, source, target

    def allreduce_coalesced(self, tensors: list[torch.Tensor], options: CoalescedOptions) -> Work:
        """Begin to overwrite each tensor with its reduction over the group."""
        return self.dist.coalesced(self, "all_reduce", options.reduceOp, tensors, tensors)

    def all_gather_single_coalesced(
        self, outs: list[torch.Tensor], tensors: list[torch.Tensor], options: CoalescedOptions
    ) -> Work:
        """Begin to write every member's blocks, joined along their first dim, into `outs`."""
        return self.dist.coalesced(self, "all_gather", options.reduceOp, tensors, outs)

    def reduce_scatter_single_coalesced(
        self, outs: list[torch.Tensor], tensors: list[torch.Tensor], options: CoalescedOptions
    ) -> Work:
        """Begin to write this member's block of the reduction of each tensor into `outs`."""
        return self.dist.coalesced(self, "reduce_scatter", options.reduceOp, tensors, outs)


class Work(NamedTuple):
    """A collective that one device has issued."""

    dist: LocalDist
    meeting: Meeting
    call: CollectiveCall

    def is_completed(self) -> bool:
        """Whether it has taken place."""
        return self.meeting.over

    def wait(self) -> None:
        """Sleep until it has taken place."""
        self.dist.wait(self.meeting, self.call)


class ReduceOp:
    """The reductions, by their names in `torch.distributed`."""

    SUM, MAX, MIN, PRODUCT = "sum", "max", "min", "prod"


class LocalDist:
    """The `dist` of an emitted text that runs in one process. All methods are thread-safe.

    `lines` maps lines of the emitted text to places of the source. `sent` counts, per device, the
    collectives that took place. Devices run at once, or `in_turns`.
    """

    ReduceOp = ReduceOp
    AllreduceCoalescedOptions = CoalescedOptions
    distributed_c10d = SimpleNamespace(
        AllgatherOptions=CoalescedOptions, ReduceScatterOptions=CoalescedOptions
    )

    def __init__(
        self,
        mesh: dict[str, int],
        groups: tuple[tuple[str, ...], ...],
        lines: Mapping[int, str] | None = None,
        in_turns: bool = False,
    ) -> None:
        self.process_groups = [
            Group(axes, ranks) for axes in groups for ranks in group_members(mesh, axes)
        ]
        self.devices = math.prod(mesh.values())
        self.lines = lines or {}
        self.sent: list[Counter[SentCollective]] = [Counter() for _ in range(self.devices)]
        self._lock = threading.Lock()
        self._gates = (Turns if in_turns else Gates)(self.devices)
        # The pairs that send each other messages: a group of its own for each direction.
        self._pairs: dict[tuple[int, int, int], Group] = {}
        self._waiting: dict[int, Meeting] = {}
        self._verdicts: dict[int, BaseException] = {}
        # By code and instruction, 0 outside of `device`: looked up again in every step of training.
        self._lines: dict[tuple[int, int], int] = {}
        self._sent_by_all: dict[tuple[Any, ...], SentCollective] = {}
        self._ended: set[int] = set()
        self._failed: set[int] = set()
        self._closed = False

    def groups(self, rank: int) -> dict[str, Member]:
        """The groups of one device, by axes."""
        return {
            "+".join(g.axes): Member(self, g, g.ranks.index(rank), rank)
            for g in self.process_groups
            if rank in g.ranks
        }

    def get_world_size(self, group: Member) -> int:
        """The number of devices in the group."""
        return len(group.group.ranks)

    def get_rank(self, group: Member) -> int:
        """The position of this device in the group."""
        return group.position

    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", *, group: Member, async_op: bool = False
    ) -> Work | None:
        """Overwrite `tensor` with the sum, maximum, minimum or product over the group."""
        tensors = (tensor,)
        return self._meet(group, "all_reduce", op, tensors, tensors, async_op=async_op)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, *, group: Member, async_op: bool = False
    ) -> Work | None:
        """Write every member's `tensor` into `output`, joined along its first dim."""
        return self._meet(group, "all_gather", "", (tensor,), (output,), async_op=async_op)

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        op: str = "sum",
        *,
        group: Member,
        async_op: bool = False,
    ) -> Work | None:
        """Write this member's block, along the first dim, of the reduced `tensor` into `output`."""
        return self._meet(group, "reduce_scatter", op, (tensor,), (output,), async_op=async_op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        *,
        group: Member,
        async_op: bool = False,
    ) -> Work | None:
        """Send the i-th block of `tensor` along its first dim to member i.

        With sizes, blocks have these: a step of the name of the calling function.
        """
        if input_split_sizes is None:
            return self._meet(group, "all_to_all", "", (tensor,), (output,), async_op=async_op)
        kind = sys._getframe(1).f_code.co_name.removesuffix("_start").removesuffix("_uneven")
        kind = kind.removesuffix("_counted")
        leaves = tuple(input_split_sizes)
        return self._meet(group, kind, "", (tensor,), (output,), leaves, async_op)

    def coalesced(
        self,
        group: Member,
        kind: str,
        op: str,
        tensors: Tensors,
        outs: Tensors,
    ) -> Work:
        """Begin one collective on several tensors; its results go to `outs`."""
        work = self._meet(group, kind, op, tensors, outs, async_op=True)
        assert work is not None
        return work

    def isend(self, tensor: torch.Tensor, *, group: Member, group_dst: int) -> Work:
        """Begin to send a tensor to a member."""
        return self._pass(group, group.position, group_dst, tensor)

    def irecv(self, tensor: torch.Tensor, *, group: Member, group_src: int) -> Work:
        """Begin to receive a tensor from a member."""
        return self._pass(group, group_src, group.position, tensor)

    def _pass(self, member: Member, source: int, target: int, tensor: torch.Tensor) -> Work:
        """A message: a rendezvous of two, for which neither waits."""
        group = member.group
        with self._lock:
            pair = self._pairs.get((id(group), source, target))
            if pair is None:
                ranks = [group.ranks[source], group.ranks[target]]
                pair = self._pairs[id(group), source, target] = Group(group.axes, ranks)
        endpoint = Member(self, pair, 0 if member.position == source else 1, member.rank)
        work = self._meet(endpoint, "send", "", (tensor,), (tensor,), async_op=True)
        assert work is not None
        return work

    def _every_group(self) -> list[Group]:
        return [*self.process_groups, *self._pairs.values()]

    def begin(self, rank: int) -> None:
        """Let a device run, called by its thread before it does anything else."""
        self._gates.begin(rank)

    def end(self, rank: int, failed: bool) -> None:
        """Record that a device has ended, with an error or normally."""
        with self._lock:
            self._ended.add(rank)
            if failed:
                self._failed.add(rank)
                for group in self._every_group():
                    if rank in group.ranks:
                        self._dismiss(group)
                # It may have been stopped while it computed for others.
                for meeting in [m for m in self._waiting.values() if m.holder == rank]:
                    self._cancel(meeting)
            self._look_for_deadlock()
        self._gates.end()

    @property
    def closed(self) -> bool:
        """Whether every device is released."""
        return self._closed

    def waits(self, rank: int) -> str:
        """The collective that a device waits in; empty where it does not wait."""
        with self._lock:
            meeting = self._waiting.get(rank)
            if meeting is None:
                return ""
            return self._show(self._call_of(rank, meeting), meeting)

    def close(self) -> None:
        """Release every device, now and at its next collective."""
        with self._lock:
            self._closed = True
            for group in self._every_group():
                self._dismiss(group)
        self._gates.open()

    def _meet(
        self,
        member: Member,
        kind: str,
        op: str,
        tensors: Tensors,
        outs: Tensors,
        leaves: tuple[int, ...] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        _, group, position, rank = member
        line = self._line(sys._getframe(2))
        call = CollectiveCall(rank, kind, op, tensors, outs, line, leaves)
        with self._lock:
            if self._closed:
                raise Released
            meeting = group.enter(position, call)
            last = not meeting.to_come
            if last:
                meeting.holder = rank
            elif not async_op:
                self._fall_asleep(rank, meeting)
        if last:
            self._hold(meeting)
        if async_op:
            return Work(self, meeting, call)
        self._end_wait(meeting, call, slept=not last)
        return None

    def wait(self, meeting: Meeting, call: CollectiveCall) -> None:
        """Sleep until a rendezvous that this device has entered is over, and count it as sent."""
        with self._lock:
            sleeps = not meeting.over
            if sleeps:
                self._fall_asleep(call.rank, meeting)
        self._end_wait(meeting, call, sleeps)

    def _end_wait(self, meeting: Meeting, call: CollectiveCall, slept: bool) -> None:
        """Sleep if this device is to, and count the rendezvous as sent."""
        rank = call.rank
        if slept:
            self._gates.sleep(rank)
            verdict = self._verdicts.pop(rank, None)
            if verdict is not None:
                raise verdict
        if meeting.problem:
            raise CollectiveError(meeting.problem)
        if call.kind != "send" or rank == meeting.ranks[0]:
            self.sent[rank][meeting.sent or self._sent(meeting, call)] += 1

    def _sent(self, meeting: Meeting, call: CollectiveCall) -> SentCollective:
        payload = sum(tensor.nbytes for tensor in call.tensors)
        if call.leaves is not None and payload:
            payload -= payload * call.leaves[meeting.ranks.index(call.rank)] // sum(call.leaves)
        about = (call.kind, call.op, meeting.axes, len(meeting.ranks), payload, call.line)
        return SentCollective(*about, call.leaves is not None)

    def _sent_by(self, meeting: Meeting, call: CollectiveCall, made: Signature) -> SentCollective:
        """What each member sends, if it is the same for all."""
        key = (call.kind, call.op, call.line, meeting.axes, made)
        sent = self._sent_by_all.get(key)
        if sent is None:
            sent = self._sent_by_all[key] = self._sent(meeting, call)
        return sent

    def _fall_asleep(self, rank: int, meeting: Meeting) -> None:
        """Let a device wait; the lock is held."""
        if self._closed or meeting.cancelled:
            raise Released
        self._waiting[rank] = meeting
        failed = self._failed
        if failed and (meeting.holder in failed or not failed.isdisjoint(meeting.absent)):
            self._cancel(meeting)
        else:
            self._look_for_deadlock()

    def _hold(self, meeting: Meeting) -> None:
        """Compute for all members, which have all arrived, and wake those that wait."""
        calls = [call for call in meeting.calls if call is not None]
        signatures = [call.signature for call in calls]
        problem = self._disagreement(meeting, calls, signatures)
        try:
            if not problem:
                perform(calls)
        except Exception as error:  # of shapes that no collective takes: every member fails alike
            problem = f"{self._show(calls[0], meeting)}: {error}"
        if calls[0].leaves is None:
            meeting.sent = self._sent_by(meeting, calls[0], signatures[0])
        with self._lock:
            meeting.problem, meeting.over = problem, True
            for rank in meeting.ranks:
                if self._waiting.get(rank) is meeting:
                    del self._waiting[rank]
                    self._gates.wake(rank)

    def _dismiss(self, group: Group) -> None:
        """Cancel the rendezvous that cannot take place any more."""
        for meeting in group.open:
            if self._closed or not self._failed.isdisjoint(meeting.absent):
                self._cancel(meeting)

    def _cancel(self, meeting: Meeting) -> None:
        meeting.cancelled = True
        for rank in [r for r in meeting.ranks if self._waiting.get(r) is meeting]:
            self._wake(rank, Released())

    def _wake(self, rank: int, verdict: BaseException) -> None:
        self._verdicts[rank] = verdict
        del self._waiting[rank]
        self._gates.wake(rank)

    def _look_for_deadlock(self) -> None:
        """When no device can go on, report to each waiting one the collective it waits for."""
        if not self._waiting or len(self._waiting) + len(self._ended) < self.devices:
            return
        stuck = sorted(self._waiting.items())
        for_ended = {r for r, m in stuck if not self._ended.isdisjoint(m.ranks)}
        verdicts: dict[int, BaseException] = {
            rank: CollectiveError(self._stuck(rank, meeting))
            if rank in for_ended or not for_ended
            else Released()
            for rank, meeting in stuck
        }
        for _, meeting in stuck:
            meeting.cancelled = True
        for rank, verdict in verdicts.items():
            self._wake(rank, verdict)

    def _stuck(self, rank: int, meeting: Meeting) -> str:
        call, absent = self._call_of(rank, meeting), meeting.absent
        other = next((r for r in absent if r in self._ended), absent[0])
        waits = f"device {rank} waits in {self._show(call, meeting)} for device {other}"
        if other in self._ended:
            return f"{waits}, which ended without joining"
        elsewhere = self._waiting[other]
        there = self._show(self._call_of(other, elsewhere), elsewhere)
        return f"{waits}, which waits in {there}"

    def _call_of(self, rank: int, meeting: Meeting) -> CollectiveCall:
        call = meeting.calls[meeting.ranks.index(rank)]
        assert call is not None, "a device that waits has made a call"
        return call

    def _disagreement(
        self, meeting: Meeting, calls: list[CollectiveCall], signatures: list[Signature]
    ) -> str:
        """The problem when the members do not all make the same call; else empty.

        Processes send memory as it lies, and so may only be given what lies in order.
        """
        for call in calls:
            if not call.is_contiguous:
                return f"{self._show(call, meeting)}: its memory is not contiguous"
        first, *others = calls
        for call, signature in zip(others, signatures[1:], strict=True):
            is_same = call.line == first.line and call.op == first.op and call.kind == first.kind
            if not (is_same or call.kind == "send") or signature != signatures[0]:
                one, other = self._show(first, meeting), self._show(call, meeting)
                return f"device {first.rank} is in {one} while device {call.rank} is in {other}"
        return ""

    def _show(self, call: CollectiveCall, meeting: Meeting) -> str:
        dtype = str(call.tensors[0].dtype).removeprefix("torch.")
        kind = f"{call.kind} {call.op}".rstrip()
        shapes = ", ".join(f"{dtype}{list(tensor.shape)}" for tensor in call.tensors)
        about = f"{kind} of {shapes} over {', '.join(meeting.axes)}"
        return f"{about} at {place_of(self.lines, call.line)}"

    def _line(self, frame: FrameType | None) -> int:
        """The line of `device`, or of a function inside it, that a collective was called from."""
        while frame is not None:
            code = frame.f_code
            if code.co_filename == FILE:
                at = id(code), frame.f_lasti  # to count lines takes the longer the further down
                line = self._lines.get(at)
                if line is None:
                    line = self._lines[at] = frame.f_lineno if is_of_device(code) else 0
                if line:
                    return line
            frame = frame.f_back
        return 0

    # The names of torch before 2.13.
    all_gather_into_tensor = all_gather_single
    reduce_scatter_tensor = reduce_scatter_single
