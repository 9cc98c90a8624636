"""What has to be copied before a step, pages and recurrent state: frozen values that the mover carries out.

Saves come first: they read pages that the loads, the copies and the step may write.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


def ids(values: list[int]) -> Ids:
    """A list of page ids as an array."""
    return np.array(values, np.int32)


def _none() -> Ids:
    return ids([])


@dataclass(frozen=True)
class Transfer:
    """Pages of one sequence on their way to or from host memory, and its recurrent state with them.

    serial   by which the mover reports about it
    pages    [n] int32 device pages of each group
    slots    [n] int32 host slots of each group
    rows     [0 or 1] int32 running row whose recurrent state goes along
    states   [0 or 1] int32 host slot of that state
    """

    serial: int
    pages: tuple[Ids, ...]
    slots: tuple[Ids, ...]
    rows: Ids = field(default_factory=_none)
    states: Ids = field(default_factory=_none)

    @property
    def num_pages(self) -> int:
        """Pages of all groups."""
        return sum(len(pages) for pages in self.pages)


@dataclass(frozen=True)
class Moves:
    """Everything to be moved before the next step.

    saves     from the device to the host
    loads     from the host to the device
    sources   [n] int32 pages of each group that are copied on the device
    targets   [n] int32 pages of each group that they are copied to
    """

    saves: tuple[Transfer, ...]
    loads: tuple[Transfer, ...]
    sources: tuple[Ids, ...]
    targets: tuple[Ids, ...]

    @property
    def num_copies(self) -> int:
        """Pages copied on the device, of all groups."""
        return sum(len(pages) for pages in self.targets)
