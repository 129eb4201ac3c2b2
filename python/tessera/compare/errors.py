"""What ends the program with one line: a wrong option, or something that this machine does not have."""


class WrongUse(Exception):
    """An option that cannot be served; the message names it, what was given, what is accepted."""


def require(holds: bool, flag: str, given: object, accepted: str) -> None:
    if not holds:
        raise WrongUse(f"{flag}: {given}, accepted {accepted}")
