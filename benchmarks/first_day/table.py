"""The table of all checks, in the order of what a first day needs: what is wrong before what is slow."""

from __future__ import annotations

from first_day import equal, failures, machine, premises, speed, training
from first_day.checks import Check

CHECKS = [
    Check("the machine", machine.machine, (1,), 60, alone=True),
    Check("the first communicator", machine.first_communicator, (1,), 120, alone=True),
    *premises.CHECKS,
    *equal.CHECKS,
    *training.CHECKS,
    *failures.CHECKS,
    *speed.CHECKS,
]
