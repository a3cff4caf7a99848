"""activations: the bytes that a stage keeps for backward, and those that a running piece needs beside.

What a stage keeps for backward of one microbatch is the memory that autograd keeps, each once: a value that several
pieces keep (the residual stream, a mask) is one. The fullest moment is that of a running piece: it has what the pieces
before it keep, and of its own what lives at that moment. What the pieces behind it kept is free again in backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotp.tools.estimation.counts.pieces import ModelPiece, Recorded
from autotp.tools.estimation.counts.record import Record


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The memory of a stage for one microbatch.

    Attributes:
        kept: bytes that backward reads.
        logits: the part of them that is kept behind the last block.
        sent: bytes of the tensors that the stage sends on.
        forward: bytes beyond `kept` at the fullest moment of forward.
        backward: bytes beyond `kept` at the fullest moment of backward.
    """

    kept: int
    logits: int
    sent: int
    forward: int
    backward: int


def stage_memory(pieces: Sequence[ModelPiece], recorded: Recorded) -> StageMemory:
    """Returns the memory of a stage of these pieces, which keeps all for backward."""
    private_bytes, logits, named = 0, 0, dict[str, int]()
    forward = backward = 0  # All bytes at the fullest moment.
    for piece in pieces:
        record = recorded.records[piece.kind]
        # Each record numbers memory anew. Only the name of a value tells that two pieces keep the same.
        names = {m: piece.reads[place] for m, place in record.inputs.items()}
        names |= dict(zip(record.sent_memory, piece.sends, strict=False))
        named |= {names[m]: n for m, n in record.kept.items() if m in names}
        peaks = recorded.peaks.get(piece.kind) or recorded.peaks.setdefault(piece.kind, own_peaks(record))
        before = private_bytes + sum(named.values())
        forward, backward = max(forward, before + peaks["forward"]), max(backward, before + peaks["backward"])
        private_bytes += sum(n for m, n in record.kept.items() if m not in names)
        logits += sum(record.kept[m] for m in record.head if m not in names)
    kept_bytes = private_bytes + sum(named.values())
    last = recorded.records[pieces[-1].kind]
    sent = sum(value.bytes for value in last.sent[: pieces[-1].boundary])
    return StageMemory(
        kept=kept_bytes, logits=logits, sent=sent, forward=forward - kept_bytes, backward=backward - kept_bytes
    )


def own_peaks(record: Record) -> Mapping[str, int]:
    """Returns the most bytes that live at once of what a piece makes itself, in forward and in backward.

    What it keeps for backward lives until backward has read it. What it receives is not among them, nor what it keeps
    of what it sends: other pieces may keep these, too.
    """
    first, last = dict[int, int](), dict[int, int]()
    for i, op in enumerate(record.ops):
        for touch in (*op.reads, *op.writes):
            first.setdefault(touch.memory, i)
            last[touch.memory] = i
    turn = next((i for i, op in enumerate(record.ops) if op.phase != "forward"), len(record.ops))
    changes = [0] * (len(record.ops) + 1)
    for memory, start in first.items():
        is_kept, sent, end = memory in record.kept, memory in record.sent_memory, last[memory]
        # `stage_memory` counts these by name, as other pieces may have them, too.
        if memory in record.held or memory in record.inputs or (is_kept and sent):
            continue
        if is_kept and end < turn:  # No operator of backward is seen that reads it.
            end = len(record.ops) - 1
        # The next piece reads it, so it lives until this piece's forward ends.
        elif sent:
            end = max(end, turn - 1)
        changes[start] += record.bytes[memory]
        changes[end + 1] -= record.bytes[memory]
    now, peaks = 0, {"forward": 0, "backward": 0}
    for i in range(len(record.ops)):
        now += changes[i]
        phase = "forward" if i < turn else "backward"
        peaks[phase] = max(peaks[phase], now)
    return peaks
