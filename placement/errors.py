"""The errors of this package: ValueErrors that name file, layer and position."""


class PlacementError(ValueError):
    """A placement breaks an invariant; the message names layer, expert and slot or rank."""


class PlacementFileError(PlacementError):
    """A placement file is damaged or does not fit; the message names file, layer and position."""


class TopologyError(ValueError):
    """Nodes, ranks or slots that cannot be; the message says what would work."""
