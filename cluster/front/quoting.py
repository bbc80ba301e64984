"""A user's values as an error message may quote them: short, and always printable."""

from paceline.worker.errors import InvalidRequest

_MAX_CHARS = 64


def shown(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."


def shown_int(value: int) -> str:
    """JSON has integers of any length; Python refuses to print those of thousands of digits."""
    return str(value) if abs(value) < 2**70 else "a number of more than 70 bits"


def check_text(name: str, text: str) -> None:
    """Raises: InvalidRequest: it cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name} has a lone surrogate at character {error.start}, which is not Unicode text; "
            "remove it",
            name,
        ) from None
