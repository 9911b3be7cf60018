"""Taps on their way from the stages that make them to the pipeline ranks that train the draft on them.

One-way and detached. Nothing here knows the schedule: a stage sends after its forward, a sink
takes after its first backward of the same microbatch, and in between lies everything the message needs.
Senders never wait, so no ring is too short to make progress; `order.ring_depth` makes it long enough that no
message finds its receive not yet posted.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchspec.errors import TapError
from torchspec.records import Batch

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_HEADER = ("step", "stage", "microbatch", "rows", "dtype", "pack")
_NEVER_SENT = 0x7A9  # a tag that no message carries


class MicrobatchInfo(NamedTuple):
    """What sink and source must agree on of a microbatch: rows of this rank, and the pack they are of."""

    rows: int
    signature: int

    @classmethod
    def of(cls, batch: Batch) -> MicrobatchInfo:
        return cls(len(batch.tokens), zlib.crc32(batch.cu_seqlens.numpy().tobytes()))


class _Message(NamedTuple):
    works: list[dist.Work]
    tensors: list[Tensor]
    """Header, then taps."""


@dataclass(kw_only=True, slots=True)
class _Outbox:
    """Messages of one stage to one sink that are perhaps still under way."""

    depth: int
    under_way: deque[_Message] = field(default_factory=deque)


@dataclass(kw_only=True, slots=True)
class _Inbox:
    """Receives of one stage's messages to this rank; `jobs` are the microbatches, in order."""

    jobs: list[int]
    posted: deque[_Message] = field(default_factory=deque)
    received: int = 0
    consumed: int = 0


def connect(
    group: dist.ProcessGroup, ways: Sequence[tuple[int, int]], rank: int, device: torch.device
) -> None:
    """Send one element along each way (from, to) of a group, in one order on all its ranks.

    Why: NCCL makes a pair's communicator at its first message and waits for both ranks; two ranks whose first
    messages are to receive from each other would wait for ever.
    """
    token = torch.zeros(1, device=device)
    for source, sink in ways:
        if rank == source != sink:
            dist.send(token, group=group, group_dst=sink)
        elif rank == sink != source:
            dist.recv(token, group=group, group_src=source)


class TapChannel:
    """The channel of one pipeline; every rank of it holds one.

    A step is `begin`, any number of `send` and `take`, `finish`. The same instance serves all steps.

    Args:
        rank: of this process in its pipeline.
        stage_ranks: pipeline rank of each stage.
        sources: how many taps each stage makes; stages that make none are left out.
        groups: a process group over the pipeline for each source, used by nothing else. On CUDA each has a
            communicator and a stream of its own, so sends overlap with what the stage computes next.
        width: of a tap's rows.
        timeout_s: longest wait for a message. CUDA streams wait by themselves: there the groups' own
            timeout counts.
    """

    def __init__(
        self,
        *,
        rank: int,
        stage_ranks: Sequence[int],
        sources: Mapping[int, int],
        groups: Mapping[int, dist.ProcessGroup],
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.stage_ranks = list(stage_ranks)
        self.sources = dict(sources)
        self.groups = dict(groups)
        self.width, self.dtype, self.device = width, dtype, device
        self.timeout_s = timeout_s
        self.step = 0
        self.sent = {stage: 0 for stage in self.sources}
        self.bytes_sent = 0
        """Of taps alone, in this step."""
        self.seconds_waited = 0.0
        """In `take`, in the last step: of the host, or on CUDA of the stream."""
        self._infos: list[MicrobatchInfo] = []
        self._draft_ranks: list[int] = []
        self._local: dict[tuple[int, int], list[Tensor]] = {}
        self._outboxes: dict[tuple[int, int], _Outbox] = {}
        self._inboxes: dict[int, _Inbox] = {}
        self._unchecked: list[tuple[Tensor, list[int]]] = []
        self._stream_waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._poison = ""

    def begin(
        self,
        infos: Sequence[MicrobatchInfo],
        draft_ranks: Sequence[int],
        depths: Mapping[tuple[int, int], int],
    ) -> None:
        """Start a step and post its first receives.

        Args:
            infos: of each microbatch, equal on all ranks of the pipeline.
            draft_ranks: pipeline rank that takes each microbatch's taps.
            depths: `order.ring_depth` of each (source, sink) on different ranks.
        """
        self._refuse_poisoned()
        self.step += 1
        self._infos, self._draft_ranks = list(infos), list(draft_ranks)
        self.sent = {stage: 0 for stage in self.sources}
        self.bytes_sent, self.seconds_waited = 0, 0.0
        self._outboxes = {
            (stage, sink): _Outbox(depth=depths[stage, sink])
            for stage in self.sources
            if self.stage_ranks[stage] == self.rank
            for sink in {*self._draft_ranks} - {self.rank}
        }
        mine = [m for m, sink in enumerate(self._draft_ranks) if sink == self.rank]
        foreign = [stage for stage in self.sources if self.stage_ranks[stage] != self.rank]
        self._inboxes = {stage: _Inbox(jobs=mine) for stage in foreign if mine}
        for stage, inbox in self._inboxes.items():
            for m in mine[: depths[stage, self.rank]]:
                inbox.posted.append(self._post(stage, m))

    def send(self, stage: int, microbatch: int, taps: Sequence[Tensor]) -> None:
        """Hand over what `stage` made of `microbatch`, [rows, width] each; must not be written to any more.

        Returns at once. To the own rank the taps go by reference.
        """
        self._refuse_poisoned()
        assert len(taps) == self.sources[stage]
        sink = self._draft_ranks[microbatch]
        self.sent[stage] += 1
        tensors = [tap.detach() for tap in taps]
        if sink == self.rank:
            self._local[stage, microbatch] = tensors
            return
        outbox = self._outboxes[stage, sink]
        if len(outbox.under_way) == outbox.depth:  # the schedule says that this one was taken: no wait
            self._wait(outbox.under_way.popleft(), f"a send of stage {stage} to pipeline rank {sink}")
        rows = len(tensors[0])
        # From pinned memory: an ordinary copy would make the host wait for all that the stage has queued.
        header = torch.tensor(
            self._header(stage, microbatch, rows, tensors[0].dtype), pin_memory=self.device.type == "cuda"
        ).to(self.device, non_blocking=True)
        message = [header, *(tap.contiguous() for tap in tensors)]
        works = [self._transfer(dist.isend, tensor, stage, group_dst=sink) for tensor in message]
        outbox.under_way.append(_Message([work for work in works if work], message))
        self.bytes_sent += sum(tap.nbytes for tap in tensors)

    def take(self, microbatch: int) -> dict[int, list[Tensor]]:
        """The taps of one of this rank's microbatches, by stage; microbatches are taken in order.

        Raises:
            TapError: a message did not come in time, or is not the one expected. The channel is then of no
                use any more, on any rank.
        """
        self._refuse_poisoned()
        taken = {}
        for stage in self.sources:
            if self.stage_ranks[stage] == self.rank:
                if (stage, microbatch) not in self._local:
                    self._fail(f"stage {stage} has not made the taps of microbatch {microbatch}")
                taken[stage] = self._local.pop((stage, microbatch))
                continue
            inbox = self._inboxes[stage]
            message = inbox.posted.popleft()
            self._receive(message, stage, microbatch, inbox)
            inbox.received += 1
            following = inbox.received + len(inbox.posted)
            if following < len(inbox.jobs):
                inbox.posted.append(self._post(stage, inbox.jobs[following]))
            taken[stage] = message.tensors[1:]
        for inbox in self._inboxes.values():
            inbox.consumed += 1
        return taken

    def finish(self) -> None:
        """End the step: every message has been sent, received and taken.

        Raises:
            TapError: one has not.
        """
        self._refuse_poisoned()
        for (stage, sink), outbox in self._outboxes.items():
            while outbox.under_way:
                self._wait(outbox.under_way.popleft(), f"a send of stage {stage} to pipeline rank {sink}")
        for header, expected in self._unchecked:
            self._check(header, expected)
        self.seconds_waited += sum(a.elapsed_time(b) for a, b in self._stream_waits) / 1000
        self._unchecked.clear()
        self._stream_waits.clear()
        total = len(self._draft_ranks)
        for stage, sent in self.sent.items():
            if self.stage_ranks[stage] == self.rank and sent != total:
                self._fail(f"stage {stage} sent the taps of {sent} microbatches, not of {total}")
        for stage, inbox in self._inboxes.items():
            if not inbox.received == inbox.consumed == len(inbox.jobs):
                self._fail(f"not all taps of stage {stage} were taken: {self._counts(inbox)}")
        if self._local:
            self._fail(f"taps that were never taken: {sorted(self._local)} (stage, microbatch)")

    def poison(self, reason: str) -> None:
        """Make this channel fail on all ranks that use it, now or later."""
        if not self._poison:
            self._poison = reason
            poison_groups(self.groups.values(), self.device)

    # Parts

    def _header(self, stage: int, microbatch: int, rows: int, dtype: torch.dtype) -> list[int]:
        signature = self._infos[microbatch].signature
        return [self.step, stage, microbatch, rows, _DTYPES.index(dtype), signature]

    def _transfer(self, op, tensor: Tensor, stage: int, **peer: int) -> dist.Work | None:
        # A rank without rows of this pack exchanges headers alone.
        return op(tensor, group=self.groups[stage], **peer) if tensor.numel() else None

    def _post(self, stage: int, microbatch: int) -> _Message:
        rows = self._infos[microbatch].rows
        header = torch.empty(len(_HEADER), dtype=torch.int64, device=self.device)
        taps = [
            torch.empty(rows, self.width, dtype=self.dtype, device=self.device)
            for _ in range(self.sources[stage])
        ]
        source = self.stage_ranks[stage]
        works = [self._transfer(dist.irecv, x, stage, group_src=source) for x in (header, *taps)]
        return _Message([work for work in works if work], [header, *taps])

    def _receive(self, message: _Message, stage: int, microbatch: int, inbox: _Inbox) -> None:
        what = f"the taps of microbatch {microbatch} from stage {stage} ({self._counts(inbox)})"
        expected = self._header(stage, microbatch, self._infos[microbatch].rows, self.dtype)
        started = time.perf_counter()
        if self.device.type == "cuda":  # a look at the header would make the host wait
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            self._wait(message, what)
            after.record()
            self._stream_waits.append((before, after))
            self._unchecked.append((message.tensors[0], expected))
        else:
            self._wait(_Message(message.works[:1], []), what)
            self._check(message.tensors[0], expected)
            self._wait(_Message(message.works[1:], []), what)
            self.seconds_waited += time.perf_counter() - started

    def _check(self, header: Tensor, expected: list[int]) -> None:
        found = header.tolist()
        if found != expected:
            differ = [
                f"{name} {a}, not {b}" for name, a, b in zip(_HEADER, found, expected, strict=True) if a != b
            ]
            self._fail(
                f"taps of stage {expected[1]}, microbatch {expected[2]}: the message has {', '.join(differ)}"
            )

    def _wait(self, message: _Message, what: str) -> None:
        try:
            for work in message.works:
                if self.device.type == "cuda":
                    work.wait()  # the stream waits, not the host
                else:
                    work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:  # a timeout, or a peer that is gone: gloo has one type for both
            self._fail(f"waited for {what}, parallel.tap_timeout_s = {self.timeout_s:g}: {error}", error)

    def _counts(self, inbox: _Inbox) -> str:
        sent = ", ".join(
            f"{n} of stage {s}" for s, n in self.sent.items() if self.stage_ranks[s] == self.rank
        )
        return (
            f"{inbox.received} received and {inbox.consumed} consumed of {len(inbox.jobs)}; "
            f"this rank has sent {sent or 'none'}"
        )

    def _fail(self, message: str, cause: Exception | None = None) -> None:
        self.poison(message)
        raise TapError(f"pipeline rank {self.rank}: {message}") from cause

    def _refuse_poisoned(self) -> None:
        if self._poison:
            raise TapError(f"pipeline rank {self.rank}: the channel has failed before: {self._poison}")


def poison_groups(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Break the groups' connections: whoever waits for this rank gets an error, and so will all later use.

    gloo's abort is local, so other ranks would not notice. But gloo closes the connection of a wait that
    runs out.
    """
    for group in groups:
        if device.type == "cuda":
            group.abort()
            continue
        for peer in range(group.size()):
            if peer != group.rank():
                try:
                    never = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=_NEVER_SENT)
                    assert never is not None
                    never.wait(timedelta(milliseconds=1))
                except RuntimeError:
                    pass
