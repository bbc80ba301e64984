"""What speculation asks of a forward. Pure."""

from enum import IntEnum


class CaptureHiddenMode(IntEnum):
    """Of which tokens a forward hands back hidden states."""

    NULL = 0
    LAST = 1  # of those whose logits are wanted
    FULL = 2  # of all
