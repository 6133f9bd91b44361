"""What a stage refuses, and how it says so."""

import grpc

from fastserve_common.errors import FastServeError


class PlanError(ValueError):
    """A plan, or its activations, that this stage cannot carry out. The message says what is wrong with it."""


class StaleEpochError(FastServeError):
    """The stream belongs to an epoch that is over: a newer scheduler, or the same one after a fault, is in charge."""

    code = grpc.StatusCode.FAILED_PRECONDITION
