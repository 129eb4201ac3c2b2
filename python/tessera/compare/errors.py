"""Errors that end the program with one line: a wrong option, or something that this machine lacks."""


class WrongUse(Exception):
    """An option that cannot be honoured; the message names it, what was given, what is accepted."""


def require(holds: bool, flag: str, given: object, accepted: str) -> None:
    if not holds:
        raise WrongUse(f"{flag}: {given}, accepted {accepted}")
