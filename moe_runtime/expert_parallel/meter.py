"""TransportMeter: what a buffer moved and how long it took, until somebody takes the totals."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class TransportTotals:
    """Of one step of one rank.

    received_rows     rows received, one number per dispatch, in order of the dispatches
    rows_dispatched   rows sent to other ranks in dispatches, as they travel: for transports that send
                      a token once per rank, (token, other rank) pairs
    bytes_dispatched  bytes sent to other ranks in dispatches, headers included; likewise combined
    busy              seconds in which a transfer was under way; with a transport that sees the end of a
                      transfer only by waiting for it (torch.distributed), until that wait returns
    waited            the part of `busy` in which this rank stood still
    """

    received_rows: list[int] = field(default_factory=list)
    rows_dispatched: int = 0
    bytes_dispatched: int = 0
    bytes_combined: int = 0
    busy: float = 0.0
    waited: float = 0.0


class TransportMeter:
    """Owned by a buffer; the engine takes the totals once a step."""

    def __init__(self) -> None:
        self.totals = TransportTotals()

    def transfer(self, *, posted: float, wait_began: float, done: float) -> None:
        """Book one transfer: posted, waited for from `wait_began`, complete at `done` (seconds)."""
        self.totals.busy += done - posted
        self.totals.waited += done - wait_began

    def take(self) -> TransportTotals:
        """The totals since the last call."""
        totals, self.totals = self.totals, TransportTotals()
        return totals
