"""activations: the bytes that a stage keeps for backward, and those that a running piece needs beside.

What a stage keeps for backward of one microbatch is the memory that autograd keeps, each once: a value that several
pieces keep (the residual stream, a mask) is one. Beside it stands what the running piece needs: its transients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotp.estimation.counts.pieces import Piece, Recorded
from autotp.estimation.counts.record import Record


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The memory of a stage for one microbatch.

    Attributes:
        kept: bytes that backward reads.
        logits: the part of them that is kept behind the last block.
        sent: bytes of the tensors that the stage sends on.
        forward: bytes beside `kept` at the fullest moment of forward.
        backward: bytes beside `kept` at the fullest moment of backward.
    """

    kept: int
    logits: int
    sent: int
    forward: int
    backward: int


def stage_memory(pieces: Sequence[Piece], found: Recorded) -> StageMemory:
    """Returns the memory of a stage of these pieces."""
    kept, named = 0, dict[str, int]()
    logits = forward = backward = 0
    for piece in pieces:
        record = found.records[piece.kind]
        names = {m: piece.reads[i] for m, i in record.inputs.items()}
        names |= dict(zip(record.sent_memory, piece.sends, strict=False))
        named |= {names[m]: n for m, n in record.kept.items() if m in names}
        kept += sum(n for m, n in record.kept.items() if m not in names)
        logits += sum(record.kept[m] for m in record.head if m not in names)
        peaks = found.transients.get(piece.kind) or found.transients.setdefault(piece.kind, transients(record))
        forward, backward = max(forward, peaks["forward"]), max(backward, peaks["backward"])
    last = found.records[pieces[-1].kind]
    sent = sum(value.bytes for value in last.sent[: pieces[-1].boundary])
    return StageMemory(kept=kept + sum(named.values()), logits=logits, sent=sent, forward=forward, backward=backward)


def transients(record: Record) -> Mapping[str, int]:
    """Returns the most bytes that live beside what is kept for backward, in forward and in backward."""
    first, last = dict[int, int](), dict[int, int]()
    for i, op in enumerate(record.ops):
        for touch in (*op.reads, *op.writes):
            first.setdefault(touch.memory, i)
            last[touch.memory] = i
    turn = next((i for i, op in enumerate(record.ops) if op.phase != "forward"), len(record.ops))
    changes = [0] * (len(record.ops) + 1)
    for memory, start in first.items():
        if memory in record.held or memory in record.inputs or memory in record.kept:
            continue
        end = max(last[memory], turn - 1) if memory in record.sent_memory else last[memory]
        changes[start] += record.bytes[memory]
        changes[end + 1] -= record.bytes[memory]
    now, most = 0, {"forward": 0, "backward": 0}
    for i in range(len(record.ops)):
        now += changes[i]
        phase = "forward" if i < turn else "backward"
        most[phase] = max(most[phase], now)
    return most
