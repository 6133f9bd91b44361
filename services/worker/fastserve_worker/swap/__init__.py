"""KV between the device pool and the node's host arena: what is copied when, by which thread, to which memory."""
