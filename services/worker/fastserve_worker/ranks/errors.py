"""What ends a rank."""


class TurnOverError(Exception):
    """Rank 0 has gone on to something later: this iteration is of an epoch that is over."""


class RankLostError(Exception):
    """Another rank is gone or failed. What is left of the stage cannot compute and is started anew as a whole."""
