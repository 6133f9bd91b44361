"""The way of a request through the gateway: admission, the link to the scheduler, one session per request."""
