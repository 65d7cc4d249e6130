"""What goes wrong between ranks. Without torch, as the driver reads them too."""


class GroupError(RuntimeError):
    """The ranks could not be brought together, or a collective failed; the message names rank and operation."""


class CollectiveError(GroupError):
    """A collective failed because of another rank: it is gone, or did not come in time."""
