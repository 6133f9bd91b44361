"""A load generator for LLM servers: open-loop arrivals, real length distributions, metrics that compare.

Nothing here knows FastServe's inside: it measures any OpenAI-compatible server as it measures ours.
"""
