"""`fastserve simulate`: the serving core with a cost model in place of workers."""
